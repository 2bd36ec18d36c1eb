"""A lazy backend starts when there is room for it in its device's memory, which is made if need be.

The least recently used one that is idle and not pinned is unloaded, and held until the other one
has started, so that its own next request does not bring it back before. One that is never idle on
its own is held after a while: its new requests wait in line until those that run have ended and the
other backend had its turn.
"""

from __future__ import annotations

import enum
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable

import trio

from onebit_serve.core import binary, options
from onebit_serve.core.life import State
from onebit_serve.core.memory import memory_of
from onebit_serve.core.plan import BackendPlan
from onebit_serve.core.pressure import make_room
from onebit_serve.live.free_memory import machine_memory
from onebit_serve.live.idle import resident, stopped_if_idle
from onebit_serve.live.log import Log
from onebit_serve.live.spawn import child_environment
from onebit_serve.live.supervise import Backend

__all__ = ["Room", "begun", "free_bytes"]

_NOTICE_S = 1.0
_RETURN_S = 10.0  # drivers give memory back some time after the process is gone
_POLL_S = 0.2
_LOOK_AGAIN_S = 5.0
_LIST_S = 10.0
_PATIENCE_S = 30.0  # longer than most replies, so that few are held up for another backend
_BESIDES_WEIGHTS = 1.1  # compute buffers and a modest cache

Free = Callable[[BackendPlan], Awaitable["int | None"]]


class _Verdict(enum.Enum):
    """What a look at the memory came to, where nobody is to be unloaded."""

    ROOM = "room"
    WAIT = "wait"


async def begun(backend: Backend) -> None:
    """Wait until a backend that was wanted is no longer down, or its task has had time to hear."""
    with trio.move_on_after(_NOTICE_S):
        await backend.wait_for(lambda v: not v.state.down)


def _need_bytes(backend: Backend) -> int:
    return int(backend.plan.size_bytes * _BESIDES_WEIGHTS)


def _on_cpu(backend: Backend) -> bool:
    return backend.plan.device == "cpu"


class Room:
    """Starts lazy backends, and makes room for them.

    Args:
        backends: Returns all backends.
        log: Where to say what happened.
        nursery: Where a start waits for room.
        free: Returns the free memory of a backend's device in bytes, `None` where it is not known.
    """

    def __init__(
        self,
        backends: Callable[[], Iterable[Backend]],
        log: Log,
        nursery: trio.Nursery,
        free: Free | None = None,
    ) -> None:
        self._backends = backends
        self._log = log
        self._nursery = nursery
        self._free = free or free_bytes
        self._looking = {True: trio.Lock(), False: trio.Lock()}  # one for the CPU's memory
        self._pending: set[Backend] = set()
        self._ordered: set[Backend] = set()
        self._beginning: set[Backend] = set()

    def start(self, backend: Backend, by: str = "", *, ordered: bool = False) -> None:
        """Start a backend as soon as there is room; one that runs already goes on.

        Args:
            backend: It.
            by: Who picked it, for the log.
            ordered: Whether a person wants it, not only the requests that wait for it.
        """
        state = backend.view().state
        is_down = state.down or state is State.STOPPING
        if not (backend.plan.lazy and is_down and (self._others(backend) or self._queue(backend))):
            self._begin(backend, by)
            return
        if ordered:
            self._ordered.add(backend)
        if backend not in self._pending:
            self._pending.add(backend)
            self._nursery.start_soon(self._start, backend, by)

    def forget(self, backend: Backend) -> None:
        """Take back the order to start a backend; one that requests wait for is started still."""
        self._ordered.discard(backend)

    def _begin(self, backend: Backend, by: str) -> None:
        """Start it now. Until its own task has heard so, others must know that it takes memory."""
        backend.want(by)
        if backend.view().state.down and backend not in self._beginning:
            self._beginning.add(backend)
            self._nursery.start_soon(self._see_begun, backend)

    async def _see_begun(self, backend: Backend) -> None:
        await begun(backend)
        self._beginning.discard(backend)

    def _pool(self, backend: Backend) -> list[Backend]:
        """Return the other lazy backends on its memory.

        GPUs share it under whatever name they are used; the CPU has its own, as far as we know.
        """
        on_cpu = _on_cpu(backend)
        return [
            other
            for other in self._backends()
            if other is not backend and other.plan.lazy and _on_cpu(other) == on_cpu
        ]

    def _others(self, backend: Backend) -> list[Backend]:
        """Return those on its memory that hold some of it, or are about to."""
        return [
            other
            for other in self._pool(backend)
            if other in self._beginning
            or not (other.view().state.down or other.view().state is State.BACKOFF)
        ]

    def _queue(self, backend: Backend) -> bool:
        return not self._pending.isdisjoint(self._pool(backend))

    async def _start(self, backend: Backend, by: str) -> None:
        def is_wanted() -> bool:
            waits = backend in self._ordered or backend.view().waiting > 0
            return waits and backend in self._backends()

        held: list[Backend] = []
        patient_until_s = time.monotonic() + _PATIENCE_S
        try:
            # its own memory, if it is on its way out, comes back first
            await backend.wait_for(lambda v: v.state is not State.STOPPING)
            while is_wanted() and not backend.view().state.live:
                async with self._looking[_on_cpu(backend)]:
                    verdict = await self._look(backend)
                    if verdict is _Verdict.ROOM and is_wanted():
                        self._begin(backend, by)
                        return
                    if isinstance(verdict, Backend) and is_wanted():
                        held += await self._unload(verdict, backend)
                        continue
                if time.monotonic() > patient_until_s:
                    held += self._hold_one(backend, but=held)
                await self._change(backend, is_wanted)
        finally:
            self._pending.discard(backend)
            self._ordered.discard(backend)
            for other in held:
                other.release()

    async def _change(self, backend: Backend, is_wanted: Callable[[], bool]) -> None:
        """Wait until one of the others moves: a look takes a process and a driver's start."""

        def seen() -> list[tuple[State, bool]]:
            views = [other.view() for other in self._others(backend)]
            return [(view.state, bool(view.in_flight)) for view in views]

        before = seen()
        with trio.move_on_after(_LOOK_AGAIN_S):
            while is_wanted() and seen() == before:  # noqa: ASYNC110 - several may move
                await trio.sleep(_POLL_S)

    def _hold_one(self, backend: Backend, *, but: Iterable[Backend]) -> list[Backend]:
        """Let one that works take no further requests: the one that has been ready for longest."""
        if any(other.view().in_flight for other in but):
            return []
        busy = [b for b in self._others(backend) if (r := resident(b)) and not r.kept]
        busy = [b for b in busy if not b.held]
        if not busy:
            return []
        victim = max(busy, key=lambda b: b.view().since_s)
        victim.hold()
        self._log.say(
            f"{victim.plan.name} takes no further requests until {backend.plan.name} had its turn"
        )
        return [victim]

    async def _look(self, backend: Backend) -> Backend | _Verdict:
        """Say whether there is room, which one to unload for it, or that it has to wait."""
        wanted = _need_bytes(backend)
        free = await self._free(backend.plan)
        if free is None:
            return _Verdict.ROOM
        others = self._others(backend)
        views = [other.view() for other in others]
        # What one that loads has taken already is gone from what is free; how much, nobody knows.
        loading = [
            b
            for b, v in zip(others, views, strict=True)
            if v.state.down or v.state is State.LOADING
        ]
        if free - sum(b.plan.size_bytes for b in loading) >= wanted:
            return _Verdict.ROOM
        residents = [r for b in others if (r := resident(b)) is not None]
        if free < wanted:
            names = make_room(residents, free_bytes=free, wanted_bytes=wanted)
            if names:
                return next(b for b in others if b.plan.name == names[0])
        moving = loading or any(v.state in (State.WARMING, State.STOPPING) for v in views)
        if moving or any(not r.kept for r in residents):
            return _Verdict.WAIT  # one that works will be idle, one that loads will be ready
        self._log.warning(
            f"{backend.plan.name} may not fit: nothing that may be unloaded is left for it"
        )
        return _Verdict.ROOM

    async def _unload(self, victim: Backend, wanting: Backend) -> list[Backend]:
        """Unload one for another and wait for its memory; return it where it has gone, held.

        Held, so that its own next request does not start it again before the other one had its
        turn.
        """
        victim.hold()
        if not await stopped_if_idle(victim):
            victim.release()
            return []
        self._log.say(
            f"{victim.plan.name} is stopped to make room for {wanting.plan.name}, "
            "as the least recently used"
        )
        await victim.wait_for(lambda v: v.state is not State.STOPPING)
        wanted = _need_bytes(wanting)
        with trio.move_on_after(_RETURN_S):
            while True:
                free = await self._free(wanting.plan)
                if free is None or free >= wanted:
                    break
                await trio.sleep(_POLL_S)
        return [victim]


async def free_bytes(plan: BackendPlan) -> int | None:
    """Return the free memory of a backend's device in bytes; `None` where nobody tells."""
    if plan.device == "cpu":
        return (await trio.to_thread.run_sync(machine_memory))[1]
    if plan.kind != "llama-server":
        return None
    text = b""
    with trio.move_on_after(_LIST_S):
        try:
            done = await trio.run_process(
                [plan.binary, "--list-devices"],
                capture_stdout=True,
                stderr=subprocess.STDOUT,
                check=False,
                env=child_environment(plan.unset_env, plan.set_env),
            )
        except OSError:
            return None  # the start itself will say what is wrong with the program
        text = done.stdout or b""
    listed = binary.parse_devices(text.decode(errors="replace"))
    device = options.value(plan.arguments, "--device", "-dev") or ""
    found = memory_of(device, listed, machine_total_bytes=None, machine_free_bytes=None)
    return found.free_bytes
