from __future__ import annotations

import pytest

from onebit_serve.core.gate.verdict import (
    Result,
    exit_code,
    failed,
    first_look,
    not_run,
    passed,
    result_line,
)

PASS = Result("a", "kat", passed("9/9 tokens", "every token"))
FAIL = Result("a", "kld", failed("mean 0.5 over 0.01", "mean 0.5", "mean 0.01"))
NOT_RUN = Result("a", "ops", not_run("there is no test-backend-ops"))


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([PASS], 0),
        ([PASS, FAIL], 1),
        ([PASS, NOT_RUN], 4),
        ([FAIL, NOT_RUN], 1),
        ([], 4),
    ],
)
def test_the_exit_code_says_the_worst(results, code):
    assert exit_code(results) == code


def test_a_line_has_verdict_model_check_figure_and_limit():
    assert result_line(PASS) == "PASS    a kat 9/9 tokens (limit every token)"
    assert result_line(FAIL) == "FAIL    a kld mean 0.5 (limit mean 0.01) - mean 0.5 over 0.01"
    assert result_line(NOT_RUN) == "NOT RUN a ops - there is no test-backend-ops"


def test_the_likely_cause_is_named_before_its_consequences():
    placement = Result("a", "placement", failed("norm-0 is on the CPU"))
    said = first_look([FAIL, placement])
    assert said.startswith("look first at placement of a: norm-0 is on the CPU")
    assert "1 more" in said


def test_a_failure_that_models_share_is_told_as_shared():
    other = Result("b", "kld", FAIL.finding)
    assert "failed for 2 models" in first_look([FAIL, other])


def test_what_did_not_run_is_said_where_nothing_failed():
    assert "1 of 2 checks did not run" in first_look([PASS, NOT_RUN])
    assert first_look([]) == "nothing was asked for, so nothing was shown"
