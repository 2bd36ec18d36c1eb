from __future__ import annotations

from pathlib import Path

import pytest

from onebit_serve.core.gate.ring import KernelLog, judge, parse

PUBLISHED = (Path(__file__).parent / "transcripts" / "amdgpu-published.log").read_text()


def log(*lines, first=1, source="/dev/kmsg"):
    return KernelLog(source, tuple((float(first + n), line) for n, line in enumerate(lines)))


def test_published_lines_are_told_from_ordinary_ones():
    events = parse(PUBLISHED.splitlines())
    assert [(event.kind, event.ring) for event in events] == [
        ("timeout", "gfx_0.0.0"),
        ("ring reset", "gfx_0.0.0"),
        ("ring reset", "gfx_0.0.0"),
        ("gpu reset", ""),
        ("mes hang", ""),
        ("gpu reset", ""),
        ("wedged", ""),
        ("timeout", "comp_1.0.0"),
    ]


@pytest.mark.parametrize("line", [event.line for event in parse(PUBLISHED.splitlines())])
def test_any_new_line_of_a_hang_or_reset_fails(line):
    assert judge(log("a"), log("a", line)).status == "FAIL"


def test_lines_from_before_the_start_do_not_count():
    old = PUBLISHED.splitlines()
    found = judge(log(*old), log(*old, "eth0: link up"))
    assert found.status == "PASS"
    assert found.figure == "0 timeouts, 0 resets in 1 new lines"


def test_no_new_line_at_all_passes():
    assert judge(log("a"), log("a")).status == "PASS"


def test_a_log_that_cannot_be_read_is_not_run():
    lost = KernelLog(problem="no permission")
    assert judge(lost, lost).status == "NOT RUN"
    assert judge(log("a"), lost).status == "NOT RUN"


def test_a_log_that_has_wrapped_is_not_run():
    assert judge(log("a"), log("z", first=500)).status == "NOT RUN"


def test_a_log_that_was_emptied_is_not_run():
    assert judge(log("a"), log()).status == "NOT RUN"


def test_two_different_sources_are_not_run():
    assert judge(log("a"), log("a", source="journalctl")).status == "NOT RUN"
