"""A header is read whatever its vocabulary; a damaged one costs one clear error."""

from __future__ import annotations

import contextlib
import struct
from itertools import product

import gguf as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebit_serve.core.gguf import (
    _TENSOR_TYPES,
    InvalidGgufError,
    TruncatedHeaderError,
    parse_header,
)

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dimensions + struct.pack("<IQ", kind, offset)


def header(pairs: list[bytes], tensors: list[bytes] | None = None, version: int = 3) -> bytes:
    tensors = tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    return head + b"".join(pairs) + b"".join(tensors)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def strings(*values: str) -> bytes:
    return struct.pack("<IQ", STRING, len(values)) + b"".join(string(v) for v in values)


MODEL = header(
    [
        pair("general.architecture", STRING, string("llama")),
        pair("general.name", STRING, string("Näme")),
        pair("llama.context_length", U32, u32(8192)),
        pair("llama.rope.freq_base", F32, struct.pack("<f", 0.5)),
        pair("tokenizer.ggml.tokens", ARRAY, strings("a", "", "c" * 300)),
        pair("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ3f", F32, 3, 1, 2, 3)),
        pair("tokenizer.ggml.add_bos_token", BOOL, b"\x01"),
        pair("general.file_type", U32, u32(3)),
    ],
    [tensor("first", (32, 2)), tensor("last", (64,), kind=2, offset=256)],
)


def test_values_are_read_and_vocabularies_are_stepped_over() -> None:
    found = parse_header(MODEL, 10_000)
    assert found.architecture == "llama"
    assert found.text("general.name") == "Näme"
    assert found.number("llama.context_length") == 8192
    assert found.number("general.file_type") == 3
    assert found.values["llama.rope.freq_base"] == 0.5
    assert not any("tokens" in key or "scores" in key for key in found.values)
    assert found.tensors == 2
    assert found.header_bytes == len(MODEL)


def array(kind: int, code: str, *values: int) -> bytes:
    return struct.pack(f"<IQ{len(values)}{code}", kind, len(values), *values)


def test_short_arrays_of_integers_are_kept_and_no_others() -> None:
    data = header(
        [
            pair("lfm2.attention.head_count_kv", ARRAY, array(5, "i", 0, 0, 8, -1)),
            pair("wide", ARRAY, array(U64, "Q", *range(512))),
            pair("long", ARRAY, array(U32, "I", *range(513))),
            pair("flags", ARRAY, array(BOOL, "?", 1, 0)),
            pair("floats", ARRAY, array(F32, "f", 1)),
            pair("none", ARRAY, array(U32, "I")),
        ]
    )
    found = parse_header(data, len(data))
    assert found.numbers("lfm2.attention.head_count_kv") == (0, 0, 8, -1)
    assert found.number("lfm2.attention.head_count_kv") is None
    assert found.numbers("wide") == tuple(range(512))
    assert found.numbers("none") == ()
    assert not {"long", "flags", "floats"} & set(found.values)


def test_a_value_of_another_type_counts_as_unknown() -> None:
    data = header(
        [
            pair("general.architecture", U32, u32(1)),
            pair("general.file_type", BOOL, b"\x01"),
            pair("general.name", F32, struct.pack("<f", 1)),
        ]
    )
    found = parse_header(data, 10_000)
    assert found.architecture is None
    assert found.number("general.file_type") is None
    assert found.number("missing") is None
    assert found.text("general.name") is None


def test_the_end_of_the_last_tensor_is_the_size_the_file_must_have() -> None:
    found = parse_header(MODEL, 10_000)
    data_start = -(-len(MODEL) // 32) * 32
    assert found.last_tensor == "last"
    assert found.end_bytes == data_start + 256 + 2 * 18  # two blocks of Q4_0


def test_the_data_starts_at_the_alignment_that_the_file_names() -> None:
    data = header([pair("general.alignment", U32, u32(4096))], [tensor("t", (3,))])
    assert parse_header(data, 10_000).end_bytes == 4096 + 12


def test_a_tensor_of_a_type_from_the_future_is_not_judged() -> None:
    data = header([], [tensor("t", (1 << 20,), kind=99, offset=64)])
    assert parse_header(data, 10_000).end_bytes == -(-len(data) // 32) * 32 + 64


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for kind, size in reference.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1" and kind.value in _TENSOR_TYPES:
            assert _TENSOR_TYPES[kind.value] == size, kind.name


def test_a_long_chat_template_is_stepped_over() -> None:
    data = header(
        [
            pair("tokenizer.chat_template", STRING, string("x" * 70_000)),
            pair("general.name", STRING, string("after")),
        ]
    )
    found = parse_header(data, len(data))
    assert "tokenizer.chat_template" not in found.values
    assert found.text("general.name") == "after"


def test_a_name_that_is_not_utf8_is_read_all_the_same() -> None:
    data = header([pair("general.name", STRING, string(b"\xff!"))])
    assert parse_header(data, len(data)).text("general.name") == "\ufffd!"


def test_a_header_cut_anywhere_is_called_cut_off() -> None:
    for length in range(1, len(MODEL)):
        with pytest.raises(TruncatedHeaderError, match=f"at byte {length}$"):
            parse_header(MODEL[:length], 10_000)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "starts with b''"),
        (b"PK\x03\x04", "starts with b'PK"),
        (b"\0" * 100, "not with b'GGUF'"),
        (header([], version=1), "version is 1"),
        (header([], version=4), "version is 4"),
        (header([], version=0x03000000), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "key-value pairs"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "claims"),
        (header([pair("k", 13, b"")]), "type of 'k' is 13"),
        (header([pair("k", STRING, struct.pack("<Q", 1 << 63))]), "more than the whole file"),
        (header([pair("k", ARRAY, struct.pack("<IQ", STRING, 1 << 60))]), "strings"),
        (header([pair("k", ARRAY, struct.pack("<IQ", U64, 1 << 60))]), "more than the whole file"),
        (header([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "array of type 9"),
        (header([pair("general.alignment", U32, u32(0))]), "alignment is 0"),
        (header([pair("general.alignment", U32, u32(48))]), "alignment is 48"),
        (header([pair("general.alignment", F32, u32(0))]), "alignment is 0.0"),
        (header([], [tensor("t", (1, 1, 1, 1, 1))]), "5 dimensions"),
    ],
)
def test_a_header_that_lies_is_refused_with_the_reason(data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidGgufError, match=complaint) as caught:
        parse_header(data, 10_000)
    assert not isinstance(caught.value, TruncatedHeaderError)


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_header_or_in_our_own_error(junk: bytes) -> None:
    with contextlib.suppress(InvalidGgufError):
        parse_header(b"GGUF\x03\0\0\0" + junk, 1_000)


@given(st.integers(0, len(MODEL) - 1), st.binary(min_size=1, max_size=9))
def test_a_damaged_header_ends_in_a_header_or_in_our_own_error(at: int, damage: bytes) -> None:
    with contextlib.suppress(InvalidGgufError):
        parse_header(MODEL[:at] + damage + MODEL[at + len(damage) :], 10_000)


def test_both_versions_that_llama_cpp_reads_are_read() -> None:
    for version, name in product((2, 3), ("a", "b")):
        data = header([pair("general.name", STRING, string(name))], version=version)
        assert parse_header(data, len(data)).text("general.name") == name
