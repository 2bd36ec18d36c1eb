"""What traffic was, kept between runs: prefill sizes, parallel decodes, classes, measured costs.

One SQLite file, `$XDG_STATE_HOME/onebit/history.sqlite3`, private to the user and shared by all
supervisors. It says how long prompts were, never what was in them. Losing it costs only time, so a
file that cannot be read is dropped, with one line in the log.

- Notes are taken in memory and written by `flush` in one transaction (write-ahead log, so a reader
  never waits, and a process that is killed loses what it had not flushed and nothing else). Flush
  every `FLUSH_S`; a kill then loses no more than that.
- Every call opens the file, does its work and closes it again: nothing is held between calls.
- Weights halve every `HALF_LIFE_S`. They are stored as if all of them were counted at `EPOCH_S`
  (forward decay), so that adding is a plain sum for two writers at once, and nothing has to be
  rewritten as time passes.
- At most `MOST_SIZES` sizes are kept for a model, device and binary, and `MOST_KEYS` of these.

All of it blocks (a millisecond, at worst `BUSY_S` while another process writes): call `load`,
`flush` and the `save_` functions as `await trio.to_thread.run_sync(...)`; `note_prefill` and
`note_decode` only count and are called directly.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from onebit_serve.core.folders import state_folder
from onebit_serve.core.ladder import Costs
from onebit_serve.core.presets import known_as
from onebit_serve.core.shapes import Classes, Histogram, Shape

__all__ = ["FLUSH_S", "History", "Key", "Remembered", "key_of", "state_file"]

FLUSH_S = 20.0
"""Seconds between two flushes: a third of the minute that a kill may cost."""
HALF_LIFE_S = 14 * 86400.0
EPOCH_S = 1_767_225_600.0  # 2026-01-01
FEWEST_HALVINGS, MOST_HALVINGS = -100.0, 800.0
"""Half-lives since then: a clock before 2022 or after 2056 counts as these. A weight that one of
them wrote is still a float for the other."""
BUSY_S = 2.0
MOST_SIZES = 4096
MOST_KEYS = 64
MOST_WAITING = 100_000
LONGEST_TOKENS = 1 << 20
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
  id INTEGER PRIMARY KEY, model TEXT, device TEXT, binary TEXT, used_s REAL,
  UNIQUE (model, device, binary));
CREATE TABLE IF NOT EXISTS counts (
  key INTEGER, kind TEXT, size INTEGER, weight REAL, PRIMARY KEY (key, kind, size)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (
  key INTEGER, name TEXT, value BLOB, PRIMARY KEY (key, name)) WITHOUT ROWID;
"""


class Key(msgspec.Struct, frozen=True):
    """What a history belongs to: shapes are of a binary, a model and a device together.

    Args:
        model: What tells its file from another of the same name.
        device: The word of log lines.
        binary: The same of the program, so that one that was replaced starts anew.
    """

    model: str
    device: str
    binary: str


class Remembered(msgspec.Struct, frozen=True):
    """What is known of one key.

    Args:
        histogram: Decayed weights; empty where nothing was seen.
        classes: What discovery found; `None` where it never ran.
        costs: Measured costs; `None` where nothing was measured in this state of the caches.
        cache_filled: Whether the cache that was found holds what this key compiles: an earlier run
            warmed all its shapes. Else it may be another model's, or hold a part.
    """

    histogram: Histogram = Histogram()
    classes: Classes | None = None
    costs: Costs | None = None
    cache_filled: bool = False


class _StoredCosts(msgspec.Struct):
    """`Costs` as JSON: shapes cannot be the keys of an object there."""

    request_s: float
    token_s: float
    step_s: float
    first_s: float
    measured: list[tuple[int, int, float]]


def key_of(model: str, device: str, binary: str) -> Key:
    """Return the key of a backend.

    Args:
        model: Its file; a name that is none (mlx) stands for itself.
        device: The word of log lines, or a listed name.
        binary: Its program.
    """
    return Key(_identity(model), known_as(device), _identity(binary))


def _identity(path: str) -> str:
    with contextlib.suppress(OSError):
        found = Path(path).stat()
        return f"{Path(path).name} {found.st_size} {found.st_mtime_ns}"
    return path


