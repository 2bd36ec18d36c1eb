from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebit_serve.core import life as machine
from onebit_serve.core.life import (
    Broken,
    Exited,
    Halted,
    Healthy,
    IllegalMoveError,
    Life,
    Pause,
    PauseOver,
    RestartPolicy,
    Start,
    State,
    Stop,
    Wanted,
    Warmed,
    WarmUp,
    step,
)

POLICY = RestartPolicy()
EVENTS = [Wanted(), Healthy(), Warmed(), Broken("hung"), Halted(), Exited("code 1"), PauseOver()]


def follow(*events, life=None, policy=POLICY, now_s=0.0):
    life, effects = life or Life(), ()
    for event in events:
        now_s += 1.0
        life, effects = step(life, event, now_s, policy)
    return life, effects


def reach(state):
    """A life in each state, reached by events alone."""
    started = [Wanted()]
    ready = [*started, Healthy(), Warmed()]
    return {
        State.STOPPED: lambda: follow()[0],
        State.LOADING: lambda: follow(*started)[0],
        State.WARMING: lambda: follow(*started, Healthy())[0],
        State.READY: lambda: follow(*ready)[0],
        State.STOPPING: lambda: follow(*ready, Halted())[0],
        State.BACKOFF: lambda: follow(*ready, Exited("signal SIGKILL"))[0],
        State.FAILED: lambda: follow(*started, Exited("code 1"))[0],
    }[state]()


LEGAL = [
    (State.STOPPED, Wanted(), State.LOADING, (Start(),)),
    (State.STOPPED, Halted(), State.STOPPED, ()),
    (State.LOADING, Wanted(), State.LOADING, ()),
    (State.LOADING, Healthy(), State.WARMING, (WarmUp(),)),
    (State.LOADING, Broken("late"), State.STOPPING, (Stop(),)),
    (State.LOADING, Halted(), State.STOPPING, (Stop(),)),
    (State.LOADING, Exited("code 1"), State.FAILED, ()),
    (State.WARMING, Wanted(), State.WARMING, ()),
    (State.WARMING, Warmed(), State.READY, ()),
    (State.WARMING, Broken("hung"), State.STOPPING, (Stop(),)),
    (State.WARMING, Halted(), State.STOPPING, (Stop(),)),
    (State.WARMING, Exited("signal SIGSEGV"), State.FAILED, ()),
    (State.READY, Wanted(), State.READY, ()),
    (State.READY, Broken("hung"), State.STOPPING, (Stop(),)),
    (State.READY, Halted(), State.STOPPING, (Stop(),)),
    (State.READY, Exited("signal SIGKILL"), State.BACKOFF, (Pause(0.0),)),
    (State.STOPPING, Wanted(), State.STOPPING, ()),
    (State.STOPPING, Halted(), State.STOPPING, ()),
    (State.STOPPING, Exited("code 0"), State.STOPPED, ()),
    (State.BACKOFF, Wanted(), State.BACKOFF, ()),
    (State.BACKOFF, Halted(), State.STOPPED, ()),
    (State.BACKOFF, PauseOver(), State.LOADING, (Start(),)),
    (State.FAILED, Wanted(), State.LOADING, (Start(),)),
    (State.FAILED, Halted(), State.STOPPED, ()),
]


def name_of(value):
    return value.name if isinstance(value, State) else type(value).__name__


@pytest.mark.parametrize(("before", "event", "after", "effects"), LEGAL, ids=name_of)
def test_each_legal_move_ends_where_the_table_says(before, event, after, effects):
    life, done = step(reach(before), event, 100.0, POLICY)
    assert life.state is after
    assert done == effects


def test_every_other_move_is_refused_and_changes_nothing():
    legal = {(before, type(event)) for before, event, _, _ in LEGAL}
    illegal = [
        (state, event)
        for state, event in itertools.product(State, EVENTS)
        if (state, type(event)) not in legal
    ]
    assert len(illegal) == len(State) * len(EVENTS) - len(LEGAL)
    for state, event in illegal:
        life = reach(state)
        with pytest.raises(IllegalMoveError, match=f"{type(event).__name__} .* {state.name}"):
            step(life, event, 100.0, POLICY)
        assert life == reach(state)


def test_a_first_start_that_fails_is_not_tried_again():
    life, effects = follow(Wanted(), Exited("code 1; its last line: bad magic"))
    assert (life.state, effects) == (State.FAILED, ())
    assert "bad magic" in life.cause


