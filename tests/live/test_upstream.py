from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httptools
import pytest
import trio

from onebit_serve.core.http import Reply
from onebit_serve.live import upstream
from onebit_serve.live.upstream import GoneError, Upstream, open_stream

BOUND_S = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Scripted:
    """A server that answers each connection with the same bytes, and keeps what it was sent."""

    def __init__(self, replies: tuple[bytes, ...], *, reset: bool) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._replies = replies
        self._reset = reset

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        async with stream:
            whole: list[bool] = []
            parser = httptools.HttpRequestParser(_End(whole))
            data = b""
            while not whole:
                piece = await stream.receive_some()
                if not piece:
                    return
                data += piece
                parser.feed_data(piece)
            self.requests.append(data)
            for reply in self._replies:
                await stream.send_all(reply)
            if self._reset:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class _End:
    def __init__(self, whole: list[bool]) -> None:
        self.on_message_complete: Callable[[], Any] = lambda: whole.append(True)


@asynccontextmanager
async def scripted(*replies: bytes, reset: bool = False) -> AsyncIterator[tuple[int, Scripted]]:
    server = Scripted(replies, reset=reset)
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(
                partial(trio.serve_tcp, server.serve, 0, host="127.0.0.1")
            )
            yield listener.socket.getsockname()[1], server
            nursery.cancel_scope.cancel()


async def ask(port: int, method: str, target: str, body: bytes = b"", key: str = "") -> Reply:
    async with open_stream(port, method, target, body, key) as stream:
        return Reply(stream.status, await stream.read())


async def failure(port: int) -> str:
    with pytest.raises(GoneError) as caught:
        await ask(port, "GET", "/health")
    return caught.value.reason


async def test_one_request_and_its_whole_reply():
    async with scripted(OK) as (port, server):
        reply = await ask(port, "POST", "/completion", b'{"a":1}', key="sesame")
        assert (reply.status, reply.body) == (200, b"{}")
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        assert body == b'{"a":1}'
        for line in (
            b"POST /completion HTTP/1.1",
            b"host: 127.0.0.1:%d" % port,
            b"content-length: 7",
            b"authorization: Bearer sesame",
            b"connection: close",
        ):
            assert line in head.split(b"\r\n")


async def test_a_reply_comes_decoded_piece_by_piece():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with (
        scripted(head, b"3\r\none", b"\r\n3\r\ntwo\r\n0\r\n\r\n") as (port, _),
        open_stream(port, "GET", "/x") as stream,
    ):
        assert stream.status == 200
        assert await stream.read() == b"onetwo"


async def test_each_way_to_fail_has_words_of_its_own():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        refused = await failure(nobody.getsockname()[1])
    async with scripted() as (port, _):
        silent = await failure(port)
    async with scripted(b"SSH-2.0-OpenSSH\r\n") as (port, _):
        garbage = await failure(port)
    async with scripted(OK[:-1], reset=False) as (port, _):
        cut = await failure(port)
    assert "no connection to port" in refused
    assert "without a reply" in silent
    assert "no HTTP" in garbage
    assert "mid-reply" in cut


async def test_a_reset_connection_is_a_failure_with_a_reason():
    async with scripted(OK[:-1], reset=True) as (port, _):
        assert await failure(port)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
async def test_proxies_are_for_others(monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with scripted(OK) as (port, _):
        assert (await ask(port, "GET", "/health")).status == 200


async def test_a_kept_connection_is_used_again_the_last_one_first():
    async with scripted(OK) as (port, _):
        pool = Upstream(port)
        first, second = await pool.connect(), await pool.connect()
        pool.keep(first)
        pool.keep(second)
        assert pool.reuse() is second
        assert pool.reuse() is first
        assert pool.reuse() is None
        first.close()
        second.close()


async def test_a_connection_that_idled_too_long_is_not_used_again(monkeypatch):
    async with scripted(OK) as (port, _):
        pool = Upstream(port)
        sock = await pool.connect()
        pool.keep(sock)
        monkeypatch.setattr(upstream, "_IDLE_LIMIT_S", -1.0)
        assert pool.reuse() is None
        assert sock.fileno() == -1


async def test_a_closed_pool_keeps_nothing():
    async with scripted(OK) as (port, _):
        pool = Upstream(port)
        early, late = await pool.connect(), await pool.connect()
        pool.keep(early)
        pool.close()
        pool.keep(late)
        assert pool.reuse() is None
        assert early.fileno() == late.fileno() == -1


async def test_sending_waits_for_a_slow_reader_and_loses_nothing():
    left, right = socket.socketpair()
    left.settimeout(0)
    right.settimeout(0)
    data = bytes(range(256)) * 20_000
    got = bytearray()
    with left, right, trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(upstream.send_all, left, data)
            while len(got) < len(data):
                got += await upstream.receive(right)
    assert got == data


async def test_a_reply_with_neither_length_nor_chunks_ends_with_its_connection():
    async with scripted(b"HTTP/1.1 200 OK\r\n\r\nall ", b"of it") as (port, _):
        assert await ask(port, "GET", "/health") == Reply(200, b"all of it")
