"""Write docs/reliability.md from what the tests of faults saw, or check it against them.

python scripts/make_reliability.py            # run tests/faults, and write the table
python scripts/make_reliability.py --from F   # run nothing; F: what FAULT_ROWS=F pytest left
python scripts/make_reliability.py --check    # run nothing; exit 1 where page and tests differ
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

__all__ = ["differences", "main"]

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "faults"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- The table is written by scripts/make_reliability.py. -->"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
STATES = ("loading", "warming", "ready", "draining", "stopped", "backoff")


def _rows(record: Path) -> list[list[str]]:
    """Return the rows, equal ones put together, ordered by state and fault."""
    seen: dict[tuple[str, ...], list[float]] = {}
    for line in record.read_text().splitlines():
        fault, state, client, then, ready_s, test = json.loads(line)
        times = seen.setdefault((fault, state, client, then, test), [])
        times += [] if ready_s is None else [ready_s]

    def order(row: tuple[str, ...]) -> tuple[int, str, str]:
        known = [n for n, state in enumerate(STATES) if row[1].startswith(state)]
        return (known[0] if known else len(STATES), row[1], row[0])

    return [
        [*row[:4], f"{median(seen[row]):.1f} s" if seen[row] else "", f"`{row[4]}`"]
        for row in sorted(seen, key=order)
    ]


def _written(rows: list[list[str]]) -> str:
    lines = ["| fault | state | what the client sees | what happens | ready again | test |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _tests() -> set[tuple[str, str]]:
    """Return file and name of every test that notes a row."""
    found: set[tuple[str, str]] = set()
    for path in TESTS.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "row" in [a.arg for a in node.args.args]:
                found.add((path.name, node.name))
    return found


def differences() -> list[str]:
    """Return what the page names that no test has, and what a test has that the page lacks."""
    named, tests = set(NAMED.findall(PAGE.read_text())), _tests()
    return [f"no such test: {f}::{t}" for f, t in sorted(named - tests)] + [
        f"not on the page: {f}::{t}" for f, t in sorted(tests - named)
    ]


def main() -> int:
    """Write the table, or check it."""
    if "--check" in sys.argv:
        found = differences()
        print("\n".join(found) or "docs/reliability.md names every test of a fault")
        return 1 if found else 0
    if "--from" in sys.argv:
        return _write(Path(sys.argv[-1]))
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "rows")
        others = f"--ignore={TESTS / 'test_reliability_page.py'}"
        command = [sys.executable, "-m", "pytest", "-q", others, str(TESTS)]
        code = subprocess.run(
            command, env={**os.environ, "FAULT_ROWS": str(record)}, cwd=ROOT, check=False
        ).returncode
        if code:
            print("docs/reliability.md stays as it is: a test failed")
            return code
        return _write(record)


def _write(record: Path) -> int:
    text = PAGE.read_text().partition(BEGIN)[0]
    PAGE.write_text(f"{text}{BEGIN}\n\n{_written(_rows(record))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
