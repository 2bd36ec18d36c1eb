from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit_serve.core.ladder import (
    CHEAP_S,
    Costs,
    Request,
    Warmed,
    calibrate,
    climb,
    default_first_s,
    learn,
    warms,
)
from onebit_serve.core.shapes import (
    Histogram,
    Shape,
    ShapeModel,
    Splitting,
    classes_for,
    demand,
)

HRX = ShapeModel(Splitting(), classes_for("hrx"), 4)
HYBRID_HRX = ShapeModel(Splitting(checkpoints=True), classes_for("hrx"), 1)
VULKAN = ShapeModel(Splitting(), classes_for("vulkan"), 4)
SMALL = ShapeModel(Splitting(ubatch_tokens=8, batch_tokens=32), classes_for("hrx", 8), 3)
SMALL_HYBRID = ShapeModel(
    Splitting(ubatch_tokens=8, batch_tokens=32, checkpoints=True), classes_for("hrx", 8), 2
)
COSTS = Costs(request_s=0.01, token_s=0.0005, step_s=0.02, first_s=0.165)

histograms = st.builds(
    Histogram,
    prefill=st.dictionaries(st.integers(1, 60), st.floats(0.1, 300), max_size=12),
    decode=st.dictionaries(st.integers(1, 4), st.floats(0.1, 300), max_size=4),
)
models = st.sampled_from([SMALL, SMALL_HYBRID, VULKAN])


@settings(max_examples=30, deadline=None)
@given(models, histograms, st.floats(0.0, 5.0))
def test_before_and_idle_together_warm_all_that_can_be_reached(model, past, budget_s):
    ladder = climb(model, demand(model, past), COSTS, budget_s, idle_max_s=0)
    warm = frozenset[Shape]().union(*(r.shapes for r in (*ladder.before, *ladder.idle)))
    assert warm == frozenset(model.full_set())
    assert ladder.before_s <= budget_s + 1e-9


@settings(max_examples=30, deadline=None)
@given(models, histograms, st.integers(1, 8192))
def test_every_length_is_covered_by_the_whole_plan(model, past, tokens):
    ladder = climb(model, demand(model, past), COSTS, 1.0, idle_max_s=0)
    warm = frozenset[Shape]().union(*(r.shapes for r in (*ladder.before, *ladder.idle)))
    assert model.prefill(tokens) <= warm


def test_one_prompt_warms_the_full_micro_batch_and_a_remainder():
    past = Histogram(prefill={700: 500.0, 30: 300.0}, decode={1: 800.0})
    ladder = climb(HRX, demand(HRX, past), COSTS, 1.2)
    (both,) = (r for r in ladder.before if Shape(512) in r.shapes)
    assert both.prompt_tokens > 512
    assert both.shapes == {Shape(512), Shape(both.prompt_tokens - 512)}
    warm = frozenset[Shape]().union(*(r.shapes for r in ladder.before))
    assert {Shape(512), Shape(188), Shape(30)} <= warm
    assert len(ladder.before) == len(warm) - 1


def test_one_burst_warms_every_number_of_sequences():
    past = Histogram(prefill={30: 10.0}, decode={2: 100.0, 3: 100.0, 4: 100.0})
    ladder = climb(VULKAN, demand(VULKAN, past), COSTS, 2.5)
    bursts = [r for r in ladder.before if r.sequences > 1]
    assert bursts == [
        Request(
            1,
            (8, 10, 12, 14),
            frozenset({Shape(1, 1), Shape(2, 2), Shape(3, 3), Shape(4, 4)}),
        )
    ]


def test_the_bursts_of_a_fast_backend_are_longer_so_that_they_overlap():
    fast = Costs(request_s=0.01, token_s=0.0005, step_s=0.001, first_s=0.165)
    ladder = climb(VULKAN, demand(VULKAN), fast, 0.0)
    (pair,) = (r for r in ladder.idle if r.sequences == 2)
    assert pair.decode_tokens == (150, 170)
    ages = climb(VULKAN, demand(VULKAN), Costs(step_s=0.0), 0.0)
    assert max(max(r.decode_tokens) for r in ages.idle) < 1000


def test_on_models_with_checkpoints_the_tail_is_part_of_every_request():
    assert warms(HYBRID_HRX, 34, (1,)) == {Shape(30), Shape(4)}
    ladder = climb(HYBRID_HRX, demand(HYBRID_HRX, Histogram(prefill={34: 900.0})), COSTS, 0.45)
    assert ladder.before[0].shapes | ladder.before[-1].shapes >= {Shape(30), Shape(4)}


def test_what_is_warm_already_is_not_planned_again():
    done = warms(HRX, 465, (8,))
    assert done == {Shape(465), Shape(1, 1)}
    ladder = climb(HRX, demand(HRX), COSTS, 3.0, done=done)
    planned = frozenset[Shape]().union(*(r.shapes for r in (*ladder.before, *ladder.idle)))
    assert not {Shape(465)} & planned


