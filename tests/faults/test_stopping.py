"""The program is told to stop, twice, or killed, in each state of its backend."""

from __future__ import annotations

import os
import signal
import time

import pytest
from served import Served, backend, is_alive, wait_for

STATES = {
    "loading, first start": "load=60",
    "warming, first start": "tps=1",
    "loading, restart": "load=0|60",
    "ready, idle": "",
    "ready, streaming": "tps=30",
}


def reach(serve, state: str, knobs: str = "", stop_s: float = 1) -> tuple[Served, int]:
    """Bring a server into a state; return it and its child's pid."""
    server = {"stop_s": stop_s, "drain_s": 1}
    served = serve(backend("a", f"{STATES[state]} {knobs}"), server=server)
    if state.endswith("first start"):
        served.wait_health(state.split(",", maxsplit=1)[0])
    else:
        served.ready()
    if state == "loading, restart":
        served.kill("a")
        pid = int(served.wait_state("a", "loading", restarts=1)["pid"])
        # it answers, so it has its signal handlers
        wait_for(lambda: any(e["pid"] == pid for e in served.events("a", "request")), "the start")
        return served, pid
    return served, int(served.view("a")["pid"])


def gone(*pids: int) -> None:
    wait_for(lambda: not any(map(is_alive, pids)), "every process to be gone", 5)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_the_program_with_0_in_every_state(serve, row, state, number) -> None:
    served, pid = reach(serve, state)
    stream = served.stream("a", max_tokens=20).begun() if state == "ready, streaming" else None
    served.signal(number)
    client = "connections are refused"
    if stream:
        assert stream.end() == "answered"
        client = "its stream to the end"
    assert served.wait() == 0, served.log
    gone(pid)
    assert "Traceback" not in served.log
    row(f"{number.name} to the supervisor", state, client, "exit 0, nothing left")


@pytest.mark.parametrize("state", STATES)
def test_a_second_interrupt_ends_everything_at_once(serve, row, state) -> None:
    served, pid = reach(serve, state, "term=ignore", stop_s=20)
    stream = served.stream("a", max_tokens=60) if state == "ready, streaming" else None
    served.signal(signal.SIGINT)
    served.wait_said("stopping")
    served.signal(signal.SIGINT)
    assert served.wait() == 130, served.log
    gone(pid)
    if stream:
        assert stream.end() == "cut"
    row("double SIGINT", state, "a cut connection", "exit 130, nothing left")


@pytest.mark.parametrize("state", STATES)
def test_a_killed_program_leaves_nothing_behind(serve, row, state) -> None:
    served, pid = reach(serve, state)
    stream = served.stream("a", max_tokens=60) if state == "ready, streaming" else None
    served.process.kill()
    gone(pid)
    if stream:
        assert stream.end() == "cut"
    row("kill -9 of the supervisor", state, "a cut connection", "nothing left")


def test_a_stop_lets_running_replies_end_and_takes_no_new_ones(serve, row) -> None:
    served = serve(backend("a", "tps=20"), server={"drain_s": 20}).ready()
    streams = [served.stream("a", f"number {n}", max_tokens=30).begun() for n in range(3)]
    served.signal(signal.SIGTERM)
    served.wait_said("stopping")
    wait_for(lambda: served.health() is None, "the door to be closed")
    assert [stream.end() for stream in streams] == ["answered"] * 3
    assert served.wait() == 0
    row("stop", "draining", "streams to their end, new ones refused", "exit 0")


def test_a_drain_that_takes_too_long_is_cut_with_an_error_event(serve, row) -> None:
    served = serve(backend("a", "tps=10"), server={"drain_s": 0.5, "stop_s": 5}).ready()
    stream = served.stream("a", max_tokens=200).begun()
    served.signal(signal.SIGTERM)
    assert stream.end() == "error event"
    assert served.wait() == 0
    assert served.said("are cut after 0.5 s")
    row("reply longer than drain_s", "draining", "an error event", "exit 0")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_backend_that_dies_while_draining_holds_nothing_up(serve, row, number) -> None:
    served = serve(backend("a", "tps=10"), server={"drain_s": 3, "stop_s": 1}).ready()
    stream = served.stream("a", max_tokens=200).begun()
    pid = served.view("a")["pid"]
    served.signal(signal.SIGTERM)
    served.wait_said("stopping")
    os.kill(pid, number)
    assert stream.end() in ("error event", "cut")
    assert served.wait() == 0
    gone(pid)
    row(f"{number.name} to the backend", "draining", "an error event, a cut", "exit 0")


def test_a_client_that_leaves_while_draining_ends_the_wait(serve, row) -> None:
    served = serve(backend("a", "tps=5"), server={"drain_s": 60}).ready()
    stream = served.stream("a", max_tokens=200).begun()
    served.signal(signal.SIGTERM)
    served.wait_said("stopping")
    began_s = time.monotonic()
    stream.raw.sock.close()
    assert served.wait() == 0
    assert time.monotonic() - began_s < 30
    row("client leaves", "draining", "", "exit 0")


def test_a_stop_while_a_restart_waits_ends_with_0(serve, row) -> None:
    served = serve(backend("a", "dead_at=never|load"), server={"stop_s": 1}).ready()
    served.kill("a")
    served.wait_state("a", "backoff", restarts=2)
    served.signal(signal.SIGTERM)
    assert served.wait() == 0
    row("SIGTERM to the supervisor", "backoff", "connections are refused", "exit 0")


def test_backends_stop_in_the_reverse_order_of_their_start(serve) -> None:
    served = serve(backend("first"), backend("second")).ready()
    served.signal(signal.SIGTERM)
    assert served.wait() == 0
    exits = {name: served.events(name, "exit")[0]["time"] for name in ("first", "second")}
    assert exits["second"] < exits["first"]
