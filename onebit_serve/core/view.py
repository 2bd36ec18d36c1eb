"""What can be seen of the backends, and the pages of ours that show it.

A live backend offers a frozen `BackendView`; pages, log lines and tests are made of views alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from onebit_serve.core import warm_prompts
from onebit_serve.core.life import State
from onebit_serve.core.warm_prompts import Standing
from onebit_serve.core.wire import Refusal

if TYPE_CHECKING:  # imported with the first plan: nothing may delay a child's start
    from onebit_serve.core.climb import ClimbView

__all__ = ["BackendView", "Page", "health", "livez", "models", "status", "unavailable"]

_RETRY_LOADING_S = 2
_RETRY_FAILED_S = 30
_COMING = (State.LOADING, State.WARMING, State.BACKOFF)


class BackendView(msgspec.Struct, frozen=True):
    """One backend at one moment.

    Args:
        name: Its name.
        served_id: The model id that clients see.
        device: The device asked for.
        role: What the model is for.
        binary: The program, absolute.
        state: Where it is in its life.
        since_s: Seconds it has been there.
        needed: Whether `/health` waits for it.
        port: The child's port on loopback, while there is a child.
        pid: The child's process id, while there is a child.
        cause: Why it is where it is, where something went wrong.
        degraded: Why its warm-up failed although it serves.
        ended: How its last child ended: `stopped`, `exited`, `crashed`, `killed for memory` or
            `never started`, with code or signal.
        load_ms: From spawn to healthy, of the last start that got there.
        warm_up_ms: The time its last warm-up took; `None` before it, or where it is skipped.
        warm_up_skipped: Why there is no warm-up (`cpu`, `off`), or empty.
        restarts: Starts after the first.
        in_flight: Requests being answered for clients.
        waiting: Requests in line.
        abandoned: Whether a client left and the backend has not said yet that it stopped working.
        last_line: What the child printed last.
        warm_prompts: How each of its warm prompts stands.
    """

    name: str
    served_id: str
    device: str
    role: str
    binary: str
    state: State
    since_s: float
    needed: bool = True
    port: int | None = None
    pid: int | None = None
    cause: str = ""
    degraded: str = ""
    ended: str = ""
    load_ms: float | None = None
    warm_up_ms: float | None = None
    warm_up_skipped: str = ""
    restarts: int = 0
    in_flight: int = 0
    waiting: int = 0
    abandoned: bool = False
    last_line: str = ""
    warm_prompts: tuple[Standing, ...] = ()


class Page(msgspec.Struct, frozen=True):
    """An answer of ours.

    Args:
        status: HTTP status.
        body: What is encoded as JSON.
        retry_after_s: Value of `Retry-After` in seconds, or `None`.
    """

    status: int
    body: dict[str, Any]
    retry_after_s: int | None = None


def livez() -> Page:
    """Say that the process answers."""
    return Page(200, {"status": "ok"})


def health(views: tuple[BackendView, ...]) -> Page:
    """Say whether every needed backend is loaded and warm, and if not, why."""
    missing = [v for v in views if v.needed and v.state is not State.READY]
    if not missing:
        degraded = [v.name for v in views if v.degraded]
        return Page(200, {"status": "ok", **({"degraded": degraded} if degraded else {})})
    worst = next((v for v in missing if v.state not in _COMING), missing[0])
    details = [_phase(v) for v in missing]
    body: dict[str, Any] = {"status": _word(worst), "backends": details}
    if worst.cause:
        body["error"] = _envelope(worst)
    return Page(503, body, _retry_s(worst))


def _word(view: BackendView) -> str:
    match view.state:
        case State.LOADING | State.WARMING | State.FAILED | State.STOPPED | State.STOPPING:
            return str(view.state.value)
        case _:
            return "restarting"


def _phase(view: BackendView) -> dict[str, Any]:
    phase: dict[str, Any] = {
        "name": view.name,
        "state": view.state.value,
        "since_s": round(view.since_s, 1),
    }
    if view.cause:
        phase["cause"] = view.cause
    elif view.last_line:
        phase["last_line"] = view.last_line
    return phase


def _retry_s(view: BackendView) -> int:
    return _RETRY_LOADING_S if view.state in _COMING else _RETRY_FAILED_S


def _envelope(view: BackendView) -> dict[str, str]:
    refusal = unavailable(view)
    return {"message": refusal.message, "type": refusal.type, "code": refusal.code}


def unavailable(view: BackendView) -> Refusal:
    """Say why a backend cannot take a request now."""
    where = f"{view.name} ({view.served_id} on {view.device})"
    match view.state:
        case State.LOADING:
            message = f"{where} is loading for {view.since_s:.1f} s"
            code = "loading"
        case State.WARMING:
            message = f"{where} is warming up for {view.since_s:.1f} s"
            code = "warming"
        case State.BACKOFF:
            message = f"{where} is being restarted"
            code = "restarting"
        case _:
            message = f"{where} is {view.state.value}"
            code = "backend_unavailable"
    if view.cause:
        message += f": {view.cause}"
    return Refusal(503, message, code, _retry_s(view))


def models(views: tuple[BackendView, ...], created_s: int) -> Page:
    """List the served ids, in every state; one that several devices have, by the first of them.

    Args:
        views: The backends.
        created_s: When this server started, in seconds since 1970; clients of OpenAI's API expect
            such a time with every model.
    """
    first = {view.served_id: view for view in reversed(views)}
    listed = [_model(view, created_s) for view in views if first[view.served_id] is view]
    return Page(200, {"object": "list", "data": listed})


def model(views: tuple[BackendView, ...], served_id: str, created_s: int) -> Page:
    """Describe the backend of one served id as `models` does; 404 where there is none."""
    for view in views:
        if view.served_id == served_id:
            return Page(200, _model(view, created_s))
    ids = ", ".join(view.served_id for view in views)
    refusal = Refusal(
        404, f"there is no model {served_id} here; there are {ids}", "model_not_found"
    )
    return Page(404, msgspec.json.decode(refusal.body()))


def _model(view: BackendView, created_s: int) -> dict[str, str | int]:
    found: dict[str, str | int] = {"id": view.served_id, "object": "model", "created": created_s}
    found |= {"owned_by": "1bit-serve", "device": view.device}
    if view.role != "chat":
        found["role"] = view.role
    return found


def status(
    views: tuple[BackendView, ...],
    version: str,
    shapes: Mapping[str, ClimbView | None] | None = None,
    laya: dict[str, Any] | None = None,
) -> Page:
    """Show every backend's state and figures.

    Args:
        views: The backends.
        version: Ours.
        shapes: By the backend's name, how far the warming of its shapes is.
        laya: How requests are routed, where they are.
    """
    backends = []
    for view in views:
        fields = msgspec.to_builtins(view)
        for key in ("since_s", "load_ms", "warm_up_ms"):
            if fields[key] is not None:
                fields[key] = round(fields[key], 1)
        if view.warm_prompts:
            fields["warm_prompts"] = warm_prompts.view(view.warm_prompts)
        else:
            del fields["warm_prompts"]
        climb = shapes.get(view.name) if shapes else None
        if climb is not None:
            fields["shapes"] = _shapes(climb)
        backends.append({k: v for k, v in fields.items() if v != ""})
    body = {"version": version, "status": health(views).body["status"], "backends": backends}
    return Page(200, body if laya is None else {**body, "laya": laya})


def _shapes(climb: ClimbView) -> dict[str, Any]:
    """Show how many shapes there are, which are warm, and what each took: first and second time."""
    return {
        "planned": climb.planned,
        "warmed": climb.warmed,
        "cheap": climb.cheap,
        "share": round(climb.share, 4),
        "spent_s": round(climb.spent_s, 3),
        "gained_s": round(climb.gained_s, 3),
        **({"now": climb.now} if climb.now else {}),
        "requests": [
            {
                "warms": label,
                "first_ms": round(first_s * 1000, 1),
                "second_ms": None if again_s is None else round(again_s * 1000, 1),
            }
            for label, first_s, again_s in climb.requests
        ],
    }
