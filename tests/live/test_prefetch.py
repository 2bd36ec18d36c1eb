from __future__ import annotations

import os
import threading
from functools import partial

import msgspec
import pytest
import tiny_models as models
import trio
from front_door import Front
from plans import backend_plan

from onebit_serve.live import prefetch
from onebit_serve.live.prefetch import fetch, files_of, parts_of, resident_bytes

SIZE_BYTES = 3 * prefetch.STEP_BYTES + 12_345


@pytest.fixture
def cold(tmp_path):
    """Make files that are not in the page cache."""

    def make(name="model.gguf", size_bytes=SIZE_BYTES):
        path = tmp_path / name
        with path.open("wb") as file:
            file.write(os.urandom(1 << 20) * (size_bytes >> 20))
            file.write(b"x" * (size_bytes % (1 << 20)))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if resident_bytes(path):
            pytest.skip("this file system keeps files in memory")
        return path

    return make


async def test_a_cold_file_is_in_memory_afterwards(cold):
    path = cold()
    fetched = await fetch([path])
    assert (fetched.outcome, fetched.read_bytes) == ("read", SIZE_BYTES)
    assert resident_bytes(path) == SIZE_BYTES


async def test_all_parts_are_read(cold):
    names = [f"big-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    paths = [cold(name, prefetch.STEP_BYTES + 5) for name in names]
    assert parts_of(paths[0]) == tuple(paths)
    fetched = await fetch(parts_of(paths[0]))
    assert fetched.read_bytes == fetched.total_bytes == 3 * (prefetch.STEP_BYTES + 5)
    assert all(resident_bytes(path) == prefetch.STEP_BYTES + 5 for path in paths)


def test_a_model_in_one_file_has_one_part(tmp_path):
    assert parts_of(tmp_path / "m.gguf") == (tmp_path / "m.gguf",)


def test_parts_that_are_missing_are_left_out(tmp_path):
    first = tmp_path / "m-00001-of-00002.gguf"
    first.write_text("x")
    assert parts_of(first) == (first,)


async def test_a_file_in_memory_is_left_alone(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 100_000)
    assert (await fetch([path])).outcome == "resident"


async def test_a_file_that_would_not_fit_is_left_alone(cold):
    path = cold()
    fetched = await fetch([path], available_bytes=SIZE_BYTES // 2)
    assert fetched.outcome == "short"
    assert "MiB more memory" in fetched.detail
    assert resident_bytes(path) == 0


async def test_two_at_once_do_not_count_on_the_same_memory(cold):
    first, second = cold("first.gguf"), cold("second.gguf")
    begun, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def pause(_done, _total):
        token.run_sync_soon(begun.set)
        go_on.wait(10)

    room = SIZE_BYTES * 3 // 2
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(fetch, [first], pause, available_bytes=room))
            await begun.wait()
            assert (await fetch([second], available_bytes=room)).outcome == "short"
            go_on.set()
    assert (await fetch([second], available_bytes=room)).outcome == "read"


def test_a_draft_model_and_a_projector_are_read_with_their_model(tmp_path):
    names = ("m.gguf", "head-00001-of-00002.gguf", "head-00002-of-00002.gguf", "eyes.gguf")
    model, head, rest, eyes = (tmp_path / name for name in names)
    for path in (model, head, rest, eyes):
        path.write_text("x")
    arguments = ("-md", str(head), "--mmproj", str(eyes))
    plan = backend_plan(model=str(model), arguments=arguments)
    assert files_of(plan) == (model, head, rest, eyes)
    missing = msgspec.structs.replace(plan, arguments=("-mm", str(tmp_path / "none.gguf")))
    assert files_of(missing) == (model,)


async def test_progress_grows_to_the_whole(cold):
    seen = []
    await fetch([cold()], lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (SIZE_BYTES, SIZE_BYTES)
    assert len(seen) == 4


async def test_where_residence_is_unknown_the_file_is_read(cold, monkeypatch):
    path = cold()
    monkeypatch.setattr(prefetch, "resident_bytes", lambda _: None)
    assert (await fetch([path])).outcome == "read"


async def test_a_cancelled_prefetch_stops_after_the_pieces_under_way(cold, monkeypatch):
    path = cold(size_bytes=12 * prefetch.STEP_BYTES)
    monkeypatch.setattr(prefetch, "IN_FLIGHT", 1)
    begun, go_on, threads, seen = trio.Event(), threading.Event(), [], []
    token = trio.lowlevel.current_trio_token()

    def pause(done, _total):
        seen.append(done)
        threads.append(threading.current_thread())
        token.run_sync_soon(begun.set)
        go_on.wait(10)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, [path], pause)
            await begun.wait()
            nursery.cancel_scope.cancel()
    go_on.set()
    threads[0].join(10)
    assert seen == [prefetch.STEP_BYTES]


async def test_a_missing_file_is_said(tmp_path):
    fetched = await fetch([tmp_path / "none.gguf"])
    assert fetched.outcome == "unreadable"
    assert "none.gguf" in fetched.detail


async def test_a_file_that_shrinks_meanwhile_ends_the_prefetch(cold, monkeypatch):
    path = cold()
    monkeypatch.setattr(prefetch, "IN_FLIGHT", 1)

    def shrink(_done, _total):
        os.truncate(path, 100)

    fetched = await fetch([path], shrink)
    assert fetched.outcome == "unreadable"
    assert "shorter" in fetched.detail


def test_an_empty_file_is_not_resident(tmp_path):
    path = tmp_path / "empty.gguf"
    path.touch()
    assert resident_bytes(path) == 0


def padded(tmp_path, size_bytes=SIZE_BYTES):
    """Write a model with so many bytes behind it, and take it out of memory."""
    path = models.write("llama", tmp_path)
    with path.open("ab") as file:
        file.write(os.urandom(size_bytes))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.fixture
def served(fake_llama, tmp_path):
    """Start a front door whose fake backend loads for two seconds and reads no file."""
    started = []

    def start(model, *arguments):
        constants = {"WORTH_BYTES": 1}
        words = ["-m", str(model), "--llama-server", fake_llama, "--device", "cpu", *arguments]
        front = Front(tmp_path, *words, knobs="load=2", constants=constants)
        started.append(front)
        return front.ready()

    yield start
    for front in started:
        front.stop()


def test_a_cold_model_is_read_while_its_child_starts(served, tmp_path):
    model = padded(tmp_path)
    if resident_bytes(model) == model.stat().st_size:
        pytest.skip("this file system keeps files in memory")
    front = served(model)
    (line,) = front.said("into memory in")
    assert "read tiny-llama.gguf (0.0 GiB)" in line
    # Some pages may have been taken back by now: this says that it was read, not that it stays.
    assert resident_bytes(model) > 0.9 * model.stat().st_size


@pytest.mark.parametrize("arguments", [(), ("--", "--direct-io")], ids=["resident", "direct"])
def test_a_model_in_memory_or_read_past_it_is_left_alone(served, tmp_path, arguments):
    model = padded(tmp_path)
    if not arguments:
        model.read_bytes()
    front = served(model, *arguments)
    assert not front.said("into memory in")
