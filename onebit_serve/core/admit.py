"""Whether a request may go to a backend now, must wait for it, or is refused."""

from __future__ import annotations

import enum

import msgspec

from onebit_serve.core.life import State
from onebit_serve.core.plan import Limits
from onebit_serve.core.view import BackendView, unavailable
from onebit_serve.core.wire import Refusal

__all__ = ["RETRY_FAILED_S", "Verdict", "decide", "parked_too_long"]

RETRY_FAILED_S = 10.0  # a backend that gave up is tried again by the first request after this


class Verdict(enum.Enum):
    """What happens to a request that is not refused."""

    GO = "go"
    WAIT = "wait"
    START_AND_WAIT = "start and wait"


def decide(
    view: BackendView, limits: Limits, *, waiting: int, first_start: bool
) -> Verdict | Refusal:
    """Decide about one request.

    Args:
        view: The backend now.
        limits: What it may take.
        waiting: Requests that wait for it already; they go first.
        first_start: It is needed and has never been ready: nobody waits for that.

    Returns:
        A verdict, or the refusal to send.
    """
    if first_start:
        return unavailable(view)
    if view.state is State.FAILED and (view.since_s < RETRY_FAILED_S or not limits.restart):
        left_s = max(1, round(RETRY_FAILED_S - view.since_s + 0.5))
        return msgspec.structs.replace(unavailable(view), retry_after_s=left_s)
    full = limits.max_in_flight and view.in_flight >= limits.max_in_flight
    if view.state is State.READY and not full and not waiting:
        return Verdict.GO
    if limits.queue and waiting >= limits.queue:
        if view.state is State.READY:
            most = f"max_in_flight = {limits.max_in_flight}, " if limits.max_in_flight else ""
            message = (
                f"{view.name} answers {view.in_flight} requests and {waiting} wait for it: "
                f"{most}queue = {limits.queue}"
            )
            return Refusal(429, message, "queue_full", 1)
        refusal = unavailable(view)
        message = f"{refusal.message}; {waiting} requests wait already (queue = {limits.queue})"
        return msgspec.structs.replace(refusal, message=message)
    if view.state in (State.STOPPED, State.STOPPING, State.FAILED):
        return Verdict.START_AND_WAIT
    return Verdict.WAIT


def parked_too_long(view: BackendView, waited_s: float) -> Refusal:
    """Say to a request that its wait is over: the phase, how long, and why where it is known."""
    refusal = unavailable(view)
    message = f"gave up after {waited_s:.0f} s in line (park_s): {refusal.message}"
    if view.state is State.READY:
        busy = f"is busy with {view.in_flight} requests" if view.in_flight else "makes room"
        message = f"gave up after {waited_s:.0f} s in line (park_s): {view.name} {busy}"
    return msgspec.structs.replace(refusal, message=message)
