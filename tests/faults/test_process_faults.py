"""A backend's process dies or stands still in each state of its life.

One server runs a lazy backend for each case, all at the same time: what happens to one must not
touch the others either.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from served import PROGRAM, Served, backend, configuration, wait_for

AT_ONCE = 6
HANG_S = 2.0
LONG = "word " * 500

# Runs the fake as a child of its own and ends with a code of ours on SIGUSR1 and SIGUSR2.
ENDS = f"""#!/bin/sh
trap 'exit 0' USR1
trap 'exit 1' USR2
"{PROGRAM}" "$@" & pid=$!
while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
exit $code
"""

STATES = {
    # state: knobs; alternatives are for the first, the second and all later starts
    "loading, first start": "load=60|0 lines=0.2|0",
    "warming, first start": "tps=3|0",
    "loading, restart": "load=0|60|0 lines=0|0.2|0",
    "warming, restart": "tps=0|3|0",
    "ready, idle": "",
    "ready, request without a byte yet": "hang_at=req2|never",
    "ready, streaming": "tps=20|0",
}
FIRST = ("loading, first start", "warming, first start")
AGAIN = ("loading, restart", "warming, restart")


class Deed(NamedTuple):
    """What is done to the process, and how its end reads in `/v1/status`."""

    signals: tuple[signal.Signals, ...]
    ended: str


DEEDS = {
    "kill -9": Deed((signal.SIGKILL,), "crashed (signal SIGKILL)"),
    "segmentation fault": Deed((signal.SIGSEGV,), "crashed (signal SIGSEGV)"),
    "abort": Deed((signal.SIGABRT,), "crashed (signal SIGABRT)"),
    "ends by itself with 0": Deed((signal.SIGUSR1,), "exited (code 0)"),
    "ends by itself with 1": Deed((signal.SIGUSR2,), "exited (code 1)"),
    "stopped for good (SIGSTOP)": Deed((signal.SIGSTOP,), "exited"),
}
GOES_ON = "stopped and continued"


class Case(NamedTuple):
    """One cell of the matrix."""

    fault: str
    state: str

    @property
    def name(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in f"{self.fault}-{self.state}")


class Outcome(NamedTuple):
    """What a case came to."""

    client: str
    then: str
    ready_s: float | None


CASES = [Case(fault, state) for fault in (*DEEDS, GOES_ON) for state in STATES]


def described(case: Case, ends: Path) -> dict[str, Any]:
    keys: dict[str, Any] = {"lazy": True}
    knobs = STATES[case.state]
    if case.fault.startswith("ends by itself"):
        keys["llama_server"] = str(ends)
    if case.fault.startswith("stopped for good"):
        keys |= {"hang_s": HANG_S, "load_stall_s": HANG_S}
    if case.fault == GOES_ON:
        knobs = knobs.replace("60", "1.5").replace("hang_at=req2|never", "pps=300")
    return backend(case.name, knobs, **keys)


def reach(served: Served, case: Case, pool: ThreadPoolExecutor) -> Callable[[], str]:
    """Bring a backend into the state, and return how to learn what its client saw."""
    name, state = case.name, case.state.split(",")[0]

    def parked(restarts: int) -> Callable[[], str]:
        asked = pool.submit(served.ask, name, "the one that waits")
        served.wait_state(name, state, restarts=restarts)
        wait_for(lambda: served.view(name)["waiting"], "the request to wait")
        return lambda: told(asked)

    if case.state in FIRST:
        return parked(0)
    if case.state == "ready, request without a byte yet":
        asked = pool.submit(served.ask, name, LONG)
        wait_for(lambda: served.reached(name, LONG), "the request to arrive")
        return lambda: told(asked)
    assert served.ask(name).status == 200
    if case.state in AGAIN:
        served.kill(name)
        return parked(1)
    if case.state == "ready, idle":
        return lambda: told(pool.submit(served.ask, name, "the one after"))
    stream = served.stream(name, "the one that runs", max_tokens=60)
    stream.begun()
    return stream.end


def told(asked: Future[Any]) -> str:
    answer = asked.result()
    if answer.status == 200:
        return "answered"
    assert "Retry-After" in answer.headers, answer
    return f"{answer.status} with the cause: {answer.said}"


def play(served: Served, case: Case, pool: ThreadPoolExecutor) -> Outcome:
    name = case.name
    learn = reach(served, case, pool)
    before = served.view(name)
    starts = before["restarts"] + 1
    wait_for(lambda: len(served.events(name, "start")) == starts, "the program to have begun")
    if case.fault == GOES_ON:
        os.kill(before["pid"], signal.SIGSTOP)
        wait_for(lambda: status_letter(before["pid"]) == "T", "the process to stand still")
        os.kill(before["pid"], signal.SIGCONT)
        client = learn()
        after = served.wait_state(name, "ready")
        assert after["pid"] == before["pid"], after
        return Outcome(client, "goes on", None)
    deed = DEEDS[case.fault]
    began_s = time.monotonic()
    for number in deed.signals:
        os.kill(before["pid"], number)
    if case.state in FIRST:
        client = learn()
        after = served.wait_state(name, "failed")
        assert after["ended"].startswith(deed.ended), after
        assert served.order(name, "start").status_code == 202
        served.wait_state(name, "ready")
        assert served.ask(name).status == 200
        return Outcome(client, "failed; starts again when asked", None)
    after = served.wait_state(name, "ready", restarts=before["restarts"] + 1)
    ready_s = time.monotonic() - began_s
    assert after["ended"].startswith(deed.ended), after
    assert after["pid"] != before["pid"], after
    client = learn()
    assert served.ask(name).status == 200
    return Outcome(client, "restarted", ready_s)


def status_letter(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, Future[Outcome]]]:
    """Play all selected cases, some at a time."""
    cases = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and "case" in getattr(item, "callspec", item).params
    ]
    folder = tmp_path_factory.mktemp("matrix")
    ends = folder / "ends"
    ends.write_text(ENDS)
    ends.chmod(0o755)
    path = configuration(folder, model, *(described(case, ends) for case in cases))
    served = Served(folder, "--config", str(path), constants={"_HEALTH_ANSWER_S": HANG_S})
    try:
        served.ready()
        with ThreadPoolExecutor(AT_ONCE) as plays, ThreadPoolExecutor(2 * AT_ONCE) as asks:
            yield {case: plays.submit(play, served, case, asks) for case in cases}
        assert "a connection failed" not in served.log, served.log
    finally:
        served.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_process_that_dies_or_stands_still_needs_no_hand(
    outcomes: dict[Case, Future[Outcome]], case: Case, row: Callable[..., None]
) -> None:
    outcome = outcomes[case].result(100)
    client = outcome.client
    if case.fault == GOES_ON:
        assert client == "answered"
    elif case.state in FIRST:
        assert client.startswith("503 with the cause"), client
        deed = DEEDS[case.fault]
        how = "no progress" if "SIGSTOP" in case.fault else deed.ended.partition("(")[2]
        assert how in client, client
        client = "503 with the cause"
    elif case.state == "ready, streaming":
        assert client in ("error event", "cut")
        client = "its tokens, an error event, a cut connection"
    else:
        assert client == "answered"
    row(case.fault, case.state, client, outcome.then, outcome.ready_s)


if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)
