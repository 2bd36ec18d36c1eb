"""Shapes before ready, while idle, and when a client comes, by the record of a fake backend."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from front_door import Front
from llama_process import until

from onebit_serve.live.history import FLUSH_S, History, key_of, state_file

Start = Callable[..., Front]
LONG_S = 60.0


@pytest.fixture
def start(fake_llama: str, tiny_models: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a front door over a fake backend; `start("0.2", "1")` says budget and idle."""
    started: list[Front] = []

    def begin(
        budget_s: str = "",
        idle: str = "",
        device: str = "vulkan",
        scale: float = 0.01,
        arguments: tuple[str, ...] = (),
        constants: dict[str, float] | None = None,
        knobs: str = "",
        **more: str,
    ) -> Front:
        model = str(tiny_models / "tiny-llama.gguf")
        said = {"ONEBIT_WARMUP_BUDGET_S": budget_s, "ONEBIT_WARMUP_IDLE": idle}
        front = Front(
            tmp_path,
            *("-m", model, "--llama-server", fake_llama, "--device", device, *arguments),
            knobs=f"model={device if device != 'cpu' else 'none'} scale={scale} {knobs}",
            environment={name: value for name, value in said.items() if value} | more,
            constants={"_QUIET_TIMES": 0, **(constants or {})},
            shapes=True,
        )
        started.append(front)
        return front

    yield begin
    for front in started:
        front.stop()


def shapes(front: Front) -> dict[str, Any]:
    found: dict[str, Any] = front.client.get("/v1/status").json()["backends"][0].get("shapes", {})
    return found


def all_warm(front: Front) -> bool:
    seen = shapes(front)
    return bool(seen) and seen["warmed"] == seen["planned"]


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


def test_a_first_use_is_begun_only_when_nobody_came_for_long_enough(start):
    front = start("0", "1", constants={"_IDLE_S": 0.01, "_QUIET_TIMES": 1e6}).ready()
    looks = len(front.requests("/slots"))
    until(lambda: len(front.requests("/slots")) > looks, "a look at what is free", LONG_S)
    complete(front, 37)
    assert shapes(front)["requests"] == []
    front.signal(signal.SIGTERM)
    assert front.wait() == 0
    assert len(front.requests("/completion")) == 2


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


def test_a_kill_costs_no_more_than_the_last_minute_of_traffic():
    assert FLUSH_S <= 60


def test_a_supervisor_that_is_killed_loses_only_what_came_since_the_last_writing(
    start, tmp_path, tiny_models, fake_llama
):
    front = start("0", "1", constants={"FLUSH_S": 0.05})
    front.ready()
    key = key_of(str(tiny_models / "tiny-llama.gguf"), "vulkan", fake_llama)
    history = History(state_file({"XDG_STATE_HOME": str(tmp_path / "xdg" / "state")}), key, print)

    def noted() -> int:
        return round(history.load().histogram.prefill.get(37, 0))

    for _ in range(5):
        complete(front, 37)
    until(lambda: noted() == 5, "the notes of five requests")
    complete(front, 37)
    os.kill(front.process.pid, signal.SIGKILL)
    front.wait()
    assert noted() in (5, 6)
    again = start("0", "1", constants={"FLUSH_S": 0.05})
    again.ready()
    complete(again, 37)
    until(lambda: noted() >= 6, "the notes of the next life")


def test_by_default_shapes_are_warmed_before_ready_and_while_idle(start):
    front = start().ready()
    assert shapes(front)["requests"]
    until(lambda: all_warm(front), "the end of the idle warm-up", LONG_S)


def test_by_default_the_cpu_has_no_shapes(start):
    front = start(device="cpu").ready()
    assert shapes(front) == {}
    assert front.requests("/completion") == []


def test_status_shows_the_synthetic_request_that_runs_and_a_client_cancels_it(start):
    front = start("0", "1", scale=0.3).ready()
    until(lambda: shapes(front).get("now"), "a synthetic request", LONG_S)
    complete(front, 465)
    until(lambda: front.record("gone"), "the end of the synthetic request", LONG_S)


def test_clearing_the_prompt_cache_cancels_a_synthetic_request_and_it_goes_on_afterwards(start):
    front = start("0", "1", scale=0.3).ready()
    until(lambda: shapes(front).get("now"), "a synthetic request", LONG_S)
    assert front.client.delete("/v1/cache/prefix").status_code < 300
    until(lambda: front.record("gone"), "the end of the synthetic request", LONG_S)
    before = len(front.requests("/slots"))
    until(lambda: len(front.requests("/slots")) > before, "a look at what is free", LONG_S)


@pytest.mark.parametrize("slots", ["1", "2"])
def test_without_a_host_cache_no_cached_prefix_is_lost(start, slots):
    front = start("0", "1", arguments=("-np", slots, "--cache-ram", "0")).ready()
    prompt = {"prompt": list(range(5, 605)), "n_predict": 1}
    assert front.post("/completion", prompt).json()["timings"]["cache_n"] == 0
    if slots == "2":  # the other one holds nothing but what the warm-up left; two would need both
        until(
            lambda: shapes(front)["warmed"] == shapes(front)["planned"] - 1,
            "the idle warm-up on the other slot",
            LONG_S,
        )
    else:
        before = len(front.requests("/slots"))
        until(lambda: len(front.requests("/slots")) > before, "a look at the slots", LONG_S)
    assert front.post("/completion", prompt).json()["timings"]["cache_n"] >= 599


