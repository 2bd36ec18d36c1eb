"""Keeps one backend's warm prompts warm: before ready, after a clearing, and in idle moments.

    warm      before ready, for every child anew: the first start, a restart, a lazy one, a reload
    note      what a client's request reused; what it found gone is due for repair
    idle      nobody is waiting: repair, also what the deadline did not suffice for; `busy` cancels
              that at once, since a client came
    rewarm    a person asked for it: behind the traffic, at once
    hear      the child woke from its sleep, which empties its cache

The counts of hits live as long as the backend's plan, over all its children.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from onebit_serve.core import warm_prompts, wire
from onebit_serve.core.http import Reply
from onebit_serve.core.plan import BackendPlan
from onebit_serve.core.warm_prompts import Standing
from onebit_serve.live.child import EXIT_NOTICE_S
from onebit_serve.live.log import Log
from onebit_serve.live.prefix import PromptWarmer
from onebit_serve.live.saves import Saves
from onebit_serve.live.upstream import GoneError, exchange

__all__ = ["TAIL_BLOCKS", "WOKE", "PromptKeeper"]

TAIL_BLOCKS = 8
"""How many of a reply's last blocks are kept to look for its counts."""
_TAIL_BYTES = 16384
_IDLE_S = 0.5  # an agent's next request is often there by then
_REPAIRS_IN_VAIN = 3
_OK, _FAILED = 200, 500
WOKE = b"exiting sleeping state"  # llama-server b10068, on --sleep-idle-seconds


