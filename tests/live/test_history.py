from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from onebit_serve.core.ladder import Costs
from onebit_serve.core.shapes import Classes, Shape
from onebit_serve.live import history
from onebit_serve.live.history import FLUSH_S, HALF_LIFE_S, History, Key, key_of, state_file

KEY = Key("model.gguf 123", "HRX0", "version: 1")
OTHER = Key("other.gguf 5", "HRX0", "version: 1")

# Notes as fast as it can and says after each flush how much it has flushed.
WRITER = """
import sys
from pathlib import Path
from onebit_serve.live.history import History, Key
history = History(Path(sys.argv[1]), Key(*sys.argv[2:5]), lambda line: print(line, flush=True))
print("up", flush=True)
noted = 0
while noted < int(sys.argv[5]):
    for _ in range(3):
        history.note_prefill(noted % 50 + 1)
        noted += 1
    history.flush()
    print(noted, flush=True)
"""


class Clock:
    def __init__(self, now_s=1_800_000_000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "onebit" / "history.sqlite3"


@pytest.fixture
def said():
    return []


@pytest.fixture
def open_history(file, said):
    def opened(key=KEY, now=time.time):
        return History(file, key, said.append, now)

    return opened


def total(file, key=KEY):
    lines = []
    weights = History(file, key, lines.append).load().histogram.prefill
    assert lines == []
    return round(sum(weights.values()), 3)


def writer(file, key, notes):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(file), key.model, key.device, key.binary, str(notes)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_was_noted_is_there_at_the_next_start(open_history, said):
    first = open_history()
    first.note_prefill(30)
    first.note_prefill(30)
    first.note_prefill(600)
    first.note_decode(2)
    first.flush()
    found = open_history().load().histogram
    assert found.prefill == {30: pytest.approx(2.0), 600: pytest.approx(1.0)}
    assert found.decode == {2: pytest.approx(1.0)}
    assert said == []


def test_before_the_first_request_there_is_nothing(open_history):
    assert open_history().load() == history.Remembered()


def test_models_devices_and_binaries_are_kept_apart(open_history):
    ours, theirs = open_history(), open_history(OTHER)
    ours.note_prefill(30)
    ours.flush()
    theirs.note_prefill(40)
    theirs.flush()
    assert set(open_history().load().histogram.prefill) == {30}
    assert set(open_history(OTHER).load().histogram.prefill) == {40}


def test_old_requests_count_half_after_a_half_life(open_history):
    clock = Clock()
    kept = open_history(now=clock)
    kept.note_prefill(30)
    kept.flush()
    clock.now_s += HALF_LIFE_S
    kept.note_prefill(40)
    kept.flush()
    found = kept.load().histogram.prefill
    assert found == {30: pytest.approx(0.5), 40: pytest.approx(1.0)}


def test_weights_hold_for_decades(open_history):
    clock = Clock(history.EPOCH_S + 30 * 365 * 86400)
    kept = open_history(now=clock)
    kept.note_prefill(30)
    kept.flush()
    assert kept.load().histogram.prefill == {30: pytest.approx(1.0)}


def test_only_the_heaviest_sizes_are_kept(open_history, monkeypatch):
    monkeypatch.setattr(history, "MOST_SIZES", 5)
    kept = open_history()
    for tokens in range(1, 21):
        for _ in range(tokens):
            kept.note_prefill(tokens)
    kept.flush()
    assert set(kept.load().histogram.prefill) == {16, 17, 18, 19, 20}


def test_only_the_latest_models_are_kept(open_history, monkeypatch):
    monkeypatch.setattr(history, "MOST_KEYS", 2)
    clock = Clock()
    for number in range(4):
        clock.now_s += 1
        kept = open_history(Key(f"m{number}", "d", "b"), clock)
        kept.note_prefill(9)
        kept.save_classes(Classes((1, 9)))
        kept.flush()
    left = [n for n in range(4) if open_history(Key(f"m{n}", "d", "b")).load().classes]
    assert left == [2, 3]


def test_discovered_classes_and_costs_come_back(open_history):
    kept = open_history()
    costs = Costs(0.01, 0.002, 0.03, 0.4, {Shape(33): 2.9, Shape(2, 2): 0.1})
    kept.save_classes(Classes((1, 9, 33)))
    kept.save_costs(costs)
    kept.save_costs(Costs(), cache_found=True)
    found = open_history().load()
    assert (found.classes, found.costs) == (Classes((1, 9, 33)), costs)
    assert open_history().load(cache_found=True).costs == costs
    kept.save_filled(filled=True)
    assert open_history().load(cache_found=True).costs == Costs()


def test_the_file_and_its_folder_are_private(open_history, file):
    kept = open_history()
    kept.note_prefill(1)
    kept.flush()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_is_no_database_is_dropped_with_a_word(open_history, file, said):
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not a database, " * 500)
    kept = open_history()
    assert kept.load() == history.Remembered()
    kept.note_prefill(30)
    kept.flush()
    assert total(file) == 1
    assert len(said) == 1
    assert "dropped the history" in said[0]


@pytest.mark.parametrize("start", [100, 4096, 8000])
def test_a_damaged_file_is_dropped_or_survived(open_history, file, start):
    kept = open_history()
    for tokens in range(1, 3000):
        kept.note_prefill(tokens)
    kept.flush()
    with file.open("r+b") as damaged:
        damaged.seek(start)
        damaged.write(os.urandom(3000))
    kept.note_prefill(7)
    kept.flush()
    kept.load()
    kept.note_prefill(7)
    kept.flush()
    assert open_history().load().histogram.prefill[7] >= 0.9


def test_a_table_of_another_layout_is_dropped(open_history, file, said):
    file.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.executescript("CREATE TABLE keys (x); PRAGMA user_version = 1;")
    kept = open_history()
    kept.note_prefill(30)
    kept.flush()
    assert total(file) == 1
    assert len(said) == 1


def test_facts_that_do_not_parse_are_dropped(open_history, file, said):
    kept = open_history()
    kept.save_classes(Classes((1,)))
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("UPDATE facts SET value = ?", (b"{",))
        db.commit()
    assert kept.load().classes is None
    assert len(said) == 1


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE counts SET weight = 'heavy'",
        "UPDATE counts SET size = 'zz'",
        "UPDATE facts SET value = 5",
    ],
)
def test_values_of_another_type_are_dropped_with_a_word(open_history, file, said, change):
    kept = open_history()
    kept.note_prefill(30)
    kept.flush()
    kept.save_classes(Classes((1,)))
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute(change)
        db.commit()
    assert kept.load().classes is None
    assert len(said) == 1


