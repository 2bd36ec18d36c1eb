"""`1bit status`: what a running server and its backends do; exits 0 only when they are ready."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from onebit_serve.cli import ask

__all__ = ["command"]

_NOT_READY = 1
_COSTLIEST = 3
_HEADINGS = (
    "backend",
    "state",
    "model",
    "device",
    "port",
    "pid",
    "since",
    "load",
    "warm-up",
    "restarts",
    "running",
    "waiting",
)
_NUMBERS = frozenset(_HEADINGS[_HEADINGS.index("port") :])
_STYLES = {"ready": "green", "failed": "red", "degraded": "yellow"}


@click.command("status")
@click.argument("name", required=False)
@ask.server_options
@click.option("--json", "as_json", is_flag=True, help="Print what /v1/status says, as JSON.")
@click.pass_context
def command(
    context: click.Context,
    name: str | None,
    url: str | None,
    config: str | None,
    api_key_file: str | None,
    as_json: bool,  # noqa: FBT001
) -> None:
    """Show what a running `1bit serve` and its backends do.

    With NAME that backend alone, and every synthetic request that warmed it. Exits with 0 when it
    is ready, 1 when it is not or nobody answers.
    """
    door = ask.find(url, config, api_key_file, os.environ)
    said = door.status()
    backends = ask.named(said["backends"], name)
    if as_json:
        sys.stdout.buffer.write(_json(backends[0] if name else said) + b"\n")
    else:
        _show(door.url, said, backends, every=name is not None)
    ready = backends[0].get("state") == "ready" if name else said.get("status") == "ok"
    context.exit(0 if ready else _NOT_READY)


def _json(value: object) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value))


def _show(url: str, said: dict[str, Any], backends: list[dict[str, Any]], *, every: bool) -> None:
    word = "ready" if said.get("status") == "ok" else str(said.get("status"))
    title = f"1bit serve {said.get('version', '')} at {url}: {word}"
    rows = [_row(one) for one in backends]
    notes = [line for one in backends for line in [*_notes(one), *_shapes(one, every=every)]]
    if sys.stdout.isatty():
        _draw(title, rows, notes)
        return
    print(title)
    table = [_HEADINGS, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADINGS))]
    for row in table:
        cells = [
            cell.rjust(width) if heading in _NUMBERS else cell.ljust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        ]
        print("  ".join(cells).rstrip())
    print("\n".join(notes), end="\n" if notes else "")


def _draw(title: str, rows: list[tuple[str, ...]], notes: list[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left")
    for row in rows:
        styled = [Text(row[0]), Text(row[1], style=_STYLES.get(row[1], "yellow"))]
        table.add_row(*styled, *(Text(cell) for cell in row[2:]))
    console.print(Text(title))
    console.print(table)
    for note in notes:
        console.print(Text(note))


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    state = str(one.get("state", ""))
    skipped = one.get("warm_up_skipped")
    return (
        str(one.get("name", "")),
        "degraded" if state == "ready" and one.get("degraded") else state,
        str(one.get("served_id", "")),
        str(one.get("device", "")),
        _or_dash(one.get("port")),
        _or_dash(one.get("pid")),
        _time(one.get("since_s")),
        _time(_seconds(one.get("load_ms"))),
        str(skipped) if skipped else _time(_seconds(one.get("warm_up_ms"))),
        _or_dash(one.get("restarts")),
        str(one.get("in_flight", 0)),
        str(one.get("waiting", 0)),
    )


def _notes(one: dict[str, Any]) -> list[str]:
    name = one.get("name", "")
    said = [("cause", "because"), ("degraded", "degraded:"), ("last_line", "said last:")]
    return [f"{name}: {word} {one[key]}" for key, word in said if one.get(key)]


def _shapes(one: dict[str, Any], *, every: bool) -> list[str]:
    """Say how far the warming of shapes is, and what its requests took: all, or the costliest."""
    shapes, name = one.get("shapes"), one.get("name", "")
    if not shapes:
        return []
    cheap = f", {shapes['cheap']} left out as cheap" if shapes["cheap"] else ""
    now = f"; now {shapes['now']}" if shapes.get("now") else ""
    first = (
        f"{name}: {shapes['warmed']} of {shapes['planned']} shapes are warm{cheap}; "
        f"{shapes['share']:.0%} of expected requests pay nothing; "
        f"{_time(shapes['spent_s'])} spent, {_time(shapes['gained_s'])} gained{now}"
    )
    lines = [first]
    requests = shapes["requests"]
    if not every:
        requests = sorted(requests, key=lambda r: -r["first_ms"])[:_COSTLIEST]
    for request in requests:
        again = request["second_ms"]
        second = "" if again is None else f", then {_time(again / 1000)}"
        lines.append(f"{name}:   {request['warms']}: {_time(request['first_ms'] / 1000)}{second}")
    return lines


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:  # noqa: PLR2004 - from two minutes on tenths don't matter
        return f"{seconds:.1f} s"
    minutes, hours = seconds // 60, seconds // 3600
    if hours:
        return f"{hours:.0f} h {minutes % 60:02.0f} min"
    return f"{minutes:.0f} min"
