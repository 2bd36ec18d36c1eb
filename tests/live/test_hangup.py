from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from onebit_serve.live.hangup import HangUpWatch

BOUND_S = 30.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(2)]
    yield made
    for pair in made:
        for sock in pair:
            sock.close()


@pytest.mark.parametrize("how", ["close", "shutdown"])
async def test_only_the_client_that_leaves_is_cancelled(pairs, how):
    (leaves, far), (stays, _) = pairs
    gone, kept = trio.CancelScope(), trio.CancelScope()
    watch = HangUpWatch()
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            watch.watch(leaves.fileno(), gone)
            watch.watch(stays.fileno(), kept)
            with gone:
                far.close() if how == "close" else far.shutdown(socket.SHUT_WR)
                await trio.sleep_forever()
            watch.forget(leaves.fileno())
            watch.forget(stays.fileno())
            nursery.cancel_scope.cancel()
    assert gone.cancelled_caught
    assert not kept.cancel_called


async def test_a_client_that_sends_more_has_not_left(pairs):
    (sock, far), _ = pairs
    scope = trio.CancelScope()
    watch = HangUpWatch()
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            watch.watch(sock.fileno(), scope)
            far.send(b"GET / HTTP/1.1\r\n")
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not scope.cancel_called
            watch.forget(sock.fileno())
            nursery.cancel_scope.cancel()


async def test_a_socket_that_is_not_watched_any_more_cancels_nothing(pairs):
    (sock, far), _ = pairs
    scope = trio.CancelScope()
    watch = HangUpWatch()
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            watch.watch(sock.fileno(), scope)
            watch.forget(sock.fileno())
            watch.forget(sock.fileno())
            far.close()
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not scope.cancel_called
            nursery.cancel_scope.cancel()


async def test_a_client_that_left_before_it_was_watched_is_noticed(pairs):
    (sock, far), _ = pairs
    far.close()
    watch = HangUpWatch()
    scope = trio.CancelScope()
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            with scope:
                watch.watch(sock.fileno(), scope)
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()
    assert scope.cancelled_caught
