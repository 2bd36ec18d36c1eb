from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from onebit_serve.core.gate.report import Run, as_json, as_junit, as_markdown, clock, time_left_s
from onebit_serve.core.gate.verdict import Result, failed, not_run, passed

RUN = Run(
    "full",
    "2026-01-02T03:04:05+00:00",
    [
        Result("a", "kat", passed("9/9 tokens", "every token"), 1.5),
        Result(
            "a", "kld", failed("mean | over", "mean 0.5", "mean 0.01", detail="x\x00\x1b<y>"), 2
        ),
        Result("b", "ops", not_run("no program"), 0),
    ],
    seconds=3723.4,
)


def test_json_holds_every_result_the_counts_and_the_exit():
    told = json.loads(as_json(RUN))
    assert told["exit"] == 1
    assert told["counts"] == {"PASS": 1, "FAIL": 1, "NOT RUN": 1}
    assert [each["check"] for each in told["results"]] == ["kat", "kld", "ops"]
    assert told["first_look"].startswith("look first at kld of a")


def test_markdown_is_a_table_whose_cells_cannot_break_it():
    text = as_markdown(RUN)
    assert "| FAIL | a | kld | mean 0.5 | mean 0.01 | mean \\| over | 2.0 |" in text
    assert "1 passed, 1 failed, 1 not run, in 1:02:03." in text


def test_junit_is_xml_and_counts_not_run_as_an_error_never_as_a_skip():
    root = ET.fromstring(as_junit(RUN))
    assert root.attrib["failures"] == "1"
    assert root.attrib["errors"] == "1"
    assert root.find(".//skipped") is None
    case = root.find(".//testcase[@name='kld']")
    assert case.find("failure").text == "x<y>"
    assert root.find(".//testcase[@name='ops']/error").attrib["message"] == "no program"


def test_an_interrupted_run_says_so():
    import msgspec

    run = msgspec.structs.replace(RUN, interrupted=True)
    assert "Interrupted before its end" in as_markdown(run)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61, "1:01"), (3723.4, "1:02:03")])
def test_durations_read_like_a_clock(seconds, text):
    assert clock(seconds) == text


def test_time_left_scales_what_is_known_by_the_pace_so_far():
    known = {"a kat": 10.0, "a kld": 20.0, "b kat": 10.0}
    todo = [("a", "kld"), ("b", "kat")]
    assert time_left_s(todo, known, {}) == 30
    assert time_left_s(todo, known, {"a kat": 20.0}) == 60


def test_time_left_of_an_unknown_check_is_that_of_its_like():
    assert time_left_s([("b", "kat")], {}, {"a kat": 7.0, "a kld": 100.0}) == 7
    assert time_left_s([("b", "warm")], {}, {"a kat": 10.0, "a kld": 20.0}) == 15
    assert time_left_s([("b", "warm")], {}, {}) is None
