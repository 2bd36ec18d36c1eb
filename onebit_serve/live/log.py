"""Log lines on stderr, from a thread of their own, so that nobody who reads slowly can stop us.

A line is put into a bounded queue and written by one daemon thread. When the reader of our stderr
does not read, lines are dropped and counted, never waited for: an unread pipe must not stop the
front door (a pipe holds 64 KiB on Linux).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from typing import Literal

import msgspec

__all__ = ["Level", "Log"]

Level = Literal["debug", "info", "warning", "error"]
_LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
_QUEUE_LINES = 1000


class Log:
    """Writes one line for each thing that happened.

    Args:
        form: `plain`, with the prefix `1bit serve: `, or `json`, one object a line.
        level: The least level that is written.
        fd: Where to write; stderr by default.
    """

    def __init__(
        self, form: Literal["plain", "json"] = "plain", level: Level = "info", fd: int | None = None
    ) -> None:
        self._json = form == "json"
        self._least = _LEVELS.index(level)
        self._fd = sys.stderr.fileno() if fd is None else fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def say(self, text: str, level: Level = "info", /, **fields: object) -> None:
        """Write one line; it never blocks.

        Args:
            text: The line without prefix; line ends in it become spaces.
            level: How much it matters.
            fields: What a program would want of it, for the JSON form.
        """
        if _LEVELS.index(level) < self._least:
            return
        text = " ".join(text.splitlines())
        if self._json:
            record = {"time": round(time.time(), 3), "level": level, "message": text, **fields}
            line = msgspec.json.encode(record) + b"\n"
        else:
            line = f"1bit serve: {text}\n".encode(errors="backslashreplace")
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def debug(self, text: str, /, **fields: object) -> None:
        """Write a line that only somebody who looks for a fault wants."""
        self.say(text, "debug", **fields)

    def warning(self, text: str, /, **fields: object) -> None:
        """Write a line about something that works but not as asked."""
        self.say(text, "warning", **fields)

    def error(self, text: str, /, **fields: object) -> None:
        """Write a line about something that failed."""
        self.say(text, "error", **fields)

    def close(self, wait_s: float = 1.0) -> None:
        """Write what is left, for at most so many seconds."""
        try:
            self._lines.put(None, timeout=wait_s)
        except queue.Full:
            return
        self._thread.join(wait_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                line = b"1bit serve: %d lines were dropped\n" % dropped + line
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                continue
