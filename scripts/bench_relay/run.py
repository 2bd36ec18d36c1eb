#!/usr/bin/env python3
"""Measure what a relay costs: nothing between, nginx, vllm-router and `1bit serve`, side by side.

    python scripts/bench_relay/run.py                          # everything, a few minutes
    python scripts/bench_relay/run.py --rounds 1 --seconds 0.5  # a look
    python scripts/bench_relay/run.py --targets direct,1bit --scenarios paced:8,64

Load generator and fake upstream (both C, built here) share one core, the proxy has another alone.
In each round the targets take turns in random order. Times come from the load generator; CPU time
is what the kernel charged to the proxy's processes (for `1bit serve` without its backend, which is
the fake upstream). vllm-router gets a virtual environment of its own under build/.
Writes build/bench-relay/result.json and result.md, and prints the latter.

Exit code 1: an answer was wrong or a target broke off. With --check also: a limit was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import fcntl
import os
import platform
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
from figures import SCENARIOS, Run, limits, report
from targets import (
    BUILD,
    TARGETS,
    NotMeasuredError,
    Settings,
    Target,
    build,
    cpu_ns,
    memory,
    start,
    start_upstream,
)

WARM_S = 0.2  # seconds that a run is under way before its times count
BROKE_OFF = "broke off"


def ask(target: Target, point: tuple[str, int], seconds: float, core: int) -> dict[str, Any]:
    """Run the load generator once and return what it printed.

    Raises:
        NotMeasuredError: It gave up.
    """
    scenario, concurrency = SCENARIOS[point[0]], point[1]
    command = ["taskset", "-c", str(core), str(BUILD / "load"), "--port", str(target.port)]
    command += ["--concurrency", str(concurrency)]
    command += ["--seconds", str(seconds), "--warm", str(WARM_S)]
    if scenario.chunks:
        command += ["--chunks", str(scenario.chunks), "--interval-us", str(scenario.interval_us)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=seconds + 30
    )
    if done.returncode:
        raise NotMeasuredError(f"the load generator gave up: {done.stderr.strip()}")
    return msgspec.json.decode(done.stdout, type=dict[str, Any])


def measure(target: Target, point: tuple[str, int], number: int, seconds: float, core: int) -> Run:
    """Measure a target once at a point."""
    if not target.upstream.is_running():  # a new one would run beside the proxy, on its core
        raise NotMeasuredError("its backend is gone")
    proxy, upstream = target.processes(), [target.upstream]
    before, fed_before = cpu_ns(proxy), cpu_ns(upstream)
    load = ask(target, point, seconds, core)
    used, fed = cpu_ns(proxy) - before, cpu_ns(upstream) - fed_before
    median = {k: (load[f"{k}_us"] or {}).get("p50") for k in ("latency", "ttft", "chunk_delay")}
    return Run(
        round=number,
        scenario=point[0],
        concurrency=point[1],
        target=target.name,
        requests=load["requests"],
        events=load["events"],
        failed=load["failed"],
        first_failure=load["first_failure"],
        retried=load["retried"],
        requests_per_s=load["requests_per_s"],
        latency_us=median["latency"],
        ttft_us=median["ttft"],
        chunk_delay_us=median["chunk_delay"],
        chunk_delay_p99_us=(load["chunk_delay_us"] or {}).get("p99"),
        cpu_ns=used if proxy else None,
        load_share=load["cpu_share"],
        feed_share=load["cpu_share"] + fed / 1e9 / load["wall_s"],
    )


def say(text: str) -> None:
    """Show progress where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def measure_all(
    targets: dict[str, Target], missing: dict[str, str], options: argparse.Namespace
) -> list[Run]:
    """Run every round; a target that breaks off is left out from there on."""
    runs: list[Run] = []
    random.seed(options.seed)
    for target in list(targets.values()):  # code paths and connections of the first use
        with breaking(target, targets, missing):
            for point in options.points:
                ask(target, point, 0.1, options.cores[0])
    for number in range(options.rounds):
        for point in options.points:
            for target in random.sample(list(targets.values()), len(targets)):
                say(f"round {number + 1}/{options.rounds} {point[0]} {point[1]} {target.name}")
                with breaking(target, targets, missing):
                    runs.append(measure(target, point, number, options.seconds, options.cores[0]))
    say("")
    return runs


@contextlib.contextmanager
def breaking(target: Target, targets: dict[str, Target], missing: dict[str, str]) -> Iterator[None]:
    """Note a target that breaks off in the middle, and go on without it."""
    try:
        yield
    except (NotMeasuredError, subprocess.TimeoutExpired, psutil.Error) as error:
        missing[target.name] = f"{BROKE_OFF}: {error}; see {BUILD / (target.name + '.log')}"
        targets.pop(target.name, None)


