r"""Read the output of llama.cpp's `test-backend-ops test -b DEVICE`.

The console format is that of llama.cpp's `tests/test-backend-ops.cpp` (`console_printer`), as
published; colours are escape sequences around OK and FAIL:

    Testing 2 devices

    Backend 1/2: Vulkan0
      Device description: ...
      ABS(type=f16,ne_a=[128,2,2,2],v=0): not supported [Vulkan0]
      ADD(type=f32,ne=[16,5,4,3],nr=[1,1,1,1],nf=1): OK
      MUL_MAT(...): [MUL_MAT] NMSE = 0.0123 > 0.0005 FAIL
      6250/6251 tests passed

    Failing tests:
      MUL_MAT(...)
      Backend Vulkan0: FAIL
    Backend 2/2: CPU
      Skipping
    1/2 backends passed
    FAIL

Published outputs have reported "0/0 tests passed" and OK where every case was skipped, so the
verdict here rests on the counts, never on the word OK.
"""

from __future__ import annotations

import re

import msgspec

from onebit_serve.core.gate.verdict import Finding, failed, not_run, passed

__all__ = ["DeviceOps", "judge", "parse"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_BACKEND = re.compile(r"^Backend \d+/\d+: (.+?)\s*$")
_CASE = re.compile(r"^\s{2}([A-Z][A-Z0-9_]*)\((.*)\): ?(.*)$")
_PASSED = re.compile(r"^\s+(\d+)/(\d+) tests passed")
_STATUS = re.compile(r"^\s+Backend (.+?): (OK|FAIL)\s*$")
_OVERALL = re.compile(r"^(\d+)/(\d+) backends passed")
_SHOWN = 8


class DeviceOps(msgspec.Struct, frozen=True):
    """What the output says of one device.

    Args:
        device: Its name.
        ok: Cases that passed.
        unsupported: Cases that the device does not implement; llama.cpp runs those on the CPU.
        failing: Cases that failed, as printed.
        unfinished: A case that was begun and has no verdict: where the program died.
        passed: The numerator of the summary line, where there is one.
        total: Its denominator; unsupported cases are not in it.
        verdict: `OK` or `FAIL` as printed for the device, where it is.
        finished: The output goes on to its end ("N/M backends passed").
        skipped: The device was skipped (another one was asked for).
    """

    device: str
    ok: int = 0
    unsupported: int = 0
    failing: tuple[str, ...] = ()
    unfinished: str = ""
    passed: int | None = None
    total: int | None = None
    verdict: str | None = None
    finished: bool = False
    skipped: bool = False


class _Counts:
    def __init__(self, device: str) -> None:
        self.device = device
        self.ok = 0
        self.unsupported = 0
        self.failing: list[str] = []
        self.open_case = ""
        self.passed: int | None = None
        self.total: int | None = None
        self.verdict: str | None = None
        self.skipped = False

    def case(self, name: str, outcome: str) -> None:
        self.open_case = ""
        if "not supported" in outcome:
            self.unsupported += 1
        elif outcome.endswith("FAIL"):
            self.failing.append(name)
        elif outcome.endswith("OK"):
            self.ok += 1
        elif not outcome.startswith("skipping"):
            self.open_case = name

    def done(self, *, finished: bool) -> DeviceOps:
        return DeviceOps(
            self.device,
            self.ok,
            self.unsupported,
            tuple(self.failing),
            self.open_case,
            self.passed,
            self.total,
            self.verdict,
            finished,
            self.skipped,
        )


def parse(text: str) -> dict[str, DeviceOps]:
    """Read the output, whole or cut off.

    Args:
        text: Standard output, with or without colours. Lines of standard error between may part
            a case from its verdict; a verdict that comes on a line of its own is its case's.

    Returns:
        What it says of every device it names.
    """
    devices: list[_Counts] = []
    finished = False
    for raw in _COLOUR.sub("", text).splitlines():
        line = raw.rstrip()
        if backend := _BACKEND.match(line):
            devices.append(_Counts(backend[1]))
            continue
        if _OVERALL.match(line):
            finished = True
            continue
        if not devices:
            continue
        now = devices[-1]
        if summary := _PASSED.match(line):
            now.passed, now.total = int(summary[1]), int(summary[2])
        elif status := _STATUS.match(line):
            now.verdict = status[2]
        elif case := _CASE.match(line):
            now.case(f"{case[1]}({case[2]})", case[3].strip())
        elif now.open_case and line.endswith(("OK", "FAIL")):
            now.case(now.open_case, line)
        elif line.strip().startswith("Skipping"):
            now.skipped = True
    return {counts.device: counts.done(finished=finished) for counts in devices}


def judge(text: str, device: str, exit_status: int | None, *, max_failed: int = 0) -> Finding:
    """Judge one run of the operator tests.

    Args:
        text: What the program printed.
        device: The device that was asked for.
        exit_status: How the program ended, negative for a signal; `None` where it was stopped.
        max_failed: How many failing cases are accepted (0 for a release).

    Returns:
        FAIL on failing cases or an output without an end, NOT RUN where nothing was tested.
    """
    devices = parse(text)
    found = devices.get(device)
    if found is None or found.skipped:
        named = ", ".join(devices) or "none"
        return not_run(f"test-backend-ops did not test {device} (devices it named: {named})")
    data: dict[str, object] = {
        "passed": found.passed,
        "total": found.total,
        "unsupported": found.unsupported,
        "failed": len(found.failing),
        "exit_status": exit_status,
    }
    limit = f"{max_failed} failed"
    if found.total is None or found.passed is None or not found.finished:
        seen = found.ok + len(found.failing)
        at = f" in {found.unfinished}" if found.unfinished else ""
        return failed(
            f"the output ends after {seen} cases{at} without a summary"
            + (f" (exit {exit_status})" if exit_status else ""),
            f"{found.ok}/? passed, {found.unsupported} unsupported",
            limit,
            data=data,
        )
    figure = f"{found.passed}/{found.total} passed, {found.unsupported} unsupported"
    if found.total == 0:
        return not_run(
            f"no operator was tested on {device}: all {found.unsupported} cases unsupported",
            data=data,
        )
    wrong = found.total - found.passed
    if wrong > max_failed or len(found.failing) > max_failed:
        names = found.failing[:_SHOWN]
        return failed(
            f"{max(wrong, len(found.failing))} operator cases failed"
            + (f", first: {names[0]}" if names else ""),
            figure,
            limit,
            detail="\n".join(names),
            data=data,
        )
    if exit_status is None or exit_status < 0:
        return failed(f"test-backend-ops ended badly ({exit_status})", figure, limit, data=data)
    if exit_status and not wrong:
        return failed(
            f"test-backend-ops exited with {exit_status} though its summary is clean",
            figure,
            limit,
            data=data,
        )
    return passed(figure, limit, data=data)
