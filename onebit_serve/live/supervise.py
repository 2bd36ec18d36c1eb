"""One task per backend drives its life; it is the only writer of that backend's state.

Everybody else sends events (`want`, `halt`) or reads views. What happens to the child comes back as
events of the episode (one child from spawn to exit) that saw it; news of an earlier episode are
dropped by their number, so a late answer of a dead child cannot move the living one. Every
transition wakes every waiter.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import time
from collections.abc import Callable

import trio

from onebit_serve.core import life as machine
from onebit_serve.core.life import Life, RestartPolicy, State
from onebit_serve.core.plan import BackendPlan
from onebit_serve.core.view import BackendView
from onebit_serve.live import probe
from onebit_serve.live.child import Child, Exit
from onebit_serve.live.log import Log
from onebit_serve.live.upstream import HOST, Upstream

__all__ = ["Backend", "Lease"]

_ANYBODY = -1  # the sender of events that are not news of one child
_POLL_S = 0.02  # a ready backend is seen at once
_POLL_GAP_S = 0.005  # however much the child prints
_HEALTH_ANSWER_S = 30.0
_READY_POLL_S = 15.0
_SETTLE_POLL_S = 0.25
_PORT_TRIES = 5
_CAUSE_LINES = 3
_HINT_AFTER_S = 30.0


class _Episode:
    """One child from spawn to exit."""

    def __init__(self, number: int, port: int, child: Child) -> None:
        self.number = number
        self.port = port
        self.child = child
        self.upstream = Upstream(port)
        self.spawned_s = time.monotonic()
        self.heard_s = self.spawned_s
        self.output = trio.Event()
        self.scope = trio.CancelScope()
        self.leaving = False

    def hear(self) -> None:
        """Note that the child showed a sign of life."""
        self.heard_s = time.monotonic()

    def on_output(self) -> None:
        """Wake the health poll: a line may mean that the model is loaded."""
        self.hear()
        self.output.set()


class Lease:
    """The right to send one request to a child; it ends with the last byte of the reply.

    Attributes:
        upstream: The child's connections.
        sock: The connection in use, while there is one.
        blocks: Blocks of the reply's body received so far.
    """

    __slots__ = ("_backend", "_episode", "blocks", "sock", "upstream")

    def __init__(self, backend: Backend, episode: _Episode) -> None:
        self._backend = backend
        self._episode = episode
        self.upstream = episode.upstream
        self.sock: socket.socket | None = None
        self.blocks = 0

    def alive(self) -> bool:
        """Whether the child this lease was given for still runs and is meant to serve."""
        return not self._episode.leaving

    def cut(self) -> None:
        """End the reply now, as if the child had: nothing more comes on its connection."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def end(self, *, whole: bool) -> None:
        """Give the right back.

        Args:
            whole: Whether the reply came to its end; else the slot may be busy still.
        """
        self._backend.take_back(self, self._episode, whole=whole)