def test_shapes_whose_first_use_is_known_to_be_cheap_are_left_out():
    measured = dict.fromkeys(VULKAN.full_set(), 0.001)
    costs = Costs(measured=measured)
    ladder = climb(VULKAN, demand(VULKAN), costs, 3.0)
    assert (ladder.before, ladder.idle) == ((), ())
    assert ladder.cheap == VULKAN.full_set()
    assert ladder.mass == pytest.approx(demand(VULKAN).mass(VULKAN.full_set()))


def test_idle_sends_short_requests_first_and_nothing_over_its_limit():
    ladder = climb(HRX, demand(HRX), COSTS, 0.0, idle_max_s=0.2)
    times = [COSTS.prefill(request) for request in ladder.idle]
    short = [time <= 0.05 for time in times]
    assert short == sorted(short, reverse=True)
    assert max(times) <= 0.2
    assert Shape(512) in ladder.too_long


def test_without_a_budget_nothing_runs_before_ready():
    assert climb(HRX, demand(HRX), COSTS, 0.0).before == ()


def test_a_device_that_builds_nothing_has_an_empty_plan():
    model = ShapeModel(Splitting(), classes_for("cpu"), 4)
    ladder = climb(model, demand(model), COSTS, 3.0)
    assert (ladder.before, ladder.idle) == ((), ())


def test_requests_fit_a_small_context():
    model = ShapeModel(Splitting(), classes_for("hrx"), 1, context_tokens=128)
    ladder = climb(model, demand(model), COSTS, 3.0, idle_max_s=0)
    assert max(r.prompt_tokens for r in (*ladder.before, *ladder.idle)) < 128


def test_a_first_use_is_learnt_from_the_difference_to_the_second():
    request = Request(33, (1,), frozenset({Shape(33)}))
    costs = learn(COSTS, Warmed(request, first_s=2.974, again_s=0.093))
    assert costs.first(Shape(33)) == pytest.approx(2.881)
    assert costs.first(Shape(9)) == COSTS.first_s


def test_what_two_new_shapes_cost_is_shared_and_warm_ones_get_none_of_it():
    request = Request(700, (1,), frozenset({Shape(512), Shape(188), Shape(1)}))
    costs = learn(COSTS, Warmed(request, 1.36, 1.0), already={Shape(1)})
    assert costs.measured == {Shape(512): pytest.approx(0.18), Shape(188): pytest.approx(0.18)}


def test_a_few_measured_first_uses_predict_the_rest():
    costs = COSTS
    for tokens, first_s in ((3, 0.13), (5, 0.14), (7, 0.2)):
        request = Request(tokens, (1,), frozenset({Shape(tokens)}))
        costs = learn(costs, Warmed(request, first_s + 0.05, 0.05))
    assert costs.first(Shape(100)) == pytest.approx(0.14)


def test_warm_times_follow_what_replies_show():
    costs = COSTS
    for _ in range(40):
        costs = calibrate(costs, 1000, 2.05, 0.04)
        costs = calibrate(costs, 2, 0.054)
    assert costs.token_s == pytest.approx(0.002, rel=0.02)
    assert costs.request_s == pytest.approx(0.05, rel=0.02)
    assert costs.step_s == pytest.approx(0.04, rel=0.02)


def test_a_cache_of_an_earlier_run_makes_first_uses_cheaper():
    assert default_first_s("HRX0", cache_found=True) == default_first_s("hrx") / 10


ONE = Request(33, (1,), frozenset({Shape(33)}))


def cheap(costs):
    return {shape for shape, cost in costs.measured.items() if cost < CHEAP_S}


def test_a_first_use_is_cheap_when_the_same_request_was_no_faster_after_it():
    assert cheap(learn(COSTS, Warmed(ONE, 0.050, 0.048))) == {Shape(33)}


def test_a_first_use_is_not_cheap_because_its_warm_time_was_predicted_too_long():
    costs = learn(COSTS, Warmed(Request(513, (1,), frozenset({Shape(512), Shape(1)})), 0.2))
    assert costs.measured == {Shape(512): CHEAP_S, Shape(1): CHEAP_S}


def test_a_first_use_is_not_cheap_where_a_client_may_have_built_it_before():
    assert learn(COSTS, Warmed(ONE, 0.050, 0.048), may_be_built=True) == COSTS
    dear = learn(COSTS, Warmed(ONE, 0.250, 0.050), may_be_built=True)
    assert dear.measured == {Shape(33): pytest.approx(0.2)}


def test_of_several_first_uses_that_share_a_cost_none_is_cheap():
    shapes = frozenset(Shape(n, n) for n in range(1, 9))
    costs = learn(COSTS, Warmed(Request(1, (8,) * 8, shapes), 0.55, 0.50))
    assert not cheap(costs)
