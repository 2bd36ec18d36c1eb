from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
import trio
from llama_process import until

from onebit_serve.live.child import Child, Exit, Tail

BOUND_S = 30.0


@asynccontextmanager
async def running(script: str, **environment: str) -> AsyncIterator[Child]:
    """Run a shell script as a child, drained; it is dead at the end."""
    child = Child.spawn(["sh", "-c", script], {"PATH": os.environ["PATH"], **environment})
    try:
        with trio.fail_after(BOUND_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child.run)
                yield child
                child.kill()
    finally:
        child.kill()


async def ended(script: str) -> tuple[Exit, Child]:
    child = Child.spawn(["sh", "-c", script], {"PATH": os.environ["PATH"]})
    with trio.fail_after(BOUND_S):
        return await child.run(), child


async def eventually(condition: Callable[[], object]) -> None:
    with trio.fail_after(BOUND_S):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await trio.sleep(0.005)


def told(child: Child) -> list[str]:
    """Return what the child's trap said; a shell may say more of its own."""
    return [line for line in child.tail.last(9) if line.startswith("told")]


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("script", "exit_", "words"),
    [
        ("exit 0", Exit(code=0), "code 0"),
        ("exit 7", Exit(code=7), "code 7"),
        ("kill -SEGV $$", Exit(signal=signal.SIGSEGV), "signal SIGSEGV"),
        ("kill -KILL $$", Exit(signal=signal.SIGKILL), "signal SIGKILL"),
    ],
)
async def test_an_exit_is_told_by_code_or_name_of_its_signal(script, exit_, words):
    found, _ = await ended(script)
    assert found == exit_
    assert str(found) == words


def test_a_signal_without_a_name_is_told_by_its_number():
    assert str(Exit(signal=40)) == "signal 40"


async def test_the_last_lines_of_both_outputs_are_kept():
    _, child = await ended("echo one; echo two >&2; printf three; exit 3")
    assert child.tail.last(3) == ["one", "two", "three"]
    assert child.tail.last(1) == ["three"]
    assert "code 3" in repr(child)


async def test_output_is_told_of_as_it_comes():
    heard: list[bytes] = []
    child = Child.spawn(["sh", "-c", "echo hello; read -r line"], dict(os.environ))
    # stdin is /dev/null, so `read` ends at once and so does the child
    with trio.fail_after(BOUND_S):
        await child.run(heard.append)
    assert b"".join(heard) == b"hello\n"


def test_a_tail_is_bounded_in_lines_and_in_their_length():
    tail = Tail(lines=3)
    for number in range(1000):
        tail.feed(b"line %d\n" % number)
    tail.feed(b"x" * 100_000)
    tail.feed(b"x" * 100_000)
    *lines, rest = tail.last(10)
    assert lines == ["line 997", "line 998", "line 999"]
    assert len(rest) <= 2000
    assert tail.total_bytes > 200_000


def test_lines_cut_anywhere_are_whole_and_empty_ones_say_nothing():
    tail = Tail()
    for piece in (b"on", b"e\ntw", b"o\n\n   \nth\xff", b"ree"):
        tail.feed(piece)
    assert tail.last(9) == ["one", "two", "th\N{REPLACEMENT CHARACTER}ree"]


async def test_a_flood_of_output_is_drained_and_not_kept():
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, child = await ended("head -c 60000000 /dev/zero; echo; echo the end")
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert child.tail.total_bytes > 60_000_000
    assert child.tail.last(1) == ["the end"]
    assert grown_kb < 20_000


async def test_a_grandchild_that_holds_the_pipe_does_not_keep_the_reader():
    exit_, child = await ended("setsid sleep 300 & echo $!; exit 5")
    assert exit_ == Exit(code=5)
    os.kill(int(child.tail.last(1)[0]), signal.SIGKILL)


async def test_the_rest_of_the_group_ends_with_the_child():
    _, child = await ended("sleep 300 & echo $!; exit 0")
    grandchild = int(child.tail.last(1)[0])
    await eventually(lambda: not alive(grandchild))


