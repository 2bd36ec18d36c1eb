from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import threading
from collections.abc import Iterator

import pytest

from onebit_serve.live.log import Log

BOUND_S = 30.0


class Pipe:
    """A pipe, and what was written into it."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()

    def read_all(self) -> str:
        os.close(self.into)
        return self.read_to_the_end()

    def read_to_the_end(self) -> str:
        with open(self.out, "rb", closefd=False) as file:
            return file.read().decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    for fd in (made.out, made.into):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_a_line_is_plain_and_whole(pipe):
    log = Log(fd=pipe.into)
    log.say("ready on http://x", url="http://x")
    log.warning("two\nlines\r\nhere")
    log.debug("nobody asked")
    log.close()
    assert pipe.read_all() == "1bit serve: ready on http://x\n1bit serve: two lines here\n"


def test_a_json_line_carries_the_fields(pipe):
    log = Log("json", fd=pipe.into)
    log.error("it broke", port=7)
    log.close()
    record = json.loads(pipe.read_all())
    assert record.pop("time") > 1e9
    assert record == {"level": "error", "message": "it broke", "port": 7}


@pytest.mark.parametrize(
    ("level", "said"),
    [("debug", "diwe"), ("info", "iwe"), ("warning", "we"), ("error", "e")],
)
def test_only_what_matters_enough_is_written(pipe, level, said):
    log = Log(level=level, fd=pipe.into)
    log.debug("d")
    log.say("i")
    log.warning("w")
    log.error("e")
    log.close()
    assert pipe.read_all() == "".join(f"1bit serve: {letter}\n" for letter in said)


def test_text_that_is_no_unicode_is_written_all_the_same(pipe):
    log = Log(fd=pipe.into)
    log.say("path \udcff")
    log.close()
    assert pipe.read_all() == "1bit serve: path \\udcff\n"


def test_a_reader_that_does_not_read_stops_nobody_and_is_told_what_was_lost(pipe):
    log = Log(fd=pipe.into)
    for number in range(10_000):  # far more than a pipe and the queue hold
        log.say(f"{number} " + "x" * 200)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_to_the_end()))
    reader.start()
    log.say("again")
    log.close(wait_s=BOUND_S)  # its thread must have ended before the pipe's number goes elsewhere
    os.close(pipe.into)
    reader.join(BOUND_S)
    (text,) = read
    dropped = sum(map(int, re.findall(r"(\d+) lines were dropped", text)))
    numbers = [int(n) for n in re.findall(r"serve: (\d+) x", text)]
    assert dropped
    assert numbers == sorted(numbers)
    assert len(numbers) < 10_000


def test_a_closed_reader_stops_nobody(pipe):
    log = Log(fd=pipe.into)
    os.close(pipe.out)
    log.say("to nobody")
    log.say("to nobody")
    log.close()


def test_a_terminal_shows_below_the_log_how_far_something_is():
    ours, theirs = pty.openpty()
    log = Log(fd=theirs)
    log.progress("m", "reading m.gguf", 0.5)
    log.say("a line")
    log.progress("m")
    log.close(BOUND_S)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # a terminal's end is an error on Linux
        while data := os.read(ours, 4096):
            seen += data
    os.close(ours)
    bar = "reading m.gguf [##########..........] 50%"
    said = seen.decode().replace("\r\n", "\n")
    assert said == f"\r\033[K{bar}\r\033[K1bit serve: a line\n{bar}\r\033[K"


@pytest.mark.parametrize("form", ["plain", "json"])
def test_nothing_is_drawn_where_nobody_looks(pipe, form):
    log = Log(form, fd=pipe.into)
    log.progress("m", "reading m.gguf", 0.5)
    log.close(BOUND_S)
    assert pipe.read_all() == ""