def test_with_a_host_cache_no_cached_prefix_is_lost_although_all_slots_hold_one(start):
    front = start("0", "1", arguments=("-np", "2"), constants={"_IDLE_S": 0.5}).ready()
    prompts = [{"prompt": list(range(a, a + 600)), "n_predict": 1} for a in (5, 1005)]
    for slot, prompt in enumerate(prompts):
        assert front.post("/completion", prompt | {"id_slot": slot}).status_code == 200
    until(lambda: front.said("the last while idle"), "the end of the idle warm-up", LONG_S)
    for prompt in prompts:
        assert front.post("/completion", prompt).json()["timings"]["cache_n"] >= 599


def test_a_backend_whose_only_slot_holds_the_warm_up_alone_is_warmed_without_a_host_cache(start):
    front = start("0", "1", arguments=("-np", "1", "--cache-ram", "0")).ready()
    until(lambda: front.said("the last while idle"), "the end of the idle warm-up", LONG_S)
    seen = shapes(front)
    assert seen["warmed"] == seen["planned"]


def test_a_synthetic_request_does_not_hold_up_a_stop(start):
    front = start("0", "1", scale=0.1).ready()
    until(lambda: shapes(front).get("now"), "a synthetic request", LONG_S)
    began_s = time.monotonic()
    front.signal(signal.SIGTERM)
    assert front.wait() == 0
    assert time.monotonic() - began_s < 8  # less than it takes to lose patience with a backend


def test_a_synthetic_request_does_not_keep_a_lazy_backend_from_idling_out(start, tmp_path):
    (tmp_path / "serve.toml").write_text("[backend]\nlazy = true\nidle_s = 2\n")
    front = start("0", "1", scale=0.3, arguments=("--config", str(tmp_path / "serve.toml")))
    front.wait_said("ready on")
    complete(front, 465)
    until(lambda: shapes(front).get("now"), "a synthetic request", LONG_S)
    front.wait_said("is stopped: no request for 2 s")
    assert front.backend()["state"] in ("stopping", "stopped")
    complete(front, 465)  # it starts again, and nothing of the old plan is left to go on with
    assert front.backend()["restarts"] == 1


def test_a_backend_that_dies_under_a_synthetic_request_comes_back_and_is_warmed_anew(start):
    front = start("0", "1", scale=0.3, ONEBIT_WARMUP_IDLE_MAX_MS="0").ready()
    until(lambda: shapes(front).get("now"), "a synthetic request", LONG_S)
    os.kill(front.backend()["pid"], signal.SIGKILL)
    until(lambda: front.said("is ready again"), "the restart", LONG_S)
    until(lambda: shapes(front).get("now"), "a synthetic request", LONG_S)
    assert front.backend()["restarts"] == 1


def test_a_backend_that_ends_twice_in_synthetic_requests_is_warmed_no_further_and_serves(start):
    front = start("0", "1", knobs="dead_at=req12:SEGV").ready()
    front.wait_said("no more shapes are warmed: it ended 2 times in one")
    until(lambda: front.health().status_code == 200, "the backend to be ready again", LONG_S)
    assert front.backend()["restarts"] == 2
    complete(front, 465)


def test_a_death_while_shapes_are_warmed_before_ready_is_a_failed_start(start):
    front = start("2", "0", knobs="dead_at=req4:SEGV")
    assert front.wait() == 1
    assert not front.said("ready on")


def test_a_hang_in_an_idle_warm_up_is_noticed_before_a_client_comes(start):
    front = start("0", "1", knobs="hang_at=req8", ONEBIT_BACKEND_HANG_S="2").ready()
    front.wait_said("no progress for 2 s")
    until(lambda: front.said("is ready again"), "the restart", LONG_S)


@pytest.mark.parametrize("where", ["variable", "flag"])
def test_the_micro_batch_is_known_wherever_it_is_said(start, where):
    words = ("-ub", "64") if where == "flag" else ()
    variable = {"LLAMA_ARG_UBATCH": "64"} if where == "variable" else {}
    front = start("0", "1", device="hrx", arguments=words, **variable).ready()
    until(lambda: shapes(front), "a plan", LONG_S)
    assert shapes(front)["planned"] == 64 + 4


def test_a_cache_of_an_earlier_run_is_said_and_makes_first_uses_cheap(start, tmp_path):
    first = start("0", "1").ready()
    assert first.said("no driver cache found")
    mesa = tmp_path / "xdg" / "cache" / "onebit" / "mesa"
    assert mesa.stat().st_mode & 0o777 == 0o700
    assert shapes(first)["cheap"] == 0
    until(lambda: first.said("the last while idle"), "the end of the idle warm-up", LONG_S)
    first.stop()
    entry = mesa / "mesa_shader_cache" / "ab" / "cdef"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"shader")
    costs = start("2", "1", scale=0.0001)  # what a filled cache does to the fake's first uses
    costs.ready()
    assert costs.said("driver cache found: mesa")
    until(lambda: all_warm(costs), "the end of the idle warm-up", LONG_S)
    costs.stop()
    later = start("2", "1", scale=0.0001).ready()
    assert shapes(later)["cheap"] > 0
    assert len(shapes(later)["requests"]) < 3


def test_a_cache_folder_that_the_user_set_wins(start, tmp_path):
    mine = tmp_path / "mine"
    front = start(MESA_SHADER_CACHE_DIR=str(mine)).ready()
    assert str(mine) in front.said("no driver cache found")[0]
    assert not (tmp_path / "xdg" / "cache" / "onebit" / "mesa").exists()
    assert not mine.exists()
