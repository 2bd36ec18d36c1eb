"""What the shape model says about llama-server, asked of a real one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from itertools import accumulate

import httpx
import pytest

from onebit_serve.core.discover import Discovery
from onebit_serve.core.shapes import Splitting, shows_checkpoints


@contextlib.contextmanager
def running(command, log, env=None):
    """Start a llama-server on a free port, logging to a file, and wait until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, *address],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        ) as child,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client,
    ):
        try:
            wait_until_ready(client, child, log)
            yield client
        finally:
            child.kill()


def wait_until_ready(client, child, log):
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        assert child.poll() is None, log.read_text(errors="replace")
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.02)
    pytest.fail("llama-server was not ready in time")


SYNTHETIC = {
    "n_predict": 1,
    "temperature": 0,
    "cache_prompt": False,
    "grammar": "root ::= [a-z]*",
}


def ids(tokens):
    return [20 + i * 7 % 200 for i in range(tokens)]


def prefill(client, tokens):
    """Send a prompt of so many tokens and return the seconds it took."""
    started_s = time.perf_counter()
    answer = client.post("/completion", json={"prompt": ids(tokens), **SYNTHETIC})
    assert answer.status_code == 200, answer.text
    assert answer.json()["timings"]["prompt_n"] == tokens
    return time.perf_counter() - started_s


def progress(client, tokens):
    """Send a prompt of so many tokens and return how far it was after each batch."""
    body = {"prompt": ids(tokens), **SYNTHETIC, "stream": True, "return_progress": True}
    # After a streamed reply the server closes the connection without having said so.
    answer = client.post("/completion", json=body, headers={"Connection": "close"})
    events = re.findall(r"^data: (.*)$", answer.text, re.MULTILINE)
    found = [json.loads(event).get("prompt_progress") for event in events]
    return [one["processed"] for one in found if one]


@pytest.mark.parametrize(
    ("kind", "checkpoints"), [("llama", False), ("gemma3", True), ("qwen35", True)]
)
def test_batches_end_where_the_model_says(
    real_llama_server, tiny_models, tmp_path, kind, checkpoints
):
    splitting = Splitting(checkpoints=checkpoints)
    model = tiny_models / f"tiny-{kind}.gguf"
    command = [real_llama_server, "-m", str(model), "--device", "none", "-c", "2048", "-np", "1"]
    with running(command, tmp_path / "log") as client:
        for tokens in (3, 5, 30, 465, 516, 517, 600):
            seen = progress(client, tokens)
            # Without checkpoints all these prompts are one batch of several micro-batches.
            ends = accumulate(splitting.pieces(tokens)) if checkpoints else [tokens]
            assert seen == [0, *ends]
            assert shows_checkpoints(tokens, seen) in (checkpoints, None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_discovery_finds_the_classes_of_software_vulkan(real_llama_server, tiny_models, tmp_path):
    env = {"MESA_SHADER_CACHE_DISABLE": "true", "GGML_VK_VISIBLE_DEVICES": "0"}
    listed = subprocess.run(
        [real_llama_server, "--list-devices"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "llvmpipe" not in listed.stdout + listed.stderr:
        pytest.skip("there is no software Vulkan here")
    model = tiny_models / "tiny-llama.gguf"
    command = [
        real_llama_server,
        "-m",
        str(model),
        "--device",
        "Vulkan0",
        "-ngl",
        "99",
        "-fa",
        "off",
    ]
    discovery = Discovery(512)
    with running([*command, "-c", "1024", "-np", "1"], tmp_path / "log", env) as client:
        while (tokens := discovery.next()) is not None:
            first_s, *again_s = (prefill(client, tokens) for _ in range(3))
            sys.stdout.write(f"{tokens}: {first_s:.3f} {again_s[0]:.3f} {again_s[1]:.3f}\n")
            sys.stdout.flush()
            discovery = discovery.observe(tokens, first_s, *again_s)
    found = discovery.found()
    sys.stdout.write(f"{found}\n")
    assert {3, 4, 5, 6, 7, 8, 9, 33, 65} <= set(found.classes.starts)
    assert len(found.classes.starts) <= 14
