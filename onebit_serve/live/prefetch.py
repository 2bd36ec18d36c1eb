"""Read a model's files into the page cache at the disk's own speed while the child starts.

A child that maps its model faults it in piece by piece as it goes, and does other things first;
several large reads in flight keep the disk busy from the first moment. The bytes are sent to
`/dev/null` inside the kernel, so nothing is copied and nothing is held here. Files that lie in
the page cache already, or would not fit it, are left alone. On a virtual disk a cold file of 4.1
GiB took 2.8 and 3.1 s, `dd bs=8M` 3.0 and 6.0 s, for half a second of CPU (measured).

Not for backends that read past the page cache (llama-server's `--direct-io`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import trio

from onebit_serve.core import options
from onebit_serve.core.plan import BackendPlan
from onebit_serve.live.free_memory import machine_memory
from onebit_serve.live.log import Log

__all__ = ["Fetched", "fetch", "files_of", "parts_of", "read_ahead", "resident_bytes"]

STEP_BYTES = 8 << 20
IN_FLIGHT = 4
WINDOW_BYTES = 1 << 30
RESERVE_SHARE = 0.1
"""Memory that stays free of the file, as a share of all: the child wants some to load into."""
ALMOST_ALL = 0.99
WORTH_BYTES = 64 << 20
"""A smaller file is read by its child in a moment."""
SAY_EVERY_S = 10.0
_BESIDE = (("-md", "--model-draft", "--spec-draft-model"), ("-mm", "--mmproj"))
"""Options that name further files a child loads."""
_PART = re.compile(r"(.+)-\d{5}(-of-)(\d{5})(\.gguf)", re.IGNORECASE)  # llama.cpp's naming


class Fetched(msgspec.Struct, frozen=True):
    """What a prefetch came to.

    Args:
        outcome: `read`; `resident` where (nearly) all was in memory already; `short` where it
            would not fit; `unreadable`; `cancelled`.
        read_bytes: Bytes that were gone through.
        total_bytes: Size of all files.
        took_s: Seconds from start to end.
        detail: Why, where it is not `read`.
    """

    outcome: Literal["read", "resident", "short", "unreadable", "cancelled"]
    read_bytes: int
    total_bytes: int
    took_s: float = 0.0
    detail: str = ""


def parts_of(model: Path) -> tuple[Path, ...]:
    """Return the files of a model: itself, or all parts where it is the first of several."""
    found = _PART.fullmatch(model.name)
    if not found:
        return (model,)
    stem, of, count, suffix = found.groups()
    names = (f"{stem}-{n:05}{of}{count}{suffix}" for n in range(1, int(count) + 1))
    return tuple(path for name in names if (path := model.with_name(name)).is_file())


def files_of(plan: BackendPlan) -> tuple[Path, ...]:
    """Return the files a backend loads: its model, then draft model and projector where given."""
    named = [options.value(plan.arguments, *spellings) for spellings in _BESIDE]
    beside = [Path(name) for name in named if name and Path(name).is_file()]
    return tuple(part for file in (Path(plan.model), *beside) for part in parts_of(file))


async def read_ahead(plan: BackendPlan, log: Log) -> None:
    """Read a backend's model ahead of its child, and say how that went; cancel it at any time.

    Args:
        plan: The backend.
        log: Takes a line at the end, one now and then before it, and a bar on a terminal.
    """
    past_the_cache = any(options.given(plan.arguments, name) for name in ("-dio", "--direct-io"))
    if plan.kind == "mlx" or past_the_cache:
        return
    files = files_of(plan)
    try:
        total_bytes = sum(file.stat().st_size for file in files)
    except OSError:  # its child says it better
        return
    if total_bytes < WORTH_BYTES:
        return
    name, said_s, is_over = files[0].name, time.monotonic(), False

    def show(done: int, total: int) -> None:
        nonlocal said_s
        if is_over:  # cancelled, and the pieces under way end after that
            return
        log.progress(name, f"reading {name}", done / total)
        if time.monotonic() > said_s + SAY_EVERY_S:
            said_s = time.monotonic()
            log.say(f"reading {name}: {done / total:.0%} of {_gib(total)}", backend=plan.name)

    try:
        found = await fetch(files, show)
    finally:
        is_over = True
        log.progress(name)
    facts = {"backend": plan.name, "took_s": round(found.took_s, 3), "bytes": found.read_bytes}
    if found.outcome == "read":
        mib_per_s = found.read_bytes / 2**20 / max(found.took_s, 0.001)
        line = f"read {name} ({_gib(total_bytes)}) into memory in {found.took_s:.1f} s"
        log.say(f"{line} ({mib_per_s:.0f} MiB/s)", **facts)
    elif found.outcome == "resident":
        log.debug(f"{name} is in memory already", **facts)
    else:
        log.say(f"{name} is not read ahead: {found.detail}", **facts)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


async def fetch(
    files: Sequence[Path],
    on_progress: Callable[[int, int], object] = lambda _done, _total: None,
    *,
    available_bytes: int | None = None,
) -> Fetched:
    """Read files into the page cache; a cancelled one stops within a few megabytes.

    Args:
        files: From `parts_of`.
        on_progress: Takes bytes done and in all, every 8 MiB, in a thread of its own.
        available_bytes: Memory that may be filled; what this process may still have where `None`.
    """
    stop = threading.Event()
    started_s = trio.current_time()
    try:
        fetched = await trio.to_thread.run_sync(
            partial(_fetch, files, on_progress, stop, available_bytes), abandon_on_cancel=True
        )
    finally:
        stop.set()
    return msgspec.structs.replace(fetched, took_s=trio.current_time() - started_s)


def resident_bytes(file: Path) -> int | None:
    """Return how much of a file lies in the page cache; `None` where the kernel does not say.

    It says so only of files that we own or may write, and calls all others resident.
    """
    size = file.stat().st_size
    if size == 0:
        return 0
    if file.stat().st_uid != os.geteuid() and not os.access(file, os.W_OK):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = 0
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for offset in range(0, size, WINDOW_BYTES):
            length = min(WINDOW_BYTES, size - offset)
            counted = _resident_pages(libc, fd, offset, length)
            if counted is None:
                return None
            pages += counted
    finally:
        os.close(fd)
    return min(size, pages * mmap.PAGESIZE)


def _resident_pages(libc: ctypes.CDLL, fd: int, offset: int, length: int) -> int | None:
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        vector = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if libc.mincore(address, length, vector) != 0:
            return None
        # Only the lowest bit of each byte has a meaning.
        return sum(vector.raw.count(value) for value in set(vector.raw) if value & 1)
    finally:
        libc.munmap(address, length)


def _fetch(
    files: Sequence[Path],
    on_progress: Callable[[int, int], object],
    stop: threading.Event,
    available_bytes: int | None,
) -> Fetched:
    try:
        sizes = [file.stat().st_size for file in files]
        resident = [resident_bytes(file) for file in files]
    except OSError as fault:
        return Fetched("unreadable", 0, 0, detail=str(fault))
    total = sum(sizes)
    lacking = total - sum(found or 0 for found in resident)
    if None not in resident and lacking <= total * (1 - ALMOST_ALL):
        return Fetched("resident", 0, total)
    if available_bytes is None:
        all_bytes, free_bytes = machine_memory()
        available_bytes = free_bytes - int(all_bytes * RESERVE_SHARE)
    missing = _PROMISED.take(lacking, available_bytes)
    if missing:
        detail = f"{missing >> 20} MiB more memory would be needed"
        return Fetched("short", 0, total, detail=detail)
    try:
        return _Reader(files, sizes, on_progress, stop).run()
    finally:
        _PROMISED.give_back(lacking)


class _Promised:
    """Memory that prefetches under way are going to fill: several backends may start at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    def take(self, more_bytes: int, available_bytes: int) -> int:
        """Promise that much, or return how much of it is missing."""
        with self._lock:
            missing = self._bytes + more_bytes - available_bytes
            if missing <= 0:
                self._bytes += more_bytes
            return max(0, missing)

    def give_back(self, bytes_: int) -> None:
        with self._lock:
            self._bytes -= bytes_


