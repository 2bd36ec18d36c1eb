"""Saved slots: the directory that only we may read, and what is in it.

llama-server writes a slot's state under the name it is told, in the directory it was started with
(`--slot-save-path`), and refuses what does not fit; the name says what a state belongs to, so that
another program, model, flag or prompt never meets it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from onebit_serve.core.errors import UsageError
from onebit_serve.core.folders import state_folder
from onebit_serve.core.slots import save_name

__all__ = ["Saves", "private_directory", "prune", "slots_folder"]

_LIMIT_BYTES = 4 << 30
_PART = ".part"
_PART_S = 3600.0  # a state is written in seconds; what is older, its writer left behind
_part_numbers = itertools.count()


class Saves(msgspec.Struct, frozen=True):
    """Where slots are saved after warming, and what a saved state belongs to.

    Args:
        directory: What the child got as `--slot-save-path`; see `private_directory`.
        binary: What identifies the program: path, size, time of change, version.
        model: The same of the model.
        flags: The child's command line without port.
    """

    directory: Path
    binary: str
    model: str
    flags: tuple[str, ...] = ()

    def path(self, prefix: Sequence[int]) -> Path:
        """Return the file of a slot that holds exactly these tokens."""
        name = save_name(prefix, binary=self.binary, model=self.model, flags=self.flags)
        return self.directory / name

    def part(self, path: Path) -> Path:
        """Return where to write a state first: a name that no other save has, of any process."""
        return path.with_suffix(f".{os.getpid()}-{next(_part_numbers)}{_PART}")

    def adopt(self, written: Path, path: Path) -> None:
        """Give a state that is whole its name, so that no half of one is ever restored."""
        with contextlib.suppress(OSError):
            written.replace(path)
            prune(self.directory)

    def useless(self, path: Path) -> None:
        """Note that a state helps nobody, by an empty file: nothing is restored, nothing saved."""
        with contextlib.suppress(OSError):
            path.write_bytes(b"")

    def holds(self, path: Path) -> bool:
        """Say whether there is a state to restore."""
        with contextlib.suppress(OSError):
            return path.stat().st_size > 0
        return False

    def remove(self, path: Path) -> None:
        """Remove a state, or what was written of it; the folder itself may be gone."""
        with contextlib.suppress(OSError):
            path.unlink()

    def touch(self, path: Path) -> None:
        """Note that a state was of use, since the longest unused are removed first."""
        with contextlib.suppress(OSError):
            os.utime(path)


def slots_folder(environment: Mapping[str, str]) -> Path | None:
    """Return `$XDG_STATE_HOME/onebit/slots`, or `None` where the environment gives no place."""
    folder = state_folder(environment)
    return Path(folder, "slots") if folder else None


def private_directory(path: Path) -> Path:
    """Make a directory that only its owner can look into; saved slots hold what users wrote.

    Args:
        path: Where; parents are made too.

    Raises:
        UsageError: It cannot be made, or belongs to somebody else.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"{path} belongs to user {found.st_uid}", hint="choose another state directory"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o700)
    except OSError as fault:
        raise UsageError(
            f"cannot keep saved slots in {path}: {fault.strerror}",
            hint="set XDG_STATE_HOME, or [warm_prompts] save = false",
        ) from fault
    return path


def prune(directory: Path, limit_bytes: int = _LIMIT_BYTES) -> None:
    """Remove what half-written states were left, and the longest unused until the rest fits.

    Args:
        directory: Where they are.
        limit_bytes: What all together may have; one that is being written counts.
    """
    kept: list[tuple[float, int, Path]] = []
    total = 0
    for path in directory.glob("warm-*"):
        with contextlib.suppress(OSError):
            found = path.stat()
            if path.suffix == ".bin":
                kept.append((found.st_mtime, found.st_size, path))
            elif path.suffix != _PART:
                continue
            elif time.time() - found.st_mtime > _PART_S:
                path.unlink()
                continue
            total += found.st_size
    for _, size, path in sorted(kept):
        if total <= limit_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size
