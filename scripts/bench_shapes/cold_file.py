"""A padded model of 4 GiB and a cold page cache: dd, the prefetch alone, and starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import trio
from _bench import Claim, environment, median_and_range, say, tiny_model
from running import Part, serving

from onebit_serve.core.report import Table
from onebit_serve.live.prefetch import fetch

__all__ = ["cold_file"]

PADDED_BYTES = 4 << 30
WITHOUT_PREFETCH = """
import sys
from onebit_serve.live import prefetch
prefetch.WORTH_BYTES = 1 << 62
from onebit_serve.cli import main
sys.exit(main(sys.argv[1:]))
"""


def drop(file: Path) -> None:
    """Take a file out of the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def padded(place: Path) -> Path:
    """Return a model whose file has 4 GiB behind its weights, made if need be."""
    model = place / "padded.gguf"
    if not model.exists() or model.stat().st_size < PADDED_BYTES:
        tiny = tiny_model(place).read_bytes()
        block = os.urandom(64 << 20)
        with model.open("wb") as file:
            file.write(tiny)
            for _ in range(PADDED_BYTES // len(block)):
                file.write(block)
    return model


def cold_file(place: Path, rounds: int) -> Part:
    """Time dd, the prefetch alone, and starts with a cold and a warm file, in turns."""
    say("file: making 4 GiB")
    model = padded(place)
    flags = ("-m", str(model), "--device", "cpu")
    env = environment(place / "file")
    times = dict[str, list[float]]()

    def note(name: str, took_s: float) -> None:
        times.setdefault(name, []).append(took_s)

    for turn in range(rounds):
        say(f"file: round {turn + 1} of {rounds}")
        drop(model)
        began_s = time.monotonic()
        dd = ["dd", f"if={model}", "of=/dev/null", "bs=8M", "status=none"]
        subprocess.run(dd, check=True)
        note("dd bs=8M", time.monotonic() - began_s)
        drop(model)
        note("prefetch alone", trio.run(fetch, [model]).took_s)
        with serving(place, flags, env) as served:
            note("to ready, warm file", served.ready_s)
        drop(model)
        with serving(place, flags, env) as served:
            note("to ready, cold file", served.ready_s)
        drop(model)
        without = (sys.executable, "-c", WITHOUT_PREFETCH)
        with serving(place, flags, env, *without) as served:
            note("to ready, cold file, no prefetch", served.ready_s)
    model.unlink()
    middle = {name: median(found) for name, found in times.items()}
    cost_s = middle["to ready, cold file"] - middle["to ready, warm file"]
    rows = tuple((name, median_and_range(found, 2)) for name, found in times.items())
    return Part(
        [
            Table(
                f"A model of {PADDED_BYTES / 2**30:.0f} GiB, padded, on the CPU",
                ("what", "s"),
                rows,
            )
        ],
        [
            Claim("prefetch / dd", middle["prefetch alone"] / middle["dd bs=8M"], 1.15),
            Claim("(cold to ready - warm to ready) / dd", cost_s / middle["dd bs=8M"], 1.15),
        ],
        {"times_s": times},
    )
