"""Known answers: compare what a model said, token by token, with what it said before.

Greedy answers differ between builds, batch cuts and kernels wherever the best two tokens are
nearly level: on llama-server (Gemma 270M, CPU) `-fa off` changed 2 of 6 answers, an 8-bit KV cache
1 of 6, four requests at once 2 of 6, and the same flags in a new process none. So a reference keeps
an answer only up to its first token whose lead over the runner-up is small, and what is compared
is decided by the model, not by rounding.
"""

from __future__ import annotations

import msgspec

from onebit_serve.core.gate.verdict import Finding, failed, passed

__all__ = ["Answer", "Step", "Token", "decided", "difference", "judge"]

_BEFORE = 6
_AFTER = 4
_SHOWN = 4


class Token(msgspec.Struct, frozen=True):
    """A token with its text.

    Args:
        id: Its number in the vocabulary.
        text: Its piece.
    """

    id: int
    text: str


class Step(msgspec.Struct, frozen=True):
    """One token of an answer with its lead.

    Args:
        token: What was chosen.
        lead: Log probability of the best token minus that of the second, in nat.
    """

    token: Token
    lead: float


class Answer(msgspec.Struct, frozen=True):
    """A question and what the model answered.

    Args:
        name: The question's name in the configuration.
        prompt: The token ids that were sent, so that a changed template cannot hide in here.
        steps: The answer.
    """

    name: str
    prompt: tuple[int, ...]
    steps: tuple[Step, ...]


def decided(steps: tuple[Step, ...], min_lead: float) -> tuple[Step, ...]:
    """Return the steps before the first one whose lead is under `min_lead` nat."""
    for place, step in enumerate(steps):
        if step.lead < min_lead:
            return steps[:place]
    return steps


def difference(expected: tuple[Token, ...], got: tuple[Token, ...]) -> int | None:
    """Return the place of the first difference, counted from 0, or `None`.

    An answer that is too short differs where it ends; one that goes on is fine, since a reference
    stops at its first undecided token.
    """
    for place, token in enumerate(expected):
        if place >= len(got) or got[place].id != token.id:
            return place
    return None


def _context(expected: tuple[Token, ...], got: tuple[Token, ...], place: int) -> str:
    before = "".join(token.text for token in expected[max(0, place - _BEFORE) : place])

    def rest(tokens: tuple[Token, ...]) -> str:
        if place >= len(tokens):
            return "(the answer ends)"
        this = tokens[place]
        after = "".join(token.text for token in tokens[place + 1 : place + 1 + _AFTER])
        return f"{this.text!r} (id {this.id}) then {after!r}"

    return f"after {before!r}\n  expected {rest(expected)}\n  got      {rest(got)}"


def judge(reference: list[Answer], got: dict[str, tuple[Token, ...] | str]) -> Finding:
    """Compare answers with a reference.

    Args:
        reference: The stored answers, already cut to what is decided.
        got: The answers by name; a string says why there is none (a refused reply is a failure).
    """
    compared = 0
    matched = 0
    problems: list[str] = []
    details: list[str] = []
    for answer in reference:
        expected = tuple(step.token for step in answer.steps)
        compared += len(expected)
        have = got.get(answer.name, "not asked")
        if isinstance(have, str):
            problems.append(f"{answer.name}: {have}")
            continue
        place = difference(expected, have)
        if place is None:
            matched += len(expected)
            continue
        matched += place
        problems.append(f"{answer.name}: first difference at token {place + 1}")
        details.append(f"{answer.name}, token {place + 1}: {_context(expected, have, place)}")
    figure = f"{matched}/{compared} tokens of {len(reference)} answers"
    data: dict[str, object] = {"tokens": compared, "matched": matched, "answers": len(reference)}
    if problems:
        return failed(
            "; ".join(problems[:_SHOWN]),
            figure,
            "every token",
            detail="\n".join(details or problems),
            data=data,
        )
    return passed(figure, "every token", data=data)
