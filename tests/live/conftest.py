"""Front doors with a backend that does what each request tells it to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from front_door import Front

Start = Callable[..., Front]


@pytest.fixture(scope="session")
def scripted_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the program `scripted_llama.py` as something that can be named as a llama-server."""
    program = tmp_path_factory.mktemp("scripted") / "llama-server"
    script = Path(__file__).parent / "scripted_llama.py"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="session")
def scripted(
    scripted_llama: str, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    """One front door for all tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("scripted-front")
    front = Front(
        folder,
        "-m",
        str(tiny_models / "tiny-llama.gguf"),
        "--device=cpu",
        "--llama-server",
        scripted_llama,
        environment={"SCRIPT_BUSY": str(folder / "busy")},
    )
    try:
        yield front.ready()
        assert front.process.poll() is None, front.log
    finally:
        front.stop()


@pytest.fixture
def start_scripted(scripted_llama: str, tiny_models: Path, tmp_path: Path) -> Iterator[Start]:
    """Start front doors of one's own."""
    started: list[Front] = []

    def begin(*arguments: str, **more: object) -> Front:
        model = str(tiny_models / "tiny-llama.gguf")
        flags = ("-m", model, "--device=cpu", "--llama-server", scripted_llama)
        started.append(Front(tmp_path, *flags, *arguments, **more))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for front in started:
        front.stop()
