"""One client's connection: requests are read from it one after the other, answers written to it.

A connection is refused for good at the first request that breaks the rules: one answer, then it is
closed, and nothing that follows on it is looked at. What is bounded, beside other servers' bounds:

    head             64 KiB, 10 s from its first byte     (nginx: 32 KiB, 60 s; Node.js: 16 KiB)
    body             `max_body_bytes`, 30 s between bytes (nginx: 60 s)
    idle connection  75 s                                 (nginx: 75 s)
"""

from __future__ import annotations

import math
import socket
import time

import trio

from onebit_serve.core.http import (
    BadRequestError,
    ChunkedBody,
    RequestHead,
    parse_head,
    too_large,
)
from onebit_serve.core.wire import Refusal
from onebit_serve.live.upstream import send_all

__all__ = ["Connection", "LeftError"]

_BLOCK_BYTES = 65536
_HEAD_LIMIT_BYTES = 65536
_HEAD_LIMIT_S = 10.0
_BODY_GAP_S = 30.0
_IDLE_LIMIT_S = 75.0
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20
_UNAUTHORIZED = 401
_REASONS = {
    200: b"OK",
    202: b"Accepted",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    413: b"Content Too Large",
    417: b"Expectation Failed",
    429: b"Too Many Requests",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    505: b"HTTP Version Not Supported",
}
_TLS_HELLO = b"\x16\x03"  # a handshake record of TLS 1.x (RFC 8446, section 5.1)
_NO_HEAD = parse_head(b"GET / HTTP/1.1\r\nHost: -\r\nConnection: close\r\n\r\n")


class LeftError(Exception):
    """The client left in the middle of a request."""