class PromptKeeper:
    """The warm prompts of one backend, over all its children.

    Args:
        plan: The backend.
        log: Where to say what happened.

    Attributes:
        wanted: Whether there are any.
    """

    def __init__(self, plan: BackendPlan, log: Log) -> None:
        self.wanted = bool(plan.prompts.entries)
        self._plan = plan
        self._log = log
        self._entries = plan.prompts.entries
        self._standings = tuple(Standing(entry.label) for entry in self._entries)
        self._warmer: PromptWarmer | None = None
        self._lock = trio.Lock()
        self._repair_scope: trio.CancelScope | None = None
        self._rewarm_scope: trio.CancelScope | None = None
        self._clear_due = False
        self._in_vain = [0] * len(self._entries)
        self._put_back: set[int] = set()  # repaired, and no client came for it since
        self._lost_contact = False
        self._nobody_waits = False

    def __repr__(self) -> str:
        return f"<PromptKeeper {self._plan.name}: {self._warmer}>"

    @property
    def standings(self) -> tuple[Standing, ...]:
        """How each warm prompt stands."""
        return self._warmer.standings if self._warmer else self._standings

    @property
    def at_work(self) -> bool:
        """Whether prompts are being put back, or are about to be."""
        return self._repair_scope is not None or self._rewarm_scope is not None

    async def warm(self, port: int, key: str, hear: Callable[[], None]) -> None:
        """Warm a child that is about to be ready.

        Args:
            port: Its port.
            key: Its API key, or empty.
            hear: Called whenever it shows that it works.
        """
        before = self.standings
        self._warmer = self._make(port, key, hear)
        self._warmer.standings = before
        if not self.wanted:
            return
        self._lost_contact = False
        await self._warmer.warm(self._plan.warm_up.deadline_s)
        self._forget_repairs()
        if self._lost_contact:
            await trio.sleep(EXIT_NOTICE_S)

    def gone(self) -> None:
        """Note that the child is gone, and its cache with it."""
        self.busy()
        if self._rewarm_scope is not None:
            self._rewarm_scope.cancel()
        self._clear_due = False
        why = "its backend is not running"
        self._standings = tuple(
            Standing(one.label, tokens=one.tokens, why=why).carried(one) for one in self.standings
        )
        self._warmer = None

    # ------------------------------------------------------------------------ client traffic

    def note(self, path: str, body: bytes, tail: bytes) -> None:
        """Count what a client's request reused.

        Args:
            path: Its route.
            body: Its body.
            tail: The end of the reply's body.
        """
        cached = warm_prompts.cached_tokens(tail[-_TAIL_BYTES:])
        warmer = self._warmer
        if warmer is None or cached is None:
            return
        index = warm_prompts.entry_asked(path, body, self._entries)
        if index is None:
            return
        warmer.used(index, cached)
        if not warmer.standings[index].evicted:
            self._in_vain[index] = 0
        elif index in self._put_back:
            self._in_vain[index] += 1
            if self._in_vain[index] == _REPAIRS_IN_VAIN:
                label = warmer.standings[index].label
                why = f"clients find it gone after {_REPAIRS_IN_VAIN} repairs"
                warmer.give_up(index, why)
                self._say(f"warm prompt {label} is repaired no more: {why}")
        self._put_back.discard(index)

    def busy(self) -> None:
        """Note that a client's request came: it goes first."""
        self._nobody_waits = False
        self._stop_repair()

    def idle(self, nursery: trio.Nursery) -> None:
        """Note that no client waits for the backend; repair what is due."""
        self._nobody_waits = True
        self._repair_if_due(nursery)

    def _repair_if_due(self, nursery: trio.Nursery) -> None:
        due = self._warmer is not None and self._warmer.due
        if due and self._repair_scope is None:
            self._repair_scope = trio.CancelScope()
            nursery.start_soon(self._repair, self._repair_scope)

    def hear(self, output: bytes) -> None:
        """Look at what the child prints, for its waking from a sleep."""
        if self.wanted and self._warmer is not None and WOKE in output:
            self._warmer.lost_all()
            self._put_back.clear()  # that they are gone now, no client did

    async def _repair(self, scope: trio.CancelScope) -> None:
        with scope:
            # what could not be proven is due again
            while (warmer := self._warmer) is not None and warmer.due:
                await trio.sleep(_IDLE_S)
                async with self._lock:
                    if warmer is self._warmer:
                        await self._repair_once(warmer)
        if self._repair_scope is scope:
            self._repair_scope = None

    async def _repair_once(self, warmer: PromptWarmer) -> None:
        due = warmer.due
        await warmer.repair()
        back = [i for i in due if warmer.standings[i].proven]
        self._put_back.update(back)
        if back:
            labels = ", ".join(warmer.standings[i].label for i in back)
            self._say(f"put back while idle: warm prompt {labels}")
        for one in (warmer.standings[i] for i in due):
            if not (one.proven or one.evicted):
                self._say(f"warm prompt {one.label} is repaired no more: {one.why}")

    def _stop_repair(self) -> None:
        if self._repair_scope is not None:
            self._repair_scope.cancel()
            self._repair_scope = None

    # ---------------------------------------------------------------------- what is asked for

    async def rewarm(self, nursery: trio.Nursery, *, clear: bool, wait_s: float = 0) -> None:
        """Warm again behind the traffic; a run that goes on already is replaced.

        A clearing that such a run still waits for, since a slot is busy, is not forgotten.

        Args:
            nursery: Where it runs.
            clear: Empty the slots first, busy ones when their request ends.
            wait_s: Seconds to wait for that at most.
        """
        self._stop_repair()
        if self._rewarm_scope is not None:
            self._rewarm_scope.cancel()
        self._rewarm_scope = scope = trio.CancelScope()
        self._clear_due = self._clear_due or clear
        cleared = trio.Event()
        nursery.start_soon(self._rewarm, scope, cleared, nursery)
        with trio.move_on_after(wait_s):
            await cleared.wait()

    async def _rewarm(
        self, scope: trio.CancelScope, cleared: trio.Event, nursery: trio.Nursery
    ) -> None:
        with scope:
            async with self._lock:
                if self._warmer is not None and self._clear_due:
                    await self._warmer.clear()
                    self._clear_due = False
                cleared.set()
                if self._warmer is not None and self.wanted:
                    await self._warmer.warm()
                    self._forget_repairs()
        cleared.set()
        if self._rewarm_scope is scope:
            self._rewarm_scope = None
            if self._nobody_waits:  # the last client may have gone before this was over
                self._repair_if_due(nursery)

    # ------------------------------------------------------------------------------- small

    def _forget_repairs(self) -> None:
        self._in_vain = [0] * len(self._entries)
        self._put_back.clear()

    def _make(self, port: int, key: str, hear: Callable[[], None]) -> PromptWarmer:
        async def request(method: str, path: str, body: bytes) -> Reply:
            hear()
            # what does not stream cannot be cancelled on some builds
            streamed = wire.as_stream(path, body) if self._plan.assemble else None
            try:
                reply = await exchange(port, method, path, streamed or body, key)
            except GoneError:
                self._lost_contact = True
                raise
            hear()
            if streamed and reply.status == _OK:
                whole = wire.Assembler(streamed)
                whole.feed(reply.body)
                return Reply(_OK if whole.error is None else _FAILED, whole.body())
            return reply

        wanted = self._plan.prompts
        return PromptWarmer(
            request,
            wanted.entries,
            concurrency=wanted.concurrency,
            host_bytes=wanted.host_bytes,
            token_bytes=wanted.token_bytes,
            saves=self._saves(),
            say=self._say,
        )

    def _saves(self) -> Saves | None:
        plan = self._plan
        if not plan.prompts.save_to:
            return None
        flags = [word for word in plan.arguments if word != "{port}"]
        return Saves(
            Path(plan.prompts.save_to),
            binary=_identity(plan.binary),
            model=_identity(plan.model),
            flags=tuple(flags),
        )

    def _say(self, line: str) -> None:
        self._log.say(line, backend=self._plan.name)


def _identity(path: str) -> str:
    """Return what tells a file from another of the same name: its size and time of change too."""
    with contextlib.suppress(OSError):
        found = Path(path).stat()
        return msgspec.json.encode([path, found.st_size, found.st_mtime_ns]).decode()
    return path
