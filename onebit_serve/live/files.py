"""Read files that the user names; whatever is wrong with one is an `OSError` whose text says it.

A reload reads them again, in a thread that nobody can stop: one that waits for the writer of a pipe
would hold up this reload, all others and the stop.
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path

__all__ = ["check_regular", "expanded", "read_regular"]


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
