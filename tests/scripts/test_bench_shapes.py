"""The arithmetic of the shapes' benchmark: traffic, what a prompt needs, what could be reached."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PLACES = [str(SCRIPTS), str(SCRIPTS / "bench_shapes")]
sys.path[:0] = PLACES
import hrx as bench  # noqa: E402
import vulkan  # noqa: E402

for place in PLACES:
    sys.path.remove(place)


def test_a_prompt_needs_the_full_micro_batch_and_the_rest():
    assert bench.needs(465) == {"prefill:465"}
    assert bench.needs(1054) == {"prefill:512", "prefill:30"}


def test_a_prompt_pays_nothing_only_if_all_it_uses_is_built():
    have = frozenset({"prefill:512", "prefill:3"})
    assert bench.share_of([512, 1024, 3, 515, 4], have) == pytest.approx(0.8)


@pytest.mark.parametrize("kind", bench.MIXES)
def test_more_budget_reaches_no_less(kind):
    lengths = bench.traffic(kind, 500, Random(1))
    shares = [bench.best_share(lengths, budget_s) for budget_s in (0.0, 1.0, 3.0)]
    assert shares == sorted(shares)
    assert min(lengths) >= 1


def test_a_table_has_the_medians_of_first_and_second():
    found = {"a": {8: [(1.0, 0.1), (3.0, 0.3)]}, "b": {8: [(0.5, 0.25)]}}
    table = vulkan.first_second("t", found, ("a", "b"))
    assert table.rows == (("8", "2000 / 200", "500 / 250"),)


def test_the_history_of_an_earlier_run_is_forgotten(tmp_path):
    env = {"XDG_STATE_HOME": str(tmp_path)}
    file = bench.state_file(env)
    file.parent.mkdir()
    for suffix in ("", "-wal", "-shm"):
        file.with_name(file.name + suffix).touch()
    bench.forget(env)
    bench.forget(env)
    assert list(file.parent.iterdir()) == []
