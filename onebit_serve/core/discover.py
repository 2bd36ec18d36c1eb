"""Place the borders of a device's classes by timing prompts: which length next, and when to stop.

The only thing that can be seen is whether a length was used for the first time: its first time
against its next ones. Each class shows that once in a process's life, so the order decides what
can be learnt:

1. **Growing**, from one token up. Everything warm is then below the next length, so a length that
   is warm belongs to a class that is known, and one that is cold is in a new class, whose border
   lies between it and the length before. The steps are small where requests after a cached prefix
   are, and sit on both sides of every power of two, where kernels change: there the border is
   exact.
2. **Shrinking**, from the widest gap to narrower ones: the middle of a gap between two classes is
   cold only if a third one hides there. One narrower than half a gap can stay unseen.

Where every length is cold, middles too, each is a class of its own (HRX); where nothing is cold,
the device builds nothing per length. A long prompt on a slow model may take so long that what it
builds drowns in the noise: such a length says nothing where it looks warm. It is left out of the
question whether every length is cold, and is a class of its own where the answer is no.

A class starts at the length at which it was seen to be cold.
Where its border could lie lower, the lengths between count as the class below; both are warmed by
their representatives, so nothing is missed.

The backend must be a fresh process that served no prompt: what it has warmed cannot be seen. The
lengths are sizes of micro-batches: the caller sends `Splitting.prompt_for(length)` tokens.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import msgspec

from onebit_serve.core.shapes import Classes

__all__ = ["Discovery", "Found", "Seen"]

STEPS = (*range(1, 10), 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384)
"""Growing lengths; later powers of two and the full micro-batch follow."""
SHORT = 12
"""So many of the steps, up to 17 tokens, tell what kind of device it is."""
SAMPLES = (33, 65, 129, 257)
"""What is still tried of the longer steps where none of the short ones was cold."""
SAMPLES_IF_COLD = (32, 128)
"""The same where all of them were: not so long that what is built drowns in the noise."""
MIDDLES_FOR_EXACT = 5
"""So many cold middles, and none warm, show that every length is a class of its own."""
BUILT_IN_TOKENS = 2
"""llama.cpp's own warm-up runs this many tokens, so that this length is warm from the start."""
MAX_PROBES = 60
FLOOR_S = 0.03
"""A first use that costs less is not told apart from chance (software Vulkan: 27 ms of noise)."""
NOISE_FLOOR = 0.02
NOISE_FACTOR = 5.0
BLIND_SHARE = 0.5
"""A length is blind where the least time that is told from noise is more than this share of what
first uses cost: one that is cold might look warm."""


class Seen(msgspec.Struct, frozen=True):
    """One length that was timed.

    Args:
        tokens: Its micro-batch.
        first_s: Seconds of the first request.
        again_s: Seconds of the ones right after it; two or more tell the noise.
    """

    tokens: int
    first_s: float
    again_s: tuple[float, ...]


class Found(msgspec.Struct, frozen=True):
    """What a device was found to have.

    Args:
        classes: Its classes.
        first_s: What the first use of each cold length cost beyond its warm time, by length.
        unsure: Borders that are only known to lie after the first and up to the second length.
        probes: How many lengths were timed.
    """

    classes: Classes
    first_s: dict[int, float]
    unsure: tuple[tuple[int, int], ...] = ()
    probes: int = 0


