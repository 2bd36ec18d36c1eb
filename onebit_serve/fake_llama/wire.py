"""HTTP/1.1 as llama-server speaks it: one thread a connection, blocking sockets."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from itertools import pairwise
from typing import Any

from .knobs import Chunks

__all__ = ["Connection", "GoneError", "Request", "dumps"]

HEAD_LIMIT_BYTES = 64 * 1024
REQUESTS_A_CONNECTION = 100
FIRST_ERROR = 400
FIRST_OF_MANY = 0xC0  # the first byte of a character of several bytes in UTF-8
JSON_TYPE = "application/json; charset=utf-8"
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    413: "Payload Too Large",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
}
_RDHUP = getattr(select, "POLLRDHUP", 0)
_GONE = _RDHUP | select.POLLHUP | select.POLLERR


class GoneError(Exception):
    """The connection is over, from either side."""


def dumps(value: Any) -> bytes:
    """Return JSON as nlohmann::json writes it: compact, UTF-8 kept."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Request:
    """One request, read whole.

    Args:
        method: As sent.
        target: As sent.
        headers: Names in lower case; of repeated ones the last.
        lines: All header lines, as sent.
        body: The body, de-chunked.
    """

    def __init__(
        self, method: str, target: str, headers: dict[str, str], lines: list[str], body: bytes
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.lines = lines
        self.body = body
        self.path, _, query = target.partition("?")
        self.query = dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair)


class Connection:
    """One client's connection.

    Args:
        sock: The accepted socket.
        number: Its place among all connections, from 1.
        keep_s: Seconds an idle connection is kept; 0 closes after each answer.
        chunks: Where streamed bytes are cut.
        deaf: A client that is gone is written to all the same.
    """

    def __init__(
        self, sock: socket.socket, number: int, keep_s: float, chunks: Chunks, *, deaf: bool
    ) -> None:
        self._deaf = deaf
        self.number = number
        self._sock = sock
        self._keep_s = keep_s
        self._chunks = chunks
        self._held: list[bytes] = []
        self._data = b""
        self._served = 0
        self._origin = ""
        self._to_head = False
        self._close = False
        self._left = False
        self.streaming = False
        self.written_at: list[float] = []
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # reading

    def read(self) -> Request | None:
        """Return the next request; `None` where there is none and the connection is over."""
        self._sock.settimeout(self._keep_s or 5.0)
        try:
            while b"\r\n\r\n" not in self._data:
                if len(self._data) > HEAD_LIMIT_BYTES:
                    return None
                self._receive()
            head, _, self._data = self._data.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").lstrip("\r\n").split("\r\n")
            method, target, version = first.split(" ", 2)
            headers = {}
            for line in lines:
                name, _, value = line.partition(":")
                headers[name.strip().lower()] = value.strip()
            if headers.get("expect", "").lower() == "100-continue":
                self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._sock.settimeout(600)
            body = self._body(headers)
        except (OSError, ValueError, GoneError):
            return None
        self._served += 1
        self._origin = headers.get("origin", "")
        self._to_head = method == "HEAD"
        self._close = (
            headers.get("connection", "").lower() == "close"
            or self._keep_s == 0
            or version != "HTTP/1.1"
            or self._served >= REQUESTS_A_CONNECTION
        )
        return Request(method, target, headers, lines, body)

    def _receive(self) -> None:
        data = self._sock.recv(65536)
        if not data:
            raise GoneError
        self._data += data

    def _exactly(self, size: int) -> bytes:
        parts, have = [self._data], len(self._data)
        while have < size:
            data = self._sock.recv(262144)
            if not data:
                raise GoneError
            parts.append(data)
            have += len(data)
        whole = b"".join(parts)
        self._data = whole[size:]
        return whole[:size]

    def _line(self) -> bytes:
        while b"\r\n" not in self._data:
            self._receive()
        line, _, self._data = self._data.partition(b"\r\n")
        return line

    def _body(self, headers: dict[str, str]) -> bytes:
        if "chunked" not in headers.get("transfer-encoding", "").lower():
            return self._exactly(int(headers.get("content-length", "0")))
        parts = []
        while size := int(self._line().split(b";")[0], 16):
            parts.append(self._exactly(size))
            self._line()
        while self._line():
            pass
        return b"".join(parts)

    # waiting

    def gone(self, seconds: float) -> bool:
        """Wait for so long, or until the client leaves; tell whether it has left."""
        if self._left:
            threading.Event().wait(seconds)
            return True
        poll = select.poll()
        poll.register(self._sock, _RDHUP or select.POLLIN)
        until = time.monotonic() + seconds
        while True:
            rest_ms = max(0.0, until - time.monotonic()) * 1000
            events = poll.poll(rest_ms)
            if events and events[0][1] & _GONE:
                self._left = True
            elif events and not _RDHUP:
                with contextlib.suppress(OSError):
                    self._left = not self._sock.recv(1, socket.MSG_PEEK)
                if not self._left:
                    time.sleep(0.005)
            if self._left or time.monotonic() >= until:
                return self._left

    @property
    def left(self) -> bool:
        """Whether the client was seen to have left."""
        return self._left

    # writing

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError:
            if not self._deaf:
                raise GoneError from None

    def _head(self, status: int, fields: list[str]) -> bytes:
        keep = "Connection: close" if self._close else "Keep-Alive: timeout=5, max=100"
        lines = [
            f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}",
            keep,
            *fields,
            "Server: llama.cpp",
            f"Access-Control-Allow-Origin: {self._origin}",
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def answer(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = JSON_TYPE,
        fields: tuple[str, ...] = (),
    ) -> None:
        """Send a whole answer; errors close the connection, as there."""
        self._close = self._close or status >= FIRST_ERROR
        lines = [f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *fields]
        self._send(self._head(status, lines) + (b"" if self._to_head else body))

    def start_stream(self) -> None:
        """Send the head of an event stream."""
        self.streaming = True
        lines = ["Transfer-Encoding: chunked", "X-Accel-Buffering: no"]
        self._send(self._head(200, [*lines, "Content-Type: text/event-stream"]))

    def event(self, value: Any, name: str = "") -> None:
        """Send one event; a value that is bytes goes as it is."""
        data = value if isinstance(value, bytes) else dumps(value)
        frame = (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
        if self._chunks.kind == "join":
            self._held.append(frame)
            if len(self._held) < self._chunks.size:
                return
            frame, self._held = b"".join(self._held), []
        for part in self._cut(frame):
            self._send(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.written_at.append(time.time())

    def _cut(self, frame: bytes) -> list[bytes]:
        if self._chunks.kind == "bytes":
            size = self._chunks.size
            return [frame[at : at + size] for at in range(0, len(frame), size)]
        if self._chunks.kind == "char":
            marks = [
                0,
                *(at + 1 for at, byte in enumerate(frame) if byte >= FIRST_OF_MANY),
                len(frame),
            ]
            return [frame[start:end] for start, end in pairwise(marks) if start < end]
        return [frame]

    def end_stream(self) -> None:
        """Send the last chunk, in two pieces; the connection closes after it, unannounced."""
        if self._held:
            part = b"".join(self._held)
            self._held = []
            self._send(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self._send(b"0\r\n")
        self._send(b"\r\n")
        self._close = True

    def cut(self) -> None:
        """Say that no more comes; the client's own end stays."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self, *, reset: bool = False) -> None:
        """Close the connection, with a reset where asked."""
        with contextlib.suppress(OSError):
            if reset:
                linger = struct.pack("ii", 1, 0)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    @property
    def over(self) -> bool:
        """Whether no further request is read from it."""
        return self._close
