from __future__ import annotations

import json

import msgspec
import pytest

from onebit_serve.core.gate.kld import Distribution, Position
from onebit_serve.core.gate.reference import (
    SCHEMA,
    Floor,
    Origin,
    Reference,
    decode,
    encode,
    refusal,
)
from onebit_serve.core.gate.tokens import Answer, Step, Token

ORIGIN = Origin(
    model="m",
    model_file="m-Q4_K_M.gguf",
    model_sha256="aa",
    model_bytes=1,
    architecture="llama",
    file_type=15,
    binary="llama-server",
    binary_sha256="bb",
    version="version: 1 (571d0d5)",
    device="hrx",
    device_name="AMD",
    driver="Linux 6.14",
    flags=("-c", "8192"),
)
WHOLE = Reference(
    SCHEMA,
    ORIGIN,
    {"prose": (1, 2, 3)},
    (Answer("count", (5, 6), (Step(Token(7, ' "x"\n'), 1.5),)),),
    (Position("prose", 2, "decode", Distribution((1, 2), (-0.1, -2.5))),),
    Floor(0.0, 0.003, 0.001),
)


@pytest.mark.parametrize("reference", [WHOLE, Reference(SCHEMA, ORIGIN)])
def test_a_reference_survives_being_written_and_read(reference):
    data = encode(reference)
    assert decode(data) == reference
    assert json.loads(data)["origin"]["file_type"] == 15


def test_the_same_model_and_flags_are_accepted_with_another_binary_device_and_driver():
    now = msgspec.structs.replace(
        ORIGIN, binary_sha256="cc", version="2", device="vulkan", driver="Linux 7.0"
    )
    assert refusal(ORIGIN, now) == ""


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"file_type": 7, "model_sha256": "dd"}, "quantisation"),
        ({"architecture": "qwen3", "file_type": 7}, "this one is qwen3"),
        ({"model_sha256": "dd"}, "another file"),
        ({"flags": ("-c", "8192", "-ctk", "q8_0")}, "-ctk q8_0"),
    ],
)
def test_another_model_quantisation_or_flags_are_refused_with_the_difference(change, word):
    assert word in refusal(ORIGIN, msgspec.structs.replace(ORIGIN, **change))


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", encode(WHOLE)[:-20]])
def test_a_broken_file_is_a_reason_and_no_crash(data):
    assert isinstance(decode(data), str)


def test_a_layout_from_the_future_is_refused():
    assert "layout 99" in decode(encode(msgspec.structs.replace(WHOLE, schema=99)))