class Discovery(msgspec.Struct, frozen=True):
    """A discovery under way; `observe` returns the next one.

    Args:
        ubatch_tokens: The micro-batch: no longer length exists.
        seen: What was timed so far, in order.
    """

    ubatch_tokens: int = 512
    seen: tuple[Seen, ...] = ()

    def observe(self, tokens: int, first_s: float, *again_s: float) -> Discovery:
        """Return the discovery with one more length timed.

        Args:
            tokens: The length that `next` asked for.
            first_s: Seconds of its first request.
            again_s: Seconds of one or more requests right after it; two tell the noise.
        """
        return msgspec.structs.replace(self, seen=(*self.seen, Seen(tokens, first_s, again_s)))

    def next(self) -> int | None:
        """Return the length to time next; `None` when nothing more can be learnt."""
        if len(self.seen) >= MAX_PROBES:
            return None
        timed = {one.tokens for one in self.seen}
        left = (tokens for tokens in self._steps() if tokens not in timed)
        return next(left, None) or self._middle()

    def found(self) -> Found:
        """Return the conclusions so far."""
        cold = self._cold()
        if not cold:
            return Found(Classes(), {}, probes=len(self.seen))
        if self._middles_are_cold():
            every = Classes(starts=tuple(range(1, self.ubatch_tokens + 1)))
            return Found(every, cold, probes=len(self.seen))
        starts = {1, *cold, *self._blind(cold)}
        if {BUILT_IN_TOKENS - 1, BUILT_IN_TOKENS + 1} <= cold.keys():
            starts.add(BUILT_IN_TOKENS)
        unsure = tuple(gap for gap in self._gaps(cold) if gap[1] - gap[0] > 1)
        return Found(Classes(tuple(sorted(starts))), cold, unsure, len(self.seen))

    def _cold(self) -> dict[int, float]:
        """Return the lengths that were used for the first time, and what that cost in seconds."""
        least_s = self._least_s()
        costs = {one.tokens: one.first_s - min(one.again_s) for one in self.seen}
        return {tokens: cost for tokens, cost in costs.items() if cost > least_s[tokens]}

    def _least_s(self) -> dict[int, float]:
        """Return for each length how much longer its first time must be to be no chance."""
        spreads = [(max(one.again_s) - min(one.again_s)) / min(one.again_s) for one in self.seen]
        noise = max(NOISE_FLOOR, median(spreads)) if spreads else NOISE_FLOOR
        factor = NOISE_FACTOR * noise
        return {one.tokens: max(FLOOR_S, factor * min(one.again_s)) for one in self.seen}

    def _blind(self, cold: dict[int, float]) -> set[int]:
        """Return the lengths that look warm but may be cold."""
        cost = median(cold.values())
        least_s = self._least_s()
        return {n for n in least_s if n not in cold and least_s[n] > BLIND_SHARE * cost}

    def _steps(self) -> tuple[int, ...]:
        """Return the growing lengths, fewer of them once the short ones look all alike."""
        last = self.ubatch_tokens
        steps = {step for step in STEPS if step <= last}
        power = 512
        while power < last:
            steps |= {power, power + 1}
            power *= 2
        growing = sorted(steps | {last})
        short = growing[:SHORT]
        if len(self.seen) >= len(short):
            cold = self._cold().keys() & set(short)
            if not cold:
                growing = [*short, *(s for s in SAMPLES if short[-1] < s < last), last]
            elif cold >= set(short) - {BUILT_IN_TOKENS}:
                growing = [*short, *(s for s in SAMPLES_IF_COLD if short[-1] < s < last), last]
        return tuple(dict.fromkeys(growing))

    def _middles(self) -> tuple[Seen, ...]:
        steps = self._steps()
        return tuple(one for one in self.seen if one.tokens not in steps)

    def _middles_are_cold(self) -> bool:
        cold = self._cold()
        middles = self._middles()
        if not cold:
            return False
        unknown = {BUILT_IN_TOKENS, *self._blind(cold)}
        every = all(one.tokens in cold or one.tokens in unknown for one in self.seen)
        return every and (
            sum(one.tokens in cold for one in middles) >= MIDDLES_FOR_EXACT
            or not any(b - a > 1 for a, b in self._gaps(cold))
        )

    def _gaps(self, cold: dict[int, float]) -> list[tuple[int, int]]:
        """Return each cold length with the timed one below it: a border lies between them."""
        timed = sorted(one.tokens for one in self.seen)
        return [(a, b) for a, b in pairwise(timed) if b in cold]

    def _middle(self) -> int | None:
        """Return the middle of the widest gap in which another class could hide."""
        cold = self._cold()
        if self._middles_are_cold():
            return None
        warm_middles = {one.tokens for one in self._middles()} - cold.keys()
        open_gaps = [(a, b) for a, b in self._gaps(cold) if b - a > 1 and not {a, b} & warm_middles]
        if not open_gaps:
            return None
        low, high = max(open_gaps, key=lambda gap: gap[1] / gap[0])
        return (low + high) // 2
