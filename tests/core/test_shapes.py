from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit_serve.core.shapes import (
    Classes,
    Histogram,
    Shape,
    ShapeModel,
    Splitting,
    classes_for,
    demand,
    shows_checkpoints,
    smoothed,
)

DENSE = Splitting()
HYBRID = Splitting(checkpoints=True)

splittings = st.builds(
    Splitting,
    ubatch_tokens=st.sampled_from([32, 256, 500, 512, 2048]),
    batch_tokens=st.sampled_from([512, 700, 2048]),
    checkpoints=st.booleans(),
)
devices = st.sampled_from(["hrx", "vulkan", "rocm", "cpu"])


# Seen with `-lv 5` on llama-server b10068: dense llama; gemma3 (sliding window) and qwen35 (hybrid)
# alike. The log gives where batches start; micro-batches inside them are of 512 tokens.
@pytest.mark.parametrize(
    ("splitting", "tokens", "pieces"),
    [
        (DENSE, 1, (1,)),
        (DENSE, 30, (30,)),
        (DENSE, 512, (512,)),
        (DENSE, 600, (512, 88)),
        (DENSE, 2500, (512, 512, 512, 512, 452)),
        (HYBRID, 3, (3,)),
        (HYBRID, 4, (4,)),
        (HYBRID, 5, (1, 4)),
        (HYBRID, 6, (2, 4)),
        (HYBRID, 30, (26, 4)),
        (HYBRID, 516, (512, 4)),
        (HYBRID, 517, (1, 512, 4)),
        (HYBRID, 600, (84, 512, 4)),
        (HYBRID, 700, (184, 512, 4)),
        (HYBRID, 2500, (512, 512, 512, 448, 512, 4)),
    ],
)
def test_prompts_are_cut_as_llama_server_cuts_them(splitting, tokens, pieces):
    assert splitting.pieces(tokens) == pieces


@given(splittings, st.integers(1, 8192))
def test_the_pieces_of_a_prompt_are_all_of_it(splitting, tokens):
    pieces = splitting.pieces(tokens)
    assert sum(pieces) == tokens
    assert min(pieces) > 0
    assert max(pieces) <= min(splitting.ubatch_tokens, splitting.batch_tokens)


@given(splittings, st.integers(1, 512))
def test_the_shortest_prompt_for_a_size_has_a_piece_of_it(splitting, tokens):
    tokens = min(tokens, splitting.ubatch_tokens, splitting.batch_tokens)
    assert tokens in splitting.pieces(splitting.prompt_for(tokens))


@settings(max_examples=20, deadline=None)
@given(splittings, devices, st.integers(1, 16))
def test_every_length_up_to_8192_is_covered_by_the_full_set(splitting, device, sequences):
    model = ShapeModel(splitting, classes_for(device, splitting.ubatch_tokens), sequences)
    full = set(model.full_set())
    for tokens in range(1, 8193, 7):
        assert model.prefill(tokens) <= full
    for together in range(1, sequences + 1):
        assert model.decode(together) <= full


@pytest.mark.parametrize("device", ["hrx", "vulkan"])
@pytest.mark.parametrize("splitting", [DENSE, HYBRID])
def test_every_single_length_up_to_8192_is_covered(splitting, device):
    model = ShapeModel(splitting, classes_for(device), 4)
    full = set(model.full_set())
    assert all(model.prefill(tokens) <= full for tokens in range(1, 8193))


def test_hrx_has_a_class_for_every_remainder_and_the_full_micro_batch():
    model = ShapeModel(DENSE, classes_for("HRX0"), 1)
    assert {shape.tokens for shape in model.full_set() if not shape.sequences} == set(range(1, 513))
    assert model.prefill(1000) == {Shape(512), Shape(488)}


def test_vulkan_has_the_measured_classes():
    classes = classes_for("Vulkan0")
    seen = [classes.representative(n) for n in (1, 8, 9, 16, 32, 33, 64, 65, 465, 600)]
    assert seen == [1, 8, 9, 9, 9, 33, 33, 65, 65, 65]


def test_the_cpu_builds_nothing_per_size():
    model = ShapeModel(DENSE, classes_for("cpu"), 4)
    assert model.full_set() == ()
    assert model.prefill(600) == frozenset()


def test_a_prompt_and_a_decode_step_of_as_many_tokens_are_kept_apart():
    model = ShapeModel(DENSE, classes_for("vulkan"), 4)
    assert model.prefill(1) == {Shape(1)}
    assert model.decode(1) == {Shape(1, 1)}
    assert model.prefill(3) == {Shape(3)}


def test_on_the_way_to_three_sequences_two_and_one_decode():
    model = ShapeModel(DENSE, classes_for("vulkan"), 4)
    assert model.decode(3) == {Shape(1, 1), Shape(2, 2), Shape(3, 3)}


def test_more_sequences_than_slots_never_decode_together():
    model = ShapeModel(DENSE, classes_for("vulkan"), 2)
    assert model.decode(3) == model.decode(2)


def test_a_slot_smaller_than_the_micro_batch_limits_the_full_set():
    model = ShapeModel(DENSE, classes_for("hrx"), 1, context_tokens=256)
    assert max(shape.tokens for shape in model.full_set()) == 256


def test_without_traffic_short_prompts_after_a_warmed_prefix_are_expected():
    wanted = demand(ShapeModel(DENSE, classes_for("hrx"), 1))
    likely = {next(iter(need)).tokens for need, _ in wanted.rows[:12] if len(need) == 1}
    assert {*range(1, 9), 16, 48, 128} <= likely


def test_the_shares_of_prefills_and_of_decodes_add_up_to_one_each():
    model = ShapeModel(DENSE, classes_for("hrx"), 4)
    wanted = demand(model, Histogram(prefill={30: 5.0, 700: 2.0}, decode={2: 3.0}))
    prefills = sum(w for need, w in wanted.rows if not any(s.sequences for s in need))
    assert prefills == pytest.approx(1.0)
    assert wanted.mass(model.full_set()) == pytest.approx(sum(w for _, w in wanted.rows))


def test_traffic_outweighs_the_default_expectation():
    model = ShapeModel(DENSE, classes_for("hrx"), 1)
    wanted = demand(model, Histogram(prefill={37: 400.0}))
    assert wanted.rows[0][0] == {Shape(37)}


def test_a_size_that_came_often_stands_out_of_its_neighbourhood():
    lean = smoothed({200: 40.0, 300: 1.0})
    assert lean[200] > 10 * lean[201] > 0
    assert lean[300] < 1.0


def test_large_counts_stay_as_they_are():
    flat = smoothed({n: 1000.0 + (100.0 if n % 2 else -100.0) for n in range(100, 400)})
    assert flat[251] == pytest.approx(1100.0, rel=0.01)
    assert flat[250] == pytest.approx(900.0, rel=0.01)


@pytest.mark.parametrize(
    ("total", "processed", "shown"),
    [
        (465, [0, 465], False),
        (465, [0, 461, 465], True),
        (700, [0, 184, 696, 700], True),
        (4, [0, 4], None),
        (465, [], None),
        (465, [0], None),
    ],
)
def test_the_progress_of_a_prompt_shows_checkpoints(total, processed, shown):
    assert shows_checkpoints(total, processed) is shown


def test_classes_without_starts_have_no_representative():
    assert Classes().representative(5) is None
