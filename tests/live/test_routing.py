"""Routing as a user sees it: a whole `1bit serve` over fake devices and a scripted scorer."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from front_door import Front, request_bytes
from llama_process import free_port, until

SCRIPTED = Path(__file__).parent.parent / "scripted_laya.py"
DEVICES = (
    "'HRX0: AMD Radeon (98304 MiB, 97520 MiB free);Vulkan0: AMD Radeon (98304 MiB, 97520 MiB free)'"
)
POLICY = {
    "default": "hrx",
    "classes": {"code": {"device": "vulkan", "why": "measured"}, "long_doc": {"device": "cpu"}},
}
CHAT = "/v1/chat/completions"

Start = Callable[..., Front]


def chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, **more}


@pytest.fixture
def start(fake_llama: str, tiny_models: Path, tmp_path: Path) -> Iterator[Start]:
    """Start routing front doors: `start("--hang", kind="daemon", knobs="load=1")`."""
    started: list[Front] = []

    def begin(
        *scorer: str,
        kind: str = "http",
        policy: dict[str, Any] | None = None,
        knobs: str = "",
        environment: dict[str, str] | None = None,
        arguments: tuple[str, ...] = (),
        **more: Any,
    ) -> Front:
        file = tmp_path / "policy.json"
        file.write_text(json.dumps(policy or POLICY))
        port = ("--port", "{port}") if kind == "http" else ()
        variables = {
            "ONEBIT_LAYA_SCORER": kind,
            "ONEBIT_LAYA_COMMAND": shlex.join([sys.executable, str(SCRIPTED), *port, *scorer]),
            **(environment or {}),
        }
        model = str(tiny_models / "tiny-llama.gguf")
        flags = ("-m", model, "--llama-server", fake_llama, "--device", "auto", "--laya")
        started.append(
            Front(
                tmp_path,
                *flags,
                "--route-policy",
                str(file),
                *arguments,
                knobs=f"model=hrx devices={DEVICES} {knobs}",
                environment=variables,
                **more,
            )
        )
        return started[-1]

    yield begin
    for front in started:
        front.stop()


def route_of(reply: httpx.Response) -> str:
    return reply.headers["x-1bit-route"]


def state_of(front: Front, name: str) -> dict[str, Any]:
    shown = front.client.get("/v1/status").json()["backends"]
    return next(backend for backend in shown if backend["name"] == name)


def laya_of(front: Front) -> dict[str, Any]:
    return front.client.get("/v1/status").json()["laya"]


@pytest.mark.parametrize("kind", ["http", "daemon"])
def test_requests_go_where_the_policy_sends_their_class(start: Start, kind: str) -> None:
    front = start(kind=kind).ready()
    assert state_of(front, "hrx")["state"] == "ready"
    assert state_of(front, "vulkan")["state"] == "stopped"
    assert laya_of(front)["scorer"]["state"] == "ready"
    reply = front.post(CHAT, chat("fix this code"))
    assert (reply.status_code, route_of(reply)) == (200, "code 0.70 vulkan")
    assert front.said("tiny-llama on vulkan (1bit-fake-llama), picked by laya")
    warm = front.log.index("warm-up request on port", front.log.index("picked by laya"))
    assert warm > 0
    assert route_of(front.post(CHAT, chat("hello there"))) == "default - hrx"
    assert route_of(front.post(CHAT, chat("write an essay"))) == "prose 0.70 hrx"
    assert route_of(front.post(CHAT, chat("x" * 1024))) == "long_doc - cpu"
    starts = [line for line in front.log.splitlines() if "(1bit-fake-llama)" in line]
    assert len(starts) == 3
    status = laya_of(front)
    assert {(row["class"], row["device"], row["replies"]) for row in status["routes"]} == {
        ("code", "vulkan", 1),
        ("default", "hrx", 1),
        ("prose", "hrx", 1),
        ("long_doc", "cpu", 1),
    }
    metrics = front.client.get("/metrics").text
    assert 'onebit_route_decisions_total{class="code",device="vulkan"} 1' in metrics
    assert "onebit_laya_questions_total 3" in metrics


def test_later_turns_follow_the_first_and_every_api_is_routed(start: Start) -> None:
    front = start().ready()
    first = chat("fix this code")
    assert route_of(front.post(CHAT, first)) == "code 0.70 vulkan"
    later = chat("fix this code")
    later["messages"] += [
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "now write an essay"},
    ]
    assert route_of(front.post(CHAT, later)) == "code 0.70 vulkan"
    assert laya_of(front)["asked"] == 1
    text = "mend my code"
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/completion", {"prompt": text}),
        ("/v1/responses", {"input": text}),
        ("/v1/messages", {"messages": [{"role": "user", "content": text}]}),
    ):
        assert route_of(front.post(path, {"max_tokens": 4, **body})) == "code 0.70 vulkan"
    counted = front.post("/tokenize", {"content": "hello"})
    assert "x-1bit-route" not in counted.headers
    assert counted.status_code == 200


def test_a_stream_says_its_route_and_so_does_one_with_early_comments(start: Start) -> None:
    front = start(environment={"ONEBIT_SERVER_PING_S": "0.2"}, knobs="load=1").ready()
    body = json.dumps(chat("fix this code", stream=True)).encode()
    with front.raw(request_bytes(CHAT, body)) as raw:
        head = raw.until(b"\r\n\r\n")
        assert b"X-1bit-Route: code 0.70 vulkan\r\n" in head
        text = raw.until(b"data: [DONE]")
        assert b": ping" in text
    with front.raw(request_bytes(CHAT, body)) as raw:
        assert b"X-1bit-Route: code 0.70 vulkan\r\n" in raw.until(b"\r\n\r\n")
        raw.until(b"data: [DONE]")


def test_a_request_that_names_a_backend_is_not_routed(start: Start) -> None:
    front = start().ready()
    reply = front.post(CHAT, chat("fix this code", model="hrx"))
    assert reply.status_code == 200
    assert "x-1bit-route" not in reply.headers
    assert state_of(front, "vulkan")["state"] == "stopped"
    for model in ("tiny-llama", "auto", "gpt-4o"):
        assert route_of(front.post(CHAT, chat("fix this code", model=model))).startswith("code")
    listed = front.client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["tiny-llama"]


def test_an_explanation_starts_and_counts_nothing(start: Start) -> None:
    front = start().ready()
    told = front.post("/v1/route", chat("fix this code")).json()
    assert (told["class"], told["device"], told["state"]) == ("code", "vulkan", "stopped")
    assert told["header"] == "X-1bit-Route: code 0.70 vulkan"
    assert "measured" in told["why"]
    assert front.post("/v1/route", chat("fix", model="cpu")).json()["backend"] == "cpu"
    assert front.post("/v1/route", {"prompt": "x" * 2000}).json()["class"] == "long_doc"
    assert front.post("/v1/route", [1]).json()["error"]["code"] == "no_request"
    assert front.client.get("/v1/route").status_code == 405
    assert laya_of(front)["routes"] == []


@pytest.mark.parametrize(
    ("how", "kind", "word"),
    [
        ("--garbage", "http", "nonsense"),
        ("--hang", "daemon", "slow"),
        pytest.param("--die", "http", "down", marks=pytest.mark.slow),
        pytest.param("--hang", "http", "slow", marks=pytest.mark.slow),
        pytest.param("--die", "daemon", "down", marks=pytest.mark.slow),
        pytest.param("--garbage", "daemon", "slow", marks=pytest.mark.slow),
    ],
)
def test_a_scorer_that_breaks_means_the_default_and_fails_nothing(
    start: Start, how: str, kind: str, word: str
) -> None:
    front = start(
        how,
        kind=kind,
        environment={"ONEBIT_LAYA_DEADLINE_S": "0.2"},
        constants={"_WARM_UP_S": 0.3, "_SCORER_S": 0.5},
    ).ready()
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda n: front.post(CHAT, chat(f"code {n}")), range(24)))
    assert {(reply.status_code, route_of(reply)) for reply in replies} == {(200, "default - hrx")}
    laya = laya_of(front)
    assert sum(laya["failures"].values()) == 24
    assert word in laya["failures"] or "down" in laya["failures"]
    assert len(front.said("Laya does not answer")) == 1


def test_a_scorer_that_is_killed_comes_back_and_is_asked_again(start: Start) -> None:
    front = start().ready()
    pid = laya_of(front)["scorer"]["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: laya_of(front)["scorer"].get("restarts") == 1, "a restart")
    until(lambda: laya_of(front)["scorer"]["state"] == "ready", "a scorer that is ready")
    assert route_of(front.post(CHAT, chat("fix this code"))) == "code 0.70 vulkan"


def test_the_scorer_ends_with_the_server(start: Start) -> None:
    front = start().ready()
    pid = laya_of(front)["scorer"]["pid"]
    front.signal(signal.SIGTERM)
    assert front.wait() == 0
    assert not Path(f"/proc/{pid}").exists()


def test_a_scorer_that_cannot_start_delays_nothing_for_ever(start: Start) -> None:
    front = start("--no-such-option").ready()
    assert route_of(front.post(CHAT, chat("fix this code"))) == "default - hrx"
    scorer = laya_of(front)["scorer"]
    assert scorer["state"] == "failed"
    assert "no-such-option" in scorer["cause"]


def test_a_scorer_that_other_machines_could_reach_is_not_used(start: Start) -> None:
    front = start("--any-host").ready()
    assert route_of(front.post(CHAT, chat("fix this code"))) == "default - hrx"
    assert front.said("beyond this machine: add --host 127.0.0.1")


def test_a_scorer_that_answers_with_errors_for_ever_is_started_again(start: Start) -> None:
    front = start("--failing", constants={"HANG_S": 0.5}).ready()
    for number in range(3):
        assert route_of(front.post(CHAT, chat(f"code {number}"))) == "default - hrx"
    until(lambda: laya_of(front)["scorer"].get("restarts"), "a restart")


def test_clients_that_leave_make_no_scorer_suspect(start: Start) -> None:
    front = start("--hang", environment={"ONEBIT_LAYA_DEADLINE_S": "60"},
                  constants={"_WARM_UP_S": 0.1}).ready()  # fmt: skip
    for number in range(4):
        with front.raw(request_bytes(CHAT, json.dumps(chat(f"code {number}")).encode())):
            pass
    assert laya_of(front)["failures"] == {}
    assert laya_of(front)["asked"] == 0


def test_an_explanation_of_nothing_is_refused(start: Start) -> None:
    front = start().ready()
    assert front.post("/v1/route", {}).status_code == 400


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"default": "hrx", "classes": {"code": {"device": "vulcan"}}}, "classes.code.device"),
        ({"default": "hrx", "classes": {"poems": {"device": "hrx"}}}, "classes.poems"),
        ({"classes": {}}, "names no default"),
    ],
)
def test_a_policy_that_means_nothing_here_is_refused_with_its_place(
    start: Start, policy: dict[str, Any], said: str
) -> None:
    front = start(policy=policy)
    assert front.wait() == 2
    assert said in front.log


def test_a_device_that_is_not_there_falls_back_and_says_so_once(start: Start) -> None:
    policy = {"default": "rocm", "classes": {"code": {"device": "zinc"}}}
    front = start(policy=policy).ready()
    assert len(front.said("the policy's default rocm cannot run this model")) == 1
    assert len(front.said("zinc cannot run this model")) == 1
    assert route_of(front.post(CHAT, chat("fix this code"))) == "code 0.70 hrx"


def test_a_device_that_is_named_leaves_nothing_to_choose_from(start: Start) -> None:
    front = start(arguments=("--device", "vulkan"))
    assert front.wait() == 2
    assert "nothing to choose from" in front.log


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http", "daemon"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_scorer_that_dies_or_hangs_under_load_fails_no_request(
    start: Start, kind: str, number: signal.Signals
) -> None:
    front = start(
        kind=kind,
        environment={"ONEBIT_LAYA_DEADLINE_S": "0.3"},
        constants={"HANG_S": 1.0},
    ).ready()
    assert front.post(CHAT, chat("fix this code")).status_code == 200  # vulkan is started
    replies: list[httpx.Response] = []
    first = laya_of(front)["scorer"]["pid"]

    def keep_asking(client: int) -> None:
        for turn in range(40):
            replies.append(front.post(CHAT, chat(f"code {client} {turn}")))
            if (client, turn) == (0, 10):
                os.kill(first, number)

    with ThreadPoolExecutor(4) as pool:
        for asked in [pool.submit(keep_asking, client) for client in range(4)]:
            asked.result()
    routes = {route_of(reply) for reply in replies}
    assert len(replies) == 160
    assert {reply.status_code for reply in replies} == {200}
    assert routes == {"code 0.70 vulkan", "default - hrx"}
    defaults = sum(route_of(reply) == "default - hrx" for reply in replies)
    assert sum(laya_of(front)["failures"].values()) == defaults
    until(lambda: laya_of(front)["scorer"].get("pid") not in (None, first), "another scorer")
    until(lambda: laya_of(front)["scorer"]["state"] == "ready", "a scorer that is ready")
    assert route_of(front.post(CHAT, chat("fix more code"))) == "code 0.70 vulkan"


def test_a_reload_takes_another_policy_over_and_keeps_what_is_known(
    start: Start, tmp_path: Path
) -> None:
    front = start().ready()
    assert route_of(front.post(CHAT, chat("fix this code"))) == "code 0.70 vulkan"
    pid = laya_of(front)["scorer"]["pid"]
    changed = {"default": "hrx", "classes": {"code": {"device": "hrx"}}}
    (tmp_path / "policy.json").write_text(json.dumps(changed))
    assert front.post("/v1/reload").status_code == 200
    assert route_of(front.post(CHAT, chat("fix this code"))) == "code 0.70 hrx"
    laya = laya_of(front)
    assert (laya["asked"], laya["scorer"]["pid"]) == (1, pid)


def test_a_reload_that_moves_the_default_keeps_every_child_and_starts_the_new_default(
    start: Start, tmp_path: Path
) -> None:
    front = start().ready()
    first = state_of(front, "hrx")["pid"]
    moved = {"default": "vulkan", "classes": {"code": {"device": "hrx"}}}
    (tmp_path / "policy.json").write_text(json.dumps(moved))
    done = front.post("/v1/reload").json()["reloaded"]
    assert {"hrx", "vulkan"} <= set(done["kept"])
    assert state_of(front, "vulkan")["state"] == "ready"
    assert state_of(front, "hrx")["pid"] == first
    assert route_of(front.post(CHAT, chat("hello there"))) == "default - vulkan"
    os.kill(state_of(front, "vulkan")["pid"], signal.SIGKILL)
    until(lambda: front.health().status_code == 503, "the default to be missed")
    until(lambda: front.health().status_code == 200, "the default to be back")


def test_a_reload_whose_new_default_does_not_start_changes_nothing(
    start: Start, tmp_path: Path
) -> None:
    front = start(knobs=f"starts={tmp_path}/starts dead_at='|load:3'").ready()
    moved = {"default": "vulkan", "classes": {}}
    (tmp_path / "policy.json").write_text(json.dumps(moved))
    refused = front.post("/v1/reload")
    assert refused.status_code == 400
    assert (
        "vulkan, the default device's backend, did not start" in refused.json()["error"]["message"]
    )
    assert front.health().status_code == 200
    assert route_of(front.post(CHAT, chat("hello there"))) == "default - hrx"


def test_the_real_laya_serve_is_a_scorer(start: Start) -> None:
    program = str(Path(sys.executable).with_name("laya-serve"))
    variables = {"ONEBIT_LAYA_COMMAND": program, "LAYA_SERVE_BACKEND": "fake"}
    front = start(environment=variables).ready()
    scorer = until(
        lambda: (s := laya_of(front)["scorer"])["state"] == "ready" and s, "laya-serve to be ready"
    )
    listening = {
        (one.laddr.ip, one.laddr.port)
        for one in psutil.Process(scorer["pid"]).net_connections(kind="tcp")
        if one.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", scorer["port"])}
    # its answers are uniform, so that none is sure enough
    assert route_of(front.post(CHAT, chat("fix this code"))) == "default - hrx"
    assert route_of(front.post(CHAT, chat("x" * 1024))) == "long_doc - cpu"
    laya = laya_of(front)
    assert (laya["asked"], laya["failures"]) == (1, {})


def test_a_scorer_at_an_address_is_asked_and_left_alone(start: Start) -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, str(SCRIPTED), "--port", str(port)]) as scorer:
        variables = {"ONEBIT_LAYA_COMMAND": "", "ONEBIT_LAYA_URL": f"http://127.0.0.1:{port}"}
        front = start(environment=variables).ready()
        assert route_of(front.post(CHAT, chat("fix this code"))) == "code 0.70 vulkan"
        front.stop()
        assert scorer.poll() is None
        scorer.kill()
