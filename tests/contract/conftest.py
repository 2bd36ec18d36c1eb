"""The two servers that the contract is about: the fake and the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llama_process import Llama

Start = Callable[..., Llama]


@pytest.fixture(scope="session", params=["fake", "real"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def binary(kind: str, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("fake_llama" if kind == "fake" else "real_llama_server"))


@pytest.fixture(scope="session")
def model(
    kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> str:
    if kind == "real":
        return str(request.getfixturevalue("smollm2"))
    file = tmp_path_factory.mktemp("model") / "fake.gguf"
    file.write_bytes(b"GGUF")
    return str(file)


@pytest.fixture(scope="session")
def served(
    kind: str, binary: str, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Llama]:
    """One loaded server for all tests that leave it as it was."""
    del kind
    folder = tmp_path_factory.mktemp("served")
    flags = ("--device", "none", "-np", "2", "-c", "1024", "--alias", "pub,second")
    llama = Llama(
        binary, folder, "-m", model, *flags, "--slot-save-path", f"{folder}/", knobs="tps=100"
    )
    try:
        yield llama.ready()
    finally:
        llama.stop()


@pytest.fixture
def start(kind: str, binary: str, model: str, tmp_path: Path) -> Iterator[Start]:
    """Start servers of one's own: `start("-np", "1", knobs="load=0.3")`."""
    started: list[Llama] = []

    def begin(*arguments: str, named: str = model, **more: object) -> Llama:
        flags = ("-m", named, "--device", "none", *arguments)
        knobs = str(more.pop("knobs", "tps=100"))
        llama = Llama(binary, tmp_path, *flags, knobs=knobs if kind == "fake" else "", **more)  # type: ignore[arg-type]
        started.append(llama)
        return llama

    yield begin
    for llama in started:
        llama.stop()
