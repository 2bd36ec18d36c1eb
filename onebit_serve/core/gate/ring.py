"""Count amdgpu ring timeouts and GPU resets in a kernel log.

Line formats as published in bug reports of ROCm, Mesa and SteamOS (kernels 6.1 to 7.0), not
captured here:

    amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=2662395, emitted seq=2662397
    [drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx timeout, signaled seq=224260, ...
    amdgpu 0000:c5:00.0: amdgpu: Starting gfx_0.0.0 ring reset
    amdgpu 0000:c5:00.0: amdgpu: Ring gfx_0.0.0 reset failed
    amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!. Source:  3
    amdgpu 0000:c5:00.0: amdgpu: MES failed to respond to msg=REMOVE_QUEUE
    amdgpu 0000:c5:00.0: [drm] device wedged, but recovered through reset

Lines such as `ring gfx_0.0.0 uses VM inv eng 0 on hub 0` are ordinary.
"""

from __future__ import annotations

import re

import msgspec

from onebit_serve.core.gate.verdict import Finding, failed, not_run, passed

__all__ = ["KernelLog", "RingEvent", "judge", "new_lines", "parse"]

_AMDGPU = re.compile(r"\bamdgpu\b|\[drm:amdgpu_|\[drm\].*\bring\b")
_EVENTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("timeout", re.compile(r"\bring (?P<ring>\S+) timeout\b")),
    (
        "ring reset",
        re.compile(r"\bStarting (?P<ring>\S+) ring reset\b|\bRing (?P<ring2>\S+) reset "),
    ),
    ("gpu reset", re.compile(r"\bGPU reset begin\b|\bMODE[12] reset\b|\bBACO reset\b")),
    ("wedged", re.compile(r"\bdevice wedged\b")),
    ("mes hang", re.compile(r"\bMES (?:failed to respond|might be in unrecoverable state)")),
)
_SHOWN = 8


class RingEvent(msgspec.Struct, frozen=True):
    """One line that tells of a hang or a reset.

    Args:
        kind: `timeout`, `ring reset`, `gpu reset`, `wedged` or `mes hang`.
        ring: The ring's name where the line has it.
        line: The line.
    """

    kind: str
    ring: str
    line: str


class KernelLog(msgspec.Struct, frozen=True):
    """A reading of the kernel log.

    Args:
        source: What was read (`/dev/kmsg`, `dmesg`, `journalctl`).
        lines: The lines, each with the kernel's own sequence number or time stamp as it grows;
            a mark equal to or below an earlier reading's last is a line already seen.
        problem: Why it could not be read; then there are no lines.
    """

    source: str = ""
    lines: tuple[tuple[float, str], ...] = ()
    problem: str = ""


def parse(lines: list[str]) -> list[RingEvent]:
    """Return the lines that tell of a hang or a reset, in order."""
    events: list[RingEvent] = []
    for line in lines:
        if not _AMDGPU.search(line):
            continue
        for kind, pattern in _EVENTS:
            if match := pattern.search(line):
                groups = match.groupdict()
                ring = groups.get("ring") or groups.get("ring2") or ""
                events.append(RingEvent(kind, ring, line))
                break
    return events


def new_lines(start: KernelLog, end: KernelLog) -> tuple[list[str], str]:
    """Return the lines that came between two readings, and why they cannot be told, if so.

    Args:
        start: The reading before.
        end: The reading after.
    """
    for reading in (start, end):
        if reading.problem:
            return [], reading.problem
    if start.source != end.source:
        return [], f"the log was read from {start.source} and then from {end.source}"
    last = start.lines[-1][0] if start.lines else float("-inf")
    if start.lines and (not end.lines or end.lines[0][0] > last):
        return [], "the kernel log has wrapped since the start, lines are lost"
    return [line for mark, line in end.lines if mark > last], ""


def judge(start: KernelLog, end: KernelLog) -> Finding:
    """Judge the lines between two readings: any ring timeout or reset is a failure."""
    lines, problem = new_lines(start, end)
    if problem:
        return not_run(problem)
    events = parse(lines)
    timeouts = sum(event.kind == "timeout" for event in events)
    resets = sum(event.kind in {"ring reset", "gpu reset", "wedged"} for event in events)
    figure = f"{timeouts} timeouts, {resets} resets in {len(lines)} new lines"
    data: dict[str, object] = {"source": end.source, "lines": len(lines)}
    if events:
        first = events[0]
        return failed(
            f"amdgpu reported a {first.kind}" + (f" on ring {first.ring}" if first.ring else ""),
            figure,
            "none",
            detail="\n".join(event.line for event in events[:_SHOWN]),
            data=data,
        )
    return passed(figure, "none", data=data)
