from __future__ import annotations

import pytest

from onebit_serve.core import life as machine
from onebit_serve.core.life import Life, RestartPolicy, State
from onebit_serve.core.news import news
from onebit_serve.core.plan import BackendPlan

PLAN = BackendPlan("gpu", "m", "vulkan", "llama-server", "chat", "/opt/llama-server", "m.gguf", ())
POLICY = RestartPolicy()


def said(before: Life, after: Life, event: machine.Event, **more: str) -> list[tuple[str, str]]:
    return news(PLAN, before, after, event, POLICY, **more)


@pytest.mark.parametrize("by", ["", "laya"])
def test_a_start_says_what_runs_where_and_who_picked_it(by):
    lines = said(Life(), Life(state=State.LOADING), machine.Wanted(by), picked_by=by)
    suffix = ", picked by laya" if by else ""
    assert lines == [("info", f"m on vulkan (llama-server){suffix}")]


def test_an_exit_is_an_error_unless_it_was_asked_for():
    event = machine.Exited("exited with code 1")
    after = Life(state=State.BACKOFF)
    assert said(Life(state=State.READY), after, event) == [
        ("error", "a vulkan backend exited with code 1")
    ]
    assert said(Life(state=State.STOPPING), Life(state=State.STOPPED), event) == []


def test_ready_again_is_said_only_of_one_that_was_ready_before():
    ready = Life(state=State.READY, restarts=1)
    event = machine.Warmed("")
    assert said(Life(state=State.WARMING, ever_ready=True), ready, event) == [
        ("info", "gpu is ready again")
    ]
    assert said(Life(state=State.WARMING, ever_ready=False), ready, event) == []


def test_one_that_is_not_warm_is_a_warning():
    lines = said(Life(state=State.WARMING), Life(state=State.READY), machine.Warmed("HTTP 500"))
    assert lines == [("warning", "gpu serves but is not warm (degraded): HTTP 500")]


def test_a_spent_budget_says_how_to_try_again():
    spent = tuple(float(n) for n in range(POLICY.burst + 1))
    failed = Life(state=State.FAILED, failures_s=spent)
    lines = said(Life(state=State.LOADING), failed, machine.Exited("crashed"))
    assert lines[0] == ("error", "a vulkan backend crashed")
    assert "stays down" in lines[1][1]
    assert "POST /v1/backends/gpu/start" in lines[1][1]
    assert said(failed, failed, machine.Exited("crashed")) == [lines[0]]
