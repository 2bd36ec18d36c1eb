"""A warmed prefix must be used, and using it must not change what the model says."""

from __future__ import annotations

import msgspec

from onebit_serve.core.gate import kld
from onebit_serve.core.gate.tokens import Step, difference
from onebit_serve.core.gate.verdict import Finding, failed, not_run, passed

__all__ = ["Limits", "Said", "judge"]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far the reused state may be from the evaluated one, in nat.

    Another batch cut alone moved the distributions of a 430-token prompt by 0.0003 to 0.0011 at
    the mean and 0.0032 at most (llama-server b10068, SmolLM2-135M, measured).

    Args:
        mean: Of all compared positions.
        largest: Any single position.
    """

    mean: float = 0.02
    largest: float = 0.5


class Said(msgspec.Struct, frozen=True):
    """One answer to the same prompt.

    Args:
        text: The answer.
        steps: Its tokens with their leads.
        distributions: The likeliest tokens at each step.
        cached: Prompt tokens that were reused.
    """

    text: str
    steps: tuple[Step, ...]
    distributions: tuple[kld.Distribution, ...]
    cached: int


def judge(
    reused: Said, anew: Said, *, shared: int, slack: int, limits: Limits, min_lead: float
) -> Finding:
    """Compare an answer over a warmed prefix with the same answer evaluated anew.

    Args:
        reused: With the warmed prefix.
        anew: Without.
        shared: Tokens that the warming prompt and this one have in common.
        slack: How many of them may have been evaluated again.
        limits: What is accepted.
        min_lead: Lead in nat from which a token counts as decided; another token at a decided
            place is a failure whatever its distribution.
    """
    least = shared - slack
    figure = f"{reused.cached} of {shared} tokens reused"
    limit = f"at least {least}"
    if reused.cached < least:
        return failed("the warmed prefix was evaluated again", figure, limit)
    if not anew.distributions or not reused.distributions:
        return not_run("the server reports no token probabilities (n_probs)")
    place = difference(
        tuple(step.token for step in anew.steps), tuple(step.token for step in reused.steps)
    )
    # From the first different token on the two are about different texts.
    end = len(anew.distributions) if place is None else place + 1
    pairs = zip(anew.distributions[:end], reused.distributions[:end], strict=False)
    mean, _, largest = kld.statistics([kld.divergence(a, b) for a, b in pairs])
    figure += f", divergence mean {mean:.2g} max {largest:.2g}"
    limit += f", mean {limits.mean:g} max {limits.largest:g}"
    data: dict[str, object] = {"cached": reused.cached, "mean": mean, "largest": largest}
    decided = place is not None and (place >= len(anew.steps) or anew.steps[place].lead >= min_lead)
    if decided or mean > limits.mean or largest > limits.largest:
        detail = f"{reused.text!r} with the warmed prefix, {anew.text!r} without"
        return failed(
            "the warmed prefix changes the answer", figure, limit, detail=detail, data=data
        )
    return passed(figure, limit, data=data)
