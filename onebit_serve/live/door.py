"""The front door: HTTP/1.1 on trio, one task a connection, one request after the other on each.

A connection is refused for good at the first request that breaks the rules: one answer, then it is
closed, and nothing that follows on it is looked at. What is bounded, and after whom:

    head             64 KiB, 10 s from its first byte     (nginx: 32 KiB, 60 s; Node.js: 16 KiB)
    body             `max_body_bytes`, 30 s between bytes (nginx: 60 s)
    idle connection  75 s                                 (nginx: 75 s)
    slow reader      600 s without taking a byte
    connections      1,000                                (nginx: 512 a worker)
"""

from __future__ import annotations

import errno
import math
import socket
import time

import msgspec
import trio

from onebit_serve.core import route, view, wire
from onebit_serve.core.config import Server
from onebit_serve.core.http import (
    BadRequestError,
    ChunkedBody,
    RequestHead,
    parse_head,
    too_large,
)
from onebit_serve.core.wire import Refusal
from onebit_serve.live.hangup import HangUpWatch
from onebit_serve.live.log import Log
from onebit_serve.live.pump import Pump
from onebit_serve.live.relay import ClientGoneError, CutError, Errand, relay
from onebit_serve.live.supervise import Backend, Lease
from onebit_serve.live.upstream import GoneError, send_all

__all__ = ["Door"]

_BLOCK_BYTES = 65536
_HEAD_LIMIT_BYTES = 65536
_HEAD_LIMIT_S = 10.0
_BODY_GAP_S = 30.0
_IDLE_LIMIT_S = 75.0
_CONNECTIONS = 1000
_ACCEPT_PAUSE_S = 0.1
_LATE_LOOK_S = 1.0
_LINGER_S = 1.0
_LINGER_BYTES = 1 << 20
_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    417: b"Expectation Failed",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    505: b"HTTP Version Not Supported",
}


