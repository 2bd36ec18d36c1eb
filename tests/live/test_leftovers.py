from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from llama_process import until

from onebit_serve.live.leftovers import VARIABLE, Leftover, find, marker

SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()"
PARENT = (
    "import subprocess, sys; print('up', flush=True); "
    "subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
)


@contextmanager
def running(mark, code=SLEEPER, *arguments):
    environment = {**os.environ, VARIABLE: mark}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture
def gone():
    """Return the mark of a supervisor that is no more."""
    with running("") as process:
        mark = marker(process.pid)
    assert mark.startswith(f"{process.pid}:")
    return mark


def pids():
    return [one.pid for one in find()]


def test_a_child_whose_supervisor_is_gone_is_a_leftover(gone):
    with running(gone, SLEEPER, "-m", "m.gguf", "--port", "12345") as process:
        (one,) = [one for one in find() if one.pid == process.pid]
        assert one.port == 12345
        assert one.memory_bytes
        assert f"pid {process.pid} on port 12345" in str(one)
        assert str(one).endswith(f"to end it: kill {process.pid}")
        assert process.poll() is None
    assert process.pid not in pids()


def test_a_child_of_a_supervisor_that_runs_is_none():
    with running("") as other, running(marker(other.pid)) as process:
        assert process.pid not in pids()


def test_our_own_child_is_none():
    with running(marker()) as process:
        assert process.pid not in pids()


def test_a_supervisor_whose_pid_has_gone_to_somebody_else_is_gone():
    with running("") as other, running(f"{other.pid}:1") as process:
        assert process.pid in pids()


@pytest.mark.parametrize("mark", ["", "nonsense", ":1", "-1:5"])
def test_what_has_no_mark_of_ours_is_none(mark):
    with running(mark) as process:
        assert process.pid not in pids()


def test_of_a_tree_only_the_top_is_named(gone):
    with running(gone, PARENT) as process:
        children = Path("/proc", str(process.pid), "task", str(process.pid), "children")
        until(children.read_text, "the child")
        assert [one.pid for one in find()] == [process.pid]


def test_the_mark_stays_the_same_and_tells_processes_apart():
    assert marker() == marker() == marker(os.getpid())
    assert marker().startswith(f"{os.getpid()}:")
    with running("") as other:
        assert marker(other.pid).partition(":")[2] != ""


def test_a_leftover_without_a_port_is_said_without_one():
    assert str(Leftover(7, "llama-server")) == (
        "llama-server of an earlier 1bit serve still runs (pid 7); to end it: kill 7"
    )
