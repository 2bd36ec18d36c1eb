"""What is known of the machine, a binary and a model: plain values, `None` where unknown.

Unknown is unknown: no field is filled with a guess. `live.machine` looks, `core.plan` decides.
"""

from __future__ import annotations

import msgspec

__all__ = ["BinaryFacts", "Device", "ModelFacts"]


class Device(msgspec.Struct, frozen=True):
    """One line of `llama-server --list-devices`, for example `Vulkan0: AMD ... (2048 MiB, ...)`.

    Args:
        name: The name that `--device` takes, as printed (`HRX0`, `Vulkan0`, `CUDA0`).
        description: What the driver calls it.
        total_mib: Memory in MiB, where the line gives it.
        free_mib: Free memory in MiB at that moment, where the line gives it.
    """

    name: str
    description: str = ""
    total_mib: int | None = None
    free_mib: int | None = None


class BinaryFacts(msgspec.Struct, frozen=True):
    """What a llama-server says of itself.

    Args:
        path: The program, absolute.
        version: What `--version` printed, first line, for example `version: 1 (571d0d5)`.
        devices: What `--list-devices` printed, in its order.
        options: Every option that `--help` lists, with how many values it takes (0 or 1);
            empty where the program has no such help.
    """

    path: str
    version: str | None = None
    devices: tuple[Device, ...] = ()
    options: dict[str, int] = {}


class ModelFacts(msgspec.Struct, frozen=True):
    """What the header of a GGUF file says.

    Args:
        path: The file, as given.
        size_bytes: Its size on disk; for a split model the sum of all parts.
        architecture: `general.architecture` (`llama`, `gemma3`, `bert`, ...).
        name: `general.name`.
        context_length: `ARCH.context_length` in tokens, the context the model was trained with.
        file_type: `general.file_type`, llama.cpp's number of the quantisation.
        pooling: `ARCH.pooling_type`, set on embedding and reranking models.
        block_count: `ARCH.block_count`, its layers.
        embedding_length: `ARCH.embedding_length`.
        head_count: `ARCH.attention.head_count`; `None` where it differs by layer.
        head_count_kv: `ARCH.attention.head_count_kv`; `None` where it differs by layer.
        head_counts_kv: The same for each layer, where it differs; 0 is a layer without attention.
        key_length: `ARCH.attention.key_length`; models without it share the embedding out.
        value_length: `ARCH.attention.value_length`; as `key_length`.
    """

    path: str
    size_bytes: int
    architecture: str | None = None
    name: str | None = None
    context_length: int | None = None
    file_type: int | None = None
    pooling: int | None = None
    block_count: int | None = None
    embedding_length: int | None = None
    head_count: int | None = None
    head_count_kv: int | None = None
    head_counts_kv: tuple[int, ...] | None = None
    key_length: int | None = None
    value_length: int | None = None
