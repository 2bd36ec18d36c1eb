from __future__ import annotations

import json
import os

import pytest

from onebit_serve.live.log import Log, Repeats
from onebit_serve.live.logfile import LogFile


@pytest.fixture
def pipe():
    out, into = os.pipe()
    yield out, into
    os.close(out)
    os.close(into)


def written(log, out):
    log.close()
    return os.read(out, 1 << 16).decode()


def test_the_same_line_over_and_over_is_counted_and_the_count_is_said(pipe):
    log = Log(fd=pipe[1], repeats=Repeats(limit=2))
    for _ in range(500):
        log.warning("slow reader")
    log.say("something else")
    lines = written(log, pipe[0]).splitlines()
    assert lines[:3] == ["1bit serve: slow reader"] * 2 + ["1bit serve: something else"]
    assert lines[3:] == ["1bit serve: slow reader (repeated 498 times)"]


def test_the_count_is_said_when_the_window_is_over_though_nothing_else_is(pipe):
    log = Log(fd=pipe[1], repeats=Repeats(window_s=0.01, limit=1))
    for _ in range(3):
        log.warning("slow reader")
    text = ""
    while "repeated" not in text:
        text += os.read(pipe[0], 1 << 16).decode()
    log.close()
    assert text.startswith("1bit serve: slow reader\n")


def test_a_json_line_carries_the_count(pipe):
    log = Log("json", fd=pipe[1], repeats=Repeats(limit=1))
    log.error("gone", port=1)
    log.error("gone", port=2)
    log.error("gone", port=3)
    first, last = map(json.loads, written(log, pipe[0]).splitlines())
    assert "repeated" not in first
    assert (last["port"], last["repeated"], last["message"]) == (3, 2, "gone")


def test_a_few_of_the_same_lines_are_all_written(pipe):
    log = Log(fd=pipe[1])
    for _ in range(5):
        log.say("m on cpu (llama-server)")
    assert written(log, pipe[0]) == "1bit serve: m on cpu (llama-server)\n" * 5


def test_a_line_passes_again_in_the_next_window():
    repeats = Repeats(window_s=10, limit=1)
    assert repeats.passes("a", b"a\n", 0.0)
    assert not repeats.passes("a", b"a\n", 9.0)
    assert repeats.next_s() == 10.0
    assert repeats.over(9.9) == []
    assert repeats.over(10.0) == [(b"a\n", 1)]
    assert repeats.next_s() is None
    assert repeats.passes("a", b"a\n", 10.0)


def test_two_lines_that_take_turns_are_repeats_too():
    repeats = Repeats(limit=1)
    passed = [repeats.passes(text, b"", 0.0) for text in "ababab"]
    assert passed == [True, True, False, False, False, False]


def test_many_different_lines_are_no_repeats_and_cost_no_memory():
    repeats = Repeats(limit=1)
    assert all(repeats.passes(str(n), b"", 0.0) for n in range(10_000))
    assert len(repeats._windows) <= 256


def test_a_file_gets_the_same_lines(pipe, tmp_path):
    log = Log(fd=pipe[1])
    log.file = LogFile(tmp_path / "our.log", limit_bytes=0, keep=0, on_trouble=log.warning)
    log.say("ready on http://x")
    text = written(log, pipe[0])
    assert text == (tmp_path / "our.log").read_text() == "1bit serve: ready on http://x\n"


def test_a_file_that_cannot_be_written_is_said_on_stderr_once(pipe, tmp_path):
    (tmp_path / "our.log").symlink_to("/dev/full")
    log = Log(fd=pipe[1])
    log.file = LogFile(tmp_path / "our.log", limit_bytes=0, keep=0, on_trouble=log.warning)
    text = ""
    while "No space left on device" not in text:
        log.say(f"line {len(text)}")
        text += os.read(pipe[0], 1 << 16).decode()
    log.say("the end")
    assert (text + written(log, pipe[0])).count("No space left") == 1
