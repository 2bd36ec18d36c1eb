"""HTTP/1.1 to a child on loopback: raw sockets, llhttp for framing, a small pool.

The relay and the supervisor's own requests (health, warm-up) share this client. It knows one host,
never a proxy: `HTTP_PROXY` and its friends are not read. Sockets are non-blocking with Nagle off;
waiting before each `recv` is both the checkpoint and cheaper than trio's streams (a quarter of the
CPU a chunk, measured).
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import httptools
import trio

from onebit_serve.core.http import Reply, ResponseFramer, request_bytes, response_head

__all__ = [
    "HOST",
    "DeafError",
    "GoneError",
    "Upstream",
    "exchange",
    "open_stream",
    "receive",
    "send_all",
]

HOST = "127.0.0.1"
_BLOCK_BYTES = 65536
_HEAD_LIMIT_BYTES = 65536
_IDLE_LIMIT_S = 4.0  # llama-server closes an idle connection after 5 s (b10068, measured)
_IDLE_CONNECTIONS = 64


class GoneError(Exception):
    """The backend closed, refused or garbled the connection.

    Args:
        reason: How, for a person.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DeafError(GoneError):
    """Nobody listens on the backend's port; one that was told to end by others closes it first."""


async def receive(sock: socket.socket) -> bytes:
    """Return the next bytes of a socket, empty at its end; a reset counts as an end."""
    while True:
        await trio.lowlevel.wait_readable(sock)
        try:
            return sock.recv(_BLOCK_BYTES)
        except BlockingIOError:
            continue
        except OSError:
            return b""


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Send all of it; it waits only when the socket's buffer is full.

    Raises:
        OSError: The other side is gone.
    """
    try:
        sent = sock.send(data)
    except BlockingIOError:
        sent = 0
    if sent == len(data):
        return
    rest = memoryview(data)[sent:]
    while rest:
        await trio.lowlevel.wait_writable(sock)
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            continue


class Upstream:
    """Connections to one child: made when needed, kept for the next request where it may be.

    Args:
        port: The child's port on loopback.
        key: Its API key, or empty.

    Attributes:
        host: Value of `Host` for it.
        key_line: The header line with its API key, or empty.
    """

    def __init__(self, port: int, key: str = "") -> None:
        self.port = port
        self.key_line = b"authorization: Bearer %s\r\n" % key.encode() if key else b""
        self.host = b"%s:%d" % (HOST.encode(), port)
        self._idle: list[tuple[float, socket.socket]] = []
        self._closed = False

    async def connect(self) -> socket.socket:
        """Open a fresh connection.

        Raises:
            GoneError: Nobody listens there.
        """
        try:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor is left
            raise GoneError(f"no connection to port {self.port}: {error}") from None
        try:
            sock.setblocking(False)  # noqa: FBT003
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                sock.connect((HOST, self.port))
            except BlockingIOError:
                await trio.lowlevel.wait_writable(sock)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, "connect") from None
        except OSError as error:
            sock.close()
            kind = DeafError if error.errno == errno.ECONNREFUSED else GoneError
            raise kind(f"no connection to port {self.port}: {error}") from None
        except BaseException:
            sock.close()
            raise
        return sock

    async def listens(self) -> bool:
        """Tell whether somebody takes connections there."""
        try:
            sock = await self.connect()
        except DeafError:
            return False
        except GoneError:
            return True
        sock.close()
        return True

    def reuse(self) -> socket.socket | None:
        """Return a kept connection, the last used first; it may have been closed meanwhile."""
        fresh_s = time.monotonic() - _IDLE_LIMIT_S
        while self._idle:
            since_s, sock = self._idle.pop()
            if since_s > fresh_s:
                return sock
            sock.close()
        return None

    def keep(self, sock: socket.socket) -> None:
        """Keep a connection whose last reply is complete."""
        if self._closed or len(self._idle) >= _IDLE_CONNECTIONS:
            sock.close()
        else:
            self._idle.append((time.monotonic(), sock))

    def close(self) -> None:
        """Close what is kept, and keep nothing from now on."""
        self._closed = True
        for _, sock in self._idle:
            sock.close()
        self._idle.clear()


class Stream:
    """The reply to one request, its body decoded piece by piece.

    Args:
        status: HTTP status.
        sock: The connection.
        framer: Which has seen the head already.
        to_the_end: Whether the body ends with the connection, for want of length and chunks.
    """

    def __init__(
        self, status: int, sock: socket.socket, framer: ResponseFramer, *, to_the_end: bool
    ) -> None:
        self.status = status
        self._sock = sock
        self._framer = framer
        self._to_the_end = to_the_end

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes.

        Raises:
            GoneError: The connection ended before the reply did.
        """
        framer = self._framer
        while True:
            piece = framer.take_body()
            if piece:
                yield piece
            if framer.complete:
                return
            data = await receive(self._sock)
            if not data:
                if self._to_the_end:
                    return
                raise GoneError("the backend closed the connection in mid-reply")
            _feed(framer, data)

    async def read(self) -> bytes:
        """Return the rest of the body.

        Raises:
            GoneError: The connection ended before the reply did.
        """
        async with aclosing(self.pieces()) as pieces:
            return b"".join([piece async for piece in pieces])


def _feed(framer: ResponseFramer, data: bytes) -> None:
    try:
        framer.feed(data)
    except httptools.HttpParserError as error:
        raise GoneError(f"the backend's reply is no HTTP: {error}") from None


@asynccontextmanager
async def open_stream(
    port: int, method: str, target: str, body: bytes = b"", key: str = ""
) -> AsyncIterator[Stream]:
    """Send one request of the supervisor's own on a connection of its own, and read its head.

    Args:
        port: The child's port.
        method: The method.
        target: Path and query.
        body: JSON, or empty.
        key: The child's API key, or empty.

    Raises:
        GoneError: No connection, or it ended before the head was whole.
    """
    upstream = Upstream(port, key)
    kind = b"content-type: application/json\r\n" if body else b""
    lines = kind + upstream.key_line
    request = request_bytes(method, target.encode(), lines, body, host=upstream.host, close=True)
    sock = await upstream.connect()
    try:
        framer = ResponseFramer(keep_body=True)
        try:
            await send_all(sock, request)
        except OSError as error:
            raise GoneError(f"the backend closed the connection: {error}") from None
        received = b""
        while not framer.head_complete:
            data = await receive(sock)
            if not data:
                raise GoneError("the backend closed the connection without a reply")
            _feed(framer, data)
            received += data
        try:
            head = response_head(received.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        except ValueError as error:
            raise GoneError(f"the backend's reply is no HTTP: {error}") from None
        to_the_end = not head.chunked and head.length is None
        yield Stream(framer.status, sock, framer, to_the_end=to_the_end)
    finally:
        sock.close()


async def exchange(port: int, method: str, target: str, body: bytes = b"", key: str = "") -> Reply:
    """Send one request and return its whole reply; arguments and errors as `open_stream`."""
    async with open_stream(port, method, target, body, key) as stream:
        return Reply(stream.status, await stream.read())
