"""The whole program: signals, exits, what a machine may do to it, and a real model behind it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from front_door import CHAT, Front, request_bytes
from llama_process import frames, until

from onebit_serve.core import wire

Start = Callable[..., Front]
HRX = ("--device", "hrx")
AT_ONCE = {"ONEBIT_SERVER_DRAIN_S": "0.1"}


@pytest.fixture
def start(fake_llama: str, tiny_models: Path, tmp_path: Path) -> Iterator[Start]:
    """Start front doors over a fake backend: `start("--device", "hrx", knobs="load=1")`."""
    started: list[Front] = []

    def begin(*arguments: str, **more: Any) -> Front:
        more["knobs"] = f"model=hrx {more.get('knobs', '')}"
        model = str(tiny_models / "tiny-llama.gguf")
        flags = ("-m", model, "--llama-server", fake_llama)
        started.append(Front(tmp_path, *flags, *arguments, **more))
        return started[-1]

    yield begin
    for front in started:
        front.stop()


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def pids(front: Front) -> list[int]:
    """Return the processes that the fake recorded: itself and its grandchild."""
    started = [entry["pid"] for entry in front.record("start")]
    return started + [entry["grandchild"] for entry in front.record("fork")]


def streaming(front: Front) -> Any:
    """Open a stream that goes on for long, and return it after its first event."""
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 5000}).encode()
    raw = front.raw(request_bytes("/v1/chat/completions", body))
    raw.until(b"data: ")
    return raw


# ends


PHASES = {
    "loading": (HRX, "load=60"),
    "warming": (HRX, "first=60"),
    "ready": (("--device", "cpu"), ""),
    "streaming": (("--device", "cpu"), "model=none tps=20"),
}


def in_phase(start: Start, phase: str, knobs: str = "") -> Front:
    arguments, own = PHASES[phase]
    front = start(*arguments, knobs=f"{own} {knobs}", environment=AT_ONCE)
    if phase in {"loading", "warming"}:
        front.wait_health(phase)
        until(lambda: front.record("start"), "the backend to start")
    else:
        front.ready()
    return front


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_stops_it_in_every_phase(start: Start, phase: str, number: signal.Signals) -> None:
    front = in_phase(start, phase)
    with contextlib.ExitStack() as stack:
        if phase == "streaming":
            stack.enter_context(streaming(front))
        front.signal(number)
        assert front.wait() == 0
    assert front.said("stopping")
    assert not any(map(alive, pids(front)))
    assert "Traceback" not in front.log


@pytest.mark.parametrize("phase", ["loading", "ready"])
def test_a_second_interrupt_kills_at_once(start: Start, phase: str) -> None:
    front = in_phase(start, phase, "term=ignore fork=stubborn")
    front.signal(signal.SIGINT)
    front.wait_said("stopping")
    front.signal(signal.SIGINT)
    assert front.wait() == 130
    until(lambda: not any(map(alive, pids(front))), "the end of the backend's group", 2.0)


@pytest.mark.parametrize("fork", ["no", "stubborn"])
@pytest.mark.parametrize("phase", ["loading", "ready"])
def test_nothing_of_the_backend_outlives_a_supervisor_that_was_killed(
    start: Start, phase: str, fork: str
) -> None:
    front = in_phase(start, phase, f"term=ignore fork={fork}")
    until(lambda: len(pids(front)) == (1 if fork == "no" else 2), "the backend's processes")
    front.signal(signal.SIGKILL)
    front.wait()
    until(lambda: not any(map(alive, pids(front))), "the end of the backend's group", 2.0)


def test_a_backend_that_does_not_obey_is_killed_in_time(start: Start) -> None:
    stop = {"ONEBIT_SERVER_STOP_S": "0.3", **AT_ONCE}
    front = start("--device=cpu", knobs="term=ignore fork=stubborn", environment=stop).ready()
    front.signal(signal.SIGTERM)
    assert front.wait() == 0
    until(lambda: not any(map(alive, pids(front))), "the end of the backend's group", 2.0)


def test_the_backend_inherits_nothing_and_has_a_session_of_its_own(start: Start) -> None:
    front = start("--device=cpu").ready()
    (begun,) = front.record("start")
    assert begun["descriptors"] == [0, 1, 2] or set(begun["descriptors"]) <= {0, 1, 2, 3}
    assert begun["session"] == begun["group"] == begun["pid"]


# what a machine may do to it


def test_a_taken_port_is_exit_3_before_anything_is_spawned(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        front = start("--device=cpu", port=port)
        assert front.wait() == 3
    error, hint = front.log.splitlines()
    assert error.startswith(f"error: port {port} on 127.0.0.1 is taken")
    assert str(os.getpid()) in error
    assert hint.startswith("hint: ")
    assert front.record("start") == []


@pytest.mark.parametrize("case", [str.upper, str.lower])
def test_proxies_never_touch_loopback(start: Start, case: Callable[[str], str]) -> None:
    dead = {case(name): "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy")}
    front = start(*HRX, environment=dead).ready()
    assert front.health().json() == {"status": "ok"}
    assert front.post("/v1/chat/completions", CHAT).status_code == 200
    # The backend may need them, to fetch an image for one.
    assert dead.items() <= front.record("start")[0]["environment"].items()


def test_an_unread_pipe_on_stderr_stops_nobody(start: Start) -> None:
    out, into = os.pipe()
    try:
        os.set_blocking(into, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(into, b"x" * 4096)
        os.set_blocking(into, True)
        front = start(*HRX, stderr=into)
        front.wait_health("ok")
        for _ in range(20):
            assert front.post("/v1/chat/completions", CHAT).status_code == 200
        front.signal(signal.SIGTERM)
        assert front.wait() == 0
    finally:
        os.close(out)
        os.close(into)


def test_a_backend_that_talks_without_end_is_listened_to(start: Start) -> None:
    front = start("--device=cpu", knobs="noise=20000000").ready()
    for _ in range(10):
        assert front.post("/v1/chat/completions", CHAT).status_code == 200
    assert psutil.Process(front.process.pid).memory_info().rss < 100e6


# a real model


@pytest.fixture(scope="module")
def real(
    real_llama_server: str, smollm2: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    """A front door over a real llama-server and a small real model, warmed up."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "serve.toml").write_text('[warmup]\ndevices = ["cpu"]\nprompt_tokens = 100\n')
    front = Front(
        folder,
        *("-m", smollm2, "--llama-server", real_llama_server, "--device=cpu", "--alias", "pub"),
        *("-c", "2048", "--config", str(folder / "serve.toml"), "--log-format", "json"),
    )
    try:
        yield front.ready()
    finally:
        front.stop()


