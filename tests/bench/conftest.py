from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep these tests apart from real measurements on the machine."""
    monkeypatch.setenv("ONEBIT_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
