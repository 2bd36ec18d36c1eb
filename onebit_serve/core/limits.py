"""How long and how much a backend may take."""

from __future__ import annotations

import math

import msgspec

from onebit_serve.core.config import Backend

__all__ = ["Limits", "limits_of"]


class Limits(msgspec.Struct, frozen=True):
    """How long and how much a backend may take; infinite or 0 where there is no limit, as said.

    Args:
        hang_s: Seconds without any progress after which it counts as hung; infinite is never.
        load_stall_s: Seconds without progress in loading; infinite is never.
        load_limit_s: Seconds from spawn to healthy; infinite is never.
        max_in_flight: Requests sent to it at once; 0 is any number.
        queue: Requests that wait for it at most; 0 is any number.
        restart: Whether it is started again when it fails.
        allow_cpu_fallback: Whether it may serve from the CPU although a device was asked for.
        idle_s: Seconds without a request after which a lazy one is stopped; 0 is never.
        pin: Whether it is never stopped to make room for another.
    """

    hang_s: float = 120.0
    load_stall_s: float = 120.0
    load_limit_s: float = math.inf
    max_in_flight: int = 0
    queue: int = 64
    restart: bool = True
    allow_cpu_fallback: bool = False
    idle_s: float = 0.0
    pin: bool = False


def limits_of(backend: Backend) -> Limits:
    """Return the limits that a backend's settings ask for."""
    return Limits(
        hang_s=backend.hang_s or math.inf,
        load_stall_s=backend.load_stall_s or math.inf,
        load_limit_s=backend.load_limit_s or math.inf,
        max_in_flight=backend.max_in_flight,
        queue=backend.queue,
        restart=backend.restart,
        allow_cpu_fallback=backend.allow_cpu_fallback,
        idle_s=backend.idle_s,
        pin=backend.pin,
    )
