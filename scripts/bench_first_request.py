#!/usr/bin/env python3
"""Measure how far a first request is behind the next two, with the warm-up and without.

    python scripts/bench_first_request.py               # the fake and software Vulkan, ten minutes
    python scripts/bench_first_request.py --only fake   # half a minute
    python scripts/bench_first_request.py --loads 1

Every load is a fresh `1bit serve`; the arms `warm` and `cold` (ONEBIT_NO_WARMUP=1) take turns. A
load is sent three requests of each prompt length, one length after the other, each with text of
its own and nothing reused. Figures are the backend's own `timings`. The gap is what request 1 lacks
to the better of requests 2 and 3, in percent of the latter.

`fake`: the stand-in for llama-server with the costs of AMD's HRX; its timings are computed, and it
notes which request met a shape that was not built. `vulkan`: a real llama-server, Mesa's software
Vulkan, a tiny model, Mesa's own cache of shaders off so that every load pays for its pipelines.

Exit code 1: something broke. With --check also: a claim failed or was not measured.
"""

from __future__ import annotations

import functools
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
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
    median_and_range,
    options,
    outcomes,
    program,
    record,
    say,
    tiny_model,
    write,
)

from onebit_serve.bench.arms import Arm, Server, order
from onebit_serve.bench.client import Endpoint, endpoint, fetch, resolve
from onebit_serve.core import score
from onebit_serve.core.errors import OnebitError
from onebit_serve.core.report import Table
from onebit_serve.core.warmup import SEED_TEXT, prompt_ids
from onebit_serve.fake_llama.costs import Costs

__all__ = ["Request", "claims", "gap_percent", "gaps", "predicted_gaps", "table"]

NAME = "first-request"
WARM, COLD = "warm", "cold"
ARMS = (Arm(WARM), Arm(COLD, environment={"ONEBIT_NO_WARMUP": "1"}))
WARM_UP_TOKENS = 465  # the default of [warmup] prompt_tokens
REPEATS = 3
DECODE_TOKENS = 32
# Alone on two cores llama-server's own start and the warm-up build pipelines for a minute at most.
START_LIMIT_S, ANSWER_LIMIT_S = 600.0, 300.0
OK = 200


class Stand(msgspec.Struct, frozen=True):
    """A backend and how it is started.

    Args:
        name: Its name in tables.
        says: What it is.
        flags: Flags of `1bit serve`.
        variables: Environment it gets.
        lengths: Prompt lengths in tokens, in the order they are sent.
    """

    name: str
    says: str
    flags: tuple[str, ...]
    variables: dict[str, str]
    lengths: tuple[int, ...]


class Request(msgspec.Struct, frozen=True):
    """One request of a client.

    Args:
        stand: Name of the backend.
        arm: `warm` or `cold`.
        load: Number of the fresh start, from 1.
        prompt_tokens: Length of its prompt.
        number: Its place among those of its length, from 1.
        prefill_per_s: Prompt tokens a second, by the backend's timings.
        decode_per_s: Generated tokens a second, by the backend's timings.
        unbuilt: Shapes that it met unbuilt, where the backend says so.
    """

    stand: str
    arm: str
    load: int
    prompt_tokens: int
    number: int
    prefill_per_s: float
    decode_per_s: float
    unbuilt: tuple[str, ...] = ()


Figure = Callable[[Request], float]


def prefill(request: Request) -> float:
    """Return a request's prefill rate."""
    return request.prefill_per_s


def decode(request: Request) -> float:
    """Return a request's decode rate."""
    return request.decode_per_s


def gap_percent(first: float, later: Sequence[float]) -> float:
    """Return what a first rate lacks to the best later one, in percent of that one."""
    best = max(later)
    return 100 * (best - first) / best


def chosen(requests: Sequence[Request], stand: str, arm: str, tokens: int) -> list[list[Request]]:
    """Return the requests of one cell, a list for each load, in the order they were sent."""
    found = [r for r in requests if (r.stand, r.arm, r.prompt_tokens) == (stand, arm, tokens)]
    loads = sorted({r.load for r in found})
    return [sorted((r for r in found if r.load == n), key=lambda r: r.number) for n in loads]


def gaps(loads: Sequence[Sequence[Request]], figure: Figure) -> list[float]:
    """Return the gap of every load that has a first request and a later one."""
    return [
        gap_percent(figure(first), [figure(r) for r in later]) for first, *later in loads if later
    ]


