"""Render a run as JSON, Markdown and JUnit, and say how far it is."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import msgspec

from onebit_serve.core.gate.reference import Origin
from onebit_serve.core.gate.verdict import Result, exit_code, first_look

__all__ = ["Run", "as_json", "as_junit", "as_markdown", "clock", "time_left_s"]


class Run(msgspec.Struct, frozen=True):
    """A whole run.

    Args:
        level: `quick` or `full`.
        started: When, as an ISO date and time.
        results: One for every check that was asked for.
        origins: What was tested, by model name.
        command: The command line.
        seconds: How long it took, in seconds.
        interrupted: It was stopped before its end.
    """

    level: str
    started: str
    results: list[Result]
    origins: dict[str, Origin] = {}
    command: str = ""
    seconds: float = 0.0
    interrupted: bool = False


def _counts(run: Run) -> dict[str, int]:
    return {
        status: sum(result.status == status for result in run.results)
        for status in ("PASS", "FAIL", "NOT RUN")
    }


def as_json(run: Run) -> bytes:
    """Return the run with every figure."""
    whole = {
        "schema": 1,
        "exit": exit_code(run.results),
        "counts": _counts(run),
        "first_look": first_look(run.results),
        **msgspec.to_builtins(run),
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def as_markdown(run: Run) -> str:
    """Return the run for a person."""
    counts = _counts(run)
    lines = [
        f"# Release gate, {run.level}, {run.started}",
        "",
        f"Exit {exit_code(run.results)}: {counts['PASS']} passed, {counts['FAIL']} failed, "
        f"{counts['NOT RUN']} not run, in {clock(run.seconds)}."
        + (" **Interrupted before its end.**" if run.interrupted else ""),
        "",
        f"{first_look(run.results)[:1].upper()}{first_look(run.results)[1:]}.",
        "",
        "| verdict | model | check | figure | limit | reason | s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in run.results:
        found = result.finding
        cells = (
            found.status,
            result.model,
            result.check,
            found.figure,
            found.limit,
            found.reason,
            f"{result.seconds:.1f}",
        )
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    for result in run.results:
        if result.finding.detail:
            lines += [
                "",
                f"## {result.model} {result.check}: {result.status}",
                "",
                "```",
                result.finding.detail,
                "```",
            ]
    if run.origins:
        lines += ["", "## What was tested", ""]
        for name, origin in run.origins.items():
            lines.append(
                f"- {name}: `{origin.model_file}` (sha256 `{origin.model_sha256[:16]}`, file type "
                f"{origin.file_type}) on {origin.device} ({origin.device_name or 'unnamed'}, "
                f"{origin.driver}) by `{origin.binary}` (sha256 `{origin.binary_sha256[:16]}`, "
                f"{origin.version or 'no version'}), flags `{' '.join(origin.flags) or 'none'}`"
            )
    if run.command:
        lines += ["", f"Command: `{run.command}`"]
    return "\n".join(lines) + "\n"


def as_junit(run: Run) -> bytes:
    """Return the run as JUnit XML: a suite a model; NOT RUN is an error, never a skip.

    Most readers of JUnit take a skipped case for harmless.
    """
    counts = _counts(run)
    root = ET.Element(
        "testsuites",
        name=f"release gate {run.level}",
        tests=str(len(run.results)),
        failures=str(counts["FAIL"]),
        errors=str(counts["NOT RUN"]),
        time=f"{run.seconds:.3f}",
    )
    for model in dict.fromkeys(result.model for result in run.results):
        mine = [result for result in run.results if result.model == model]
        suite = ET.SubElement(
            root,
            "testsuite",
            name=model,
            timestamp=run.started,
            tests=str(len(mine)),
            failures=str(sum(r.status == "FAIL" for r in mine)),
            errors=str(sum(r.status == "NOT RUN" for r in mine)),
            time=f"{sum(r.seconds for r in mine):.3f}",
        )
        for result in mine:
            case = ET.SubElement(
                suite,
                "testcase",
                classname=model,
                name=result.check,
                time=f"{result.seconds:.3f}",
            )
            found = result.finding
            if found.status != "PASS":
                kind = "failure" if found.status == "FAIL" else "error"
                told = ET.SubElement(case, kind, type=found.status, message=found.reason)
                told.text = _printable(found.detail or found.reason)
            out = ET.SubElement(case, "system-out")
            out.text = _printable(f"{found.figure} (limit {found.limit or 'none'})")
    data: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _printable(text: str) -> str:
    """Drop what XML 1.0 cannot carry: a garbled answer must not garble the report."""
    return "".join(c for c in text if c in "\t\n\r" or " " <= c < "\ud800" or c > "\udfff")


def clock(seconds: float) -> str:
    """Return a duration as `m:ss`, with hours where there are any."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    tail = f"{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{tail}" if hours else tail


def time_left_s(
    todo: list[tuple[str, str]], known_s: dict[str, float], done_s: dict[str, float]
) -> float | None:
    """Guess how many seconds are left, or `None` where nothing is known.

    Args:
        todo: Models and checks still to run.
        known_s: Seconds that "MODEL CHECK" took in an earlier run.
        done_s: Seconds that they took in this one.

    The earlier durations are scaled by how this run compares so far; a check without one counts
    as the same check of another model, else as the mean of what is done.
    """
    both = [key for key in done_s if known_s.get(key, 0) > 0]
    total_before = sum(known_s[key] for key in both)
    pace = sum(done_s[key] for key in both) / total_before if total_before > 0 else 1.0
    left = 0.0
    for model, check in todo:
        key = f"{model} {check}"
        if key in known_s:
            left += known_s[key] * pace
            continue
        alike = [s for name, s in done_s.items() if name.endswith(f" {check}")]
        sample = alike or list(done_s.values())
        if not sample:
            return None
        left += sum(sample) / len(sample)
    return left
