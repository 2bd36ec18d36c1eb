"""The arithmetic and the tables of the relay benchmark: values in, values out.

A *point* is a scenario at a concurrency. In each round every target runs each point once, in
random order, so what is compared within a round shared the machine's mood: added times and ratios
are formed per round, and only then is the median over the rounds taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import msgspec

__all__ = [
    "SCENARIOS",
    "Limit",
    "Memory",
    "Run",
    "Scenario",
    "Spread",
    "added",
    "limits",
    "memory_kib",
    "ratio",
    "report",
    "schedstat_ns",
    "spread",
]

NOT_MEASURED = "not measured"


class Scenario(msgspec.Struct, frozen=True):
    """What one kind of run asks for.

    Args:
        name: What it is called on the command line and in tables.
        says: One line for the reader of the table.
        concurrencies: Connections at once, by default.
        chunks: Events of one stream; 0 asks for JSON replies that don't stream.
        interval_us: Microseconds between two events of a stream.
    """

    name: str
    says: str
    concurrencies: tuple[int, ...]
    chunks: int = 0
    interval_us: int = 0


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("small", "0.6 KB request, 1 KB JSON reply, one after another", (1, 8, 64)),
        Scenario("paced", "streams of 50 200-byte chunks, 100/s a stream", (1, 8, 64), 50, 10_000),
        Scenario("fast", "streams of 500 200-byte chunks, 1000/s a stream", (32,), 500, 1_000),
    )
}


class Run(msgspec.Struct, frozen=True):
    """What one run of one target at one point gave.

    Args:
        round: Number of the round, from 0.
        scenario: Name of the scenario.
        concurrency: Connections at once.
        target: Who was asked.
        requests: Answers that came whole and right, warm-up included.
        events: Chunks that came right, warm-up included.
        failed: Answers that were wrong, cut or missing.
        first_failure: What the first of them was.
        retried: Requests sent again since a kept connection closed before any answer.
        requests_per_s: Answers a second, warm-up left out.
        latency_us: Median from request to last byte, in microseconds.
        ttft_us: Median from request to first byte of the body, in microseconds.
        chunk_delay_us: Median from an event's stamp to its arrival, in microseconds.
        chunk_delay_p99_us: The same, 99th percentile.
        cpu_ns: CPU time of the proxy's processes over the whole run; `None` for direct.
        load_share: Part of a core that the load generator used.
        feed_share: Part of a core that load generator and fake upstream used together.
    """

    round: int
    scenario: str
    concurrency: int
    target: str
    requests: int
    events: int
    failed: int
    first_failure: str
    retried: int
    requests_per_s: float
    latency_us: float | None
    ttft_us: float | None
    chunk_delay_us: float | None
    chunk_delay_p99_us: float | None
    cpu_ns: int | None
    load_share: float
    feed_share: float

    @property
    def cpu_us(self) -> float | None:
        """CPU microseconds per chunk, or per request where nothing streams."""
        units = self.events if SCENARIOS[self.scenario].chunks else self.requests
        return None if self.cpu_ns is None or not units else self.cpu_ns / 1000 / units


class Memory(msgspec.Struct, frozen=True):
    """Resident memory of a proxy's processes after all runs, in KiB."""

    rss_kib: int
    pss_kib: int

    @property
    def rss_mb(self) -> float:
        """RSS in MB of a million bytes."""
        return self.rss_kib * 1024 / 1e6

    @property
    def pss_mb(self) -> float:
        """PSS in MB of a million bytes."""
        return self.pss_kib * 1024 / 1e6


class Spread(msgspec.Struct, frozen=True):
    """A median and the extremes around it."""

    median: float
    low: float
    high: float


class Limit(msgspec.Struct, frozen=True):
    """One claim about our relay.

    Args:
        claim: What is claimed.
        at_most: The largest value that keeps it.
        value: What was measured; `None` when it was not.
    """

    claim: str
    at_most: float
    value: float | None

    @property
    def verdict(self) -> str:
        """Return pass, FAIL or not measured."""
        if self.value is None:
            return NOT_MEASURED
        return "pass" if self.value <= self.at_most else "FAIL"


