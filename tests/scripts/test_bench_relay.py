"""The arithmetic of the relay benchmark, and its two C programs on each other."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "bench_relay"
sys.path.insert(0, str(FOLDER))
import figures  # noqa: E402
import run as bench  # noqa: E402
import targets  # noqa: E402

sys.path.remove(str(FOLDER))


def a_run(target="1bit", number=0, scenario="small", concurrency=8, **others):
    values = {
        "requests": 100,
        "events": 0,
        "failed": 0,
        "first_failure": "",
        "retried": 0,
        "requests_per_s": 50.0,
        "latency_us": 120.0,
        "ttft_us": 100.0,
        "chunk_delay_us": None,
        "chunk_delay_p99_us": None,
        "cpu_ns": 10_000_000,
        "load_share": 0.1,
        "feed_share": 0.2,
    }
    return figures.Run(
        round=number,
        scenario=scenario,
        concurrency=concurrency,
        target=target,
        **{**values, **others},
    )


def rounds(target, ttfts, **others):
    return [a_run(target, n, ttft_us=t, **others) for n, t in enumerate(ttfts)]


def by_round(runs):
    return {r.round: r for r in runs}


def test_cpu_time_is_per_request_where_nothing_streams_and_per_chunk_where_it_does():
    assert a_run(requests=100, cpu_ns=10_000_000).cpu_us == 100.0
    assert a_run(scenario="paced", requests=4, events=200, cpu_ns=10_000_000).cpu_us == 50.0


def test_cpu_time_is_unknown_without_a_proxy_or_without_an_answer():
    assert a_run(cpu_ns=None).cpu_us is None
    assert a_run(requests=0).cpu_us is None


def test_what_a_proxy_adds_is_formed_in_each_round_before_the_median():
    direct = by_round(rounds("direct", [10.0, 100.0, 20.0]))
    ours = by_round(rounds("1bit", [15.0, 190.0, 27.0]))
    assert figures.added(ours, direct, figures.ttft) == figures.Spread(7.0, 5.0, 90.0)


def test_a_round_that_only_one_side_has_is_left_out():
    direct = by_round(rounds("direct", [10.0]))
    ours = by_round(rounds("1bit", [15.0, 99.0]))
    assert figures.added(ours, direct, figures.ttft) == figures.Spread(5.0, 5.0, 5.0)


def test_a_ratio_is_formed_in_each_round_before_the_median():
    nginx = by_round(rounds("nginx", [10.0, 40.0, 10.0]))
    ours = by_round(rounds("1bit", [20.0, 40.0, 30.0]))
    assert figures.ratio(ours, nginx, figures.ttft) == figures.Spread(2.0, 1.0, 3.0)


def test_a_ratio_to_nothing_is_no_ratio():
    nothing = by_round(rounds("nginx", [0.0]))
    assert figures.ratio(by_round(rounds("1bit", [20.0])), nothing, figures.ttft) is None


def test_limits_hold_ours_against_the_router():
    runs = [
        *rounds("direct", [10.0, 10.0], cpu_ns=None),
        *rounds("vllm-router", [60.0, 60.0], cpu_ns=10_000_000),
        *rounds("1bit", [70.0, 80.0], cpu_ns=15_000_000),
    ]
    memory = {"1bit": figures.Memory(rss_kib=40_000, pss_kib=30_000)}
    found = {x.claim: x for x in figures.limits(runs, memory)}
    cpu = found["small, 8 at once: CPU a request, x vllm-router"]
    added = found["small, 8 at once: added TTFT, x vllm-router"]
    size = found["resident memory after all runs, MB"]
    assert (cpu.value, cpu.verdict) == (1.5, "FAIL")
    assert (added.value, added.verdict) == (1.3, "pass")
    assert (size.value, size.verdict) == (40.96, "pass")


def test_what_was_not_measured_does_not_pass():
    found = figures.limits(rounds("1bit", [70.0]), {})
    verdicts = {x.claim: x.verdict for x in found}
    assert verdicts["small, 8 at once: CPU a request, x vllm-router"] == "not measured"
    assert verdicts["resident memory after all runs, MB"] == "not measured"


def test_a_load_generator_that_fills_half_its_core_is_a_missed_limit():
    found = figures.limits([a_run(load_share=0.6)], {})
    assert found[-1].verdict == "FAIL"


def test_the_report_names_what_is_missing_and_counts_wrong_answers():
    runs = [*rounds("direct", [10.0], cpu_ns=None), a_run(failed=3)]
    text = figures.report(runs, {}, {"nginx": "not installed"}, bench.TARGETS, [])
    assert "nginx: not measured: not installed" in text
    assert "200 answers checked byte by byte, 3 wrong" in text


def test_the_kernels_files_are_read():
    assert figures.schedstat_ns("123456 789 12\n") == 123456
    assert figures.memory_kib("Name:\tx\nVmRSS:\t   4224 kB\n", "VmRSS") == 4224
    assert figures.memory_kib("Name:\tx\n", "Pss") == 0


def test_points_are_read_with_and_without_concurrencies():
    assert bench.read_points("paced:8:64,fast") == [("paced", 8), ("paced", 64), ("fast", 32)]
    with pytest.raises(bench.argparse.ArgumentTypeError, match="nope"):
        bench.read_points("nope:1")


def test_direct_is_always_a_target():
    assert bench.read_targets("1bit") == ["direct", "1bit"]


def test_two_benchmarks_do_not_run_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "BUILD", tmp_path)
    second = bench.alone()
    with bench.alone(), pytest.raises(SystemExit, match="another run is under way"):
        second.__enter__()
    with bench.alone():
        pass


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("bench")
    for name in ("load", "upstream"):
        flags = ["-O1", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([compiler, *flags, "-o", folder / name, FOLDER / f"{name}.c"], check=True)
    return folder


@pytest.fixture
def upstream(programs):
    port = targets.free_port()
    with subprocess.Popen(
        [programs / "upstream", "--port", str(port), "-m", "x.gguf", "--jinja"],
        stderr=subprocess.DEVNULL,
    ) as process:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                continue
        yield port
        process.terminate()


def load(programs, port, *options):
    command = [programs / "load", "--port", str(port), "--seconds", "0.1", "--warm", "0"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("stream", [[], ["--chunks", "5", "--interval-us", "1000"]])
def test_the_load_generator_finds_every_byte_of_the_fake_right(programs, upstream, stream):
    got = load(programs, upstream, "--concurrency", "4", *stream)
    assert got["failed"] == 0
    assert got["requests"] >= 4
    assert got["events"] == (5 * got["requests"] if stream else 0)


def exchange(listener, answer):
    connection = listener.accept()[0]
    with connection:
        connection.recv(65536)
        connection.sendall(answer)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "not a 200"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\nwrong", "a wrong byte in a body"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\n{"choices"', "closed early"),
    ],
)
def test_the_load_generator_says_what_was_wrong(programs, answer, why):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        command = [programs / "load", "--port", port, "--seconds", "0.005", "--warm", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            exchange(listener, answer)
            got = json.loads(process.communicate(timeout=10)[0])
    assert (got["failed"], got["requests"]) == (1, 0)
    assert why in got["first_failure"]


def test_the_fake_answers_what_a_supervisor_asks_of_a_llama_server(programs):
    def say(option):
        done = subprocess.run([programs / "upstream", option], capture_output=True, check=True)
        return (done.stdout + done.stderr).decode()

    assert say("--version").startswith("version: ")
    assert say("--list-devices") == "Available devices:\n"
    assert "--ctx-size N" in say("--help")
