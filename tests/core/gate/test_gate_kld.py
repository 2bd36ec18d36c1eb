from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebit_serve.core.gate.kld import Distribution, Limits, Position, divergence, judge, statistics


def distribution(*masses, ids=None):
    return Distribution(tuple(ids or range(len(masses))), tuple(math.log(mass) for mass in masses))


def positions(found, count=100):
    return tuple(Position("prose", n, "decode", found) for n in range(count))


SHARP = distribution(0.9, 0.05, 0.03)
LEVEL = distribution(0.4, 0.39, 0.1)


def test_the_same_distribution_diverges_by_nothing():
    assert divergence(SHARP, SHARP) == 0.0


def test_the_figure_is_that_of_the_definition_with_the_rest_as_one_bucket():
    p, q = distribution(0.5, 0.3), distribution(0.4, 0.3)
    expected = 0.5 * math.log(0.5 / 0.4) + 0.2 * math.log(0.2 / 0.3)
    assert divergence(p, q) == pytest.approx(expected)


def test_a_token_that_the_new_reply_does_not_name_counts_as_its_least_likely_one():
    p = distribution(0.5, 0.3, 0.1)
    q = Distribution((0, 1), (math.log(0.5), math.log(0.3)))
    # 0.1 against at most 0.3, and the rest of 0.1 against at most 0.2: a bound below 0 is none.
    assert divergence(p, q) == 0.0
    q = Distribution((0, 1), (math.log(0.8), math.log(0.01)))
    expected = (
        0.5 * math.log(0.5 / 0.8)
        + 0.3 * math.log(0.3 / 0.01)
        + 0.1 * math.log(0.1 / 0.01)
        + 0.1 * math.log(0.1 / 0.19)
    )
    assert divergence(p, q) == pytest.approx(expected)


def test_a_reply_that_names_none_of_the_stored_tokens_diverges_widely():
    other = distribution(0.9, 0.01, ids=[50, 51])
    assert divergence(SHARP, other) > 3


@given(
    st.lists(st.floats(0.001, 1.0), min_size=3, max_size=30),
    st.lists(st.floats(0.001, 1.0), min_size=30, max_size=30),
)
def test_merging_tokens_never_raises_the_divergence(first, second):
    second = second[: len(first)]
    p = [value / sum(first) for value in first]
    q = [value / sum(second) for value in second]
    whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    for kept in range(1, len(p)):
        if 1 - sum(p[:kept]) < 1e-3 or 1 - sum(q[:kept]) < 1e-3:
            continue
        assert divergence(distribution(*p[:kept]), distribution(*q[:kept])) <= whole + 1e-9


def test_percentile_and_largest_are_of_the_worst_positions():
    values = [0.0] * 98 + [1.0, 2.0]
    assert statistics(values) == (pytest.approx(0.03), 1.0, 2.0)
    assert statistics([0.5]) == (0.5, 0.5, 0.5)


def test_one_wild_position_fails_although_the_mean_is_low():
    new = (*positions(SHARP, 99), Position("prose", 99, "decode", distribution(0.05, 0.9, 0.03)))
    found = judge(positions(SHARP), new, Limits(), min_lead=0.5)
    assert found.status == "FAIL"
    assert "max" in found.reason
    assert "prose after 99 tokens" in found.reason


def test_a_flip_between_level_tokens_is_not_a_disagreement():
    flipped = Distribution((1, 0, 2), tuple(math.log(m) for m in (0.395, 0.394, 0.1)))
    found = judge(positions(LEVEL), positions(flipped), Limits(), min_lead=0.5)
    assert found.status == "PASS", found.reason
    assert found.data["decided"] == 0


def test_a_missing_position_fails_and_nan_fails():
    assert judge(positions(SHARP), positions(SHARP, 99), Limits(), min_lead=0.5).status == "FAIL"
    broken = Distribution((0, 1, 2), (math.nan, -1.0, -2.0))
    assert judge(positions(SHARP), positions(broken), Limits(), min_lead=0.5).status == "FAIL"


def test_an_empty_reference_is_not_run():
    assert judge((), positions(SHARP), Limits(), min_lead=0.5).status == "NOT RUN"


def noisy(sigma, seed):
    dice = random.Random(seed)
    moved = [logprob + dice.gauss(0, sigma) for logprob in SHARP.logprobs]
    rest = 1 - sum(math.exp(value) for value in SHARP.logprobs)
    whole = math.log(sum(math.exp(value) for value in moved) + rest)
    return Distribution(SHARP.ids, tuple(value - whole for value in moved))


@pytest.mark.parametrize(("sigma", "status"), [(0.02, "PASS"), (0.05, "PASS"), (0.5, "FAIL")])
def test_noise_on_the_logits_is_caught_from_a_size_on(sigma, status):
    new = tuple(Position("prose", n, "decode", noisy(sigma, n)) for n in range(100))
    assert judge(positions(SHARP), new, Limits(), min_lead=0.5).status == status
