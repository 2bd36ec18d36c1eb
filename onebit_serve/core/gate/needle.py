"""A fact at a known depth of a long text, and whether the model can tell it."""

from __future__ import annotations

import msgspec

from onebit_serve.core.gate.verdict import Finding, failed, passed

__all__ = ["Fact", "Reply", "found", "judge", "user_text"]

# Plain sentences without numbers, names or colours that could be taken for the fact.
_FILLER: tuple[str, ...] = (
    "The baker opened the shop early and put the bread on the shelf.",
    "A train passed the old bridge and went on to the coast.",
    "Rain fell on the fields all afternoon and the river rose a little.",
    "The children played in the garden until it was dark.",
    "An old map hung on the wall of the small library.",
    "The farmer counted his sheep and closed the gate.",
    "Somebody had left a lamp burning in the window of the mill.",
    "The ferry was late because of the wind from the west.",
)
_SHOWN = 120


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is hidden and asked for.

    Args:
        text: The sentence that is put into the text.
        question: What is asked after it.
        answer: What a right reply contains, compared without regard to case.
    """

    text: str
    question: str
    answer: str


class Reply(msgspec.Struct, frozen=True):
    """What came back for one fact at one depth.

    Args:
        depth: Where the fact stood, 0 to 1.
        fact: Which.
        tokens: The length of the prompt as the server counted it, in tokens.
        text: The reply's text.
        problem: Why there is no text: the server refused the reply, say. Counts as wrong.
    """

    depth: float
    fact: Fact
    tokens: int
    text: str
    problem: str = ""


def user_text(fact: Fact, sentences: int, depth: float) -> str:
    """Return a user message of `sentences` sentences and a fact at `depth`.

    Args:
        fact: What is hidden.
        sentences: How many filler sentences there are.
        depth: 0 puts the fact first, 1 last.
    """
    lines = [_FILLER[place % len(_FILLER)] for place in range(sentences)]
    lines.insert(round(len(lines) * depth), fact.text)
    return "Read this text.\n\n" + " ".join(lines) + "\n\n" + fact.question


def found(reply: Reply) -> bool:
    """Return whether the reply tells the fact."""
    return not reply.problem and reply.fact.answer.casefold() in reply.text.casefold()


def judge(replies: list[Reply], *, want_tokens: int, max_missed: int = 0) -> Finding:
    """Judge the replies.

    Args:
        replies: One for every fact and depth.
        want_tokens: How long the prompts were to be, in tokens; one that is more than a tenth
            shorter would make the check easier than it says, and fails it.
        max_missed: How many may be missed.
    """
    missed = [reply for reply in replies if not found(reply)]
    least = min((reply.tokens for reply in replies if not reply.problem), default=want_tokens)
    figure = f"{len(replies) - len(missed)}/{len(replies)} facts found in {least} tokens"
    limit = f"{max_missed} missed"
    data: dict[str, object] = {
        "asked": len(replies),
        "missed": len(missed),
        "refused": sum(bool(reply.problem) for reply in replies),
        "tokens": [reply.tokens for reply in replies],
    }
    if least < want_tokens * 0.9:
        return failed(
            f"a prompt was only {least} of {want_tokens} tokens long", figure, limit, data=data
        )
    if len(missed) > max_missed:
        first = missed[0]
        got = first.problem or repr(first.text[:_SHOWN])
        return failed(
            f"{first.fact.answer!r} was not found at depth {first.depth:g}: {got}",
            figure,
            limit,
            detail="\n".join(
                f"depth {r.depth:g}, {r.fact.answer!r}: {r.problem or repr(r.text[:_SHOWN])}"
                for r in missed
            ),
            data=data,
        )
    return passed(figure, limit, data=data)
