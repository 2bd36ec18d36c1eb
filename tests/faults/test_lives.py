"""Backends that start badly, hang, flood, fork and refuse to end, through the whole program."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from front_door import Raw
from served import PROGRAM, backend, is_alive, wait_for

# Listens on the port that its first start was given, then starts the fake there.
STEALS = f"""#!/bin/sh
case "$*" in *--port*) if [ ! -e "$0.done" ]; then
  touch "$0.done"
  port=$(echo "$*" | sed 's/.*--port \\([0-9]*\\).*/\\1/')
  setsid "{sys.executable}" -c "
import pathlib, socket, sys, time
with socket.create_server(('127.0.0.1', $port)) as listener:
    pathlib.Path('$0.taken').touch()
    listener.settimeout(20)
    end = time.monotonic() + 20
    while not pathlib.Path('$0.enough').exists() and time.monotonic() < end:
        time.sleep(0.02)
" </dev/null >/dev/null 2>&1 &
  while [ ! -e "$0.taken" ]; do sleep 0.02; done
fi ;; esac
exec "{PROGRAM}" "$@"
"""


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("knobs", "said", "state"),
    [
        ("dead_at=load:1 last='unknown architecture'", "unknown architecture", "loading"),
        ("dead_at=load:SEGV", "signal SIGSEGV", "loading"),
        ("dead_at=req1:3", "code 3", "warming"),
        ("dead_at=req1:ABRT", "signal SIGABRT", "warming"),
    ],
)
def test_a_first_start_that_fails_ends_the_program_with_1_and_the_cause(
    serve, row, knobs, said, state
) -> None:
    served = serve(backend("a", knobs))
    assert served.wait() == 1
    assert said in served.log
    assert f"while {state}" in served.log
    assert "Traceback" not in served.log
    assert len(served.events("a", "start")) == 1
    row(
        f"dies ({knobs.split()[0]})",
        f"{state}, first start (eager)",
        "refused",
        "exit 1 with cause",
    )


def test_no_restart_ends_the_program_with_1(serve, row) -> None:
    served = serve(backend("a", "tps=20"), arguments=("--no-restart",)).ready()
    stream = served.stream("a", max_tokens=60).begun()
    served.kill("a")
    assert stream.end() == "error event"
    assert served.wait() == 1
    assert len(served.events("a", "start")) == 1
    assert "signal SIGKILL" in served.log
    row("kill -9 with --no-restart", "ready, streaming", "error event", "exit 1 with cause")


@pytest.mark.slow
def test_a_spent_budget_means_failed_until_somebody_asks(serve, row) -> None:
    served = serve(backend("a", "dead_at=never|load|load|load|load|load|never"), warm=False).ready()
    began_s = time.monotonic()
    served.kill("a")
    wait_for(lambda: served.view("a")["state"] == "failed", "the budget to be spent", 60)
    assert time.monotonic() - began_s >= 1 + 2 + 4 + 8
    assert len(served.events("a", "start")) == 6
    assert served.said("stays down")
    health = served.health()
    assert health is not None
    assert health.status_code == 503
    assert health.json()["status"] == "failed"
    refused = served.ask("a")
    assert refused.status == 503
    assert "exited (code 1) while loading" in refused.said
    assert served.order("a", "start").status_code == 202
    served.wait_state("a", "ready")
    assert served.ask("a").status == 200
    row("dies at every restart", "loading, restart", "503 with the cause", "failed after 6 starts")


def test_the_ways_to_end_are_told_apart(serve, row) -> None:
    served = serve(
        backend("stopped"),
        backend("exited", "dead_at=req2:3|never"),
        backend("crashed"),
        backend("never", lazy=True, llama_server=str(PROGRAM)),
    ).ready()
    assert served.order("stopped", "stop").status_code == 202
    assert served.wait_state("stopped", "stopped")["ended"] == "stopped (code 0)"
    assert served.ask("exited").status == 200
    assert served.wait_state("exited", "ready", restarts=1)["ended"] == "exited (code 3)"
    served.kill("crashed", signal.SIGSEGV)
    ended = served.wait_state("crashed", "ready", restarts=1)["ended"]
    assert ended == "crashed (signal SIGSEGV)"
    assert "ended" not in served.view("never")
    row("stop by a person", "ready, idle", "next request starts it", "stopped")


def test_a_program_that_is_gone_counts_as_never_started(serve, tmp_path, row) -> None:
    path = tmp_path / "llama-server"
    served = serve(
        backend("a", llama_server=program(path, f'#!/bin/sh\nexec "{PROGRAM}" "$@"\n'))
    ).ready()
    path.rename(tmp_path / "elsewhere")
    served.kill("a")
    seen = served.wait_view("a", lambda v: v.get("ended") == "never started")
    assert "could not be started" in seen["cause"]
    (tmp_path / "elsewhere").rename(path)
    served.wait_state("a", "ready")
    assert served.ask("a").status == 200
    row("program file gone for a while", "ready, idle", "waits, then answered", "restarted")


def test_a_load_without_progress_is_ended_and_one_with_progress_is_not(serve, row) -> None:
    served = serve(
        backend("stuck", "load=60|0", lazy=True, load_stall_s=1),
        backend("slow", "load=3 lines=0.2", lazy=True, load_stall_s=1),
        server={"stop_s": 1},
    ).ready()
    refused = served.ask("stuck")
    assert refused.status == 503
    assert "no progress in loading for 1 s (load_stall_s)" in refused.said
    assert served.ask("slow").status == 200
    assert served.view("slow")["load_ms"] >= 3000
    row("hang in load", "loading, first start", "503 with the cause", "failed")
    row("slow load with progress", "loading, first start", "answered", "ready after the load")


@pytest.mark.slow
def test_a_load_limit_counts_whatever_progress_there_is(serve) -> None:
    served = serve(
        backend("a", "load=60|0 lines=0.1|0", lazy=True, load_limit_s=1.5), server={"stop_s": 1}
    ).ready()
    refused = served.ask("a")
    assert refused.status == 503
    assert "not loaded after 1.5 s (load_limit_s)" in refused.said
    assert served.order("a", "start").status_code == 202
    served.wait_state("a", "ready")


@pytest.mark.parametrize("key", ["load_stall_s", "load_limit_s", "hang_s"])
@pytest.mark.parametrize("value", [-1, "soon"])
def test_a_limit_that_is_none_is_refused_at_the_start(serve, key, value) -> None:
    served = serve(backend("a", **{key: value}))
    assert served.wait() == 2
    assert key in served.log


def test_limits_of_0_mean_none(serve) -> None:
    limits = {"load_stall_s": 0, "load_limit_s": 0, "hang_s": 0}
    served = serve(backend("a", "load=1.5", **limits), server={"park_s": 0, "drain_s": 0}).ready()
    assert served.ask("a").status == 200


def test_a_slow_health_answer_is_no_failure(serve, row) -> None:
    served = serve(backend("a", "health_delay=2", hang_s=1)).ready()
    assert served.ask("a").status == 200
    assert served.view("a")["restarts"] == 0
    row("/health takes 2 s", "loading, first start", "answered", "ready")


def test_nobody_asks_a_child_that_died_in_its_load(serve) -> None:
    served = serve(backend("a", "load=600", lazy=True)).ready()
    with served.stream("a").raw as raw:
        wait_for(lambda: len(served.events("a", "request")) > 3, "it to be asked for its health")
        served.kill("a")
        served.wait_state("a", "failed")
        asked = len(served.events("a", "request"))
        assert raw.until(b"\r\n").startswith(b"HTTP/1.1 503")
    assert served.ask("a").status == 503
    assert len(served.events("a", "request")) == asked


def test_a_hang_with_a_healthy_face_is_replaced(serve, row) -> None:
    served = serve(backend("a", "hang_at=req2|never", hang_s=1.5), server={"stop_s": 2}).ready()
    began_s = time.monotonic()
    answer = served.ask("a", "the one")
    assert answer.status == 200
    assert served.reached("a", "the one") == 2
    assert served.said("no progress for 1.5 s on the requests it has")
    row(
        "hang, /health says 200",
        "ready, request without a byte yet",
        "answered",
        "restarted",
        time.monotonic() - began_s,
    )


def test_a_hang_in_mid_stream_is_an_error_event(serve, row) -> None:
    served = serve(
        backend("a", "hang_at=req2/chunk3|never", hang_s=1.5), server={"stop_s": 2}
    ).ready()
    assert served.stream("a", max_tokens=20).begun().end() == "error event"
    served.wait_state("a", "ready", restarts=1)
    assert served.ask("a").status == 200
    row("hang, /health says 200", "ready, streaming", "an error event", "restarted")


@pytest.mark.slow
def test_a_hang_of_everything_while_idle_is_noticed(serve, row) -> None:
    served = serve(
        backend("a", "hang_at=2s:all|never", hang_s=2), constants={"_HEALTH_ANSWER_S": 1}
    ).ready()
    served.wait_state("a", "ready", restarts=1)
    assert served.ask("a").status == 200
    row("hang of everything", "ready, idle", "answered by the next", "restarted")


def test_a_hang_in_the_warm_up_fails_the_start(serve, row) -> None:
    served = serve(backend("a", "hang_at=req1", hang_s=1.5), server={"stop_s": 2})
    assert served.wait() == 1
    assert "no progress for 1.5 s in the warm-up" in served.log
    row("hang in the warm-up", "warming, first start (eager)", "refused", "exit 1 with cause")


@pytest.mark.slow
def test_a_busy_backend_that_answers_no_health_is_left_alone(serve) -> None:
    served = serve(backend("a", "tps=8 health_delay=3", hang_s=1.5)).ready()
    assert served.stream("a", max_tokens=30).begun().end() == "answered"
    assert served.view("a")["restarts"] == 0


def test_a_warm_up_that_fails_twice_is_degraded_and_serves(serve, row) -> None:
    served = serve(backend("a", 'fail="500@1-2:out of luck"')).ready()
    health = served.health()
    assert health is not None
    assert health.json() == {"status": "ok", "degraded": ["a"]}
    assert "out of luck" in served.view("a")["degraded"]
    assert served.ask("a").status == 200
    row("500 to the warm-up, twice", "warming, first start", "answered", "ready, degraded")


def test_a_backend_that_ignores_term_is_killed_in_time(serve, row) -> None:
    served = serve(backend("a", "term=ignore"), server={"stop_s": 1}).ready()
    pid = served.view("a")["pid"]
    assert served.order("a", "stop").status_code == 202
    assert served.wait_state("a", "stopped")["ended"] == "stopped (signal SIGKILL)"
    assert not is_alive(pid)
    row("TERM ignored", "stop", "waits for the next start", "killed after stop_s")


@pytest.mark.parametrize("how", ["group", "stubborn"])
def test_a_grandchild_that_holds_the_pipes_goes_with_its_parent(serve, row, how) -> None:
    served = serve(backend("a", f"fork={how}")).ready()
    grandchild = served.events("a", "fork")[0]["grandchild"]
    served.kill("a")
    served.wait_state("a", "ready", restarts=1)
    wait_for(lambda: not is_alive(grandchild), "the grandchild to be gone")
    row(f"grandchild holds the pipes ({how})", "ready, idle", "answered by the next", "restarted")


def test_a_grandchild_in_a_session_of_its_own_does_not_stop_the_news(serve) -> None:
    served = serve(backend("a", "fork=setsid|no")).ready()
    grandchild = served.events("a", "fork")[0]["grandchild"]
    try:
        served.kill("a")
        served.wait_state("a", "ready", restarts=1)
        assert served.ask("a").status == 200
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_stolen_port_is_tried_again_with_another(serve, tmp_path, row) -> None:
    path = tmp_path / "llama-server"
    served = serve(backend("a", llama_server=program(path, STEALS)))
    try:
        served.ready()
    finally:
        Path(f"{path}.enough").touch()
    assert served.said("taken by another program")
    assert len({e["argv"][e["argv"].index("--port") + 1] for e in served.events("a", "start")}) == 2
    row("port stolen", "loading, first start (eager)", "503, then answered", "another port")


def test_a_flood_of_log_lines_is_drained_and_kept_small(serve, row) -> None:
    served = serve(backend("a", "noise=50000000")).ready()
    supervisor = psutil.Process(served.process.pid)
    before = supervisor.memory_info().rss
    for n in range(10):
        assert served.ask("a", f"number {n}").status == 200
    assert supervisor.memory_info().rss - before < 30 << 20
    assert len(served.log) < 1 << 20
    row("log flood of 50 MB/s", "ready, streaming", "answered", "goes on")


def test_twenty_restarts_leave_no_zombie_and_no_descriptor(serve, row) -> None:
    served = serve(backend("a"), warm=False).ready()
    supervisor = psutil.Process(served.process.pid)
    served.ask("a")
    before = supervisor.num_fds()  # a kept connection more or less
    for n in range(20):
        assert served.order("a", "restart").status_code == 202
        served.wait_state("a", "ready", restarts=n + 1)
    zombies = [c for c in supervisor.children() if c.status() == psutil.STATUS_ZOMBIE]
    assert not zombies
    served.ask("a")
    wait_for(lambda: supervisor.num_fds() <= before + 2, "the descriptors to be closed")
    row("20 restarts by a person", "ready, idle", "answered", "no zombie, no descriptor more")


def test_without_descriptors_the_start_is_tried_again(serve, row) -> None:
    served = serve(backend("a"), warm=False).ready()
    supervisor = psutil.Process(served.process.pid)
    pid = served.view("a")["pid"]
    limits = supervisor.rlimit(psutil.RLIMIT_NOFILE)
    supervisor.rlimit(psutil.RLIMIT_NOFILE, (supervisor.num_fds() + 1, limits[1]))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), "the backend to be dead")
    wait_for(lambda: served.said("could not be started"), "a start to fail")
    supervisor.rlimit(psutil.RLIMIT_NOFILE, limits)
    served.wait_state("a", "ready")
    assert served.ask("a").status == 200
    row("out of file descriptors", "ready, idle", "waits, then answered", "restarted")


def test_without_descriptors_the_door_waits_and_goes_on(serve) -> None:
    served = serve(backend("a")).ready()
    assert served.ask("a").status == 200
    supervisor = psutil.Process(served.process.pid)
    limits = supervisor.rlimit(psutil.RLIMIT_NOFILE)
    supervisor.rlimit(psutil.RLIMIT_NOFILE, (supervisor.num_fds(), limits[1]))
    with Raw(served.port) as late:
        late.send(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        served.wait_said("cannot take a connection")
        supervisor.rlimit(psutil.RLIMIT_NOFILE, limits)
        assert late.reply()[0] == 200


def test_a_clock_that_jumps_changes_nothing(serve, tmp_path, row) -> None:
    jump = tmp_path / "jump"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "real = time.time\n"
        f"time.time = lambda: real() + 1e6 * os.path.exists({str(jump)!r})\n"
    )
    served = serve(
        backend("a", "tps=20", hang_s=5), environment={"PYTHONPATH": str(tmp_path)}
    ).ready()
    stream = served.stream("a", max_tokens=20).begun()
    jump.touch()
    assert stream.end() == "answered"
    jump.unlink()
    assert served.ask("a").status == 200
    assert served.view("a")["restarts"] == 0
    row("clock jumps by eleven days", "ready, streaming", "answered", "goes on")


def test_a_neighbour_of_the_same_name_survives_everything(serve, model, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    neighbour = psutil.Popen([PROGRAM, "-m", model, "--port", str(port)], cwd=tmp_path)
    try:
        served = serve(backend("a"), server={"stop_s": 1}).ready()
        served.kill("a")
        served.wait_state("a", "ready", restarts=1)
        served.order("a", "restart")
        served.wait_state("a", "ready", restarts=2)
        served.process.terminate()
        assert served.wait() == 0
        assert neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.wait()


def test_without_descriptors_a_busy_server_goes_on(serve, row) -> None:
    served = serve(backend("a", "tps=30", hang_s=1)).ready()
    assert served.ask("a").status == 200
    supervisor = psutil.Process(served.process.pid)
    with served.stream("a", max_tokens=90).begun().raw as raw:
        # the watch on its backend looks meanwhile, without a descriptor
        limits = supervisor.rlimit(psutil.RLIMIT_NOFILE)
        supervisor.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
        assert b"data: [DONE]" in raw.rest()
        supervisor.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert served.process.poll() is None, served.log
    assert served.ask("a").status == 200
    row("out of file descriptors", "ready, streaming", "answered", "goes on")


def test_a_backend_that_closes_its_port_while_it_streams_is_replaced(serve, row) -> None:
    """llama-server does so at a TERM from outside, and waits for its streams."""
    served = serve(backend("a", "tps=2|0"), server={"stop_s": 2}).ready()
    with served.stream("a", max_tokens=200).begun().raw as raw:
        port = served.view("a")["port"]
        served.kill("a", signal.SIGTERM)
        wait_for(lambda: not listens(port), "the port to be closed")
        assert served.ask("a").status == 200
        assert served.view("a")["restarts"] == 1
        assert b'data: {"error"' in raw.rest()
    row("TERM from outside", "ready, streaming", "error event; others are answered", "restarted")