@pytest.fixture(scope="module")
def client(real: Front) -> Iterator[openai.OpenAI]:
    import httpx

    with httpx.Client(trust_env=False) as http:
        yield openai.OpenAI(
            base_url=f"{real.url}/v1", api_key="none", http_client=http, max_retries=0
        )


QUESTION = [{"role": "user", "content": "Name three colors."}]


def test_the_warm_up_of_a_real_model_counts_its_tokens(real: Front) -> None:
    said = [json.loads(line) for line in real.log.splitlines()]
    (warm_up,) = [entry for entry in said if "warm-up request on port" in entry["message"]]
    assert (warm_up["prompt_tokens"], warm_up["decode_tokens"]) == (100, 8)
    assert warm_up["port"] == real.backend()["port"]
    ready = [entry for entry in said if entry["message"].startswith("ready on")]
    assert [entry["url"] for entry in ready] == [real.url]
    assert real.health().json() == {"status": "ok"}


def test_the_client_of_openai_gets_an_answer(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pub"]
    reply = client.chat.completions.create(
        model="pub", messages=QUESTION, max_tokens=24, temperature=0
    )
    assert reply.model == "pub"
    assert reply.choices[0].message.content.strip()
    assert 0 < reply.usage.completion_tokens <= 24


def test_the_client_of_openai_gets_the_same_answer_as_a_stream(client: openai.OpenAI) -> None:
    asked = {"model": "pub", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    more = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=more))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_client_of_openai_is_told_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="pub", messages=QUESTION, stream=True, extra_body={"grammar": "root ::= ("}
        )
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.list()
    assert caught.value.code == "not_found"


