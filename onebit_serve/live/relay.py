"""One request to a backend and its reply back, byte for byte.

The request is sent with a head of ours and one `Content-Length`. Of the reply only the head is
rebuilt; each block of the body is shown to llhttp, which finds its end, and sent on as it came.

What can go wrong, and what the client sees:

    before the backend's head     nothing was sent: `GoneError`, and the caller answers 502
    in an event stream            an error event where a chunk has just ended, then a cut connection
    in any other body             a cut connection; the framing shows that the body is not whole
    the client leaves             the caller cancels us, and the connection to the backend closes

A kept connection that turns out to be closed is replaced by a fresh one, once, and only when not a
byte came back and the same child still runs: a request that killed a child must not reach the next.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httptools
import msgspec
import trio

from onebit_serve.core import wire
from onebit_serve.core.http import (
    RequestHead,
    ResponseFramer,
    ResponseHead,
    request_bytes,
    response_head,
    without,
)
from onebit_serve.live.heartbeat import Heartbeat
from onebit_serve.live.lease import Lease
from onebit_serve.live.pump import Ended, Pump
from onebit_serve.live.upstream import GoneError, receive, send_all

__all__ = ["ClientGoneError", "CutError", "Errand", "relay"]

_BLOCK_BYTES = 65536
_HEAD_LIMIT_BYTES = 65536
_OK, _SERVER_ERROR = 200, 500
_BODILESS = (204, 304)
_REPLY_LIMIT_BYTES = 64 << 20  # of replies that must be held whole to be put together


class ClientGoneError(Exception):
    """The client can no longer be written to."""


class CutError(Exception):
    """The backend ended in mid-reply; the client's connection must be cut.

    Args:
        reason: What happened, for a person.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Errand(msgspec.Struct, frozen=True):
    """What is to be relayed.

    Args:
        head: The client's request head.
        body: The body to send, which may differ from the client's where the contract says so.
        stream: Whether a stream is asked for; llama-server closes after it without saying so.
        assemble: The reply comes as a stream and must leave as one body.
        model: The id to put into `model` of the reply, or empty to leave it alone.
        more: Header lines of ours for the backend, each with its CR LF.
        lines: Header lines of ours for the reply, each with its CR LF.
    """

    head: RequestHead
    body: bytes
    stream: bool = False
    assemble: bool = False
    model: str = ""
    more: bytes = b""
    lines: bytes = b""


async def relay(
    errand: Errand,
    client: socket.socket,
    lease: Lease,
    pump: Pump,
    heartbeat: Heartbeat | None = None,
) -> bool:
    """Carry one request to a backend and its reply back.

    Args:
        errand: What to carry.
        client: The client's socket, non-blocking.
        lease: The right to ask the backend; it learns which connection is used.
        pump: Moves the body.
        heartbeat: What the client has been sent while it waited, or `None`.

    Returns:
        Whether the client's connection may carry another request.

    Raises:
        GoneError: The backend failed before it answered; nothing of it was sent to the client.
        CutError: It failed after that; the client's connection must be closed now.
        ClientGoneError: The client could not be written to.
    """
    reply = await _ask(errand, lease)
    sock, head = reply.sock, reply.head
    finished = False
    try:
        fatal = head.status >= _SERVER_ERROR and wire.is_fatal(reply.rest)
        lease.note_status(head.status, fatal=fatal)
        if lease.tail is not None:
            lease.tail.append(reply.rest)
        if heartbeat is not None and await heartbeat.stop():
            go_on = await _join(errand, client, reply, lease, pump)
        elif errand.assemble or errand.model:
            go_on = await _translate(errand, client, reply, lease)
        else:
            go_on = await _copy(errand, client, reply, lease, pump)
        finished = reply.whole and head.keep_alive
    finally:
        lease.sock = None
        if finished and not errand.stream and not head.event_stream:
            lease.upstream.keep(sock)
        else:
            sock.close()
    return go_on


class _Reply(msgspec.Struct):
    """A backend's reply whose head is here.

    Args:
        sock: The connection it comes on.
        head: Its head.
        rest: What of its body came with the head.
        framer: Finds its end; `None` where all of it is here already.
        bodiless: Whether it ends with its head.
    """

    sock: socket.socket
    head: ResponseHead
    rest: bytes
    framer: ResponseFramer | None
    bodiless: bool = False

    @property
    def whole(self) -> bool:
        """Whether all of it has come."""
        return self.framer is None or self.framer.complete

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing but the end of the connection tells where it ends."""
        return not self.head.chunked and self.head.length is None


async def _ask(errand: Errand, lease: Lease) -> _Reply:
    """Send the request and wait for the reply's head."""
    head, upstream = errand.head, lease.upstream
    data = request_bytes(
        head.method,
        head.target,
        b"".join((head.forwarded, upstream.key_line, errand.more)),
        errand.body,
        host=upstream.host,
        close=errand.stream or errand.assemble,
    )
    kept = upstream.reuse()
    if kept is not None:
        try:
            return await _exchange_heads(errand, kept, data, lease)
        except _SilentlyGoneError:
            if not lease.alive():
                raise
    return await _exchange_heads(errand, await upstream.connect(), data, lease)


