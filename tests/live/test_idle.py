"""Lazy backends: one start for many, none in use ever stopped."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from front_door import Front, lazy_backends, request_bytes
from llama_process import DEADLINE_S, until

CHAT = "/v1/chat/completions"

Start = Callable[..., Front]


@pytest.fixture
def start(fake_llama: str, tiny_models: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a front door: long documents go to the lazy GPU0, everything else to the CPU."""
    started: list[Front] = []

    def begin(knobs: str = "", *, keys: str = "", **more: Any) -> Front:
        policy = tmp_path / "policy.json"
        policy.write_text(
            json.dumps({"default": "cpu", "classes": {"long_doc": {"device": "GPU0"}}})
        )
        model = str(tiny_models / "tiny-llama.gguf")
        file = lazy_backends(tmp_path, fake_llama, model, {"GPU0": knobs}, keys=keys)
        started.append(
            Front(tmp_path, "--config", str(file), "--route-policy", str(policy), **more)
        )
        return started[-1].ready()

    yield begin
    for front in started:
        front.stop()


def long_chat(number: int = 0, **more: Any) -> dict[str, Any]:
    text = f"{number} " + "word " * 300
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def state_of(front: Front, name: str = "GPU0") -> dict[str, Any]:
    shown = front.client.get("/v1/status").json()["backends"]
    found: dict[str, Any] = next(backend for backend in shown if backend["name"] == name)
    return found


def starts(front: Front, name: str = "GPU0") -> int:
    file = front.folder / f"{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return sum(json.loads(line)["event"] == "start" for line in lines)


def ask(front: Front, number: int = 0) -> httpx.Response:
    return httpx.post(front.url + CHAT, json=long_chat(number), timeout=DEADLINE_S, trust_env=False)


def test_64_first_requests_are_one_start(start: Start) -> None:
    front = start("load=1")
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda n: ask(front, n), range(64)))
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.headers["x-1bit-route"] for reply in replies} == {"long_doc - GPU0"}
    assert starts(front) == 1
    assert len(front.said("picked by laya")) == 1
    assert front.log.index("picked by laya") < front.log.rindex("warm-up request on port")


def test_a_start_that_fails_tells_all_who_wait(start: Start) -> None:
    front = start("load=1 dead_at=load:3 last=out-of-memory")
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda n: ask(front, n), range(64)))
    assert {reply.status_code for reply in replies} == {503}
    assert all("code 3" in reply.json()["error"]["message"] for reply in replies)
    assert {reply.headers["x-1bit-route"] for reply in replies} == {"long_doc - GPU0"}
    assert starts(front) == 1
    assert front.health().status_code == 200


def test_who_leaves_while_waiting_changes_nothing_for_the_others(start: Start) -> None:
    front = start("load=6")
    with ThreadPoolExecutor(16) as pool:
        with front.raw(request_bytes(CHAT, json.dumps(long_chat()).encode())):
            until(lambda: state_of(front)["waiting"] == 1, "one who waits")
            others = [pool.submit(ask, front, n) for n in range(16)]
            until(lambda: state_of(front)["waiting"] == 17, "all to wait")
        until(lambda: state_of(front)["waiting"] == 16, "one to leave")
        assert {other.result().status_code for other in others} == {200}
    assert starts(front) == 1


def test_an_idle_backend_is_stopped_and_comes_back(start: Start) -> None:
    front = start("load=0.6", keys="idle_s = 0.3")
    assert ask(front).status_code == 200  # the load is longer than idle_s, which does not count it
    until(lambda: state_of(front)["state"] == "stopped", "the idle one to stop")
    assert front.wait_said("GPU0 is stopped: no request for 0.3 s (idle_s)")
    assert state_of(front, "cpu")["state"] == "ready"
    assert front.health().status_code == 200
    assert ask(front).status_code == 200
    assert starts(front) == 2


def test_a_stream_that_is_longer_than_idle_s_is_not_cut(start: Start) -> None:
    front = start("tps=10", keys="idle_s = 0.2")
    body = json.dumps(long_chat(stream=True) | {"max_tokens": 12}).encode()
    with front.raw(request_bytes(CHAT, body)) as raw:
        raw.until(b"data: [DONE]")
    until(lambda: state_of(front)["state"] == "stopped", "the idle one to stop")
    assert starts(front) == 1


@pytest.mark.slow
def test_forty_starts_and_unloads_under_traffic_leak_nothing(start: Start) -> None:
    front = start("tps=40", keys="idle_s = 0.15")
    us = psutil.Process(front.process.pid)
    over, cut = threading.Event(), []

    def keep_asking(number: int) -> None:
        client = httpx.Client(base_url=front.url, timeout=DEADLINE_S, trust_env=False)
        with client:
            while not over.is_set():
                short = {"messages": [{"role": "user", "content": f"hi {number}"}]}
                with client.stream(
                    "POST", CHAT, json={**short, "max_tokens": 8, "stream": True}
                ) as reply:
                    text = reply.read()
                if reply.status_code != 200 or b"[DONE]" not in text:
                    cut.append(text)

    def cycle(number: int) -> None:
        reply = front.post(CHAT, long_chat(number, stream=True))
        assert b"[DONE]" in reply.content, reply.content
        until(lambda: state_of(front)["state"] == "stopped", "the idle one to stop")

    def held() -> tuple[int, int]:
        return us.num_fds(), len(us.children(recursive=True))

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(keep_asking, number) for number in range(2)]
        for number in range(5):
            cycle(number)
        before_bytes = us.memory_info().rss
        for number in range(5, 40):
            cycle(number)
        after_bytes = us.memory_info().rss
        over.set()
        for one in asked:
            one.result()
    assert not cut
    assert starts(front) == 40
    assert held()[1] == 2  # the default's child and its guard
    assert held()[0] < 40
    assert after_bytes - before_bytes < 8 << 20
