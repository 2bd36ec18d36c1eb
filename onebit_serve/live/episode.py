"""One child from spawn to exit: it loads, is warmed, is watched, and its end is told.

What happens is told as events of `core.life`; the backend that owns the episode decides what
follows. Progress, not `/health`, says whether a child that has work is alive: bytes of a reply, CPU
time, movement of a slot. A long prefill is no hang.
"""

from __future__ import annotations

import errno
import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import trio

from onebit_serve.core import life, placement
from onebit_serve.core.caches import describe
from onebit_serve.core.plan import BackendPlan
from onebit_serve.core.warmup import WarmUpResult
from onebit_serve.live import probe, pulse
from onebit_serve.live.child import EXIT_NOTICE_S, Child, Exit
from onebit_serve.live.log import Log
from onebit_serve.live.prompts import PromptKeeper
from onebit_serve.live.shaper import Shaper
from onebit_serve.live.spawn import Spawned, spawn
from onebit_serve.live.upstream import HOST, GoneError, Upstream, exchange

__all__ = ["Episode", "LoadLog", "Work"]

_POLL_S = 0.02  # a backend that is ready is seen at once
_POLL_GAP_S = 0.005  # however much it prints
_HEALTH_ANSWER_S = 30.0
_IDLE_LOOK_S = 15.0
_BUSY_LOOK_S = 5.0
_CAUSE_LINES = 3
_HINT_AFTER_S = 30.0
_LINE_LIMIT_BYTES = 2000
_PLACEMENT_LINES = 200

Work = tuple[int, ...] | None


