"""Write references: everything is measured in two loads, and what they differ in is the noise."""

from __future__ import annotations

from pathlib import Path

import msgspec
import trio

from onebit_serve.core.gate import tokens
from onebit_serve.core.gate.config import Kat
from onebit_serve.core.gate.kld import Position
from onebit_serve.core.gate.reference import SCHEMA, Origin, Reference, decode, encode, refusal
from onebit_serve.core.gate.tokens import Answer
from onebit_serve.core.gate.verdict import Finding, failed, not_run, passed
from onebit_serve.gate import requests
from onebit_serve.gate.evidence import write_whole
from onebit_serve.gate.serving import ServerError, Subject, serving

__all__ = ["RECORDED", "kept_answers", "record"]

# The checks that compare with a reference.
RECORDED = ("kat", "kld")


# A floor this near to the limit would make alarms out of noise.
_ROOM = 2.0


def kept_answers(
    first: tuple[Answer, ...], second: tuple[Answer, ...], kat: Kat
) -> tuple[tuple[Answer, ...], list[str]]:
    """Cut answers to what both loads said and the model decided.

    Returns:
        The answers, and a sentence for each that is not worth keeping.
    """
    kept: list[Answer] = []
    problems: list[str] = []
    for one, other in zip(first, second, strict=True):
        steps = tokens.decided(one.steps, kat.min_lead)
        place = tokens.difference(
            tuple(step.token for step in steps), tuple(step.token for step in other.steps)
        )
        steps = steps[:place]
        whole = len(steps) == len(one.steps) < kat.tokens
        if len(steps) < kat.min_tokens and not (whole and steps):
            problems.append(
                f"the answer to {one.name} is decided for {len(steps)} tokens only; ask another"
            )
        kept.append(msgspec.structs.replace(one, steps=steps))
    return tuple(kept), problems


async def record(
    nursery: trio.Nursery,
    subject: Subject,
    checks: tuple[str, ...],
    origin: Origin,
    *,
    place: Path,
    log: Path,
) -> dict[str, Finding]:
    """Record what `kat` and `kld` of one model compare with.

    Args:
        nursery: Watches the servers.
        subject: What is served.
        checks: What was asked for; others than these two have no reference.
        origin: What is recorded.
        place: The reference's file; what it holds of the other check is kept where it is of the
            same model and flags.
        log: Takes what the servers print.

    Returns:
        A finding for each check asked for.
    """
    findings = {c: not_run("it has no reference to record") for c in checks}
    wanted = [c for c in checks if c in RECORDED]
    if not wanted:
        return findings
    stored = _stored(place, origin)
    answers: list[tuple[Answer, ...]] = []
    positions: list[tuple[Position, ...]] = []
    texts: dict[str, tuple[int, ...]] = {}
    model = subject.model
    try:
        for _ in range(2):
            async with serving(
                nursery, subject.command(), subject.environment(), log, model.limits
            ) as client:
                if "kat" in wanted:
                    answers.append(await requests.record_answers(client, model))
                if "kld" in wanted:
                    texts, taken = await requests.record_positions(client, model)
                    positions.append(taken)
    except ServerError as error:
        return {**findings, **dict.fromkeys(wanted, failed(error.reason))}
    if "kat" in wanted:
        kept, problems = kept_answers(answers[0], answers[1], model.kat)
        count = sum(len(answer.steps) for answer in kept)
        figure = f"recorded {count} tokens of {len(kept)} answers"
        if problems or not kept:
            findings["kat"] = failed("; ".join(problems) or "there are no questions", figure)
        else:
            findings["kat"] = passed(figure)
            stored = msgspec.structs.replace(stored, answers=kept)
    if "kld" in wanted:
        floor = requests.noise_floor(positions[0], positions[1])
        figure = (
            f"recorded {len(positions[0])} positions, noise between loads {floor.loads:.2g}, "
            f"between prefill and decode mean {floor.mean:.2g} max {floor.paths:.2g}"
        )
        limits = model.kld.limits
        limit = f"mean {limits.mean:g} max {limits.largest:g}"
        noisy = max(floor.loads, floor.paths) * _ROOM > limits.largest
        if noisy or floor.mean * _ROOM > limits.mean:
            reason = "the noise is too near to the limits, which would give false alarms"
            findings["kld"] = failed(reason, figure, limit)
        else:
            findings["kld"] = passed(figure, limit)
            stored = msgspec.structs.replace(
                stored, texts=texts, positions=positions[0], floor=floor
            )
    if any(findings[check].status == "PASS" for check in wanted):
        write_whole(place, encode(stored))
    return findings


def _stored(place: Path, origin: Origin) -> Reference:
    try:
        stored = decode(place.read_bytes())
    except OSError:
        stored = ""
    if isinstance(stored, str) or refusal(stored.origin, origin):
        return Reference(SCHEMA, origin)
    return msgspec.structs.replace(stored, origin=origin)
