"""A child's load: when it counts as healthy, and what is asked about its port."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio

from onebit_serve.core import life
from onebit_serve.live import episode, probe
from onebit_serve.live.child import Tail
from onebit_serve.live.episode import Episode

PORT = 1  # nobody is asked: both questions are answered here


@pytest.fixture
def told(monkeypatch):
    """Return what is asked and told, with answers that a test fills in."""
    seen = SimpleNamespace(health=[], owners=[], asked=[], events=[])

    async def is_healthy(port):
        assert port == PORT
        await trio.lowlevel.checkpoint()
        seen.asked.append("health")
        return seen.health.pop(0)

    def owns_port(pid, port):
        assert (pid, port) == (4711, PORT)
        seen.asked.append("owner")
        return seen.owners.pop(0)

    monkeypatch.setattr(probe, "is_healthy", is_healthy)
    monkeypatch.setattr(probe, "owns_port", owns_port)
    monkeypatch.setattr(episode, "_POLL_S", 0.0)
    monkeypatch.setattr(episode, "_POLL_GAP_S", 0.0)
    return seen


async def until_healthy(seen):
    child = SimpleNamespace(pid=4711, tail=Tail())
    plan = SimpleNamespace(kind="mlx", arguments=())
    one = Episode(
        1,
        plan,
        child,
        PORT,
        "",
        None,
        lambda *e: seen.events.append(e),
        lambda _: None,
        lambda: None,
    )
    with trio.fail_after(10):
        await one._until_healthy()
    return one


async def test_whose_port_it_is_is_asked_while_the_model_loads_and_not_again(told):
    told.health, told.owners = [None, False, False, True], [True]
    one = await until_healthy(told)
    assert told.asked == ["health", "health", "owner", "health", "health"]
    assert told.events == [(life.Healthy(), 1)]
    assert one.load_ms is not None


async def test_a_healthy_answer_on_somebody_elses_port_is_not_believed(told):
    told.health, told.owners = [True, True, True], [False, False, True]
    await until_healthy(told)
    assert told.asked == ["health", "owner"] * 3
    assert len(told.events) == 1


async def test_a_port_that_was_its_own_when_it_loads_does_not_make_it_healthy(told):
    told.health, told.owners = [False, None, True], [True]
    await until_healthy(told)
    assert told.asked == ["health", "owner", "health", "health"]
