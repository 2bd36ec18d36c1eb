from __future__ import annotations

import pytest

from onebit_serve.core import cells as c
from onebit_serve.core import report
from onebit_serve.core.results import Request, Results, Run, Usage


def request(tag, load, ttft_ms, **more):
    fields = {"run": f"{tag}{load}", "model": "m", "prompts": "p", "concurrency": 1} | more
    return Request(tag=tag, load=load, ttft_ms=ttft_ms, **fields)


def arm(tag, typical, loads, **more):
    """Three requests a load, loads 2 % apart."""
    return [
        request(
            tag, load, typical * (1 + 0.02 * (load % 3) + 0.001 * repeat), repeat=repeat, **more
        )
        for load in range(1, loads + 1)
        for repeat in (1, 2, 3)
    ]


def results(*arms):
    return Results(requests=tuple(r for requests in arms for r in requests))


def test_a_cell_counts_loads_requests_and_errors_and_measures_the_good_ones():
    bad = request("a", 1, None, error="cut")
    worse = request("a", 1, 9e9, error="http 503")
    (cell,) = c.cells(results(arm("a", 100, 2), [bad, bad, worse]))
    assert (cell.loads, cell.requests, cell.unit) == (2, 9, "load")
    assert cell.errors == {"cut": 2, "http 503": 1}
    assert cell.spreads["ttft"].count == 6
    assert cell.spreads["ttft"].high < 200
    assert "decode" not in cell.spreads


def test_models_prompts_concurrency_and_target_are_cells_of_their_own():
    every = [
        arm("a", 1, 1),
        arm("a", 1, 1, model="n"),
        arm("a", 1, 1, prompts="q"),
        arm("a", 1, 1, concurrency=4),
        arm("a", 1, 1, target="direct"),
    ]
    assert len(c.cells(results(*every))) == 5


def test_under_five_loads_a_cell_has_no_interval_however_many_requests():
    (cell,) = c.cells(results(arm("a", 100, 4) * 20))
    assert cell.intervals["ttft"] is None
    (cell,) = c.cells(results(arm("a", 100, 5)))
    assert cell.intervals["ttft"].units == 5


def test_one_load_is_resampled_by_wave_and_not_by_request():
    one = [request("a", 1, 100.0 + repeat, repeat=repeat) for repeat in range(1, 6)]
    (cell,) = c.cells(results(one * 8))
    assert cell.unit == "wave"
    assert cell.intervals["ttft"].units == 5
    (cell,) = c.cells(results([r for r in one if r.repeat < 5] * 8))
    assert cell.intervals["ttft"] is None


def test_an_arm_that_is_three_times_faster_is_said_to_be():
    (gain,) = c.gains(results(arm("cold", 300, 5), arm("warm", 100, 5)))
    assert (gain.base, gain.tag, gain.unit) == ("cold", "warm", "load")
    assert gain.comparison.speedup == pytest.approx(3)
    assert gain.comparison.verdict == "faster"


def test_an_arm_against_itself_is_no_difference():
    (gain,) = c.gains(results(arm("a", 100, 6), arm("again", 100, 6)))
    assert gain.comparison.verdict == "no difference"


def test_runs_of_one_tag_from_several_files_are_loads_of_one_arm():
    cold = [request("cold", 1, 300.0 + n, run=f"c{n}") for n in range(5)]
    warm = [request("warm", 1, 100.0 + n, run=f"w{n}") for n in range(5)]
    (gain,) = c.gains(results(cold, warm))
    assert (gain.unit, gain.comparison.units) == ("load", 5)


def test_an_arm_of_one_load_against_many_has_no_verdict():
    (gain,) = c.gains(results(arm("a", 100, 6), arm("b", 50, 1)))
    assert (gain.comparison.interval, gain.comparison.units) == (None, 1)


def test_a_cell_that_only_one_arm_has_is_not_measured():
    found = c.gains(results(arm("a", 100, 5, concurrency=8), arm("b", 50, 5)))
    assert [gain.comparison.verdict for gain in found] == ["not measured"] * 2
    assert [gain.comparison.speedup for gain in found] == [None] * 2


def test_rates_gain_when_they_rise():
    slow = [request("a", n, 1, decode_tok_s=10.0) for n in range(5)]
    fast = [request("b", n, 1, decode_tok_s=20.0) for n in range(5)]
    (gain,) = c.gains(results(slow, fast), "decode")
    assert gain.comparison.speedup == 2


def test_no_requests_are_no_gains():
    assert c.gains(Results()) == ()