def test_a_first_start_that_hangs_fails_with_the_cause_of_the_hang_not_of_the_kill():
    life, _ = follow(Wanted(), Healthy(), Broken("no progress for 120 s"), Exited("signal SIGKILL"))
    assert life.state is State.FAILED
    assert life.cause == "no progress for 120 s"


def test_a_port_that_was_stolen_starts_again_at_once_even_in_a_first_start():
    life, effects = follow(Wanted(), Exited("port 4711 was taken", again=True))
    assert (life.state, effects) == (State.LOADING, (Start(),))
    assert life.starts == 2


def test_ready_is_reached_through_the_warm_up_after_every_restart():
    life, _ = follow(Wanted(), Healthy(), Warmed(), Exited("signal SIGKILL"), PauseOver())
    assert life.state is State.LOADING
    with pytest.raises(IllegalMoveError):
        step(life, Warmed(), 10.0, POLICY)
    life, _ = follow(Healthy(), Warmed(), life=life, now_s=10.0)
    assert (life.state, life.restarts, life.cause) == (State.READY, 1, "")


def test_a_warm_up_that_failed_makes_a_ready_backend_degraded_until_the_next_start():
    life, _ = follow(Wanted(), Healthy(), Warmed(degraded="HTTP 500"))
    assert (life.state, life.degraded) == (State.READY, "HTTP 500")
    life, _ = follow(Exited("code 1"), PauseOver(), life=life, now_s=10.0)
    assert life.degraded == ""


def test_one_that_is_wanted_again_while_it_stops_starts_when_the_old_child_is_gone():
    life, effects = follow(Wanted(), Healthy(), Warmed(), Halted(), Wanted())
    assert (life.state, effects) == (State.STOPPING, ())
    life, effects = follow(Exited("code 0"), life=life, now_s=10.0)
    assert (life.state, effects) == (State.LOADING, (Start(),))


def test_one_that_is_halted_again_while_it_stops_is_no_longer_wanted():
    life, _ = follow(Wanted(), Healthy(), Warmed(), Halted(), Wanted(), Halted(), Exited("code 0"))
    assert life.state is State.STOPPED


def test_a_request_to_stop_wins_over_a_stop_for_cause():
    life, _ = follow(Wanted(), Healthy(), Warmed(), Broken("hung"), Halted(), Exited("SIGKILL"))
    assert (life.state, life.cause) == (State.STOPPED, "")


def test_pauses_grow_and_the_budget_ends_in_failed():
    policy = RestartPolicy(burst=4, window_s=1000.0, base_s=1.0, limit_s=3.0)
    life, _ = follow(Wanted(), Healthy(), Warmed(), policy=policy)
    pauses = []
    for n in range(5):
        life, effects = step(life, Exited("code 1"), 10.0 + n, policy)
        pauses += [e.pause_s for e in effects]
        if life.state is State.BACKOFF:
            life, _ = follow(PauseOver(), Healthy(), Warmed(), life=life, policy=policy, now_s=10.0)
    assert pauses == [0.0, 1.0, 2.0, 3.0]
    assert life.state is State.FAILED


def test_failures_outside_the_window_are_forgotten():
    life, _ = follow(Wanted(), Healthy(), Warmed())
    for n in range(20):
        life, effects = step(life, Exited("code 1"), 1000.0 * (n + 1), POLICY)
        assert effects == (Pause(0.0),)
        life, _ = follow(PauseOver(), Healthy(), Warmed(), life=life, now_s=1000.0 * (n + 1))


def test_a_plain_child_of_another_supervisor_is_never_restarted():
    policy = RestartPolicy(enabled=False)
    life, effects = follow(Wanted(), Healthy(), Warmed(), Exited("code 1"), policy=policy)
    assert (life.state, effects) == (State.FAILED, ())


def test_a_failed_backend_gets_a_fresh_budget_when_it_is_wanted_again():
    life, _ = follow(Wanted(), Exited("code 1"), Wanted())
    assert (life.state, life.failures_s, life.ever_ready) == (State.LOADING, (), False)


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_a_child_exists_exactly_when_live_or_stopping(events):
    life, children = Life(), 0
    for now_s, event in enumerate(events):
        if isinstance(event, Exited) and children == 0:
            continue
        try:
            life, effects = step(life, event, float(now_s), POLICY)
        except IllegalMoveError:
            continue
        children -= isinstance(event, Exited)
        children += sum(isinstance(e, Start) for e in effects)
        assert children == (life.state.live or life.state is State.STOPPING)


def test_all_names_are_exported_in_order():
    assert machine.__all__ == sorted(machine.__all__, key=str)
