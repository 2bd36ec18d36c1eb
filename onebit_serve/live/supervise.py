"""One task per backend drives its life; it is the only writer of that backend's state.

Everybody else sends events (`want`, `halt`) or reads views. What happens to the child comes back as
events of the episode (one child from spawn to exit) that saw it; news of an earlier episode are
dropped by their number, so a late answer of a dead child cannot move the living one. Every
transition wakes every waiter.

Requests that cannot go at once wait in one line, first come first served; a lease that ends, a
backend that becomes ready and one that fails move the line.

It is as long as it is since only one place may know all of that state.
"""

from __future__ import annotations

import collections
import contextlib
import math
import random
import time
from collections.abc import Callable

import trio

from onebit_serve.core import admit
from onebit_serve.core import life as machine
from onebit_serve.core.admit import Verdict
from onebit_serve.core.life import Life, RestartPolicy, State
from onebit_serve.core.metrics import Counters
from onebit_serve.core.news import news
from onebit_serve.core.plan import BackendPlan
from onebit_serve.core.view import BackendView, unavailable
from onebit_serve.core.warmup import WarmUpResult
from onebit_serve.core.wire import Refusal
from onebit_serve.live import probe
from onebit_serve.live.episode import Episode, Work
from onebit_serve.live.lease import Lease, RefusedError, ReplacedError, Waiter
from onebit_serve.live.log import Log
from onebit_serve.live.logfile import LogFile
from onebit_serve.live.prompts import PromptKeeper
from onebit_serve.live.ring import LineRing
from onebit_serve.live.shaper import Shaper
from onebit_serve.live.spawn import Spawned
from onebit_serve.live.upstream import GoneError, exchange

__all__ = ["Backend"]

_ANYBODY = -1  # the sender of events that are not news of one child
_SETTLE_POLL_S = 0.25
_PORT_TRIES = 5
_FATAL_IN_A_ROW = 3
_CLEAR_S = 0.5
_OK = 200


