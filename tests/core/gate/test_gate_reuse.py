from __future__ import annotations

import math

import pytest

from onebit_serve.core.gate.kld import Distribution
from onebit_serve.core.gate.reuse import Limits, Said, judge
from onebit_serve.core.gate.tokens import Step, Token


def said(*ids, cached=0, masses=(0.9, 0.05)):
    found = Distribution((1, 2), tuple(math.log(mass) for mass in masses))
    lead = found.lead()
    steps = tuple(Step(Token(each, "x"), lead) for each in ids)
    return Said("x" * len(ids), steps, tuple(found for _ in ids), cached)


def verdict(reused, anew, shared=400):
    return judge(reused, anew, shared=shared, slack=16, limits=Limits(), min_lead=0.5)


def test_a_reused_prefix_that_changes_nothing_passes():
    found = verdict(said(1, 2, 3, cached=400), said(1, 2, 3))
    assert found.status == "PASS"
    assert found.figure.startswith("400 of 400 tokens reused")


@pytest.mark.parametrize(("cached", "status"), [(384, "PASS"), (383, "FAIL"), (0, "FAIL")])
def test_only_the_slack_may_be_evaluated_again(cached, status):
    assert verdict(said(1, cached=cached), said(1)).status == status


def test_another_distribution_fails_and_shows_both_answers():
    found = verdict(said(1, cached=400, masses=(0.1, 0.85)), said(1))
    assert found.status == "FAIL"
    assert "'x' with the warmed prefix" in found.detail


def test_another_token_at_a_decided_place_fails_although_the_distributions_agree():
    assert verdict(said(1, 9, cached=400), said(1, 2)).status == "FAIL"


def test_another_token_at_an_undecided_place_is_rounding_and_ends_the_comparison():
    level = (0.451, 0.449)
    assert verdict(said(1, 9, cached=400, masses=level), said(1, 2, masses=level)).status == "PASS"


def test_an_answer_that_ends_early_fails():
    assert verdict(said(1, cached=400), said(1, 2)).status == "FAIL"


def test_a_server_without_probabilities_is_not_run():
    bare = Said("x", (), (), 400)
    assert verdict(bare, bare).status == "NOT RUN"
