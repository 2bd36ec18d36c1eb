"""From requests to cells, and from cells to what one arm gains over another.

A cell is what a reader compares: one model, one prompt set, one concurrency, one target, under one
tag. Its unit of resampling is the load where there are several, and else the wave: then the
interval says how the waves of this one start lie and nothing of what another start would give.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from onebit_serve.core import score
from onebit_serve.core.results import Request, Results

__all__ = [
    "METRICS",
    "Cell",
    "FirstAgainstRest",
    "Gain",
    "Metric",
    "RelayCost",
    "cells",
    "first_against_rest",
    "gains",
    "relay_costs",
]


_MORE_ERRORS = 0.05  # of all requests; one of a hundred may fail on any day


class Metric(msgspec.Struct, frozen=True):
    """One thing that is measured.

    Args:
        name: What the command line calls it.
        field: The field of `Request`.
        title: What tables call it, unit included.
        lower_is_better: True for times.
    """

    name: str
    field: str
    title: str
    lower_is_better: bool = True


METRICS = {
    metric.name: metric
    for metric in (
        Metric("ttft", "ttft_ms", "TTFT ms"),
        Metric("tpot", "tpot_ms", "TPOT ms"),
        Metric("total", "total_ms", "end-to-end ms"),
        Metric("prefill", "prefill_tok_s", "prefill tok/s", lower_is_better=False),
        Metric("decode", "decode_tok_s", "decode tok/s", lower_is_better=False),
        Metric("wait", "wait_ms", "wait ms"),
    )
}


class Cell(msgspec.Struct, frozen=True):
    """The requests of one cell, summed up.

    Args:
        tag: The arm.
        model: The served id.
        prompts: The prompt set.
        concurrency: Requests at once.
        target: `door` or `direct`.
        loads: Fresh starts it comes from.
        requests: Requests sent.
        errors: How many failed, by kind.
        spreads: By metric's name, of the successful ones; missing where nothing was measured.
        intervals: 95 % intervals of the medians that were asked for, by metric's name; `None` with
            under five units.
        unit: What was resampled.
        prompt_tokens: Median.
        cached_tokens: Median.
        output_tokens: Median.
        rates_by: Who timed the rates: `backend`, `client`, or both.
    """

    tag: str
    model: str
    prompts: str
    concurrency: int
    target: str
    loads: int
    requests: int
    errors: dict[str, int]
    spreads: dict[str, score.Spread]
    intervals: dict[str, score.Interval | None]
    unit: Literal["load", "wave"]
    prompt_tokens: float | None
    cached_tokens: float | None
    output_tokens: float | None
    rates_by: str


class Gain(msgspec.Struct, frozen=True):
    """One cell of one arm against the same of the first.

    Args:
        base: The tag of the first arm.
        tag: The tag of the other.
        model: The served id.
        prompts: The prompt set.
        concurrency: Requests at once.
        target: `door` or `direct`.
        base_median: The first arm's median, in the metric's unit; `None` without a success.
        median: The other's.
        base_requests: Requests sent to the first arm.
        requests: To the other.
        base_errors: How many of the first arm's failed.
        errors: Of the other's.
        comparison: How many times better, of the requests that succeeded.
        unit: What was resampled.
    """

    base: str
    tag: str
    model: str
    prompts: str
    concurrency: int
    target: str
    base_median: float | None
    median: float | None
    base_requests: int
    requests: int
    base_errors: int
    errors: int
    comparison: score.Comparison
    unit: Literal["load", "wave"]

    @property
    def fails_more(self) -> bool:
        """Whether clearly more of the other arm's requests failed: a gain of the rest is none."""
        if not self.base_requests or not self.requests:
            return False
        share, base_share = self.errors / self.requests, self.base_errors / self.base_requests
        return share > base_share + _MORE_ERRORS


class FirstAgainstRest(msgspec.Struct, frozen=True):
    """Request 1 of each load against the best of the later ones.

    Args:
        tag: The arm.
        model: The served id.
        prompts: The prompt set.
        metric: `prefill`, `decode` or `ttft`.
        loads: Loads that have both.
        first: Median of request 1.
        best: Median of the best later request of each load.
        ratios: By load: how many times slower request 1 was.
        interval: 95 % interval of the ratios' median; `None` with under five loads.
    """

    tag: str
    model: str
    prompts: str
    metric: str
    loads: int
    first: float
    best: float
    ratios: tuple[float, ...]
    interval: score.Interval | None


