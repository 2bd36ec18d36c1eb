"""The id of a request: the client's own where it is sane, else one of ours.

It stands in the log lines of a request, in its reply, and goes to the backend, so that one word
finds all of it.
"""

from __future__ import annotations

import itertools
import re

__all__ = ["HEADER", "RequestIds", "sane"]

HEADER = b"x-request-id"
_LONGEST = 128
_SANE = re.compile(rb"[!-~]{1,%d}" % _LONGEST)


def sane(value: bytes | None) -> str | None:
    """Return a client's id when it may stand in a log line: 1 to 128 printable ASCII characters.

    Args:
        value: The value of `X-Request-Id`, or `None` without one.
    """
    if value is None or not _SANE.fullmatch(value):
        return None
    return value.decode("ascii")


class RequestIds:
    """Gives every request an id.

    Args:
        prefix: What tells this run's ids from those of others: a few random characters.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers = itertools.count(1)

    def take(self, value: bytes | None) -> str:
        """Return the client's id where it is sane, else a new one."""
        return sane(value) or f"{self._prefix}-{next(self._numbers)}"
