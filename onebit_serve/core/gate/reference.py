"""What `--record` stores for a model, and when a stored reference may be used."""

from __future__ import annotations

import msgspec

from onebit_serve.core.gate.kld import Position
from onebit_serve.core.gate.tokens import Answer

__all__ = ["SCHEMA", "Floor", "Origin", "Reference", "decode", "encode", "refusal"]

SCHEMA = 1


class Origin(msgspec.Struct, frozen=True):
    """What produced a result: everything that may change it.

    Args:
        model: The model's name in the configuration.
        model_file: The file's name.
        model_sha256: Of the whole file; for a split model of all parts, one after the other.
        model_bytes: Its size.
        architecture: As its header says.
        file_type: llama.cpp's number of the quantisation.
        binary: The program's name.
        binary_sha256: Of the program and of the libraries beside it.
        version: What `--version` said.
        device: The word given to `--device`.
        device_name: What `--list-devices` calls it.
        driver: The kernel's release and the version of amdgpu where it has one.
        flags: Everything on the llama-server's command line that may change a result.
        recorded: When, as an ISO date and time.
    """

    model: str
    model_file: str
    model_sha256: str
    model_bytes: int
    architecture: str | None
    file_type: int | None
    binary: str
    binary_sha256: str
    version: str | None
    device: str
    device_name: str
    driver: str
    flags: tuple[str, ...]
    recorded: str = ""


class Floor(msgspec.Struct, frozen=True):
    """The noise between two ways to the same figure, in nat.

    Args:
        loads: Largest divergence between two loads of the same model.
        paths: Largest divergence between prefill and decode at the same position.
        mean: The mean of the latter.
    """

    loads: float
    paths: float
    mean: float


class Reference(msgspec.Struct, frozen=True):
    """A stored reference.

    Args:
        schema: The version of this layout.
        origin: What it was recorded with.
        texts: The token ids of the texts, by name.
        answers: Known answers, cut to their decided tokens; empty where none were recorded.
        positions: Distributions; empty where none were recorded.
        floor: The noise at the time.
    """

    schema: int
    origin: Origin
    texts: dict[str, tuple[int, ...]] = {}
    answers: tuple[Answer, ...] = ()
    positions: tuple[Position, ...] = ()
    floor: Floor | None = None


def encode(reference: Reference) -> bytes:
    """Return a reference as JSON, one line an answer or position so that a diff reads well."""
    whole = msgspec.to_builtins(reference)
    rows = {key: whole.pop(key) for key in ("answers", "positions")}
    head = msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()
    parts = [head[: head.rindex("}")].rstrip()]
    for key, values in rows.items():
        lines = ",\n  ".join(msgspec.json.encode(value).decode() for value in values)
        parts.append(f' "{key}": [\n  {lines}\n ]' if values else f' "{key}": []')
    return (",\n".join(parts) + "\n}\n").encode()


def decode(data: bytes) -> Reference | str:
    """Read a reference; a string says why it cannot be used."""
    try:
        reference = msgspec.json.decode(data, type=Reference)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return f"the reference cannot be read: {error}"
    if reference.schema != SCHEMA:
        return f"the reference has layout {reference.schema}, this gate reads {SCHEMA}"
    return reference


def refusal(stored: Origin, now: Origin) -> str:
    """Return why results of `now` must not be held against `stored`, or an empty string.

    Another binary, device or driver is what a gate is for; another model, quantisation or set of
    flags changes results by right.
    """
    if stored.architecture != now.architecture:
        return f"the reference is of a {stored.architecture} model, this one is {now.architecture}"
    if stored.file_type != now.file_type:
        return (
            f"the reference is of another quantisation (file type {stored.file_type}, "
            f"this file has {now.file_type})"
        )
    if stored.model_sha256 != now.model_sha256:
        return f"the reference is of another file ({stored.model_file}), this is {now.model_file}"
    if stored.flags != now.flags:
        was = " ".join(stored.flags) or "none"
        have = " ".join(now.flags) or "none"
        return f"the reference was recorded with other flags ({was}), these are {have}"
    return ""
