"""A configuration is read again while the server runs."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import PROGRAM, Served, backend, configuration, is_alive, wait_for


def change(served: Served, model: str, *backends: dict) -> None:
    configuration(served.folder, model, *backends, server={"stop_s": 2})


def test_what_did_not_change_keeps_its_process_and_its_streams(serve, model, row) -> None:
    kept = backend("kept", "tps=20")
    served = serve(kept, backend("old"), server={"stop_s": 2}).ready()
    pid, old = served.view("kept")["pid"], served.view("old")["pid"]
    stream = served.stream("kept", max_tokens=40).begun()
    change(served, model, kept, backend("new"))
    done = served.client.post("/v1/reload").json()["reloaded"]
    assert done == {"kept": ["kept"], "started": ["new"], "stopped": ["old"], "failed": []}
    assert stream.end() == "answered"
    assert served.view("kept")["pid"] == pid
    assert served.ask("new").status == 200
    assert served.ask("old").status == 404
    wait_for(lambda: not is_alive(old), "the old backend to end")
    row("HUP: one of two changes", "ready, streaming", "its stream to the end", "same pid")


def test_what_changed_is_swapped_when_warm_and_not_before(serve, model, row) -> None:
    served = serve(backend("a", "tps=20"), server={"stop_s": 2}).ready()
    pid = served.view("a")["pid"]
    stream = served.stream("a", max_tokens=60).begun()
    change(served, model, backend("a", "load=1 tps=20", max_in_flight=7))
    served.signal(signal.SIGHUP)
    wait_for(lambda: len(served.events("a", "start")) == 2, "the new one to start")
    assert served.view("a")["pid"] == pid
    assert served.ask("a").status == 200
    after = served.wait_view("a", lambda v: v["pid"] != pid)
    assert after["state"] == "ready"
    assert after["warm_up_ms"] > 0
    assert stream.end() == "answered"
    assert served.ask("a").status == 200
    wait_for(lambda: not is_alive(pid), "the old one to end")
    row(
        "HUP: it changes",
        "ready, streaming",
        "the old one's stream to the end",
        "swapped when warm",
    )


def test_who_waits_for_one_that_is_replaced_is_answered_by_the_new_one(serve, model, row) -> None:
    served = serve(backend("a", "load=0|60"), backend("b", "load=0|60")).ready()
    for name in ("a", "b"):
        os.kill(served.view(name)["pid"], signal.SIGKILL)
    for name in ("a", "b"):  # a request that comes before the news is one of the dead child's
        served.wait_view(name, lambda v: v["state"] != "ready")
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(served.ask, "a", f"number {n}") for n in range(3)]
        stranded = threads.submit(served.ask, "b")
        served.wait_view("a", lambda v: v["waiting"] == 3)
        served.wait_view("b", lambda v: v["waiting"] == 1)
        change(served, model, backend("a", "tps=50"))
        assert served.client.post("/v1/reload").json()["reloaded"]["stopped"] == ["b"]
        assert [one.result().status for one in asked] == [200] * 3
        assert stranded.result().status == 503
        assert "taken out of the configuration" in stranded.result().said
    row("HUP: it changes", "loading, restart", "answered by the new one", "swapped when warm")


@pytest.mark.parametrize("text", ["[server", "[backend]\nno_such_key = 1", None])
def test_a_broken_file_changes_nothing_and_says_so(serve, text, row) -> None:
    served = serve(backend("a", "tps=20"), server={"stop_s": 2}).ready()
    pid = served.view("a")["pid"]
    stream = served.stream("a", max_tokens=30).begun()
    path = served.folder / "serve.toml"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    refused = served.client.post("/v1/reload")
    assert refused.status_code == 400
    assert "nothing was reloaded" in refused.json()["error"]["message"]
    served.signal(signal.SIGHUP)
    wait_for(lambda: len(served.said("nothing was reloaded")) == 2, "the second complaint")
    assert stream.end() == "answered"
    assert served.view("a")["pid"] == pid
    row("HUP: the file is broken", "ready, streaming", "its stream to the end", "same pid")


def test_a_change_that_fails_to_start_leaves_the_old_one_in_its_place(serve, model, row) -> None:
    served = serve(backend("a"), server={"stop_s": 2}).ready()
    pid = served.view("a")["pid"]
    change(served, model, backend("a", "dead_at=load:1", queue=3))
    done = served.client.post("/v1/reload").json()["reloaded"]
    assert done["failed"] == ["a"]
    assert served.view("a")["pid"] == pid
    assert served.ask("a").status == 200
    row("HUP: the new one does not start", "ready, idle", "answered", "the old one stays")


def test_five_reloads_in_a_second_leave_one_copy(serve, model, row) -> None:
    served = serve(backend("a"), server={"stop_s": 2}).ready()
    for n in range(5):
        change(served, model, backend("a", "load=0.1", queue=10 + n))
        served.signal(signal.SIGHUP)
    wait_for(lambda: served.said("reloaded: "), "the first reload to be done")

    def alone() -> bool:
        pids = [e["pid"] for e in served.events("a", "start") if is_alive(e["pid"])]
        return pids == [served.view("a")["pid"]]

    served.client.post("/v1/reload")  # it waits for those that came before
    wait_for(alone, "one copy to be left")
    assert served.ask("a").status == 200
    assert served.client.post("/v1/reload").json()["reloaded"]["kept"] == ["a"]
    wait_for(alone, "one copy to be left")
    row("five HUPs in a second", "ready, idle", "answered", "one copy")


def test_a_hangup_without_a_configuration_file_is_no_end(model, tmp_path, row) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    served = Served(folder, "-m", model, "--device", "cpu", "--llama-server", str(PROGRAM))
    try:
        served.ready()
        pid = served.view("cpu")["pid"]
        served.signal(signal.SIGHUP)
        served.wait_said("reload")
        assert served.view("cpu")["pid"] == pid
        assert served.ask("tiny-llama").status == 200
    finally:
        served.stop()
    row("HUP without a configuration file", "ready, idle", "answered", "same pid")


def test_a_hangup_while_loading_does_no_harm(serve, row) -> None:
    served = serve(backend("a", "load=1"))
    served.wait_health("loading")
    served.signal(signal.SIGHUP)
    served.ready()
    assert len(served.events("a", "start")) == 1
    assert served.ask("a").status == 200
    row("SIGHUP", "loading, first start", "answered after the load", "one start")


def test_a_dead_supervisor_can_be_started_again_on_the_same_port(serve) -> None:
    first = serve(backend("a")).ready()
    first.process.kill()
    first.process.wait()
    second = serve(backend("a"), port=first.port).ready()
    assert second.ask("a").status == 200
