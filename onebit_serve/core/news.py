"""What the log says when a backend's life moves on: one line for each thing that happened."""

from __future__ import annotations

from typing import Literal

from onebit_serve.core import life as machine
from onebit_serve.core.life import Life, RestartPolicy, State
from onebit_serve.core.plan import BackendPlan

__all__ = ["Level", "news"]

Level = Literal["info", "warning", "error"]


def news(
    plan: BackendPlan,
    before: Life,
    after: Life,
    event: machine.Event,
    policy: RestartPolicy,
    *,
    picked_by: str = "",
) -> list[tuple[Level, str]]:
    """Return the lines to write for one transition, each with its level.

    Args:
        plan: The backend.
        before: Its life before the event.
        after: Its life after it.
        event: What happened.
        policy: When it is restarted.
        picked_by: Who picked it for a request, where this starts it; empty for nobody.
    """
    lines: list[tuple[Level, str]] = []
    match event:
        case machine.Warmed(degraded=degraded) if degraded:
            lines.append(("warning", f"{plan.name} serves but is not warm (degraded): {degraded}"))
        case machine.Broken(cause=cause):
            lines.append(("error", f"the {plan.device} backend is stopped: {cause}"))
        case machine.Exited(cause=cause) if before.state is not State.STOPPING:
            lines.append(("error", f"a {plan.device} backend {cause}"))
    if after.state is State.READY and after.restarts and before.ever_ready:
        lines.append(("info", f"{plan.name} is ready again"))
    if after.state is State.LOADING and before.state is not State.LOADING:
        program = plan.binary.rpartition("/")[2]
        by = f", picked by {picked_by}" if picked_by else ""
        lines.append(("info", f"{plan.served_id} on {plan.device} ({program}){by}"))
    is_spent = len(after.failures_s) > policy.burst
    if is_spent and after.state is State.FAILED and before.state is not State.FAILED:
        often = f"{len(after.failures_s)} times in {policy.window_s:g} s"
        again = f"a request or `POST /v1/backends/{plan.name}/start` tries again"
        lines.append(("error", f"{plan.name} failed {often} and stays down; {again}"))
    return lines