class RelayCost(msgspec.Struct, frozen=True):
    """What the way through the front door adds to a metric, against the backend beside it.

    Args:
        tag: The arm.
        cell: Model, prompt set and concurrency.
        metric: `ttft`, `tpot` or `total`.
        door: Median through the front door, in milliseconds.
        direct: Median beside it, in milliseconds.
        added: Median over loads or waves of door less direct, in milliseconds.
        low: The least that any unit added.
        high: The most.
        interval: The 95 % interval of `added`; `None` with under five units.
        unit: What was resampled.
    """

    tag: str
    cell: str
    metric: str
    door: float
    direct: float
    added: float
    low: float
    high: float
    interval: score.Interval | None
    unit: Literal["load", "wave"]


Key = tuple[str, str, str, int, str]


def cells(results: Results, *, intervals: Collection[str] = ("ttft",)) -> tuple[Cell, ...]:
    """Return every cell, in the order in which it was first measured.

    Args:
        results: All arms together.
        intervals: The metrics whose intervals are shown; each takes thousands of medians.
    """
    by_cell = _by_cell(results.requests)
    return tuple(_cell(key, requests, intervals) for key, requests in by_cell.items())


def gains(results: Results, metric: str = "ttft", *, base: str | None = None) -> tuple[Gain, ...]:
    """Return every arm against the first (or `base`), cell by cell.

    A cell that only one of them has is there too, as not measured.

    Args:
        results: All arms together; requests of one tag belong to one arm, whatever file or run
            they come from.
        metric: A name of `METRICS`.
        base: Tag of the baseline; the first one by default.
    """
    by_cell = _by_cell(results.requests)
    tags = list(dict.fromkeys(key[0] for key in by_cell))
    if not tags:
        return ()
    first = tags[0] if base is None else base
    places = list(dict.fromkeys(key[1:] for key in by_cell))
    found = []
    for tag in tags:
        if tag == first:
            continue
        for place in places:
            ours, theirs = by_cell.get((first, *place), []), by_cell.get((tag, *place), [])
            if ours or theirs:
                found.append(_gain((first, tag), place, ours, theirs, METRICS[metric]))
    return tuple(found)


def first_against_rest(results: Results, metric: str) -> tuple[FirstAgainstRest, ...]:
    """Return request 1 against the best of the later ones, by arm, over its loads.

    Only requests at concurrency 1 through the door count: in a crowd there is no first. Nor does a
    load count whose backend was asked beside the door before.
    """
    kind = METRICS[metric]
    by_cell = _by_cell(results.requests)
    found = []
    for key, requests in by_cell.items():
        if key[3] != 1 or key[4] != "door":
            continue
        beside = by_cell.get((*key[:4], "direct"), [])
        asked_s = {(r.run, r.load): r.started_s for r in beside if r.repeat == 1}
        pairs = []
        for load in _loads(requests):
            if load[0].started_s > asked_s.get((load[0].run, load[0].load), math.inf):
                continue
            first = [getattr(r, kind.field) for r in load if r.repeat == 1]
            later = [getattr(r, kind.field) for r in load if r.repeat > 1 and not r.error]
            later = [value for value in later if value]
            if first and first[0] and later:
                pairs.append((first[0], min(later) if kind.lower_is_better else max(later)))
        if not pairs:
            continue
        ratios = [a / b if kind.lower_is_better else b / a for a, b in pairs]
        found.append(
            FirstAgainstRest(
                tag=key[0],
                model=key[1],
                prompts=key[2],
                metric=metric,
                loads=len(pairs),
                first=score.median([a for a, _ in pairs]),
                best=score.median([b for _, b in pairs]),
                ratios=tuple(round(ratio, 4) for ratio in ratios),
                interval=score.interval([[ratio] for ratio in ratios]),
            )
        )
    return tuple(found)


