"""Small facts kept between runs under `$XDG_CACHE_HOME/onebit/`; losing them costs time only.

One file for each thing that was looked at. It holds the key it was made from, so that a changed
thing, a clash of names or a damaged file is a miss and never a wrong answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from onebit_serve.core.folders import cache_folder
from onebit_serve.live.files import write_whole

__all__ = ["cache_file", "recall", "remember"]

_ValueT = TypeVar("_ValueT", bound=msgspec.Struct)


class _Entry(msgspec.Struct, frozen=True):
    """One cache file: what it was made from, and the value as JSON."""

    key: list[str]
    value: msgspec.Raw


def cache_file(env: Mapping[str, str], kind: str, name: list[str]) -> Path | None:
    """Return the file for one thing, `None` where the environment gives no place for it.

    Args:
        env: The environment; `XDG_CACHE_HOME` and `HOME` are read.
        kind: What is kept, the start of the file's name.
        name: What tells this thing from others and stays when it changes.
    """
    folder = cache_folder(env)
    digest = zlib.crc32("\0".join(name).encode("utf-8", "surrogateescape"))
    return Path(folder, f"{kind}-{digest:08x}.json") if folder else None


def recall(file: Path | None, key: list[str], kind: type[_ValueT]) -> _ValueT | None:
    """Return what a cache file holds for this very key, or `None`.

    Args:
        file: The file, from `cache_file`.
        key: All that the value depends on.
        kind: What the value is.
    """
    if file is None:
        return None
    try:
        entry = msgspec.json.decode(file.read_bytes(), type=_Entry)
        return msgspec.json.decode(entry.value, type=kind) if entry.key == key else None
    except (OSError, ValueError):
        return None


def remember(file: Path | None, key: list[str], value: msgspec.Struct) -> None:
    """Write a cache file whole or not at all; a cache that cannot be written is no error.

    Args:
        file: The file, from `cache_file`.
        key: All that the value depends on.
        value: What to keep.
    """
    if file is None:
        return
    try:
        entry = msgspec.json.encode(_Entry(key=key, value=msgspec.Raw(msgspec.json.encode(value))))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, entry)
    except (OSError, ValueError):
        return
