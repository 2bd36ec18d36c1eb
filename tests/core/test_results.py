from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onebit_serve.core import results
from onebit_serve.core.errors import UsageError
from onebit_serve.core.results import Request, Results, Run, Usage

# a busy machine is no fault of the code
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# XML's and JSON's trouble makers included; lone surrogates are in no UTF-8 file
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
amounts = st.none() | st.floats(min_value=0, max_value=1e9)
counts = st.none() | st.integers(min_value=0, max_value=10**9)

SAMPLE = Results(
    runs=(
        Run(
            id="r1",
            tag="cold",
            started="2026-01-01T00:00:00+00:00",
            url="http://127.0.0.1:8000",
            settings={"prompts": "long", "concurrency": [1, 4]},
            machine={"processor": "A, B"},
            flags=("-m", "M.gguf"),
            environment={"A": "1"},
            ready_ms=12.5,
            usage=(Usage("m long x1", "backend", "llama-server", 7, 1024, 0.5, 1.0),),
        ),
    ),
    requests=(
        Request(run="r1", tag="cold", model="m", prompts="long", concurrency=4, ttft_ms=1.5),
        Request(run="r1", tag="cold", model="m", prompts="long", concurrency=4, error="cut"),
    ),
)


@pytest.mark.parametrize("write", [results.write_csv, results.write_json])
def test_what_is_written_reads_back_the_same(write):
    assert results.read(write(SAMPLE), name="a") == SAMPLE


