"""Which lazy backends are unloaded: those nobody uses, and those whose memory another one needs.

Nothing here stops a backend: the answer is a list of names, and whoever stops them admits no new
work to them from then on, or a pending start would wait for ever for one that is kept busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

__all__ = ["Resident", "idle_out", "make_room", "next_idle_s"]


class Resident(msgspec.Struct, frozen=True):
    """A backend that is loaded.

    Args:
        name: Its name.
        ready_s: When it became ready, on the caller's clock, in seconds.
        last_end_s: When its last request ended; `None` when it had none yet.
        in_flight: Requests that it has, waiting ones included.
        kept: Eager, pinned, or the policy's default device: never unloaded from here.
        idle_s: Seconds without a request after which it is unloaded; 0 is never.
        memory_bytes: What it holds; `None` where unknown.
    """

    name: str
    ready_s: float
    last_end_s: float | None = None
    in_flight: int = 0
    kept: bool = False
    idle_s: float = 0.0
    memory_bytes: int | None = None

    @property
    def idle_since_s(self) -> float:
        """Since when it has had nothing to do: not from its spawn, so that no load counts."""
        return max(self.ready_s, self.last_end_s or -math.inf)

    @property
    def can_go(self) -> bool:
        """Whether it may be unloaded at all, now."""
        return not self.kept and not self.in_flight

    @property
    def idle_out_s(self) -> float:
        """When it has been idle for too long, as things stand; infinite for never."""
        if not self.can_go or not self.idle_s:
            return math.inf
        return self.idle_since_s + self.idle_s


def idle_out(residents: Sequence[Resident], now_s: float) -> tuple[str, ...]:
    """Name the backends that have been idle for their `idle_s`."""
    return tuple(r.name for r in residents if r.idle_out_s <= now_s)


def next_idle_s(residents: Sequence[Resident]) -> float:
    """Return when the next backend will have been idle for too long; infinite for never."""
    return min((r.idle_out_s for r in residents), default=math.inf)


def make_room(
    residents: Sequence[Resident], *, free_bytes: int, wanted_bytes: int
) -> tuple[str, ...] | None:
    """Choose what to unload for a start, the least recently used first.

    Args:
        residents: What is loaded on the same memory.
        free_bytes: What is free now.
        wanted_bytes: What the next backend is expected to need.

    Returns:
        Names, none where there is room already; `None` where unloading all that may go would not
        be enough. One whose size is unknown ends the list: what it gives back is seen when it is
        gone, and then asked again.
    """
    chosen: list[str] = []
    for resident in sorted((r for r in residents if r.can_go), key=lambda r: r.idle_since_s):
        if free_bytes >= wanted_bytes:
            break
        chosen.append(resident.name)
        if resident.memory_bytes is None:
            return tuple(chosen)
        free_bytes += resident.memory_bytes
    return tuple(chosen) if free_bytes >= wanted_bytes else None
