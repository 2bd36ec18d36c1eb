from __future__ import annotations

from random import Random

import pytest

from onebit_serve.core.climb import UNPINNED, begin, free_slots, is_used
from onebit_serve.core.ladder import Costs
from onebit_serve.core.shapes import Histogram, Shape, ShapeModel, Splitting, classes_for

HRX = ShapeModel(Splitting(ubatch_tokens=64, batch_tokens=256), classes_for("hrx", 64), 4)
VULKAN = ShapeModel(Splitting(), classes_for("vulkan"), 4)
EMPTY = [{"id": 0, "is_processing": False}]


class Backend:
    """A backend that builds each shape once, at its first use."""

    def __init__(self, model, first_s, token_s=0.0005, step_s=0.02):
        self.model = model
        self.first_s = first_s
        self.token_s = token_s
        self.step_s = step_s
        self.built = set()

    def run(self, shapes, prompt_tokens, steps):
        new = shapes - self.built
        self.built |= new
        return 0.01 + prompt_tokens * self.token_s + steps * self.step_s + self.first_s * len(new)

    def send(self, request):
        return self.run(request.shapes, request.prompt_tokens, max(request.decode_tokens) - 1)


def climb_before(climb, backend, budget_s):
    """Send what fits the budget, by the backend's clock; return the climb and what is left."""
    while True:
        climb, request = climb.before(budget_s)
        if request is None:
            return climb, budget_s
        first_s = backend.send(request)
        budget_s -= first_s
        climb = climb.completed(request, first_s)


def climb_idle(climb, backend):
    for _ in range(1000):
        climb, request, slots = climb.idle([{"id": i} for i in range(4)], host_cache=False)
        if request is None:
            return climb
        assert len(slots) == request.sequences
        climb = climb.completed(request, backend.send(request), backend.send(request))
    pytest.fail("idle warm-up did not come to an end")


@pytest.mark.parametrize("model", [HRX, VULKAN])
def test_after_ready_and_idle_time_no_request_meets_a_shape_not_yet_built(model):
    backend = Backend(model, 0.165)
    backend.run(model.prefill(465) | model.decode(1), 465, 7)
    climb = begin(model, "hrx", first_prompt_tokens=465, first_decode_tokens=8)
    climb, left_s = climb_before(climb, backend, 3.0)
    assert left_s > -0.5
    climb = climb_idle(climb, backend)
    random = Random(5)
    for _ in range(200):
        assert model.prefill(random.randint(1, 8192)) <= backend.built
    assert climb.view().share == pytest.approx(1.0)


def test_the_budget_is_kept_when_first_uses_cost_far_more_than_expected():
    backend = Backend(VULKAN, 2.0)
    climb, left_s = climb_before(begin(VULKAN, "vulkan"), backend, 3.0)
    # Two surprises at most: the costs are known after the first ones, and no plan fits any more.
    assert len(climb.sent) <= 3
    assert left_s > -4.0


def test_when_first_uses_are_cheaper_than_expected_more_of_them_fit():
    dear, cheap = Backend(VULKAN, 0.5), Backend(VULKAN, 0.01)
    few, _ = climb_before(begin(VULKAN, "vulkan"), dear, 3.0)
    many, _ = climb_before(begin(VULKAN, "vulkan"), cheap, 3.0)
    assert len(many.done) > len(few.done)


def test_what_clients_have_built_is_not_sent():
    climb = begin(HRX, "hrx").served(40, 0.2)
    assert Shape(40) in climb.done
    climb, _ = climb_before(climb, Backend(HRX, 0.165), 30.0)
    assert all(Shape(40) not in one.request.shapes for one in climb.sent)


def test_warm_replies_of_clients_teach_costs_and_cold_ones_do_not():
    climb = begin(HRX, "hrx", costs=Costs(token_s=0.001))
    cold = climb.served(600, 60.0)
    assert cold.costs == climb.costs
    assert cold.served(600, 6.0).costs.token_s > climb.costs.token_s


def test_what_clients_may_have_built_is_not_left_out_of_later_starts():
    costs = None
    for _ in range(2):  # a shape that clients use at once after each start
        climb = begin(HRX, "hrx", costs=costs)
        _, request, _ = climb.idle(EMPTY, host_cache=False)
        costs = climb.completed(request, 0.051, 0.050, may_be_built=True).costs
    later, _ = climb_before(begin(HRX, "hrx", costs=costs), Backend(HRX, 0.165), 300.0)
    assert later.ladder.cheap == ()
    assert later.done >= request.shapes


def test_the_first_request_limits_what_tokens_and_steps_are_expected_to_take():
    first = {"first_prompt_tokens": 465, "first_prompt_s": 0.093, "first_step_s": 0.2}
    climb = begin(HRX, "hrx", **first)
    assert climb.costs.token_s == pytest.approx(0.0002)
    assert climb.costs.step_s == 0.2
    known = begin(HRX, "hrx", costs=Costs(token_s=0.0001, step_s=0.02), **first)
    assert (known.costs.token_s, known.costs.step_s) == (0.0001, 0.02)


def test_a_request_faster_than_expected_is_sent_once_more_before_it_counts_as_cheap():
    climb, request = begin(HRX, "hrx").before(3.0)
    expected_s = climb.costs.warm(request)
    assert climb.seems_cheap(request, expected_s)
    assert not climb.seems_cheap(request, expected_s + 0.165)
    assert not climb.completed(request, expected_s).seems_cheap(request, expected_s)


