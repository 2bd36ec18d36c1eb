"""Read the header of a GGUF file, from bytes already in memory, without its vocabulary.

A GGUF file is a magic word, a version, two counts, that many key-value pairs, that many tensor
descriptions, padding, and the tensors' data (ggml docs, `gguf.md`). The pairs say what the model
is; the descriptions say how long the file must be, and so whether it is whole. Everything between
is stepped over: a vocabulary has up to half a million strings, and none is made into an object.

Every length in the file is checked before it is used, so a damaged file costs one clear error.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

__all__ = ["Header", "InvalidGgufError", "TruncatedHeaderError", "parse_header"]

_MAGIC: Final = b"GGUF"
# Version 1 had 32-bit counts; llama.cpp dropped it in 2023. 2 and 3 differ in byte order only.
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT_BYTES: Final = 32  # ggml docs, gguf.md: general.alignment
_MAX_DIMENSIONS: Final = 4  # ggml.h: GGML_MAX_DIMS
_MAX_KEY_BYTES: Final = 65_535  # ggml docs, gguf.md: a key is at most 2^16-1 bytes
_MAX_TENSOR_NAME_BYTES: Final = 1_024  # ggml.h: GGML_MAX_NAME is 64; some builds raise it
_MAX_KEPT: Final = 512  # llama.cpp: LLAMA_MAX_LAYERS; longer arrays are vocabularies
_SMALLEST_PAIR_BYTES: Final = 8 + 4 + 1
_SMALLEST_TENSOR_BYTES: Final = 8 + 4 + 4 + 8

_STRING: Final = 8
_ARRAY: Final = 9
# Value types of ggml docs, gguf.md, as struct codes; 8 is a string, 9 an array.
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_INTEGERS: Final = (0, 1, 2, 3, 4, 5, 10, 11)

# ggml.h's tensor types: number -> (elements of a block, bytes of a block). A type that is missing
# here is newer than this table; the end of such a tensor is unknown and not judged.
_TENSOR_TYPES: Final = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 36),  # Q8_1; an old one is 40, so the smaller is the safe bound
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
}

_U32: Final = struct.Struct("<I").unpack_from
_U64: Final = struct.Struct("<Q").unpack_from
_ARRAY_HEAD: Final = struct.Struct("<IQ").unpack_from


class InvalidGgufError(ValueError):
    """The bytes are no GGUF header that llama.cpp would read; the message says what is wrong."""


class TruncatedHeaderError(InvalidGgufError):
    """The bytes end inside the header: give more of them, or the file is cut off."""


_Value = int | float | bool | str | tuple[int, ...]


class Header(msgspec.Struct, frozen=True):
    """What a header says that somebody here needs.

    Args:
        values: The scalar values, short strings and short arrays of integers by key.
        tensors: How many tensors the file describes.
        header_bytes: Where the header ends, before padding.
        end_bytes: The size that the file must have at least, from the tensor that ends last.
        last_tensor: That tensor's name.
    """

    values: dict[str, _Value]
    tensors: int
    header_bytes: int
    end_bytes: int
    last_tensor: str = ""

    @property
    def architecture(self) -> str | None:
        """`general.architecture`, the prefix of the keys that belong to the model's kind."""
        return self.text("general.architecture")

    def text(self, key: str) -> str | None:
        """Return a string value, `None` where the key is missing or is no string."""
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """Return an integer value, `None` where the key is missing or is no integer."""
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """Return an array of integers, one for each layer; `None` where the key is none."""
        value = self.values.get(key)
        return value if isinstance(value, tuple) else None


def parse_header(data: bytes, size_bytes: int) -> Header:
    """Read the header of a file from its first bytes.

    Args:
        data: The first bytes of the file, as many as the caller cares to give.
        size_bytes: The size of the whole file; no count or length in it may say more.

    Raises:
        TruncatedHeaderError: `data` ends inside the header.
        InvalidGgufError: It is no GGUF file, or one that cannot be read.
    """
    if data[:4] != _MAGIC[: len(data)] or not data:
        raise InvalidGgufError(f"it starts with {data[:4]!r}, not with {_MAGIC!r}")
    reader = _Reader(data, size_bytes)
    try:
        return reader.header()
    except struct.error:
        raise TruncatedHeaderError(f"it ends inside its header, at byte {len(data)}") from None