class Backend:
    """One backend: its plan, its life, and the child of the moment.

    Args:
        plan: What to run.
        log: Where to say what happened.
        policy: When to start again.
        stop_s: Seconds from the first TERM to KILL.
        needed: Whether `/health` waits for it.
    """

    def __init__(
        self,
        plan: BackendPlan,
        log: Log,
        *,
        policy: RestartPolicy,
        stop_s: float,
        needed: bool = True,
    ) -> None:
        self.plan = plan
        self.leases: set[Lease] = set()
        self._log = log
        self._policy = policy
        self._stop_s = stop_s
        self._needed = needed
        self._life = Life(since_s=time.monotonic())
        self._episode: _Episode | None = None
        self._changed = trio.Event()
        self._send, self._receive = trio.open_memory_channel[tuple[int, machine.Event]](math.inf)
        self._load_ms: float | None = None
        self._warm_up_ms: float | None = None
        self._abandoned = False
        self._nursery: trio.Nursery | None = None

    def __repr__(self) -> str:
        """Tell the whole state."""
        return f"<Backend {self.view()}>"

    def view(self) -> BackendView:
        """Return what can be seen of it now."""
        life, episode = self._life, self._episode
        last = episode.child.tail.last(1) if episode and life.state is not State.READY else []
        return BackendView(
            name=self.plan.name,
            served_id=self.plan.served_id,
            device=self.plan.device,
            role=self.plan.role,
            binary=self.plan.binary,
            state=life.state,
            since_s=time.monotonic() - life.since_s,
            needed=self._needed,
            port=episode.port if episode else None,
            pid=episode.child.pid if episode else None,
            cause=life.cause,
            degraded=life.degraded,
            load_ms=self._load_ms,
            warm_up_ms=self._warm_up_ms,
            warm_up_skipped=self.plan.warm_up.skip,
            restarts=life.restarts,
            in_flight=len(self.leases),
            abandoned=self._abandoned,
            last_line=last[0] if last else "",
        )

    def want(self) -> None:
        """Ask for it to be running; one that is on its way already goes on."""
        self._post(machine.Wanted())

    def halt(self) -> None:
        """Ask for it to be stopped."""
        self._post(machine.Halted())

    def kill(self) -> None:
        """Kill the child's group at once, without telling anybody."""
        if self._episode:
            self._episode.child.kill()

    async def wait_for(self, condition: Callable[[BackendView], bool]) -> BackendView:
        """Wait until its view satisfies a condition, and return that view."""
        while True:
            changed, view = self._changed, self.view()
            if condition(view):
                return view
            await changed.wait()

    def lease(self) -> Lease | None:
        """Return the right to send it a request now, or `None` while it is not ready."""
        if self._life.state is State.READY and self._episode:
            lease = Lease(self, self._episode)
            self.leases.add(lease)
            return lease
        return None

    def _post(self, event: machine.Event, episode: int | None = None) -> None:
        self._send.send_nowait((_ANYBODY if episode is None else episode, event))

    async def run(self) -> None:
        """Drive the life until cancelled; a child that still runs then is killed."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                async for number, event in self._receive:
                    if number in (_ANYBODY, self._life.starts):
                        self._take(event, from_child=number != _ANYBODY)
            finally:
                self.kill()

    def _take(self, event: machine.Event, *, from_child: bool) -> None:
        before = self._life
        try:
            self._life, effects = machine.step(before, event, time.monotonic(), self._policy)
        except machine.IllegalMoveError:
            if not from_child:
                raise
            return  # news that crossed a stop or an exit on its way here
        self._announce(before, event)
        for effect in effects:
            self._carry_out(effect)
        self._changed.set()
        self._changed = trio.Event()

    def _carry_out(self, effect: machine.Effect) -> None:
        nursery, episode = self._nursery, self._episode
        assert nursery is not None  # noqa: S101 - run() set it before the first event
        match effect:
            case machine.Start():
                self._start(nursery)
            case machine.WarmUp() if episode:
                nursery.start_soon(self._warm, episode)
            case machine.Stop() if episode:
                episode.leaving = True
                episode.upstream.close()
                for lease in self.leases:
                    lease.cut()
                nursery.start_soon(episode.child.stop, self._stop_s)
            case machine.Pause(pause_s=pause_s):
                nursery.start_soon(self._pause, pause_s * random.uniform(1.0, 1.2))  # noqa: S311

    def _announce(self, before: Life, event: machine.Event) -> None:
        life, plan = self._life, self.plan
        state = before.state
        name = os.path.basename(plan.binary)  # noqa: PTH119 - a name, not a file
        facts: dict[str, object] = {"backend": plan.name}
        match event:
            case machine.Warmed(degraded=degraded) if degraded:
                self._log.warning(
                    f"{plan.name} serves but is not warm (degraded): {degraded}", **facts
                )
            case machine.Broken(cause=cause):
                self._log.error(f"the {plan.device} backend is stopped: {cause}", **facts)
            case machine.Exited(cause=cause) if state is not State.STOPPING:
                self._log.error(f"a {plan.device} backend {cause}", **facts)
        if life.state is State.LOADING and state is not State.LOADING:
            self._log.say(f"{plan.served_id} on {plan.device} ({name})", **facts)

    def _start(self, nursery: trio.Nursery) -> None:
        number = self._life.starts
        port = _free_port()
        environment = {k: v for k, v in os.environ.items() if k not in self.plan.unset_env}
        environment.update(self.plan.set_env)
        self._load_ms = self._warm_up_ms = None
        try:
            child = Child.spawn(self.plan.command(port), environment)
        except OSError as error:
            cause = f"could not be started: {error.strerror}: {self.plan.binary}"
            self._post(machine.Exited(cause), number)
            return
        self._episode = _Episode(number, port, child)
        nursery.start_soon(self._live, self._episode)

    async def _live(self, episode: _Episode) -> None:
        """See one child through from spawn to exit."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_healthy, episode)
                ended = await episode.child.run(episode.on_output)
                nursery.cancel_scope.cancel()
            episode.leaving = True
            episode.scope.cancel()
            episode.upstream.close()
            if self._episode is episode:
                self._episode = None
            self._post(self._obituary(episode, ended), episode.number)

    def _obituary(self, episode: _Episode, ended: Exit) -> machine.Exited:
        state = self._life.state
        stolen = state is State.LOADING and _is_taken(episode.port)
        if stolen and self._life.starts < _PORT_TRIES:
            cause = f"found its port {episode.port} taken by another program; it takes another"
            return machine.Exited(cause, again=True)
        lines = " | ".join(episode.child.tail.last(_CAUSE_LINES)) or "(none)"
        return machine.Exited(f"exited ({ended}) while {state.value}; its last lines: {lines}")

    async def _until_healthy(self, episode: _Episode) -> None:
        """Poll `/health` until it is 200 on a port that is the child's own."""
        import psutil  # noqa: F401 - now, while the child loads, not when it is ready

        hinted = False
        while True:
            with trio.move_on_after(_HEALTH_ANSWER_S):
                if await probe.is_healthy(episode.port) and probe.owns_port(
                    episode.child.pid, episode.port
                ):
                    break
            waited_s = time.monotonic() - episode.spawned_s
            if waited_s > _HINT_AFTER_S and not hinted:
                hinted = True
                said = " | ".join(episode.child.tail.last(1)) or "nothing yet"
                self._log.say(
                    f"{self.plan.name} is loading for {waited_s:.0f} s; it said last: {said}"
                )
            await trio.sleep(_POLL_GAP_S)
            with trio.move_on_after(_POLL_S - _POLL_GAP_S):
                await episode.output.wait()
            episode.output = trio.Event()
        self._load_ms = (time.monotonic() - episode.spawned_s) * 1000
        self._post(machine.Healthy(), episode.number)
        episode.hear()
        await self._watch_ready(episode)

    async def _watch_ready(self, episode: _Episode) -> None:
        """Ask a ready backend for its health when nothing else showed lately that it lives."""
        hang_s = self.plan.warm_up.hang_s or math.inf
        while True:
            await trio.sleep(max(1.0, episode.heard_s + _READY_POLL_S - time.monotonic()))
            silent_s = time.monotonic() - episode.heard_s
            if silent_s < _READY_POLL_S or self._life.state is not State.READY:
                continue
            with trio.move_on_after(_HEALTH_ANSWER_S):
                if await probe.is_healthy(episode.port):
                    episode.hear()
                    continue
            if time.monotonic() - episode.heard_s > hang_s:
                cause = f"no answer from /health for {time.monotonic() - episode.heard_s:.0f} s"
                self._post(machine.Broken(cause), episode.number)
                return

    async def _warm(self, episode: _Episode) -> None:
        """Send the warm-up and say how long it took."""
        plan, port, number = self.plan, episode.port, episode.number
        warm_up = plan.warm_up
        if warm_up.skip:
            self._log.say(f"warm-up skipped on port {port} ({warm_up.skip})", backend=plan.name)
            self._post(machine.Warmed(), number)
            return
        with episode.scope:
            async with trio.open_nursery() as nursery:
                if warm_up.hang_s:
                    nursery.start_soon(self._break_if_stuck, episode, warm_up.hang_s)
                result = None
                with trio.move_on_after(warm_up.deadline_s):
                    result = await probe.warm_up(plan, port, episode.hear)
                nursery.cancel_scope.cancel()
            if result is None:
                failure = f"the warm-up was cancelled after {warm_up.deadline_s:g} s"
                self._post(machine.Warmed(degraded=failure), number)
                return
            self._warm_up_ms = result.took_ms
            if not result.failure:
                self._log.say(
                    f"warm-up request on port {port} took {result.took_ms:.0f} ms",
                    backend=plan.name,
                    port=port,
                    took_ms=round(result.took_ms, 1),
                    prompt_tokens=result.prompt_tokens,
                    decode_tokens=result.decode_tokens,
                )
                self._post(machine.Warmed(), number)
                return
            # a child that is dying takes its answers with it: let its exit be heard first
            await trio.sleep(_POLL_S)
            self._post(machine.Warmed(degraded=f"the warm-up failed: {result.failure}"), number)

    async def _break_if_stuck(self, episode: _Episode, hang_s: float) -> None:
        """Declare the child hung when neither a byte nor CPU time shows that it works."""
        import psutil

        try:
            process = psutil.Process(episode.child.pid)
            cpu_s = _cpu_s(process)
            episode.hear()
            while time.monotonic() - episode.heard_s < hang_s:
                every_s = max(min(1.0, hang_s / 10), 0.02)
                await trio.sleep(every_s)
                before_s, cpu_s = cpu_s, _cpu_s(process)
                if cpu_s - before_s > every_s * 0.02:
                    episode.hear()
        except psutil.Error:
            return
        cause = f"no progress for {hang_s:g} s during the warm-up"
        self._post(machine.Broken(cause), episode.number)

    async def _pause(self, pause_s: float) -> None:
        number = self._life.starts
        await trio.sleep(pause_s)
        self._post(machine.PauseOver(), number)

    def take_back(self, lease: Lease, episode: _Episode, *, whole: bool) -> None:
        """Count a request out; the slot of a client who left is busy until the backend says no."""
        self.leases.discard(lease)
        episode.hear()
        if not whole and not episode.leaving and not self._abandoned and self._nursery:
            self._abandoned = True
            self._nursery.start_soon(self._settle, episode)

    async def _settle(self, episode: _Episode) -> None:
        try:
            while not episode.leaving:
                busy = await probe.busy_slots(episode.port)
                if busy is None or busy <= len(self.leases):
                    return
                await trio.sleep(_SETTLE_POLL_S)
        finally:
            self._abandoned = False


def _cpu_s(process: object) -> float:
    times = process.cpu_times()  # type: ignore[attr-defined]
    return float(times.user + times.system)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


def _is_taken(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False
