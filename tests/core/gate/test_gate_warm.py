from __future__ import annotations

from onebit_serve.core.gate.warm import Limits, Load, Timing, judge, suspicious


def load(first, *others):
    return Load(tuple(Timing(*pair) for pair in (first, *others)))


LEVEL = load((1000, 20), (1001, 20), (999, 20))
# As on HRX without a warm-up: prefill 24 %, decode 6 % slower.
COLD = load((760, 18.8), (1000, 20), (990, 19.9))
DISTURBED = load((500, 10), (1000, 20), (1000, 20))


def test_level_requests_pass():
    assert judge([LEVEL] * 3, Limits()).status == "PASS"


def test_a_first_request_that_is_slow_in_every_load_fails_for_both():
    found = judge([COLD] * 3, Limits())
    assert found.status == "FAIL"
    assert "prefill of request 1 is 24.0% slower" in found.reason
    assert "decode of request 1 is 6.0% slower" in found.reason
    assert found.figure == "request 1 prefill -24.0% decode -6.0% over 3 loads"


def test_one_disturbed_load_of_three_is_no_failure():
    assert judge([LEVEL, DISTURBED, LEVEL], Limits()).status == "PASS"


def test_a_disturbance_of_most_loads_is_measured_again_before_it_counts():
    first = [DISTURBED, DISTURBED, LEVEL]
    assert suspicious(first, Limits())
    assert judge([*first, LEVEL, LEVEL, LEVEL], Limits()).status == "PASS"
    assert judge([*first, DISTURBED, COLD, COLD], Limits()).status == "FAIL"


def test_a_first_request_that_is_faster_is_no_failure():
    assert judge([load((1200, 25), (1000, 20))] * 3, Limits()).status == "PASS"


def test_no_figures_are_not_run():
    assert judge([], Limits()).status == "NOT RUN"
    assert judge([load((1000, 20))], Limits()).status == "NOT RUN"


def test_a_server_without_timings_is_not_run():
    assert judge([load((0, 0), (0, 0))] * 3, Limits()).status == "NOT RUN"
