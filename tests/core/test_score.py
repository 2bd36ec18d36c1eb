from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onebit_serve.core import score

# a busy machine is no fault of the code
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

numbers = st.lists(st.floats(min_value=-1e9, max_value=1e9), min_size=1, max_size=50)


@patient
@given(numbers, st.floats(min_value=0, max_value=1))
def test_percentiles_are_those_of_numpy(values, share):
    assert score.percentile(values, share) == pytest.approx(
        float(np.percentile(values, share * 100)), rel=1e-9, abs=1e-3
    )


def test_a_percentile_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no values"):
        score.percentile([], 0.5)


def test_a_share_outside_0_to_1_is_an_error():
    with pytest.raises(ValueError, match="between 0 and 1"):
        score.percentile([1.0], 90)


def test_a_spread_names_count_points_and_range():
    assert score.spread([3.0, 1.0, 2.0]) == score.Spread(3, 2.0, 2.8, 2.98, 1.0, 3.0)
    assert score.spread([]) is None


def loads(count, *, typical=100.0, between=0.05, within=0.03, requests=8, seed=1):
    draw = random.Random(seed)
    shifts = [draw.gauss(0, between) for _ in range(count)]
    return [
        [typical * math.exp(shift + draw.gauss(0, within)) for _ in range(requests)]
        for shift in shifts
    ]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_fewer_than_five_loads_give_no_interval(count):
    assert score.interval(loads(count)) is None
    assert score.ratio_interval(loads(count), loads(9)) is None
    assert score.ratio_interval(loads(9), loads(count)) is None


def test_loads_without_a_value_do_not_count():
    assert score.interval([*loads(4), [], []]) is None


def test_five_loads_give_an_interval_around_the_median():
    values = loads(5)
    bounds = score.interval(values)
    assert bounds.units == 5
    assert bounds.low < score.median([v for unit in values for v in unit]) < bounds.high


def test_more_requests_of_the_same_loads_do_not_narrow_the_interval():
    few = score.interval([[100.0 + n] for n in range(10)])
    many = score.interval([[100.0 + n] * 50 for n in range(10)])
    assert many.high - many.low == pytest.approx(few.high - few.low)


def test_the_same_data_give_the_same_interval():
    assert score.interval(loads(6)) == score.interval(loads(6))
    assert score.interval(loads(20), seed=1) != score.interval(loads(20), seed=2)


def test_a_statistic_of_ones_own_can_be_asked_for():
    bounds = score.interval(loads(8), statistic=lambda values: score.percentile(values, 0.9))
    assert bounds.low > score.interval(loads(8)).low


def test_many_loads_use_the_normal_quantile():
    assert score.interval(loads(40, requests=1)).units == 40


def test_a_clear_gain_is_faster_and_its_mirror_slower():
    cold, warm = loads(6, typical=300), loads(6, typical=100, seed=2)
    gain = score.compare(cold, warm, lower_is_better=True)
    assert gain.verdict == "faster"
    assert gain.speedup == pytest.approx(3, rel=0.15)
    assert gain.interval.low < gain.speedup < gain.interval.high
    assert gain.low <= gain.speedup <= gain.high
    assert score.compare(warm, cold, lower_is_better=True).verdict == "slower"


def test_rates_are_better_when_higher():
    gain = score.compare(loads(6), loads(6, typical=200), lower_is_better=False)
    assert (gain.verdict, round(gain.speedup)) == ("faster", 2)


def test_an_arm_against_itself_is_no_difference():
    same = score.compare(loads(6), loads(6, seed=2), lower_is_better=True)
    assert same.verdict == "no difference"
    assert same.interval.low < 1 < same.interval.high


@pytest.mark.parametrize("lower_is_better", [True, False])
def test_the_range_of_few_loads_holds_the_spread_of_both_arms(lower_is_better):
    wide, narrow = [[80.0], [100.0], [160.0]], [[50.0]]
    one = score.compare(wide, narrow, lower_is_better=lower_is_better)
    other = score.compare(narrow, wide, lower_is_better=lower_is_better)
    ends = [(1.6, 3.2), (50 / 160, 50 / 80)]
    for gain, (low, high) in zip((one, other), ends[:: 1 if lower_is_better else -1], strict=True):
        assert (gain.low, gain.high) == (pytest.approx(low), pytest.approx(high))


def test_the_wider_arm_decides_how_far_the_interval_of_a_ratio_reaches():
    few, many = loads(5, between=0.2, requests=1), loads(30, between=0.001, requests=1)
    bounds = score.ratio_interval(few, many)
    alone = score.interval(few)
    assert bounds.high / bounds.low == pytest.approx(alone.high / alone.low, rel=0.05)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (4, 2.776), (4.5, 2.68), (30, 2.042), (60, 2.0)]
)
def test_quantiles_are_students(degrees, quantile):
    assert score._quantile(degrees) == pytest.approx(quantile, abs=0.01)


def test_with_few_loads_there_is_a_range_and_no_verdict():
    gain = score.compare(loads(3), loads(3, typical=50), lower_is_better=True)
    assert (gain.verdict, gain.interval, gain.units) == ("not measured", None, 3)
    assert gain.low < gain.speedup < gain.high


@pytest.mark.parametrize(
    ("base", "other"),
    [([], [[1.0]]), ([[1.0]], []), ([[]], [[1.0]]), ([[0.0]], [[1.0]]), ([[1.0]], [[0.0]])],
)
def test_what_has_no_value_is_not_measured(base, other):
    nothing = score.compare(base, other, lower_is_better=True)
    assert (nothing.speedup, nothing.verdict) == (None, "not measured")


@pytest.mark.parametrize(
    ("value", "limits", "outcome"),
    [
        (1.2, {"at_least": 1.2}, "pass"),
        (1.19, {"at_least": 1.2}, "fail"),
        (0.05, {"at_most": 0.05}, "pass"),
        (0.06, {"at_most": 0.05}, "fail"),
        (1.0, {"at_least": 0.5, "at_most": 2.0}, "pass"),
        (3.0, {"at_least": 0.5, "at_most": 2.0}, "fail"),
        (1.0, {}, "pass"),
        (None, {"at_least": 0.0}, "not measured"),
        (math.nan, {"at_least": 0.0}, "not measured"),
    ],
)
def test_limits_pass_fail_or_are_not_measured(value, limits, outcome):
    assert score.judge(value, **limits) == outcome


def test_the_95_percent_interval_holds_the_truth_about_95_times_in_a_hundred():
    """Forty draws with fixed seeds, to be quick; scripts/interval_coverage.py makes thousands."""
    every = [score.interval(loads(6, requests=1, seed=seed)) for seed in range(40)]
    assert sum(bounds.low <= 100 <= bounds.high for bounds in every) >= 36
    assert sum(bounds.low <= 115 <= bounds.high for bounds in every) <= 10  # nor is it too wide


def test_an_interval_reaches_past_the_lowest_and_the_highest_of_few_loads():
    bounds = score.interval([[90.0], [95.0], [100.0], [105.0], [110.0]])
    assert bounds.low < 90
    assert bounds.high > 110


def test_values_around_zero_have_an_interval_too():
    bounds = score.interval([[-1.0], [0.0], [1.0], [0.5], [-0.5]])
    assert bounds.low < 0 < bounds.high
    assert score.ratio_interval([[0.0]] * 5, [[1.0]] * 5) is None


def test_equal_values_have_an_interval_without_width():
    assert score.interval([[7.0]] * 5) == score.Interval(pytest.approx(7), pytest.approx(7), 5)
