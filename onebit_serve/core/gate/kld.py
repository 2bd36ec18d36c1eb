"""Kullback-Leibler divergence between a stored next-token distribution and a new one.

A stored distribution is the top K tokens; all others are one bucket, `rest`. A stored token that
the new reply does not name is at most as likely as the least likely one it does name, and counts
with that. Both can only lower a divergence, so the figure is a lower bound of the true one and
never an alarm of its own making.

Noise, measured on llama-server b10068 (SmolLM2-135M Q4_1, CPU, 122 positions, K = 64), against
the same flags in another process; mean / p99 / largest:

    same flags, `-t 1`, `-ub 32`     0        0       0
    prefill against decode           0.0003   0.0035  0.0035
    `-fa off`                        0.0031   0.013   0.067
    KV cache q8_0                    0.0029   0.009   0.011
    K cache q4_0                     0.033    0.26    0.34
    normal noise of 0.1 nat          0.0028   0.012   0.012
    normal noise of 0.2 nat          0.011    0.035   0.050
"""

from __future__ import annotations

import math

import msgspec

from onebit_serve.core.gate.verdict import Finding, failed, not_run, passed

__all__ = ["Distribution", "Limits", "Position", "divergence", "judge", "statistics"]

# Float32 log probabilities over a vocabulary of 262,144 summed to 1.00008 (llama-server 86a2835,
# measured), so a rest below this is rounding.
_REST_FLOOR = 1e-4
_P99 = 0.99


class Distribution(msgspec.Struct, frozen=True):
    """The likeliest next tokens and their log probabilities, likeliest first.

    Args:
        ids: Token numbers.
        logprobs: Natural logarithms, over the whole vocabulary.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def lead(self) -> float:
        """Return how far the best token is ahead of the second, in nat."""
        return self.logprobs[0] - self.logprobs[1] if len(self.logprobs) > 1 else math.inf


class Position(msgspec.Struct, frozen=True):
    """Where in which text a distribution was taken, and how it was computed.

    Args:
        text: The text's name in the configuration.
        tokens: How many tokens of the text came before.
        path: `decode` where only what is new was evaluated, `prefill` where all of it was.
        distribution: What came next.
    """

    text: str
    tokens: int
    path: str
    distribution: Distribution


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a release may differ by, in nat.

    Args:
        mean: Of all positions.
        p99: The 99th percentile.
        largest: Any single position.
        top1: Least share of decided positions whose likeliest token is the same, 0 to 1.
    """

    mean: float = 0.01
    p99: float = 0.1
    largest: float = 0.5
    top1: float = 0.98


def divergence(stored: Distribution, new: Distribution) -> float:
    """Return KL(stored || new) in nat, never negative.

    Args:
        stored: The reference.
        new: The new distribution; it should name more tokens than the reference does.
    """
    have = dict(zip(new.ids, new.logprobs, strict=True))
    least = min(new.logprobs)
    total = 0.0
    stored_rest = 1.0
    new_rest = 1.0
    for token, p in zip(stored.ids, stored.logprobs, strict=True):
        mass = math.exp(p)
        q = have.get(token)
        stored_rest -= mass
        new_rest -= 0.0 if q is None else math.exp(q)
        total += mass * (p - (least if q is None else q))
    stored_rest = max(stored_rest, _REST_FLOOR)
    new_rest = max(new_rest, _REST_FLOOR)
    total += stored_rest * math.log(stored_rest / new_rest)
    return max(total, 0.0)


def statistics(values: list[float]) -> tuple[float, float, float]:
    """Return mean, 99th percentile (nearest rank) and largest of at least one value."""
    ordered = sorted(values)
    rank = max(0, math.ceil(_P99 * len(ordered)) - 1)
    return sum(ordered) / len(ordered), ordered[rank], ordered[-1]


def judge(
    stored: tuple[Position, ...],
    new: tuple[Position, ...],
    limits: Limits,
    *,
    min_lead: float,
) -> Finding:
    """Compare new distributions with stored ones.

    Args:
        stored: The reference.
        new: The same positions of this run; one that is missing is a failure.
        limits: What is accepted.
        min_lead: Lead in nat from which the best token counts as decided.
    """
    if not stored:
        return not_run("the reference holds no distributions")
    have = {(p.text, p.tokens, p.path): p.distribution for p in new}
    values: list[float] = []
    decided = agreed = 0
    worst: tuple[float, Position] | None = None
    for position in stored:
        other = have.get((position.text, position.tokens, position.path))
        if other is None or not other.ids:
            return failed(
                f"no distribution came back for {position.text} after {position.tokens} tokens"
            )
        if any(math.isnan(value) for value in other.logprobs):
            return failed(f"NaN in {position.text} after {position.tokens} tokens")
        value = divergence(position.distribution, other)
        values.append(value)
        if worst is None or value > worst[0]:
            worst = (value, position)
        if position.distribution.lead() >= min_lead:
            decided += 1
            agreed += position.distribution.ids[0] == other.ids[0]
    mean, p99, largest = statistics(values)
    top1 = agreed / decided if decided else 1.0
    figure = f"mean {mean:.2g} p99 {p99:.2g} max {largest:.2g} top-1 {top1:.1%}"
    limit = (
        f"mean {limits.mean:g} p99 {limits.p99:g} max {limits.largest:g} top-1 {limits.top1:.1%}"
    )
    data: dict[str, object] = {
        "mean": mean,
        "p99": p99,
        "largest": largest,
        "top1": top1,
        "positions": len(values),
        "decided": decided,
    }
    over = [
        f"{name} {value:.3g} over {bound:g}"
        for name, value, bound in (
            ("mean", mean, limits.mean),
            ("p99", p99, limits.p99),
            ("max", largest, limits.largest),
        )
        if value > bound
    ]
    if top1 < limits.top1:
        over.append(f"top-1 {top1:.1%} under {limits.top1:.1%}")
    if over and worst is not None:
        where = f"{worst[1].text} after {worst[1].tokens} tokens ({worst[1].path})"
        return failed("; ".join(over) + f"; worst at {where}", figure, limit, data=data)
    return passed(figure, limit, data=data)
