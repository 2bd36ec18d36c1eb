"""The right to send a request to a child, and what stands in for it while there is none."""

from __future__ import annotations

import collections
import contextlib
import socket
import time
from typing import Protocol

import trio

from onebit_serve.core.wire import Refusal
from onebit_serve.live.episode import Episode
from onebit_serve.live.prompts import TAIL_BLOCKS

__all__ = ["Keeper", "Lease", "RefusedError", "ReplacedError", "Waiter"]

_EXIT_NOTICE_S = 0.25
_SLOW_EXIT_S = 5.0  # a loaded machine, a llama-server that frees its memory


class Keeper(Protocol):
    """Who gives leases and learns what becomes of them."""

    def note_deaf(self, episode: Episode) -> None:
        """Learn that nobody listens on the child's port although it runs."""

    def note_answer(self, episode: Episode, status: int, *, fatal: bool) -> None:
        """Learn how the child answered."""

    def take_back(self, lease: Lease, episode: Episode, *, whole: bool) -> None:
        """Learn that a request has ended."""


class RefusedError(Exception):
    """A request cannot be had answered by this backend.

    Args:
        refusal: What to tell the client.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class ReplacedError(Exception):
    """Another backend has taken this one's place in the house: ask that one."""


class Lease:
    """The right to send one request to a child; it ends with the last byte of the reply.

    Attributes:
        upstream: The child's connections.
        sock: The connection in use, while there is one.
        blocks: Blocks of the reply's body received so far.
        size_bytes: Bytes in them.
        tail: The last of them, where warm prompts or shapes make it worth a look.
        answered_s: When the head of the reply came, on the monotonic clock.

    Args:
        keeper: Who gave it, and counts it.
        episode: The child it is for.
        wants_tail: Whether the end of the reply is worth a look.
    """

    __slots__ = (
        "_episode",
        "_keeper",
        "answered_s",
        "blocks",
        "size_bytes",
        "sock",
        "tail",
        "upstream",
    )

    def __init__(self, keeper: Keeper, episode: Episode, *, wants_tail: bool) -> None:
        self._keeper = keeper
        self._episode = episode
        self.upstream = episode.upstream
        self.sock: socket.socket | None = None
        self.blocks = 0
        self.size_bytes = 0
        self.tail = collections.deque[bytes](maxlen=TAIL_BLOCKS) if wants_tail else None
        self.answered_s: float | None = None

    def alive(self) -> bool:
        """Whether the child this lease was given for still runs and is meant to serve."""
        return not self._episode.leaving.is_set()

    async def is_over(self) -> bool:
        """Tell whether the child that failed a request is gone, or is being replaced.

        A closed connection precedes the news of an exit by a moment. One that goes on running, as a
        child that others told to end does for a while, but no longer listens, is to be replaced.
        """
        if await self._leaves(_EXIT_NOTICE_S):
            return True
        if await self.upstream.listens():
            return False
        self._keeper.note_deaf(self._episode)
        return await self._leaves(_SLOW_EXIT_S)

    async def _leaves(self, limit_s: float) -> bool:
        with trio.move_on_after(limit_s):
            await self._episode.leaving.wait()
        return self._episode.leaving.is_set()

    def cut(self) -> None:
        """End the reply now, as if the child had: nothing more comes on its connection."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def note_status(self, status: int, *, fatal: bool) -> None:
        """Note how the child answered.

        Args:
            status: HTTP status.
            fatal: Whether it said something that a healthy backend does not say.
        """
        self.answered_s = time.monotonic()
        self._keeper.note_answer(self._episode, status, fatal=fatal)

    def end(self, *, whole: bool) -> None:
        """Give the right back.

        Args:
            whole: Whether the reply came to its end; else the slot may be busy still.
        """
        self._keeper.take_back(self, self._episode, whole=whole)


class Waiter:
    """A request in line.

    Args:
        by: Who picked the backend for it: `laya`, or nothing.
    """

    def __init__(self, by: str = "") -> None:
        self.by = by
        self.moved = trio.Event()
        self.lease: Lease | None = None
        self.refusal: Refusal | None = None
