"""Servers with fake backends, and a record of what each fault did to client and backend."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, configuration

# Where `scripts/make_reliability.py` wants the rows of docs/reliability.md.
ROWS = os.environ.get("FAULT_ROWS")

Row = Callable[..., None]
Serve = Callable[..., Served]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the faults to `make test-slow`: they wait for real time, which may be scarce."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """Note one row of docs/reliability.md; a test does so after its last assertion."""
    name = getattr(request.node, "originalname", request.node.name)
    test = f"{request.path.name}::{name}"

    def note(fault: str, state: str, client: str, then: str, ready_s: float | None = None) -> None:
        if ROWS:
            with Path(ROWS).open("a") as file:
                file.write(json.dumps([fault, state, client, then, ready_s, test]) + "\n")

    return note


@pytest.fixture(scope="session")
def model(tiny_models: Path) -> str:
    """Return a model that fake and real servers load."""
    return str(tiny_models / "tiny-llama.gguf")


@pytest.fixture
def serve(model: str, tmp_path: Path) -> Iterator[Serve]:
    """Start servers of one's own; each in a folder of its own."""
    started: list[Served] = []

    def begin(
        *backends: dict[str, Any],
        server: dict[str, Any] | None = None,
        warm: bool = True,
        tables: str = "",
        arguments: tuple[str, ...] = (),
        **more: Any,
    ) -> Served:
        folder = tmp_path / f"served-{len(started)}"
        folder.mkdir()
        path = configuration(folder, model, *backends, server=server, warm=warm, tables=tables)
        started.append(Served(folder, "--config", str(path), *arguments, **more))
        return started[-1]

    yield begin
    for served in started:
        served.stop()
