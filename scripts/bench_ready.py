#!/usr/bin/env python3
"""Measure how late `1bit serve` says ready, and how soon it starts the backend.

    python scripts/bench_ready.py                # four minutes
    python scripts/bench_ready.py --starts 3     # a look

The backend is the fake, with the costs of AMD's HRX at a hundredth of their time. It notes when it
was loaded and how long the warm-up request took in it, by the clock of this machine.

Ready: possible is the moment the backend was loaded plus the time its warm-up took in it, from the
request's arrival to its last event. The lag is the first 200 of our `/health` minus that. It has
two parts: until the warm-up reached the backend (the load was noticed, the backend's facts were
asked for), and from its last event until the front door said 200. A client asks `/health` each
millisecond on one kept connection, from the moment the backend says that it is loaded; a 200 sooner
than the warm-up's own costs allow is an error.

Spawn: a shell script notes the time as its first act and then becomes the fake. What is measured
is from just before `1bit serve` is started to that note, so it includes the start of Python, of
setpriv, of the shell and of date. What llama-server says of itself is already in the cache, as in
every start but the first; the files are in the page cache.

Exit code 1: something broke. With --check also: a claim failed or was not measured.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio
from _bench import (
    Claim,
    about,
    alone,
    claim_table,
    environment,
    free_port,
    median_and_range,
    options,
    outcomes,
    program,
    record,
    say,
    tiny_model,
    write,
)

from onebit_serve.bench.arms import Server
from onebit_serve.core import score
from onebit_serve.core.errors import OnebitError
from onebit_serve.core.report import Table

__all__ = ["Start", "claims", "read_start", "tables"]

NAME = "ready"
LOADS_S = (0.3, 10.0)
LAG_MS, SPAWN_MS = 25.0, 200.0
LIMIT_S = 60.0
POLL_S = 0.001
SCALE = 0.01  # seconds of the fake for each second of HRX
OK, LOADING = 200, 503
SCRIPT = """\
#!/bin/sh
date +%s.%N >>{spawned}
exec {fake} "$@"
"""


class Start(msgspec.Struct, frozen=True):
    """One start of `1bit serve`; times in milliseconds.

    Args:
        load_s: How long the fake loads, in seconds.
        number: Its place among those, from 1.
        spawn_ms: From the command to the first act of the backend.
        warm_up_ms: From the warm-up's arrival in the backend to its last event.
        lag_ms: From possible to the front door's 200.
        noticed_ms: From loaded to the warm-up's arrival in the backend.
        told_ms: From the warm-up's last event to the front door's 200; the backend notes that event
            when it has sent it, so this can be a little less than nothing.
    """

    load_s: float
    number: int
    spawn_ms: float
    warm_up_ms: float
    lag_ms: float
    noticed_ms: float
    told_ms: float


def read_start(
    load_s: float,
    number: int,
    events: Sequence[dict[str, Any]],
    *,
    began_s: float,
    spawned_s: float,
    ready_s: float,
) -> Start:
    """Return what a start came to.

    Args:
        load_s: How long the fake loads, in seconds.
        number: Its place among those, from 1.
        events: The fake's record.
        began_s: When the command was started, seconds since 1970.
        spawned_s: When the backend was.
        ready_s: When the front door's first 200 was received.

    Raises:
        OnebitError: The record lacks something, or ready was said too soon.
    """
    loaded = [e["time"] for e in events if e["event"] == "loaded"]
    sent = [e["time"] for e in events if e["event"] == "request" and e.get("work") == 1]
    done = [e for e in events if e["event"] == "reply" and e.get("work") == 1]
    if not (loaded and sent and done):
        raise OnebitError(f"the record of start {number} has no load or no warm-up")
    timings = done[0]["timings"]
    arrived_s, ended_s = sent[0], done[0]["last_event"]
    costs_s = SCALE * (timings["prompt_ms"] + timings["predicted_ms"]) / 1000
    if ready_s < arrived_s + costs_s:
        early_ms = 1000 * (arrived_s + costs_s - ready_s)
        raise OnebitError(f"ready {early_ms:.1f} ms before the warm-up can have ended")
    return Start(
        load_s=load_s,
        number=number,
        spawn_ms=1000 * (spawned_s - began_s),
        warm_up_ms=1000 * (ended_s - arrived_s),
        lag_ms=1000 * (ready_s - loaded[0] - (ended_s - arrived_s)),
        noticed_ms=1000 * (arrived_s - loaded[0]),
        told_ms=1000 * (ready_s - ended_s),
    )


def tables(starts: Sequence[Start]) -> list[Table]:
    """Return the two tables."""
    parts = ("lag_ms", "noticed_ms", "told_ms", "warm_up_ms")
    rows, spawns = [], []
    for load_s in sorted({s.load_s for s in starts}):
        mine = [s for s in starts if s.load_s == load_s]
        cells = [median_and_range([getattr(s, part) for s in mine]) for part in parts]
        rows.append((f"{load_s:g}", str(len(mine)), *cells))
    found = score.spread([s.spawn_ms for s in starts])
    if found:
        values = (found.median, found.p90, found.low, found.high)
        spawns.append((str(found.count), *(f"{v:.0f}" for v in values)))
    lag = Table(
        "Ready against possible",
        (
            *("load, s", "starts", "lag, ms", "noticed, ms", "told, ms"),
            "warm-up in the backend, ms",
        ),
        tuple(rows),
    )
    columns = ("starts", "median, ms", "p90, ms", "lowest, ms", "highest, ms")
    return [lag, Table("From the command to the backend's first act", columns, tuple(spawns))]


def claims(starts: Sequence[Start], loads_s: Sequence[float]) -> list[Claim]:
    """Return what must hold."""
    found = []
    for load_s in loads_s:
        lags = [s.lag_ms for s in starts if s.load_s == load_s]
        middle = score.median(lags) if lags else None
        found.append(Claim(f"load of {load_s:g} s: median lag, ms", middle, LAG_MS))
    spawns = [s.spawn_ms for s in starts]
    middle = score.median(spawns) if spawns else None
    return [*found, Claim("median time to the backend's first act, ms", middle, SPAWN_MS)]


def first_200_s(port: int, notes: Path) -> float:
    """Return when the front door first answers 200, in seconds since 1970.

    Raises:
        OnebitError: It does not within the limit.
    """
    end_s = time.monotonic() + LIMIT_S
    while b'"loaded"' not in (notes.read_bytes() if notes.exists() else b""):
        if time.monotonic() > end_s:
            raise OnebitError("the backend did not load in time", hint=f"{notes} tells more")
        time.sleep(POLL_S)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    with contextlib.closing(connection):
        while time.monotonic() < end_s:
            connection.request("GET", "/health")
            reply = connection.getresponse()
            now_s = time.time()
            reply.read()
            if reply.status == OK:
                return now_s
            if reply.status != LOADING:
                raise OnebitError(f"/health answered {reply.status}")
            time.sleep(POLL_S)
    raise OnebitError("the front door did not say 200 in time")


async def one_start(flags: Sequence[str], load_s: float, number: int, place: Path) -> Start:
    """Start `1bit serve`, wait until it is ready, stop it.

    Raises:
        OnebitError: It did not come up, or not as it must.
    """
    notes, spawned = place / "record.jsonl", place / "spawned"
    for file in (notes, spawned):
        file.unlink(missing_ok=True)
    port = free_port()
    knobs = f"model=hrx scale={SCALE} load={load_s} rec={shlex.quote(str(notes))}"
    variables = environment(place, FAKE_LLAMA=knobs)
    server = Server([program("1bit"), "serve", *flags, "-p", str(port)], variables)
    seen: list[float | OnebitError] = []

    def watch() -> None:
        try:
            seen.append(first_200_s(port, notes))
        except OnebitError as error:
            seen.append(error)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began_s = time.time()
    async with server.running(LIMIT_S, f"load {load_s:g} s, start {number}"):
        await trio.to_thread.run_sync(watcher.join)
    if isinstance(seen[0], OnebitError):
        raise seen[0]
    acts_s = [float(line) for line in spawned.read_text().splitlines()]
    if number and len(acts_s) > 1:
        raise OnebitError("the backend was asked about itself, which the cache should have known")
    times = {"began_s": began_s, "spawned_s": acts_s[-1], "ready_s": seen[0]}
    return read_start(load_s, number, record(notes), **times)


async def measure(flags: Sequence[str], count: int, place: Path) -> list[Start]:
    """Fill the caches by one start, then run all that count, the loads taking turns.

    Raises:
        OnebitError: A start went wrong.
    """
    await one_start(flags, 0.0, 0, place)
    starts = []
    for number in range(1, count + 1):
        for load_s in LOADS_S:
            say(f"start {number} of {count}, load of {load_s:g} s")
            starts.append(await one_start(flags, load_s, number, place))
    say("")
    return starts


def main() -> int:
    """Measure and report; return the exit code."""
    parser = options(__doc__)
    parser.add_argument("--starts", type=int, default=10, help="starts of each load (default 10)")
    asked = parser.parse_args()
    load_before = os.getloadavg()[0]
    with alone(NAME) as place:
        script = place / "llama-server"
        words = {"spawned": place / "spawned", "fake": program("1bit-fake-llama")}
        script.write_text(SCRIPT.format(**{k: shlex.quote(str(v)) for k, v in words.items()}))
        script.chmod(0o755)
        flags = ("-m", str(tiny_model(place)), "--device", "hrx", "--llama-server", str(script))
        try:
            starts = trio.run(measure, flags, asked.starts, place)
        except OnebitError as error:
            sys.exit(f"bench-{NAME}: {error}")
    held = claims(starts, LOADS_S)
    facts = [*about(load_before), "medians (lowest to highest start); loads take turns"]
    result = {"about": facts, "claims": outcomes(held), "starts": starts}
    write(NAME, [*tables(starts), claim_table(held)], facts, result)
    return 1 if asked.check and any(c.outcome != "pass" for c in held) else 0


if __name__ == "__main__":
    sys.exit(main())