class Door:
    """Answers what is ours and relays the rest.

    Args:
        listener: Bound and listening.
        settings: The `[server]` table.
        backends: Whom to relay to.
        log: Where to say what happened.
        version: What `/v1/status` calls us.
    """

    def __init__(
        self,
        listener: socket.socket,
        settings: Server,
        backends: tuple[Backend, ...],
        log: Log,
        version: str,
    ) -> None:
        self._listener = listener
        self.max_body_bytes = settings.max_body_bytes
        self.backends = backends
        self.log = log
        self._version = version
        self._watch = HangUpWatch()
        self.pump = Pump()
        self._connections: set[_Connection] = set()

    async def run(self) -> None:
        """Accept connections until cancelled."""
        self._listener.setblocking(False)  # noqa: FBT003
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch.run)
            nursery.start_soon(self._close_late_ones)
            while True:
                await trio.lowlevel.wait_readable(self._listener)
                await self._accept_all(nursery)

    async def _accept_all(self, nursery: trio.Nursery) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.log.error(f"cannot take a connection: {error.strerror}")
                    await trio.sleep(_ACCEPT_PAUSE_S)
                    return
                continue  # that client went away before we came
            if len(self._connections) >= _CONNECTIONS:
                sock.close()
                continue
            sock.setblocking(False)  # noqa: FBT003
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nursery.start_soon(self._serve, sock)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection; whatever happens to it stays in here."""
        fd = sock.fileno()
        with trio.CancelScope() as scope:
            connection = _Connection(self, sock, scope)
            self._connections.add(connection)
            try:
                self._watch.watch(fd, scope)
                await connection.run()
            except (OSError, ClientGoneError, CutError):
                pass  # nobody is left to tell
            except Exception as error:  # noqa: BLE001 - one connection must not end the others
                self.log.error(f"a connection failed: {type(error).__name__}: {error}")
            finally:
                self._connections.discard(connection)
                self._watch.forget(fd)
                sock.close()

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

    def views(self) -> tuple[view.BackendView, ...]:
        """Return what can be seen of the backends."""
        return tuple(backend.view() for backend in self.backends)

    def page(self, name: route.Page) -> view.Page:
        """Return an answer of ours."""
        match name:
            case "livez":
                return view.livez()
            case "models":
                return view.models(self.views())
            case "status":
                return view.status(self.views(), self._version)
            case _:
                return view.health(self.views())


class _Connection:
    """One client's connection.

    Args:
        door: Whose it is.
        sock: Its socket, non-blocking.
        scope: Cancelled when the client is gone or late.

    Attributes:
        due_s: When the client must have done what is waited for, on the monotonic clock.
    """

    def __init__(self, door: Door, sock: socket.socket, scope: trio.CancelScope) -> None:
        self._door = door
        self._sock = sock
        self._buffer = b""
        self.scope = scope
        self.due_s = math.inf

    async def run(self) -> None:
        """Serve one request after the other."""
        while True:
            try:
                head = await self._read_head()
                if head is None:
                    return
                body = await self._read_body(head)
            except BadRequestError as error:
                await self._refuse(Refusal(error.status, error.reason, "bad_request"))
                return
            self.due_s = math.inf
            if not await self._answer(head, body):
                return

    def _allow(self, seconds: float) -> None:
        self.due_s = time.monotonic() + seconds

    async def _receive(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._sock)
            try:
                return self._sock.recv(_BLOCK_BYTES)
            except BlockingIOError:
                continue

    async def _read_head(self) -> RequestHead | None:
        """Return the next request's head, or `None` when there is none.

        Raises:
            BadRequestError: It breaks the rules.
        """
        self._allow(_IDLE_LIMIT_S)
        while not self._buffer.lstrip(b"\r\n"):
            self._buffer = await self._receive()
            if not self._buffer:
                return None
        self._buffer = self._buffer.lstrip(b"\r\n")
        self._allow(_HEAD_LIMIT_S)
        while (end := self._buffer.find(b"\r\n\r\n") + 4) < 4:  # noqa: PLR2004
            if len(self._buffer) > _HEAD_LIMIT_BYTES:
                raise BadRequestError(400, f"the head is larger than {_HEAD_LIMIT_BYTES} bytes")
            if b"\n\n" in self._buffer or b"\n\r\n" in self._buffer.replace(b"\r\n\r\n", b""):
                raise BadRequestError(400, "malformed request head: a line does not end with CR LF")
            data = await self._receive()
            if not data:
                return None
            self._buffer += data
        raw, self._buffer = self._buffer[:end], self._buffer[end:]
        return parse_head(raw)

    async def _read_body(self, head: RequestHead) -> bytes:
        """Return the whole body.

        Raises:
            BadRequestError: It is malformed or larger than allowed.
        """
        length, limit = head.content_length, self._door.max_body_bytes
        if length == 0:
            return b""
        if length is not None and limit and length > limit:
            raise BadRequestError(413, too_large(limit))
        if head.expects_continue and not self._buffer:
            await send_all(self._sock, b"HTTP/1.1 100 Continue\r\n\r\n")
        if length is None:
            return await self._read_chunks(limit)
        if len(self._buffer) >= length:
            body, self._buffer = self._buffer[:length], self._buffer[length:]
            return body
        parts, missing = [self._buffer], length - len(self._buffer)
        self._buffer = b""
        while missing > 0:
            self._allow(_BODY_GAP_S)
            data = await self._receive()
            if not data:
                raise ClientGoneError
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
            self._allow(_BODY_GAP_S)
            data = await self._receive()
            if not data:
                raise ClientGoneError
        if chunks.followed:
            raise BadRequestError(400, "nothing may follow a chunked body before its answer")
        return chunks.body()

    async def _answer(self, head: RequestHead, body: bytes) -> bool:
        """Answer one request; return whether the connection goes on."""
        choice = route.choose(head.method, head.path)
        if isinstance(choice, Refusal):
            return await self._send_refusal(choice, head)
        if choice != "relayed":
            page = self._door.page(choice)
            return await self._send_json(
                page.status, msgspec.json.encode(page.body), page.retry_after_s, head
            )
        backend = self._door.backends[0]
        lease = backend.lease()
        if lease is None:
            return await self._send_refusal(view.unavailable(backend.view()), head)
        return await self._relay(backend, lease, _errand(backend, head, body))

    async def _relay(self, backend: Backend, lease: Lease, errand: Errand) -> bool:
        door = self._door
        whole = False
        try:
            go_on = await relay(errand, self._sock, lease, door.pump)
            whole = True
        except GoneError as error:
            whole = True  # of what there was: no slot works for it
            reason = f"{backend.plan.name} failed before it answered: {error.reason}"
            refusal = Refusal(502, reason, "backend_gone")
        except CutError as error:
            door.log.warning(f"a reply of {backend.plan.name} was cut: {error.reason}")
            raise
        else:
            return go_on
        finally:
            lease.end(whole=whole)
        return await self._send_refusal(refusal, errand.head)

    async def _send_refusal(self, refusal: Refusal, head: RequestHead) -> bool:
        return await self._send_json(refusal.status, refusal.body(), refusal.retry_after_s, head)

    async def _refuse(self, refusal: Refusal) -> None:
        """Answer a request that broke the rules, and see that the answer arrives."""
        self._allow(_LINGER_S)
        head = RequestHead(
            "GET", b"/", (), 0, keep_alive=False, http_1_0=False, expects_continue=False
        )
        await self._send_json(refusal.status, refusal.body(), None, head)
        self._sock.shutdown(socket.SHUT_WR)
        left_bytes = _LINGER_BYTES
        while left_bytes > 0:
            data = await self._receive()
            if not data:
                return
            left_bytes -= len(data)

    async def _send_json(
        self, status: int, body: bytes, retry_after_s: int | None, head: RequestHead
    ) -> bool:
        go_on = head.keep_alive and not head.http_1_0
        lines = [
            b"HTTP/1.1 %d %s\r\nContent-Type: application/json; charset=utf-8\r\n"
            b"Content-Length: %d\r\n" % (status, _REASONS.get(status, b"Error"), len(body))
        ]
        if retry_after_s is not None:
            lines.append(b"Retry-After: %d\r\n" % retry_after_s)
        lines.append(b"\r\n" if go_on else b"Connection: close\r\n\r\n")
        if head.method != "HEAD":
            lines.append(body)
        await send_all(self._sock, b"".join(lines))
        return go_on


def _errand(backend: Backend, head: RequestHead, body: bytes) -> Errand:
    """Prepare a request for its backend; bodies of llama-server backends pass unchanged."""
    plan = backend.plan
    peek = wire.peek(body) if body else wire.Peek()
    model = ""
    if plan.upstream_model is not None and body:
        body = wire.with_model(body, plan.upstream_model)
        model = plan.served_id
    if plan.assemble and not peek.stream:
        streamed = wire.as_stream(head.path, body)
        if streamed is not None:
            return Errand(head, streamed, stream=True, assemble=True, model=model)
    return Errand(head, body, stream=peek.stream, model=model)
