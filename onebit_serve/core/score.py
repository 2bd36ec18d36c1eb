"""Percentiles, intervals and verdicts: from measured numbers to what may be said of them.

The unit of resampling is the *load*, one fresh start of a server, and not the request: what makes
two runs differ (where memory landed, what the clock of the machine did) is drawn once per load and
shared by all of its requests. An interval that resamples requests of few loads is far too narrow:
with a load-to-load spread of 5 % and 3 % from request to request, nominal 95 % intervals between
two equal arms held the truth 61-70 % of the time (simulated, 5 to 20 loads of 8 requests).

With few loads the plain percentile bootstrap is too narrow as well (84-87 % at 5 loads, same
simulation): it cannot reach past the lowest and the highest load. So the bootstrap gives the
standard error, and Student's t and the small-sample factor sqrt(n / (n - 1)) give the width, on
the scale of logarithms where all values are above zero. Two arms may have different numbers of
loads and different spreads, so that the degrees of freedom of their ratio are those of Welch and
Satterthwaite. `scripts/interval_coverage.py` prints the coverage of these very functions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean
from typing import Literal

import msgspec

__all__ = [
    "MIN_UNITS",
    "Comparison",
    "Interval",
    "Outcome",
    "Spread",
    "Verdict",
    "compare",
    "interval",
    "judge",
    "median",
    "percentile",
    "ratio_interval",
    "spread",
]

Outcome = Literal["pass", "fail", "not measured"]
Verdict = Literal["faster", "slower", "no difference", "not measured"]

MIN_UNITS = 5
"""Loads below which no interval is given: four values bound a median with 87.5 % at most, since
all of them lie on one side of it once in eight times."""

_RESAMPLES = 2000
# Student's t, 97.5 % quantile, for 1 to 30 degrees of freedom (any table of it).
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

Statistic = Callable[[Sequence[float]], float]


class Spread(msgspec.Struct, frozen=True):
    """How values lie, in their own unit.

    Args:
        count: How many values.
        median: The 50 % point.
        p90: The 90 % point.
        p99: The 99 % point; with fewer than a hundred values close to the highest.
        low: The lowest value.
        high: The highest value.
    """

    count: int
    median: float
    p90: float
    p99: float
    low: float
    high: float


class Interval(msgspec.Struct, frozen=True):
    """A 95 % bootstrap interval.

    Args:
        low: Lower end.
        high: Upper end.
        units: How many units were resampled (of the smaller arm, for a ratio).
    """

    low: float
    high: float
    units: int


class Comparison(msgspec.Struct, frozen=True):
    """One arm against the baseline.

    Args:
        speedup: How many times better than the baseline; `None` where either has no value.
        interval: Its 95 % interval; `None` with fewer than five units in either arm.
        low: Lowest speedup of any unit's median against any of the baseline's.
        high: The highest.
        verdict: What the interval says; `not measured` without one.
        units: Units (loads) of the smaller arm.
    """

    speedup: float | None
    interval: Interval | None
    low: float | None
    high: float | None
    verdict: Verdict
    units: int


def percentile(values: Sequence[float], share: float) -> float:
    """Return the point below which a share of the values lies, interpolated between neighbours.

    Args:
        values: At least one value, in any order.
        share: From 0 to 1.

    Raises:
        ValueError: There are no values, or the share is outside 0 to 1.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    if not 0 <= share <= 1:
        raise ValueError(f"share {share} is not between 0 and 1")
    return _point(sorted(values), share)


def median(values: Sequence[float]) -> float:
    """Return the middle value; raises ValueError when there is none."""
    return percentile(values, 0.5)


