"""What one check found, and what a whole run of checks amounts to.

`NOT RUN` is a result of its own: it never counts as a pass, and it says why.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "CHECKS",
    "Finding",
    "Result",
    "Status",
    "exit_code",
    "failed",
    "first_look",
    "not_run",
    "passed",
    "result_line",
]

Status = Literal["PASS", "FAIL", "NOT RUN"]

# In the order in which they run, which is also the order in which a reader should look at
# failures: a layer on the wrong device or a reset of the GPU explains wrong tokens, wrong tokens
# explain a lost needle.
CHECKS: tuple[str, ...] = (
    "load",
    "ring",
    "ops",
    "placement",
    "kat",
    "kld",
    "needle",
    "reuse",
    "warm",
)


class Finding(msgspec.Struct, frozen=True):
    """What one check says of itself, before it is known whose it is.

    Args:
        status: The verdict.
        figure: What was measured, short enough for one line.
        limit: What it was held against.
        reason: Why it failed or did not run, in one sentence; empty for a pass.
        detail: The evidence in words, several lines at most (a difference in its context, say).
        data: Figures for the JSON report.
    """

    status: Status
    figure: str = ""
    limit: str = ""
    reason: str = ""
    detail: str = ""
    data: dict[str, object] = {}


class Result(msgspec.Struct, frozen=True):
    """A finding with its model, its check and the time it took.

    Args:
        model: The model's name in the configuration.
        check: One of `CHECKS`.
        finding: What was found.
        seconds: How long the check took, in seconds.
    """

    model: str
    check: str
    finding: Finding
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """Return the verdict."""
        return self.finding.status


def passed(
    figure: str, limit: str = "", *, detail: str = "", data: dict[str, object] | None = None
) -> Finding:
    """Make a finding that passed."""
    return Finding("PASS", figure, limit, detail=detail, data=data or {})


def failed(
    reason: str,
    figure: str = "",
    limit: str = "",
    *,
    detail: str = "",
    data: dict[str, object] | None = None,
) -> Finding:
    """Make a finding that failed, and say why."""
    return Finding("FAIL", figure, limit, reason, detail, data or {})


def not_run(reason: str, *, detail: str = "", data: dict[str, object] | None = None) -> Finding:
    """Make a finding of a check that could not be done, and say why."""
    return Finding("NOT RUN", reason=reason, detail=detail, data=data or {})


def result_line(result: Result) -> str:
    """Return the one line of a check: verdict, model, check, figure, limit."""
    finding = result.finding
    parts = [f"{finding.status:<7} {result.model} {result.check}"]
    if finding.figure:
        parts.append(finding.figure)
    if finding.limit:
        parts.append(f"(limit {finding.limit})")
    if finding.reason:
        parts.append(f"- {finding.reason}")
    return " ".join(parts)


def exit_code(results: list[Result]) -> int:
    """Return the exit code of a run: 1 on any FAIL, 4 on any NOT RUN or on nothing at all, else 0.

    Args:
        results: One for every check that was asked for.
    """
    statuses = {result.status for result in results}
    if "FAIL" in statuses:
        return 1
    # A gate that ran nothing has shown nothing.
    return 0 if statuses == {"PASS"} else 4


def first_look(results: list[Result]) -> str:
    """Return what a reader should look at first, in one sentence.

    A failure that several models share points at the build or the driver, not at a model; among
    one model's failures the earliest in `CHECKS` is the likely cause of the others.
    """
    order = {name: place for place, name in enumerate(CHECKS)}
    failures = sorted(
        (r for r in results if r.status == "FAIL"), key=lambda r: order.get(r.check, len(order))
    )
    if failures:
        first = failures[0]
        models = [r.model for r in failures if r.check == first.check]
        where = (
            f"{first.check} of {first.model}"
            if len(models) == 1
            else f"{first.check}, which failed for {len(models)} models"
        )
        rest = len(failures) - len(models)
        more = f" ({rest} more may follow from it)" if rest else ""
        return f"look first at {where}: {first.finding.reason}{more}"
    missing = [r for r in results if r.status == "NOT RUN"]
    if missing:
        first = missing[0]
        count = len(missing)
        return (
            f"{count} of {len(results)} checks did not run; first: {first.model} {first.check}: "
            f"{first.finding.reason}"
        )
    if not results:
        return "nothing was asked for, so nothing was shown"
    return f"all {len(results)} checks passed"
