"""Lazy backends: one start for many, none in use ever stopped, room made for the next."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import trio
from front_door import Front, request_bytes
from llama_process import DEADLINE_S, until

from onebit_serve.cli.prepare import prepare
from onebit_serve.core.life import State
from onebit_serve.core.plan import Plan
from onebit_serve.core.route import Order
from onebit_serve.live.house import House
from onebit_serve.live.idle import Room, free_bytes
from onebit_serve.live.lease import RefusedError
from onebit_serve.live.log import Log
from onebit_serve.live.orders import Orders

CHAT = "/v1/chat/completions"
GIB = 1 << 30

Start = Callable[..., Front]


LISTED = "devices='GPU0: one (98304 MiB, 97520 MiB free);GPU1: two (98304 MiB, 97520 MiB free)'"


def configuration(
    folder: Path, program: str, model: str, knobs: dict[str, str], *, keys: str = ""
) -> Path:
    """Write a configuration of a CPU that is the default and of lazy backends with knobs."""
    tables = [f'[backend]\nmodel = "{model}"\nllama_server = "{program}"\n{keys}']
    for name, said in {"cpu": "", **knobs}.items():
        fake = f"rec={folder}/{name}.jsonl starts={folder}/{name}.starts {LISTED} {said}"
        lazy = "false" if name == "cpu" else "true"
        tables.append(
            f'[[backends]]\nname = "{name}"\ndevice = "{name}"\nalias = "m"\nlazy = {lazy}\n'
            f"env = {{ FAKE_LLAMA = {json.dumps(fake)} }}"
        )
    file = folder / "serve.toml"
    file.write_text("\n".join(tables))
    return file


@pytest.fixture
def start(fake_llama: str, tiny_models: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a front door: long documents go to the lazy GPU0, everything else to the CPU."""
    started: list[Front] = []

    def begin(knobs: str = "", *, keys: str = "", **more: Any) -> Front:
        policy = tmp_path / "policy.json"
        policy.write_text(
            json.dumps({"default": "cpu", "classes": {"long_doc": {"device": "GPU0"}}})
        )
        model = str(tiny_models / "tiny-llama.gguf")
        file = configuration(tmp_path, fake_llama, model, {"GPU0": knobs}, keys=keys)
        started.append(
            Front(tmp_path, "--config", str(file), "--route-policy", str(policy), **more)
        )
        return started[-1].ready()

    yield begin
    for front in started:
        front.stop()


def long_chat(number: int = 0, **more: Any) -> dict[str, Any]:
    text = f"{number} " + "word " * 300
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def state_of(front: Front, name: str = "GPU0") -> dict[str, Any]:
    shown = front.client.get("/v1/status").json()["backends"]
    found: dict[str, Any] = next(backend for backend in shown if backend["name"] == name)
    return found


def starts(front: Front, name: str = "GPU0") -> int:
    file = front.folder / f"{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return sum(json.loads(line)["event"] == "start" for line in lines)


def ask(front: Front, number: int = 0) -> httpx.Response:
    return httpx.post(front.url + CHAT, json=long_chat(number), timeout=DEADLINE_S, trust_env=False)


def test_64_first_requests_are_one_start(start: Start) -> None:
    front = start("load=1")
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda n: ask(front, n), range(64)))
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.headers["x-1bit-route"] for reply in replies} == {"long_doc - GPU0"}
    assert starts(front) == 1
    assert len(front.said("picked by laya")) == 1
    assert front.log.index("picked by laya") < front.log.rindex("warm-up request on port")


def test_a_start_that_fails_tells_all_who_wait(start: Start) -> None:
    front = start("load=1 dead_at=load:3 last=out-of-memory")
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda n: ask(front, n), range(64)))
    assert {reply.status_code for reply in replies} == {503}
    assert all("code 3" in reply.json()["error"]["message"] for reply in replies)
    assert {reply.headers["x-1bit-route"] for reply in replies} == {"long_doc - GPU0"}
    assert starts(front) == 1
    assert front.health().status_code == 200


def test_who_leaves_while_waiting_changes_nothing_for_the_others(start: Start) -> None:
    front = start("load=6")
    with ThreadPoolExecutor(16) as pool:
        with front.raw(request_bytes(CHAT, json.dumps(long_chat()).encode())):
            until(lambda: state_of(front)["waiting"] == 1, "one who waits")
            others = [pool.submit(ask, front, n) for n in range(16)]
            until(lambda: state_of(front)["waiting"] == 17, "all to wait")
        until(lambda: state_of(front)["waiting"] == 16, "one to leave")
        assert {other.result().status_code for other in others} == {200}
    assert starts(front) == 1


def test_an_idle_backend_is_stopped_and_comes_back(start: Start) -> None:
    front = start("load=0.6", keys="idle_s = 0.3")
    assert ask(front).status_code == 200  # the load is longer than idle_s, which does not count it
    until(lambda: state_of(front)["state"] == "stopped", "the idle one to stop")
    assert front.wait_said("GPU0 is stopped: no request for 0.3 s (idle_s)")
    assert state_of(front, "cpu")["state"] == "ready"
    assert front.health().status_code == 200
    assert ask(front).status_code == 200
    assert starts(front) == 2