class Backend:
    """One backend: its plan, its life, and the child of the moment.

    Args:
        plan: What to run.
        log: Where to say what happened.
        stop_s: Seconds from the first TERM to KILL.
        file: Gets all that its children print, or `None`.

    Attributes:
        plan: What runs.
        output: The last lines of its children.
        counters: What is counted of the requests to it.
        early: A child that was started before the event loop, until it is taken over.
        ended: How its last child ended, in words; empty before the first end.
        prompts: Its warm prompts.
        shaper: Warms its shapes.
        last_end_s: When its last request ended, on the monotonic clock.
        adopted: Set when it goes on under another plan.
        starter: Starts it for a request; told who picked it.
    """

    def __init__(
        self, plan: BackendPlan, log: Log, *, stop_s: float, file: LogFile | None = None
    ) -> None:
        self.plan = plan
        self.output = LineRing()
        self.counters = Counters()
        self.prompts = PromptKeeper(plan, log)
        self.shaper = Shaper(plan, log, self.prompts)
        self._holds = 0
        self.adopted = trio.Event()
        self._file = file
        self.ended = ""
        self._log = log
        self._policy = RestartPolicy(enabled=plan.limits.restart)
        self._stop_s = stop_s
        self._life = Life(since_s=time.monotonic())
        self.early: Spawned | None = None
        self._episode: Episode | None = None
        self._changed = trio.Event()
        self._send, self._receive = trio.open_memory_channel[tuple[int, machine.Event]](math.inf)
        self._leases: set[Lease] = set()
        self._line: collections.deque[Waiter] = collections.deque()
        self._abandoned = False
        self._replaced = False
        self._was_ready = False
        self._fatal_answers = 0
        self._ports_taken = 0
        self._nursery: trio.Nursery | None = None
        self._picked_by = ""
        self.last_end_s: float | None = None
        self.starter: Callable[[Backend, str], None] = Backend.want

    def __repr__(self) -> str:
        """Tell the whole state."""
        return f"<Backend {self.view()}>"

    def view(self) -> BackendView:
        """Return what can be seen of it now."""
        life, episode = self._life, self._episode
        last = episode.child.tail.last(1) if episode and life.state is not State.READY else []
        warm_up = episode.warm_up if episode else None
        return BackendView(
            name=self.plan.name,
            served_id=self.plan.served_id,
            device=self.plan.device,
            role=self.plan.role,
            binary=self.plan.binary,
            state=life.state,
            since_s=time.monotonic() - life.since_s,
            needed=not self.plan.lazy,
            port=episode.port if episode else None,
            pid=episode.child.pid if episode else None,
            cause=life.cause,
            degraded=life.degraded,
            ended=self.ended,
            load_ms=episode.load_ms if episode else None,
            warm_up_ms=warm_up.took_ms if warm_up else None,
            warm_up_skipped=self.plan.warm_up.skip,
            restarts=life.restarts,
            in_flight=len(self._leases),
            waiting=len(self._line),
            abandoned=self._abandoned,
            last_line=last[0] if last else "",
            warm_prompts=self.prompts.standings,
        )

    def adopt(self, plan: BackendPlan) -> None:
        """Go on under a plan that asks for the same child."""
        self.plan = plan
        adopted, self.adopted = self.adopted, trio.Event()
        adopted.set()
        self._move_line()

    def want(self, by: str = "") -> None:
        """Ask for it to be running; one that is on its way already goes on.

        Args:
            by: Who picked it, for the log: `laya`, or nothing.
        """
        self._post(machine.Wanted(by), _ANYBODY)

    def halt(self, *, if_idle: bool = False) -> None:
        """Ask for it to be stopped.

        Args:
            if_idle: Only where it is ready and has nothing to do once this is heard: no request
                can come in between, and none is cut.
        """
        self._post(machine.Halted(if_idle), _ANYBODY)

    @property
    def held(self) -> bool:
        """Whether requests wait in line although the child could take them."""
        return self._holds > 0

    def hold(self) -> None:
        """Let no request go to it, nor start it, until `release`."""
        self._holds += 1

    def release(self) -> None:
        """Take one hold back; after the last, start it where requests wait, or let them go."""
        self._holds -= 1
        if self.held:
            return
        self._move_line()
        if self._line and self._life.state in (State.STOPPED, State.STOPPING):
            self.starter(self, self._line[0].by)

    def hand_over(self) -> None:
        """Send those in line, and all who come, to the backend that took this one's place."""
        self._replaced = True
        while self._line:
            self._line.popleft().moved.set()

    def retire(self) -> None:
        """End its task as soon as it is stopped; nothing may be asked of it afterwards."""
        self._send.close()
        self.output.close()
        if self._file is not None:
            self._file.close()

    async def own_metrics(self) -> str:
        """Return what a ready child says of itself on `/metrics`; empty where it says nothing."""
        episode = self._episode
        if self._life.state is not State.READY or episode is None:
            return ""
        with contextlib.suppress(GoneError):
            reply = await exchange(episode.port, "GET", "/metrics", key=episode.key)
            if reply.status == _OK:
                return reply.body.decode(errors="replace")
        return ""

    async def warm_again(self) -> WarmUpResult | None:
        """Send one more warm-up and return what it came to; `None` while it is not ready."""
        episode = self._episode
        if self._life.state is not State.READY or episode is None:
            return None
        self.shaper.busy()
        result = await probe.warm_up(self.plan, episode.port, episode.key, episode.hear)
        self._climb_on()
        if self.prompts.wanted:  # it took a slot of one
            await self.forget(clear=False)
        return result

    async def forget(self, *, clear: bool = True) -> bool:
        """Empty the prompt cache's slots and warm behind; return whether it has one now."""
        if self._life.state is not State.READY or self._nursery is None:
            return False
        self.shaper.busy()
        await self.prompts.rewarm(self._nursery, clear=clear, wait_s=_CLEAR_S if clear else 0)
        self._climb_on()
        return True

    def pids(self) -> tuple[int, ...]:
        """Return the processes that are waited for here."""
        if self.early:
            return self.early.process.pid, self.early.guard.pid
        return self._episode.child.pids if self._episode else ()

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

    def grant(self) -> Lease | None:
        """Return a lease where a request may go at once, without a look at anything else."""
        return None if self._line else self._free_lease()

    @property
    def idle(self) -> bool:
        """Whether it is ready and nobody has, or may have now, anything of it."""
        ready = self._life.state is State.READY
        waiting = self._line and not self.held
        return ready and not (self._leases or waiting or self._abandoned)

    async def admit(self, park_s: float, *, again: bool = False, by: str = "") -> Lease:
        """Return the right to send a request, after a wait in line where it takes one.

        Args:
            park_s: Seconds to wait at most.
            again: It was let in once and its child died: it goes first, and no full line stops it.
            by: Who picked this backend for it: `laya`, or nothing.

        Raises:
            RefusedError: The request cannot go there, now or in time.
            ReplacedError: It is to go to the backend that took this one's place.
        """
        if self._replaced:
            raise ReplacedError
        lease = self.grant()
        if lease is not None:
            return lease
        first_start = not self.plan.lazy and not self._was_ready
        waiting = 0 if again else len(self._line)
        verdict = admit.decide(
            self.view(), self.plan.limits, waiting=waiting, first_start=first_start
        )
        if isinstance(verdict, Refusal):
            raise RefusedError(verdict)
        waiter = Waiter(by)
        if again:
            self._line.appendleft(waiter)
        else:
            self._line.append(waiter)
        if verdict is Verdict.START_AND_WAIT and not self.held:
            self.starter(self, by)
        began_s = time.monotonic()
        try:
            with trio.move_on_after(park_s):
                await waiter.moved.wait()
        except trio.Cancelled:
            if waiter.lease:
                waiter.lease.end(whole=True)
            raise
        finally:
            if not waiter.moved.is_set():
                self._line.remove(waiter)
        if waiter.lease is not None:
            return waiter.lease
        if waiter.moved.is_set() and waiter.refusal is None:
            raise ReplacedError
        waited_s = time.monotonic() - began_s
        raise RefusedError(waiter.refusal or admit.parked_too_long(self.view(), waited_s))

    def _free_lease(self) -> Lease | None:
        """Return a lease where the child of the moment can take a request.

        One that is gone already, while the news of it are still on their way, cannot.
        """
        episode, most = self._episode, self.plan.limits.max_in_flight
        if self._life.state is not State.READY or episode is None or episode.leaving.is_set():
            return None
        if self.held or (most and len(self._leases) >= most):
            return None
        return self._lease(episode)

    def _lease(self, episode: Episode) -> Lease:
        lease = Lease(self, episode, wants_tail=self.prompts.wanted or self.shaper.active)
        self.prompts.busy()
        self.shaper.busy()
        self._leases.add(lease)
        if len(self._leases) == 1:
            episode.hear()
        return lease

    def _move_line(self) -> None:
        """Let those go who can, and tell those who cannot any more."""
        if self._life.state is State.FAILED:
            self.dismiss(unavailable(self.view()))
        while self._line and (lease := self._free_lease()):
            waiter = self._line.popleft()
            waiter.lease = lease
            waiter.moved.set()

    def dismiss(self, refusal: Refusal) -> None:
        """Tell those in line that they cannot be served."""
        while self._line:
            waiter = self._line.popleft()
            waiter.refusal = refusal
            waiter.moved.set()

    def _post(self, event: machine.Event, number: int) -> None:
        with contextlib.suppress(trio.ClosedResourceError):  # it was retired meanwhile
            self._send.send_nowait((number, event))

    async def run(self) -> None:
        """Drive the life until cancelled; a child that still runs then is killed."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if self.shaper.wanted:
                nursery.start_soon(self.shaper.keep)
            try:
                async for number, event in self._receive:
                    if number in (_ANYBODY, self._life.starts):
                        self._take(self._judged(event), from_child=number != _ANYBODY)
            finally:
                self.kill()
                self.shaper.end()

    def _judged(self, event: machine.Event) -> machine.Event:
        """Let a stolen port be no excuse for ever."""
        if isinstance(event, machine.Exited) and event.again:
            self._ports_taken += 1
            if self._ports_taken >= _PORT_TRIES:
                return machine.Exited(f"{event.cause}; that was the {_PORT_TRIES}th in a row")
        elif isinstance(event, machine.Healthy):
            self._ports_taken = 0
        return event

    def _take(self, event: machine.Event, *, from_child: bool) -> None:
        before = self._life
        if isinstance(event, machine.Halted) and event.if_idle and not self.idle:
            return
        if isinstance(event, machine.Wanted) and not before.state.live:
            self._picked_by = event.by
        try:
            self._life, effects = machine.step(before, event, time.monotonic(), self._policy)
        except machine.IllegalMoveError:
            if not from_child:
                raise
            return  # news that crossed a stop or an exit on its way here
        if isinstance(event, machine.Exited):
            self._bury(before)
        self._was_ready = self._was_ready or self._life.state is State.READY
        self._announce(before, event)
        for effect in effects:
            self._carry_out(effect)
        self._wake()
        self._move_line()
        self._climb_on()

    def _climb_on(self) -> None:
        """Let prompts and shapes that are due be warmed while it is ready and nobody waits."""
        is_free = self._life.state is State.READY and not self._leases and not self._line
        if is_free and self._nursery:
            self.prompts.idle(self._nursery)
            self.shaper.idle(self._nursery)

    def _bury(self, before: Life) -> None:
        episode, self._episode = self._episode, None
        self.prompts.gone()
        self.shaper.gone(died=before.state is not State.STOPPING)
        self.output.end_line()
        if episode is None or episode.ended is None:
            self.ended = "never started"
        elif before.state is State.STOPPING and not before.broken:
            self.ended = f"stopped ({episode.ended})"
        elif episode.killed_for_memory:
            self.ended = "killed for memory"
        elif episode.ended.signal is not None and before.state is not State.STOPPING:
            self.ended = f"crashed ({episode.ended})"
        else:
            self.ended = f"exited ({episode.ended})"

    def _carry_out(self, effect: machine.Effect) -> None:
        nursery, episode = self._nursery, self._episode
        assert nursery is not None  # noqa: S101 - run() set it before the first event
        match effect:
            case machine.Start():
                self._start(nursery)
            case machine.WarmUp() if episode:
                nursery.start_soon(episode.warm)
            case machine.Stop() if episode:
                episode.leave()
                self.prompts.gone()
                self.shaper.gone(died=self._life.broken)
                for lease in self._leases:
                    lease.cut()
                nursery.start_soon(episode.child.stop, self._stop_s)
            case machine.Pause(pause_s=pause_s):
                jitter = random.uniform(1.0, 1.2)  # noqa: S311 - several must not start at once
                nursery.start_soon(self._pause, pause_s * jitter)

    def _start(self, nursery: trio.Nursery) -> None:
        number = self._life.starts
        self._fatal_answers = 0
        early, self.early = self.early, None
        try:
            self._episode = Episode.start(
                number, self.plan, self._log, self._post, self._listen, self._work, early
            )
        except OSError as error:
            cause = f"could not be started: {error.strerror}: {self.plan.binary}"
            self._post(machine.Exited(cause), number)
            return
        self._episode.shaper = self.shaper if self.shaper.wanted else None
        self._episode.prompts = self.prompts if self.plan.role == "chat" else None
        nursery.start_soon(self._episode.run)

    def _listen(self, data: bytes) -> None:
        self.output.feed(data)
        self.prompts.hear(data)
        self.shaper.hear(data)
        if self._file is not None:
            self._file.write(data)

    def _work(self) -> Work:
        return (*(lease.blocks for lease in self._leases), *self.shaper.work) or None

    async def _pause(self, pause_s: float) -> None:
        number = self._life.starts
        await trio.sleep(pause_s)
        self._post(machine.PauseOver(), number)

    def _announce(self, before: Life, event: machine.Event) -> None:
        after, by = self._life, self._picked_by
        for level, line in news(self.plan, before, after, event, self._policy, picked_by=by):
            self._log.say(line, level, backend=self.plan.name)
        if after.state is State.LOADING:
            self._picked_by = ""

    def note_answer(self, episode: Episode, status: int, *, fatal: bool) -> None:
        """Count answers in a row that only a broken backend gives."""
        if not fatal:
            self._fatal_answers = 0
            return
        self._fatal_answers += 1
        if self._fatal_answers == _FATAL_IN_A_ROW:
            cause = f"{_FATAL_IN_A_ROW} answers in a row were HTTP {status} with a compute error"
            self._post(machine.Broken(cause), episode.number)

    def note_reply(self, path: str, body: bytes, tail: bytes) -> None:
        """Learn from the counts at the end of a whole reply; arguments as `PromptKeeper.note`."""
        if self.prompts.wanted:
            self.prompts.note(path, body, tail)
        self.shaper.note(tail, len(self._leases))

    def note_deaf(self, episode: Episode) -> None:
        """Replace a child that takes no connections any more."""
        if self._life.state is State.READY:
            self._post(machine.Broken("it listens no longer"), episode.number)

    def take_back(self, lease: Lease, episode: Episode, *, whole: bool) -> None:
        """Count a request out; the slot of a client who left is busy until the backend says no."""
        self._leases.discard(lease)
        episode.hear()
        if not whole and not episode.leaving.is_set() and not self._abandoned and self._nursery:
            self._abandoned = True
            self._nursery.start_soon(self._settle, episode)
        self._move_line()
        if not self._leases:
            self.last_end_s = time.monotonic()
            self._wake()  # somebody may wait for that to stop it
            self._climb_on()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _settle(self, episode: Episode) -> None:
        try:
            while not episode.leaving.is_set():
                busy = await probe.busy_slots(episode.port, episode.key)
                if busy is None or busy <= len(self._leases):
                    return
                await trio.sleep(_SETTLE_POLL_S)
        finally:
            self._abandoned = False
