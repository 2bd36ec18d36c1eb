#!/usr/bin/env python3
"""Show how often the benchmark's 95 % intervals hold the truth, on data whose truth is known.

Each trial draws loads with a known spread between them and requests with a known spread within
them, and asks the very functions that `bench-serve` uses. Two questions are asked: does the
interval of a median hold the true median, and does the interval of an arm against itself hold 1?
For comparison, what comes out when requests are resampled as if they were independent. Below, two
arms of one true median that differ in how many loads they have and how far these spread.

    python scripts/interval_coverage.py [--trials 1000]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence

from onebit_serve.core import score

TRUTH = 100.0
REQUESTS = 8
UNEQUAL = (
    ((5, 0.05, 0.03), (5, 0.01, 0.01)),
    ((5, 0.05, 0.03), (20, 0.01, 0.01)),
    ((5, 0.01, 0.01), (20, 0.05, 0.03)),
    ((5, 0.05, 0.03), (10, 0.05, 0.03)),
)


def loads(draw: random.Random, count: int, between: float, within: float) -> list[list[float]]:
    """Return the requests of each load; their true median is TRUTH."""
    return [
        [TRUTH * math.exp(shift + draw.gauss(0, within)) for _ in range(REQUESTS)]
        for shift in (draw.gauss(0, between) for _ in range(count))
    ]


def holds(bounds: score.Interval | None, truth: float) -> bool:
    """Say whether an interval holds the truth; raises TypeError where there is none."""
    if bounds is None:
        raise TypeError("no interval was given")
    return bounds.low <= truth <= bounds.high


def share(trials: int, once: Callable[[int], bool]) -> str:
    """Return the share of trials that hold, with its own standard error, in percent."""
    held = sum(once(seed) for seed in range(trials)) / trials
    return f"{100 * held:5.1f} +- {100 * math.sqrt(held * (1 - held) / trials):.1f} %"


def two_arms(
    seed: int, count: int, spreads: tuple[float, float]
) -> tuple[list[list[float]], list[list[float]]]:
    """Return two equal arms."""
    draw = random.Random(seed)
    return loads(draw, count, *spreads), loads(draw, count, *spreads)


def of_median(count: int, spreads: tuple[float, float], seed: int) -> bool:
    """Ask whether the interval of one arm's median holds the true one."""
    return holds(score.interval(two_arms(seed, count, spreads)[0], seed=seed), TRUTH)


def of_ratio(count: int, spreads: tuple[float, float], seed: int) -> bool:
    """Ask whether the interval of an arm against itself holds 1."""
    return holds(score.ratio_interval(*two_arms(seed, count, spreads), seed=seed), 1.0)


def of_unequal(arms: Sequence[tuple[int, float, float]], seed: int) -> bool:
    """Ask whether the interval of the ratio of two different arms of one median holds 1."""
    draw = random.Random(seed)
    top, bottom = (loads(draw, *arm) for arm in arms)
    return holds(score.ratio_interval(top, bottom, seed=seed), 1.0)


def of_requests(count: int, spreads: tuple[float, float], seed: int) -> bool:
    """Ask the same, each request taken for a unit of its own."""
    arms = two_arms(seed, count, spreads)
    one, other = ([[value] for unit in arm for value in unit] for arm in arms)
    return holds(score.ratio_interval(one, other, seed=seed), 1.0)


def main() -> None:
    """Print one line for every number of loads and every spread."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1000)
    trials = parser.parse_args().trials
    print(f"{trials} trials, {REQUESTS} requests a load, nominal 95 %")
    print("loads  between  within  median held      itself held      requests as units")
    for count, spreads in itertools.product((5, 10, 20), ((0.05, 0.03), (0.02, 0.05))):
        shares = [
            share(trials, functools.partial(ask, count, spreads))
            for ask in (of_median, of_ratio, of_requests)
        ]
        between, within = spreads
        print(f"{count:5}  {between:7.0%}  {within:6.0%}  {'  '.join(shares)}", flush=True)
    print("loads, between, within of both arms  ratio held")
    for arms in UNEQUAL:
        both = " and ".join(f"{count}, {b:.0%}, {w:.0%}" for count, b, w in arms)
        print(f"{both:35}  {share(trials, functools.partial(of_unequal, arms))}", flush=True)


if __name__ == "__main__":
    main()
