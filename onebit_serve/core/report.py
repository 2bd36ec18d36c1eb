"""Results as a person reads them: rows of text for a terminal or for Markdown.

The live layer draws the rows; here they are only worded, so that a table on the screen and a table
in a report never differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from onebit_serve.core import score
from onebit_serve.core.cells import (
    METRICS,
    Cell,
    cells,
    first_against_rest,
    gains,
    relay_costs,
)
from onebit_serve.core.results import Results, Run

__all__ = [
    "Table",
    "against_itself",
    "bench_tables",
    "differences",
    "facts_lines",
    "first_table",
    "gain_table",
    "lost_lines",
    "markdown",
    "noise_lines",
    "number",
    "plain",
    "relay_table",
]


class Table(msgspec.Struct, frozen=True):
    """A table of texts.

    Args:
        title: What it shows.
        columns: Headings.
        rows: Its rows, as long as the headings.
        notes: What a reader must know to read it right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def bench_tables(results: Results) -> tuple[Table, ...]:
    """Return times, rates and resources of every cell."""
    found = cells(results)
    return tuple(
        table for table in (_times(found), _rates(found), _resources(results)) if table.rows
    )


def gain_table(results: Results, metric: str = "ttft", *, base: str | None = None) -> Table:
    """Return every arm against the first."""
    found = gains(results, metric, base=base)
    rows: list[tuple[str, ...]] = []
    units: set[tuple[str, bool]] = set()
    for gain in found:
        comparison = gain.comparison
        units.add((gain.unit, comparison.interval is None))
        rows.append(
            (
                gain.model,
                gain.prompts,
                f"{gain.concurrency}" + ("" if gain.target == "door" else f" {gain.target}"),
                gain.tag,
                number(gain.base_median),
                number(gain.median),
                _good(gain.base_requests, gain.base_errors),
                _good(gain.requests, gain.errors),
                "-" if comparison.speedup is None else f"{comparison.speedup:.3g}x",
                _bounds(comparison),
                _said(comparison, gain.unit),
            )
        )
    title = METRICS[metric].title
    first = found[0].base if found else "the first arm"
    return Table(
        title=f"{title}, against {first}",
        columns=(
            *("model", "prompts", "at once", "arm", f"{first}, median", "arm, median"),
            *(f"{first}, good", "arm, good", "speedup", "95 % interval or range", "verdict"),
        ),
        rows=tuple(rows),
        notes=_unit_notes(units),
    )


def first_table(results: Results, metrics: Sequence[str] = ("ttft", "prefill", "decode")) -> Table:
    """Return request 1 against the best later one, by arm and metric."""
    rows, few = [], False
    for metric in metrics:
        for found in first_against_rest(results, metric):
            few = few or found.interval is None
            interval = found.interval
            low, high = min(found.ratios), max(found.ratios)
            rows.append(
                (
                    found.model,
                    found.tag,
                    METRICS[metric].title,
                    number(found.first),
                    number(found.best),
                    f"{score.median(found.ratios):.3f}",
                    f"{interval.low:.3f} .. {interval.high:.3f}"
                    if interval
                    else f"range {low:.3f} .. {high:.3f}",
                    str(found.loads),
                )
            )
    return Table(
        title="request 1 against the best later request of its load",
        columns=(
            *("model", "arm", "measure", "request 1", "best later"),
            *("slower by", "95 % interval or range", "loads"),
        ),
        rows=tuple(rows),
        notes=_few_note(units="loads") if few else (),
    )


def relay_table(results: Results) -> Table:
    """Return what the way through the front door adds."""
    rows = []
    for metric in ("ttft", "tpot", "total"):
        for cost in relay_costs(results, metric):
            interval = cost.interval
            rows.append(
                (
                    cost.tag,
                    cost.cell,
                    METRICS[metric].title,
                    number(cost.door),
                    number(cost.direct),
                    f"{cost.added:+.3f}",
                    f"{interval.low:+.3f} .. {interval.high:+.3f}"
                    if interval
                    else f"range {cost.low:+.3f} .. {cost.high:+.3f}",
                )
            )
    return Table(
        title="through the front door and beside it",
        columns=(*("arm", "cell", "measure", "door", "direct", "added", "95 % interval or range"),),
        rows=tuple(rows),
        notes=("added is the median over loads or waves of door less direct",),
    )


