"""Starting the fake with knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llama_process import Llama


@pytest.fixture
def fake(fake_llama: str, tmp_path: Path) -> Iterator[Callable[..., Llama]]:
    """Start fakes: `fake("load=3", "-np", "2")` gives one that is on its way."""
    model = tmp_path / "fake.gguf"
    model.write_bytes(b"GGUF")
    started: list[Llama] = []

    def begin(knobs: str = "", *arguments: str, **more: object) -> Llama:
        llama = Llama(fake_llama, tmp_path, "-m", str(model), *arguments, knobs=knobs, **more)  # type: ignore[arg-type]
        started.append(llama)
        return llama

    yield begin
    for llama in started:
        llama.stop()
