"""Request 1 against the best of the requests after it, over several fresh loads.

A cost that is paid once shows in every load; another program that gets in the way shows in some.
So the figure is the median over the loads, and a median over the limit is looked at again with
as many further loads before it counts (`suspicious`).
"""

from __future__ import annotations

import statistics

import msgspec

from onebit_serve.core.gate.verdict import Finding, failed, not_run, passed

__all__ = ["Limits", "Load", "Timing", "judge", "suspicious"]


class Timing(msgspec.Struct, frozen=True):
    """The server's own figures for one request.

    Args:
        prompt_per_s: Prompt tokens a second.
        predicted_per_s: Generated tokens a second.
    """

    prompt_per_s: float
    predicted_per_s: float


class Load(msgspec.Struct, frozen=True):
    """The first requests after one start.

    Args:
        requests: In order; at least two.
    """

    requests: tuple[Timing, ...]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much slower than the best of the next ones the first request may be, as a share.

    Args:
        prefill: Of prompt tokens a second; 0.1 is 10 %.
        decode: Of generated tokens a second.
    """

    prefill: float = 0.1
    decode: float = 0.03


def _lack(first: float, others: list[float]) -> float:
    best = max(others)
    return 1.0 - first / best if best > 0 else 0.0


def _medians(loads: list[Load]) -> tuple[float, float]:
    prefill = [
        _lack(load.requests[0].prompt_per_s, [r.prompt_per_s for r in load.requests[1:]])
        for load in loads
    ]
    decode = [
        _lack(load.requests[0].predicted_per_s, [r.predicted_per_s for r in load.requests[1:]])
        for load in loads
    ]
    return statistics.median(prefill), statistics.median(decode)


def suspicious(loads: list[Load], limits: Limits) -> bool:
    """Return whether the loads so far are over a limit and worth measuring again."""
    prefill, decode = _medians(loads)
    return prefill > limits.prefill or decode > limits.decode


def judge(loads: list[Load], limits: Limits) -> Finding:
    """Judge the loads.

    Args:
        loads: All that were measured.
        limits: What is accepted.
    """
    if not loads or any(len(load.requests) < 2 for load in loads):  # noqa: PLR2004 - one and a next
        return not_run("no load answered the first request and a next one")
    if any(min(r.prompt_per_s, r.predicted_per_s) <= 0 for load in loads for r in load.requests):
        return not_run("the server reports no timings")
    prefill, decode = _medians(loads)
    figure = f"request 1 prefill {-prefill:+.1%} decode {-decode:+.1%} over {len(loads)} loads"
    limit = f"prefill -{limits.prefill:.0%} decode -{limits.decode:.0%}"
    data: dict[str, object] = {
        "prefill_lack": prefill,
        "decode_lack": decode,
        "loads": [msgspec.to_builtins(load) for load in loads],
    }
    slow = [
        f"{name} of request 1 is {lack:.1%} slower than the best of the next"
        for name, lack, bound in (
            ("prefill", prefill, limits.prefill),
            ("decode", decode, limits.decode),
        )
        if lack > bound
    ]
    if slow:
        return failed("; ".join(slow), figure, limit, data=data)
    return passed(figure, limit, data=data)