COLORS = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {"type": "object", "properties": {"color": {"type": "string"}}},
    },
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 12}),
        (
            "/v1/chat/completions",
            {"messages": QUESTION, "max_tokens": 6, "logprobs": True, "top_logprobs": 2},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": QUESTION,
                "max_tokens": 60,
                "tools": [COLORS],
                "tool_choice": "required",
            },
        ),
        ("/v1/completions", {"prompt": "Red, green,", "max_tokens": 8}),
        ("/v1/completions", {"prompt": "Red, green,", "max_tokens": 4, "logprobs": 2}),
        ("/completion", {"prompt": "Red, green,", "n_predict": 8}),
        ("/completion", {"prompt": "Red,", "n_predict": 4, "n_probs": 2, "return_tokens": True}),
        ("/completion", {"prompt": "Red, green,", "n_predict": 9, "stop": ["e"]}),
    ],
)
def test_a_real_stream_put_together_is_the_reply_that_does_not_stream(
    real: Front, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "temperature": 0, "seed": 1, "cache_prompt": False}
    whole = real.post(path, body)
    assert whole.status_code == 200, whole.text
    request = wire.as_stream(path, json.dumps(body).encode())
    streamed = real.client.post(path, content=request)
    assembler = wire.Assembler(request)
    assembler.feed(streamed.content)
    assert comparable(json.loads(assembler.body())) == comparable(whole.json())


def comparable(value: Any) -> Any:
    """Return a reply without what differs from one request to the next."""
    if isinstance(value, list):
        return [comparable(part) for part in value]
    if not isinstance(value, dict):
        return round(value, 3) if isinstance(value, float) else value
    varies = ("id", "created", "timings", "generation_settings", "id_slot", "usage", "stream")
    return {k: comparable(v) for k, v in value.items() if k not in varies}


def test_a_real_slot_is_free_soon_after_its_client_left(real: Front) -> None:
    body = {"messages": QUESTION, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    raw = real.raw(request_bytes("/v1/chat/completions", json.dumps(body).encode()))
    raw.until(b"data: ")
    raw.sock.close()
    until(lambda: not any(s["is_processing"] for s in real.client.get("/slots").json()), "a slot")
    until(lambda: not real.backend()["abandoned"], "the slot to count as free")
    assert real.backend()["in_flight"] == 0


def test_the_rest_of_a_real_server_is_relayed(real: Front) -> None:
    tokens = real.post("/tokenize", {"content": "Name three colors."}).json()["tokens"]
    text = real.post("/detokenize", {"tokens": tokens}).json()["content"]
    assert text.strip() == "Name three colors."
    assert real.client.get("/props").json()["model_alias"] == "pub"
    page = real.client.get("/", headers={"Accept-Encoding": "gzip"})
    assert page.status_code in (200, 404)
    assert real.client.get("/cors-proxy?url=http://x").status_code == 404
    events = frames(real.post("/completion", {"prompt": "a", "n_predict": 3, "stream": True}).text)
    assert events[-1]["stop"] is True


@pytest.mark.parametrize(
    ("kind", "flags", "path", "body"),
    [
        ("bert", ("--embedding",), "/v1/embeddings", {"input": "hello"}),
        ("rerank", ("--reranking",), "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("garbage", ("-c", "128"), "/v1/chat/completions", CHAT),
        ("llama", ("-c", "128", "-np", "1"), "/v1/chat/completions", CHAT),
    ],
)
def test_each_role_of_a_real_server_is_warmed_its_own_way(
    real_llama_server: str,
    tiny_models: Path,
    tmp_path: Path,
    kind: str,
    flags: tuple[str, ...],
    path: str,
    body: dict[str, Any],
) -> None:
    (tmp_path / "serve.toml").write_text('[warmup]\ndevices = ["cpu"]\n')
    front = Front(
        tmp_path,
        *("-m", str(tiny_models / f"tiny-{kind}.gguf"), "--llama-server", real_llama_server),
        *("--device=cpu", "--config", str(tmp_path / "serve.toml"), "--log-format", "json"),
        *flags,
    )
    try:
        front.ready()
        said = [json.loads(line) for line in front.log.splitlines()]
        (warm_up,) = [entry for entry in said if "warm-up request on port" in entry["message"]]
        assert front.health().json() == {"status": "ok"}
        if kind == "llama":
            slot = front.client.get("/props").json()["default_generation_settings"]["n_ctx"]
            assert warm_up["prompt_tokens"] == min(465, slot - 8 - 2)
            assert warm_up["decode_tokens"] == 8
        answer = front.post(path, body)
        # A model that speaks garbage may be refused its own words by the backend.
        assert answer.status_code == 200 or kind == "garbage", answer.text
    finally:
        front.stop()
