"""Puts warm prompts into a backend's prompt cache, and asks the backend whether they are there.

    warm     render with the backend's template -> cut -> plan slots -> restore or prefill -> prove
    repair   the same for what client traffic pushed out, when nobody is waiting
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
from onebit_serve.core.http import Reply
from onebit_serve.core.slots import Placement, Room
from onebit_serve.core.warm_prompts import Entry, Standing
from onebit_serve.live.saves import Saves
from onebit_serve.live.upstream import GoneError

__all__ = ["PromptWarmer", "Request"]

Request = Callable[[str, str, bytes], Awaitable[Reply]]

_OK = 200
_NOT_FOUND = 404
_NOT_SUPPORTED = 501
# Renderings this far apart differ when a template writes seconds.
_CLOCK_GAP_S = 1.1
# Makes a model produce text that the backend can parse, whatever its weights (llama-server b10068
# answers 500 to meaningless output).
_GRAMMAR = "root ::= [a-z]*"
_MEANINGLESS = b"does not match the expected"
_REASON_CHARACTERS = 200


class _RefusedError(Exception):
    """Why one entry cannot be warmed; its text becomes the entry's `why`."""


class _Backend(msgspec.Struct, frozen=True):
    slots: int
    slot_tokens: int
    template: str | None


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
        self._send = request
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
        try:
            backend = await self._look()
        except _RefusedError as refusal:
            for index in range(len(self.entries)):
                self._refuse(index, str(refusal))
        else:
            with trio.move_on_after(limit_s) as scope:
                await self._warm_all(backend)
            if scope.cancelled_caught:
                self._leave_the_rest(f"not reached within {limit_s:g} s (deadline_s)")
        for standing in self.standings:
            if not standing.proven:
                self._say(f"warm prompt {standing.label} is not warm: {standing.why}")
        self._say(prompts.done_line(self.standings, trio.current_time() - started_s))

    async def repair(self) -> int:
        """Warm again what client traffic pushed out, and return how many entries that were.

        It costs no cached conversation where there is a host cache: what it displaces is saved.
        """
        lost = [i for i, s in enumerate(self.standings) if s.evicted]
        for index in lost:
            pinned = bool(self.standings[index].slots)
            try:
                prefix = await self._prefix(self.entries[index], await self._look())
                self._update(index, slots=(), source="none", proven=False, why="")
                if pinned:
                    slot = await self._make_room(0)
                    await self._fill(index, prefix, (slot,))
                else:
                    await self._fill(index, prefix, ())
                    await self._prove(index, prefix, ())
            except _RefusedError as refusal:
                self._refuse(index, str(refusal))
        return len(lost)

    async def clear(self) -> bool:
        """Empty every slot, busy ones when their request ends, and return whether all are empty."""
        try:
            backend = await self._look()
        except _RefusedError as refusal:
            self._say(f"the prompt cache was not cleared: {refusal}")
            return False
        refused: list[str] = []

        async def empty(slot: int) -> None:
            try:
                reply = await self._request("POST", f"/slots/{slot}?action=erase", b"{}")
                if reply.status in (_NOT_FOUND, _NOT_SUPPORTED):
                    # No erase without a place for saved slots; one foreign token does the same.
                    await self._complete(await self._tokens(prompts.FILLERS[0]), slot, keep=False)
            except _RefusedError as refusal:
                refused.append(str(refusal))

        async with trio.open_nursery() as nursery:  # a busy slot does not hold up the others
            for slot in range(backend.slots):
                nursery.start_soon(empty, slot)
        if refused:
            self._say(f"the prompt cache was not cleared: {refused[0]}")
        return not refused

    def lost_all(self) -> None:
        """Note that the backend's cache is empty: every entry that was proven is due for repair."""
        for index, standing in enumerate(self.standings):
            if standing.proven:
                self._update(index, evicted=True)

    def give_up(self, index: int, why: str) -> None:
        """Repair an entry no more until the next warm-up."""
        self._update(index, proven=False, evicted=False, why=why)

    def used(self, index: int, cached_tokens: int) -> None:
        """Count a client's request of an entry by what the backend says it reused."""
        self._set(index, self.standings[index].used(cached_tokens))

    @property
    def repair_due(self) -> bool:
        """Whether an entry was found gone since the last warm-up."""
        return any(s.evicted for s in self.standings)

    def _leave_the_rest(self, why: str) -> None:
        for index, standing in enumerate(self.standings):
            if not standing.proven and not standing.why:
                self._update(index, evicted=True, why=why)

    # -------------------------------------------------------------------------- the whole

    async def _warm_all(self, backend: _Backend) -> None:
        limit = trio.CapacityLimiter(self._concurrency or backend.slots)
        prefixes: list[tuple[int, ...]] = [()] * len(self.entries)

        async def render(index: int) -> None:
            async with limit:
                try:
                    prefixes[index] = await self._prefix(self.entries[index], backend)
                except _RefusedError as refusal:
                    self._refuse(index, str(refusal))

        async with trio.open_nursery() as nursery:
            for index in range(len(self.entries)):
                nursery.start_soon(render, index)

        # Entries that render alike (a template without a thinking switch, say) are one prompt.
        first_of = {p: prefixes.index(p) for p in prefixes if p}
        wanted = sorted(first_of.values())
        room = Room(backend.slots, backend.slot_tokens, self._host_bytes, self._token_bytes)
        plan = slot_plan.plan_slots([prefixes[i] for i in wanted], room)
        placed = {wanted[p.entry]: p for p in plan.placements}
        for index, place in placed.items():
            if place.refused:
                self._refuse(index, place.refused, tokens=len(prefixes[index]))
        if plan.host_tokens:
            size = "" if plan.host_bytes is None else f", about {plan.host_bytes >> 20} MiB"
            self._say(
                f"warm prompts need more than {backend.slots} slots: "
                f"{plan.host_tokens} tokens{size} go through the host cache"
            )
        homes = {i: p for i, p in placed.items() if not p.refused}
        if plan.pinned:
            await self._warm_pinned(homes, prefixes, limit)
        else:
            await self._warm_through_host(homes, prefixes)
        for index, prefix in enumerate(prefixes):
            if prefix and first_of[prefix] != index:
                same = self.standings[first_of[prefix]]
                own = self.standings[index]
                self._set(index, msgspec.structs.replace(same, label=own.label).carried(own))

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
        """Warm one after the other, the first of the file last: the last ones stay in the slots.

        What needs a slot of its own comes after all that pass through, which would push it out.
        """
        passing = [i for i in reversed(homes) if not homes[i].slots]
        for index in passing:
            await self._fill(index, prefixes[index], ())
        for index in passing:
            await self._prove(index, prefixes[index], ())
        for number, index in enumerate(i for i in homes if homes[i].slots):
            slot = await self._make_room(number)
            await self._fill(index, prefixes[index], (slot,))

    # --------------------------------------------------------------------------- one entry

    async def _fill(self, index: int, prefix: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Put one prefix into a slot; with a slot given, prove it there too."""
        slot = slots[0] if slots else -1
        try:
            restored = bool(slots) and await self._restore(prefix, slot)
            if not restored:
                await self._complete(prefix, slot)
                if slots:
                    await self._save(prefix, slot)
        except _RefusedError as refusal:
            self._refuse(index, str(refusal), tokens=len(prefix))
            return
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
        try:
            cached = await self._complete(await self._asked(entry, prompts.PROOF_TEXTS[0]), slot)
            verdict = prompts.judge(len(prefix), [cached])
            if not verdict.proven:
                # A restored sliding-window cache is worth nothing to its first request and all to
                # its second (llama-server b10068): that first request was this one, then.
                if self._saves and self.standings[index].source == "disk":
                    self._saves.useless(self._saves.path(prefix))
                again = await self._asked(entry, prompts.PROOF_TEXTS[1])
                verdict = prompts.judge(len(prefix), [await self._complete(again, slot)])
                self._update(index, source="prefill")
            if 0 < verdict.reused_tokens < len(prefix):
                # A sliding window larger than the prefix: each request that differs leaves one
                # token less to the next, so the proof's own loss is made good.
                await self._complete(prefix, slot)
        except _RefusedError as refusal:
            self._refuse(index, str(refusal), tokens=len(prefix))
            return
        # Of several slots the worst counts.
        before = self.standings[index]
        self._update(
            index,
            proven=verdict.proven and not before.why,
            reused_tokens=min(verdict.reused_tokens, before.reused_tokens)
            if before.proven or before.why
            else verdict.reused_tokens,
            why=before.why or verdict.why,
            evicted=False,
        )

    async def _prefix(self, entry: Entry, backend: _Backend) -> tuple[int, ...]:
        """Render, tokenise and cut one entry."""
        texts = [await self._render(entry, probe) for probe in prompts.PROBES]
        if len(set(texts)) == 1:
            raise _RefusedError("the template ignores the user's text")
        if backend.template and prompts.changes_within_a_day(backend.template):
            raise _RefusedError("the template writes the time, so no beginning stays the same")
        if prompts.names_time(backend.template):
            await trio.sleep(_CLOCK_GAP_S)
            if await self._render(entry, prompts.PROBES[0]) != texts[0]:
                raise _RefusedError("the template writes the time, so no beginning stays the same")
        if entry.open_ended:
            with contextlib.suppress(_RefusedError):
                texts.append(await self._render(entry, None))
        distinct = dict.fromkeys(texts)
        return prompts.common_prefix([await self._tokens(text) for text in distinct])

    async def _asked(self, entry: Entry, text: str) -> list[int]:
        return await self._tokens(await self._render(entry, text))

    async def _render(self, entry: Entry, user_text: str | None) -> str:
        body: dict[str, Any] = {"messages": list(entry.messages)}
        if user_text is not None:
            body["messages"].append({"role": "user", "content": user_text})
        if entry.tools:
            body["tools"] = list(entry.tools)
        if entry.chat_template_kwargs:
            body["chat_template_kwargs"] = entry.chat_template_kwargs
        answer = await self._ask("/apply-template", body)
        prompt = answer.get("prompt")
        if not isinstance(prompt, str):
            raise _RefusedError("/apply-template answered without a prompt")
        return prompt

    async def _tokens(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens = (await self._ask("/tokenize", body)).get("tokens")
        if not isinstance(tokens, list):
            raise _RefusedError("/tokenize answered without tokens")
        return tokens

    async def _complete(self, tokens: Sequence[int], slot: int, *, keep: bool = True) -> int | None:
        """Prefill tokens, and return the count of those that were cached, `None` without one."""
        answer = await self._completion(tokens, slot, keep=keep)
        cached = answer.get("timings", {}).get("cache_n")
        return cached if isinstance(cached, int) else None

    async def _completion(
        self, tokens: Sequence[int], slot: int, *, keep: bool = True
    ) -> dict[str, Any]:
        body = {
            "prompt": list(tokens),
            "n_predict": 1,
            "temperature": 0,
            "cache_prompt": keep,
            "id_slot": slot,
            "grammar": _GRAMMAR,
        }
        return await self._ask("/completion", body)

    async def _make_room(self, number: int) -> int:
        """Push the least recently used slot's content into the host cache, and return that slot."""
        filler = await self._tokens(prompts.FILLERS[number % len(prompts.FILLERS)])
        slot = (await self._completion(filler[-1:], -1)).get("id_slot")
        return slot if isinstance(slot, int) and slot >= 0 else 0

    # ------------------------------------------------------------------------------- disk

    async def _restore(self, prefix: tuple[int, ...], slot: int) -> bool:
        if self._saves is None:
            return False
        path = self._saves.path(prefix)
        if not path.is_file() or not path.stat().st_size:
            return False
        reply = await self._slot_action(slot, "restore", path.name)
        if reply.get("n_restored") == len(prefix):
            self._saves.touch(path)
            return True
        path.unlink(missing_ok=True)  # refused, or of other content: it will be written anew
        return False

    async def _save(self, prefix: tuple[int, ...], slot: int) -> None:
        if self._saves is None:
            return
        path = self._saves.path(prefix)
        if path.is_file():
            return
        part = path.with_suffix(f".{slot}.part")
        reply = await self._slot_action(slot, "save", part.name)
        if reply.get("n_saved") == len(prefix):
            self._saves.adopt(part, path)
        else:
            part.unlink(missing_ok=True)

    async def _slot_action(self, slot: int, action: str, name: str) -> dict[str, Any]:
        body = msgspec.json.encode({"filename": name})
        reply = await self._request("POST", f"/slots/{slot}?action={action}", body)
        return (_object(reply.body) or {}) if reply.status == _OK else {}

    # ------------------------------------------------------------------------------ small

    async def _request(self, method: str, path: str, body: bytes) -> Reply:
        try:
            return await self._send(method, path, body)
        except (GoneError, OSError) as error:
            # Whether it died is for the supervisor to see; here one entry is not warm.
            raise _RefusedError(f"the backend went away: {error}") from None

    async def _look(self) -> _Backend:
        reply = await self._request("GET", "/props", b"")
        props = _object(reply.body)
        if reply.status != _OK or props is None:
            raise _RefusedError("this backend has no /props")
        settings = props.get("default_generation_settings")
        context = settings.get("n_ctx") if isinstance(settings, dict) else None
        template = props.get("chat_template")
        return _Backend(
            slots=_whole(props.get("total_slots"), 1),
            slot_tokens=_whole(context, 1 << 31),
            template=template if isinstance(template, str) else None,
        )

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._request("POST", path, msgspec.json.encode(body))
        if reply.status == _OK:
            return _object(reply.body) or {}
        if _MEANINGLESS in reply.body:
            return {}  # the work was done, only its text was refused
        if reply.status == _NOT_FOUND:
            raise _RefusedError(f"this backend has no {path}")
        error = (_object(reply.body) or {}).get("error")
        message = error.get("message") if isinstance(error, dict) else None
        reason = " ".join(str(message or "no reason given").split())
        if len(reason) > _REASON_CHARACTERS:  # what a template raised itself stands at the end
            reason = f"{reason[: _REASON_CHARACTERS // 2]} ... {reason[-_REASON_CHARACTERS // 2 :]}"
        raise _RefusedError(f"{path} answered {reply.status}: {reason}")

    def _refuse(self, index: int, why: str, *, tokens: int = 0) -> None:
        gone = {"proven": False, "reused_tokens": 0, "source": "none", "evicted": False}
        self._update(index, tokens=tokens, why=why, **gone)

    def _update(self, index: int, **changes: Any) -> None:
        self._set(index, msgspec.structs.replace(self.standings[index], **changes))

    def _set(self, index: int, standing: Standing) -> None:
        self.standings = (*self.standings[:index], standing, *self.standings[index + 1 :])

    def _pairs(self, before: Iterable[Standing]) -> Iterable[tuple[Entry, Standing]]:
        return zip(self.entries, before, strict=True)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise
