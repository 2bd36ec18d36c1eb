"""One measurement at a time: a lock that gates and benchmarks take before they use a device.

The lock is advisory and machine-wide: an open file in /tmp with `flock`, which the kernel lets go
when its holder dies, however it dies. All accelerators share one lock, since `HRX0`, `Vulkan0` and
`ROCm0` are names of the same chip on the machines this is for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onebit_serve.core.errors import NotRunError

__all__ = ["device_lock", "lock_name"]

_FOLDER = "/tmp"  # noqa: S108 - shared by all users of the machine, which is the point
_SAID_LIMIT_BYTES = 300


def lock_name(device: str) -> str:
    """Return which lock a device word belongs to: `cpu` or `accelerator`."""
    return "cpu" if device == "cpu" else "accelerator"


@contextmanager
def device_lock(device: str, purpose: str, folder: str = "") -> Iterator[None]:
    """Hold a device for a measurement.

    Args:
        device: The device word (`hrx`, `cpu`, `Vulkan0`, ...).
        purpose: What for, told to whoever finds it taken, for example `1bit gate full`.
        folder: Where the lock files are; empty takes $ONEBIT_LOCK_DIR, else /tmp.

    Raises:
        NotRunError: Another measurement holds it, or the file cannot be opened.
    """
    name = lock_name(device)
    path = Path(folder or os.environ.get("ONEBIT_LOCK_DIR") or _FOLDER) / f"onebit-{name}.lock"
    try:
        fd = _open(path)
    except OSError as error:
        raise NotRunError(
            f"the lock {path} cannot be opened: {error.strerror}", hint="remove the file"
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(fd, _SAID_LIMIT_BYTES, 0).decode(errors="replace").strip()
            raise NotRunError(
                f"the {name} is in use by {said or 'another measurement'}",
                hint="wait for it to end, or stop it",
            ) from None
        with contextlib.suppress(OSError):  # another user's file may be read-only for us
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()} ({purpose})\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o666)
    except FileExistsError:
        # Without O_CREAT: /tmp may forbid opening another user's file for creation.
        try:
            fd = os.open(path, os.O_RDWR | flags)
        except PermissionError:
            fd = os.open(path, os.O_RDONLY | flags)
    return fd
