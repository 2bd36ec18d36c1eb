"""The synthetic request between load and ready: how long it is, what it says, how it is judged.

Its prompt is given as token ids, so that its length is exact. The ids come from the backend's own
tokenizer, so they exist in its vocabulary. The grammar keeps builds that check the text they made
from refusing meaningless output with a 500 (20 of 30 random prompts on llama-server b10068,
measured); `ignore_eos` keeps the number of decode steps.
"""

from __future__ import annotations

from typing import Any

import msgspec

from onebit_serve.core.plan import BackendPlan
from onebit_serve.core.shapes import shows_checkpoints

__all__ = [
    "SEED_TEXT",
    "WarmUpResult",
    "chat_request",
    "checkpoints_shown",
    "completion_request",
    "embedding_request",
    "is_refused_output",
    "prompt_ids",
    "prompt_tokens_that_fit",
    "rerank_request",
    "rerank_words_that_fit",
    "step_ms",
]

SEED_TEXT = (
    "Before the first visitor arrives, the lamps are lit and the long room is aired. Chairs are "
    "set in rows, the clock is wound, and somebody reads the first page aloud so that the voice "
    "is warm when it counts. Nothing of this is kept; all of it is done again tomorrow.\n"
)
_RERANK_OVERHEAD_WORDS = 16  # the query, what separates it, and words longer than the average
_CONTEXT_RESERVE_TOKENS = 2  # n_ctx - 1 tokens pass, n_ctx do not (llama-server, measured)


class WarmUpResult(msgspec.Struct, frozen=True):
    """What a warm-up came to.

    Args:
        took_ms: From the first byte sent to the last byte received, in milliseconds.
        failure: Why it failed, or empty.
        prompt_tokens: Tokens that were prefilled, where the backend said so.
        decode_tokens: Tokens that were generated, where the backend said so.
        prompt_ms: Milliseconds of the prefill by the backend's count; 0 is unknown.
        step_ms: Milliseconds of a decode step by the same; 0 is unknown.
        checkpoints: Whether its progress showed that the model is checkpointed; `None` is unknown.
        retried: Why the first try failed where this is the second, or empty.
    """

    took_ms: float
    failure: str = ""
    prompt_tokens: int | None = None
    decode_tokens: int | None = None
    checkpoints: bool | None = None
    retried: str = ""
    prompt_ms: float = 0.0
    step_ms: float = 0.0


def prompt_tokens_that_fit(wanted: int, decode_tokens: int, context_tokens: int | None) -> int:
    """Return how many prompt tokens to send: those wanted, or as many as the context holds."""
    if context_tokens is None:
        return wanted
    return max(1, min(wanted, context_tokens - decode_tokens - _CONTEXT_RESERVE_TOKENS))


def prompt_ids(seed_ids: list[int], tokens: int) -> list[int]:
    """Repeat a text's ids to exactly so many tokens.

    Raises:
        ValueError: There are no ids to repeat.
    """
    if not seed_ids:
        raise ValueError("the backend's tokenizer made no tokens of a plain text")
    return (seed_ids * (tokens // len(seed_ids) + 1))[:tokens]


def completion_request(ids: list[int], decode_tokens: int) -> dict[str, Any]:
    """Return the body for `/completion`; it streams, so that its progress can be seen."""
    return {
        "prompt": ids,
        "n_predict": decode_tokens,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": True,
        "grammar": "root ::= [a-z]*",
        "stream": True,
        "return_progress": True,
    }


def chat_request(plan: BackendPlan) -> dict[str, Any]:
    """Return the body for `/v1/chat/completions` of backends without token ids (zinc, mlx).

    The text has one word a token, roughly: what such a backend counts cannot be known beforehand.
    """
    words = SEED_TEXT.split()
    wanted = plan.warm_up.prompt_tokens
    text = " ".join((words * (wanted // len(words) + 1))[:wanted])
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": plan.warm_up.decode_tokens,
        "temperature": 0,
        "stream": True,
    }
    if plan.upstream_model:
        body["model"] = plan.upstream_model
    return body


def embedding_request(ids: list[int]) -> dict[str, Any]:
    """Return the body for `/v1/embeddings`."""
    return {"input": ids}


def rerank_words_that_fit(tokens: int, seed_tokens: int) -> int:
    """Return how many words of a document make a rerank prompt of about so many tokens, not more.

    Args:
        tokens: Tokens of the prompt at most; the query and the tokens between the parts count.
        seed_tokens: What the backend's tokenizer makes of `SEED_TEXT`.
    """
    tokens_a_word = max(1.0, seed_tokens / len(SEED_TEXT.split()))
    return max(1, int(tokens / tokens_a_word) - _RERANK_OVERHEAD_WORDS)


def rerank_request(words: int) -> dict[str, Any]:
    """Return the body for `/v1/rerank`, which takes text only: one document of so many words."""
    text = SEED_TEXT.split()
    document = " ".join((text * (words // len(text) + 1))[:words])
    return {"query": "what is warm?", "documents": [document]}


def step_ms(predicted_tokens: int, predicted_ms: float) -> float:
    """Return the milliseconds of a decode step, from a reply's `timings`; 0 where it made none.

    The first token comes out of the prefill, and the time is counted from there.
    """
    return predicted_ms / (predicted_tokens - 1) if predicted_tokens > 1 else 0.0


def is_refused_output(body: bytes) -> bool:
    """Tell whether an error is a build's refusal of text that means nothing: the work was done."""
    return b"does not match the expected" in body and b"format" in body


def checkpoints_shown(progress: list[dict[str, int]]) -> bool | None:
    """Tell from a prompt's `prompt_progress` objects whether the server checkpoints its model."""
    try:
        return shows_checkpoints(progress[-1]["total"], [one["processed"] for one in progress])
    except (IndexError, KeyError, TypeError):
        return None