_PROMISED = _Promised()


class _Reader:
    """Several threads that take the next piece of the files each, in order."""

    def __init__(
        self,
        files: Sequence[Path],
        sizes: Sequence[int],
        on_progress: Callable[[int, int], object],
        stop: threading.Event,
    ) -> None:
        self._pieces = iter(
            [
                (file, offset, min(STEP_BYTES, size - offset))
                for file, size in zip(files, sizes, strict=True)
                for offset in range(0, size, STEP_BYTES)
            ]
        )
        self._total_bytes = sum(sizes)
        self._done_bytes = 0
        self._on_progress = on_progress
        self._stop = stop
        self._lock = threading.Lock()
        self._fault = ""

    def run(self) -> Fetched:
        # Daemons, so that a disk that hangs cannot keep the program from ending.
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(IN_FLIGHT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done, total = self._done_bytes, self._total_bytes
        if self._fault:
            return Fetched("unreadable", done, total, detail=self._fault)
        return Fetched("cancelled" if done < total else "read", done, total)

    def _work(self) -> None:
        fds: dict[Path, int] = {}
        sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while not self._stop.is_set():
                with self._lock:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                file, offset, length = piece
                if file not in fds:
                    fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                _read(sink, fds[file], offset, length)
                with self._lock:
                    self._done_bytes += length
                    self._on_progress(self._done_bytes, self._total_bytes)
        except OSError as fault:
            self._fault = str(fault)
            self._stop.set()
        finally:
            for fd in (sink, *fds.values()):
                os.close(fd)


def _read(sink: int, fd: int, offset: int, length: int) -> None:
    """Have the kernel read one piece: ask for all of it, then go through it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
    end = offset + length
    while offset < end:
        sent = os.sendfile(sink, fd, offset, end - offset)
        if sent == 0:
            raise OSError("the file became shorter while it was read")
        offset += sent