def state_file(env: Mapping[str, str]) -> Path | None:
    """Return where the history is; `None` where the environment gives no place for it.

    Args:
        env: See `core.folders`.
    """
    folder = state_folder(env)
    return Path(folder, "history.sqlite3") if folder else None


class History:
    """The history of one key.

    Args:
        file: From `state_file`; `None` keeps nothing.
        key: What it belongs to.
        say: Takes one line for the log, when the file was dropped or cannot be used.
        now: Seconds since 1970.
    """

    def __init__(
        self,
        file: Path | None,
        key: Key,
        say: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._key = key
        self._say = say
        self._now = now
        self._said = False
        self._lock = threading.Lock()
        self._waiting: Counter[tuple[str, int]] = Counter()

    def note_prefill(self, tokens: int) -> None:
        """Count one request by the tokens that were really prefilled (`timings.prompt_n`)."""
        if tokens > 0:
            self._note("prefill", min(tokens, LONGEST_TOKENS))

    def note_decode(self, sequences: int) -> None:
        """Count one request by the most sequences that decoded beside and including it."""
        if sequences > 0:
            self._note("decode", sequences)

    def _note(self, kind: str, size: int) -> None:
        with self._lock:
            if len(self._waiting) < MOST_WAITING:
                self._waiting[kind, size] += 1

    def flush(self) -> None:
        """Write what was noted since the last time; what cannot be written now is kept."""
        with self._lock:
            noted, self._waiting = self._waiting, Counter()
        if not noted:
            return
        if not self._write(lambda db, key: self._add(db, key, noted)):
            with self._lock:
                if len(self._waiting) < MOST_WAITING:
                    self._waiting += noted

    def load(self, *, cache_found: bool = False) -> Remembered:
        """Return what is known.

        Args:
            cache_found: Whether the driver's or runtime's cache was there at this start: first
                uses cost something else with and without it, and are kept apart. One that this
                key did not fill counts as none.
        """
        remembered = Remembered()

        def read(db: sqlite3.Connection) -> None:
            nonlocal remembered
            row = db.execute(
                "SELECT id FROM keys WHERE model = ? AND device = ? AND binary = ?", self._names()
            ).fetchone()
            if row is not None:
                remembered = self._read(db, row[0], cache_found=cache_found)

        self._use(read)
        return remembered

    def save_classes(self, classes: Classes) -> None:
        """Keep what discovery found."""
        self._write(lambda db, key: self._put(db, key, "classes", msgspec.json.encode(classes)))

    def save_costs(self, costs: Costs, *, cache_found: bool = False) -> None:
        """Keep measured costs, apart for starts with and without a driver cache."""
        stored = _StoredCosts(
            costs.request_s,
            costs.token_s,
            costs.step_s,
            costs.first_s,
            [(s.tokens, s.sequences, cost) for s, cost in sorted(costs.measured.items())],
        )
        name = _costs_name(cache_found=cache_found)
        self._write(lambda db, key: self._put(db, key, name, msgspec.json.encode(stored)))

    def save_filled(self, *, filled: bool) -> None:
        """Keep whether all shapes of this key were warmed since its caches were last empty."""

        def write(db: sqlite3.Connection, key: int) -> None:
            if filled:
                self._put(db, key, "filled", b"1")
            else:
                db.execute("DELETE FROM facts WHERE key = ? AND name = 'filled'", (key,))

        self._write(write)

    def _names(self) -> tuple[str, str, str]:
        return (self._key.model, self._key.device, self._key.binary)

    def _scale(self) -> float:
        """Return by what a weight of now is multiplied to be stored."""
        halvings = (self._now() - EPOCH_S) / HALF_LIFE_S
        return float(2.0 ** max(FEWEST_HALVINGS, min(MOST_HALVINGS, halvings)))

    def _read(self, db: sqlite3.Connection, key: int, *, cache_found: bool) -> Remembered:
        scale = self._scale()
        found: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
        for kind, size, weight in db.execute(
            "SELECT kind, size, weight FROM counts WHERE key = ?", (key,)
        ):
            found[kind][int(size)] = float(weight) / scale
        facts = dict(db.execute("SELECT name, value FROM facts WHERE key = ?", (key,)).fetchall())
        filled = cache_found and "filled" in facts
        classes, costs = facts.get("classes"), facts.get(_costs_name(cache_found=filled))
        return Remembered(
            Histogram(**found),
            msgspec.json.decode(classes, type=Classes) if classes else None,
            _restored(costs) if costs else None,
            filled,
        )

    def _add(self, db: sqlite3.Connection, key: int, noted: Counter[tuple[str, int]]) -> None:
        scale = self._scale()
        db.executemany(
            "INSERT INTO counts VALUES (?, ?, ?, ?) ON CONFLICT (key, kind, size) "
            "DO UPDATE SET weight = weight + excluded.weight",
            [(key, kind, size, count * scale) for (kind, size), count in noted.items()],
        )
        db.execute(
            "DELETE FROM counts WHERE key = ?1 AND (kind, size) IN (SELECT kind, size FROM counts "
            "WHERE key = ?1 ORDER BY weight DESC LIMIT -1 OFFSET ?2)",
            (key, MOST_SIZES),
        )

    def _put(self, db: sqlite3.Connection, key: int, name: str, value: bytes) -> None:
        db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (key, name, value))

    def _write(self, work: Callable[[sqlite3.Connection, int], None]) -> bool:
        def write(db: sqlite3.Connection) -> None:
            # The lock is taken before anything is read, so that two writers queue here instead of
            # failing where a read would have to become a write.
            db.execute("BEGIN IMMEDIATE")
            try:
                (key,) = db.execute(
                    "INSERT INTO keys (model, device, binary, used_s) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (model, device, binary) DO UPDATE SET used_s = excluded.used_s "
                    "RETURNING id",
                    (*self._names(), self._now()),
                ).fetchone()
                work(db, key)
                self._forget(db)
                db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

        return self._use(write)

    def _forget(self, db: sqlite3.Connection) -> None:
        old = "SELECT id FROM keys ORDER BY used_s DESC LIMIT -1 OFFSET ?"
        for (key,) in db.execute(old, (MOST_KEYS,)).fetchall():
            for table, column in (("counts", "key"), ("facts", "key"), ("keys", "id")):
                db.execute(f"DELETE FROM {table} WHERE {column} = ?", (key,))  # noqa: S608

    def _use(self, work: Callable[[sqlite3.Connection], None]) -> bool:
        """Do something with the file; a broken one is dropped and a new one begun."""
        if self._file is None:
            return False
        fault = _attempt(self._file, work)
        if fault is not None and _is_broken(fault):
            self._say(f"dropped the history {self._file}, which cannot be read: {fault}")
            _drop(self._file)
            fault = _attempt(self._file, work)
        if fault is not None:
            self._say_once(f"the history {self._file} is not used: {fault}")
        return fault is None

    def _say_once(self, line: str) -> None:
        if not self._said:
            self._said = True
            self._say(line)


