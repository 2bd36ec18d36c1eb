"""The slots and the host cache of llama-server: who gets which slot, and what is reused.

Slot choice, reuse and checkpoints are those measured on llama-server b10068: the best common prefix
of more than a tenth of the new prompt, else the least recently used slot; a slot of which less than
half would be kept is saved to the host cache first; hybrid and sliding-window models go back to the
newest checkpoint (at prompt - 4 and prompt - 4 - n_ubatch) or to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Slot", "Slots", "common_prefix"]

CHECKPOINT_GAP = 4
HOST_BYTES_PER_TOKEN = 272
SWA_WINDOW = 512


def common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    """Return how many tokens two prompts share from the start."""
    for at, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return at
    return min(len(one), len(two))


class Slot:
    """One slot: the tokens whose state it holds, and what it is doing."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.checkpoints: list[int] = []
        self.busy = False
        self.task = -1
        self.used_at = -1
        self.prompt_done = 0
        self.prompt_cached = 0
        self.decoded = 0
        self.remaining = 0
        self.stream = False

    def reusable(self, prompt: Sequence[int], arch: str) -> int:
        """Return how many tokens of the prompt need no work; at least one always does."""
        shared = common_prefix(self.tokens, prompt)
        most = min(shared, len(prompt) - 1)
        if arch == "dense":
            return most
        ends_here = shared == len(self.tokens) < len(prompt)
        if ends_here and (arch == "hybrid" or len(prompt) > SWA_WINDOW):
            return shared
        return max((c for c in self.checkpoints if c <= most), default=0)

    def start(self, prompt: Sequence[int], reused: int, arch: str, ubatch: int) -> None:
        """Take over a prompt of which some tokens are reused."""
        gap = CHECKPOINT_GAP + (arch == "swa")
        marks = (len(prompt) - gap - ubatch, len(prompt) - gap)
        self.checkpoints = [c for c in self.checkpoints if c <= reused]
        self.checkpoints += [c for c in marks if c > reused]
        self.tokens = list(prompt)


class Slots:
    """All slots of a server.

    Args:
        count: How many.
        arch: `dense`, `swa` or `hybrid`.
        similarity: `--slot-prompt-similarity`.
        host_bytes: What the host cache may hold; 0 turns it off.
    """

    def __init__(self, count: int, arch: str, similarity: float, host_bytes: float) -> None:
        self.all = [Slot(number) for number in range(count)]
        self.arch = arch
        self._similarity = similarity
        self._host_bytes = host_bytes
        self._host: list[tuple[list[int], list[int]]] = []
        self._clock = 0

    def take(self, prompt: Sequence[int], pinned: int) -> tuple[Slot, str] | None:
        """Return a slot for a prompt, marked busy, and how it was chosen.

        Args:
            prompt: The token ids.
            pinned: `id_slot`; above the count it wraps, -1 leaves the choice to us.

        Returns:
            `None` while the slot asked for, or every slot, is busy.
        """
        if pinned >= 0:
            slot = self.all[pinned % len(self.all)]
            how = "selected slot by id"
            if slot.busy:
                return None
        else:
            idle = [slot for slot in self.all if not slot.busy]
            if not idle:
                return None
            best = max(idle, key=lambda s: common_prefix(s.tokens, prompt))
            shared = common_prefix(best.tokens, prompt)
            if shared > self._similarity * len(prompt) and self._similarity > 0:
                keep = shared / len(best.tokens)
                how = (
                    f"selected slot by LCP similarity, sim_best = {shared / len(prompt):.3f} "
                    f"(> {self._similarity:.3f} thold), f_keep = {keep:.3f}"
                )
                slot = best
            else:
                slot = min(idle, key=lambda s: (s.used_at, -s.number))
                how = f"selected slot by LRU, t_last = {slot.used_at}"
        slot.busy = True
        if pinned < 0:
            self._through_host(slot, prompt)
        return slot, how

    def _through_host(self, slot: Slot, prompt: Sequence[int]) -> None:
        """Save what the prompt displaces, and load what matches it better."""
        if not self._host_bytes:
            return
        shared = common_prefix(slot.tokens, prompt)
        if slot.tokens and 2 * shared < len(slot.tokens):
            held = [t for t in self._host if common_prefix(t[0], slot.tokens) < len(t[0])]
            self._host = [*held, (list(slot.tokens), list(slot.checkpoints))]
            while sum(len(t[0]) for t in self._host) * HOST_BYTES_PER_TOKEN > self._host_bytes:
                self._host.pop(0)
        best = max(self._host, key=lambda t: common_prefix(t[0], prompt), default=None)
        if best and common_prefix(best[0], prompt) > max(shared, len(best[0]) // 4):
            self._host.remove(best)
            slot.tokens, slot.checkpoints = list(best[0]), list(best[1])

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        self._clock += 1
        slot.used_at = self._clock
        slot.busy = False
