"""`1bit logs`: what a backend prints, over all its lives, and on as it comes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from urllib.parse import quote

import click

from onebit_serve.cli import ask
from onebit_serve.core.errors import OnebitError

__all__ = ["command"]

_EXIT_FAILED = 1


@click.command("logs")
@click.argument("name", required=False)
@ask.server_options
@click.option("-f", "--follow", is_flag=True, help="Go on with what it prints from now on.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, 2000),
    default=200,
    show_default=True,
    help="How many of its last lines come first.",
)
@click.pass_context
def command(
    context: click.Context,
    name: str | None,
    url: str | None,
    config: str | None,
    api_key_file: str | None,
    follow: bool,  # noqa: FBT001
    lines: int,
) -> None:
    """Print what the backend NAME printed last; without NAME, all of them.

    Where there are several, each line begins with the backend's name.
    """
    door = ask.find(url, config, api_key_file, os.environ)
    names = [str(one["name"]) for one in ask.named(door.status()["backends"], name)]
    printer = _Printer(with_names=len(names) > 1)
    query = f"?lines={lines}" + ("&follow=1" if follow else "")
    paths = [(one, f"/v1/backends/{quote(one, safe='')}/logs{query}") for one in names]
    if follow and len(names) > 1:
        workers = [
            threading.Thread(target=printer.copy, args=(door, *pair), daemon=True) for pair in paths
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    else:
        for pair in paths:
            printer.copy(door, *pair)
    if printer.failure is not None:
        raise printer.failure
    if printer.closed:
        _forget_stdout()
        context.exit(_EXIT_FAILED)


class _Printer:
    """Copies lines to stdout, whole ones, from several threads."""

    def __init__(self, *, with_names: bool) -> None:
        self._with_names = with_names
        self._lock = threading.Lock()
        self.failure: OnebitError | None = None
        self.closed = False

    def copy(self, door: ask.Door, name: str, path: str) -> None:
        """Print what comes until it ends; keep what went wrong."""
        prefix = f"{name} | ".encode() if self._with_names else b""
        try:
            for line in door.lines(path):
                with self._lock:
                    sys.stdout.buffer.write(prefix + line)
                    sys.stdout.buffer.flush()
        except OnebitError as error:
            self.failure = self.failure or error
        except BrokenPipeError:
            self.closed = True


def _forget_stdout() -> None:
    # The reader (head, less) is gone; Python would complain once more while it ends.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
