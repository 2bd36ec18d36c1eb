"""One backend's life as a user sees it: a whole `1bit serve` over a fake backend."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from front_door import CHAT, Front
from llama_process import DEADLINE_S, until

Start = Callable[..., Front]
HRX = ("--device", "hrx")


@pytest.fixture
def start(fake_llama: str, tiny_models: Path, tmp_path: Path) -> Iterator[Start]:
    """Start front doors over a fake backend: `start("--device", "hrx", knobs="load=1")`."""
    started: list[Front] = []

    def begin(*arguments: str, program: str = fake_llama, **more: Any) -> Front:
        more["knobs"] = f"model=hrx {more.get('knobs', '')}"
        model = str(tiny_models / "tiny-llama.gguf")
        flags = ("-m", model, "--llama-server", program)
        started.append(Front(tmp_path, *flags, *arguments, **more))
        return started[-1]

    yield begin
    for front in started:
        front.stop()


def work(front: Front) -> list[dict[str, Any]]:
    """Return the requests for work that reached the backend, with their bodies read."""
    found = [entry for entry in front.record("request") if entry["work"]]
    return [{**entry, "body": json.loads(entry["body"])} for entry in found]


# readiness


def test_the_door_says_loading_then_warming_then_ready(start: Start) -> None:
    front = start(*HRX, knobs="load=1 first=1")
    loading = front.wait_health("loading")
    assert loading.status_code == 503
    assert int(loading.headers["retry-after"]) > 0
    (phase,) = loading.json()["backends"]
    assert (phase["name"], phase["state"]) == ("hrx", "loading")
    assert front.client.get("/livez").status_code == 200
    assert [m["id"] for m in front.client.get("/v1/models").json()["data"]] == ["tiny-llama"]
    early = front.post("/v1/chat/completions", CHAT)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
    assert int(early.headers["retry-after"]) > 0
    warming = front.wait_health("warming")
    assert warming.status_code == 503
    assert warming.json()["backends"][0]["state"] == "warming"
    assert front.post("/v1/chat/completions", CHAT).json()["error"]["code"] == "warming"
    assert front.said("ready on") == []
    assert front.wait_health("ok").status_code == 200
    front.ready()
    for path in ("/health", "/v1/health", "/readyz"):
        assert front.client.get(path).json() == {"status": "ok"}
    assert front.post("/v1/chat/completions", CHAT).status_code == 200
    assert [line for line in front.log.splitlines() if line] == [
        "1bit serve: tiny-llama on hrx (1bit-fake-llama)",
        front.said("no driver cache found")[0],
        front.said("warm-up request on port")[0],
        f"1bit serve: ready on {front.url}",
    ]
    shown = front.backend()
    assert shown["load_ms"] >= 1000
    assert shown["warm_up_ms"] >= 1000
    # Nothing of a client's came before the warm-up was done.
    first = front.record("reply")[0]
    assert (first["work"], first["ended"]) == (1, "done")


def test_a_line_of_the_log_never_stands_for_health(start: Start) -> None:
    lie = "srv  llama_server: model loaded; server is listening; all slots are idle"
    front = start("--device=cpu", "--log-format", "json", knobs=f"load=1 lines=0.05 line='{lie}'")
    front.ready()
    said = [json.loads(line) for line in front.log.splitlines()]
    ready = next(entry for entry in said if entry["message"].startswith("ready on"))
    # The log's times have three digits.
    assert ready["time"] + 0.001 >= front.record("loaded")[0]["time"]
    assert front.backend()["load_ms"] >= 1000


def test_a_backend_that_answers_slowly_gets_ready_all_the_same(start: Start) -> None:
    front = start("--device=cpu", knobs="health_delay=3").ready()
    assert front.backend()["state"] == "ready"
    assert len(front.requests("/health")) == 1


def test_health_is_asked_seldom_once_it_is_good(start: Start) -> None:
    front = start("--device=cpu").ready()
    asked = len(front.requests("/health"))
    for _ in range(20):
        assert front.post("/v1/chat/completions", CHAT).status_code == 200
    assert len(front.requests("/health")) == asked
    # A connection that lingers would have a worker of the backend wait for it.
    opened = {entry["connection"] for entry in front.requests("/health")}
    closed = {e["connection"] for e in front.record("closed") + front.record("cut")}
    assert opened <= closed


THIEF = """#!{python}
import os, pathlib, sys, time
words = sys.argv[1:]
stolen = pathlib.Path({folder!r}, "stolen")
if "--port" in words and not stolen.exists():
    stolen.write_text(words[words.index("--port") + 1])
    while not stolen.with_name("go").exists():
        time.sleep(0.002)