def test_a_file_of_a_newer_version_is_left_alone(open_history, file, said):
    file.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.executescript("CREATE TABLE future (x); PRAGMA user_version = 9;")
    kept = open_history()
    kept.note_prefill(30)
    kept.flush()
    kept.flush()
    assert kept.load() == history.Remembered()
    assert len(said) == 1
    with contextlib.closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT count(*) FROM future").fetchone() == (0,)


def test_what_cannot_be_written_now_is_written_later(open_history, file, said, monkeypatch):
    monkeypatch.setattr(history, "BUSY_S", 0.01)
    kept = open_history()
    kept.note_prefill(1)
    kept.flush()
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        kept.note_prefill(1)
        kept.flush()
        assert total(file) == 1
        db.execute("ROLLBACK")
    kept.flush()
    assert total(file) == 2
    assert len(said) == 1


def test_a_place_that_cannot_be_made_costs_only_a_word(tmp_path, said):
    (tmp_path / "state").write_text("a file where a folder should be")
    kept = History(tmp_path / "state" / "onebit" / "h", KEY, said.append)
    kept.note_prefill(1)
    kept.flush()
    kept.flush()
    assert kept.load() == history.Remembered()
    assert len(said) == 1


def test_without_a_place_nothing_is_kept(said):
    kept = History(None, KEY, said.append)
    kept.note_prefill(1)
    kept.flush()
    assert kept.load() == history.Remembered()
    assert said == []


def test_the_place_follows_the_xdg_specification():
    assert str(state_file({"XDG_STATE_HOME": "/s", "HOME": "/h"})) == "/s/onebit/history.sqlite3"
    relative = state_file({"XDG_STATE_HOME": "s", "HOME": "/h"})
    assert str(relative) == "/h/.local/state/onebit/history.sqlite3"
    assert state_file({}) is None


def test_two_supervisors_at_once_lose_nothing(file):
    children = [writer(file, key, 150) for key in (KEY, KEY, OTHER)]
    for child in children:
        assert child.communicate(timeout=60)[0].split()[-1] == "150"
    assert total(file) == 300
    assert total(file, OTHER) == 150


def test_a_supervisor_killed_at_any_moment_loses_only_what_was_not_flushed(file):
    chance = random.Random(11)
    kept_before = 0
    for _ in range(6):
        with writer(file, KEY, 1_000_000) as child:
            said = [child.stdout.readline() for _ in range(chance.randrange(1, 12))]
            time.sleep(chance.uniform(0, 0.01))  # not a wait for anything: the moment is random
            child.send_signal(signal.SIGKILL)
            said += child.stdout.readlines()
        flushed = [int(line) for line in said[1:]]
        kept = total(file)
        confirmed = flushed[-1] if flushed else 0
        # One flush may have been committed and not yet been said; none that was said is missing.
        assert confirmed <= kept - kept_before <= confirmed + 3
        kept_before = kept
    with contextlib.closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_flushes_are_less_than_a_minute_apart():
    assert FLUSH_S <= 60


YEAR_S = 365 * 86400.0


@pytest.mark.parametrize("now_s", [-YEAR_S, 0.0, 10 * YEAR_S, 80 * YEAR_S, 120 * YEAR_S, 1e12])
def test_a_clock_that_is_decades_off_does_no_harm(open_history, said, now_s):
    kept = open_history(now=Clock(now_s))
    kept.note_prefill(37)
    kept.flush()
    assert kept.load().histogram.prefill == {37: pytest.approx(1.0)}
    for other_s in (0.0, 1e12):
        weights = open_history(now=Clock(other_s)).load().histogram.prefill
        assert 0 < sum(weights.values()) < float("inf")
    assert said == []


def test_a_listed_name_and_its_word_are_the_same_device():
    keys = {key_of("m.gguf", name, "llama-server") for name in ("vulkan", "Vulkan0", "VULKAN0")}
    assert len(keys) == 1
    assert key_of("m.gguf", "Vulkan1", "llama-server") not in keys


def test_a_cache_that_was_emptied_since_is_not_filled(open_history):
    kept = open_history()
    assert not kept.load(cache_found=True).cache_filled
    kept.save_filled(filled=True)
    assert kept.load(cache_found=True).cache_filled
    assert not kept.load(cache_found=False).cache_filled
    assert not open_history(OTHER).load(cache_found=True).cache_filled
    kept.save_filled(filled=False)
    assert not kept.load(cache_found=True).cache_filled
