"""What the benchmark scripts share: programs, surroundings, one at a time, the written result.

A benchmark writes `build/bench-NAME/result.md`, tables for people, and `result.json`, the numbers
they come from, and prints the former. State and caches of what it starts lie in the same folder, so
that a run neither uses nor leaves anything in the user's own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import fcntl
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from onebit_serve.bench.surroundings import machine, versions
from onebit_serve.core import score
from onebit_serve.core.report import Table, markdown

__all__ = [
    "Claim",
    "about",
    "alone",
    "claim_table",
    "environment",
    "folder",
    "free_port",
    "median_and_range",
    "options",
    "outcomes",
    "program",
    "record",
    "say",
    "tiny_model",
    "write",
]

ROOT = Path(__file__).resolve().parents[1]
# Variables of the user's that would change what is measured.
_OURS = ("FAKE_LLAMA", "LLAMA_ARG_", "ONEBIT_")


class Claim(msgspec.Struct, frozen=True):
    """One thing that is claimed, and what was measured.

    Args:
        text: What is claimed, with its unit.
        value: What was measured; `None` where it was not.
        at_most: The largest value that keeps it.
    """

    text: str
    value: float | None
    at_most: float

    @property
    def outcome(self) -> score.Outcome:
        """Whether it holds."""
        return score.judge(self.value, at_most=self.at_most)


def folder(name: str) -> Path:
    """Return the folder of a benchmark's results and state, made if need be."""
    place = ROOT / "build" / f"bench-{name}"
    place.mkdir(parents=True, exist_ok=True)
    return place


def program(name: str) -> str:
    """Return a program of ours: the one beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed beside {sys.executable}\nhint: run it by make")
    return found


def options(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring, with the option that all have."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim does not hold")
    return parser


def environment(place: Path, **variables: str) -> dict[str, str]:
    """Return the environment for `1bit`: state under a folder, nothing of the user's that decides.

    Args:
        place: The benchmark's folder.
        variables: What to set besides. Without a word here only the first warm-up request is
            sent: what is timed and counted is that one.
    """
    no_bytecode = "PYTHONDONTWRITEBYTECODE"  # set, each start would compile all of it again
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS) and k != no_bytecode}
    homes = {f"XDG_{k}_HOME": str(place / k.lower()) for k in ("CACHE", "CONFIG", "STATE")}
    first_only = {"ONEBIT_WARMUP_BUDGET_S": "0", "ONEBIT_WARMUP_IDLE": "0"}
    return kept | homes | first_only | variables


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def tiny_model(place: Path, kind: str = "llama") -> Path:
    """Write a model with random weights that a real llama-server loads, and return its file."""
    sys.path.append(str(ROOT / "tests"))
    import tiny_models

    return tiny_models.write(kind, place)


def record(file: Path) -> list[dict[str, Any]]:
    """Return what a fake backend wrote down, oldest first; nothing where it has not started."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")[:-1]  # the last one may still be being written
    return [msgspec.json.decode(line) for line in lines]


def median_and_range(values: Sequence[float], digits: int = 1) -> str:
    """Return `median (low to high)` for a table, or a dash where there is nothing."""
    found = score.spread(values)
    if found is None:
        return "-"
    low, high = f"{found.low:.{digits}f}", f"{found.high:.{digits}f}"
    middle = f"{found.median:.{digits}f}"
    return middle if low == high else f"{middle} ({low} to {high})"


def claim_table(claims: Sequence[Claim]) -> Table:
    """Return claims as a table."""
    rows = [
        (c.text, f"{c.at_most:g}", "-" if c.value is None else f"{round(c.value, 2):g}", c.outcome)
        for c in claims
    ]
    return Table("Claims", ("claim", "at most", "measured", "outcome"), tuple(rows))


def outcomes(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Return claims with their outcomes, for JSON."""
    return [{**msgspec.structs.asdict(c), "outcome": c.outcome} for c in claims]


def about(load_before: float) -> list[str]:
    """Return what a reader must know of the machine.

    Args:
        load_before: The load average of the last minute before anything was started.
    """
    found, made_by = machine(), versions()
    now = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return [
        (
            f"{now}; {found.get('processor', platform.machine())}, {found['threads']} threads, "
            f"{found['memory_bytes'] / 2**30:.0f} GiB; {platform.system()} {platform.release()}"
        ),
        f"load average before the run {load_before:.1f}",
        ", ".join(f"{name} {version}" for name, version in made_by.items()),
    ]


def write(name: str, tables: Sequence[Table], facts: Sequence[str], result: dict[str, Any]) -> None:
    """Write and print the report of a benchmark, and write the numbers behind it."""
    place, text = folder(name), markdown(tables, lines=facts)
    (place / "result.md").write_text(text)
    (place / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    print(text)
    print(f"bench-{name}: {place / 'result.json'} holds the numbers", file=sys.stderr)


def say(text: str) -> None:
    """Show progress where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="" if text else "\r", file=sys.stderr, flush=True)


@contextlib.contextmanager
def alone(name: str) -> Iterator[Path]:
    """Keep a second run of a benchmark out, and give its folder."""
    place = folder(name)
    with (place / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"bench-{name}: another run is under way in {place}\nhint: wait until it ends")
        yield place
