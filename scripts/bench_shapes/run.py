#!/usr/bin/env python3
"""Measure what the plan of shapes buys a client, and what it may cost one.

    python scripts/bench_shapes/run.py --part PART

    built      the fake: is any shape left after idle time, 15 minutes
    ready      the fake: the share of requests that pays nothing, one minute
    collide    the fake: a client in mid-warm-up, 20 minutes
    file       a padded model of 4 GiB and a cold disk, one minute
    vulkan     software Vulkan, about eight minutes for each load
    discover   software Vulkan, three minutes

Without --part all of them run. `built`, `ready` and `collide` ask the stand-in for llama-server
with the costs of AMD's HRX, which notes the shapes that every request used and which it met
unbuilt. `vulkan` and `discover` ask a real llama-server on Mesa's software Vulkan with a tiny model
and Mesa's cache of shaders off, unless said otherwise.

Exit code 1: something broke. With --check also: a claim failed or was not measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _bench import about, alone, claim_table, options, outcomes, say, write
from cold_file import cold_file
from hrx import built, collide, ready
from running import Part
from vulkan import LENGTHS, discover, vulkan

from onebit_serve.core.errors import OnebitError

NAME = "shapes"


def main() -> int:
    """Measure and report; return the exit code."""
    parser = options(__doc__)
    names = ("built", "ready", "collide", "file", "vulkan", "discover")
    parser.add_argument("--part", choices=names, action="append", help="one part, or several")
    parser.add_argument("--loads", type=int, default=3, help="fresh starts an arm on Vulkan (3)")
    parser.add_argument("--collisions", type=int, default=200, help="how many (200)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds with the cold file (3)")
    parser.add_argument("--arm", action="append", help="an arm on Vulkan, or several; else all")
    parser.add_argument("--lengths", help="prompt lengths on Vulkan, with commas; else all")
    parser.add_argument(
        "--flash-attention",
        default="off",
        choices=("on", "off", "auto"),
        help="of the server on Vulkan (off: a third of the pipelines)",
    )
    asked = parser.parse_args()
    lengths = [int(n) for n in asked.lengths.split(",")] if asked.lengths else LENGTHS
    load_before = os.getloadavg()[0]
    parts, missing = dict[str, Part](), dict[str, str]()
    with alone(NAME) as place:
        work: dict[str, Callable[[], Part]] = {
            "built": lambda: built(place),
            "ready": lambda: ready(place),
            "collide": lambda: collide(place, asked.collisions),
            "file": lambda: cold_file(place, asked.rounds),
            "vulkan": lambda: vulkan(
                place, asked.loads, asked.flash_attention, asked.arm or (), lengths
            ),
            "discover": lambda: discover(place, asked.flash_attention),
        }
        for name in asked.part or names:
            try:
                parts[name] = work[name]()
            except (OnebitError, OSError, subprocess.SubprocessError) as error:  # noqa: PERF203
                missing[name] = str(error)
    say("")
    claims = [claim for part in parts.values() for claim in part.claims]
    facts = [*about(load_before), *(f"{name} not measured: {why}" for name, why in missing.items())]
    tables = [table for part in parts.values() for table in part.tables]
    numbers = {name: part.numbers for name, part in parts.items()}
    result = {"about": facts, "missing": missing, "claims": outcomes(claims), "parts": numbers}
    write(NAME, [*tables, *([claim_table(claims)] if claims else [])], facts, result)
    missed = asked.check and any(claim.outcome != "pass" for claim in claims)
    return 1 if missing or missed else 0


if __name__ == "__main__":
    sys.exit(main())