class _NewerError(Exception):
    """The file was written by a later version of the program."""


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives its side files the mode of the main one.
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None)
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise _NewerError("a newer version of the program wrote it")
        if version < SCHEMA_VERSION:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = 1; COMMIT;")
        # Safe when the process is killed; a power cut may cost the last transactions.
        db.execute("PRAGMA synchronous = NORMAL")
        yield db
    finally:
        db.close()


def _attempt(file: Path, work: Callable[[sqlite3.Connection], None]) -> Exception | None:
    try:
        with _opened(file) as db:
            work(db)
    except (_NewerError, sqlite3.Error, OSError, ValueError, KeyError, TypeError) as fault:
        return fault
    return None


def _is_broken(fault: Exception) -> bool:
    """Tell a file that will never be readable from one that is locked, full or forbidden."""
    if isinstance(fault, sqlite3.OperationalError):
        return str(fault).startswith("no such ") or "has no column" in str(fault)
    return isinstance(fault, (sqlite3.DatabaseError, ValueError, KeyError, TypeError))


def _drop(file: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            file.with_name(file.name + suffix).unlink()


def _costs_name(*, cache_found: bool) -> str:
    return "costs with cache" if cache_found else "costs"


def _restored(value: bytes) -> Costs:
    stored = msgspec.json.decode(value, type=_StoredCosts)
    return Costs(
        stored.request_s,
        stored.token_s,
        stored.step_s,
        stored.first_s,
        {Shape(tokens, sequences): cost for tokens, sequences, cost in stored.measured},
    )
