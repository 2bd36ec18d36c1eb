"""Shapes before ready, while idle, and when a client comes, by the record of a fake backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from front_door import Front
from llama_process import until

Start = Callable[..., Front]
LONG_S = 60.0


@pytest.fixture
def start(fake_llama: str, tiny_models: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a front door with shapes over a fake backend: `start("0.2", "1")` for budget, idle."""
    started: list[Front] = []

    def begin(budget_s: str, idle: str, device: str = "vulkan", **more: str) -> Front:
        model = str(tiny_models / "tiny-llama.gguf")
        environment = {"ONEBIT_WARMUP_BUDGET_S": budget_s, "ONEBIT_WARMUP_IDLE": idle} | more
        front = Front(
            tmp_path,
            *("-m", model, "--llama-server", fake_llama, "--device", device),
            knobs=f"model={device} scale=0.01",
            environment=environment,
        )
        started.append(front)
        return front

    yield begin
    for front in started:
        front.stop()


def shapes(front: Front) -> dict[str, Any]:
    found: dict[str, Any] = front.client.get("/v1/status").json()["backends"][0].get("shapes", {})
    return found


def complete(front: Front, tokens: int) -> None:
    body = {"prompt": list(range(5, 5 + tokens)), "n_predict": 2, "cache_prompt": False}
    assert front.post("/completion", body).status_code == 200


def test_shapes_are_warmed_before_ready_within_the_budget(start):
    front = start("2", "0").ready()
    seen = shapes(front)
    assert seen["requests"]
    assert 0 < seen["warmed"] <= seen["planned"]
    assert front.said("further requests warmed")


def test_no_shape_is_warmed_without_a_budget_and_idle_time(start):
    front = start("0", "0").ready()
    assert shapes(front) == {}
    assert len(front.requests("/completion")) == 1


def test_a_warm_up_that_is_off_turns_the_plan_off(start):
    front = start("2", "1", ONEBIT_NO_WARMUP="1").ready()
    assert shapes(front) == {}
    assert front.requests("/completion") == []


def test_the_rest_is_warmed_while_idle_so_that_no_length_meets_a_shape_unbuilt(start):
    front = start("0", "1").ready()
    until(lambda: front.said("the last while idle"), "the end of the idle warm-up", LONG_S)
    before = len(front.record("reply"))
    for tokens in (1, 2, 3, 5, 8, 9, 32, 33, 64, 65, 100, 511, 512, 600):
        complete(front, tokens)
    until(lambda: len(front.record("reply")) == before + 14, "the record of all replies")
    assert [one["unbuilt"] for one in front.record("reply")[before:]] == [[]] * 14


def test_what_clients_sent_is_kept_in_the_history(start, tmp_path):
    front = start("0", "1").ready()
    complete(front, 37)
    front.stop()
    assert list(tmp_path.rglob("history.sqlite3"))