def relay_costs(results: Results, metric: str = "ttft") -> tuple[RelayCost, ...]:
    """Return what the front door adds, for every cell that was measured both ways."""
    field = METRICS[metric].field
    by_cell = _by_cell(results.requests)
    found = []
    for key, requests in by_cell.items():
        beside = by_cell.get((*key[:4], "direct"), [])
        if key[4] != "door" or not beside:
            continue
        unit, ours = _units(requests)
        _, theirs = _units(beside, unit)
        pairs = []
        for name, group in ours.items():
            door, direct = _values(group, field), _values(theirs.get(name, []), field)
            if door and direct:
                pairs.append((score.median(door), score.median(direct)))
        if not pairs:
            continue
        added = [door - direct for door, direct in pairs]
        found.append(
            RelayCost(
                tag=key[0],
                cell=requests[0].cell,
                metric=metric,
                door=score.median([door for door, _ in pairs]),
                direct=score.median([direct for _, direct in pairs]),
                added=score.median(added),
                low=min(added),
                high=max(added),
                interval=score.interval([[value] for value in added]),
                unit=unit,
            )
        )
    return tuple(found)


def _by_cell(requests: Iterable[Request]) -> dict[Key, list[Request]]:
    found: dict[Key, list[Request]] = {}
    for r in requests:
        found.setdefault((r.tag, r.model, r.prompts, r.concurrency, r.target), []).append(r)
    return found


def _loads(requests: Sequence[Request]) -> list[list[Request]]:
    found: dict[tuple[str, int], list[Request]] = {}
    for request in requests:
        found.setdefault((request.run, request.load), []).append(request)
    return list(found.values())


Unit = Literal["load", "wave"]


def _units(
    requests: Sequence[Request], unit: Unit | None = None
) -> tuple[Unit, dict[tuple[str, int, int], list[Request]]]:
    """Group requests by load where there are several, else by wave."""
    if unit is None:
        unit = "load" if len({(r.run, r.load) for r in requests}) > 1 else "wave"
    found: dict[tuple[str, int, int], list[Request]] = {}
    for r in requests:
        found.setdefault((r.run, r.load, r.repeat if unit == "wave" else 0), []).append(r)
    return unit, found


def _values(requests: Iterable[Request], field: str) -> list[float]:
    every = (getattr(request, field) for request in requests if not request.error)
    return [value for value in every if value is not None]


def _cell(key: Key, requests: list[Request], shown: Collection[str]) -> Cell:
    unit, groups = _units(requests)
    spreads, intervals = {}, {}
    for metric in METRICS.values():
        found = score.spread(_values(requests, metric.field))
        if found is not None:
            spreads[metric.name] = found
        if found is not None and metric.name in shown:
            grouped = [_values(group, metric.field) for group in groups.values()]
            intervals[metric.name] = score.interval(grouped)
    return Cell(
        tag=key[0],
        model=key[1],
        prompts=key[2],
        concurrency=key[3],
        target=key[4],
        loads=len(_loads(requests)),
        requests=len(requests),
        errors=dict(Counter(request.error for request in requests if request.error)),
        spreads=spreads,
        intervals=intervals,
        unit=unit,
        prompt_tokens=_middle(requests, "prompt_tokens"),
        cached_tokens=_middle(requests, "cached_tokens"),
        output_tokens=_middle(requests, "output_tokens"),
        rates_by=" and ".join(sorted({r.rates_by for r in requests if r.rates_by})),
    )


def _middle(requests: Iterable[Request], field: str) -> float | None:
    values = _values(requests, field)
    return score.median(values) if values else None


def _gain(
    tags: tuple[str, str],
    place: tuple[str, str, int, str],
    ours: Sequence[Request],
    theirs: Sequence[Request],
    metric: Metric,
) -> Gain:
    # the wave is the unit only where both come from one start; else an arm of one load counts one
    unit: Unit = "load" if max(len(_loads(ours)), len(_loads(theirs))) > 1 else "wave"
    base = [_values(group, metric.field) for group in _units(ours, unit)[1].values()]
    other = [_values(group, metric.field) for group in _units(theirs, unit)[1].values()]
    return Gain(
        base=tags[0],
        tag=tags[1],
        model=place[0],
        prompts=place[1],
        concurrency=place[2],
        target=place[3],
        base_median=_middle(ours, metric.field),
        median=_middle(theirs, metric.field),
        base_requests=len(ours),
        requests=len(theirs),
        base_errors=sum(bool(request.error) for request in ours),
        errors=sum(bool(request.error) for request in theirs),
        comparison=score.compare(base, other, lower_is_better=metric.lower_is_better),
        unit=unit,
    )