def read_points(text: str) -> list[tuple[str, int]]:
    """Read `small,paced:8:64` into points; a bare name stands for its usual concurrencies."""
    points = []
    for item in text.split(","):
        name, *numbers = item.split(":")
        if name not in SCENARIOS or not all(n.isdigit() and int(n) for n in numbers):
            raise argparse.ArgumentTypeError(
                f"{item}: not one of {', '.join(SCENARIOS)}, as in paced:8"
            )
        points += [(name, int(n)) for n in numbers or SCENARIOS[name].concurrencies]
    return points


def read_targets(text: str) -> list[str]:
    """Read the names of targets; direct is always there, since the others are held against it."""
    names = text.split(",")
    for name in names:
        if name not in TARGETS:
            raise argparse.ArgumentTypeError(f"{name}: not one of {', '.join(TARGETS)}")
    return [t for t in TARGETS if t in {"direct", *names}]


def read_cores(text: str) -> list[int]:
    """Read two numbers of cores."""
    cores = [int(n) for n in text.split(",")]
    if len(set(cores)) != 2:  # noqa: PLR2004
        raise argparse.ArgumentTypeError("two different cores are needed, as in 0,1")
    return cores


def read_options() -> argparse.Namespace:
    """Read the command line."""
    usable = sorted(os.sched_getaffinity(0))
    beside = Path(sys.executable).with_name("1bit")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="rounds (default 5)")
    add("--seconds", type=float, default=3.0, help="seconds of one run (default 3)")
    add("--targets", type=read_targets, default=TARGETS, help=f"of {','.join(TARGETS)}")
    add(
        "--scenarios",
        type=read_points,
        dest="points",
        default=read_points(",".join(SCENARIOS)),
        help="scenarios, with other concurrencies where wanted: small,paced:8:64,fast",
    )
    add(
        "--cores", type=read_cores, default=usable[:2], help="core of load and upstream, of proxies"
    )
    add("--onebit", default=str(beside) if beside.exists() else "1bit", help="the 1bit program")
    add("--no-install", dest="install", action="store_false", help="don't install vllm-router")
    add("--out", type=Path, default=BUILD, help="folder for result.json and result.md")
    add("--seed", type=int, default=None, help="of the order of the targets")
    add("--check", action="store_true", help="exit 1 when a limit is missed or not measured")
    options = parser.parse_args()
    if len(options.cores) < 2:  # noqa: PLR2004
        parser.error("two cores are needed, one for the load and one for the proxy")
    return options


def about(options: argparse.Namespace) -> list[str]:
    """Return what a reader must know of the machine and the settings."""
    described = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    model = described[0].partition(": ")[2] if described else platform.machine()
    when = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    feed, proxy = options.cores
    return [
        f"{when}, {model}, Linux {platform.release()}, Python {platform.python_version()}.",
        f"{options.rounds} rounds of {options.seconds:g} s a run, core {feed} for the load,",
        f"core {proxy} for the proxy; load average at the start {os.getloadavg()[0]:.1f}.",
        "nginx: 1 worker, buffering off. vllm-router: round robin; logs, retries, breaker off.",
    ]


def start_all(
    options: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[dict[str, Target], dict[str, str]]:
    """Start every target; return those that run, and why the others don't."""
    settings = Settings(options.cores[0], options.cores[1], options.onebit, options.install)
    targets = {"direct": start_upstream(settings, stack)}
    missing = {}
    for name in options.targets[1:]:
        say(f"starting {name}")
        try:
            targets[name] = start(name, targets["direct"], settings, stack)
        except NotMeasuredError as error:
            missing[name] = str(error)
    return targets, missing


def write(out: Path, text: str, result: dict[str, Any]) -> None:
    """Write the report and the numbers behind it."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.md").write_text(text)
    (out / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep a second benchmark out: two at once would measure each other and share their files."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"bench-relay: another run is under way in {BUILD}\nhint: wait until it ends")
        yield


def main() -> int:
    """Measure and report; return the exit code."""
    options = read_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    lines = about(options)
    runs_in_all = len(options.targets) * len(options.points)
    guess_s = runs_in_all * (options.rounds * (options.seconds + WARM_S + 0.4) + 0.6)
    print(f"bench-relay: about {guess_s / 60:.1f} minutes", file=sys.stderr)
    with alone(), contextlib.ExitStack() as stack:
        build()
        targets, missing = start_all(options, stack)
        runs = measure_all(targets, missing, options)
        sizes = {t.name: memory(t.processes()) for t in targets.values() if t.process}
    checks = limits(runs, sizes)
    text = report(runs, sizes, missing, options.targets, lines)
    verdicts = [{**msgspec.structs.asdict(x), "verdict": x.verdict} for x in checks]
    result = {"about": lines, "missing": missing, "memory": sizes, "limits": verdicts}
    write(options.out, text, {**result, "runs": runs})
    print(text)
    failures = {f"{r.target}: {r.first_failure}" for r in runs if r.failed}
    for failure in sorted(failures):
        print(f"bench-relay: {failure}", file=sys.stderr)
    broke = any(why.startswith(BROKE_OFF) for why in missing.values())
    missed = options.check and any(x.verdict != "pass" for x in checks)
    return 1 if failures or broke or missed else 0


if __name__ == "__main__":
    sys.exit(main())
