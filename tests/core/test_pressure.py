from __future__ import annotations

import math

import pytest

from onebit_serve.core.pressure import Resident, idle_out, make_room, next_idle_s

GIB = 1 << 30


def test_the_idle_clock_starts_at_ready_and_again_at_the_end_of_each_request() -> None:
    fresh = Resident("a", ready_s=100, idle_s=10)
    assert idle_out([fresh], 109) == ()
    assert idle_out([fresh], 110) == ("a",)
    used = Resident("a", ready_s=100, last_end_s=105, idle_s=10)
    assert idle_out([used], 114) == ()
    assert next_idle_s([used, fresh]) == 110


def test_a_request_of_an_earlier_life_does_not_count() -> None:
    assert idle_out([Resident("a", ready_s=100, last_end_s=50, idle_s=10)], 105) == ()


@pytest.mark.parametrize(
    "resident",
    [
        Resident("a", 0, idle_s=10, in_flight=1),
        Resident("a", 0, idle_s=10, kept=True),
        Resident("a", 0, idle_s=0),
    ],
)
def test_busy_and_kept_backends_and_those_without_a_limit_stay(resident) -> None:
    assert idle_out([resident], 1e9) == ()
    assert next_idle_s([resident]) == math.inf


def test_nothing_is_unloaded_where_there_is_room() -> None:
    assert make_room([Resident("a", 0, memory_bytes=GIB)], free_bytes=5, wanted_bytes=5) == ()


def test_the_least_recently_used_go_first_and_no_more_than_are_needed() -> None:
    residents = [
        Resident("new", 0, last_end_s=30, memory_bytes=GIB),
        Resident("old", 0, last_end_s=10, memory_bytes=GIB),
        Resident("older but busy", 0, last_end_s=5, in_flight=1, memory_bytes=GIB),
        Resident("older but kept", 0, last_end_s=5, kept=True, memory_bytes=GIB),
    ]
    assert make_room(residents, free_bytes=0, wanted_bytes=GIB) == ("old",)
    assert make_room(residents, free_bytes=0, wanted_bytes=2 * GIB) == ("old", "new")
    assert make_room(residents, free_bytes=0, wanted_bytes=3 * GIB) is None


def test_one_of_unknown_size_is_unloaded_alone_and_looked_at() -> None:
    residents = [Resident("a", 0), Resident("b", 1, memory_bytes=GIB)]
    assert make_room(residents, free_bytes=0, wanted_bytes=GIB) == ("a",)


def test_without_anything_to_unload_there_is_no_room() -> None:
    assert make_room([], free_bytes=1, wanted_bytes=2) is None
