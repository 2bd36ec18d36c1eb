"""Puts warm prompts into a backend's prompt cache, and asks the backend whether they are there.

    warm     render with the backend's template -> cut -> plan slots -> restore or prefill -> prove
    repair   the same for what client traffic or a sleep took, when nobody is waiting
    clear    empty every slot

One object for one backend; all it knows of the world is `request`, so that it does not matter how
the bytes get there. What the supervisor needs to know is in `standings` at any moment, also when
a warm-up is cancelled half way.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec
import trio

from onebit_serve.core import slots as slot_plan
from onebit_serve.core import warm_prompts as prompts
from onebit_serve.core.slots import Placement, Room
from onebit_serve.core.warm_prompts import Entry, Standing
from onebit_serve.live.prompt_backend import PromptBackend, Props, RefusedError, Request
from onebit_serve.live.saves import Saves

__all__ = ["PromptWarmer"]

# Renderings this far apart differ when a template writes seconds.
_CLOCK_GAP_S = 1.1
# Repairs in a row after which an entry that none of them could prove is left alone.
_TRIES = 3


class PromptWarmer:
    """Keeps the warm prompts of one backend.

    Args:
        request: Sends one request to the backend and returns the whole reply; raises `GoneError`.
        entries: The warm prompts.
        concurrency: Entries rendered or prefilled at a time; 0 is one for each slot.
        host_bytes: Limit of the backend's host cache in bytes, 0 where it has none, `None` for no
            limit; llama-server's default is 8192 MiB (`--cache-ram`).
        token_bytes: Memory of one cached token in bytes, `None` where unknown.
        saves: Where slots are kept across restarts; `None` for nowhere.
        say: Takes one line for the user.
    """

    def __init__(
        self,
        request: Request,
        entries: Sequence[Entry],
        *,
        concurrency: int = 0,
        host_bytes: int | None = 8192 << 20,
        token_bytes: int | None = None,
        saves: Saves | None = None,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.entries = tuple(entries)
        self.standings: tuple[Standing, ...] = tuple(Standing(e.label) for e in entries)
        self._backend = PromptBackend(request, saves)
        # The slots that each entry is planned to have, once there is a plan, and how many of them
        # it has not got yet.
        self._homes: tuple[tuple[int, ...], ...] | None = None
        self._missing = [0] * len(self.entries)
        self._tries = [0] * len(self.entries)  # repairs in a row that proved nothing
        self._concurrency = concurrency
        self._host_bytes = host_bytes
        self._token_bytes = token_bytes
        self._saves = saves
        self._say = say

    def __repr__(self) -> str:
        sums = prompts.totals(self.standings)
        return f"<PromptWarmer {sums.entry_count} of {len(self.entries)} proven>"

    # ----------------------------------------------------------------- what supervisors call

    async def warm(self, limit_s: float = math.inf) -> None:
        """Warm every entry, prove each, and say the line that counts the proven ones.

        The counts of hits go on; everything else in `standings` starts anew.

        Args:
            limit_s: Seconds it may take; what is not warm by then is due for repair.
        """
        started_s = trio.current_time()
        before = self.standings
        self.standings = tuple(Standing(e.label).carried(b) for e, b in self._pairs(before))
        self._tries = [0] * len(self.entries)
        try:
            props = await self._backend.look()
        except RefusedError as refusal:
            for index in range(len(self.entries)):
                self._refuse(index, str(refusal), again=True)
        else:
            with trio.move_on_after(limit_s) as scope:
                await self._warm_all(props)
            if scope.cancelled_caught:
                self._leave_the_rest(f"not reached within {limit_s:g} s (deadline_s)")
        for standing in self.standings:
            if not standing.proven:
                self._say(f"warm prompt {standing.label} is not warm: {standing.why}")
        self._say(prompts.done_line(self.standings, trio.current_time() - started_s))

    async def repair(self) -> int:
        """Warm again what is due, and return how many entries that were.

        It costs no cached conversation where there is a host cache: what it displaces is saved.
        """
        due = self.due
        if not due:
            return 0
        try:
            props = await self._backend.look()
        except RefusedError as refusal:
            for index in due:
                self._refuse(index, str(refusal))
                self._count_try(index)
            return len(due)
        if self._homes is None:  # the time was over before there was a plan
            for index in due:
                self._update(index, why="")
            await self._warm_all(props)
            return len(due)
        for index in due:
            await self._repair_one(index, self._homes[index], props)
            self._count_try(index)
        return len(due)

    async def clear(self) -> bool:
        """Empty every slot, busy ones when their request ends, and return whether all are empty."""
        try:
            props = await self._backend.look()
        except RefusedError as refusal:
            self._say(f"the prompt cache was not cleared: {refusal}")
            return False
        refused: list[str] = []

        async def empty(slot: int) -> None:
            try:
                await self._backend.erase(slot)
            except RefusedError as refusal:
                refused.append(str(refusal))

        async with trio.open_nursery() as nursery:  # a busy slot does not hold up the others
            for slot in range(props.slots):
                nursery.start_soon(empty, slot)
        if refused:
            self._say(f"the prompt cache was not cleared: {refused[0]}")
        return not refused

    def lost_all(self) -> None:
        """Note that the backend's cache is empty: all that was proven is due, in all its slots."""
        for index, standing in enumerate(self.standings):
            if standing.proven:
                self._update(index, evicted=True)
                self._missing[index] = len(self._homes[index]) if self._homes else 0

    def give_up(self, index: int, why: str) -> None:
        """Repair an entry no more until the next warm-up."""
        self._update(index, proven=False, evicted=False, why=why)

    def used(self, index: int, cached_tokens: int) -> None:
        """Count a client's request of an entry by what the backend says it reused."""
        self._set(index, self.standings[index].used(cached_tokens))

    @property
    def due(self) -> list[int]:
        """Which entries are due for repair: gone, not proven, or not yet in all slots planned."""
        return [
            index
            for index, one in enumerate(self.standings)
            if one.evicted or (one.proven and self._missing[index])
        ]

    def _leave_the_rest(self, why: str) -> None:
        for index, standing in enumerate(self.standings):
            if not standing.proven and not standing.why:
                self._update(index, evicted=True, why=why)

    def _count_try(self, index: int) -> None:
        """Note that a repair is over; what it did not prove is due again, but not for ever."""
        if self.standings[index].proven:
            self._tries[index] = 0
            return
        self._tries[index] += 1
        self._update(index, evicted=self._tries[index] < _TRIES)

    # -------------------------------------------------------------------------- the whole

    async def _warm_all(self, props: Props) -> None:
        self._homes = None
        self._missing = [0] * len(self.entries)
        limit = trio.CapacityLimiter(self._concurrency or props.slots)
        prefixes: list[tuple[int, ...]] = [()] * len(self.entries)

        async def render(index: int) -> None:
            async with limit:
                try:
                    prefixes[index] = await self._prefix(self.entries[index], props)
                except RefusedError as refusal:
                    self._refuse(index, str(refusal))

        async with trio.open_nursery() as nursery:
            for index in range(len(self.entries)):
                nursery.start_soon(render, index)

        # Entries that render alike (a template without a thinking switch, say) are one prompt.
        first_of = {p: prefixes.index(p) for p in prefixes if p}
        wanted = sorted(first_of.values())
        room = Room(props.slots, props.slot_tokens, self._host_bytes, self._token_bytes)
        plan = slot_plan.plan_slots([prefixes[i] for i in wanted], room)
        placed = {wanted[p.entry]: p for p in plan.placements}
        for index, place in placed.items():
            if place.refused:
                self._refuse(index, place.refused, tokens=len(prefixes[index]))
        if plan.host_tokens:
            size = "" if plan.host_bytes is None else f", about {plan.host_bytes >> 20} MiB,"
            line = (
                f"warm prompts need more than {props.slots} slots: "
                f"{plan.host_tokens} tokens{size} go through the host cache"
            )
            if self._host_bytes is not None and (plan.host_bytes or 0) > self._host_bytes:
                line += f" of {self._host_bytes >> 20} MiB (--cache-ram), which may not keep all"
            self._say(line)
        self._homes = tuple(placed[first_of[p]].slots if p else () for p in prefixes)
        homes = {i: p for i, p in placed.items() if not p.refused}
        for index, place in homes.items():
            self._missing[index] = len(place.slots)
        if plan.pinned:
            await self._warm_pinned(homes, prefixes, limit)
        else:
            await self._warm_through_host(homes, prefixes)
        for index, prefix in enumerate(prefixes):
            if prefix and first_of[prefix] != index:
                same = self.standings[first_of[prefix]]
                own = self.standings[index]
                twin = msgspec.structs.replace(same, label=own.label, same_as=same.label)
                self._set(index, twin.carried(own))

    async def _warm_pinned(
        self,
        homes: dict[int, Placement],
        prefixes: list[tuple[int, ...]],
        limit: trio.CapacityLimiter,
    ) -> None:
        async def one(index: int, place: Placement) -> None:
            async with limit:
                await self._fill(index, prefixes[index], place.slots[:1])
            if len(place.slots) > 1 and self.standings[index].tokens:
                async with trio.open_nursery() as more:
                    for slot in place.slots[1:]:
                        more.start_soon(self._fill_limited, index, prefixes[index], slot, limit)

        async with trio.open_nursery() as nursery:
            for index, place in homes.items():
                nursery.start_soon(one, index, place)

    async def _fill_limited(
        self, index: int, prefix: tuple[int, ...], slot: int, limit: trio.CapacityLimiter
    ) -> None:
        async with limit:
            await self._fill(index, prefix, (slot,))

    async def _warm_through_host(
        self, homes: dict[int, Placement], prefixes: list[tuple[int, ...]]
    ) -> None:
        """Warm one after the other, the first of the file last: the last ones are kept longest.

        What needs a slot of its own comes after all that pass through, which would push it out.
        """
        passing = [i for i in reversed(homes) if not homes[i].slots]
        for index in passing:
            await self._fill(index, prefixes[index], ())
        # What was put there last is there for certain. Once one is gone, so are those before it,
        # and to ask for them would push out what is still there.
        gone = ""
        for index in reversed(passing):
            standing = self.standings[index]
            if gone:
                self._update(index, source="none", why=standing.why or gone, evicted=False)
            elif not standing.why:
                await self._twice(index, prefixes[index], self._prove, ())
                now = self.standings[index]
                if not now.proven and 2 * now.reused_tokens < now.tokens:
                    gone = f"the prompt cache has lost {now.label}, which was put there later"
        for number, index in enumerate(i for i in homes if homes[i].slots):
            slot = await self._backend.make_room(number)
            await self._fill(index, prefixes[index], (slot,))

    # --------------------------------------------------------------------------- one entry

    async def _repair_one(self, index: int, homes: tuple[int, ...], props: Props) -> None:
        try:
            prefix = await self._prefix(self.entries[index], props)
            if self.standings[index].evicted:
                self._update(index, slots=(), source="none", proven=False, why="")
            if not homes:
                await self._fill(index, prefix, ())
                if not self.standings[index].why:
                    await self._twice(index, prefix, self._prove, ())
            # What a client found gone comes back once; that leaves most to the conversations.
            for _ in range(max(1, self._missing[index]) if homes else 0):
                slot = await self._slot_to_take(index, homes, props)
                await self._fill(index, prefix, (slot,))
                if self.standings[index].why:
                    break
        except RefusedError as refusal:
            self._refuse(index, str(refusal))

    async def _slot_to_take(self, index: int, homes: tuple[int, ...], props: Props) -> int:
        if self._host_bytes != 0 or len(homes) == props.slots:
            return await self._backend.make_room(0)
        # Nothing keeps what is displaced, so it must not be another warm prompt.
        got = self.standings[index].slots
        return next((slot for slot in homes if slot not in got), homes[0])

    async def _fill(self, index: int, prefix: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Put one prefix into a slot; with a slot given, prove it there too."""
        if await self._twice(index, prefix, self._put, slots) and slots:
            self._missing[index] = max(0, self._missing[index] - 1)

    async def _twice(
        self,
        index: int,
        prefix: tuple[int, ...],
        work: Callable[[int, tuple[int, ...], tuple[int, ...]], Awaitable[None]],
        slots: tuple[int, ...],
    ) -> bool:
        """Do something for an entry, once more where it fails: one failure is often chance."""
        with contextlib.suppress(RefusedError):
            await work(index, prefix, slots)
            return True
        try:
            await work(index, prefix, slots)
        except RefusedError as refusal:
            self._refuse(index, str(refusal), tokens=len(prefix), again=True)
            return False
        return True

    async def _put(self, index: int, prefix: tuple[int, ...], slots: tuple[int, ...]) -> None:
        slot = slots[0] if slots else -1
        restored = bool(slots) and await self._backend.restore(prefix, slot)
        if not restored:
            await self._backend.complete(prefix, slot)
            if slots:
                await self._backend.save(prefix, slot)
        before = self.standings[index]
        self._update(
            index,
            tokens=len(prefix),
            slots=tuple(sorted({*before.slots, *slots})),
            # Further slots may take what the first one saved.
            source="disk" if restored and before.source != "prefill" else "prefill",
        )
        if slots:
            await self._prove(index, prefix, slots)

    async def _prove(self, index: int, prefix: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Ask as a client would, and believe only the backend's own count."""
        slot = slots[0] if slots else -1
        entry = self.entries[index]
        cached = await self._backend.complete(
            await self._asked(entry, prompts.PROOF_TEXTS[0]), slot
        )
        verdict = prompts.judge(len(prefix), [cached])
        if not verdict.proven and slots:
            # A restored sliding-window cache is worth nothing to its first request and all to
            # its second (llama-server b10068): that first request was this one, then.
            if self._saves and self.standings[index].source == "disk":
                self._saves.useless(self._saves.path(prefix))
            again = await self._asked(entry, prompts.PROOF_TEXTS[1])
            verdict = prompts.judge(len(prefix), [await self._backend.complete(again, slot)])
            self._update(index, source="prefill")
        if 0 < verdict.reused_tokens < len(prefix):
            # A sliding window larger than the prefix: each request that differs leaves one
            # token less to the next, so the proof's own loss is made good.
            await self._backend.complete(prefix, slot)
        # Of several slots the worst counts. Client traffic may have spoilt the proof, so that it
        # is tried again; in the host cache that would push others out.
        before = self.standings[index]
        proven = verdict.proven and not before.why
        self._update(
            index,
            proven=proven,
            reused_tokens=min(verdict.reused_tokens, before.reused_tokens)
            if before.proven or before.why
            else verdict.reused_tokens,
            why=before.why or verdict.why,
            evicted=bool(slots) and not proven,
        )

    async def _prefix(self, entry: Entry, props: Props) -> tuple[int, ...]:
        """Render, tokenise and cut one entry."""
        try:
            texts = [await self._backend.render(entry, probe) for probe in prompts.PROBES]
        except RefusedError:
            if not entry.open_ended:
                raise
            # A template whose roles must alternate takes no second user's message in a row, so
            # that nothing but this very request can be asked.
            texts = [await self._backend.render(entry, None)]
        else:
            if len(set(texts)) == 1:
                raise RefusedError("the template ignores the user's text")
        if props.template and prompts.changes_within_a_day(props.template):
            raise RefusedError("the template writes the time, so no beginning stays the same")
        if prompts.names_time(props.template):
            await trio.sleep(_CLOCK_GAP_S)
            if await self._rendered_as_asked(entry, prompts.PROBES[0]) != texts[0]:
                raise RefusedError("the template writes the time, so no beginning stays the same")
        if entry.open_ended:
            with contextlib.suppress(RefusedError):
                texts.append(await self._backend.render(entry, None))
        distinct = dict.fromkeys(texts)
        return prompts.common_prefix([await self._backend.tokens(text) for text in distinct])

    async def _asked(self, entry: Entry, text: str) -> list[int]:
        return await self._backend.tokens(await self._rendered_as_asked(entry, text))

    async def _rendered_as_asked(self, entry: Entry, text: str) -> str:
        """Render a user's text after an entry, or the entry alone where only that can be asked."""
        try:
            return await self._backend.render(entry, text)
        except RefusedError:
            if not entry.open_ended:
                raise
            return await self._backend.render(entry, None)

    # ------------------------------------------------------------------------------ small

    def _refuse(self, index: int, why: str, *, tokens: int = 0, again: bool = False) -> None:
        """Note why an entry is not warm, and whether it is worth another try while idle."""
        gone = {"proven": False, "reused_tokens": 0, "source": "none", "evicted": again}
        self._update(index, tokens=tokens, why=why, **gone)

    def _update(self, index: int, **changes: Any) -> None:
        self._set(index, msgspec.structs.replace(self.standings[index], **changes))

    def _set(self, index: int, standing: Standing) -> None:
        self.standings = (*self.standings[:index], standing, *self.standings[index + 1 :])

    def _pairs(self, before: Iterable[Standing]) -> Iterable[tuple[Entry, Standing]]:
        return zip(self.entries, before, strict=True)
