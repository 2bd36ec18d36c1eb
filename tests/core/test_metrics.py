from __future__ import annotations

import re
from pathlib import Path

import pytest

from onebit_serve.core.laya import Decision, Tally
from onebit_serve.core.life import State
from onebit_serve.core.metrics import FAMILIES, OUTCOMES, Counters, DoorCounters, render
from onebit_serve.core.view import BackendView
from onebit_serve.core.warm_prompts import Standing

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')

# What llama-server b10068 says with `--metrics`, shortened.
LLAMA = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 465
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 0
"""


def seen(name="gpu", **more):
    plain = {
        "served_id": "m",
        "device": "vulkan",
        "role": "chat",
        "binary": "/b",
        "state": State.READY,
        "since_s": 1.5,
    }
    return BackendView(name=name, **{**plain, **more})


def page(*views, counters=None, door=None, own=None, tally=None):
    shown = render(
        views,
        counters or {},
        door or DoorCounters(),
        version="1.2",
        uptime_s=9.25,
        own=own,
        tally=tally,
    )
    return shown.decode()


def samples(text):
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        found[f"{match[1]}{{{match[2]}}}" if match[2] else match[1]] = float(match[3])
    return found


def everything():
    door = DoorCounters()
    door.refuse("not_found")
    prompts = (Standing("entry 1", tokens=9, proven=True),)
    tally = Tally()
    tally.failed("slow")
    tally.decided(Decision("code", "vulkan", 0.7), 0.03)
    views = seen(load_ms=1500.0, warm_up_ms=250.0, warm_prompts=prompts)
    return page(views, door=door, tally=tally)


def test_every_name_we_export_is_in_the_manual_and_no_other():
    exported = {re.split(r"[{ ]", line)[0] for line in samples(everything())}
    documented = re.findall(r"^\| `(onebit_\w+)` \| (\w+) \|", DOCS.read_text(), re.MULTILINE)
    assert exported == set(FAMILIES) == {name for name, _ in documented}
    assert dict(documented) == {name: kind for name, (kind, _) in FAMILIES.items()}


def test_every_outcome_is_in_the_manual():
    assert all(f"`{outcome}`" in DOCS.read_text() for outcome in OUTCOMES)


def test_every_family_is_said_once_before_its_samples():
    text = page(seen("a"), seen("b"), own={"a": LLAMA, "b": LLAMA})
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))
    current = ""
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            current = line.split()[2]
        elif not line.startswith("#"):
            assert re.split(r"[{ ]", line)[0] == current


def test_counters_end_in_total_and_nothing_else_does():
    for name, (kind, _) in FAMILIES.items():
        assert name.endswith("_total") == (kind == "counter"), name


def test_what_was_counted_is_shown():
    counted = Counters()
    counted.end("answered")
    counted.end("answered")
    counted.end("cut")
    counted.response_bytes = 12_345_678
    found = samples(page(seen(in_flight=3, waiting=4, restarts=2), counters={"gpu": counted}))
    assert found['onebit_requests_total{backend="gpu",outcome="answered"}'] == 2
    assert found['onebit_requests_total{backend="gpu",outcome="cut"}'] == 1
    assert found['onebit_requests_total{backend="gpu",outcome="failed"}'] == 0
    assert found['onebit_requests_in_flight{backend="gpu"}'] == 3
    assert found['onebit_requests_queued{backend="gpu"}'] == 4
    assert found['onebit_backend_restarts_total{backend="gpu"}'] == 2
    assert found['onebit_response_body_bytes_total{backend="gpu"}'] == 12_345_678


def test_ready_follows_the_needed_backends():
    loading = seen("b", state=State.LOADING)
    assert samples(page(seen("a")))["onebit_ready"] == 1
    assert samples(page(seen("a"), loading))["onebit_ready"] == 0
    lazy = seen("b", state=State.STOPPED, needed=False)
    assert samples(page(seen("a"), lazy))["onebit_ready"] == 1


def test_exactly_one_state_is_on():
    found = samples(page(seen(state=State.BACKOFF)))
    on = [key for key, value in found.items() if "backend_state{" in key and value]
    assert on == ['onebit_backend_state{backend="gpu",state="backoff"}']


def test_what_is_not_known_is_not_shown():
    assert "load_seconds" not in page(seen())
    assert samples(page(seen(load_ms=1500.0)))['onebit_backend_load_seconds{backend="gpu"}'] == 1.5


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\r\nb", 'x"} 1\nevil 2', "\u00fc {}"])
def test_a_name_cannot_break_out_of_its_label(name):
    found = samples(page(seen(name, served_id=name), own={name: LLAMA}))
    assert "evil" not in found


def test_a_backends_own_figures_get_its_name():
    found = samples(page(seen("a"), seen("b"), own={"a": LLAMA, "b": LLAMA.replace("465", "7")}))
    assert found['llamacpp:prompt_tokens_total{backend="a"}'] == 465
    assert found['llamacpp:prompt_tokens_total{backend="b"}'] == 7


def test_labels_of_a_backend_are_kept_and_a_clash_is_renamed():
    text = 'x{backend="cuda",le="0.5"} 1 1700000000000\n'
    assert 'x{backend="a",exported_backend="cuda",le="0.5"} 1 1700000000000' in page(
        seen("a"), own={"a": text}
    )


def test_a_histogram_stays_one_family():
    text = '# TYPE h histogram\nh_bucket{le="+Inf"} 2\nh_sum 3\nh_count 2\n'
    shown = page(own={"a": text, "b": text})
    assert shown.count("# TYPE h histogram") == 1
    block = shown[shown.index("# TYPE h histogram") :].splitlines()
    assert len(block) == 7


@pytest.mark.parametrize(
    "text",
    [
        "<html>no</html>",
        "x 1 2 3 4",
        "x abc",
        'x{a="1" 2',
        '{"error":{"code":501}}',
        "onebit_ready 5",
        'x{a="}\n',
        "# TYPE",
        "",
    ],
)
def test_what_is_not_in_the_format_is_left_out(text):
    assert page(own={"a": text}) == page()
