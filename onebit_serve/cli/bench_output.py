"""How the benchmark's commands run to an end, write what there is, and draw it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import click

from onebit_serve.core import report, results
from onebit_serve.core.errors import OnebitError, UsageError
from onebit_serve.live.files import write_whole

__all__ = ["Progress", "comparison_tables", "draw", "measured"]

_KILLED = 130
_RAW: dict[str, Callable[[results.Results], str]] = {
    "csv": results.write_csv,
    "json": results.write_json,
}


def measured(
    work: Callable[[], Awaitable[None]],
    so_far: Callable[[], results.Results],
    output: Path | None,
    form: str,
    shown: Progress,
    kill: Callable[[], None] = lambda: None,
) -> int:
    """Run, and write what there is however it ends.

    Args:
        work: What measures.
        so_far: Gives what there is.
        output: The file to write; `None` prints.
        form: `table`, `csv`, `json` or `md`.
        shown: Drawn while `work` runs.
        kill: Ends what `work` started, on a second Ctrl-C, which still writes `csv` and `json`.

    Raises:
        OnebitError: As `work` does, after writing; so does every other exception of it.
    """
    import trio

    def last() -> None:
        kill()
        shown.bar.stop()  # which shows the cursor again
        found = so_far()
        try:
            if found.requests and form in _RAW:  # tables would take their time
                _put(_RAW[form](found), output)
        except OnebitError as error:
            click.echo(error.message, err=True)
        finally:
            os._exit(_KILLED)

    interrupted = False
    try:
        with shown.bar:
            interrupted = trio.run(_interruptible, work, last)
    finally:  # whatever ended it: what was measured outlives an error that nobody foresaw
        found = so_far()
        if found.requests:
            _deliver(found, output, form)
    if interrupted:
        where = f"; they are in {output}" if output and found.requests else ""
        click.echo(f"stopped: {len(found.requests)} requests were measured{where}", err=True)
    return 0


async def _interruptible(work: Callable[[], Awaitable[None]], last: Callable[[], None]) -> bool:
    """Run until done or the first Ctrl-C; at the second one `last` ends the process."""
    import trio

    failure: OnebitError | None = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def listen() -> None:
                async for _ in signals:
                    if scope.cancel_called:
                        last()
                    click.echo("stopping; once more kills at once", err=True)
                    scope.cancel()

            nursery.start_soon(listen)
            with scope:
                try:
                    await work()
                except OnebitError as error:
                    failure = error  # raised below, where no nursery wraps it in a group
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return scope.cancelled_caught


def _deliver(found: results.Results, output: Path | None, form: str) -> None:
    """Write or print what was measured, and draw it where it went into a file."""
    if form in _RAW:  # before anything is computed of it, which takes time and may fail
        _put(_RAW[form](found), output)
        if output is None:
            return
    tables = [*report.bench_tables(found), *comparison_tables(found, "ttft")]
    notes = (*report.facts_lines(found.runs), *report.noise_lines(found))
    if form == "md":
        _put(report.markdown(tables, lines=notes), output)
    elif form == "table" and output is not None:
        _put(report.plain(tables, notes), output)
    if output is not None or form == "table":
        draw(tables, notes)


def comparison_tables(found: results.Results, metric: str) -> list[report.Table]:
    """Return what compares arms, as far as there is more than one."""
    several = len({request.tag for request in found.requests}) > 1
    every = [
        *([report.gain_table(found, metric)] if several else []),
        *([report.first_table(found)] if several else []),
        report.relay_table(found),
    ]
    return [table for table in every if table.rows]


def _put(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        write_whole(output, text.encode())
    except OSError as error:
        click.echo(text, nl=False)  # hours of measuring are not lost to a full disk
        raise UsageError(
            f"--output {output}: {error.strerror}", hint="it is on the standard output instead"
        ) from error
    click.echo(f"written to {output}", err=True)


def draw(tables: Sequence[report.Table], notes: Sequence[str]) -> None:
    """Print tables, with rich on a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not sys.stdout.isatty():
        click.echo(report.plain(tables, notes), nl=False)
        return
    console = Console()
    for table in tables:
        drawn = Table(title=table.title, box=box.SIMPLE_HEAD, title_justify="left")
        for column in table.columns:
            drawn.add_column(column, overflow="fold")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn, markup=False)
        for note in table.notes:
            console.print(f"  {note}.", style="dim", markup=False, highlight=False)
    for line in notes:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


class Progress:
    """A bar on a terminal; elsewhere a line for each server that is started.

    Args:
        total: Requests in all.
    """

    def __init__(self, total: int) -> None:
        from rich import progress as rich
        from rich.console import Console

        console = Console(stderr=True)
        self.bar = rich.Progress(
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            refresh_per_second=4,  # drawing must not take time from the measuring
        )
        self._task = self.bar.add_task("starting", total=total)
        self._errors = 0

    def began(self, what: str) -> None:
        """Show which server is being started."""
        if self.bar.disable:
            click.echo(what, err=True)
        self.bar.update(self._task, description=f"{what}: starting")

    def told(self, request: results.Request) -> None:
        """Show one more request."""
        self._errors += bool(request.error)
        said = f"{request.tag} {request.cell}".strip()
        if request.error:
            said += f", {self._errors} failed: {request.error}"
        elif request.ttft_ms is not None:
            said += f", TTFT {report.number(request.ttft_ms)} ms"
        self.bar.update(self._task, advance=1, description=said)