class _Reader:
    """A position in the bytes that moves forward only; `struct.error` means they ran out."""

    def __init__(self, data: bytes, size_bytes: int) -> None:
        self.data = data
        self.size_bytes = size_bytes
        self.at = len(_MAGIC)

    def header(self) -> Header:
        version = self.u32()
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise InvalidGgufError("its byte order is big-endian")
            raise InvalidGgufError(f"its GGUF version is {version}, not 2 or 3")
        tensors = self.count(_SMALLEST_TENSOR_BYTES, "tensors")
        pairs = self.count(_SMALLEST_PAIR_BYTES, "key-value pairs")
        values: dict[str, _Value] = {}
        for _ in range(pairs):
            key = self.string(_MAX_KEY_BYTES)
            value = self.value(key)
            if value is not None:
                values[key] = value
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise InvalidGgufError(f"its general.alignment is {alignment}, not a power of two")
        end, last = 0, ""
        for _ in range(tensors):
            name, tensor_end = self.tensor()
            if tensor_end > end:
                end, last = tensor_end, name
        data_start = -(-self.at // alignment) * alignment
        return Header(
            values=values,
            tensors=tensors,
            header_bytes=self.at,
            end_bytes=data_start + end if end else self.at,
            last_tensor=last,
        )

    def u32(self) -> int:
        value: int = _U32(self.data, self.at)[0]
        self.at += 4
        return value

    def u64(self) -> int:
        value: int = _U64(self.data, self.at)[0]
        self.at += 8
        return value

    def count(self, smallest_bytes: int, what: str) -> int:
        """Read a count of things of at least that size: more than the file could hold is a lie."""
        count = self.u64()
        if count * smallest_bytes > self.size_bytes:
            raise InvalidGgufError(f"it claims {count} {what}, more than its size could hold")
        return count

    def string(self, limit_bytes: int) -> str:
        length = self.u64()
        if length > limit_bytes:
            raise InvalidGgufError(
                f"a name at byte {self.at - 8} claims {length} bytes, more than {limit_bytes}"
            )
        start = self.at
        self.skip(length)
        return self.data[start : self.at].decode("utf-8", "replace")

    def skip(self, length: int) -> None:
        if length > self.size_bytes:
            raise InvalidGgufError(
                f"a value at byte {self.at} claims {length} bytes, more than the whole file"
            )
        self.at += length
        if self.at > len(self.data):
            raise struct.error

    def value(self, key: str) -> _Value | None:
        kind = self.u32()
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            value: int | float | bool = scalar.unpack_from(self.data, self.at)[0]
            self.at += scalar.size
            return value
        if kind == _STRING:
            length = self.u64()
            if length <= _MAX_KEY_BYTES:
                self.at -= 8
                return self.string(_MAX_KEY_BYTES)
            self.skip(length)  # a chat template can be long, and nobody here reads it
            return None
        if kind == _ARRAY:
            return self.array(key)
        raise InvalidGgufError(f"the type of {key!r} is {kind}, which is none of GGUF's")

    def array(self, key: str) -> tuple[int, ...] | None:
        """Step over an array, and return it where it is one of few integers."""
        kind, count = _ARRAY_HEAD(self.data, self.at)
        self.at += 12
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            start = self.at
            self.skip(scalar.size * count)
            if kind in _INTEGERS and count <= _MAX_KEPT:
                return struct.unpack_from(f"<{count}{scalar.format[-1]}", self.data, start)
        elif kind == _STRING:
            if count * 8 > self.size_bytes:
                raise InvalidGgufError(f"{key!r} claims {count} strings, more than would fit")
            # The one hot loop: a vocabulary and its merges. A length that leads past the end makes
            # the next read fail, and none leads backwards, since they have no sign.
            at, data, length_at = self.at, self.data, _U64
            try:
                for _ in range(count):
                    at += 8 + length_at(data, at)[0]
            except OverflowError:
                raise InvalidGgufError(f"{key!r} has a string longer than any file") from None
            self.skip(at - self.at)
        else:
            raise InvalidGgufError(f"{key!r} is an array of type {kind}, which llama.cpp refuses")
        return None

    def tensor(self) -> tuple[str, int]:
        """Read one description; return its name and where its data ends, from the data's start."""
        name = self.string(_MAX_TENSOR_NAME_BYTES)
        dimensions = self.u32()
        if dimensions > _MAX_DIMENSIONS:
            raise InvalidGgufError(f"tensor {name!r} has {dimensions} dimensions")
        elements = 1
        for _ in range(dimensions):
            elements *= self.u64()
        kind = self.u32()
        offset = self.u64()
        block_elements, block_bytes = _TENSOR_TYPES.get(kind, (1, 0))
        return name, offset + elements // block_elements * block_bytes
