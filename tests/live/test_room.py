"""A lazy backend starts when there is room, and others give way for it in turn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from front_door import lazy_backends
from llama_process import DEADLINE_S

from onebit_serve.cli.prepare import prepare
from onebit_serve.core.life import State
from onebit_serve.core.plan import Plan
from onebit_serve.core.route import Order
from onebit_serve.live.house import House
from onebit_serve.live.lease import RefusedError
from onebit_serve.live.log import Log
from onebit_serve.live.orders import Orders
from onebit_serve.live.room import Room, free_bytes

GIB = 1 << 30


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
        file = lazy_backends(
            tmp_path, fake_llama, model, {"GPU0": "tps=20", "GPU1": ""}, keys="enabled = true"
        )
        file.write_text(file.read_text().replace("enabled = true", keys))
        found = prepare(["--config", str(file)], {"PATH": "/usr/bin:/bin"}).plan
        backends = tuple(msgspec.structs.replace(one, size_bytes=5 * GIB) for one in found.backends)
        return msgspec.structs.replace(found, backends=backends)

    monkeypatch.setattr("onebit_serve.live.room._POLL_S", 0.01)
    monkeypatch.setattr("onebit_serve.live.room._LOOK_AGAIN_S", 0.01)
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


async def ask(backend: Any, answered: list[str]) -> None:
    """Have a request answered by a backend, and note its name then."""
    (await backend.admit(30)).end(whole=True)
    answered.append(backend.plan.name)


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
    monkeypatch.setattr("onebit_serve.live.room._PATIENCE_S", 0.0)
    memory = Memory()
    async with housed(plan(), memory) as (house, nursery):
        first, second = house.get("GPU0"), house.get("GPU1")
        answered: list[str] = []
        lease = await first.admit(30)
        nursery.start_soon(ask, second, answered)
        while not first.held:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.01)
        nursery.start_soon(ask, first, answered)  # comes while it is held: it waits its own turn
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
        (await first.admit(30)).end(whole=True)
        nursery.start_soon(ask, second, answered)
        await first.wait_for(lambda v: v.state is not State.READY)
        nursery.start_soon(ask, first, answered)
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
