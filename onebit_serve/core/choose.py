"""The set of shapes that frees the most requests within a budget of seconds.

A request pays nothing only if every shape it needs is warm. It needs few: nearly always common
ones (the full micro-batch, the tail after a checkpoint) and one of its own. So all choices of
common shapes are tried, and for each the rest is a knapsack, solved exactly on costs that are
rounded up. More budget therefore never means less mass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from onebit_serve.core.shapes import Demand, Shape

__all__ = ["choose"]

UNIT_S = 0.0025
"""Costs are rounded up to this much: 2 % of the cheapest program that HRX builds (130 ms)."""
UNITS = 1200
"""Budgets of more units (3 s) are solved in coarser ones, so that planning stays quick."""
COMMON_SHAPES = 5
TINY = 1e-12


def choose(
    wanted: Demand,
    price: Mapping[Shape, float],
    budget_s: float,
    *,
    have: frozenset[Shape] = frozenset(),
) -> frozenset[Shape]:
    """Return the set of shapes that frees the most mass for at most `budget_s`.

    Args:
        wanted: How likely shapes are.
        price: Seconds for each shape that may be chosen.
        budget_s: Seconds to spend.
        have: Shapes that are warm already.
    """
    rows = [(need - have, weight) for need, weight in wanted.rows]
    rows = [(need, weight) for need, weight in rows if need and all(s in price for s in need)]
    if sum(price.values()) <= budget_s:
        return frozenset(price)
    best: tuple[float, frozenset[Shape]] = (0.0, frozenset())
    # Coarser units for larger budgets; the best of the finer ones below stays a candidate, so that
    # mass grows with the budget across the seams as well.
    unit_s, top_s = UNIT_S, UNIT_S * UNITS
    while True:
        best = max(best, _solve(rows, price, min(budget_s, top_s), unit_s), key=lambda c: c[0])
        if budget_s <= top_s:
            return best[1]
        unit_s, top_s = unit_s * 2, top_s * 2


_Rows = Sequence[tuple[frozenset[Shape], float]]


def _solve(
    rows: _Rows, price: Mapping[Shape, float], budget_s: float, unit_s: float
) -> tuple[float, frozenset[Shape]]:
    room = int(budget_s / unit_s + 1e-9)
    units = {shape: max(1, math.ceil(cost / unit_s)) for shape, cost in price.items()}
    tries: list[tuple[float, float, frozenset[Shape], dict[Shape, float], int]] = []
    for base in _bases(rows, price):
        rest = room - sum(units[shape] for shape in base)
        if rest < 0:
            continue
        mass, gains = 0.0, dict[Shape, float]()
        for need, weight in rows:
            lacking = need - base
            if not lacking:
                mass += weight
            elif len(lacking) == 1:
                (shape,) = lacking
                gains[shape] = gains.get(shape, 0.0) + weight
        tries.append((mass + _bound(gains, units, rest), mass, base, gains, rest))
    best: tuple[float, frozenset[Shape]] = (0.0, frozenset())
    for bound, mass, base, gains, rest in sorted(tries, key=lambda t: -t[0]):
        if bound <= best[0] + TINY:
            break
        gained, taken = _knapsack(gains, units, rest)
        if mass + gained > best[0] + TINY:
            best = (mass + gained, base | taken)
    return best


def _bound(gains: Mapping[Shape, float], units: Mapping[Shape, int], room: int) -> float:
    """Return what no choice can exceed: the best ones by the second, the last one cut to fit."""
    total = 0.0
    for shape in sorted(gains, key=lambda shape: -gains[shape] / units[shape]):
        if units[shape] >= room:
            return total + gains[shape] * room / units[shape]
        total += gains[shape]
        room -= units[shape]
    return total


def _bases(rows: _Rows, price: Mapping[Shape, float]) -> Iterator[frozenset[Shape]]:
    """Yield the shapes that many rows need, in every combination that could be the best one.

    Numbers of sequences are a chain: a burst of four warms three, two and one as well. So only how
    far up to go is a choice.
    """
    chain = sorted(shape for shape in price if shape.sequences)
    common = _common(rows)
    for level in range(len(chain) + 1):
        climbed = frozenset(chain[:level])
        free = [shape for shape in common if shape not in climbed]
        for size in range(len(free) + 1):
            for picked in combinations(free, size):
                yield climbed.union(picked)


def _common(rows: _Rows) -> tuple[Shape, ...]:
    """Return shapes without which every prefill needs at most one more (as far as a few can)."""
    rows = [row for row in rows if not any(shape.sequences for shape in row[0])]
    common: list[Shape] = []
    while len(common) < COMMON_SHAPES:
        counts: dict[Shape, int] = {}
        for need, _ in rows:
            lacking = need.difference(common)
            if len(lacking) > 1:
                for shape in lacking:
                    counts[shape] = counts.get(shape, 0) + 1
        if not counts:
            break
        common.append(max(counts, key=lambda shape: (counts[shape], shape)))
    return tuple(common)


def _knapsack(
    gains: Mapping[Shape, float], units: Mapping[Shape, int], room: int
) -> tuple[float, frozenset[Shape]]:
    """Solve the 0/1 knapsack exactly; items that can never be part of an answer are dropped."""
    items = sorted(gains, key=lambda shape: (-gains[shape], units[shape], shape))
    items = [shape for shape in items if units[shape] <= room]
    if not items:
        return 0.0, frozenset()
    fitting = room // min(units[shape] for shape in items)
    kept: list[Shape] = []
    for shape in items:
        # With as many items before it that gain more and cost no more as fit at all, one of them
        # could always take its place.
        if sum(units[other] <= units[shape] for other in kept) < fitting:
            kept.append(shape)
    best = [0.0] * (room + 1)
    taken: list[bytearray] = []
    for shape in kept:
        gain, cost = gains[shape], units[shape]
        shifted = [0.0] * cost + [value + gain for value in best[: room + 1 - cost]]
        taken.append(bytearray(new > old for new, old in zip(shifted, best, strict=True)))
        best = [max(new, old) for new, old in zip(shifted, best, strict=True)]
    at, chosen = room, set[Shape]()
    for shape, took in zip(reversed(kept), reversed(taken), strict=True):
        if took[at]:
            chosen.add(shape)
            at -= units[shape]
    return best[room], frozenset(chosen)