class Episode:
    """One child of a backend.

    Args:
        number: Which of the backend's children it is.
        plan: What runs.
        child: The process.
        port: Its port.
        key: The API key that only we know, or empty where the program has none.
        log: Where to say what happened.
        tell: Gets the events.
        listen: Gets all that the child prints, piece by piece.
        work: Returns what the child is working on for clients, in numbers that change as it goes
            on, or `None` when it has nothing to do.

    Attributes:
        upstream: Connections to it.
        load_ms: From spawn to healthy, once it is.
        warm_up: What the warm-up came to, once it is over.
        leaving: Set when it is being stopped or is gone.
        prompts: Puts the warm prompts into its cache, where there are any.
        shaper: Warms further shapes than the first request does.
        caches_found: Driver and runtime caches that an earlier run filled.
    """

    def __init__(
        self,
        number: int,
        plan: BackendPlan,
        child: Child,
        port: int,
        key: str,
        log: Log,
        tell: Callable[[life.Event, int], None],
        listen: Callable[[bytes], None],
        work: Callable[[], Work],
    ) -> None:
        self.number = number
        self.plan = plan
        self.child = child
        self.port = port
        self.key = key
        self.upstream = Upstream(port, key)
        self.load_ms: float | None = None
        self.warm_up: WarmUpResult | None = None
        self.leaving = trio.Event()
        self.prompts: PromptKeeper | None = None
        self.shaper: Shaper | None = None
        self.caches_found: tuple[str, ...] = ()
        self.ended: Exit | None = None
        self.killed_for_memory = False
        self._log = log
        self._tell = tell
        self._listen = listen
        self._work = work
        self._placement = LoadLog()
        self._spawned_s = self._heard_s = time.monotonic()
        self._output = trio.Event()
        self._warm_scope = trio.CancelScope()
        self._watch_scope = trio.CancelScope()
        self._healthy = False
        self._warming = False
        self._oom_kills = pulse.oom_kills()

    @classmethod
    def start(
        cls,
        number: int,
        plan: BackendPlan,
        log: Log,
        tell: Callable[[life.Event, int], None],
        listen: Callable[[bytes], None],
        work: Callable[[], Work],
        early: Spawned | None = None,
    ) -> Episode:
        """Spawn a child on a free port, or take one that was spawned before the event loop.

        Raises:
            OSError: The program cannot be started.
        """
        made = early or spawn(plan)
        child = Child(made.process, made.guard)
        episode = cls(number, plan, child, made.port, made.key, log, tell, listen, work)
        episode._spawned_s = made.at_s
        episode.caches_found = made.caches_found
        caches = describe(plan.caches, made.caches_found, made.caches_lacking)
        if caches:
            log.say(f"{plan.name}: {caches}", backend=plan.name)
        if made.slots_lacking:
            log.warning(
                f"{plan.name} is started without --slot-save-path, so that no slots are saved or "
                f"restored: {made.slots_lacking}",
                backend=plan.name,
            )
        return episode

    def hear(self) -> None:
        """Note a sign of life."""
        self._heard_s = time.monotonic()

    def leave(self) -> None:
        """Note that it is not to serve any more."""
        self.leaving.set()
        self.upstream.close()
        self._warm_scope.cancel()
        self._watch_scope.cancel()

    async def run(self) -> None:
        """See the child through to its exit, and tell it; not even cancelling stops that."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._load_and_watch)
                self.ended = await self.child.run(self._on_output)
                nursery.cancel_scope.cancel()
            self.leave()
            self._tell(self._obituary(self.ended), self.number)

    def _on_output(self, data: bytes) -> None:
        self._listen(data)
        if not self._healthy:
            self._placement.feed(data)
            self.hear()
            self._output.set()

    def _obituary(self, ended: Exit) -> life.Exited:
        if not self._healthy and _is_taken(self.port):
            cause = f"found its port {self.port} taken by another program; it takes another"
            return life.Exited(cause, again=True)
        state = "ready" if self._healthy and not self._warming else "warming"
        if not self._healthy:
            state = "loading"
        killed_before, killed_now = self._oom_kills, pulse.oom_kills()
        if str(ended) == "signal SIGKILL" and killed_before is not None and killed_now is not None:
            self.killed_for_memory = killed_now > killed_before
        why = ", killed for memory" if self.killed_for_memory else ""
        lines = " | ".join(self.child.tail.last(_CAUSE_LINES)) or "(none)"
        return life.Exited(f"exited ({ended}{why}) while {state}; its last lines: {lines}")

    async def _load_and_watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._break_if_it_stalls, nursery.cancel_scope)
            nursery.start_soon(self._read_ahead)
            await self._until_healthy()
            nursery.cancel_scope.cancel()
        if self._healthy:
            with self._watch_scope:
                await self._watch()

    async def _read_ahead(self) -> None:
        from onebit_serve.live.prefetch import read_ahead  # while the child starts

        await read_ahead(self.plan, self._log)

    async def _until_healthy(self) -> None:
        """Poll `/health` until it is 200 on a port that is the child's own."""
        import psutil  # noqa: F401 - now, while the child loads, not when it is ready

        owned = False
        while True:
            with trio.move_on_after(_HEALTH_ANSWER_S):
                healthy = await probe.is_healthy(self.port)
                # asked as soon as anybody answers: it takes milliseconds that ready would wait for
                owned = owned or (
                    healthy is not None and probe.owns_port(self.child.pid, self.port)
                )
                if healthy and owned:
                    break
            await trio.sleep(_POLL_GAP_S)
            with trio.move_on_after(_POLL_S - _POLL_GAP_S):
                await self._output.wait()
            self._output = trio.Event()
        fallback = self._fallback()
        if fallback:
            self._tell(life.Broken(fallback), self.number)
            return
        self.load_ms = (time.monotonic() - self._spawned_s) * 1000
        self._healthy = self._warming = True
        self.hear()
        self._tell(life.Healthy(), self.number)

    def _fallback(self) -> str:
        """Return what is wrong with where the weights are, where that may not be; else nothing."""
        device, all_layers = placement.wanted(self.plan.arguments)
        found = placement.judge(self._placement.lines, device, all_layers=all_layers)
        if self.plan.kind != "llama-server" or found.word != "fallback":
            return ""
        if not self.plan.limits.allow_cpu_fallback:
            return f"{found.reason} (allow_cpu_fallback = true accepts that)"
        self._log.warning(f"{self.plan.name}: {found.reason}", backend=self.plan.name)
        return ""

    async def _break_if_it_stalls(self, scope: trio.CancelScope) -> None:
        """End a load that takes too long, or that has shown no progress for too long."""
        limits, hinted = self.plan.limits, False
        last = pulse.take(self.child.pid)
        while True:
            await trio.sleep(_look_every_s(min(limits.load_stall_s, limits.load_limit_s), 1.0))
            now_s = time.monotonic()
            loading_s, silent_s = now_s - self._spawned_s, now_s - self._heard_s
            look = pulse.take(self.child.pid)
            if look and last and look.loaded_since(last):
                self.hear()
            last = look
            cause = ""
            if loading_s > limits.load_limit_s:
                cause = f"not loaded after {limits.load_limit_s:g} s (load_limit_s)"
            elif silent_s > limits.load_stall_s:
                cause = f"no progress in loading for {limits.load_stall_s:g} s (load_stall_s)"
            if cause:
                self._tell(life.Broken(f"{cause}; it said last: {self._said()}"), self.number)
                scope.cancel()
                return
            if loading_s > _HINT_AFTER_S and not hinted:
                hinted = True
                self._log.say(
                    f"{self.plan.name} is loading for {loading_s:.0f} s; it said last: "
                    f"{self._said()}",
                    backend=self.plan.name,
                )

    def _said(self) -> str:
        return " | ".join(self.child.tail.last(1)) or "nothing yet"

    async def warm(self) -> None:
        """Send the warm-up, say how long it took, and tell that it is over."""
        plan = self.plan
        with self._warm_scope:
            degraded = ""
            if plan.warm_up.skip:
                self._log.say(
                    f"warm-up skipped on port {self.port} ({plan.warm_up.skip})", backend=plan.name
                )
            else:
                degraded = await self._warm_up()
                if self.shaper is not None and self.warm_up is not None:
                    await self.shaper.warm(
                        self.port,
                        self.key,
                        self.hear,
                        self.warm_up,
                        cache_found=bool(self.caches_found),
                    )
            if self.prompts is not None:
                await self.prompts.warm(self.port, self.key, self.hear)
            self._warming = False
            self.hear()
            self._tell(life.Warmed(degraded), self.number)

    async def _warm_up(self) -> str:
        """Send the warm-up; return why it failed, or nothing."""
        deadline_s = self.plan.warm_up.deadline_s
        result = None
        with trio.move_on_after(deadline_s):
            result = await probe.warm_up(self.plan, self.port, self.key, self.hear)
        if result is None:
            return f"the warm-up was cancelled after {deadline_s:g} s (deadline_s)"
        self.warm_up = result
        if result.failure:
            await trio.sleep(EXIT_NOTICE_S)
            return f"the warm-up failed: {result.failure}"
        if result.retried:
            self._log.warning(
                f"the warm-up on port {self.port} passed at its second try: {result.retried}",
                backend=self.plan.name,
            )
        self._log.say(
            f"warm-up request on port {self.port} took {result.took_ms:.0f} ms",
            backend=self.plan.name,
            port=self.port,
            took_ms=round(result.took_ms, 1),
            prompt_tokens=result.prompt_tokens,
            decode_tokens=result.decode_tokens,
        )
        return ""

    async def _watch(self) -> None:
        """Notice a child that has work and makes no progress, or is idle and does not answer."""
        hang_s = self.plan.limits.hang_s
        work_before: Work = None
        slots_before: bytes | None = None
        while True:
            busy = self._warming or self._work() is not None
            every_s = _look_every_s(hang_s, _BUSY_LOOK_S if busy else _IDLE_LOOK_S)
            before = pulse.take(self.child.pid) if busy else None
            await trio.sleep(every_s)
            work = self._work()
            if not busy:
                await self._ask_if_silent(every_s)
            elif work != work_before:
                self.hear()
            elif before is not None:
                now = pulse.take(self.child.pid)
                if now is not None and now.worked_since(before, every_s):
                    self.hear()
            silent_s = time.monotonic() - self._heard_s
            if busy and silent_s > hang_s / 2:
                slots = await self._slots(hang_s / 10)
                if slots is not None and slots_before is not None and slots != slots_before:
                    self.hear()
                slots_before = slots
            if time.monotonic() - self._heard_s > hang_s:
                what = "in the warm-up" if self._warming else "on the requests it has"
                if not busy:
                    what = "and no answer from /health"
                self._tell(life.Broken(f"no progress for {hang_s:g} s {what}"), self.number)
                return
            work_before = work

    async def _ask_if_silent(self, silent_s: float) -> None:
        if time.monotonic() - self._heard_s < silent_s:
            return
        with trio.move_on_after(_HEALTH_ANSWER_S):
            if await probe.is_healthy(self.port):
                self.hear()

    async def _slots(self, limit_s: float) -> bytes | None:
        """Return what `/slots` says, as it is: any change of it is movement."""
        with trio.move_on_after(max(limit_s, 0.05)), suppress(GoneError):
            return (await exchange(self.port, "GET", "/slots", key=self.key)).body
        return None


class LoadLog:
    """Keeps the lines of a load's log that say where the weights are."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log."""
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LINE_LIMIT_BYTES:]
        lines = (line[:_LINE_LIMIT_BYTES].decode(errors="replace") for line in whole)
        self.lines += [line for line in lines if placement.tells(line)]
        del self.lines[:-_PLACEMENT_LINES]


def _look_every_s(limit_s: float, most_s: float) -> float:
    """Return how often to look at something that may take so long: eight times within it."""
    return max(0.02, min(limit_s / 8, most_s)) if math.isfinite(limit_s) else most_s


def _is_taken(port: int) -> bool:
    try:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((HOST, port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
