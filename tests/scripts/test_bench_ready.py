"""What is made of a start's times, and of files that the shared helpers read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onebit_serve.core.errors import OnebitError

FOLDER = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(FOLDER))
import _bench  # noqa: E402
import bench_ready as bench  # noqa: E402

sys.path.remove(str(FOLDER))

TIMINGS = {"prompt_ms": 4000.0, "predicted_ms": 1000.0}  # 50 ms of the fake's
EVENTS = [
    {"event": "loaded", "time": 101.0},
    {"event": "request", "time": 101.005, "work": None},
    {"event": "request", "time": 101.010, "work": 1},
    {"event": "reply", "time": 101.067, "work": 1, "last_event": 101.062, "timings": TIMINGS},
    {"event": "request", "time": 102.0, "work": 2},
    {"event": "reply", "time": 103.0, "work": 2, "last_event": 103.0, "timings": TIMINGS},
]


def a_start(ready_s=101.065, events=EVENTS):
    return bench.read_start(0.3, 1, events, began_s=100.0, spawned_s=100.15, ready_s=ready_s)


def test_the_lag_is_what_ready_is_later_than_loaded_plus_the_warm_up():
    start = a_start()
    assert start.spawn_ms == pytest.approx(150)
    assert start.warm_up_ms == pytest.approx(52)
    assert start.lag_ms == pytest.approx(13)


def test_the_parts_of_the_lag_add_up_to_it():
    start = a_start()
    parts = (start.noticed_ms, start.told_ms)
    assert parts == pytest.approx((10, 3))
    assert sum(parts) == pytest.approx(start.lag_ms)


def test_ready_sooner_than_the_warm_up_can_take_is_an_error():
    with pytest.raises(OnebitError, match=r"ready 2\.0 ms before"):
        a_start(ready_s=101.058)


def test_ready_before_the_backend_noted_its_last_event_is_none():
    assert a_start(ready_s=101.061).told_ms == pytest.approx(-1)


@pytest.mark.parametrize("left_out", ["loaded", "request", "reply"])
def test_a_record_that_lacks_something_is_an_error(left_out):
    with pytest.raises(OnebitError, match="no load or no warm-up"):
        a_start(events=[e for e in EVENTS if e["event"] != left_out])


def starts(*lags_ms, load_s=0.3, spawn_ms=150.0):
    return [bench.Start(load_s, n, spawn_ms, 50, lag, lag, 0) for n, lag in enumerate(lags_ms)]


def outcomes(found):
    return [c.outcome for c in bench.claims(found, (0.3,))]


def test_claims_are_about_medians():
    assert outcomes(starts(1, 2, 900)) == ["pass", "pass"]
    assert outcomes(starts(1, 26, 27)) == ["fail", "pass"]
    assert outcomes(starts(1, spawn_ms=201)) == ["pass", "fail"]


def test_a_load_that_was_not_run_is_not_measured():
    assert outcomes(starts(1, load_s=10.0)) == ["not measured", "pass"]
    assert outcomes([]) == ["not measured", "not measured"]


def test_every_row_of_the_tables_fits_its_columns():
    for table in bench.tables([*starts(1, 2), *starts(3, load_s=10.0)]):
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_the_script_notes_its_start_and_becomes_the_program(tmp_path):
    script = tmp_path / "llama server"
    script.write_text(bench.SCRIPT.format(spawned=tmp_path / "spawned", fake="/bin/echo"))
    said = subprocess.run(["sh", script, "a", "b c"], capture_output=True, text=True, check=True)
    assert said.stdout == "a b c\n"
    assert float((tmp_path / "spawned").read_text()) > 0


def test_a_record_is_read_without_the_line_that_is_being_written(tmp_path):
    file = tmp_path / "record"
    assert _bench.record(file) == []
    file.write_text('{"event": "start"}\n{"event": "lo')
    assert _bench.record(file) == [{"event": "start"}]


def test_a_median_is_shown_with_its_range_where_there_is_one():
    assert _bench.median_and_range([]) == "-"
    assert _bench.median_and_range([1.0, 1.0]) == "1.0"
    assert _bench.median_and_range([1.0, 9.0, 2.0], 0) == "2 (1 to 9)"


def test_variables_of_the_user_that_decide_do_not_reach_a_server(tmp_path, monkeypatch):
    for name in ("FAKE_LLAMA", "LLAMA_ARG_DEVICE", "ONEBIT_NO_WARMUP"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LANG", "C")
    made = _bench.environment(tmp_path, MINE="2")
    assert not {"FAKE_LLAMA", "LLAMA_ARG_DEVICE", "ONEBIT_NO_WARMUP"} & made.keys()
    assert made["MINE"] == "2"
    assert made["LANG"] == "C"
    assert made["XDG_CACHE_HOME"].startswith(str(tmp_path))


def test_a_second_run_of_a_benchmark_is_kept_out(tmp_path, monkeypatch):
    monkeypatch.setattr(_bench, "ROOT", tmp_path)
    with _bench.alone("x"), pytest.raises(SystemExit, match="another run"), _bench.alone("x"):
        pass
