"""What one token takes in a model's KV cache, from the header of its file.

Plain attention keeps for each token

    KV heads of all layers x (key length + value length) x bytes of an element

(llama.cpp, 2 bytes for f16). Models with a sliding window or a recurrent state keep less, so it is
an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from onebit_serve.core import options
from onebit_serve.core.facts import ModelFacts

__all__ = ["bytes_per_token", "types_of"]

# Bytes of an element of the cache by llama-server's `--cache-type-k` word; a block of 32 has a
# scale of 2 bytes (ggml's quantised types).
_ELEMENT_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}


def types_of(words: Sequence[str]) -> tuple[str, str]:
    """Return the types of keys and values in the cache that a command line asks for."""
    return (
        options.value(words, "-ctk", "--cache-type-k") or "f16",
        options.value(words, "-ctv", "--cache-type-v") or "f16",
    )


def bytes_per_token(
    model: ModelFacts, key_type: str = "f16", value_type: str = "f16"
) -> float | None:
    """Return what one token takes in bytes, `None` where the header does not say.

    Args:
        model: Its facts.
        key_type: Type of the keys in the cache, in llama-server's words.
        value_type: Type of the values.
    """
    keys, values = model.key_length, model.value_length
    if model.embedding_length and model.head_count:
        # Where the header names no length, a head has its share of the embedding (llama.cpp).
        share = model.embedding_length // model.head_count
        keys, values = keys or share, values or share
    heads = _kv_heads(model)
    if heads == 0:  # recurrent: a state of fixed size, whatever the prompt
        return 0.0
    key_bytes, value_bytes = _ELEMENT_BYTES.get(key_type), _ELEMENT_BYTES.get(value_type)
    if not (heads and keys and values and key_bytes and value_bytes):
        return None
    return heads * (keys * key_bytes + values * value_bytes)


def _kv_heads(model: ModelFacts) -> int | None:
    """Return the KV heads of all layers together."""
    if model.head_counts_kv is not None:
        return sum(model.head_counts_kv)
    # Where the header names no number of KV heads, there are as many as heads (llama.cpp).
    each = model.head_count if model.head_count_kv is None else model.head_count_kv
    return None if each is None or model.block_count is None else each * model.block_count
