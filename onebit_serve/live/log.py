"""Log lines on stderr, from a thread of their own, so that nobody who reads slowly can stop us.

A line is put into a bounded queue and written by one daemon thread. When the reader of our stderr
does not read, lines are dropped and counted, never waited for: an unread pipe must not stop the
front door (a pipe holds 64 KiB on Linux).

The same line said over and over is written five times in ten seconds; the rest is counted, and the
count is said when they are over: a fault that repeats must not fill a disk.

On a terminal a last line below the log shows how far something is. It is drawn here, in a few
bytes, since the libraries that draw better take longer to import than a child takes to start.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
from typing import Literal

import msgspec

from onebit_serve.live.logfile import LogFile

__all__ = ["Level", "Log", "Repeats"]

Level = Literal["debug", "info", "warning", "error"]
_LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
_QUEUE_LINES = 1000
_WINDOW_S = 10.0
_SAME_LINES = 5
_BAR_CELLS = 20
_BAR_EVERY_S = 0.1
_CLEAR = b"\r\033[K"
_TEXTS = 256  # different lines whose repeats are counted at once


class _Bar(msgspec.Struct, frozen=True):
    """What the last line of a terminal says of one thing; empty text takes it away."""

    key: str
    text: str


class _Window(msgspec.Struct):
    """How often one line was said since a moment."""

    since_s: float
    count: int = 0
    last: bytes = b""


class Repeats:
    """Says which lines are repeats too many, and how many there were.

    Args:
        window_s: Seconds over which the same lines are counted.
        limit: How many of them are written.
    """

    def __init__(self, window_s: float = _WINDOW_S, limit: int = _SAME_LINES) -> None:
        self._window_s = window_s
        self._limit = limit
        self._windows: dict[str, _Window] = {}

    def passes(self, text: str, line: bytes, now_s: float) -> bool:
        """Count a line; return whether it is written.

        Args:
            text: What makes it the same as another.
            line: As it would be written.
            now_s: The caller's clock; windows that are over must have been taken by `over`.
        """
        window = self._windows.get(text)
        if window is None:
            if len(self._windows) >= _TEXTS:
                return True  # so many different lines are no repeats
            window = self._windows[text] = _Window(now_s)
        window.count += 1
        window.last = line
        return window.count <= self._limit

    def over(self, now_s: float) -> list[tuple[bytes, int]]:
        """Return the lines whose window is over, and how many of each were not written."""
        ended = [t for t, w in self._windows.items() if w.since_s + self._window_s <= now_s]
        windows = [self._windows.pop(text) for text in ended]
        return [(w.last, w.count - self._limit) for w in windows if w.count > self._limit]

    def next_s(self) -> float | None:
        """Return when a count has to be said, `None` where nothing was held back."""
        held = [w.since_s for w in self._windows.values() if w.count > self._limit]
        return min(held) + self._window_s if held else None


class Log:
    """Writes one line for each thing that happened.

    Args:
        form: `plain`, with the prefix `1bit serve: `, or `json`, one object a line.
        level: The least level that is written.
        fd: Where to write; stderr by default.
        repeats: Which lines are said too often.

    Attributes:
        file: A file that gets the same lines, where there is one.
        dropped: How many lines were lost, since nobody read them.
    """

    def __init__(
        self,
        form: Literal["plain", "json"] = "plain",
        level: Level = "info",
        fd: int | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        self._json = form == "json"
        self._least = _LEVELS.index(level)
        self._fd = sys.stderr.fileno() if fd is None else fd
        self._lines: queue.Queue[tuple[str, bytes] | _Bar | None] = queue.Queue(_QUEUE_LINES)
        self._repeats = Repeats() if repeats is None else repeats
        self._told = 0
        self._draws = form == "plain" and os.isatty(self._fd)
        self._bars: dict[str, str] = {}
        self._drawn_s: dict[str, float] = {}
        self.dropped = 0
        self.file: LogFile | None = None
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
            self._lines.put_nowait((text, line))
        except queue.Full:
            self.dropped += 1

    def debug(self, text: str, /, **fields: object) -> None:
        """Write a line that only somebody who looks for a fault wants."""
        self.say(text, "debug", **fields)

    def warning(self, text: str, /, **fields: object) -> None:
        """Write a line about something that works but not as asked."""
        self.say(text, "warning", **fields)

    def error(self, text: str, /, **fields: object) -> None:
        """Write a line about something that failed."""
        self.say(text, "error", **fields)

    def progress(self, key: str, text: str = "", share: float = 0.0) -> None:
        """Show below the log how far something is, where that is a terminal; it never blocks.

        Args:
            key: What it is about.
            text: What is going on; empty when it is over.
            share: How much of it is done, 0 to 1.
        """
        if not self._draws:
            return
        now_s = time.monotonic()
        if text and now_s < self._drawn_s.get(key, -math.inf) + _BAR_EVERY_S:
            return
        self._drawn_s[key] = now_s
        if text:
            full = min(_BAR_CELLS, max(0, round(share * _BAR_CELLS)))
            text = f"{text} [{'#' * full}{'.' * (_BAR_CELLS - full)}] {share:.0%}"
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(_Bar(key, text))

    def close(self, wait_s: float = 1.0) -> None:
        """Write what is left, for at most so many seconds."""
        try:
            self._lines.put(None, timeout=wait_s)
        except queue.Full:
            return
        self._thread.join(wait_s)
        if self.file is not None:
            self.file.close(wait_s)

    def _write(self) -> None:
        while True:
            due_s = self._repeats.next_s()
            wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
            try:
                said = self._lines.get(timeout=wait_s)
            except queue.Empty:
                self._tell_repeats(time.monotonic())
                continue
            now_s = time.monotonic()
            self._tell_repeats(math.inf if said is None else now_s)
            if self.dropped != self._told:
                dropped, self._told = self.dropped - self._told, self.dropped
                self._put(self._note(f"{dropped} lines were dropped"))
            if said is None:
                if self._bars:
                    self._send(_CLEAR)
                return
            if isinstance(said, _Bar):
                self._draw(said)
                continue
            text, line = said
            if self._repeats.passes(text, line, now_s):
                self._put(line)

    def _tell_repeats(self, now_s: float) -> None:
        for line, count in self._repeats.over(now_s):
            if self._json:
                record = {**msgspec.json.decode(line), "repeated": count}
                self._put(msgspec.json.encode(record) + b"\n")
            else:
                self._put(line[:-1] + b" (repeated %d times)\n" % count)

    def _note(self, text: str) -> bytes:
        if self._json:
            record = {"time": round(time.time(), 3), "level": "warning", "message": text}
            return msgspec.json.encode(record) + b"\n"
        return f"1bit serve: {text}\n".encode()

    def _draw(self, bar: _Bar) -> None:
        if bar.text:
            self._bars[bar.key] = bar.text
        elif self._bars.pop(bar.key, None) is None:
            return
        self._send(_CLEAR + self._last_line())

    def _last_line(self) -> bytes:
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(self._fd).columns or 80
            return "  ".join(self._bars.values())[: columns - 1].encode(errors="replace")
        return b""

    def _put(self, line: bytes) -> None:
        if self.file is not None:
            self.file.write(line)
        self._send(_CLEAR + line + self._last_line() if self._bars else line)

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]