def spread(values: Sequence[float]) -> Spread | None:
    """Return count, median, p90, p99 and range, or `None` where there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(
        count=len(ordered),
        median=_point(ordered, 0.5),
        p90=_point(ordered, 0.9),
        p99=_point(ordered, 0.99),
        low=ordered[0],
        high=ordered[-1],
    )


def interval(
    units: Sequence[Sequence[float]], statistic: Statistic = median, *, seed: int = 0
) -> Interval | None:
    """Return the 95 % interval of a statistic of all values, or `None` with too few units.

    Args:
        units: The values of each load; empty ones do not count.
        statistic: What is estimated, from the values of all units together.
        seed: Of the resampling, so that the same data give the same interval.
    """
    filled = [list(u) for u in units if u]
    if len(filled) < MIN_UNITS:
        return None
    draws = _resampled(filled, statistic, random.Random(seed))  # noqa: S311 - no secret
    quantile = _quantile(len(filled) - 1)
    centre = statistic(_pooled(filled))
    if centre > 0 and min(draws) > 0:
        logs = [math.log(draw) for draw in draws]
        factor = math.exp(quantile * math.sqrt(_variance(logs, len(filled))))
        return Interval(centre / factor, centre * factor, len(filled))
    reach = quantile * math.sqrt(_variance(draws, len(filled)))
    return Interval(centre - reach, centre + reach, len(filled))


def ratio_interval(
    top: Sequence[Sequence[float]],
    bottom: Sequence[Sequence[float]],
    statistic: Statistic = median,
    *,
    seed: int = 0,
) -> Interval | None:
    """Return the 95 % interval of statistic(top) / statistic(bottom), or `None`.

    Args:
        top: The values of each load of one arm, all above zero.
        bottom: The same of the other arm.
        statistic: What is compared.
        seed: Of the resampling.
    """
    tops = [list(u) for u in top if u]
    bottoms = [list(u) for u in bottom if u]
    fewer = min(len(tops), len(bottoms))
    if fewer < MIN_UNITS:
        return None
    generator = random.Random(seed)  # noqa: S311 - no secret
    above = _resampled(tops, statistic, generator)
    below = _resampled(bottoms, statistic, generator)
    centre = statistic(_pooled(tops)), statistic(_pooled(bottoms))
    if min(*above, *below, *centre) <= 0:
        return None
    shares = [
        (_variance([math.log(draw) for draw in draws], len(units)), len(units) - 1)
        for draws, units in ((above, tops), (below, bottoms))
    ]
    variance = sum(share for share, _ in shares)
    # Welch and Satterthwaite: the arm that spreads more decides; without any spread it is all one
    doubt = sum(share**2 / degrees for share, degrees in shares)
    degrees = variance**2 / doubt if doubt else fewer - 1
    ratio, factor = centre[0] / centre[1], math.exp(_quantile(degrees) * math.sqrt(variance))
    return Interval(ratio / factor, ratio * factor, fewer)


def compare(
    base: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    *,
    lower_is_better: bool,
    seed: int = 0,
) -> Comparison:
    """Say how many times better an arm is than the baseline, and whether that is more than noise.

    Args:
        base: The values of each load of the baseline.
        other: The values of each load of the other arm.
        lower_is_better: True for times, False for rates.
        seed: Of the resampling.
    """
    bases = [list(u) for u in base if u]
    others = [list(u) for u in other if u]
    units = min(len(bases), len(others))
    if not units:
        return Comparison(None, None, None, None, "not measured", 0)
    base_typical, typical = median(_pooled(bases)), median(_pooled(others))
    if base_typical <= 0 or typical <= 0:
        return Comparison(None, None, None, None, "not measured", units)

    top, bottom = (bases, others) if lower_is_better else (others, bases)
    bounds = ratio_interval(top, bottom, seed=seed)
    # each load of one against each of the other, so that the spread of both is in the range
    pairs = [a / b for a in map(median, top) for b in map(median, bottom) if a > 0 and b > 0]
    return Comparison(
        speedup=base_typical / typical if lower_is_better else typical / base_typical,
        interval=bounds,
        low=min(pairs, default=None),
        high=max(pairs, default=None),
        verdict=_verdict(bounds),
        units=units,
    )


def judge(
    value: float | None, *, at_least: float | None = None, at_most: float | None = None
) -> Outcome:
    """Hold a value against its limits; what has no value is `not measured`, never a pass."""
    if value is None or math.isnan(value):
        return "not measured"
    if at_least is not None and value < at_least:
        return "fail"
    if at_most is not None and value > at_most:
        return "fail"
    return "pass"


def _verdict(bounds: Interval | None) -> Verdict:
    if bounds is None:
        return "not measured"
    if bounds.low > 1:
        return "faster"
    return "slower" if bounds.high < 1 else "no difference"


def _pooled(units: Sequence[Sequence[float]]) -> list[float]:
    return [value for unit in units for value in unit]


def _resampled(
    units: Sequence[Sequence[float]], statistic: Statistic, generator: random.Random
) -> list[float]:
    return [statistic(_pooled(generator.choices(units, k=len(units)))) for _ in range(_RESAMPLES)]


def _quantile(degrees: float) -> float:
    """Return how many standard errors an interval reaches to each side."""
    last = len(_T_975)
    if degrees >= last:  # towards the normal quantile as 1/degrees falls, right to three digits
        normal = NormalDist().inv_cdf(0.975)
        return normal + (_T_975[-1] - normal) * last / degrees
    whole = math.floor(degrees)
    return _T_975[whole - 1] + (_T_975[whole] - _T_975[whole - 1]) * (degrees - whole)


def _variance(draws: Sequence[float], units: int) -> float:
    """Return the squared standard error that resampled statistics of so many units show."""
    mean = fmean(draws)
    return fmean((draw - mean) ** 2 for draw in draws) * units / (units - 1)


def _point(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
