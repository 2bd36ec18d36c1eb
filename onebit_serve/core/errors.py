"""The errors of `1bit serve`: each says what, where and what to do about it.

    OnebitError              exit 1
    +-- UsageError           exit 2   flags, files, configuration
    |   +-- ConfigError               the configuration file, or a variable for a key of it
    +-- PortTakenError       exit 3   the front door's port belongs to somebody else
    +-- NotRunError          exit 4   something asked for could not be run (gate)
    +-- BackendError         exit 1   a backend failed in a way that ends the process

What a client of the front door is told is `wire.Refusal`: an HTTP answer is a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "BackendError",
    "ConfigError",
    "NotRunError",
    "OnebitError",
    "PortTakenError",
    "UsageError",
    "nearest",
]


class OnebitError(Exception):
    """What went wrong, in one line, and a hint that says what to do.

    Args:
        message: What and where, without a final full stop.
        hint: What the reader can do; empty where there is nothing to advise.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(OnebitError):
    """A flag, a file or a combination of them that cannot work."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file, or a variable that stands for one of its keys, that cannot be used."""


class PortTakenError(OnebitError):
    """The address of the front door is in use, or may not be used."""

    exit_code = 3


class NotRunError(OnebitError):
    """A check that was asked for could not be run."""

    exit_code = 4


class BackendError(OnebitError):
    """A needed backend failed in its first start, or any did under `--no-restart`."""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a hint that names the known word nearest to one that is not, or nothing.

    Args:
        word: What was written.
        known: What could have been meant.
        cutoff: How alike the two must be, 0 to 1 (difflib's ratio).
    """
    import difflib  # for errors only

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {found[0]}?" if found else ""