class Connection:
    """HTTP/1.1 on one socket.

    Args:
        sock: The socket, non-blocking.
        scope: Cancelled when the client is gone or late.
        max_body_bytes: Largest body; 0 is no limit.

    Attributes:
        due_s: When the client must have done what is waited for, on the monotonic clock.
        idle: Whether it waits for a request of which no byte has come.
        head: The head of the request that was read last, `None` where it could not be parsed.
    """

    def __init__(self, sock: socket.socket, scope: trio.CancelScope, max_body_bytes: int) -> None:
        self.sock = sock
        self.scope = scope
        self.due_s = math.inf
        self.idle = True
        self.head: RequestHead | None = None
        self._max_body_bytes = max_body_bytes
        self._buffer = b""
        self._chunked = False

    async def read(self) -> tuple[RequestHead, bytes] | None:
        """Return the next request, or `None` when the client has no more.

        Raises:
            BadRequestError: It breaks the rules; `refuse` it and close the connection.
            LeftError: The client left before its body was whole.
        """
        self.head = None
        raw = await self._read_head()
        if raw is None:
            return None
        head = self.head = parse_head(raw)
        body = b"" if head.content_length == 0 else await self._read_body(head)
        self.due_s = math.inf
        return head, body

    def _allow(self, seconds: float) -> None:
        self.due_s = time.monotonic() + seconds

    async def _receive(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                return self.sock.recv(_BLOCK_BYTES)
            except BlockingIOError:
                continue

    async def _read_head(self) -> bytes | None:
        self._allow(_IDLE_LIMIT_S)
        self.idle = True
        self._buffer = self._buffer.lstrip(b"\r\n")
        while not self._buffer:
            data = await self._receive()
            if not data:
                return None
            self._buffer = data.lstrip(b"\r\n")
        self.idle = False
        self._allow(_HEAD_LIMIT_S)
        while (end := self._buffer.find(b"\r\n\r\n") + 4) < 4:  # noqa: PLR2004 - not found
            if len(self._buffer) > _HEAD_LIMIT_BYTES:
                raise BadRequestError(400, f"the head is larger than {_HEAD_LIMIT_BYTES} bytes")
            if self._buffer.startswith(_TLS_HELLO):
                raise BadRequestError(400, "this is TLS, and what is spoken here is http://")
            if b"\n\n" in self._buffer or b"\n\r\n" in self._buffer:
                raise BadRequestError(400, "malformed request head: a line does not end with CR LF")
            data = await self._receive()
            if not data:
                return None
            self._buffer += data
        if end > _HEAD_LIMIT_BYTES:
            raise BadRequestError(400, f"the head is larger than {_HEAD_LIMIT_BYTES} bytes")
        raw, self._buffer = self._buffer[:end], self._buffer[end:]
        return raw

    async def _read_body(self, head: RequestHead) -> bytes:
        length, limit = head.content_length, self._max_body_bytes
        if length is not None and limit and length > limit:
            raise BadRequestError(413, too_large(limit))
        if head.expects_continue and not self._buffer:
            await send_all(self.sock, b"HTTP/1.1 100 Continue\r\n\r\n")
        if length is None:
            return await self._read_chunks(limit)
        if len(self._buffer) >= length:
            body, self._buffer = self._buffer[:length], self._buffer[length:]
            return body
        parts, missing = [self._buffer], length - len(self._buffer)
        self._buffer = b""
        while missing > 0:
            data = await self._receive_body()
            parts.append(data[:missing])
            self._buffer = data[missing:]
            missing -= len(data)
        return b"".join(parts)

    async def _read_chunks(self, limit: int) -> bytes:
        chunks = ChunkedBody(limit)
        data, self._buffer = self._buffer, b""
        while True:
            chunks.feed(data)
            if chunks.complete:
                break
            data = await self._receive_body()
        if chunks.followed:
            raise BadRequestError(400, "nothing may follow a chunked body before its answer")
        return chunks.body()

    async def _receive_body(self) -> bytes:
        self._allow(_BODY_GAP_S)
        data = await self._receive()
        if not data:
            raise LeftError
        return data

    async def answer(
        self,
        head: RequestHead,
        status: int,
        body: bytes,
        *,
        kind: bytes = b"application/json; charset=utf-8",
        lines: bytes = b"",
    ) -> bool:
        """Send an answer of ours; return whether the connection goes on.

        Args:
            head: The request's head.
            status: HTTP status.
            body: The body.
            kind: Its content type.
            lines: More header lines, each with its CR LF.
        """
        go_on = head.keep_alive and not head.http_1_0
        first = b"HTTP/1.1 %d %s\r\n" % (status, _REASONS.get(status, b"Error"))
        parts = [first, lines]
        if status != 204:  # noqa: PLR2004 - No Content has none
            parts.append(b"Content-Type: %s\r\nContent-Length: %d\r\n" % (kind, len(body)))
        parts.append(b"\r\n" if go_on else b"Connection: close\r\n\r\n")
        if head.method != "HEAD":
            parts.append(body)
        await send_all(self.sock, b"".join(parts))
        return go_on

    async def begin_chunks(self, head: RequestHead, *, kind: bytes, lines: bytes) -> None:
        """Send the head of an answer of ours that has no known end; the connection ends with it."""
        first = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n" % kind
        coding = b"" if head.http_1_0 else b"Transfer-Encoding: chunked\r\n"
        self._chunked = not head.http_1_0
        await send_all(self.sock, b"".join((first, lines, coding, b"Connection: close\r\n\r\n")))

    async def send_chunk(self, data: bytes) -> None:
        """Send the next piece of such an answer; an empty one is its end."""
        framed = b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data
        await send_all(self.sock, framed)

    async def answer_refusal(self, head: RequestHead, refusal: Refusal, lines: bytes = b"") -> bool:
        """Send a refusal in OpenAI's envelope; return whether the connection goes on."""
        if refusal.status == _UNAUTHORIZED:
            lines += b"WWW-Authenticate: Bearer\r\n"
        if refusal.retry_after_s is not None:
            lines += b"Retry-After: %d\r\n" % refusal.retry_after_s
        return await self.answer(head, refusal.status, refusal.body(), lines=lines)

    async def refuse(self, error: BadRequestError, lines: bytes) -> None:
        """Answer a request that broke the rules, and see that the answer arrives.

        What the client still sends is read and thrown away for a moment: closing on unread bytes
        would reset the connection, and the answer with it.

        Args:
            error: What is wrong with it.
            lines: More header lines of the answer, each with its CR LF.
        """
        self._allow(_LINGER_S)
        refusal = Refusal(error.status, error.reason, "bad_request")
        await self.answer_refusal(_NO_HEAD, refusal, lines)
        self.sock.shutdown(socket.SHUT_WR)
        left_bytes = _LINGER_BYTES
        while left_bytes > 0:
            data = await self._receive()
            if not data:
                return
            left_bytes -= len(data)
