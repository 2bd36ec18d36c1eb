"""Read and write whole files; whatever is wrong with one is an `OSError` whose text says it.

A reload reads those that the user names again, in a thread that nobody can stop: one that waits for
the writer of a pipe would hold up this reload, all others and the stop.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["check_regular", "expanded", "read_regular", "write_whole"]


def expanded(name: str) -> Path:
    """Return the path that a name stands for, with `~` replaced.

    Raises:
        OSError: There is no such user, or no path can be called so.
    """
    if "\0" in name:
        raise OSError(errno.EINVAL, "its name has a zero byte")
    try:
        return Path(name).expanduser()
    except RuntimeError:  # pathlib's word for it
        user = name.partition("/")[0]
        raise OSError(errno.ENOENT, f"{user} is nobody's home here") from None


def check_regular(path: Path) -> None:
    """Raise where reading might never end; a directory is told by the reading itself.

    Raises:
        OSError: It is a pipe, a socket or a device, or there is nothing.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a regular file")


def read_regular(name: str) -> bytes:
    """Return what is in a regular file.

    Raises:
        OSError: It is none, or cannot be read.
    """
    path = expanded(name)
    check_regular(path)
    return path.read_bytes()


def write_whole(path: Path, data: bytes) -> None:
    """Write a whole file or none: what was there stays until the new one is complete.

    A link is followed, and what is no regular file (a device, a pipe) is written into.

    Raises:
        OSError: It cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = path.resolve()
    half = target.with_name(f".1bit-{os.urandom(6).hex()}")
    try:
        with half.open("xb") as file:  # its mode is the umask's
            file.write(data)
        if target.exists():
            half.chmod(stat.S_IMODE(target.stat().st_mode))
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)