class _SilentlyGoneError(GoneError):
    """The connection ended before a single byte of a reply."""


async def _exchange_heads(errand: Errand, sock: socket.socket, data: bytes, lease: Lease) -> _Reply:
    lease.sock = sock
    received = b""
    try:
        try:
            await send_all(sock, data)
        except OSError as error:
            # it may have answered before it read all of the body, with a 413 for one
            if not (received := _what_is_there(sock)):
                raise _SilentlyGoneError(f"the backend closed the connection: {error}") from None
        while True:
            end = received.find(b"\r\n\r\n") + 4
            if end >= 4:  # noqa: PLR2004 - that is, found
                if received[9:10] != b"1":
                    return _reply(errand, sock, received, end)
                received = received[end:]  # 100 and its like say nothing that a client waits for
                continue
            if not received.startswith(b"HTTP/"[: len(received)]):
                raise GoneError("the backend's reply is no HTTP")
            if len(received) > _HEAD_LIMIT_BYTES:
                raise GoneError("the backend's reply has an endless head")
            await trio.lowlevel.wait_readable(sock)
            try:
                block = sock.recv(_BLOCK_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                block = b""
            if not block:
                reason = "the backend closed the connection without a reply"
                raise GoneError(reason) if received else _SilentlyGoneError(reason)
            received += block
    except BaseException:
        lease.sock = None
        sock.close()
        raise


def _reply(errand: Errand, sock: socket.socket, received: bytes, end: int) -> _Reply:
    """Read the head of what was received; what follows `end` is the beginning of the body.

    A body of known length that came whole with its head needs nothing that finds its end.
    """
    try:
        head = response_head(received[:end])
    except ValueError as error:
        raise GoneError(f"the backend's reply is no HTTP: {error}") from None
    rest = received[end:]
    if errand.head.method == "HEAD" or head.status in _BODILESS:
        # whatever follows its head is not for the client, who would read it as a reply
        quiet = msgspec.structs.replace(head, keep_alive=head.keep_alive and not rest)
        return _Reply(sock, quiet, b"", None, bodiless=True)
    keep_body = errand.assemble or bool(errand.model) or errand.head.http_1_0
    if not keep_body and not head.chunked and head.length == len(rest):
        return _Reply(sock, head, rest, None)
    framer = ResponseFramer(keep_body=keep_body)
    _feed(framer, received)
    return _Reply(sock, head, rest, framer)


def _what_is_there(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_BLOCK_BYTES)
    except OSError:
        return b""


def _feed(framer: ResponseFramer, block: bytes) -> None:
    try:
        framer.feed(block)
    except httptools.HttpParserError as error:
        if not framer.complete:
            raise GoneError(f"the backend's reply is no HTTP: {error}") from None


async def _send(client: socket.socket, data: bytes) -> None:
    try:
        await send_all(client, data)
    except OSError:
        raise ClientGoneError from None


def _closing(errand: Errand, reply: _Reply) -> bool:
    """Tell whether the client's connection must close after this reply."""
    unframed = reply.ends_with_connection and not reply.bodiless
    return not errand.head.keep_alive or errand.head.http_1_0 or unframed


def _ending(closing: bool) -> bytes:  # noqa: FBT001
    return b"Connection: close\r\n\r\n" if closing else b"\r\n"


async def _copy(
    errand: Errand, client: socket.socket, reply: _Reply, lease: Lease, pump: Pump
) -> bool:
    """Pass the reply on as it is; for HTTP/1.0 clients without its chunks."""
    head, lines, rest = reply.head, reply.head.lines, reply.rest
    closing = _closing(errand, reply)
    unchunk = errand.head.http_1_0 and head.chunked
    if unchunk and reply.framer:
        lines, rest = without(lines, b"transfer-encoding"), reply.framer.take_body()
    last = b"".join((lines, errand.lines, _ending(closing), rest))
    await _send(client, last)
    await _carry(client, reply, lease, pump, last=last, unchunk=unchunk)
    return not closing


async def _carry(
    client: socket.socket,
    reply: _Reply,
    lease: Lease,
    pump: Pump,
    *,
    last: bytes,
    unchunk: bool = False,
) -> None:
    """Have the rest of a body moved to the client; `last` is what it was sent before that."""
    framer = reply.framer
    if framer is None or reply.whole:
        return
    ended, moved = await pump.carry(reply.sock, client, framer, lease, unchunk=unchunk)
    if ended is Ended.CLIENT_GONE:
        raise ClientGoneError
    if ended is Ended.BACKEND_GONE and not reply.ends_with_connection:
        in_chunks = framer.between_chunks and reply.head.chunked and not unchunk
        await _cut(client, reply, moved or last, in_chunks=in_chunks)


async def _join(
    errand: Errand, client: socket.socket, reply: _Reply, lease: Lease, pump: Pump
) -> bool:
    """Go on with an event stream that has begun; whatever is no stream becomes an event of it."""
    head, rest = reply.head, reply.rest
    if not (head.event_stream and head.chunked and head.status == _OK):
        said = await _whole_body(reply)
        event = b"data: " + b" ".join(said.splitlines()) + b"\n\n"
        if not said:  # it came in chunks, which are not kept
            message = f"the backend answered with HTTP {head.status}"
            event = wire.error_event(wire.Refusal(502, message, "backend_error"))
        await _send(client, b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
    elif errand.model:
        await _rename_events(errand, client, reply)
    else:
        await _send(client, rest)
        await _carry(client, reply, lease, pump, last=rest or b"\n\n\r\n")
    return errand.head.keep_alive


async def _cut(client: socket.socket, reply: _Reply, last: bytes, *, in_chunks: bool) -> None:
    """Tell an event stream what happened where its framing allows it, and raise `CutError`."""
    reason = "the backend ended in mid-reply"
    if reply.head.event_stream and in_chunks and last.endswith(b"\r\n"):
        event = wire.error_event(wire.Refusal(502, reason, "backend_gone"))
        if not last.endswith(b"\n\n\r\n"):
            event = b"\n\n" + event
        await _send(client, b"%x\r\n%s\r\n" % (len(event), event))
    raise CutError(reason)


async def _translate(errand: Errand, client: socket.socket, reply: _Reply, lease: Lease) -> bool:
    """Pass on a reply whose body is not the backend's own: put together, or with another model."""
    head = reply.head
    closing = not errand.head.keep_alive or errand.head.http_1_0
    lines = without(head.lines, b"transfer-encoding", b"content-length")
    ours = (errand.lines, _ending(closing))
    if head.event_stream and not errand.assemble and not errand.head.http_1_0:
        await _send(client, b"".join((lines, b"Transfer-Encoding: chunked\r\n", *ours)))
        await _rename_events(errand, client, reply)
        return not closing
    whole = await _whole_body(reply)
    if lease.tail is not None:
        lease.tail.append(whole)
    if errand.assemble and head.event_stream:
        assembler = wire.Assembler(errand.body)
        try:
            assembler.feed(whole)
        except msgspec.DecodeError as error:
            raise GoneError(f"the backend sent an event that is no JSON: {error}") from None
        lines = without(lines, b"content-type", b"x-accel-buffering")
        lines += b"Content-Type: application/json; charset=utf-8\r\n"
        if assembler.error is not None:
            lines = b"HTTP/1.1 500 Internal Server Error" + lines[lines.index(b"\r\n") :]
        whole = assembler.body()
    elif errand.model:
        whole = wire.rename(whole, errand.model)
    length = b"Content-Length: %d\r\n" % len(whole)
    await _send(client, b"".join((lines, length, *ours, whole)))
    return not closing


async def _rename_events(errand: Errand, client: socket.socket, reply: _Reply) -> None:
    events = wire.EventReader()
    try:
        async with aclosing(_pieces(reply)) as pieces:
            async for piece in pieces:
                out = b"".join(
                    b"data: " + wire.rename(event, errand.model) + b"\n\n"
                    for event in events.feed(piece)
                )
                if out:
                    await _send(client, b"%x\r\n%s\r\n" % (len(out), out))
    except GoneError:
        await _cut(client, reply, b"\n\n\r\n", in_chunks=True)  # those that we made
    await _send(client, b"0\r\n\r\n")


async def _whole_body(reply: _Reply) -> bytes:
    parts, size_bytes = [], 0
    async with aclosing(_pieces(reply)) as pieces:
        async for piece in pieces:
            parts.append(piece)
            size_bytes += len(piece)
            if size_bytes > _REPLY_LIMIT_BYTES:
                raise GoneError("the backend's reply is larger than can be held")
    return b"".join(parts)


async def _pieces(reply: _Reply) -> AsyncGenerator[bytes, None]:
    """Yield the decoded body as it comes; `GoneError` where it ends too early."""
    framer = reply.framer
    if framer is None:
        yield reply.rest
        return
    while True:
        piece = framer.take_body()
        if piece:
            yield piece
        if reply.whole:
            return
        block = await receive(reply.sock)
        if not block:
            if reply.ends_with_connection:
                return
            raise GoneError("the backend ended in mid-reply")
        _feed(framer, block)