def test_a_client_alone_teaches_what_a_decode_step_takes():
    climb = begin(HRX, "hrx").served(40, 0.3).served(40, 0.05, step_s=0.01)
    assert climb.costs.step_s == pytest.approx(0.02)


def test_a_burst_waits_for_as_many_free_slots():
    climb = begin(VULKAN, "vulkan", histogram=Histogram(decode={4: 1000.0}))
    sizes = set()
    backend = Backend(VULKAN, 0.1)
    while True:
        climb, request, _ = climb.idle(EMPTY, host_cache=False)
        if request is None:
            break
        sizes.add(request.sequences)
        climb = climb.completed(request, backend.send(request))
    assert sizes == {1}
    climb, request, slots = climb.idle([{"id": i} for i in range(4)], host_cache=False)
    assert request.sequences > 1
    assert slots == tuple(range(request.sequences))


def test_slots_that_hold_a_prefix_are_spared_without_a_host_cache():
    slots = [
        {"id": 0, "is_processing": False, "n_prompt_tokens": 600},
        {"id": 1, "is_processing": True, "n_prompt_tokens": 30},
        {"id": 2, "is_processing": False, "n_prompt_tokens": 0},
        {"id": 3, "is_processing": False},
    ]
    assert free_slots(slots, 1, host_cache=False) == (2,)
    assert free_slots(slots, 2, host_cache=False, ours={0}) == (0, 2)
    assert free_slots(slots, 3, host_cache=False) == ()


def test_a_slot_that_holds_a_prefix_is_never_pinned_but_left_to_the_server():
    used = [{"id": n, "n_prompt_tokens": 600} for n in range(2)]
    assert free_slots(used, 1, host_cache=True) == (UNPINNED,)
    assert free_slots(used, 2, host_cache=True) == (UNPINNED, UNPINNED)
    assert free_slots(used, 3, host_cache=True) == ()
    assert free_slots([*used, {"id": 2}], 1, host_cache=True) == (2,)
    # Pinned ones beside it could be sent to the slot that the server chose for it.
    assert free_slots([*used, {"id": 2}], 2, host_cache=True) == (UNPINNED, UNPINNED)


def test_a_slot_of_a_build_that_does_not_say_how_long_its_prompt_is_counts_as_used():
    slots = [{"id": 0, "id_task": 5}, {"id": 1, "id_task": -1}, {"id": 2}]
    assert free_slots(slots, 2, host_cache=False) == (1, 2)
    assert free_slots(slots, 3, host_cache=False) == ()
    assert not is_used({"id": 3, "id_task": 5, "n_prompt_tokens": 0})


def test_once_all_is_warm_nothing_is_planned_again():
    backend = Backend(VULKAN, 0.1)
    climb = climb_idle(begin(VULKAN, "vulkan"), backend)
    again, request, _ = climb.idle(EMPTY, host_cache=False)
    assert request is None
    assert again == climb


def test_what_did_not_fit_the_budget_is_sent_while_idle():
    climb, request = begin(VULKAN, "vulkan").before(3.0)
    assert climb.ladder.before[0] == request
    idle, _, _ = climb.idle(EMPTY, host_cache=False)
    waiting = frozenset[Shape]().union(*(r.shapes for r in idle.ladder.idle))
    assert waiting == frozenset(VULKAN.full_set())


def test_prompts_that_turn_out_to_be_slow_are_not_sent_while_idle():
    slow = Backend(HRX, 0.165, token_s=0.02)
    climb = climb_idle(begin(HRX, "hrx", idle_max_s=0.5), slow)
    # The first long one shows it; from then on what takes more than half a second stays out.
    assert sum(one.again_s > 0.6 for one in climb.sent) <= 2
    assert climb.ladder.too_long or len(climb.sent) < len(HRX.full_set())


def test_prompts_that_turn_out_to_be_fast_are_sent_after_all():
    climb = begin(HRX, "hrx", costs=Costs(token_s=0.1, first_s=0.165))
    climb = climb_idle(climb, Backend(HRX, 0.165, token_s=0.001))
    assert climb.done >= set(HRX.full_set())


def test_with_no_free_slot_nothing_is_sent():
    climb = begin(HRX, "hrx")
    assert climb.idle([{"id": 0, "n_prompt_tokens": 5}], host_cache=False)[1] is None


def test_status_tells_what_was_spent_and_gained():
    climb, request = begin(HRX, "hrx").before(3.0)
    climb = climb.completed(request, 0.2, 0.05)
    view = climb.view()
    assert (view.planned, view.spent_s) == (len(HRX.full_set()), pytest.approx(0.25))
    assert view.gained_s == pytest.approx(0.15)
    assert view.requests[0][1:] == (0.2, 0.05)
    assert view.warmed == len(request.shapes)


def test_a_cancelled_request_changes_nothing_and_comes_again():
    climb, request = begin(HRX, "hrx").before(3.0)
    assert climb.before(3.0)[1] == request


def test_a_driver_cache_that_was_found_lets_more_fit_the_budget():
    def planned(cache_found):
        climb, _ = begin(VULKAN, "vulkan", cache_found=cache_found).before(1.0)
        return frozenset[Shape]().union(*(r.shapes for r in climb.ladder.before))

    assert len(planned(cache_found=False)) < len(planned(cache_found=True))
