"""Make the folders of the caches below us, and tell whether an earlier run filled them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from onebit_serve.core.caches import CachePlan

__all__ = ["found", "make_folders"]

# Mesa writes these when a cache is made, before anything is in it.
_NOT_ENTRIES = frozenset({"index", "marker"})


def make_folders(plan: CachePlan) -> tuple[str, ...]:
    """Make our own folders, for their owner only; return those that cannot be made or written to.

    A driver whose folder is missing compiles without a cache, so a failure costs time only.
    """
    return tuple(folder for folder in plan.folders if not _made(folder))


def _made(folder: str) -> bool:
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def found(plan: CachePlan) -> tuple[str, ...]:
    """Return the names of the caches that hold something. Ask before the child starts."""
    return tuple(
        name
        for name, folder, pattern in plan.look
        if any(True for path in _glob(folder, pattern) for _ in _entries(path))
    )


def _glob(folder: str, pattern: str) -> Iterator[Path]:
    try:
        yield from Path(folder).glob(pattern)
    except OSError:  # not ours to read
        return


def _entries(path: Path) -> Iterator[str]:
    if path.is_file():
        yield path.name
    for _, _, files in os.walk(path):
        yield from (name for name in files if name not in _NOT_ENTRIES)
