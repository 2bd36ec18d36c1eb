"""What a request costs: computed, so that `timings` carry no noise.

`hrx` is AMD's runtime behind a 27B model: a prefill batch of a length not met before costs a build
of 140-190 ms (issue text: 130-200 ms), which is 20-27 % of the 465-token warm-up's prefill, and a
request that meets a new number of sequences decoding together decodes 5-7 % slower. `vulkan` is the
software Vulkan of llama-server b10068 with a tiny model, shader cache off: each size class of a
batch compiles its pipelines at first use (1 to 8 each, 9-32, 33-64, 65 and more), and decoding k
sequences is a batch of k tokens.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

__all__ = ["Batch", "Costs"]

HRX_PREFILL_MS_PER_TOKEN = 1.5
HRX_DECODE_MS = 80.0
VULKAN_PREFILL_MS_PER_TOKEN = 2.2
VULKAN_DECODE_MS = 10.0
NOMINAL_PREFILL_PER_S = 20_000.0
NOMINAL_DECODE_PER_S = 2_000.0
VULKAN_BUILD_MS = {
    "1": 163.0,
    "2": 14.0,
    "3": 2439.0,
    "4": 3753.0,
    "5": 5800.0,
    "6": 8500.0,
    "7": 13000.0,
    "8": 14833.0,
    "9-32": 3283.0,
    "33-64": 2881.0,
    "65+": 12988.0,
}


class Batch(NamedTuple):
    """One micro-batch of a prompt.

    Args:
        tokens: How many tokens it holds.
        shape: The shape it uses; empty where the model has no shapes.
        ms: What it costs once the shape is built.
        build_ms: What building the shape costs.
    """

    tokens: int
    shape: str
    ms: float
    build_ms: float


def _vulkan_class(tokens: int) -> str:
    for limit, name in ((8, str(tokens)), (32, "9-32"), (64, "33-64")):
        if tokens <= limit:
            return name
    return "65+"


class Costs:
    """A cost model.

    Args:
        model: `none`, `hrx` or `vulkan`.
        scale: Real seconds per second of `hrx` and `vulkan`.
        pps: Prompt tokens per second of `none`; 0 takes no time.
        tps: Generated tokens per second of `none`; 0 takes no time.
    """

    def __init__(self, model: str, scale: float, pps: float, tps: float) -> None:
        self.model = model
        self._prefill_scale = scale if model != "none" else float(pps > 0)
        self._decode_scale = scale if model != "none" else float(tps > 0)
        self._token_ms = 1000 / (pps or NOMINAL_PREFILL_PER_S)
        self._step_ms = 1000 / (tps or NOMINAL_DECODE_PER_S)
        if model == "hrx":
            self._token_ms, self._step_ms = HRX_PREFILL_MS_PER_TOKEN, HRX_DECODE_MS
        if model == "vulkan":
            self._token_ms, self._step_ms = VULKAN_PREFILL_MS_PER_TOKEN, VULKAN_DECODE_MS

    def batches(self, tokens: int, ubatch: int) -> list[Batch]:
        """Cut a prompt of so many new tokens into micro-batches: full ones, then the rest."""
        sizes = [ubatch] * (tokens // ubatch) + ([tokens % ubatch] if tokens % ubatch else [])
        return [self._batch(size) for size in sizes]

    def _batch(self, tokens: int) -> Batch:
        shape, build_ms = "", 0.0
        if self.model == "hrx":
            shape = f"prefill:{tokens}"
            build_ms = 140.0 + zlib.crc32(shape.encode()) % 51
        if self.model == "vulkan":
            shape = f"batch:{_vulkan_class(tokens)}"
            build_ms = VULKAN_BUILD_MS[_vulkan_class(tokens)]
        return Batch(tokens, shape, tokens * self._token_ms, build_ms)

    def decode_shape(self, sequences: int) -> str:
        """Name the shape of a step that so many sequences take together."""
        if self.model == "hrx":
            return f"decode:{sequences}"
        return f"batch:{_vulkan_class(sequences)}" if self.model == "vulkan" else ""

    def step_ms(self, shape: str, *, built: bool, met_unbuilt: bool) -> float:
        """Return what one decode step costs.

        Args:
            shape: Its shape.
            built: The shape was built before this step.
            met_unbuilt: This request is the one that met the shape unbuilt.
        """
        if self.model == "hrx" and met_unbuilt:
            return self._step_ms * (1.05 + zlib.crc32(shape.encode()) % 21 / 1000)
        if self.model == "vulkan" and not built:
            return self._step_ms + VULKAN_BUILD_MS[shape.removeprefix("batch:")]
        return self._step_ms

    def prefill_wall_s(self, ms: float) -> float:
        """Return the real seconds that so many milliseconds of prefill take."""
        return ms / 1000 * self._prefill_scale

    def decode_wall_s(self, ms: float) -> float:
        """Return the real seconds that so many milliseconds of decoding take."""
        return ms / 1000 * self._decode_scale
