"""A backend that nobody uses leaves; one that has work never does.

Nothing here stops a backend that has work. It asks the backend's own task to stop "if idle", which
looks at the moment it does so: a request that came in between keeps it.
"""

from __future__ import annotations

import time

import trio

from onebit_serve.core.life import State
from onebit_serve.core.pressure import Resident
from onebit_serve.live.log import Log
from onebit_serve.live.supervise import Backend

__all__ = ["resident", "stopped_if_idle", "unload_when_idle"]

_NOTICE_S = 1.0


def resident(backend: Backend) -> Resident | None:
    """Return a backend as something that holds memory; `None` where it is not ready."""
    view, limits = backend.view(), backend.plan.limits
    if view.state is not State.READY:
        return None
    return Resident(
        name=view.name,
        ready_s=time.monotonic() - view.since_s,
        last_end_s=backend.last_end_s,
        in_flight=view.in_flight + view.abandoned + (0 if backend.held else view.waiting),
        kept=not backend.plan.lazy or limits.pin,
        idle_s=_idle_s(backend),
    )


async def unload_when_idle(backend: Backend, log: Log) -> None:
    """Stop a backend whenever it is lazy and had nothing to do for its `idle_s`; never returns."""
    while True:
        if not _idle_s(backend):  # most never leave, and nothing wakes this after each request
            await backend.adopted.wait()
            continue
        await backend.wait_for(lambda v: v.state is State.READY and not v.in_flight)
        held, idle_s = resident(backend), _idle_s(backend)
        if held is None or not idle_s:
            continue
        # a pinned one idles out too: `pin` is about making room
        left_s = held.idle_since_s + idle_s - time.monotonic()
        if left_s > 0:
            await trio.sleep(left_s)
            continue
        if await stopped_if_idle(backend):
            log.say(f"{backend.plan.name} is stopped: no request for {idle_s:g} s (idle_s)")


def _idle_s(backend: Backend) -> float:
    """Return after how long without a request it is stopped; a reload may change that."""
    return backend.plan.limits.idle_s if backend.plan.lazy else 0.0


async def stopped_if_idle(backend: Backend) -> bool:
    """Stop a backend if it is idle; return whether it was."""
    backend.halt(if_idle=True)
    with trio.move_on_after(_NOTICE_S):
        await backend.wait_for(lambda v: v.state is not State.READY)
        return True
    return False
