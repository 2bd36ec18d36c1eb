#!/usr/bin/env python3
"""Measure how long a killed backend is away, beyond its own load and warm-up.

    python scripts/bench_restart.py               # under a minute
    python scripts/bench_restart.py --kills 3     # a look

A real llama-server with a small model on the CPU, with the warm-up on, is killed (SIGKILL) while
it is ready. What is measured is from just before the kill until `/health` of the front door says
200 for the next child, asked each millisecond; `/v1/status` then tells that child's load and
warm-up. The rest is ours: to notice, to start, to poll, to say so. The first failures in five
minutes are restarted at once, later ones wait by design, so each kill has a fresh server.

Exit code 1: something broke. With --check also: a claim failed or was not measured.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import httpx
import msgspec
import trio
from _bench import (
    Claim,
    about,
    alone,
    claim_table,
    environment,
    median_and_range,
    options,
    outcomes,
    program,
    say,
    write,
)

from onebit_serve.bench.arms import Server
from onebit_serve.core import score
from onebit_serve.core.errors import OnebitError
from onebit_serve.core.report import Table

NAME = "restart"
START_LIMIT_S = 60.0
AWAY_LIMIT_S = 60.0
CLAIM_MS = 100.0


class Kill(msgspec.Struct, frozen=True):
    """One kill.

    Args:
        away_ms: From the kill until `/health` said 200 again.
        load_ms: Of that, the new child's load.
        warm_up_ms: Of that, its warm-up.
    """

    away_ms: float
    load_ms: float
    warm_up_ms: float

    @property
    def ours_ms(self) -> float:
        """What is left."""
        return self.away_ms - self.load_ms - self.warm_up_ms


def kill_once(url: str) -> Kill:
    """Kill the ready child and wait for the next one."""
    with httpx.Client(base_url=url, trust_env=False) as client:
        before = client.get("/v1/status").json()["backends"][0]
        began_s = time.monotonic()
        os.kill(before["pid"], signal.SIGKILL)
        down = False
        while time.monotonic() - began_s < AWAY_LIMIT_S:
            healthy = client.get("/health").status_code == httpx.codes.OK
            down = down or not healthy
            if down and healthy:
                away_ms = (time.monotonic() - began_s) * 1000
                after = client.get("/v1/status").json()["backends"][0]
                return Kill(away_ms, after["load_ms"], after["warm_up_ms"])
            time.sleep(0.001)  # the interval of the measurement, not a wait for a condition
    raise OnebitError(f"the backend was not ready again within {AWAY_LIMIT_S:g} s")


async def measure(kills: int, place: Path) -> list[Kill]:
    """Kill so many backends."""
    found = []
    for number in range(kills):
        say(f"kill {number + 1} of {kills}")
        command = [program("1bit"), "serve", "--embedded", "-p", "0"]
        server = Server(command, environment(place))
        async with server.running(START_LIMIT_S, "1bit serve") as url:
            found.append(await trio.to_thread.run_sync(kill_once, url))
    say("")
    return found


def main() -> int:
    """Measure and report; return the exit code."""
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=10, help="kills (default 10)")
    asked = parser.parse_args()
    load_before = os.getloadavg()[0]
    with alone(NAME) as place:
        try:
            kills = trio.run(measure, asked.kills, place)
        except OnebitError as error:
            sys.exit(f"bench-{NAME}: {error}")
    ours = [kill.ours_ms for kill in kills]
    held = [Claim("median beyond load and warm-up, ms", score.median(ours), CLAIM_MS)]
    table = Table(
        "A ready backend is killed",
        ("kills", "away, ms", "load, ms", "warm-up, ms", "the rest, ms"),
        (
            (
                str(len(kills)),
                median_and_range([k.away_ms for k in kills]),
                median_and_range([k.load_ms for k in kills]),
                median_and_range([k.warm_up_ms for k in kills]),
                median_and_range(ours),
            ),
        ),
    )
    facts = [*about(load_before), "medians (lowest to highest)"]
    write(NAME, [table, claim_table(held)], facts, {"claims": outcomes(held), "kills": kills})
    return 1 if asked.check and any(c.outcome != "pass" for c in held) else 0


if __name__ == "__main__":
    sys.exit(main())
