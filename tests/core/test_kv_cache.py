from __future__ import annotations

import pytest

from onebit_serve.core.facts import ModelFacts
from onebit_serve.core.kv_cache import bytes_per_token, types_of
from onebit_serve.live.machine import model_facts

ATTENTION = {"block_count": 4, "embedding_length": 64, "head_count": 4}


def facts(**header):
    return ModelFacts("m.gguf", 1, **header)


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({**ATTENTION, "head_count_kv": 2}, 4 * 2 * 32 * 2),
        (ATTENTION, 4 * 4 * 32 * 2),
        ({**ATTENTION, "head_count_kv": 1, "key_length": 24, "value_length": 8}, 4 * 32 * 2),
        ({**ATTENTION, "head_counts_kv": (0, 0, 2, 0)}, 2 * 32 * 2),
        ({**ATTENTION, "head_counts_kv": (0, 0, 0, 0)}, 0),
        ({**ATTENTION, "head_count": 0}, 0),
        ({**ATTENTION, "head_count": None, "head_counts_kv": (2, 2)}, None),
        ({}, None),
    ],
)
def test_what_a_token_takes_is_read_from_the_models_header(header, size):
    assert bytes_per_token(facts(**header)) == size


def test_a_quantised_cache_is_smaller():
    words = ("-c", "4096", "-ctk", "q8_0", "--cache-type-v=q4_0")
    assert types_of(words) == ("q8_0", "q4_0")
    assert types_of(()) == ("f16", "f16")
    assert bytes_per_token(facts(**ATTENTION), *types_of(words)) == 4 * 4 * 16 * (34 + 18) / 32
    assert bytes_per_token(facts(**ATTENTION), "new_type") is None


@pytest.mark.parametrize(
    ("kind", "size"),
    [("llama", 2 * 2 * 32 * 2), ("lfm2", 2 * 32 * 2), ("jamba", 2 * 32 * 2), ("mamba", 0)],
)
def test_layers_without_attention_take_nothing(kind, size, tiny_models):
    assert bytes_per_token(model_facts(str(tiny_models / f"tiny-{kind}.gguf"))) == size
