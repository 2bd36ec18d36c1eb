"""The front door: accepts connections and lets each have its requests answered.

Each connection has one task, and whatever happens to it stays in there. `drain` stops accepting and
lets what runs come to its end.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import trio

from onebit_serve.core.http import BadRequestError
from onebit_serve.live.connection import Connection, LeftError
from onebit_serve.live.desk import Desk
from onebit_serve.live.hangup import HangUpWatch
from onebit_serve.live.log import Log
from onebit_serve.live.relay import ClientGoneError, CutError

__all__ = ["Door"]

_CONNECTIONS = 1000  # nginx: 512 a worker
_ACCEPT_PAUSE_S = 0.1
_LATE_LOOK_S = 1.0


class Door:
    """Lets clients in.

    Args:
        listener: Bound and listening.
        max_body_bytes: Largest body of a request; 0 is no limit.
        make_desk: Makes what answers, given the nursery of the door.
        log: Where to say what happened.
    """

    def __init__(
        self,
        listener: socket.socket,
        max_body_bytes: int,
        make_desk: Callable[[trio.Nursery], Desk],
        log: Log,
    ) -> None:
        self._listener = listener
        self._max_body_bytes = max_body_bytes
        self._make_desk = make_desk
        self._log = log
        self._watch = HangUpWatch()
        self._connections: set[Connection] = set()
        self._draining = False
        self._empty = trio.Event()

    async def run(self) -> None:
        """Accept connections until drained or cancelled."""
        self._listener.setblocking(False)  # noqa: FBT003
        async with trio.open_nursery() as nursery:
            desk = self._make_desk(nursery)
            nursery.start_soon(self._watch.run)
            nursery.start_soon(self._close_late_ones)
            with suppress(trio.ClosedResourceError):  # by `drain`
                while True:
                    await trio.lowlevel.wait_readable(self._listener)
                    await self._accept_all(nursery, desk)

    async def drain(self, limit_s: float) -> int:
        """Stop accepting, let the requests that run come to their end, and close the rest.

        Args:
            limit_s: Seconds to wait for them.

        Returns:
            How many requests were still running at the limit.
        """
        self._draining = True
        trio.lowlevel.notify_closing(self._listener)
        self._listener.close()
        for connection in self._connections:
            if connection.idle:
                connection.scope.cancel()
        with trio.move_on_after(limit_s):
            while self._connections:
                self._empty = trio.Event()
                await self._empty.wait()
        return len(self._connections)

    async def _accept_all(self, nursery: trio.Nursery, desk: Desk) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._log.error(f"cannot take a connection: {error.strerror}")
                    await trio.sleep(_ACCEPT_PAUSE_S)
                    return
                continue  # that client went away before we came
            if len(self._connections) >= _CONNECTIONS:
                desk.counters.connections_refused += 1
                sock.close()
                continue
            sock.setblocking(False)  # noqa: FBT003
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nursery.start_soon(self._serve, sock, desk)

    async def _serve(self, sock: socket.socket, desk: Desk) -> None:
        """Serve one connection; whatever happens to it stays in here."""
        fd = sock.fileno()
        with trio.CancelScope() as scope:
            connection = Connection(sock, scope, self._max_body_bytes)
            self._connections.add(connection)
            desk.counters.connections += 1
            try:
                self._watch.watch(fd, scope)
                await self._answer_all(connection, desk)
            except (OSError, LeftError, ClientGoneError, CutError):
                pass  # nobody is left to tell
            except Exception as error:  # noqa: BLE001 - one connection must not end the others
                self._log.error(f"a connection failed: {type(error).__name__}: {error}")
            finally:
                self._connections.discard(connection)
                desk.counters.connections -= 1
                self._watch.forget(fd)
                sock.close()
                if not self._connections:
                    self._empty.set()

    async def _answer_all(self, connection: Connection, desk: Desk) -> None:
        while not self._draining:
            try:
                request = await connection.read()
            except BadRequestError as error:
                desk.counters.refuse("bad_request")
                await connection.refuse(error, desk.id_line(connection.head))
                return
            if request is None or not await desk.answer(connection, *request):
                return

    async def _close_late_ones(self) -> None:
        """Close connections that are past what they may take for the step they are in.

        One look a second at all of them: a deadline of trio's for each step costs more than the
        parsing of the head it guards.
        """
        while True:
            await trio.sleep(_LATE_LOOK_S)
            now_s = time.monotonic()
            for connection in self._connections:
                if connection.due_s < now_s:
                    connection.scope.cancel()
