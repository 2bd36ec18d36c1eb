"""`1bit top`: `1bit status`, drawn anew each second, with what the processes take."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from onebit_serve.cli import ask, status
from onebit_serve.core.errors import OnebitError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Meter", "command"]

_HEADINGS = ("cpu", "resident")


class Meter:
    """What processes of this machine take: cores since the last look, and resident memory."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}

    def read(self, pid: int | None) -> tuple[str, str]:
        """Return cores and memory of a process, each a dash where it cannot be seen.

        Args:
            pid: The process; `None` where there is none.
        """
        if pid is None:
            return "-", "-"
        import psutil

        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times, resident_bytes = process.cpu_times(), process.memory_info().rss
        except (psutil.Error, OSError):
            return "-", "-"
        now_s, spent_s = time.monotonic(), times.user + times.system
        before_s, before_spent_s = self._before.get(pid, (now_s, spent_s))
        self._before[pid] = (now_s, spent_s)
        cores = (spent_s - before_spent_s) / (now_s - before_s) if now_s > before_s else None
        return "-" if cores is None else f"{cores:.2f}", f"{resident_bytes >> 20} MiB"


@click.command("top")
@ask.server_options
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often it looks.",
)
def command(url: str | None, config: str | None, api_key_file: str | None, every_s: float) -> None:
    """Watch a running `1bit serve` and its backends, until Ctrl-C.

    Like `1bit status`, with the cores and the memory that each backend takes where it runs on this
    machine. A server that goes away is waited for.
    """
    if not sys.stdout.isatty():
        raise UsageError(
            "1bit top draws on a terminal",
            hint="`1bit status` prints once, with --json for programs",
        )
    from rich.console import Console
    from rich.live import Live

    door = ask.find(url, config, api_key_file, os.environ)
    door.status()  # a wrong address ends it at once
    meter, console = Meter(), Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        try:
            while True:
                screen.update(picture(door, meter), refresh=True)
                time.sleep(every_s)
        except KeyboardInterrupt:
            return


def picture(door: ask.Door, meter: Meter) -> RenderableType:
    """Return one look at a server, or why there is none.

    Args:
        door: The server.
        meter: Measures its backends.
    """
    from rich.text import Text

    try:
        said = door.status()
    except OnebitError as error:
        return Text(f"{error.message}\nwaiting for it; Ctrl-C ends this")
    backends: list[dict[str, Any]] = said["backends"]
    more = [meter.read(one.get("pid")) for one in backends]
    return status.picture(door.url, said, backends, more=(_HEADINGS, more))
