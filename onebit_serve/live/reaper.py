"""Reaps strangers when we are PID 1, as in a container: processes whose parents are gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import trio

__all__ = ["reap_strangers"]


async def reap_strangers(ours: Callable[[], frozenset[int]]) -> None:
    """Reap every dead child that is not one of ours, until cancelled.

    Args:
        ours: Returns the pids of children that somebody else waits for.
    """
    with trio.open_signal_receiver(signal.SIGCHLD) as deaths:
        async for _ in deaths:
            _reap(ours())


def _reap(ours: frozenset[int]) -> None:
    """Look at the dead without reaping, and reap those that nobody else waits for."""
    for pid in _children():
        if pid not in ours:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123
        return [int(pid) for pid in file.read().split()]
