"""Requests that meet a backend which is not ready: they join its start, wait, or hear why not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import backend, wait_for


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as threads:
        yield threads


def test_twenty_first_requests_start_a_lazy_backend_once(serve, pool, row) -> None:
    served = serve(backend("a", "load=0.5", lazy=True)).ready()
    answers = list(pool.map(lambda n: served.ask("a", f"number {n}"), range(20)))
    assert [a.status for a in answers] == [200] * 20
    assert len(served.events("a", "start")) == 1
    assert all(served.reached("a", f"number {n}") == 1 for n in range(20))
    row("20 requests at once", "stopped (lazy)", "answered, each once", "one start")


def test_a_start_that_fails_tells_everybody_who_waits_why(serve, pool, row) -> None:
    knobs = "load=0.7|0 dead_at=load:3|never last='no such tensor: output.weight'|"
    served = serve(backend("a", knobs, lazy=True)).ready()
    asked = [pool.submit(served.ask, "a", f"number {n}") for n in range(5)]
    served.wait_view("a", lambda v: v["waiting"] == 5 or v["state"] == "failed")
    for future in asked:
        answer = future.result()
        assert answer.status == 503
        assert "code 3" in answer.said
        assert "no such tensor" in answer.said
        assert int(answer.headers["retry-after"]) > 0
    assert served.view("a")["ended"] == "exited (code 3)"
    assert served.order("a", "start").status_code == 202
    served.wait_state("a", "ready")
    assert served.ask("a").status == 200
    row("exits with 3 in the load", "loading, first start", "503 with the cause", "failed")


@pytest.mark.slow
def test_a_failed_backend_refuses_at_once_and_is_tried_again_after_a_pause(serve) -> None:
    served = serve(backend("a", "dead_at=load:1|never", lazy=True)).ready()
    assert served.ask("a").status == 503
    served.wait_state("a", "failed")
    again = served.ask("a")
    assert again.status == 503
    assert 1 <= int(again.headers["retry-after"]) <= 10
    assert len(served.events("a", "start")) == 1
    wait_for(lambda: served.view("a")["since_s"] > 10, "the pause to be over")
    assert served.ask("a").status == 200


def test_a_full_queue_is_429_and_says_when_to_come_again(serve, pool, row) -> None:
    served = serve(backend("a", "hang_at=req2|never", max_in_flight=1, queue=2)).ready()
    asked = [pool.submit(served.ask, "a", f"number {n}") for n in range(3)]
    served.wait_view("a", lambda v: (v["in_flight"], v["waiting"]) == (1, 2))
    refused = served.ask("a")
    assert refused.status == 429
    assert refused.headers["retry-after"] == "1"
    assert "queue = 2" in refused.said
    for path in ("/health", "/v1/models", "/v1/status", "/livez"):
        assert served.client.get(path).status_code == 200
    served.kill("a")
    assert [future.result().status for future in asked] == [200] * 3
    row("more requests than the queue takes", "ready, streaming", "429, Retry-After", "goes on")


def test_a_full_queue_of_a_loading_backend_is_503_with_the_phase(serve, pool) -> None:
    served = serve(backend("a", "load=60", lazy=True, queue=1), server={"stop_s": 1}).ready()
    waits = pool.submit(served.ask, "a")
    served.wait_view("a", lambda v: v["waiting"] == 1)
    refused = served.ask("a")
    assert refused.status == 503
    assert "loading for" in refused.said
    assert "queue = 1" in refused.said
    served.kill("a")
    assert waits.result().status == 503


def test_waiting_longer_than_park_s_is_503_with_phase_time_and_cause(serve, row) -> None:
    served = serve(backend("a", "load=0|60"), server={"park_s": 1, "stop_s": 1}).ready()
    served.kill("a")
    served.wait_state("a", "loading", restarts=1)
    refused = served.ask("a")
    assert refused.status == 503
    assert "gave up after 1 s in line (park_s)" in refused.said
    assert "is loading for" in refused.said
    assert "signal SIGKILL" in refused.said
    assert int(refused.headers["retry-after"]) > 0
    row("a load longer than park_s", "loading, restart", "503: phase, time, cause", "goes on")


def test_a_slow_start_of_one_backend_does_not_hold_up_another(serve, pool, row) -> None:
    served = serve(
        backend("slow", "load=60", lazy=True), backend("quick"), server={"stop_s": 1}
    ).ready()
    waits = pool.submit(served.ask, "slow")
    served.wait_state("slow", "loading")
    assert served.ask("quick").status == 200
    assert served.view("slow")["state"] == "loading"
    served.kill("slow")
    assert waits.result().status == 503
    row("another backend loads or hangs", "ready, idle", "answered", "goes on")


def test_a_large_body_survives_the_wait_for_the_start_byte_for_byte(serve) -> None:
    served = serve(backend("a", "load=0.5", lazy=True)).ready()
    said = "x" * (2 << 20)  # more tokens than fit: both are refused, by the backend itself
    parked, direct = served.ask("a", said), served.ask("a", said)
    assert (parked.status, direct.status) == (400, 400)
    sent = [r["body_sha256"] for r in served.events("a", "request") if r["body_bytes"] > len(said)]
    assert len(sent) == 2
    assert len(set(sent)) == 1


def test_a_request_that_kills_its_backend_kills_two_at_most(serve, row) -> None:
    served = serve(backend("a", "dead_at=req2:SEGV|req2:SEGV|never")).ready()
    answer = served.ask("a", "the poison")
    assert answer.status == 502
    assert "failed before it answered" in answer.said
    assert served.reached("a", "the poison") == 2
    served.wait_state("a", "ready", restarts=2)
    assert served.ask("a").status == 200
    row("a request kills its backend", "ready, idle", "502 after two backends", "restarted")


def test_a_request_whose_backend_dies_once_is_answered_by_the_next(serve, row) -> None:
    served = serve(backend("a", "dead_at=req2:ABRT|never")).ready()
    answer = served.ask("a", "the one")
    assert answer.status == 200
    assert served.reached("a", "the one") == 2
    assert len(served.said("is sent again")) == 1
    row("dies on a request", "ready, request without a byte yet", "answered", "restarted")


def test_compute_errors_for_ever_make_a_restart(serve, row) -> None:
    served = serve(backend("a", 'fail="500@2+:Compute error."|')).ready()
    statuses = [served.ask("a").status for _ in range(3)]
    assert statuses == [500] * 3
    after = served.wait_state("a", "ready", restarts=1)
    assert after["ended"].startswith("exited")
    assert served.ask("a").status == 200
    assert served.said("3 answers in a row were HTTP 500 with a compute error")
    row("'Compute error' for ever", "ready, idle", "three 500s as they came", "restarted")


def test_one_compute_error_is_no_reason_for_a_restart(serve) -> None:
    served = serve(backend("a", 'fail="500@2-3:Compute error."')).ready()
    assert [served.ask("a").status for _ in range(5)] == [500, 500, 200, 200, 200]
    assert served.view("a")["restarts"] == 0


def test_a_request_during_the_warm_up_is_served_after_it_and_once(serve, pool, row) -> None:
    served = serve(backend("a", "tps=10", lazy=True)).ready()
    asked = pool.submit(served.ask, "a", "the early one")
    served.wait_state("a", "warming")
    assert served.reached("a", "the early one") == 0
    assert asked.result().status == 200
    assert served.reached("a", "the early one") == 1
    row("a request comes early", "warming, first start", "answered after the warm-up", "goes on")


def test_requests_during_the_first_start_of_an_eager_backend_get_503_at_once(serve, row) -> None:
    served = serve(backend("a", "load=60"), server={"stop_s": 1})
    served.wait_health("loading")
    refused = served.ask("a")
    assert refused.status == 503
    assert refused.took_s < 5
    assert "is loading" in refused.said
    row("a request comes early", "loading, first start", "503 at once (eager)", "goes on")


def test_looking_never_starts_a_lazy_backend(serve) -> None:
    served = serve(backend("a", lazy=True)).ready()
    for path in ("/health", "/v1/models", "/v1/status", "/livez", "/v1/backends/a/logs"):
        served.client.get(path)
    assert served.view("a")["state"] == "stopped"
    assert not served.events("a", "start")