Figure = Callable[[Run], float | None]


def schedstat_ns(text: str) -> int:
    """Return the time on a CPU, in nanoseconds, that a /proc/PID/task/TID/schedstat tells."""
    return int(text.split(maxsplit=1)[0])


def memory_kib(text: str, field: str) -> int:
    """Return a field of /proc/PID/status or smaps_rollup in KiB, 0 where it is missing."""
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


def spread(values: Iterable[float]) -> Spread | None:
    """Return median and extremes, or `None` of nothing."""
    known = list(values)
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def at(runs: Iterable[Run], scenario: str, concurrency: int, target: str) -> dict[int, Run]:
    """Return the runs of a target at a point, by round."""
    return {
        r.round: r
        for r in runs
        if (r.scenario, r.concurrency, r.target) == (scenario, concurrency, target)
    }


def paired(
    mine: dict[int, Run],
    other: dict[int, Run],
    figure: Figure,
    combine: Callable[[float, float], float | None],
) -> list[float]:
    """Return what `combine` makes of both sides' figure in each round that has both."""
    results = []
    for number in mine.keys() & other.keys():
        a, b = figure(mine[number]), figure(other[number])
        value = None if a is None or b is None else combine(a, b)
        if value is not None:
            results.append(value)
    return results


def added(mine: dict[int, Run], direct: dict[int, Run], figure: Figure) -> Spread | None:
    """Return what a proxy adds to a figure of the direct run of the same round."""
    return spread(paired(mine, direct, figure, lambda a, b: a - b))


def ratio(mine: dict[int, Run], other: dict[int, Run], figure: Figure) -> Spread | None:
    """Return a figure as a multiple of the other target's in the same round."""
    return spread(paired(mine, other, figure, lambda a, b: a / b if b > 0 else None))


def added_ratio(
    mine: dict[int, Run], other: dict[int, Run], direct: dict[int, Run], figure: Figure
) -> float | None:
    """Return what we add as a multiple of what the other adds: the quotient of both medians.

    What is added can be near nothing in a single round, so a quotient per round would say little.
    """
    ours, theirs = added(mine, direct, figure), added(other, direct, figure)
    if ours is None or theirs is None or theirs.median <= 0:
        return None
    return ours.median / theirs.median


def points(runs: Iterable[Run]) -> list[tuple[str, int]]:
    """Return the points that were run, in the order of the scenarios."""
    names = list(SCENARIOS)
    found = {(r.scenario, r.concurrency) for r in runs}
    return sorted(found, key=lambda p: (names.index(p[0]), p[1]))


def ttft(run: Run) -> float | None:
    """Return a run's time to the first byte of the body."""
    return run.ttft_us


def latency(run: Run) -> float | None:
    """Return a run's time to the last byte."""
    return run.latency_us


def cpu(run: Run) -> float | None:
    """Return a run's CPU time per request or chunk."""
    return run.cpu_us


def delay_p99(run: Run) -> float | None:
    """Return a run's 99th percentile of the chunk delay."""
    return run.chunk_delay_p99_us


def limits(runs: list[Run], memory: dict[str, Memory]) -> list[Limit]:
    """Hold our relay against vllm-router, as far as both were measured."""
    found = []
    for scenario, concurrency in points(runs):
        ours, theirs, direct = (
            at(runs, scenario, concurrency, t) for t in ("1bit", "vllm-router", "direct")
        )
        where = f"{scenario}, {concurrency} at once"
        unit = "chunk" if SCENARIOS[scenario].chunks else "request"
        used = ratio(ours, theirs, cpu)
        found += [
            Limit(
                f"{where}: CPU a {unit}, x vllm-router", 1.4, None if used is None else used.median
            ),
            Limit(
                f"{where}: added TTFT, x vllm-router", 1.3, added_ratio(ours, theirs, direct, ttft)
            ),
        ]
    mine = memory.get("1bit")
    found.append(Limit("resident memory after all runs, MB", 45.0, mine.rss_mb if mine else None))
    proxied = [r.load_share for r in runs if r.target != "direct"]
    found.append(Limit("load generator's share of its core", 0.5, max(proxied, default=None)))
    return found


