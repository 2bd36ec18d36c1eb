from __future__ import annotations

import hashlib
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import trio
import trio.testing

from onebit_serve.core.http import ResponseFramer
from onebit_serve.live.pump import Ended, Pump
from onebit_serve.live.upstream import receive, send_all

BOUND_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


class Count:
    """Counts what the pump moves."""

    blocks = 0
    size_bytes = 0
    tail = None


class Way:
    """A backend's socket, a client's, and the far ends that the test holds."""

    def __init__(self, head: bytes = HEAD, *, keep_body: bool = False) -> None:
        self.backend, self.backend_far = socket.socketpair()
        self.client, self.client_far = socket.socketpair()
        for sock in self.all:
            sock.settimeout(0)
        self.framer = ResponseFramer(keep_body=keep_body)
        self.framer.feed(head)
        self.count = Count()
        self.ended: Ended | None = None
        self.last = b""

    @property
    def all(self) -> tuple[socket.socket, ...]:
        return (self.backend, self.backend_far, self.client, self.client_far)

    async def carry(self, pump: Pump, *, unchunk: bool = False) -> None:
        self.ended, self.last = await pump.carry(
            self.backend, self.client, self.framer, self.count, unchunk=unchunk
        )

    async def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await receive(self.client_far)
            assert piece, data
            data += piece
        return data


@pytest.fixture
def ways() -> Iterator[list[Way]]:
    made: list[Way] = []
    yield made
    with ExitStack() as stack:
        for way in made:
            for sock in way.all:
                stack.callback(sock.close)


@pytest.fixture(name="way")
def one_way(ways: list[Way]) -> Way:
    ways.append(Way())
    return ways[0]


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
async def test_the_bytes_are_the_same_however_they_are_cut(way, size):
    data = chunked("Grüße, ".encode(), b"x" * 300, b"0\r\n\r\n", "\N{GRINNING FACE}".encode())
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(way.carry, Pump())
            for at in range(0, len(data), size):
                piece = data[at : at + size]
                await send_all(way.backend_far, piece)
                assert await way.read(len(piece)) == piece
    assert way.ended is Ended.COMPLETE
    assert way.count.blocks > 0


async def test_chunks_are_taken_off_where_the_client_cannot_read_them(ways):
    way = Way(keep_body=True)
    ways.append(way)
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: way.carry(Pump(), unchunk=True))
            await send_all(way.backend_far, chunked(b"one ", b"two"))
            assert await way.read(7) == b"one two"
    assert way.ended is Ended.COMPLETE


@pytest.mark.parametrize("reset", [False, True])
async def test_a_backend_that_ends_too_early_is_told_from_one_that_is_done(way, reset):
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(way.carry, Pump())
            await send_all(way.backend_far, b"5\r\nhello\r\n")
            assert await way.read(10) == b"5\r\nhello\r\n"
            if reset:
                linger = struct.pack("ii", 1, 0)
                way.backend_far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            way.backend_far.close()
    assert way.ended is Ended.BACKEND_GONE
    assert way.framer.between_chunks
    assert way.last == b"5\r\nhello\r\n"


async def test_a_body_that_is_no_http_ends_like_a_backend_that_went_away(way):
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(way.carry, Pump())
            await send_all(way.backend_far, b"zz\r\nhello\r\n")
    assert way.ended is Ended.BACKEND_GONE


async def test_a_client_that_cannot_be_written_to_ends_it(way):
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(way.carry, Pump())
            way.client_far.close()
            await send_all(way.backend_far, b"5\r\nhello\r\n")
    assert way.ended is Ended.CLIENT_GONE


