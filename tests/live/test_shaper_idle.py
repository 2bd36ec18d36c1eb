"""When the idle warm-up waits, stops and starts anew, against answers that are given here."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import trio
from plans import backend_plan

from onebit_serve.core.http import Reply
from onebit_serve.core.warmup import WarmUpResult
from onebit_serve.live import shaper
from onebit_serve.live.shaper import Shaper

FIRST = WarmUpResult(5.0, prompt_tokens=465, decode_tokens=8)
WOKE = b"srv  update_slots: exiting sleeping state\n"


class Llama:
    """Answers what a shaper asks."""

    def __init__(self):
        self.asleep = False
        self.paths = []

    async def exchange(self, _port, _method, path, _body=b"", _key=""):
        await trio.lowlevel.checkpoint()
        self.paths.append(path)
        answers = {
            "/props": {
                "total_slots": 1,
                "default_generation_settings": {"n_ctx": 4096},
                "is_sleeping": self.asleep,
            },
            "/tokenize": {"tokens": [5, 6, 7]},
            "/slots": [{"id": 0, "is_processing": False}],
            "/completion": {},
        }
        return Reply(200, msgspec.json.encode(answers[path]))

    def count(self, path):
        return self.paths.count(path)


@pytest.fixture
def llama(monkeypatch, tmp_path):
    made = Llama()
    monkeypatch.setattr(shaper, "exchange", made.exchange)
    monkeypatch.setattr(shaper, "_IDLE_S", 0)
    monkeypatch.setattr(shaper, "_BUSY_POLL_S", 0)
    monkeypatch.setattr(shaper, "_QUIET_TIMES", 0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return made


@pytest.fixture
def prompts():
    return SimpleNamespace(wanted=False, at_work=False)


@pytest.fixture
async def ready(llama, prompts):
    plan = backend_plan(device="vulkan")
    quiet = SimpleNamespace(say=lambda *_, **__: None, progress=lambda *_: None)
    made = Shaper(plan, quiet, prompts)
    made._plan = msgspec.structs.replace(
        plan, warm_up=msgspec.structs.replace(plan.warm_up, budget_s=0, idle=True)
    )
    made.wanted = True
    await made.warm(1, "", lambda: None, FIRST)
    llama.paths.clear()
    return made


async def idle(made):
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            made.idle(nursery)


async def test_a_server_that_sleeps_is_not_woken_and_is_warmed_when_a_client_woke_it(ready, llama):
    llama.asleep = True
    await idle(ready)
    assert llama.paths == ["/props"]
    llama.asleep = False
    await idle(ready)
    assert ready.view().warmed == ready.view().planned


async def test_what_was_warm_before_a_sleep_is_warmed_again_after_it(ready, llama):
    ready.busy()  # so that no first use counts as cheap
    await idle(ready)
    sent = llama.count("/completion")
    await idle(ready)
    assert llama.count("/completion") == sent
    ready.hear(b"srv  update_slots: all slots are idle\n")
    assert ready.view().warmed == ready.view().planned
    ready.hear(WOKE)
    assert ready.view().warmed == 0
    await idle(ready)
    assert llama.count("/completion") > sent
    assert ready.view().warmed == ready.view().planned


async def test_nothing_is_sent_while_prompts_are_put_back(ready, llama, prompts):
    prompts.at_work = True
    async with trio.open_nursery() as nursery:
        ready.idle(nursery)
        with trio.fail_after(60):
            while llama.count("/slots") < 5:
                await trio.lowlevel.checkpoint()
        assert llama.count("/completion") == 0
        prompts.at_work = False
    assert llama.count("/completion") > 0


async def test_prompts_that_are_put_back_may_have_built_what_then_looks_cheap(ready, prompts):
    prompts.wanted = True  # each answer comes at once here
    await ready.warm(1, "", lambda: None, FIRST)
    await idle(ready)
    assert ready._climb.costs.measured == {}


async def test_what_is_sent_to_an_untouched_server_shows_what_is_cheap(ready):
    await idle(ready)
    assert ready._climb.costs.measured
    ready._write()
    await ready.warm(1, "", lambda: None, FIRST)
    await idle(ready)
    assert ready.view().cheap > 0


async def test_what_a_cache_of_unknown_content_makes_cheap_is_not_kept_as_cheap(ready):
    await ready.warm(1, "", lambda: None, FIRST, cache_found=True)
    await idle(ready)
    assert ready._climb.costs.measured == {}
    await ready.warm(1, "", lambda: None, FIRST, cache_found=True)
    await idle(ready)  # the run before has filled it
    assert ready._climb.costs.measured
