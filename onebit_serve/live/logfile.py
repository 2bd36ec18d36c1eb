"""A log file that turns over at a size, from a thread of its own, and that no disk can stop.

What is written is put into a bounded buffer and goes to disk on a daemon thread. A flood that is
faster than the disk, a full disk, a folder that went away: bytes are lost and counted, one line
says so, and once it works again another line and a mark in the file say how much is missing.
Nothing raises, and nobody waits.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["LogFile"]

_HELD_LIMIT_BYTES = 4 << 20
_MODE = 0o640
_RETRY_S = 5.0


class LogFile:
    """Appends to a file, which becomes `NAME.1` when it is full, that `NAME.2`, and so on.

    A file that somebody else moved or removed (logrotate) is opened anew.

    Args:
        path: The file; its folder is made where it is missing.
        limit_bytes: Size at which it turns over; 0 is never.
        keep: How many full files are kept.
        on_trouble: Told in one line when it cannot be written, and when it can again; called on
            the file's own thread.
        retry_s: Seconds between tries while it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        limit_bytes: int,
        keep: int,
        on_trouble: Callable[[str], None],
        retry_s: float = _RETRY_S,
    ) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._keep = keep
        self._on_trouble = on_trouble
        self._retry_s = retry_s
        self._held: collections.deque[bytes] = collections.deque()
        self._held_bytes = 0
        self._lost_bytes = 0
        self._closing = False
        self._news = threading.Condition()
        # What follows belongs to the thread alone.
        self._fd = -1
        self._size_bytes = 0
        self._trouble = False
        self._retry_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"log {path.name}", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Append bytes; it never blocks on the disk, and never raises."""
        with self._news:
            if self._held_bytes + len(data) > _HELD_LIMIT_BYTES:
                self._lost_bytes += len(data)
                return
            self._held.append(data)
            self._held_bytes += len(data)
            self._news.notify()

    def close(self, wait_s: float = 1.0) -> None:
        """Write what is left, for at most so many seconds."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._held and not self._closing:
                    self._news.wait()
                data, lost = b"".join(self._held), self._lost_bytes
                self._held.clear()
                self._held_bytes = self._lost_bytes = 0
                closing = self._closing
            self._append(data, lost, last_try=closing)
            if closing:
                self._close()
                return

    def _append(self, data: bytes, lost: int, *, last_try: bool) -> None:
        if self._trouble and time.monotonic() < self._retry_at_s and not last_try:
            self._lose(lost + len(data))
            return
        written = 0
        try:
            self._open()
            if lost:
                self._put(b"\n1bit serve: %d bytes are missing here\n" % lost)
                lost = 0
            while written < len(data):
                written += self._put(self._fitting(data, written))
        except OSError as error:
            self._close()
            self._lose(lost + len(data) - written)
            self._retry_at_s = time.monotonic() + self._retry_s
            if not self._trouble:
                self._trouble = True
                self._on_trouble(
                    f"cannot write {self._path}: {error.strerror}; what belongs there is lost "
                    "until it can be written again"
                )
            return
        if self._trouble:
            self._trouble = False
            self._on_trouble(f"{self._path} is written again")

    def _lose(self, count: int) -> None:
        with self._news:
            self._lost_bytes += count

    def _fitting(self, data: bytes, start: int) -> bytes:
        """Return the lines that fit, after turning over where none does."""
        room = self._limit_bytes - self._size_bytes
        if not self._limit_bytes or len(data) - start <= room:
            return data[start:]
        end = data.rfind(b"\n", start, start + max(room, 0)) + 1
        if end > start:
            return data[start:end]
        if self._size_bytes:
            self._turn_over()
            return self._fitting(data, start)
        return data[start : start + self._limit_bytes]  # a line longer than a whole file

    def _put(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            count = os.write(self._fd, rest)
            self._size_bytes += count
            rest = rest[count:]
        return len(data)

    def _open(self) -> None:
        if self._fd >= 0 and not self._is_ours():
            self._close()
        if self._fd < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, _MODE)
            self._size_bytes = os.fstat(self._fd).st_size

    def _is_ours(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def _turn_over(self) -> None:
        self._close()
        numbered = [self._path.with_name(f"{self._path.name}.{n}") for n in range(self._keep + 1)]
        numbered[0] = self._path
        for older, newer in zip(numbered[:0:-1], numbered[-2::-1], strict=True):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if not self._keep:
            self._path.unlink(missing_ok=True)
        self._open()

    def _close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
