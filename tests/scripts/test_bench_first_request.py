"""The arithmetic of the first request: gaps, what the model asks for, what is claimed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(FOLDER))
import bench_first_request as bench  # noqa: E402

sys.path.remove(str(FOLDER))

FAKE = bench.Stand("fake", "the fake", (), {}, (465, 301))


def one(arm="warm", load=1, number=1, tokens=465, prefill=100.0, decode=10.0, unbuilt=()):
    return bench.Request("fake", arm, load, tokens, number, prefill, decode, unbuilt)


def as_the_model_says():
    """Return a whole run, two loads an arm, whose gaps are the model's own."""
    found = []
    for arm in ("warm", "cold"):
        for load, tokens, number in [
            (x, n, r) for x in (1, 2) for n in (465, 301) for r in (1, 2, 3)
        ]:
            prefill, decode = bench.predicted(FAKE, arm, tokens) if number == 1 else (0, 0)
            unbuilt = (("decode:1",) if decode else ()) + (
                (f"prefill:{tokens}",) if prefill else ()
            )
            rates = 100 - prefill, (100 - decode) / 10
            found.append(one(arm, load, number, tokens, *rates, unbuilt))
    return found


def test_a_gap_is_what_the_first_lacks_to_the_best_later_one():
    assert bench.gap_percent(80, [90, 100]) == pytest.approx(20)
    assert bench.gap_percent(110, [100]) == pytest.approx(-10)


def test_gaps_are_formed_load_by_load_whatever_the_order_of_the_requests():
    requests = [
        one(load=2, number=2, decode=20.0),
        one(load=2, number=1, decode=10.0),
        one(load=1, number=3, decode=8.0),
        one(load=1, number=1, decode=9.0),
        one(load=1, number=2, decode=10.0),
        one(load=1, arm="cold", decode=1.0),
    ]
    loads = bench.chosen(requests, "fake", "warm", 465)
    assert bench.gaps(loads, bench.decode) == pytest.approx([10, 50])


def test_a_load_without_later_requests_has_no_gap():
    assert bench.gaps([[one()]], bench.decode) == []


def test_the_model_asks_for_the_costs_that_hrx_has():
    prefill, decode = bench.predicted_gaps(465, prefill_built=False, decode_built=False)
    assert 16 < prefill < 22  # 140 to 190 ms on top of 697.5
    assert 4.7 < decode < 6.6  # 5 to 7 % more time
    assert bench.predicted_gaps(465, prefill_built=True, decode_built=True) == (0, 0)


def test_only_the_warm_ups_own_length_is_built_beforehand():
    assert bench.predicted(FAKE, "warm", 465) == (0, 0)
    prefill, decode = bench.predicted(FAKE, "warm", 301)
    assert prefill > 0
    assert decode == 0


def test_a_run_as_the_model_says_keeps_every_claim():
    assert {c.outcome for c in bench.claims(FAKE, as_the_model_says())} == {"pass"}


@pytest.mark.parametrize(
    ("spoilt", "claim"),
    [
        (one(number=2, unbuilt=("prefill:465",)), "shapes unbuilt"),
        (one(number=2, unbuilt=("decode:1",)), "shapes unbuilt"),
        (one(decode=9.8), "largest decode gap"),
        (one("cold", decode=10.0), "cold: decode gap"),
        (one("cold", prefill=100.0), "cold: prefill gap"),
    ],
)
def test_a_claim_fails_where_one_request_breaks_it(spoilt, claim):
    place = (spoilt.arm, spoilt.load, spoilt.number, spoilt.prompt_tokens)
    requests = [
        spoilt if (r.arm, r.load, r.number, r.prompt_tokens) == place else r
        for r in as_the_model_says()
    ]
    failed = [c.text for c in bench.claims(FAKE, requests) if c.outcome == "fail"]
    assert any(claim in text for text in failed)


def test_a_run_without_requests_is_not_measured_and_no_pass():
    assert [c.outcome for c in bench.claims(FAKE, [])] == ["not measured"]


def test_a_request_of_another_length_that_met_its_shape_unbuilt_breaks_no_claim():
    requests = [*as_the_model_says(), one(load=3, tokens=301, unbuilt=("prefill:301",))]
    assert {c.outcome for c in bench.claims(FAKE, requests)} == {"pass"}


def test_the_table_counts_the_requests_that_met_something_unbuilt():
    table = bench.table(FAKE, as_the_model_says())
    counts = {row[:2]: row[-1] for row in table.rows}
    assert counts == {
        ("465", "warm"): "0",
        ("465", "cold"): "2",
        ("301", "warm"): "2",
        ("301", "cold"): "2",
    }
    assert {len(row) for row in table.rows} == {len(table.columns)}