def show(value: Spread | float | None, digits: int = 0, *, extremes: bool = False) -> str:
    """Return a number for a table cell, with its extremes where asked for."""
    if value is None:
        return "-"
    if not isinstance(value, Spread):
        return f"{value:.{digits}f}"
    text = f"{value.median:.{digits}f}"
    if not extremes or value.low == value.high:
        return text
    return f"{text} ({value.low:.{digits}f}-{value.high:.{digits}f})"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table as lines, its columns aligned to be read as text too."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *rows]
    return [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]


def scenario_table(runs: list[Run], scenario: str, targets: list[str]) -> list[str]:
    """Return the table of one scenario."""
    streams = SCENARIOS[scenario].chunks > 0
    unit = "chunk" if streams else "request"
    head = ["at once", "target", "answers/s", "TTFT us", "added TTFT us"]
    head += ["chunk delay us", "p99 us", "p99 x nginx"] if streams else ["added latency us"]
    head += [f"CPU us a {unit}", "x nginx", "x vllm-router"]
    rows = []
    for _, concurrency in [p for p in points(runs) if p[0] == scenario]:
        here = {t: at(runs, scenario, concurrency, t) for t in targets}
        for target in targets:
            mine = here[target]
            if not mine:
                continue

            def median(figure: Figure, mine: dict[int, Run] = mine) -> Spread | None:
                return spread(v for v in map(figure, mine.values()) if v is not None)

            nginx, router = here.get("nginx", {}), here.get("vllm-router", {})
            is_direct = target == "direct"
            row = [str(concurrency), target, show(median(lambda r: r.requests_per_s))]
            row += [show(median(ttft))]
            row += ["-" if is_direct else show(added(mine, here["direct"], ttft), extremes=True)]
            if streams:
                row += [show(median(lambda r: r.chunk_delay_us)), show(median(delay_p99))]
                row += [show(ratio(mine, nginx, delay_p99), 2, extremes=True)]
            else:
                row += ["-" if is_direct else show(added(mine, here["direct"], latency))]
            row += [show(median(cpu), 1), show(ratio(mine, nginx, cpu), 2, extremes=True)]
            row += [show(ratio(mine, router, cpu), 2, extremes=True)]
            rows.append(row)
    return table(head, rows)


def report(
    runs: list[Run],
    memory: dict[str, Memory],
    missing: dict[str, str],
    targets: list[str],
    about: list[str],
) -> str:
    """Return the whole report as Markdown.

    Args:
        runs: All runs.
        memory: Memory of each proxy after all runs.
        missing: Why a target was not measured.
        targets: The order of the rows.
        about: Lines about the machine and the programs.
    """
    lines = ["# Relay benchmark", "", *about]
    lines += ["Medians over the rounds; in brackets the lowest and the highest round."]
    for name in dict.fromkeys(p[0] for p in points(runs)):
        lines += ["", f"## {name}: {SCENARIOS[name].says}", ""]
        lines += scenario_table(runs, name, [t for t in targets if t not in missing])
    lines += ["", "## Memory after all runs", ""]
    rows = [[t, f"{m.rss_mb:.1f}", f"{m.pss_mb:.1f}"] for t, m in memory.items()]
    lines += table(["target", "RSS MB", "PSS MB"], rows)
    lines += ["", "## Limits", ""]
    rows = [
        [limit.claim, show(limit.at_most, 2), show(limit.value, 2), limit.verdict]
        for limit in limits(runs, memory)
    ]
    lines += table(["1bit serve", "at most", "measured", "verdict"], rows)
    bodies, failed, retried = (
        sum(getattr(r, f) for r in runs) for f in ("requests", "failed", "retried")
    )
    lines += ["", f"{bodies} answers checked byte by byte, {failed} wrong, {retried} asked twice."]
    if runs:
        busiest = max(r.feed_share for r in runs if r.target != "direct" or len(targets) == 1)
        lines += [
            f"Load generator and fake upstream together: at most {busiest:.2f} of their core."
        ]
    lines += [f"{target}: {NOT_MEASURED}: {why}" for target, why in missing.items()]
    return "\n".join(lines) + "\n"