def against_itself(tag: str) -> str:
    """Return the tag of the arm that is measured twice, to show what the machine alone does."""
    return f"{tag} again"


def noise_lines(results: Results, metrics: Sequence[str] = ("ttft", "decode")) -> tuple[str, ...]:
    """Return the machine's noise: the first arm against itself, one line a cell and metric."""
    tags = dict.fromkeys(request.tag for request in results.requests)
    lines = []
    for tag in tags:
        if against_itself(tag) not in tags:
            continue
        pair = msgspec.structs.replace(
            results,
            requests=tuple(r for r in results.requests if r.tag in (tag, against_itself(tag))),
        )
        for metric in metrics:
            for gain in gains(pair, metric, base=tag):
                comparison = gain.comparison
                if comparison.speedup is None or gain.target != "door":
                    continue
                lines.append(
                    f"machine noise: {tag} against itself, {gain.model} {gain.prompts} "
                    f"x{gain.concurrency}, {METRICS[metric].title}: {comparison.speedup:.3f}x, "
                    f"{_bounds(comparison)}, {_said(comparison, gain.unit)}"
                )
    return tuple(lines)


def facts_lines(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return what every reader of the numbers must know: settings, machine, server, files."""
    if not runs:
        return ()
    lines = [
        "settings: " + _alternatives([run.settings for run in runs]),
        "machine: " + _alternatives([runs[-1].machine]),  # its load alone differs between runs
        "versions: " + _alternatives([run.versions for run in runs]),
    ]
    props = [run.server.get("props") for run in runs]
    said = _alternatives([one for one in props if isinstance(one, dict)])
    lines += [f"server: {said}"] if said else []
    lines += _file_lines(runs)
    lines += [f"incomplete: {r.tag}, load {r.load}: {r.note}" for r in runs if not r.complete]
    return tuple(lines)


def markdown(tables: Iterable[Table], *, lines: Iterable[str] = ()) -> str:
    """Return tables as Markdown, with lines of facts as a list under them."""
    parts = []
    for table in tables:
        parts += [f"### {table.title}", ""]
        parts.append(_markdown_row(table.columns))
        parts.append(_markdown_row(["---"] * len(table.columns)))
        parts += [_markdown_row(row) for row in table.rows]
        parts += ["", *(f"{note}." for note in table.notes)]
        parts += [""] if table.notes else []
    facts = [f"- {_escaped(line)}" for line in lines]
    return "\n".join([*parts, *facts]).rstrip("\n") + "\n"


def plain(tables: Iterable[Table], lines: Iterable[str] = ()) -> str:
    """Return tables as text in columns, for a pipe or a log."""
    parts = []
    for table in tables:
        every = [table.columns, *table.rows]
        widths = [max(len(row[n]) for row in every) for n in range(len(table.columns))]
        parts.append(f"{table.title}:")
        for row in every:
            padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            parts.append("  " + "  ".join(padded).rstrip())
        parts += [*(f"  ({note})" for note in table.notes), ""]
    return "\n".join([*parts, *lines]).rstrip("\n") + "\n"


def lost_lines(results: Results) -> tuple[str, ...]:
    """Return which runs that ended well have fewer requests here than they sent, one line each."""
    lines = []
    for run in results.runs:
        asked = run.settings
        found = [request for request in results.requests if request.run == run.id]
        if not run.complete or not found or not {"repeats", "concurrency"} <= asked.keys():
            continue
        cells = sum(asked["concurrency"]) * max(1, len(asked.get("models", ())))
        sent = asked["repeats"] * cells * len({request.target for request in found})
        if len(found) < sent:
            lines.append(f"{run.tag or run.id}: {len(found)} of {sent} requests are left of a run")
    return tuple(lines)


def differences(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return what else differs between arms and so may explain a gain: settings, machine, server.

    Flags and variables are what an arm is, so they are not named. What all arms have alike, such as
    two models in each, explains nothing.
    """
    seen: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        facts = {f"setting {key}": value for key, value in run.settings.items()}
        facts |= {f"machine {key}": run.machine.get(key) for key in ("processor", "threads")}
        facts["server build"] = run.server.get("props", {}).get("build_info")
        facts["interrupted"] = "no" if run.complete else "yes"
        for key, value in facts.items():
            if value is not None:
                tags = seen.setdefault(key, {}).setdefault(_short(key, value), [])
                tags += [] if run.tag in tags else [run.tag]
    return tuple(
        f"the arms differ in {key}: "
        + "; ".join(f"{value or 'none'} ({', '.join(tags)})" for value, tags in values.items())
        for key, values in seen.items()
        if len({tuple(sorted(tags)) for tags in values.values()}) > 1
        and key not in ("setting concurrency", "setting prompt_tokens")
    )


def number(value: float | None) -> str:
    """Return a number with as many digits as say something, or `-`."""
    if value is None:
        return "-"
    if abs(value) >= 100:  # noqa: PLR2004 - three digits and more need no fraction
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"  # noqa: PLR2004 - as above


def _times(found: Sequence[Cell]) -> Table:
    rows: list[tuple[str, ...]] = []
    units: set[tuple[str, bool]] = set()
    for cell in found:
        spread = cell.spreads.get("ttft")
        interval = cell.intervals.get("ttft")
        if spread:
            units.add((cell.unit, interval is None))
        rows.append(
            (
                *_place(cell),
                number(spread.median if spread else None),
                _span(interval, spread),
                number(spread.p90 if spread else None),
                number(spread.p99 if spread else None),
                _triple(cell, "tpot"),
                _triple(cell, "total"),
                _good(cell.requests, sum(cell.errors.values())),
                ", ".join(f"{count} {kind}" for kind, count in cell.errors.items()) or "-",
            )
        )
    return Table(
        title="times",
        columns=(
            *("arm", "model", "prompts", "at once", "TTFT ms", "95 % interval or range"),
            *("p90", "p99", "TPOT ms p50/p90/p99", "end-to-end ms p50/p90/p99", "good", "errors"),
        ),
        rows=tuple(rows),
        notes=_unit_notes(units),
    )


def _rates(found: Sequence[Cell]) -> Table:
    rows = [
        (
            *_place(cell),
            _triple(cell, "prefill"),
            _triple(cell, "decode"),
            cell.rates_by,
            _triple(cell, "wait"),
            number(cell.prompt_tokens),
            number(cell.cached_tokens),
            number(cell.output_tokens),
        )
        for cell in found
        if cell.spreads
    ]
    return Table(
        title="rates and tokens",
        columns=(
            *("arm", "model", "prompts", "at once", "prefill tok/s p50/p90/p99"),
            *("decode tok/s p50/p90/p99", "rates by", "wait ms p50/p90/p99"),
            *("prompt tokens", "cached", "generated"),
        ),
        rows=tuple(rows),
        notes=("wait is TTFT less the backend's own prefill time: connection, relay and queue",),
    )


def _resources(results: Results) -> Table:
    rows: dict[tuple[str, str, str], list[float]] = {}
    for run in results.runs:
        # what several processes of one name use at once adds up; their time is the same
        together: dict[tuple[str, str, str], list[float]] = {}
        for usage in run.usage:
            key = (run.tag, usage.cell, f"{usage.role} {usage.name}")
            held = together.setdefault(key, [0.0, 0.0, 0.0])
            held[0] += usage.rss_bytes / 1024**2
            held[1] += usage.cpu_s
            held[2] = usage.wall_s
        for key, (mib, cpu_s, wall_s) in together.items():
            held = rows.setdefault(key, [0.0, 0.0, 0.0])
            held[0] = max(held[0], mib)
            held[1] += cpu_s
            held[2] += wall_s
    return Table(
        title="resources",
        columns=("arm", "cell", "process", "peak resident MiB", "CPU s", "cores"),
        rows=tuple(
            (*key, f"{mib:.1f}", f"{cpu:.2f}", f"{cpu / wall:.2f}" if wall else "-")
            for key, (mib, cpu, wall) in rows.items()
        ),
    )


def _place(cell: Cell) -> tuple[str, str, str, str]:
    beside = "" if cell.target == "door" else f" {cell.target}"
    return cell.tag, cell.model, cell.prompts, f"{cell.concurrency}{beside}"


def _triple(cell: Cell, metric: str) -> str:
    spread = cell.spreads.get(metric)
    if spread is None:
        return "-"
    return " / ".join(number(value) for value in (spread.median, spread.p90, spread.p99))


def _span(interval: score.Interval | None, spread: score.Spread | None) -> str:
    if spread is None:
        return "-"
    if interval is None:
        return f"range {number(spread.low)} .. {number(spread.high)}"
    return f"{number(interval.low)} .. {number(interval.high)}"


def _bounds(comparison: score.Comparison) -> str:
    if comparison.interval is not None:
        return f"{comparison.interval.low:.3g}x .. {comparison.interval.high:.3g}x"
    if comparison.low is None or comparison.high is None:
        return "-"
    return f"range {comparison.low:.3g}x .. {comparison.high:.3g}x"


def _said(comparison: score.Comparison, unit: str) -> str:
    if comparison.verdict == "not measured" and comparison.units:
        return f"{_count(comparison.units, unit)}: too few for a verdict"
    return comparison.verdict + (", one load each" if unit == "wave" and comparison.units else "")


def _good(requests: int, errors: int) -> str:
    return f"{requests - errors} of {requests}" if requests else "-"


def _count(units: int, unit: str) -> str:
    return f"{units} {unit}" + ("" if units == 1 else "s")


def _few_note(units: str) -> tuple[str, ...]:
    return (f"with fewer than {score.MIN_UNITS} {units} the range is given and no interval",)


_ONE_LOAD = (
    "intervals resample the waves of one load and say nothing of what another load would give; "
    "`bench-serve ab` measures several"
)


def _unit_notes(units: Collection[tuple[str, bool]]) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if any(few for _, few in units):
        notes += _few_note("loads or waves")
    if ("wave", False) in units:
        notes += (_ONE_LOAD,)
    if ("load", False) in units:
        notes += ("intervals resample loads, each a fresh start of the server",)
    return notes


def _alternatives(facts: Sequence[Mapping[str, Any]]) -> str:
    """Return each key with all the values that it has, in the order in which they came."""
    found: dict[str, dict[str, None]] = {}
    for one in facts:
        for key, value in one.items():
            if value not in ("", None, [], ()):
                found.setdefault(key, {})[_short(key, value)] = None
    return ", ".join(f"{key} {' or '.join(values)}" for key, values in found.items())


def _file_lines(runs: Sequence[Run]) -> list[str]:
    """Return each file that any run hashed, with the arms that used it where they differ."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for name, file in run.files.items():
            digest = _short("sha256", file.get("sha256", "unread"))
            tags = found.setdefault(name, {}).setdefault(
                f"{file.get('size_bytes')} bytes, sha256 {digest}", []
            )
            tags += [] if run.tag in tags else [run.tag]
    return [
        f"{name}{' (' + ', '.join(tags) + ')' if len(files) > 1 else ''}: {said}"
        for name, files in found.items()
        for said, tags in files.items()
    ]


def _short(key: str, value: object) -> str:
    text = _plain(value)
    return text[:16] + "..." if key.endswith("sha256") and len(text) > 16 else text  # noqa: PLR2004


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    return str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _markdown_row(cells_of_row: Sequence[str]) -> str:
    return "| " + " | ".join(_escaped(text) for text in cells_of_row) + " |"
