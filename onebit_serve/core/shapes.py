"""What a backend builds once: micro-batch shapes, which of them a request uses, how likely each is.

llama-server cuts the tokens of a prompt that are not cached into batches and micro-batches. A
device that builds something per micro-batch size (a command program, a set of pipelines) pays for
it when that size comes for the first time. This module says which sizes a prompt of `n` tokens
has, which sizes share one class on a device, and how probable the classes are.

How a prompt is cut (llama-server b10068, measured on dense, sliding-window and hybrid models; the
same rule is in llama.cpp's `tools/server/server-context.cpp`):

- A batch ends after `n_batch` tokens; a batch is cut into micro-batches of `n_ubatch`, the last
  one taking the rest.
- Models whose state cannot be rolled back (sliding window, hybrid, recurrent) get checkpoints: a
  batch also ends when `4 + n_ubatch` tokens are left, and when 4 are left. 600 tokens become
  84 + 512 + 4 there, and 512 + 88 on a dense model.

All cuts count from the first token that is not cached or from the last one, so only the number of
tokens that are really prefilled matters (`timings.prompt_n`). A decode step of `k` sequences is a
micro-batch of `k` tokens. Whether a device tells it from a prompt of `k` tokens is not known for
all, so the two are kept apart: where they are one, the second costs a short request that is warm.

Not modelled: micro-batches in which a prompt shares room with the decode steps of other slots, and
the draft passes of speculative decoding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

__all__ = [
    "Classes",
    "Demand",
    "Histogram",
    "Shape",
    "ShapeModel",
    "Splitting",
    "classes_for",
    "demand",
    "prior",
    "shows_checkpoints",
    "smoothed",
]

VULKAN_STARTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 65)
"""First sizes of the classes of ggml's Vulkan backend (measured on software Vulkan)."""

EVERY_SIZE = 32
"""More classes in a row than this, each of one size, and there is one for every size."""
CHECKPOINT_TAIL_TOKENS = 4
PRIOR_WEIGHT = 20.0
"""How many requests the default expectation counts for; a few dozen real ones outweigh it."""
SMOOTHING_SHAPE = 4.0
"""Shape of the gamma prior by which a thin histogram leans on its neighbourhood."""


class Shape(msgspec.Struct, frozen=True, order=True):
    """One micro-batch: of a prefill, or of a decode step.

    Args:
        tokens: Tokens computed together.
        sequences: Sequences that decode together, each with one of the tokens; 0 is a prefill.
    """

    tokens: int
    sequences: int = 0

    def label(self) -> str:
        """Return the words that status and logs use."""
        return f"{self.sequences} sequences" if self.sequences else f"{self.tokens} tokens"


class Splitting(msgspec.Struct, frozen=True):
    """How a server cuts the tokens of a prompt.

    Args:
        ubatch_tokens: `--ubatch-size` (llama.cpp's default).
        batch_tokens: `--batch-size` (llama.cpp's default).
        checkpoints: Whether the server checkpoints this model: sliding window without
            `--swa-full`, hybrid or recurrent, and `--ctx-checkpoints` not 0. The progress of the
            first warm-up request tells (`shows_checkpoints`).
    """

    ubatch_tokens: int = 512
    batch_tokens: int = 2048
    checkpoints: bool = False

    def pieces(self, tokens: int) -> tuple[int, ...]:
        """Return the sizes of the micro-batches for `tokens` tokens that are not cached."""
        batch = max(1, self.batch_tokens)
        ubatch = max(1, min(self.ubatch_tokens, batch))
        stops: list[int] = []
        if self.checkpoints:
            tails = (min(batch, CHECKPOINT_TAIL_TOKENS + ubatch), CHECKPOINT_TAIL_TOKENS)
            stops = [tokens - tail for tail in tails if tokens > tail]
        sizes: list[int] = []
        at = 0
        while at < tokens:
            end = min([at + batch, tokens, *(stop for stop in stops if stop > at)])
            whole, rest = divmod(end - at, ubatch)
            sizes += [ubatch] * whole + ([rest] if rest else [])
            at = end
        return tuple(sizes)

    def prompt_for(self, tokens: int) -> int:
        """Return a short prompt that has a micro-batch of exactly `tokens` tokens."""
        most = min(self.batch_tokens, CHECKPOINT_TAIL_TOKENS + self.ubatch_tokens)
        for tail in (0, CHECKPOINT_TAIL_TOKENS, most):
            if tokens in self.pieces(tokens + tail):
                return tokens + tail
        return tokens + most + self.batch_tokens