def test_request_1_is_held_against_the_best_later_one_of_its_own_load():
    every = []
    for load in range(1, 6):
        for repeat, rate in ((1, 90.0), (2, 100.0 + load), (3, 95.0)):
            every.append(
                request(
                    "a", load, 200.0 if repeat == 1 else 100.0, repeat=repeat, decode_tok_s=rate
                )
            )
    (decode,) = c.first_against_rest(results(every), "decode")
    assert (decode.loads, decode.first, decode.best) == (5, 90.0, 103.0)
    assert decode.ratios[0] == pytest.approx(101 / 90, abs=1e-4)
    assert decode.interval.low <= 103 / 90 <= decode.interval.high
    (ttft,) = c.first_against_rest(results(every), "ttft")
    assert set(ttft.ratios) == {2.0}


@pytest.mark.parametrize("more", [{"concurrency": 4}, {"target": "direct"}])
def test_a_crowd_and_the_way_beside_the_door_have_no_request_1(more):
    assert c.first_against_rest(results(arm("a", 100, 5, **more)), "ttft") == ()


def test_a_load_that_was_asked_beside_the_door_before_has_no_request_1():
    door = [
        request("a", load, 100.0, repeat=repeat, started_s=1.0)
        for load in (1, 2)
        for repeat in (1, 2)
    ]
    beside = [request("a", load, 9.0, target="direct", started_s=3.0 - load) for load in (1, 2, 3)]
    (found,) = c.first_against_rest(results(door, beside), "ttft")
    assert found.loads == 2
    beside = [request("a", load, 9.0, target="direct", started_s=2.5 - load) for load in (1, 2, 3)]
    (found,) = c.first_against_rest(results(door, beside), "ttft")
    assert found.loads == 1


def test_loads_whose_request_1_failed_do_not_count():
    failed = [request("a", 1, None, error="cut"), request("a", 1, 100.0, repeat=2)]
    assert c.first_against_rest(results(failed), "ttft") == ()


def test_the_relay_costs_what_the_door_takes_longer():
    door = arm("a", 100, 5)
    direct = [request("a", r.load, r.ttft_ms - 0.5, repeat=r.repeat, target="direct") for r in door]
    (cost,) = c.relay_costs(results(door, direct))
    assert cost.added == pytest.approx(0.5)
    assert cost.interval.low == pytest.approx(0.5)
    assert c.relay_costs(results(door)) == ()


# How it reads


def columns(table, *names):
    return [tuple(row[table.columns.index(name)] for name in names) for row in table.rows]


def test_tables_say_range_under_five_loads_and_interval_from_five_on():
    few, *_ = report.bench_tables(results(arm("a", 100, 4)))
    assert columns(few, "95 % interval or range")[0][0].startswith("range ")
    assert any("fewer than 5" in note for note in few.notes)
    many, *_ = report.bench_tables(results(arm("a", 100, 5)))
    assert not columns(many, "95 % interval or range")[0][0].startswith("range ")
    assert any("each a fresh start" in note for note in many.notes)


def test_an_interval_within_one_load_says_what_it_is_not():
    one = [request("a", 1, 100.0 + n, repeat=n) for n in range(6)]
    two = [request("b", 1, 50.0 + n, repeat=n) for n in range(6)]
    table = report.gain_table(results(one, two))
    assert columns(table, "verdict") == [("faster, one load each",)]
    assert any("nothing of what another load" in note for note in table.notes)


def test_the_gain_table_names_its_baseline():
    table = report.gain_table(results(arm("cold", 300, 5), arm("warm", 100, 5)))
    assert columns(table, "cold, median", "arm", "speedup", "verdict") == [
        ("307", "warm", "3x", "faster")
    ]
    few = report.gain_table(results(arm("cold", 300, 2), arm("warm", 100, 2)))
    assert columns(few, "verdict") == [("2 loads: too few for a verdict",)]


def test_noise_is_the_first_arm_against_itself():
    again = report.against_itself("a")
    lines = report.noise_lines(results(arm("a", 100, 5), arm("b", 10, 5), arm(again, 100, 5)))
    (line,) = lines
    assert line.startswith("machine noise: a against itself, m p x1, TTFT ms: 1.000x")
    assert line.endswith("no difference")
    assert report.noise_lines(results(arm("a", 100, 5))) == ()


def test_markdown_escapes_what_would_break_a_table():
    text = report.markdown(report.bench_tables(results(arm("a|b\n<x>", 100, 1))), lines=["f|g"])
    assert "a\\|b &lt;x>" in text
    assert "- f\\|g" in text
    heads = [line for line in text.splitlines() if line.startswith("| ---")]
    assert heads