def predicted_gaps(tokens: int, *, prefill_built: bool, decode_built: bool) -> tuple[float, float]:
    """Return the gaps that the fake's cost model asks for, prefill and decode, in percent.

    Args:
        tokens: Length of the prompt, at most one batch.
        prefill_built: A request of that length was there before.
        decode_built: Any request was there before.
    """
    costs = Costs("hrx", 1.0, 0, 0)
    (batch,) = costs.batches(tokens, tokens)
    shape = costs.decode_shape(1)
    unbuilt_ms = costs.step_ms(shape, built=False, met_unbuilt=True)
    built_ms = costs.step_ms(shape, built=True, met_unbuilt=False)
    prefill_gap = gap_percent(1 / (batch.ms + batch.build_ms), [1 / batch.ms])
    decode_gap = gap_percent(1 / unbuilt_ms, [1 / built_ms])
    return (0.0 if prefill_built else prefill_gap), (0.0 if decode_built else decode_gap)


def predicted(stand: Stand, arm: str, tokens: int) -> tuple[float, float]:
    """Return the predicted gaps of a cell of the fake."""
    is_first = tokens == stand.lengths[0]
    warmed = arm == WARM
    return predicted_gaps(
        tokens,
        prefill_built=warmed and tokens == WARM_UP_TOKENS,
        decode_built=warmed or not is_first,
    )


def table(stand: Stand, requests: Sequence[Request]) -> Table:
    """Return a backend's table."""
    fake = stand.name == "fake"
    columns = ["prompt tokens", "arm"]
    for what in ("prefill", "decode"):
        columns += [f"{what} 1, tokens/s", "best of 2-3", "gap, %"]
        columns += ["model says, %"] if fake else []
    columns += ["met unbuilt, requests"] if fake else []
    rows = []
    for tokens, arm in itertools.product(stand.lengths, (WARM, COLD)):
        loads = chosen(requests, stand.name, arm, tokens)
        if not loads:
            continue
        row = [str(tokens), arm]
        for figure, said in zip((prefill, decode), predicted(stand, arm, tokens), strict=True):
            row.append(f"{score.median([figure(load[0]) for load in loads]):.1f}")
            row.append(f"{score.median([max(map(figure, load[1:])) for load in loads]):.1f}")
            row.append(median_and_range(gaps(loads, figure)))
            row += [f"{said:.1f}"] if fake else []
        row += [f"{sum(bool(r.unbuilt) for load in loads for r in load)}"] if fake else []
        rows.append(tuple(row))
    return Table(f"Request 1 against the best of 2-3: {stand.says}", tuple(columns), tuple(rows))


def claims(stand: Stand, requests: Sequence[Request]) -> list[Claim]:
    """Return what the fake's run must show about the warm-up's own shapes."""
    mine = [r for r in requests if r.stand == stand.name]
    if not mine:
        return [Claim(f"{stand.name}: all of it", None, 0)]
    own = {f"prefill:{WARM_UP_TOKENS}", "decode:1"}
    met = sum(bool(own & set(r.unbuilt)) for r in mine if r.arm == WARM)
    warm, cold = (chosen(mine, stand.name, arm, WARM_UP_TOKENS) for arm in (WARM, COLD))
    found = [
        Claim("warm: client requests that met the warm-up's own shapes unbuilt", met, 0),
        Claim("warm: largest decode gap of any load, %", max(gaps(warm, decode), default=None), 1),
    ]
    for figure, said in zip((prefill, decode), predicted(stand, COLD, WARM_UP_TOKENS), strict=True):
        off = [abs(gap - said) for gap in gaps(cold, figure)]
        text = f"cold: {figure.__name__} gap off from the {said:.2f} % that the model says, points"
        found.append(Claim(text, max(off, default=None), 0.1))
    return found


async def ask(door: Endpoint, ids: list[int]) -> dict[str, Any]:
    """Send one request and return its timings.

    Raises:
        OnebitError: It was not answered as it must be.
    """
    body = {
        "prompt": ids,
        "n_predict": DECODE_TOKENS,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": True,
    }
    with trio.move_on_after(ANSWER_LIMIT_S) as limit:
        answer = await fetch(door, "POST", "/completion", body)
    if limit.cancelled_caught:
        raise OnebitError(f"a prompt of {len(ids)} tokens had no answer in {ANSWER_LIMIT_S:g} s")
    timings = (answer.json() or {}).get("timings", {}) if answer.status == OK else {}
    if timings.get("prompt_n") != len(ids):
        raise OnebitError(f"a prompt of {len(ids)} tokens gave {answer.status}: {answer.body!r}")
    return dict(timings)