def test_a_stream_that_is_longer_than_idle_s_is_not_cut(start: Start) -> None:
    front = start("tps=10", keys="idle_s = 0.2")
    body = json.dumps(long_chat(stream=True) | {"max_tokens": 12}).encode()
    with front.raw(request_bytes(CHAT, body)) as raw:
        raw.until(b"data: [DONE]")
    until(lambda: state_of(front)["state"] == "stopped", "the idle one to stop")
    assert starts(front) == 1


@pytest.mark.slow
def test_forty_starts_and_unloads_under_traffic_leak_nothing(start: Start) -> None:
    front = start("tps=40", keys="idle_s = 0.15")
    us = psutil.Process(front.process.pid)
    over, cut = threading.Event(), []

    def keep_asking(number: int) -> None:
        client = httpx.Client(base_url=front.url, timeout=DEADLINE_S, trust_env=False)
        with client:
            while not over.is_set():
                short = {"messages": [{"role": "user", "content": f"hi {number}"}]}
                with client.stream(
                    "POST", CHAT, json={**short, "max_tokens": 8, "stream": True}
                ) as reply:
                    text = reply.read()
                if reply.status_code != 200 or b"[DONE]" not in text:
                    cut.append(text)

    def cycle(number: int) -> None:
        reply = front.post(CHAT, long_chat(number, stream=True))
        assert b"[DONE]" in reply.content, reply.content
        until(lambda: state_of(front)["state"] == "stopped", "the idle one to stop")

    def held() -> tuple[int, int]:
        return us.num_fds(), len(us.children(recursive=True))

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(keep_asking, number) for number in range(2)]
        for number in range(5):
            cycle(number)
        before_bytes = us.memory_info().rss
        for number in range(5, 40):
            cycle(number)
        after_bytes = us.memory_info().rss
        over.set()
        for one in asked:
            one.result()
    assert not cut
    assert starts(front) == 40
    assert held()[1] == 2  # the default's child and its guard
    assert held()[0] < 40
    assert after_bytes - before_bytes < 8 << 20


# room


class Memory:
    """A device of 10 GiB, of which each loaded backend holds six, and gives them back late."""

    def __init__(self) -> None:
        self.house: House | None = None
        self.late = 2
        self.asked = 0

    async def free(self, _plan: Any) -> int:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        assert self.house
        gone = (State.STOPPED, State.FAILED)
        held = sum(view.state not in gone for view in self.house.views() if view.name != "cpu")
        if not held and self.late:
            self.late -= 1
            held = 1
        return (10 - 6 * held) * GIB


