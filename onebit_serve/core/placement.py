"""Where a model was put: what a llama-server's load log says, against the device asked for.

A driver update that fails leaves a server that is healthy and ten times slower: every layer on the
CPU. `load_tensors: offloaded 3/3 layers to GPU` does not tell: llama-server b10068 prints just that
with `-ngl 99` and no device at all (measured). What tells is where the weights' buffers are:

    load_tensors:   CPU_Mapped model buffer size =     0.17 MiB     the embedding: always there
    load_tensors:      Vulkan0 model buffer size =     0.54 MiB     the layers

llama-server prints these lines from `-lv 4` on; at its default level nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from onebit_serve.core import options

__all__ = ["LOG_LEVEL", "Placement", "judge", "tells", "wanted"]

# The least `-lv` at which llama-server b10068 prints where the weights are.
LOG_LEVEL = 4

_BUFFER = re.compile(r"(\S+) model buffer size\s*=\s*([\d.]+) MiB")
_LAYERS = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
# Buffer types of a device beside its own: Vulkan0 -> Vulkan0_Mapped, ROCm0 -> ROCm0_Split.
_OF_A_DEVICE = re.compile(r"(.+?)(?:_(?:Mapped|Split|Private|REPACK))?")

_ALL_LAYERS = 99  # what people write for all of them

Word = Literal["ok", "fallback", "unknown"]


class Placement(msgspec.Struct, frozen=True):
    """The verdict.

    Args:
        word: `ok`, `fallback` (not where it was asked for), or `unknown` (the log doesn't tell).
        reason: Why, in words for a person; empty for `ok`.
        sizes_mib: MiB of weights by buffer, as the log names them.
    """

    word: Word
    reason: str = ""
    sizes_mib: dict[str, float] = {}


def wanted(arguments: Sequence[str]) -> tuple[str, bool]:
    """Return what a llama-server's command line asks for: the device, and whether all layers.

    Args:
        arguments: The command line.

    Returns:
        What `judge` takes. Without a number of layers, or with a small one, nothing is promised.
    """
    device = options.value(arguments, "-dev", "--device") or ""
    layers = options.value(arguments, "-ngl", "--gpu-layers", "--n-gpu-layers") or ""
    return device, layers == "all" or (layers.isdigit() and int(layers) >= _ALL_LAYERS)


def tells(line: str) -> bool:
    """Say whether a line of the log has a part in the verdict; the rest need not be kept."""
    return "model buffer size" in line or "layers to GPU" in line


def judge(lines: Iterable[str], device: str, *, all_layers: bool = True) -> Placement:
    """Compare where the weights are with where they were meant to be.

    Args:
        lines: The load's log, or those of it that `tells` keeps.
        device: The device as llama-server lists it (`HRX0`, `Vulkan0`), several with commas
            between them; empty or `none` where the CPU was asked for.
        all_layers: Whether all layers were meant for it; false where the user chose a number.
    """
    devices = [name for name in device.split(",") if name and name.lower() != "none"]
    if not devices:
        return Placement("ok")
    sizes: dict[str, float] = {}
    layers: list[tuple[int, int]] = []  # one of each model: a draft model comes after
    for line in lines:
        if found := _BUFFER.search(line):
            sizes[found[1]] = sizes.get(found[1], 0.0) + float(found[2])
        elif found := _LAYERS.search(line):
            layers.append((int(found[1]), int(found[2])))
    if not sizes:
        return Placement(
            "unknown", "the backend's log does not say where the weights are (it does at -lv 4)"
        )
    there = [name for name in sizes if _device_of(name) in {d.lower() for d in devices}]
    if not any(sizes[name] for name in there):
        places = ", ".join(f"{name} {size:g} MiB" for name, size in sizes.items())
        return Placement(
            "fallback", f"no weights are on {' or '.join(devices)}: the log says {places}", sizes
        )
    part = next((f"{on} of {of}" for on, of in layers if on < of), "")
    if all_layers and part:
        return Placement(
            "fallback",
            f"only {part} layers are on {' and '.join(devices)}, the others on the CPU",
            sizes,
        )
    return Placement("ok", "", sizes)


def _device_of(buffer: str) -> str:
    found = _OF_A_DEVICE.fullmatch(buffer)
    return (found[1] if found else buffer).lower()
