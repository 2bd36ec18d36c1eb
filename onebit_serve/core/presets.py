"""What each device word stands for: programs, arguments, environment, warm-up. Data, one place."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from onebit_serve.core.errors import UsageError, nearest

__all__ = [
    "AUTO_ORDER",
    "EMBEDDING_BATCH_LIMIT_TOKENS",
    "NOT_FOR_AUTO",
    "PRESETS",
    "Preset",
    "device_word",
    "known_as",
    "misses_departures",
    "preset",
]


_LISTED_NAME = re.compile(r"[a-z]+\d+")  # as `--list-devices` has them


class Preset(msgspec.Struct, frozen=True):
    """How a device word becomes a command line.

    Args:
        word: The word that `--device` takes and that log lines use.
        listed: The name in `llama-server --list-devices` that it needs; `None` needs none.
        device_argument: The value of the child's own `--device`; `None` gives it none.
        arguments: Further arguments, each left out where the user gave the same option.
        variables: Environment of the child; a value that the user set wins.
        kind: What program runs it.
        program: Its name on PATH, where it is not llama-server.
        warm: The first request costs more than the next, so that a warm-up buys something.
    """

    word: str
    listed: str | None = None
    device_argument: str | None = None
    arguments: tuple[tuple[str, ...], ...] = ()
    variables: dict[str, str] = {}
    kind: Literal["llama-server", "zinc", "mlx"] = "llama-server"
    program: str = "llama-server"
    warm: bool = True


# All layers on the device and the model's own chat template: older builds default to neither.
_OFFLOAD = (("-ngl", "99"), ("--jinja",))

PRESETS: dict[str, Preset] = {
    p.word: p
    for p in (
        Preset("hrx", "HRX0", "HRX0", _OFFLOAD),
        Preset("vulkan", "Vulkan0", "Vulkan0", _OFFLOAD),
        Preset("rocm", "ROCm0", "ROCm0", _OFFLOAD),
        # First / best of three on the CPU: 1.0 to 1.1 (llama-server b10068, measured).
        Preset("cpu", device_argument="none", warm=False),
        Preset("zinc", kind="zinc", program="zinc", variables={"RADV_PERFTEST": "coop_matrix"}),
        Preset("mlx", kind="mlx", program="lemon-mlx-server"),
    )
}

AUTO_ORDER = ("hrx", "vulkan", "rocm")

# Listed names that no model should be put on unasked: the CPU itself and its helpers.
NOT_FOR_AUTO = frozenset({"CPU", "BLAS"})

# llama-server refuses an embedding input longer than its physical batch (512 by default), so the
# batch follows the context. A context that nobody asked for is followed only this far, since
# compute buffers grow with the batch.
EMBEDDING_BATCH_LIMIT_TOKENS = 8192

# Builds that go on generating a reply that does not stream after its client left, by a piece of
# their version text (llama.cpp issue 24496; 0.6.0-dev at 86a2835 and b10068 measured: the former
# runs to the last token, the latter stops at once).
_MISS_DEPARTURES = ("0.6.0-dev", "86a2835")


def preset(name: str) -> Preset:
    """Return what a device word or a listed name (`CUDA0`) stands for."""
    return PRESETS.get(name) or Preset(name, name, name, _OFFLOAD)


def device_word(name: str) -> str:
    """Return a word of `[warmup] devices` in lower case: a device word, or a listed name.

    Raises:
        UsageError: It is neither.
    """
    word = name.lower()
    if word not in PRESETS and not _LISTED_NAME.fullmatch(word):
        known = ", ".join(PRESETS)
        raise UsageError(
            f"[warmup] devices names no device: {name}",
            hint=nearest(word, PRESETS) or f"known are {known}, and names like Vulkan0",
        )
    return word


def known_as(device: str) -> str:
    """Return the one name of a device, in lower case: `vulkan` for `Vulkan0`, which is the same."""
    word = device.lower()
    words = {p.listed.lower(): p.word for p in PRESETS.values() if p.listed}
    return words.get(word, word)


def misses_departures(version: str | None) -> bool:
    """Say whether a build is known not to notice clients that leave a reply that doesn't stream."""
    return version is not None and any(piece in version for piece in _MISS_DEPARTURES)
