"""The report directory, and what is kept between runs: durations and file hashes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from onebit_serve.core.errors import UsageError
from onebit_serve.core.folders import state_folder
from onebit_serve.core.gate.report import Run, as_json, as_junit, as_markdown
from onebit_serve.core.gate.verdict import Result
from onebit_serve.live import files

__all__ = ["Evidence", "Kept", "gate_folder", "sha256", "write_whole"]

_BLOCK_BYTES = 1 << 20


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is either whole or not there, in a folder that is made, for all to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, data)
    path.chmod(0o644)


class Evidence:
    """One directory for everything a run leaves behind.

    Args:
        folder: It is made where it is missing; it must be empty or a former report.

    Raises:
        UsageError: It cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            others = [each for each in folder.iterdir() if each.name != "report.json"]
        except OSError as error:
            raise UsageError(
                f"the report directory {folder} cannot be used: {error.strerror}",
                hint="name another one with --report",
            ) from None
        if others and not (folder / "results.jsonl").exists():
            raise UsageError(
                f"the report directory {folder} holds other files", hint="name an empty one"
            )
        self.folder = folder
        self._lines = folder / "results.jsonl"
        self._lines.write_bytes(b"")

    def path(self, model: str, name: str) -> Path:
        """Return where a model's evidence of that name goes; an earlier one is removed."""
        place = self.folder / model
        place.mkdir(exist_ok=True)
        path = place / name
        path.unlink(missing_ok=True)
        return path

    def keep(self, model: str, name: str, value: object) -> None:
        """Keep a value as JSON."""
        text = msgspec.json.format(msgspec.json.encode(value), indent=1)
        write_whole(self.path(model, f"{name}.json"), text + b"\n")

    def add(self, result: Result) -> None:
        """Append a result, so that it is on disk whatever happens next."""
        with self._lines.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")

    def finish(self, run: Run) -> None:
        """Write the three reports."""
        write_whole(self.folder / "report.json", as_json(run))
        write_whole(self.folder / "report.md", as_markdown(run).encode())
        write_whole(self.folder / "report.xml", as_junit(run))


class Kept:
    """A small JSON table that survives runs; losing it costs time, never a result.

    Args:
        path: Its file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.table: dict[str, str | float] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self.table = msgspec.json.decode(path.read_bytes(), type=dict[str, str | float])

    def save(self) -> None:
        """Write it, or leave it where that is not possible."""
        with contextlib.suppress(OSError):
            write_whole(self._path, msgspec.json.encode(self.table))


def gate_folder(env: Mapping[str, str]) -> Path:
    """Return the folder for what is kept between runs; without HOME the user's own."""
    return Path(state_folder(env) or Path("~/.local/state/onebit").expanduser()) / "gate"


def sha256(paths: list[Path], kept: Kept) -> str:
    """Return the hash of files, one after the other.

    A file's hash is remembered by path, size, inode and time of change: seven release models are
    60 GB, which take minutes to read.

    Raises:
        OSError: A file cannot be read.
    """
    parts: list[str] = []
    for path in paths:
        stat = path.stat()
        key = f"{path.resolve()} {stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        known = kept.table.get(key)
        if not isinstance(known, str):
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
            known = digest.hexdigest()
            kept.table[key] = known
        parts.append(known)
    if len(parts) == 1:
        return parts[0]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
