"""Saved slots: the directory that only we may read, and what is in it.

llama-server writes a slot's state under the name it is told, in the directory it was started with
(`--slot-save-path`), and refuses what does not fit; the name says what a state belongs to, so that
another program, model, flag or prompt never meets it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from onebit_serve.core.errors import UsageError
from onebit_serve.core.folders import state_folder
from onebit_serve.core.slots import save_name

__all__ = ["Saves", "private_directory", "prune", "slots_folder"]

_LIMIT_BYTES = 4 << 30


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

    def adopt(self, written: Path, path: Path) -> None:
        """Give a state that is whole its name, so that no half of one is ever restored."""
        with contextlib.suppress(OSError):
            written.replace(path)
            prune(self.directory)

    def useless(self, path: Path) -> None:
        """Note that a state helps nobody, by an empty file: nothing is restored, nothing saved."""
        with contextlib.suppress(OSError):
            path.write_bytes(b"")

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
    """Remove the longest unused saved slots until the rest fits the limit in bytes."""
    kept: list[tuple[float, int, Path]] = []
    for path in directory.glob("warm-*.bin"):
        with contextlib.suppress(OSError):
            found = path.stat()
            kept.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= limit_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size
