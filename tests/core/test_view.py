from __future__ import annotations

import msgspec
import pytest

from onebit_serve.core.life import State
from onebit_serve.core.view import (
    BackendView,
    health,
    livez,
    model,
    models,
    status,
    unavailable,
)


def seen(state: State = State.READY, **more: object) -> BackendView:
    fields = {
        "name": "hrx",
        "served_id": "m",
        "device": "hrx",
        "role": "chat",
        "binary": "/x/llama-server",
        "state": state,
        "since_s": 1.26,
        **more,
    }
    return BackendView(**fields)


def test_alive_is_alive():
    assert livez().status == 200


@pytest.mark.parametrize("state", [State.LOADING, State.WARMING])
def test_the_phase_before_ready_is_named_with_its_details(state):
    page = health((seen(state, last_line="50 % of the tensors"),))
    assert (page.status, page.body["status"]) == (503, state.value)
    assert page.retry_after_s
    (phase,) = page.body["backends"]
    assert phase == {
        "name": "hrx",
        "state": state.value,
        "since_s": 1.3,
        "last_line": "50 % of the tensors",
    }
    assert "error" not in page.body


def test_ready_is_200_and_says_no_more():
    page = health((seen(),))
    assert (page.status, page.body) == (200, {"status": "ok"})


def test_a_backend_that_is_not_warm_is_named_as_degraded():
    page = health((seen(), seen(name="vulkan", degraded="the warm-up failed: HTTP 500")))
    assert (page.status, page.body["status"]) == (200, "ok")
    assert page.body["degraded"] == ["vulkan"]


def test_a_lost_backend_is_503_with_the_cause():
    page = health((seen(State.FAILED, cause="exited (signal SIGSEGV) while ready"),))
    assert page.status == 503
    assert page.body["status"] == "failed"
    assert "SIGSEGV" in page.body["backends"][0]["cause"]
    assert "SIGSEGV" in page.body["error"]["message"]
    assert set(page.body["error"]) == {"message", "type", "code"}


def test_a_backend_that_nobody_needs_is_not_waited_for():
    assert health((seen(), seen(State.STOPPED, needed=False))).status == 200


def test_the_worst_backend_gives_the_word():
    page = health((seen(State.LOADING), seen(State.FAILED, cause="x")))
    assert page.body["status"] == "failed"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (State.LOADING, "loading"),
        (State.WARMING, "warming"),
        (State.BACKOFF, "restarting"),
        (State.FAILED, "backend_unavailable"),
        (State.STOPPED, "backend_unavailable"),
    ],
)
def test_a_request_that_comes_too_early_or_too_late_is_told_why(state, code):
    refusal = unavailable(seen(state, cause="it broke" if state is State.FAILED else ""))
    assert (refusal.status, refusal.code) == (503, code)
    assert refusal.retry_after_s
    assert "m on hrx" in refusal.message
    assert ("it broke" in refusal.message) == (state is State.FAILED)


def test_models_are_the_served_ids_in_every_state():
    views = (seen(State.LOADING), seen(served_id="e", device="cpu", role="embedding"))
    chat, embedding = models(views, 1_700_000_000).body["data"]
    assert (chat["id"], chat["device"], chat["object"]) == ("m", "hrx", "model")
    assert (chat["created"], chat["owned_by"]) == (1_700_000_000, "1bit-serve")
    assert "role" not in chat
    assert (embedding["id"], embedding["role"]) == ("e", "embedding")


def test_one_model_is_described_as_in_the_list():
    views = (seen(State.LOADING), seen(served_id="org/e", device="cpu", role="embedding"))
    assert model(views, "org/e", 7).body == models(views, 7).body["data"][1]
    page = model(views, "gone", 7)
    assert (page.status, page.body["error"]["code"]) == (404, "model_not_found")
    assert "there are m, org/e" in page.body["error"]["message"]


def test_the_status_shows_figures_and_can_be_written_as_json():
    page = status((seen(port=5, pid=6, load_ms=1.234, warm_up_ms=None),), "1.2.3")
    (shown,) = page.body["backends"]
    assert page.body["version"] == "1.2.3"
    assert (shown["port"], shown["pid"], shown["load_ms"]) == (5, 6, 1.2)
    assert shown["state"] == "ready"
    assert "cause" not in shown
    assert msgspec.json.decode(msgspec.json.encode(page.body)) == page.body
