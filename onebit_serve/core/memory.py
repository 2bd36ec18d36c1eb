"""Whether a model can fit before it is loaded: what it needs, against what there is.

The weights are as large as the file. What is said of the KV cache is "at most" (`core.kv_cache`),
and it only ever warns: llama-server makes the context smaller by itself where it was not given
(`-fit`). Weights larger than the whole memory of a device are
refused; those larger than the machine's are too where they are not mapped from their file, which
llama-server does by default. What is not known is not judged.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from onebit_serve.core import options
from onebit_serve.core.facts import Device, ModelFacts
from onebit_serve.core.kv_cache import bytes_per_token, types_of
from onebit_serve.core.placement import wanted
from onebit_serve.core.plan import BackendPlan

__all__ = ["Fit", "Memory", "Need", "check", "judge", "memory_of", "need"]

# Options that leave a part of the weights off the device.
_SPLITS = ("-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-sm", "-ts")
_MIB = 1 << 20
_GIB = 1 << 30

Word = Literal["fits", "tight", "too_large", "unknown"]


class Need(msgspec.Struct, frozen=True):
    """What a model needs.

    Args:
        weights_bytes: Its weights.
        cache_bytes: Its KV cache at most, for the whole context; `None` where the header does not
            tell, or the context is the program's to choose.
    """

    weights_bytes: int
    cache_bytes: int | None = None


class Memory(msgspec.Struct, frozen=True):
    """What there is, in one place.

    Args:
        where: Its name, for messages: `this machine`, `Vulkan0`.
        total_bytes: All of it; `None` where unknown.
        free_bytes: What is free now; `None` where unknown.
        mapped: Weights are mapped from their file, so that more of them than fit only get slow.
    """

    where: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    mapped: bool = False


class Fit(msgspec.Struct, frozen=True):
    """The verdict.

    Args:
        word: `fits`; `tight`: say the message and go on; `too_large`: refuse; `unknown`.
        message: What it needs and what there is; empty for `fits` and `unknown`.
    """

    word: Word
    message: str = ""


def check(
    backend: BackendPlan,
    model: ModelFacts | None,
    listed: tuple[Device, ...],
    *,
    machine_total_bytes: int | None,
    machine_free_bytes: int | None,
) -> Fit:
    """Judge one backend before it is started.

    Where only a part of the model goes to the device by the user's own options, and for programs
    other than llama-server, nothing is known.

    Args:
        backend: What will run.
        model: Its facts; `None` for a model that is no file.
        listed: The devices that its program lists.
        machine_total_bytes: The machine's memory.
        machine_free_bytes: What of it is available.
    """
    words = backend.arguments
    device, all_layers = wanted(words)
    on_cpu = device.lower() == "none"
    in_part = not on_cpu and (not all_layers or any(options.given(words, o) for o in _SPLITS))
    if model is None or backend.kind != "llama-server" or in_part:
        return Fit("unknown")
    context = options.value(words, "-c", "--ctx-size") or ""
    key_type, value_type = types_of(words)
    asked = need(
        model,
        ctx_tokens=int(context) if context.isdigit() else 0,
        key_type=key_type,
        value_type=value_type,
    )
    memory = memory_of(
        device,
        listed,
        machine_total_bytes=machine_total_bytes,
        machine_free_bytes=machine_free_bytes,
    )
    mapped = on_cpu and not any(options.given(words, o) for o in ("--no-mmap", "--mlock"))
    return judge(asked, msgspec.structs.replace(memory, mapped=mapped), backend.served_id)


def need(
    model: ModelFacts,
    *,
    ctx_tokens: int = 0,
    key_type: str = "f16",
    value_type: str = "f16",
) -> Need:
    """Return what a model needs.

    Args:
        model: Its facts.
        ctx_tokens: The context of all slots together; 0 where the program chooses.
        key_type: Type of the keys in the cache, in llama-server's words.
        value_type: Type of the values.
    """
    per_token = bytes_per_token(model, key_type, value_type)
    if per_token is None or not ctx_tokens:
        return Need(model.size_bytes)
    return Need(model.size_bytes, int(per_token * ctx_tokens))


def memory_of(
    device: str,
    listed: tuple[Device, ...],
    *,
    machine_total_bytes: int | None,
    machine_free_bytes: int | None,
) -> Memory:
    """Return the memory that a model on this device uses.

    Args:
        device: As llama-server lists it; `none` or empty is the CPU. Of several, which share the
            model, nothing is known.
        listed: What `--list-devices` said.
        machine_total_bytes: The machine's memory.
        machine_free_bytes: What of it is available without swapping.
    """
    if device.lower() in ("", "none", "cpu"):
        return Memory("this machine", machine_total_bytes, machine_free_bytes)
    for one in listed:
        if one.name.lower() == device.lower():
            # Drivers that don't know print 0 MiB.
            total = one.total_mib * _MIB if one.total_mib else None
            free = one.free_mib * _MIB if one.free_mib and total else None
            return Memory(one.name, total, free)
    return Memory(device)


def judge(wanted: Need, memory: Memory, name: str) -> Fit:
    """Hold what a model needs against what there is.

    Args:
        wanted: What it needs.
        memory: The memory it would use.
        name: The model, for the message.
    """
    weights, total, free = wanted.weights_bytes, memory.total_bytes, memory.free_bytes
    if total is not None and weights > total and not memory.mapped:
        return Fit(
            "too_large",
            f"{name} cannot fit: its weights need {_size(weights)}, {memory.where} has "
            f"{_size(total)} in all",
        )
    have, state = (free, "free") if free is not None else (total, "in all")
    if have is None:
        return Fit("unknown")
    cache = wanted.cache_bytes or 0
    if weights + cache <= have:
        return Fit("fits")
    parts = _size(weights)
    if cache:
        parts += f" for its weights and at most {_size(cache)} for its context"
    return Fit(
        "tight",
        f"{name} may not fit: it needs about {parts}, {memory.where} has {_size(have)} {state}",
    )


def _size(size_bytes: int) -> str:
    if size_bytes < _GIB:
        return f"{max(1, round(size_bytes / _MIB))} MiB"
    return f"{size_bytes / _GIB:.1f} GiB"