async def one_load(stand: Stand, arm: Arm, load: int, place: Path) -> list[Request]:
    """Start a server, send it everything, stop it.

    Raises:
        OnebitError: It did not come up or did not answer.
    """
    notes = place / "record.jsonl"
    notes.unlink(missing_ok=True)
    variables = environment(place, **stand.variables, **arm.environment)
    server = Server([program("1bit"), "serve", *stand.flags, "-p", "0"], variables)
    found = []
    async with server.running(START_LIMIT_S, f"{stand.name}, {arm.tag}, load {load}") as url:
        door = await resolve(endpoint(url))
        answer = await fetch(door, "POST", "/tokenize", {"content": SEED_TEXT})
        seed = answer.json()["tokens"]
        for tokens, number in itertools.product(stand.lengths, range(1, REPEATS + 1)):
            say(f"{stand.name} {arm.tag} load {load}: {tokens} tokens, request {number}")
            turned = [*seed[number:], *seed[:number]]
            timings = await ask(door, prompt_ids(turned, tokens))
            rates = timings["prompt_per_second"], timings["predicted_per_second"]
            found.append(Request(stand.name, arm.tag, load, tokens, number, *rates))
    replies = [e for e in record(notes) if e["event"] == "reply" and e.get("work")]
    unbuilt = [tuple(reply["unbuilt"]) for reply in replies[-len(found) :]]
    if not unbuilt:
        return found
    return [
        msgspec.structs.replace(request, unbuilt=met)
        for request, met in zip(found, unbuilt, strict=True)
    ]


async def measure(
    stands: Sequence[Stand], loads: int, place: Path
) -> tuple[list[Request], dict[str, str]]:
    """Run every load of every backend; return the requests, and why a backend was left out."""
    requests: list[Request] = []
    missing: dict[str, str] = {}
    for stand in stands:
        try:
            for load in range(1, loads + 1):
                for arm in order(ARMS, load):
                    requests += await one_load(stand, arm, load, place)
        except (OnebitError, OSError) as error:  # noqa: PERF203 - the others go on
            missing[stand.name] = str(error)
    say("")
    return requests, missing


def stands(place: Path) -> list[Stand]:
    """Return the backends, with models written for them."""
    model = str(tiny_model(place))
    notes = place / "record.jsonl"
    return [
        Stand(
            "fake",
            "the fake with HRX's costs",
            ("-m", model, "--device", "hrx", "--llama-server", program("1bit-fake-llama")),
            {"FAKE_LLAMA": f"model=hrx load=0.3 rec={shlex.quote(str(notes))}"},
            (WARM_UP_TOKENS, 301),
        ),
        Stand(
            "vulkan",
            "llama-server on software Vulkan, a tiny model",
            ("-m", model, "--device", "vulkan"),
            {"GGML_VK_VISIBLE_DEVICES": "0", "MESA_SHADER_CACHE_DISABLE": "true"},
            (WARM_UP_TOKENS, 33, 8),
        ),
    ]


def main() -> int:
    """Measure and report; return the exit code."""
    parser = options(__doc__)
    parser.add_argument("--only", choices=("fake", "vulkan"), help="one backend")
    parser.add_argument("--loads", type=int, default=3, help="fresh starts an arm (default 3)")
    asked = parser.parse_args()
    load_before = os.getloadavg()[0]
    with alone(NAME) as place:
        every = [s for s in stands(place) if asked.only in (None, s.name)]
        requests, missing = trio.run(functools.partial(measure, every, asked.loads, place))
    held = [c for s in every if s.name == "fake" for c in claims(s, requests)]
    facts = [
        *about(load_before),
        (
            f"{asked.loads} loads an arm, {DECODE_TOKENS} tokens a reply; gaps: median (lowest to "
            "highest load)"
        ),
        *(f"{name} not measured: {why}" for name, why in missing.items()),
    ]
    tables = [table(s, requests) for s in every if any(r.stand == s.name for r in requests)]
    tables += [claim_table(held)] if held else []
    result = {"about": facts, "missing": missing, "claims": outcomes(held), "requests": requests}
    write(NAME, tables, facts, result)
    missed = asked.check and any(c.outcome != "pass" for c in held)
    return 1 if missing or missed else 0


if __name__ == "__main__":
    sys.exit(main())