@pytest.fixture
def plan(fake_llama: str, tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Plan a CPU and two lazy GPUs whose model needs six GiB."""
    model = str(tiny_models / "tiny-llama.gguf")

    def make(keys: str = ""):
        file = configuration(
            tmp_path, fake_llama, model, {"GPU0": "tps=20", "GPU1": ""}, keys="enabled = true"
        )
        file.write_text(file.read_text().replace("enabled = true", keys))
        found = prepare(["--config", str(file)], {"PATH": "/usr/bin:/bin"}).plan
        backends = tuple(msgspec.structs.replace(one, size_bytes=5 * GIB) for one in found.backends)
        return msgspec.structs.replace(found, backends=backends)

    monkeypatch.setattr("onebit_serve.live.idle._POLL_S", 0.01)
    monkeypatch.setattr("onebit_serve.live.idle._LOOK_AGAIN_S", 0.01)
    return make


@contextlib.asynccontextmanager
async def housed(plan: Plan, memory: Memory) -> AsyncIterator[tuple[House, trio.Nursery]]:
    """Run a house whose devices have this memory, and stop it at the end."""
    async with trio.open_nursery() as nursery:
        house = memory.house = House(plan, Log(), nursery)
        house.room = Room(house.__iter__, Log(), nursery, memory.free)
        for backend in house:
            backend.starter = house.room.start
        with trio.fail_after(DEADLINE_S):
            yield house, nursery
            await house.stop()
        nursery.cancel_scope.cancel()


async def test_the_least_recently_used_makes_room_for_the_next(plan) -> None:
    memory = Memory()
    async with housed(plan(), memory) as (house, nursery):
        first, second = house.get("GPU0"), house.get("GPU1")
        lease = await first.admit(30)
        answered = trio.Event()

        async def want_second() -> None:
            (await second.admit(30)).end(whole=True)
            answered.set()

        nursery.start_soon(want_second)
        while memory.asked < 3:  # noqa: ASYNC110 - it has looked, and looked again
            await trio.sleep(0.01)
        assert second.view().waiting == 1
        assert first.view().state is State.READY  # in use: it is not stopped
        assert second.view().state is State.STOPPED
        lease.end(whole=True)
        await second.wait_for(lambda v: v.state is State.READY)
        assert first.view().state is State.STOPPED
        assert memory.late == 0  # its memory was waited for
        await answered.wait()


async def test_one_that_is_never_idle_is_held_so_that_another_has_its_turn(
    plan, monkeypatch
) -> None:
    monkeypatch.setattr("onebit_serve.live.idle._PATIENCE_S", 0.0)
    memory = Memory()
    async with housed(plan(), memory) as (house, nursery):
        first, second = house.get("GPU0"), house.get("GPU1")
        answered: list[str] = []

        async def want(backend: Any) -> None:
            (await backend.admit(30)).end(whole=True)
            answered.append(backend.plan.name)

        lease = await first.admit(30)
        nursery.start_soon(want, second)
        while not first.held:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.01)
        nursery.start_soon(want, first)  # comes while it is held: it waits its own turn
        while not first.view().waiting:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.01)
        lease.end(whole=True)
        while len(answered) < 2:  # noqa: ASYNC110 - as above
            await trio.sleep(0.01)
        assert answered == ["GPU1", "GPU0"]
        assert not first.held


async def test_one_that_makes_room_is_not_started_by_its_own_next_request_before_the_other(
    plan,
) -> None:
    memory = Memory()
    async with housed(plan(), memory) as (house, nursery):
        first, second = house.get("GPU0"), house.get("GPU1")
        answered: list[str] = []

        async def want(backend: Any) -> None:
            (await backend.admit(30)).end(whole=True)
            answered.append(backend.plan.name)

        (await first.admit(30)).end(whole=True)
        nursery.start_soon(want, second)
        await first.wait_for(lambda v: v.state is not State.READY)
        nursery.start_soon(want, first)
        while len(answered) < 2:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.01)
        assert answered == ["GPU1", "GPU0"]


async def test_two_that_are_wanted_at_once_do_not_both_take_the_same_memory(plan) -> None:
    memory = Memory()
    memory.late = 0
    async with housed(plan(), memory) as (house, nursery):
        together = 0

        async def want(backend: Any) -> None:
            nonlocal together
            lease = await backend.admit(30)
            held = [view for view in house.views() if view.name != "cpu" and view.state.live]
            together = max(together, len(held))
            lease.end(whole=True)

        async with trio.open_nursery() as both:
            both.start_soon(want, house.get("GPU0"))
            both.start_soon(want, house.get("GPU1"))
        assert together == 1
        assert nursery.child_tasks


async def test_a_program_that_cannot_be_asked_for_its_devices_ends_nothing(plan) -> None:
    (_, gpu, _) = plan().backends
    assert await free_bytes(msgspec.structs.replace(gpu, binary="/nowhere/llama-server")) is None


async def test_a_start_by_order_for_one_that_runs_stops_nobody(plan) -> None:
    memory = Memory()
    memory.late = 0
    async with housed(plan(), memory) as (house, _):
        first = house.get("GPU0")
        (await first.admit(30)).end(whole=True)
        asked = memory.asked
        await Orders(house, lambda: house.plan, Log()).obey(Order("start", "GPU0"))
        assert memory.asked == asked
        assert first.view().state is State.READY


async def test_an_order_that_waits_for_room_ends_with_the_backend(plan) -> None:
    memory = Memory()
    async with housed(plan(), memory) as (house, _):
        lease = await house.get("GPU0").admit(30)
        house.room.start(house.get("GPU1"), ordered=True)
        fewer = msgspec.structs.replace(house.plan, backends=house.plan.backends[:2])
        assert (await house.reload(fewer))["stopped"] == ["GPU1"]
        lease.end(whole=True)
        while house.room._pending:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.01)
        assert house.get("GPU0").view().state is State.READY


async def test_a_start_by_order_makes_room_too_and_a_stop_takes_it_back(plan) -> None:
    memory = Memory()
    async with housed(plan(), memory) as (house, _):
        first, second = house.get("GPU0"), house.get("GPU1")
        orders = Orders(house, lambda: house.plan, Log())
        lease = await first.admit(30)
        await orders.obey(Order("start", "GPU1"))
        while memory.asked < 3:  # noqa: ASYNC110 - it has looked, and looked again
            await trio.sleep(0.01)
        await orders.obey(Order("stop", "GPU1"))
        while house.room._pending:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.01)
        lease.end(whole=True)
        assert first.view().state is State.READY
        await orders.obey(Order("start", "GPU1"))
        await second.wait_for(lambda v: v.state is State.READY)
        assert first.view().state is State.STOPPED


async def test_a_pinned_one_stays_and_the_next_is_started_all_the_same(plan) -> None:
    memory = Memory()
    memory.late = 0
    async with housed(plan("pin = true"), memory) as (house, _):
        (await house.get("GPU0").admit(30)).end(whole=True)
        (await house.get("GPU1").admit(30)).end(whole=True)
        assert house.get("GPU0").view().state is State.READY


async def test_nobody_is_unloaded_for_one_who_left(plan) -> None:
    memory = Memory()
    async with housed(plan(), memory) as (house, _):
        first, second = house.get("GPU0"), house.get("GPU1")
        lease = await first.admit(30)
        with pytest.raises(RefusedError):
            await second.admit(0.2)
        while house.room._pending:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.01)
        lease.end(whole=True)
        assert first.view().state is State.READY
        assert second.view().state is State.STOPPED
