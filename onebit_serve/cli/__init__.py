"""The command `1bit`: picks the subcommand, turns errors into two lines and an exit code.

Start-up is a feature: a subcommand's module is imported when it is asked for, and nothing here
imports trio.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

import click

from onebit_serve import __version__
from onebit_serve.core.errors import OnebitError, UsageError, nearest

__all__ = ["COMMANDS", "Group", "main", "one_bit"]

# Name of the command, and where it is.
COMMANDS: dict[str, str] = {
    "serve": "onebit_serve.cli.serve:serve",
    "check": "onebit_serve.cli.check:check",
    "status": "onebit_serve.cli.status:command",
    "logs": "onebit_serve.cli.logs:command",
    "warm": "onebit_serve.cli.warm:command",
    "route": "onebit_serve.cli.route:command",
    "bench-serve": "onebit_serve.cli.bench:command",
    "gate": "onebit_serve.cli.gate:command",
}

# Planned, not there: a name goes when its command comes.
NOT_YET = ("doctor", "top")

_INTERRUPTED = 130
_CANNOT_WRITE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)


class Group(click.Group):
    """A group that imports a subcommand when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand that the words name.

        Raises:
            UsageError: There is none of that name.
        """
        name = args[0]
        if name in NOT_YET and name not in COMMANDS:
            raise UsageError(f"1bit {name} is not yet there", hint="see `1bit --help`")
        if name not in COMMANDS:
            raise UsageError(
                f"there is no command {name}",
                hint=nearest(name, tuple(COMMANDS)) or "see `1bit --help`",
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`1bit COMMAND --help` explains a command.",
)
@click.version_option(__version__, "--version", prog_name="1bit", message="%(prog)s %(version)s")
def one_bit() -> None:
    """Serve local LLMs: ready only when the first request is as fast as the next."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `1bit` and return its exit code.

    Args:
        arguments: The words after `1bit`; those of this process where `None`.
    """
    _open_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        result = one_bit.main(args=words, prog_name="1bit", standalone_mode=False)
        sys.stdout.flush()
    except OnebitError as error:
        _say(error.message, error.hint)
        return error.exit_code
    except click.ClickException as error:
        _say(error.format_message(), "see `1bit --help`")
        return UsageError.exit_code
    except click.Abort:
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer is lost anyway
        if error.errno != errno.EPIPE:  # a reader who left knows it
            _say(f"cannot write the output: {error.strerror}", "")
        return 1
    return result if isinstance(result, int) else 0


def _open_closed_streams() -> None:
    """Give a standard stream that is closed to /dev/null, so that no socket gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, os.fdopen(number, "r" if not number else "w", closefd=False))


def _say(message: str, hint: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
