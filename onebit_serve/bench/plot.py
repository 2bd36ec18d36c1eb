"""The picture of a comparison: medians with their 90 % points, cell by cell, arm by arm.

matplotlib is an extra, since only pictures need it. An HTML file holds the picture as SVG inside
itself, with the tables under it, so that it can be sent as one file.
"""

from __future__ import annotations

import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onebit_serve.core.cells import METRICS, Cell, Gain, cells, gains
from onebit_serve.core.errors import UsageError
from onebit_serve.core.report import Table, number
from onebit_serve.core.results import Results

__all__ = ["SUFFIXES", "check", "draw"]

SUFFIXES = (".svg", ".png", ".html")

# Okabe and Ito's colours, told apart by colour-blind readers too; hatches carry it into print.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_HATCHES = ("", "//", "..", "xx", "\\\\", "oo")
_BAR_SHARE = 0.8
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
svg { max-width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2em .8em; text-align: left; border-bottom: 1px solid #ccc }
"""
_INCHES_PER_CELL = 1.6


def check(path: Path) -> None:
    """Say early what would stop the picture from being written.

    Raises:
        UsageError: The suffix is unknown, the folder is missing, or matplotlib is.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"--plot {path}: {path.suffix or 'no suffix'} is no kind of picture that is drawn",
            hint=f"end its name in one of {', '.join(SUFFIXES)}",
        )
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--plot {path}: no file can be written there")
    try:
        import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise UsageError(
            "--plot needs matplotlib, which is not installed",
            hint="pip install 'onebit-serve[plot]'",
        ) from error
    mpl.use("Agg")


def draw(
    path: Path, results: Results, metric: str = "ttft", *, tables: Sequence[Table] = ()
) -> None:
    """Write the picture.

    Args:
        path: Ends in .svg, .png or .html.
        results: All arms together.
        metric: A name of `METRICS`.
        tables: Put under the picture in HTML.

    Raises:
        UsageError: As `check` says, or there is nothing to draw.
    """
    check(path)
    every = cells(results, intervals=())
    found = [cell for cell in every if metric in cell.spreads and cell.target == "door"]
    if not found:
        raise UsageError(f"--plot {path}: no cell has a {METRICS[metric].title} to draw")
    figure = _figure(found, gains(results, metric), metric)
    suffix = path.suffix.lower()
    # drawn in memory, so that a full disk is the only thing that can go wrong with the file
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if suffix == ".html" else suffix[1:], dpi=150)
    data = buffer.getvalue()
    if suffix == ".html":
        data = _page(data[data.index(b"<svg") :].decode(), tables, metric).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror}") from error


def _figure(found: Sequence[Cell], compared: Sequence[Gain], metric: str) -> Any:
    import matplotlib as mpl
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    # text stays text in an SVG: it can be searched, copied, and read aloud
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "onebit"
    tags = list(dict.fromkeys(cell.tag for cell in found))
    places = list(dict.fromkeys((c.model, c.prompts, c.concurrency) for c in found))
    width = max(5.0, _INCHES_PER_CELL * len(places) + 2)
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    axes = figure.add_subplot()
    bar = _BAR_SHARE / len(tags)
    for number_of_arm, tag in enumerate(tags):
        for cell in (c for c in found if c.tag == tag):
            spread = cell.spreads[metric]
            at = places.index((cell.model, cell.prompts, cell.concurrency))
            x = at - _BAR_SHARE / 2 + bar * (number_of_arm + 0.5)
            axes.bar(
                x,
                spread.median,
                bar * 0.94,
                color=_COLOURS[number_of_arm % len(_COLOURS)],
                hatch=_HATCHES[number_of_arm % len(_HATCHES)],
                edgecolor="white",
                label=tag if tag not in axes.get_legend_handles_labels()[1] else None,
            )
            top = max(spread.p90, spread.median)
            axes.vlines(x, spread.median, top, colors="black", linewidth=1)
            gain = next((g for g in compared if _same(g, cell)), None)
            text = number(spread.median)
            if gain is not None and gain.comparison.speedup is not None:
                text += f"\n{gain.comparison.speedup:.2f}x"
            axes.annotate(
                text, (x, top), (0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    axes.set_xticks(
        range(len(places)), [f"{model}\n{prompts}, {n} at once" for model, prompts, n in places]
    )
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylabel(METRICS[metric].title)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{METRICS[metric].title}: median, line to the 90 % point", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _same(gain: Gain, cell: Cell) -> bool:
    return (gain.tag, gain.model, gain.prompts, gain.concurrency, gain.target) == (
        *(cell.tag, cell.model, cell.prompts, cell.concurrency, cell.target),
    )


def _page(svg: str, tables: Sequence[Table], metric: str) -> str:
    title = html.escape(f"{METRICS[metric].title}, arm against arm")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{_STYLE}</style>",
        svg,
    ]
    for table in tables:
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>")
        parts += [f"<th>{html.escape(column)}" for column in table.columns]
        for row in table.rows:
            parts.append("<tr>" + "".join(f"<td>{html.escape(text)}" for text in row))
        parts.append("</table>")
        parts += [f"<p>{html.escape(note)}.</p>" for note in table.notes]
    return "\n".join([*parts, "</html>", ""])
