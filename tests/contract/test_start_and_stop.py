"""How a llama-server starts, refuses to and ends; the fake does the same."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from llama_process import DEADLINE_S, Llama, received, until

Start = Callable[..., Llama]
LONG = {"prompt": "once", "n_predict": 2000, "ignore_eos": True}


def test_everything_is_503_until_the_model_is_loaded(start: Start) -> None:
    llama = start(knobs="load=0.5")
    seen: dict[int, httpx.Response] = {}

    def look() -> bool:
        try:
            answer = httpx.get(f"{llama.url}/health", trust_env=False, verify=False)
        except httpx.TransportError:
            return False
        seen.setdefault(answer.status_code, answer)
        return answer.status_code == 200

    until(look, "the model to be loaded")
    loading = seen[503]
    error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
    assert loading.json() == {"error": error}
    assert loading.headers["connection"] == "close"
    assert seen[200].json() == {"status": "ok"}


def test_the_log_says_loaded_before_listening(start: Start) -> None:
    llama = start("-np", "2", "-c", "1024").ready()
    log = until(lambda: llama.log if "listening on" in llama.log else "", "the log")
    loading = log.index("load_model: loading model '")
    slots = log.index("n_slots = 2, n_ctx_slot = 512, kv_unified = 'false'")
    loaded = log.index("llama_server: model loaded")
    assert loading < slots < loaded < log.index(f"listening on http://127.0.0.1:{llama.port}")


def test_without_parallel_there_are_four_slots_with_one_pool(start: Start) -> None:
    llama = start("-c", "1024").ready()
    assert [slot["n_ctx"] for slot in llama.get("/slots").json()] == [1024] * 4
    assert "kv_unified = 'true'" in llama.log


def test_a_context_is_never_under_256_a_slot(start: Start) -> None:
    llama = start("-c", "256", "-np", "2").ready()
    assert [slot["n_ctx"] for slot in llama.get("/slots").json()] == [256] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_with_0(start: Start, number: signal.Signals) -> None:
    llama = start().ready()
    llama.post("/completion", {"prompt": "a", "n_predict": 1})  # it listens before it minds signals
    llama.process.send_signal(number)
    assert llama.wait() == 0
    assert "cleaning up before exit..." in llama.log


def test_term_while_a_stream_runs_ends_it_once_the_client_is_gone(start: Start) -> None:
    llama = start("-c", "4096").ready()
    with llama.open_stream("/completion", LONG) as sock:
        next(received(sock))
        llama.process.terminate()
        until(lambda: not _accepts(llama.port), "the listener to close")
        assert llama.process.poll() is None
    assert llama.wait() == 0


def test_a_second_term_ends_it_at_once_with_1(start: Start) -> None:
    llama = start("-c", "4096").ready()
    with llama.open_stream("/completion", {**LONG, "stream": False}):
        until(llama.busy, "a busy slot")
        llama.process.terminate()
        until(lambda: not _accepts(llama.port), "the listener to close")
        llama.process.terminate()
        assert llama.wait() == 1
    assert "Received second interrupt, terminating immediately." in llama.log


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_a_taken_port_is_said_and_ends_with_1(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        llama = start(port=port)
        assert llama.wait() == 1
    assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}" in llama.log
    assert "exiting due to HTTP server error" in llama.log


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "failed to open GGUF file"),
        (b"", "failed to read magic"),
        (b"XXXXXXXX", "invalid magic characters"),
    ],
)
def test_a_model_that_cannot_be_read_ends_with_1(
    start: Start, tmp_path: Path, content: bytes | None, line: str
) -> None:
    file = tmp_path / "bad.gguf"
    if content is not None:
        file.write_bytes(content)
    llama = start(named=str(file))
    assert llama.wait() == 1
    assert line in llama.log
    assert "exiting due to model loading error" in llama.log


def test_a_flag_it_does_not_know_ends_with_1(start: Start) -> None:
    llama = start("--no-such-flag", knobs="strict=1")
    assert llama.wait() == 1
    assert "error: invalid argument: --no-such-flag" in llama.log


def test_a_port_that_is_no_number_ends_with_1(binary: str) -> None:
    done = subprocess.run(
        [binary, "--port", "abc"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 1
    assert 'error while handling argument "--port": stoi' in done.stdout + done.stderr


def test_a_device_that_is_not_there_ends_with_1(binary: str) -> None:
    done = subprocess.run(
        [binary, "--device", "NO9"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={"FAKE_LLAMA": "devices='HRX0: one'"},
    )
    assert done.returncode == 1
    assert 'error while handling argument "--device": invalid device: NO9' in (
        done.stdout + done.stderr
    )


def test_a_key_guards_all_but_health_and_models(start: Start) -> None:
    llama = start("--api-key", "one,two").ready()
    refused = llama.get("/props")
    assert refused.status_code == 401
    error = {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
    assert refused.json() == {"error": error}
    assert llama.get("/props", headers={"Authorization": "Bearer two"}).status_code == 200
    assert llama.get("/props", headers={"X-Api-Key": "one"}).status_code == 200
    assert llama.get("/v1/models").status_code == 200


def test_the_environment_changes_what_the_command_line_leaves_open(start: Start) -> None:
    env = {"LLAMA_API_KEY": "secret", "LLAMA_ARG_ALIAS": "from-env", "LLAMA_ARG_N_PARALLEL": "3"}
    llama = start("-c", "768", environment=env).ready()
    assert llama.get("/slots").status_code == 401
    slots = llama.get("/slots", headers={"Authorization": "Bearer secret"}).json()
    assert len(slots) == 3
    assert llama.get("/v1/models").json()["data"][0]["id"] == "from-env"


def test_without_an_alias_the_model_is_named(start: Start, model: str) -> None:
    llama = start().ready()
    named = llama.get("/v1/models").json()["data"][0]["id"]
    assert named in {model, Path(model).name}


def test_metrics_count_tokens_when_switched_on(start: Start) -> None:
    llama = start("--metrics").ready()
    llama.complete([310, 311, 312], n_predict=2)
    text = llama.get("/metrics").text
    assert "llamacpp:prompt_tokens_total 3\n" in text
    assert "llamacpp:tokens_predicted_total 2\n" in text
    assert "# TYPE llamacpp:requests_processing gauge" in text


def test_more_log_says_where_the_layers_are(start: Start) -> None:
    llama = start("-lv", "4").ready()
    assert "layers to GPU" in llama.log
    assert "sched_reserve: graph splits = 1" in llama.log


def _printed(binary: str, flag: str) -> str:
    done = subprocess.run([binary, flag], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout + done.stderr


def test_version_devices_and_help_are_printed(binary: str) -> None:
    assert _printed(binary, "--version").startswith("version: ")
    assert _printed(binary, "--list-devices").startswith("Available devices:\n")
    text = _printed(binary, "--help")
    assert text.startswith("----- common params -----\n")
    for line in (
        "-m,    --model FNAME                    ",
        "-c,    --ctx-size N                     ",
        "-np,   --parallel N                     ",
        "--list-devices                          ",
        "-ngl,  --gpu-layers, --n-gpu-layers N   ",
        "                                        (env: LLAMA_ARG_PORT)",
    ):
        assert line in text


@pytest.mark.slow
def test_an_idle_connection_is_closed_after_five_seconds(start: Start) -> None:
    llama = start().ready()
    with socket.create_connection(("127.0.0.1", llama.port), timeout=20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in b"".join(received(sock))