class Classes(msgspec.Struct, frozen=True):
    """Which micro-batch sizes share what a device builds.

    Args:
        starts: The smallest size of every class, ascending; the last class has no end. Empty: the
            device builds nothing per size.
        decode: Whether the number of sequences decoded together matters as well.
    """

    starts: tuple[int, ...] = ()
    decode: bool = True

    def representative(self, tokens: int) -> int | None:
        """Return the size that stands for the class of `tokens`; `None` where nothing is built."""
        index = bisect_right(self.starts, tokens) - 1
        return self.starts[index] if index >= 0 else None

    def upto(self, ubatch_tokens: int) -> Classes:
        """Return the same device at another micro-batch than the one it was discovered with.

        Where every size is a class of its own, so are those that were too long to be seen.
        """
        if len(self.starts) > EVERY_SIZE and self.starts[-1] == len(self.starts):
            every = tuple(range(1, ubatch_tokens + 1))
            return msgspec.structs.replace(self, starts=every)
        starts = tuple(start for start in self.starts if start <= ubatch_tokens)
        return msgspec.structs.replace(self, starts=starts)


def shows_checkpoints(total_tokens: int, processed: Iterable[int]) -> bool | None:
    """Tell from the progress of one prompt whether the server checkpoints its model.

    With `return_progress` a streamed reply says after each batch how far the prompt is; only where
    there are checkpoints does a batch end four tokens before the end (llama-server b10068,
    measured on dense, sliding-window, hybrid and recurrent models). The metadata of the file would
    not do: not every model with a window uses it.

    Args:
        total_tokens: `prompt_progress.total`.
        processed: Every `prompt_progress.processed` that came.

    Returns:
        `None` where this prompt cannot tell.
    """
    seen = set(processed)
    if total_tokens <= CHECKPOINT_TAIL_TOKENS + 1 or not seen - {0}:
        return None
    return total_tokens - CHECKPOINT_TAIL_TOKENS in seen


def classes_for(device: str, ubatch_tokens: int = 512) -> Classes:
    """Return what is assumed of a device before its own classes were discovered.

    Args:
        device: The word of log lines or a listed name (`hrx`, `HRX0`, `Vulkan0`, `CUDA0`, `cpu`).
        ubatch_tokens: The micro-batch. HRX compiles for every token count (its documentation);
            ggml's Vulkan backend has the measured classes; the CPU builds nothing (measured). For
            every other device Vulkan's are taken: ggml's GPU backends all choose other kernels
            for few columns than for many, and a class too many costs one short request.
    """
    name = device.lower()
    if name in {"cpu", "none"}:
        return Classes(starts=(), decode=False)
    if name.startswith("hrx"):
        return Classes(starts=tuple(range(1, ubatch_tokens + 1)))
    return Classes(starts=tuple(s for s in VULKAN_STARTS if s <= ubatch_tokens))


class ShapeModel(msgspec.Struct, frozen=True):
    """One backend: how it cuts prompts, what its device builds, how many sequences it decodes.

    Args:
        splitting: How prompts are cut.
        classes: The classes of the device.
        sequences: Slots that decode together (`total_slots` of `/props`).
        context_tokens: Tokens that one slot holds; 0 is unknown.
    """

    splitting: Splitting = Splitting()
    classes: Classes = Classes()
    sequences: int = 1
    context_tokens: int = 0

    def prefill(self, tokens: int) -> frozenset[Shape]:
        """Return the classes that a prompt with `tokens` tokens to prefill uses."""
        found = {self.classes.representative(size) for size in set(self.splitting.pieces(tokens))}
        return frozenset(Shape(tokens=size) for size in found if size is not None)

    def decode(self, sequences: int) -> frozenset[Shape]:
        """Return the classes of the steps on the way to `sequences` sequences decoding together.

        Sequences come and go one by one, so that a step of four has steps of three, two and one
        around it.
        """
        if not self.classes.starts:
            return frozenset()
        most = min(sequences, self.sequences) if self.classes.decode else 1
        return frozenset(Shape(tokens=k, sequences=k) for k in range(1, most + 1))

    def full_set(self) -> tuple[Shape, ...]:
        """Return every class that any prompt, and any number of slots, can use."""
        ubatch = min(self.splitting.ubatch_tokens, self.splitting.batch_tokens)
        most = min(ubatch, self.context_tokens) if self.context_tokens else ubatch
        shapes = {Shape(tokens=size) for size in self.classes.starts if size <= most}
        return tuple(sorted(shapes | self.decode(self.sequences)))