async def test_a_child_has_a_session_of_its_own_and_nothing_of_ours():
    fd = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(fd, True)  # noqa: FBT003
    try:
        _, child = await ended("ls /proc/$$/fd; ps -o sid= -p $$; echo $$; readlink /proc/$$/fd/0")
    finally:
        os.close(fd)
    *descriptors, session, pid, stdin = child.tail.last(10)
    assert descriptors == ["0", "1", "2"]
    assert session == pid == str(child.pid)
    assert stdin == "/dev/null"


async def test_the_environment_is_the_one_given():
    _, child = await ended('echo "[$HOME]"')
    assert child.tail.last(1) == ["[]"]


async def test_a_child_that_obeys_is_told_once():
    script = "trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.01; done"
    async with running(script) as child:
        await eventually(lambda: child.tail.last(1))
        await child.stop(BOUND_S)
        assert told(child) == ["told"]


async def test_a_child_that_ignores_the_first_term_is_told_again():
    script = (
        "n=0; trap 'n=$((n+1)); echo told $n; [ $n = 2 ] && exit 0' TERM; "
        "echo up; while :; do sleep 0.01; done"
    )
    async with running(script) as child:
        await eventually(lambda: child.tail.last(1))
        await child.stop(1.0)
        assert told(child) == ["told 1", "told 2"]


async def test_a_child_that_ignores_all_is_killed_with_its_group():
    script = "trap '' TERM; sh -c 'trap \"\" TERM; sleep 300' & echo $!; while :; do sleep 1; done"
    async with running(script) as child:
        await eventually(lambda: child.tail.last(1))
        grandchild = int(child.tail.last(1)[0])
        await child.stop(0.1)
        assert "SIGKILL" in repr(child)
        await eventually(lambda: not alive(grandchild))


async def test_a_stopped_child_is_woken_to_obey():
    async with running("trap 'exit 0' TERM; echo up; while :; do sleep 0.01; done") as child:
        await eventually(lambda: child.tail.last(1))
        os.kill(child.pid, signal.SIGSTOP)
        await eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
        await child.stop(BOUND_S)
        assert "code 0" in repr(child)


async def test_a_program_that_is_not_there_is_said():
    with pytest.raises(FileNotFoundError):
        Child.spawn(["/nonexistent/llama-server"], {})


async def test_a_file_that_may_not_be_executed_is_said(tmp_path):
    (tmp_path / "llama-server").write_text("#!/bin/sh\n")
    with pytest.raises(OSError, match="executed"):
        Child.spawn([str(tmp_path / "llama-server")], {})


async def test_neither_zombies_nor_descriptors_are_left_after_many_children():
    await ended("exit 0")
    before, others = psutil.Process().num_fds(), psutil.Process().children()
    for number in range(20):
        async with running("echo up; exec sleep 300") as child:
            if number % 2:
                await child.stop(BOUND_S)
            else:
                child.kill()
    assert psutil.Process().children() == others
    assert psutil.Process().num_fds() == before


async def test_a_child_lives_on_while_nothing_happens():
    # A death signal is bound to the thread that forked; trio's worker threads end after 10 s.
    script = "exec sleep 300"
    child = Child.spawn(["sh", "-c", script], dict(os.environ))
    with trio.move_on_after(15):
        exit_ = await child.run()
        pytest.fail(f"it ended: {exit_}")
    child.kill()
    with trio.fail_after(BOUND_S):
        assert (await child.run()).signal == signal.SIGKILL


PARENT = """
import os, sys, trio
from onebit_serve.live.child import Child

async def main():
    child = Child.spawn(sys.argv[1:], dict(os.environ))
    print(child.pid, flush=True)
    await child.run(lambda _: print(*child.tail.last(1), flush=True))

trio.run(main)
"""


@pytest.mark.parametrize("mode", ["sleep 300", "trap '' TERM HUP; sleep 300; sleep 300"])
def test_no_process_of_the_group_outlives_a_parent_that_was_killed(mode):
    script = f"(trap '' TERM HUP; sleep 300) & echo $!; {mode}"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, "sh", "-c", script], stdout=subprocess.PIPE, text=True
    )
    try:
        child = psutil.Process(int(parent.stdout.readline()))
        grandchild = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        until(lambda: not alive(child.pid) and not alive(grandchild.pid), "their end", 2.0)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
