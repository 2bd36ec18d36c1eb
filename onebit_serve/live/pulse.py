"""Signs that a process works: CPU time, memory, bytes read. Unknown is unknown."""

from __future__ import annotations

from contextlib import suppress

import msgspec

__all__ = ["Pulse", "oom_kills", "take"]


class Pulse(msgspec.Struct, frozen=True):
    """What a process and its descendants have used up to a moment.

    Args:
        cpu_s: CPU time in seconds.
        resident_bytes: Resident memory in bytes.
        read_bytes: Bytes read from storage, page faults of mapped files included; 0 where the
            system does not say.
    """

    cpu_s: float
    resident_bytes: int
    read_bytes: int

    def worked_since(self, before: Pulse, elapsed_s: float) -> bool:
        """Tell whether it used at least a fiftieth of a core since then.

        An idle llama-server uses none that can be measured; one that computes uses at least one.
        """
        return self.cpu_s - before.cpu_s > elapsed_s / 50

    def loaded_since(self, before: Pulse) -> bool:
        """Tell whether it read or holds more than then."""
        return self.read_bytes > before.read_bytes or self.resident_bytes > before.resident_bytes


def take(pid: int) -> Pulse | None:
    """Look at a process and its descendants; `None` when it is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
        members = [process, *process.children(recursive=True)]
    except (psutil.Error, OSError):  # gone, or no descriptor is left to look with
        return None
    cpu_s, resident_bytes, read_bytes = 0.0, 0, 0
    for member in members:
        with suppress(psutil.Error, OSError), member.oneshot():
            times = member.cpu_times()
            cpu_s += times.user + times.system
            resident_bytes += member.memory_info().rss
            if hasattr(member, "io_counters"):
                read_bytes += member.io_counters().read_bytes
    return Pulse(cpu_s, resident_bytes, read_bytes)


def oom_kills() -> int | None:
    """Return how many processes the kernel killed for memory, or `None` where it is not told."""
    try:
        with open("/proc/vmstat", encoding="ascii") as lines:  # noqa: PTH123 - read at each exit
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None
