"""The tiny models are models: the real llama-server loads each kind and answers with it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tiny_models as tiny

DEADLINE_S = 60.0


@contextlib.contextmanager
def serving(program: str, model: Path, *options: str) -> Iterator[httpx.Client]:
    """Run a llama-server until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "-m", str(model), "--port", str(port), "--device", "none", "-np", "1"]
    with subprocess.Popen(
        [*command, "-c", "1024", "-t", "1", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as child:
        try:
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as client:
                end = time.monotonic() + DEADLINE_S
                while not healthy(client):
                    assert child.poll() is None, f"llama-server does not load {model.name}"
                    assert time.monotonic() < end, f"{model.name} is not ready in {DEADLINE_S} s"
                    time.sleep(0.02)
                yield client
        finally:
            child.kill()


def healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen35", "lfm2", "jamba", "mamba"])
def test_a_tiny_chat_model_answers_in_printable_text_to_the_last_token_asked_for(
    kind: str, real_llama_server: str, tiny_models: Path
) -> None:
    with serving(real_llama_server, tiny_models / f"tiny-{kind}.gguf") as client:
        answer = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hello you"}], "max_tokens": 32},
        )
        synthetic = client.post("/completion", json={"prompt": [*range(100, 565)], "n_predict": 8})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 32
    assert answer.json()["choices"][0]["message"]["content"].isprintable()
    assert synthetic.status_code == 200, synthetic.text
    assert synthetic.json()["timings"]["prompt_n"] == 465


def test_the_tiny_embedding_model_embeds(real_llama_server: str, tiny_models: Path) -> None:
    with serving(real_llama_server, tiny_models / "tiny-bert.gguf", "--embedding") as client:
        answer = client.post("/v1/embeddings", json={"input": "two words"})
    assert len(answer.json()["data"][0]["embedding"]) == tiny.WIDTH


def test_the_tiny_ranking_model_ranks(real_llama_server: str, tiny_models: Path) -> None:
    with serving(real_llama_server, tiny_models / "tiny-rerank.gguf", "--reranking") as client:
        answer = client.post("/v1/rerank", json={"query": "red", "documents": ["green", "two"]})
    assert len(answer.json()["results"]) == 2


def test_the_garbage_model_meets_the_500_of_builds_that_check_their_output(
    real_llama_server: str, tiny_models: Path
) -> None:
    with serving(real_llama_server, tiny_models / "tiny-garbage.gguf") as client:
        answer = client.post(
            "/completion",
            json={"prompt": [*range(100, 200)], "n_predict": 256, "temperature": 0},
        )
        lettered = client.post(
            "/completion",
            json={"prompt": [*range(100, 200)], "n_predict": 8, "grammar": "root ::= [a-z]*"},
        )
    # Builds differ: those that check refuse it, the others return it.
    assert answer.status_code in {200, 500}
    assert answer.status_code == 200 or "does not match the expected" in answer.text
    assert lettered.status_code == 200, lettered.text


def test_a_folder_of_models_that_is_there_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "mine.gguf").write_bytes(b"")
    assert tiny.write_all(folder) == folder
    assert [path.name for path in folder.iterdir()] == ["mine.gguf"]
    assert list(tmp_path.iterdir()) == [folder]
