"""docs/reliability.md and the tests of faults name each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_row_names_its_test_and_every_test_of_a_fault_has_a_row() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_reliability.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