def test_resources_show_the_peak_and_the_sum_over_loads():
    usage = [Usage("m p x1", "backend", "llama-server", 1, n * 1024**2, 1.0, 2.0) for n in (3, 5)]
    runs = tuple(
        Run(id=str(n), tag="a", started="", url="", usage=(one,)) for n, one in enumerate(usage)
    )
    (table,) = report.bench_tables(Results(runs=runs))
    assert columns(table, "process", "peak resident MiB", "CPU s", "cores") == [
        ("backend llama-server", "5.0", "2.00", "0.50")
    ]


def test_processes_of_one_name_add_up_within_a_run():
    usage = tuple(
        Usage("m p x1", "backend", "llama-server", pid, mib * 1024**2, 1.0, 2.0)
        for pid, mib in ((1, 3), (2, 5))
    )
    runs = tuple(Run(id=str(n), tag="a", started="", url="", usage=usage) for n in (1, 2))
    (table,) = report.bench_tables(Results(runs=runs))
    assert columns(table, "peak resident MiB", "CPU s", "cores") == [("8.0", "4.00", "1.00")]


def test_what_else_differs_between_arms_is_said_and_what_an_arm_is_is_not():
    base = {"started": "", "url": "", "machine": {"threads": 2}}
    runs = (
        Run(id="1", tag="a", settings={"max_tokens": 8, "seed": 1}, flags=("--x",), **base),
        Run(id="2", tag="b", settings={"max_tokens": 9, "seed": 1}, complete=False, **base),
    )
    assert report.differences(runs) == (
        "the arms differ in setting max_tokens: 8 (a); 9 (b)",
        "the arms differ in interrupted: no (a); yes (b)",
    )


def test_a_run_with_fewer_requests_than_it_sent_is_named():
    settings = {"repeats": 3, "concurrency": [1, 2], "models": []}
    whole = Run(id="1", tag="a", started="", url="", settings=settings)
    stopped = Run(id="2", tag="b", started="", url="", settings=settings, complete=False)
    requests = tuple(
        Request(run=run.id, tag=run.tag, model="m", prompts="p", concurrency=1)
        for run in (whole, stopped)
        for _ in range(7)
    )
    found = Results(runs=(whole, stopped), requests=requests)
    assert report.lost_lines(found) == ("a: 7 of 9 requests are left of a run",)


def test_two_models_in_every_arm_are_no_difference_between_arms():
    runs = [
        Run(id=tag + model, tag=tag, started="", url="", settings={"models": [model]})
        for tag in ("cold", "warm")
        for model in ("m1", "m2")
    ]
    assert report.differences(runs) == ()
    assert report.differences(runs[:3]) == (
        "the arms differ in setting models: m1 (cold, warm); m2 (cold)",
    )


def test_facts_name_settings_machine_files_and_what_is_incomplete():
    run = Run(
        id="1",
        tag="a",
        started="",
        url="",
        load=2,
        complete=False,
        note="interrupted",
        settings={"max_tokens": 8, "system": ""},
        machine={"threads": 2},
        versions={"python": "3"},
        server={"props": {"n_ctx": 10}},
        files={"model": {"size_bytes": 5, "sha256": "f" * 64}},
    )
    text = "\n".join(report.facts_lines([run]))
    assert "settings: max_tokens 8\n" in text
    assert "model: 5 bytes, sha256 ffffffffffffffff..." in text
    assert "incomplete: a, load 2: interrupted" in text
    assert report.facts_lines([]) == ()


def test_facts_are_those_of_every_run():
    def run(tag, load, **more):
        return Run(id=f"{tag}{load}", tag=tag, load=load, started="", url="", **more)

    one = {"llama-server": {"size_bytes": 1, "sha256": "a" * 64}}
    two = {"llama-server": {"size_bytes": 2, "sha256": "b" * 64}}
    lines = report.facts_lines(
        [
            run("a", 1, files=one, settings={"concurrency": [1], "prompts_sha256": "c" * 64}),
            run("b", 1, files=two, settings={"concurrency": [4], "prompts_sha256": "d" * 64}),
            run("a", 2),
        ]
    )
    assert f"settings: concurrency 1 or 4, prompts_sha256 {'c' * 16}... or {'d' * 16}..." in lines
    assert f"llama-server (a): 1 bytes, sha256 {'a' * 16}..." in lines
    assert f"llama-server (b): 2 bytes, sha256 {'b' * 16}..." in lines


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234.5, "1234"), (12.34, "12.3"), (0.123, "0.12")]
)
def test_numbers_have_the_digits_that_say_something(value, text):
    assert report.number(value) == text


def test_plain_text_lines_up():
    table = report.Table("t", ("a", "bb"), (("long", "x"),), ("note",))
    assert report.plain([table], ["fact"]) == ("t:\n  a     bb\n  long  x\n  (note)\n\nfact\n")
