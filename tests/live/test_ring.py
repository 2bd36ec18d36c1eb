from __future__ import annotations

import pytest
import trio
import trio.testing

from onebit_serve.live.ring import LineRing


def test_the_last_lines_are_whole_whatever_the_blocks():
    ring = LineRing()
    for block in (b"on", b"e\ntwo\r\nth", b"ree", b"\nfo"):
        ring.feed(block)
    assert ring.last(100) == b"one\ntwo\nthree\n"
    assert ring.last(2) == b"two\nthree\n"
    assert ring.last(0) == b""
    ring.end_line()
    assert ring.last(1) == b"fo\n"


def test_the_ring_is_bounded_in_lines_and_bytes():
    ring = LineRing(10)
    ring.feed(b"x" * 1_000_000)
    ring.feed(b"y" * 5000 + b"\n" + b"z\n" * 100)
    assert ring.last(1000) == b"z\n" * 10
    ring = LineRing()
    ring.feed(b"x" * 5000 + b"\n")
    assert len(ring.last(1)) == 2001


async def test_a_follower_gets_what_was_and_what_comes():
    ring = LineRing()
    ring.feed(b"one\ntwo\n")
    got = []

    async def follow(task_status=trio.TASK_STATUS_IGNORED):
        follower = ring.follow(1)
        task_status.started()
        async for text in follower:
            got.append(text)  # noqa: PERF401

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(follow)
            await trio.testing.wait_all_tasks_blocked()
            ring.feed(b"three\nfo")
            await trio.testing.wait_all_tasks_blocked()
            ring.feed(b"ur\nfive\n")
            await trio.testing.wait_all_tasks_blocked()
            ring.feed(b"six")
            ring.close()
    assert got == [b"two\n", b"three\n", b"four\nfive\n", b"six\n"]


async def test_several_followers_get_the_same():
    ring = LineRing()
    got = {"a": b"", "b": b""}

    async def follow(name):
        async for text in ring.follow(0):
            got[name] += text

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, "a")
            nursery.start_soon(follow, "b")
            await trio.testing.wait_all_tasks_blocked()
            for number in range(5):
                ring.feed(b"%d\n" % number)
                await trio.testing.wait_all_tasks_blocked()
            ring.close()
    assert got == {"a": b"0\n1\n2\n3\n4\n", "b": b"0\n1\n2\n3\n4\n"}


async def test_a_slow_follower_is_told_what_it_missed():
    ring = LineRing(3)
    follower = ring.follow(0)
    ring.feed(b"".join(b"%d\n" % n for n in range(10)))
    assert await follower.__anext__() == b"1bit serve: 7 lines are missing here\n7\n8\n9\n"
    ring.feed(b"10\n")
    assert await follower.__anext__() == b"10\n"


async def test_a_closed_ring_ends_its_followers():
    ring = LineRing()
    ring.feed(b"one\n")
    ring.close()
    follower = ring.follow(5)
    assert await follower.__anext__() == b"one\n"
    with pytest.raises(StopAsyncIteration):
        await follower.__anext__()
