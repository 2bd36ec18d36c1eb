"""How much memory this process may have: the machine's, or less where a container says so."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

__all__ = ["machine_memory"]

_CGROUPS = Path("/sys/fs/cgroup")


def machine_memory(
    cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")
) -> tuple[int, int]:
    """Return all memory and what of it is available without swapping, in bytes.

    Args:
        cgroups: Where cgroup v2 is mounted.
        own: The file that says which cgroups this process is in.
    """
    import psutil  # slow to import, and not needed before the child is planned

    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    try:
        line = next(line for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return total, free
    inside = PurePosixPath(line[3:])
    for group in (inside, *inside.parents):  # a limit of any group above counts too
        folder = cgroups / str(group).lstrip("/")
        limit = _number(folder / "memory.max")
        if limit is None:
            continue
        used = _number(folder / "memory.current") or 0
        total = min(total, limit)
        free = min(free, max(0, limit - used + _reclaimable(folder / "memory.stat")))
    return total, free


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _reclaimable(file: Path) -> int:
    """Return the file cache that the kernel drops first; a model read before is in it."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(found.get("inactive_file", "0"))