os.execv({fake!r}, [{fake!r}, *words])
"""


def test_a_stolen_port_is_noticed_and_another_taken(
    start: Start, fake_llama: str, tmp_path: Path
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(
        THIEF.format(python=sys.executable, folder=str(tmp_path), fake=str(fake_llama))
    )
    program.chmod(0o755)
    front = start("--device=cpu", program=str(program))
    stolen = tmp_path / "stolen"
    until(lambda: stolen.exists() and stolen.read_text(), "the port to steal")
    port = int(stolen.read_text())
    asked = threading.Event()

    def answer(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.recv(65536)
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                asked.set()

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        try:
            # The thief says 200, and nobody believes it.
            assert asked.wait(DEADLINE_S)
            assert front.health().status_code == 503
            (tmp_path / "go").touch()
            front.ready()
            shown = front.backend()
            assert shown["port"] != port
            assert front.said("taken by another program")
            assert front.post("/v1/chat/completions", CHAT).status_code == 200
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


# warm-up


@pytest.mark.parametrize(("context", "tokens"), [((), 465), (("-c", "256", "-np", "1"), 246)])
def test_the_warm_up_is_one_request_of_the_right_size(
    start: Start, context: tuple[str, ...], tokens: int
) -> None:
    front = start(*HRX, *context).ready()
    (warm_up,) = work(front)
    body = warm_up["body"]
    assert warm_up["path"] == "/completion"
    assert len(body["prompt"]) == tokens
    assert (body["n_predict"], body["temperature"], body["cache_prompt"]) == (8, 0, False)
    (done,) = front.record("reply")
    assert (done["timings"]["prompt_n"], done["timings"]["predicted_n"]) == (tokens, 8)
    (line,) = front.said("warm-up")
    port = front.backend()["port"]
    assert re.fullmatch(rf"1bit serve: warm-up request on port {port} took \d+ ms", line)
    # The shapes of the warm-up are built: no client meets them again.
    assert front.post("/completion", {**body, "stream": False}).status_code == 200
    until(lambda: len(front.record("reply")) == 2, "the record of the client's request")
    assert front.record("reply")[-1]["unbuilt"] == []


@pytest.mark.parametrize(
    ("arguments", "value", "reason"),
    [
        ((*HRX, "--no-warmup"), "", "off"),
        (HRX, "1", "off"),
        (HRX, "yes", "off"),
        (("--device", "cpu"), "", "cpu"),
    ],
)
def test_a_warm_up_that_is_off_is_said_and_not_sent(
    start: Start, arguments: tuple[str, ...], value: str, reason: str
) -> None:
    front = start(*arguments, environment={"ONEBIT_NO_WARMUP": value} if value else {}).ready()
    port = front.backend()["port"]
    assert front.said("warm-up") == [f"1bit serve: warm-up skipped on port {port} ({reason})"]
    assert work(front) == []


def test_a_warm_up_that_fails_once_is_sent_again(start: Start) -> None:
    front = start(*HRX, knobs="fail=500@1:Boom").ready()
    assert len(work(front)) == 2
    assert front.health().json() == {"status": "ok"}
    assert len(front.said("warm-up request on port")) == 1
    (said,) = front.said("second try")
    assert "Boom" in said


def test_a_warm_up_that_fails_twice_leaves_a_backend_that_is_said_to_be_degraded(
    start: Start,
) -> None:
    front = start(*HRX, knobs="fail=500@1-2:Boom").ready()
    assert len(work(front)) == 2
    health = front.health()
    assert (health.status_code, health.json()["degraded"]) == (200, ["hrx"])
    assert "Boom" in front.backend()["degraded"]
    assert len(front.said("degraded")) == 1
    assert front.said("warm-up request on port") == []
    assert front.post("/v1/chat/completions", CHAT).status_code == 200


@pytest.mark.parametrize("fault", ["reset@1", "stream@1:Boom"])
def test_a_warm_up_that_breaks_is_sent_again(start: Start, fault: str) -> None:
    front = start(*HRX, knobs=f'fail="{fault}"').ready()
    assert len(work(front)) == 2
    assert front.health().json() == {"status": "ok"}


def test_the_refusal_of_meaningless_output_is_a_warm_up_that_is_done(start: Start) -> None:
    front = start(*HRX, knobs="fail=format@1+").ready()
    assert len(work(front)) == 1
    assert front.health().json() == {"status": "ok"}
    assert len(front.said("warm-up request on port")) == 1


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ("dead_at=req1 last='out of memory'", "exited (code 1) while warming"),
        ("dead_at=req1/chunk2:SEGV last='out of memory'", "exited (signal SIGSEGV) while warming"),
        ("dead_at=load:3 last='out of memory'", "exited (code 3) while loading"),
    ],
)
def test_a_death_before_ready_is_a_failed_start(start: Start, knobs: str, words: str) -> None:
    front = start(*HRX, knobs=knobs)
    assert front.wait() == 1
    (line,) = front.said("a hrx backend")
    assert words in line
    assert "out of memory" in line
    assert front.said("ready on") == []
    assert "Traceback" not in front.log
    assert len(front.record("start")) == 1


def test_a_hang_in_the_warm_up_is_a_failed_start(start: Start) -> None:
    front = start(*HRX, knobs="hang_at=req1", environment={"ONEBIT_BACKEND_HANG_S": "1"})
    assert front.wait() == 1
    assert front.said("no progress for 1 s")
    assert front.said("ready on") == []


def test_a_warm_up_that_takes_too_long_is_cancelled_and_the_backend_serves(start: Start) -> None:
    front = start(*HRX, knobs="first=30", environment={"ONEBIT_WARMUP_DEADLINE_S": "0.5"})
    front.ready()
    assert front.health().json()["degraded"] == ["hrx"]
    until(lambda: front.record("gone"), "the backend to notice")


def test_a_backend_that_falls_silent_for_a_while_is_not_given_up(start: Start) -> None:
    began_s = time.time()
    front = start(*HRX, knobs="first=2", environment={"ONEBIT_BACKEND_HANG_S": "60"}).ready()
    assert front.health().json() == {"status": "ok"}
    assert front.record("reply")[0]["time"] > began_s + 2


def test_a_program_that_cannot_be_started_is_a_failed_start(start: Start, tmp_path: Path) -> None:
    # It answers questions as a llama-server does, and is gone when it is to serve.
    program = tmp_path / "llama-server"
    program.write_text(
        "#!/bin/sh\ncase $1 in\n--version) echo version: 1;;\n--help) echo '-m, --model FNAME m';;"
        f"\n--list-devices) echo 'Available devices:';;\n*) rm {program}; exit 127;;\nesac\n"
    )
    program.chmod(0o755)
    front = start("--device=cpu", program=str(program))
    assert front.wait() == 1
    assert front.said("exited (code 127) while loading")
