"""When warm prompts are repaired, by a keeper without a process: idle, in vain, given up."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import pytest
import trio
from plans import backend_plan

from onebit_serve.core.prompt_plan import PromptPlan
from onebit_serve.core.warm_prompts import Entry, Standing
from onebit_serve.live import prompts
from onebit_serve.live.prompts import PromptKeeper

SYSTEM = {"role": "system", "content": "You review Rust code."}
PATH = "/v1/chat/completions"
STANDING = Standing("entry 1", tokens=9, reused_tokens=9, proven=True)


class Warmer:
    """Has one entry that is proven at first; its repairs never end where they are slow."""

    def __init__(self):
        self.standings = (STANDING,)
        self.slow = True
        self.begun = trio.Event()
        self.ended = trio.Event()
        self.given_up = []

    @property
    def due(self):
        return [0] if self.standings[0].evicted else []

    def used(self, index, count):
        self.standings = (self.standings[index].used(count),)

    def lost_all(self):
        self.standings = (self.standings[0].used(0),)

    def give_up(self, index, why):
        self.given_up.append((index, why))

    async def repair(self):
        self.begun.set()
        if not self.slow:
            self.standings = (STANDING,)
            return
        try:
            await trio.sleep_forever()
        finally:
            self.ended.set()


@pytest.fixture
def keeper(monkeypatch):
    monkeypatch.setattr(prompts, "_IDLE_S", 0)
    entry = Entry((SYSTEM,), label="entry 1")
    plan = backend_plan(prompts=PromptPlan((entry,)))
    log = SimpleNamespace(lines=[])
    log.say = lambda line, **_: log.lines.append(line)
    made = PromptKeeper(plan, log)
    made._warmer = Warmer()
    return made


BODY = json.dumps({"messages": [SYSTEM, {"role": "user", "content": "hi"}]}).encode()


async def test_a_client_who_comes_cancels_a_repair_and_it_begins_again_when_idle(keeper):
    async with trio.open_nursery() as nursery:
        keeper.note(PATH, BODY, b'{"cache_n":0}')
        for _ in range(2):
            warmer = keeper._warmer
            warmer.begun, warmer.ended = trio.Event(), trio.Event()
            keeper.idle(nursery)
            with trio.fail_after(10):
                await warmer.begun.wait()
                keeper.busy()
                await warmer.ended.wait()
        assert warmer.due


GONE, FOUND = b'{"cache_n":0}', b'{"cache_n":9}'
WOKE = b"srv: server is exiting sleeping state\n"


async def repaired(keeper):
    keeper._warmer.slow = False
    async with trio.open_nursery() as nursery:
        keeper.idle(nursery)
    assert not keeper._warmer.due


async def test_an_entry_that_clients_find_gone_after_three_repairs_is_given_up(keeper):
    keeper.note(PATH, BODY, GONE)
    for _ in range(3):
        assert not keeper._warmer.given_up
        await repaired(keeper)
        keeper.note(PATH, BODY, GONE)
        keeper.note(PATH, BODY, GONE)  # before there was time to repair it
    assert keeper._warmer.given_up == [(0, "clients find it gone after 3 repairs")]
    assert "repaired no more" in keeper._log.lines[-1]


async def test_a_new_warm_up_gives_an_entry_that_was_given_up_three_repairs_again(keeper):
    async def warm():
        keeper._warmer.standings = (STANDING,)

    keeper._warmer.warm = warm
    for times in (1, 2):
        keeper.note(PATH, BODY, GONE)
        for _ in range(3):
            await repaired(keeper)
            keeper.note(PATH, BODY, GONE)
        assert len(keeper._warmer.given_up) == times
        async with trio.open_nursery() as nursery:
            await keeper.rewarm(nursery, clear=False)


async def test_one_hit_and_the_repairs_before_it_are_forgotten(keeper):
    keeper.note(PATH, BODY, GONE)
    for found in (GONE, GONE, FOUND, GONE, GONE):
        await repaired(keeper)
        keeper.note(PATH, BODY, found)
        if found == FOUND:
            keeper._warmer.lost_all()
    assert not keeper._warmer.given_up


async def test_what_sleeps_took_is_put_back_however_often(keeper):
    for _ in range(5):
        keeper.hear(WOKE)
        keeper.note(PATH, BODY, GONE)  # whose request woke it
        await repaired(keeper)
    assert not keeper._warmer.given_up


async def test_a_warm_up_that_is_asked_for_forgets_no_clearing_that_still_waits(keeper):
    done, asked, waits, busy = [], trio.Event(), trio.Event(), trio.Event()

    async def clear():
        waits.set()
        await busy.wait()
        done.append("cleared")

    async def warm():
        done.append("warm")
        asked.set()

    keeper._warmer.clear, keeper._warmer.warm = clear, warm
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await keeper.rewarm(nursery, clear=True)
            await waits.wait()
            await keeper.rewarm(nursery, clear=False)
            busy.set()
            await asked.wait()
        assert done == ["cleared", "warm"]
        async with trio.open_nursery() as nursery:
            await keeper.rewarm(nursery, clear=False)
    assert done == ["cleared", "warm", "warm"]


async def test_what_a_warm_up_left_over_is_repaired_though_no_client_comes_any_more(keeper):
    keeper._warmer.slow = False

    async def warm():
        keeper._warmer.lost_all()

    keeper._warmer.warm = warm
    async with trio.open_nursery() as nursery:
        keeper.busy()
        await keeper.rewarm(nursery, clear=False)
    assert keeper._warmer.due
    async with trio.open_nursery() as nursery:
        keeper.idle(nursery)
        await keeper.rewarm(nursery, clear=False)
    assert not keeper._warmer.due


async def test_what_a_repair_could_not_prove_is_tried_again_until_it_is_given_up(keeper):
    tries = []

    async def repair():
        tries.append(1)
        unproven = msgspec.structs.replace(STANDING, proven=False, why="0 of 9", evicted=True)
        keeper._warmer.standings = (
            msgspec.structs.replace(unproven, evicted=False) if len(tries) == 3 else unproven,
        )

    keeper._warmer.repair = repair
    keeper.note(PATH, BODY, GONE)
    async with trio.open_nursery() as nursery:
        keeper.idle(nursery)
    assert len(tries) == 3
    assert keeper._log.lines == ["warm prompt entry 1 is repaired no more: 0 of 9"]


def test_a_child_that_woke_has_lost_all(keeper):
    keeper.hear(b"srv: server is entering sleeping state\n")
    assert not keeper._warmer.due
    keeper.hear(b"srv: server is exiting sleeping state\n")
    assert keeper._warmer.due


async def test_prompts_are_at_work_from_the_first_thought_of_a_repair_to_its_end(keeper):
    assert not keeper.at_work
    async with trio.open_nursery() as nursery:
        keeper.note(PATH, BODY, b'{"cache_n":0}')
        keeper._warmer.begun, keeper._warmer.ended = trio.Event(), trio.Event()
        keeper.idle(nursery)
        assert keeper.at_work
        with trio.fail_after(10):
            await keeper._warmer.begun.wait()
            keeper.busy()
    assert not keeper.at_work
