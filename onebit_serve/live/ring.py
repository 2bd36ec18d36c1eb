"""The last lines a backend printed, over all its lives, and readers that follow them.

A ring of whole lines outlives the children that fill it, so that what a backend said before it died
can still be read while the next one loads. A reader that is slower than the lines loses some and is
told how many: nobody waits for it, and nothing is kept for it.
"""

from __future__ import annotations

import collections
from itertools import islice

import trio

__all__ = ["Follower", "LineRing"]

_LINES = 2000
_LINE_LIMIT_BYTES = 2000


class LineRing:
    """Keeps the last lines.

    Args:
        lines: How many; a line is cut at 2,000 bytes, so this bounds the memory.
    """

    def __init__(self, lines: int = _LINES) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=lines)
        self._total = 0  # lines since the beginning; it numbers them
        self._rest = b""
        self._news = trio.Event()
        self._awaited = False
        self._closed = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the output."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:_LINE_LIMIT_BYTES]
        self._add(lines)

    def end_line(self) -> None:
        """End a line that has no end: its child is gone."""
        if self._rest:
            self._add([self._rest])
            self._rest = b""

    def close(self) -> None:
        """End every follower after the last line."""
        self.end_line()
        self._closed = True
        self._news.set()

    def last(self, count: int) -> bytes:
        """Return up to so many of the last lines, each with its line end."""
        return self._since(self._total - min(count, len(self._lines)))

    def follow(self, count: int) -> Follower:
        """Return a reader that begins with up to so many of the last lines."""
        return Follower(self, self._total - min(count, len(self._lines)))

    def _add(self, lines: list[bytes]) -> None:
        self._lines.extend(line[:_LINE_LIMIT_BYTES].rstrip(b"\r") for line in lines)
        self._total += len(lines)
        if self._awaited and lines:
            self._awaited = False
            self._news.set()

    def _since(self, number: int) -> bytes:
        first = self._total - len(self._lines)
        kept = islice(self._lines, max(0, number - first), None)
        return b"".join(line + b"\n" for line in kept)

    async def _next(self, number: int) -> tuple[bytes, int]:
        """Return all lines from one number on, and the number after them; wait for the first."""
        while self._total == number and not self._closed:
            if self._news.is_set():
                self._news = trio.Event()
            self._awaited = True
            await self._news.wait()
        lost = self._total - len(self._lines) - number
        text = self._since(number)
        if lost > 0:
            text = b"1bit serve: %d lines are missing here\n" % lost + text
        return text, self._total


class Follower:
    """Reads a ring from some line on; `async for` ends when the ring is closed."""

    def __init__(self, ring: LineRing, number: int) -> None:
        self._ring = ring
        self._number = number

    def __aiter__(self) -> Follower:
        """Return itself."""
        return self

    async def __anext__(self) -> bytes:
        """Return the lines that came since the last time; wait until there is one."""
        text, self._number = await self._ring._next(self._number)  # noqa: SLF001 - its own ring
        if not text:
            raise StopAsyncIteration
        return text
