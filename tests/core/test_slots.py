from __future__ import annotations

import pytest

from onebit_serve.core.slots import (
    Placement,
    Room,
    plan_slots,
    save_name,
    shared_tokens,
)

MIB = 1 << 20


def unlike(count, length=100):
    return [[number * 1000 + i for i in range(length)] for number in range(count)]


def twins(count, shared=70, length=100):
    return [[*range(-shared, 0), *[-1000 - n] * (length - shared)] for n in range(count)]


def slots_of(plan):
    return [place.slots for place in plan.placements]


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([1], [2], 0)],
)
def test_tokens_are_shared_up_to_the_first_that_differs(left, right, shared) -> None:
    assert shared_tokens(left, right) == shared


def test_one_prompt_goes_into_every_slot_for_parallel_requests() -> None:
    assert slots_of(plan_slots(unlike(1), Room(4, 4096))) == [(0, 1, 2, 3)]


def test_slots_left_over_repeat_the_first_prompts() -> None:
    assert slots_of(plan_slots(unlike(3), Room(4, 4096))) == [(0, 3), (1,), (2,)]


def test_prompts_that_share_their_head_have_slots_of_their_own_while_there_are_any() -> None:
    plan = plan_slots(twins(2), Room(2, 4096))
    assert slots_of(plan) == [(0,), (1,)]
    assert plan.pinned


def test_more_unlike_prompts_than_slots_go_through_the_host_cache() -> None:
    plan = plan_slots(unlike(12), Room(4, 4096, host_bytes=MIB, token_bytes=512))
    assert slots_of(plan) == [()] * 12
    assert not any(place.refused for place in plan.placements)
    assert (plan.host_tokens, plan.host_bytes, plan.pinned) == (1200, 1200 * 512, False)


def test_without_a_host_cache_what_has_no_slot_is_refused() -> None:
    plan = plan_slots(unlike(6), Room(4, 4096, host_bytes=0))
    assert slots_of(plan) == [(0,), (1,), (2,), (3,), (), ()]
    assert "no host cache" in plan.placements[4].refused


def test_an_estimate_that_says_no_refuses_nothing() -> None:
    plan = plan_slots(unlike(12), Room(4, 4096, host_bytes=MIB, token_bytes=2048))
    assert not any(place.refused for place in plan.placements)
    assert plan.host_bytes == 12 * 100 * 2048 > MIB


def test_a_host_cache_without_limit_takes_all() -> None:
    plan = plan_slots(unlike(12), Room(4, 4096, host_bytes=None, token_bytes=1 << 30))
    assert not any(place.refused for place in plan.placements)


def test_a_size_that_is_not_known_is_told_as_not_known() -> None:
    assert plan_slots(unlike(12), Room(4, 4096, host_bytes=MIB)).host_bytes is None


def test_twins_keep_slots_while_others_pass_through_the_host_cache() -> None:
    plan = plan_slots([*unlike(6), *twins(2)], Room(4, 4096, host_bytes=MIB))
    assert slots_of(plan) == [()] * 6 + [(0,), (1,)]


def test_a_twin_too_many_is_refused_and_says_of_whom() -> None:
    plan = plan_slots([*unlike(3), *twins(5)], Room(4, 4096, host_bytes=MIB))
    refused = [i for i, place in enumerate(plan.placements) if place.refused]
    assert refused == [6, 7]  # one slot stays for what passes through, three twins fit
    assert "with prompt 4" in plan.placements[6].refused
    assert slots_of(plan)[3:6] == [(0,), (1,), (2,)]


def test_a_twin_that_could_pass_alone_moves_to_a_slot_when_its_twin_comes() -> None:
    plan = plan_slots([*twins(1), *unlike(3), twins(2)[1]], Room(4, 4096, host_bytes=MIB))
    assert slots_of(plan) == [(0,), (), (), (), (1,)]
    assert plan.host_tokens == 300


def test_prompts_that_nobody_can_keep_are_refused() -> None:
    plan = plan_slots([[], [1] * 4096, [2] * 4095], Room(2, 4096))
    assert plan.placements[0].refused == "no token is common to all user texts"
    assert plan.placements[1].refused == "4096 tokens do not fit a slot of 4096"
    assert plan.placements[2] == Placement(2, (0, 1))


def test_a_saved_slot_belongs_to_binary_model_flags_and_tokens() -> None:
    base = {"binary": "b", "model": "m", "flags": ["-c", "4096"]}
    names = {
        save_name([1, 2], **base),
        save_name([1, 3], **base),
        save_name([1, 2], **{**base, "binary": "other"}),
        save_name([1, 2], **{**base, "model": "other"}),
        save_name([1, 2], **{**base, "flags": ["-c", "8192"]}),
    }
    assert len(names) == 5
    assert all("/" not in name and name.endswith(".bin") for name in names)
    assert save_name([1, 2], **base) in names