@patient
@given(
    st.lists(
        st.builds(
            Request,
            run=words,
            tag=words,
            model=words,
            prompts=words,
            concurrency=st.integers(1, 100),
            ttft_ms=amounts,
            wait_ms=amounts,
            prompt_tokens=counts,
            error=words,
            detail=words,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_text_and_number_survives_both_forms(requests):
    every = Results(requests=tuple(requests))
    assert results.read(results.write_csv(every), name="a") == every
    assert results.read(results.write_json(every), name="a") == every


@pytest.mark.parametrize("write", [results.write_csv, results.write_json])
def test_a_path_that_is_not_utf8_loses_no_results(write):
    (run,) = SAMPLE.runs
    odd = Results(
        runs=(msgspec.structs.replace(run, tag="a\udcff", flags=("-m", "\udcff.gguf")),),
        requests=(msgspec.structs.replace(SAMPLE.requests[0], tag="a\udcff"),),
    )
    found = results.read(write(odd).encode().decode(), name="a")
    assert (found.runs[0].flags, found.runs[0].tag) == (("-m", "?.gguf"), "a?")
    assert found.requests[0].tag == "a?"
    assert found.requests[0].ttft_ms == 1.5


@pytest.mark.parametrize(
    "text", ["=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "'=1", "'"]
)
def test_no_cell_of_text_starts_as_a_formula_does(text):
    evil = Results(
        requests=(
            Request(run=text, tag=text, model=text, prompts=text, concurrency=1, detail=text),
        )
    )
    written = results.write_csv(evil)
    for row in csv.reader(io.StringIO(written, newline="")):
        assert not any(cell.startswith(tuple("=+-@\t\r\n")) for cell in row)
    assert results.read(written, name="a") == evil


def test_the_csv_is_a_plain_table_of_one_width():
    rows = list(csv.reader(io.StringIO(results.write_csv(SAMPLE), newline="")))
    assert len({len(row) for row in rows}) == 1
    assert [row[1] for row in rows] == ["record", "run", "request", "request"]


def test_a_byte_order_mark_and_semicolons_of_a_spreadsheet_are_understood():
    rows = csv.reader(io.StringIO(results.write_csv(SAMPLE), newline=""))
    out = io.StringIO()
    csv.writer(out, delimiter=";", lineterminator="\r\n").writerows(rows)
    assert results.read("\ufeff" + out.getvalue(), name="a") == SAMPLE


@pytest.mark.parametrize("form", ["csv", "json"])
def test_files_of_the_first_version_stay_readable(form):
    text = (Path(__file__).parent / "bench_files" / f"version-1.{form}").read_text("utf-8")
    found = results.read(text, name="old")
    assert [run.tag for run in found.runs] == ["cold"]
    assert [request.ttft_ms for request in found.requests] == [1462.557, None]
    assert found.requests[1].error == "http 503"


def test_fields_of_later_additions_are_left_alone_and_missing_ones_take_their_default():
    text = results.write_csv(SAMPLE)
    lines = [line + ("," + ("new" if n == 0 else "x")) for n, line in enumerate(text.splitlines())]
    assert results.read("\n".join(lines), name="a").requests == SAMPLE.requests
    raw = json.loads(results.write_json(SAMPLE))
    raw["requests"][0]["new"] = 1
    del raw["requests"][0]["target"]
    assert results.read(json.dumps(raw), name="a") == SAMPLE


@pytest.mark.parametrize("write", [results.write_csv, results.write_json])
def test_another_version_is_named_with_the_one_that_is_read(write):
    text = write(SAMPLE).replace("onebit-bench/1", "onebit-bench/7")
    with pytest.raises(UsageError, match=r"a\.csv: written as onebit-bench/7.*onebit-bench/1"):
        results.read(text, name="a.csv")


@pytest.mark.parametrize(
    "text", ["", "\n", "time,value\n1,2\n", "{}", '{"schema": 3}', '{"schema": "other/1"}', "hello"]
)
def test_what_is_no_results_file_is_said_to_be_none(text):
    with pytest.raises(UsageError, match="not a results file"):
        results.read(text, name="a.csv")


def test_a_number_that_is_none_is_said_with_line_and_column():
    text = results.write_csv(SAMPLE).replace("1.5", "fast")
    with pytest.raises(UsageError, match=r"a\.csv line 3: column ttft_ms: 'fast' is no number"):
        results.read(text, name="a.csv")


def test_a_damaged_run_is_said_with_its_line():
    text = results.write_csv(SAMPLE).replace('""id""', '""ident""')
    with pytest.raises(UsageError, match=r"a\.csv line 2: cell `facts`: .*id"):
        results.read(text, name="a.csv")


def test_a_csv_that_is_cut_inside_a_quote_is_said_to_be_damaged():
    text = results.write_csv(SAMPLE)
    with pytest.raises(UsageError, match=r"a\.csv line"):
        results.read(text[: text.index('""tag""')], name="a.csv")


def test_a_csv_that_is_cut_within_any_cell_of_a_request_is_said_to_be_damaged():
    text = results.write_csv(SAMPLE)
    begin, end = text.rindex("onebit-bench/1,request"), text.rindex(",")
    for cut in range(begin + 1, end + 1):
        with pytest.raises(UsageError, match=r"a\.csv line 4: the file ends within a row"):
            results.read(text[:cut], name="a.csv")
    assert results.read(text.rstrip(), name="a.csv") == SAMPLE  # an editor took the line end


def test_a_run_of_many_facts_reads_back():
    (first,) = SAMPLE.runs
    long = msgspec.structs.replace(first, settings={"x": "y" * 200_000})
    many = Results(runs=(long,))
    assert results.read(results.write_csv(many), name="a") == many


def test_json_that_is_cut_is_said_to_be_damaged():
    text = results.write_json(SAMPLE)
    with pytest.raises(UsageError, match=r"a\.json: not JSON"):
        results.read(text[: len(text) // 2], name="a.json")


def test_json_of_a_wrong_type_is_said_with_its_path():
    raw = json.loads(results.write_json(SAMPLE))
    raw["requests"][1]["ttft_ms"] = "fast"
    with pytest.raises(UsageError, match=r"requests\[\.\.\.\]\.ttft_ms|ttft_ms"):
        results.read(json.dumps(raw), name="a.json")


def test_a_table_without_rows_holds_nothing():
    with pytest.raises(UsageError, match="holds no runs"):
        results.read(results.write_csv(Results()), name="a.csv")


def test_merging_keeps_every_run_and_request_in_order():
    runs = tuple(msgspec.structs.replace(run, id=f"{run.id}b") for run in SAMPLE.runs)
    requests = tuple(msgspec.structs.replace(r, run=f"{r.run}b") for r in SAMPLE.requests)
    both = results.merge([SAMPLE, Results(runs=runs, requests=requests)])
    assert both.runs == SAMPLE.runs + runs
    assert both.requests == SAMPLE.requests + requests


def test_a_run_that_is_given_twice_counts_once():
    assert results.merge([SAMPLE, SAMPLE]) == SAMPLE