async def test_a_slow_reader_loses_nothing_and_holds_up_nobody(ways):
    body = random.Random(1).randbytes(8 << 20)
    slow, quick = Way(SIZED % len(body)), Way()
    ways += (slow, quick)
    pump = Pump()

    async def send(way: Way, data: bytes) -> None:
        await send_all(way.backend_far, data)

    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow.carry, pump)
            nursery.start_soon(send, slow, body)
            # Nobody reads the slow one until the quick one is through.
            async with trio.open_nursery() as others:
                others.start_soon(quick.carry, pump)
                await send(quick, chunked(b"a", b"b"))
                assert await quick.read(17) == chunked(b"a", b"b")
            assert quick.ended is Ended.COMPLETE
            assert slow.ended is None
            got = await slow.read(len(body))
    assert slow.ended is Ended.COMPLETE
    assert hashlib.sha256(got).digest() == hashlib.sha256(body).digest()


async def test_a_body_whose_end_waits_for_the_reader_is_whole_when_it_is_read(ways):
    way, after = Way(SIZED % 5), Way(SIZED % 5)
    ways += (way, after)
    pump = Pump()
    held = 0
    for size in (65536, 1024, 1):  # until the client's side takes not a byte more
        with suppress(BlockingIOError):
            while True:
                held += way.client.send(bytes(size))
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(way.carry, pump)
            await send_all(way.backend_far, b"whole")
            while not way.count.blocks:  # noqa: ASYNC110 - the thread tells of no event here
                await trio.sleep(0.001)
            assert (await way.read(held + 5))[held:] == b"whole"
        assert way.ended is Ended.COMPLETE
        async with trio.open_nursery() as nursery:  # and the pump goes on
            nursery.start_soon(after.carry, pump)
            await send_all(after.backend_far, b"after")
            assert await after.read(5) == b"after"


async def test_a_slow_reader_that_leaves_ends_it(ways):
    way = Way(SIZED % (8 << 20))
    ways.append(way)

    async def send() -> None:
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            await send_all(way.backend_far, bytes(8 << 20))

    async def carry() -> None:
        await way.carry(Pump())
        way.backend.close()

    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry)
            nursery.start_soon(send)
            await trio.lowlevel.wait_readable(way.client_far)
            await trio.testing.wait_all_tasks_blocked(0.05)
            way.client_far.close()
    assert way.ended is Ended.CLIENT_GONE


async def test_a_cancelled_body_leaves_its_sockets_and_the_pump_as_they_were(ways):
    pump = Pump()
    for _ in range(10):  # the numbers of closed descriptors are used again at once
        way = Way()
        with trio.fail_after(BOUND_S), trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(way.carry, pump)
                await send_all(way.backend_far, b"5\r\nhello\r\n")
                await way.read(10)
                scope.cancel()
        assert way.ended is None
        for sock in way.all:
            sock.close()
    way = Way()
    ways.append(way)
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(way.carry, pump)
            await send_all(way.backend_far, chunked(b"x"))
    assert way.ended is Ended.COMPLETE


async def test_a_client_that_leaves_with_the_last_byte_has_had_it_all(way):
    scope, body = trio.CancelScope(), b"5\r\nhello\r\n0\r\n\r\n"

    async def carry() -> None:
        with scope:
            await way.carry(Pump())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carry)
        await trio.testing.wait_all_tasks_blocked()
        way.backend_far.send(body)
        way.client_far.settimeout(BOUND_S)  # the loop stands still: it hears of both at once
        got = b""
        while len(got) < len(body):
            got += way.client_far.recv(100)
        scope.cancel()
    assert way.ended is Ended.COMPLETE


async def test_many_bodies_move_at_once(ways):
    ways += [Way() for _ in range(32)]
    pump = Pump()
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            for way in ways:
                nursery.start_soon(way.carry, pump)
            for _ in range(5):
                for way in ways:
                    await send_all(way.backend_far, b"1\r\nx\r\n")
                for way in ways:
                    assert await way.read(6) == b"1\r\nx\r\n"
            for way in ways:
                await send_all(way.backend_far, b"0\r\n\r\n")
    assert {way.ended for way in ways} == {Ended.COMPLETE}