class Histogram(msgspec.Struct, frozen=True):
    """What traffic was: weights by size, decayed, so that old requests fade.

    Args:
        prefill: Tokens prefilled (`timings.prompt_n`) -> weight.
        decode: Sequences decoded together -> weight.
    """

    prefill: dict[int, float] = {}
    decode: dict[int, float] = {}


class Demand(msgspec.Struct, frozen=True):
    """How likely it is that a request needs a set of shapes.

    Args:
        rows: Sets of shapes with the share of requests that need exactly these to be warm. The
            shares of prefills add up to 1; those of decode steps are counted beside them.
    """

    rows: tuple[tuple[frozenset[Shape], float], ...] = ()

    def mass(self, warm: Iterable[Shape]) -> float:
        """Return the weight of all rows that find everything they need warm."""
        have = frozenset(warm)
        return sum(weight for need, weight in self.rows if need <= have)


def prior(model: ShapeModel) -> Histogram:
    """Return what is expected where no traffic was seen yet.

    After a warmed prefix a request prefills only its own few tokens: 1 to 8, and 16, 48 and 128 as
    steps up to a longer question. The rest are first prompts of a whole micro-batch and more, which
    weighs so much since every longer prompt has it, and on slow devices no idle time fits it.
    """
    ubatch = model.splitting.ubatch_tokens
    weights: dict[int, float] = defaultdict(float)
    for tokens in range(1, 9):
        weights[tokens] += 1.0
    for tokens, weight in ((16, 3.0), (48, 3.0), (128, 2.0), (ubatch, 6.0), (2 * ubatch, 1.0)):
        weights[tokens] += weight
    return Histogram(
        prefill=dict(weights),
        decode={k: 1.0 / k for k in range(1, model.sequences + 1)},
    )


def smoothed(weights: Mapping[int, float]) -> dict[int, float]:
    """Return a histogram in which thin counts lean on their neighbourhood.

    A prompt of 37 tokens makes one of 38 likely, while a size that came forty times (an agent's
    fixed prompt) stands for itself. Each size gets the mean of a gamma-Poisson model whose prior
    is the average within about a tenth around it; where counts are large they stay as they are.
    """
    window: dict[int, float] = defaultdict(float)
    for tokens, weight in weights.items():
        reach = _reach(tokens)
        share = weight / (2 * reach + 1)
        for near in range(tokens - reach, tokens + reach + 1):
            window[max(1, near)] += share
    shape = SMOOTHING_SHAPE
    return {
        tokens: (weights.get(tokens, 0.0) + shape) * mean / (mean + shape)
        for tokens, mean in window.items()
    }


def _reach(tokens: int) -> int:
    # Short prompts are classes of their own on every device that has classes: they stay apart.
    return min(64, tokens // 10)


def demand(model: ShapeModel, histogram: Histogram | None = None) -> Demand:
    """Return the demand that past traffic and the default expectation make likely.

    Args:
        model: The backend.
        histogram: What `live.history` kept; `None` where nothing was kept.
    """
    past = histogram if histogram is not None else Histogram()
    expected = prior(model)
    rows: dict[frozenset[Shape], float] = defaultdict(float)
    prefill = _mixed(smoothed(past.prefill), sum(past.prefill.values()), expected.prefill)
    for tokens, share in prefill.items():
        rows[model.prefill(tokens)] += share
    decode = _mixed(past.decode, sum(past.decode.values()), expected.decode)
    for sequences, share in decode.items():
        if sequences > 1:  # the first warm-up request has decoded alone
            rows[model.decode(sequences)] += share
    rows.pop(frozenset(), None)
    ordered = sorted(rows.items(), key=lambda row: (-row[1], sorted(row[0])))
    return Demand(rows=tuple(ordered))


def _mixed(
    past: Mapping[int, float], seen: float, expected: Mapping[int, float]
) -> dict[int, float]:
    """Return shares that add up to 1: `past` counts for the requests seen, `expected` for a few."""
    mixed: dict[int, float] = defaultdict(float)
    for weights, worth in ((past, seen), (expected, PRIOR_WEIGHT)):
        total = sum(weights.values())
        for size, weight in weights.items():
            if total > 0:
                mixed[size] += worth * weight / total
    whole = sum(mixed.values())
    return {size: weight / whole for size, weight in mixed.items()} if whole > 0 else {}
