"""Warm prompts: which tokens to put into which slot, and whether the backend kept them.

    file text -> Entry, one per system prompt            parse
    renderings of an entry with PROBES -> token prefix   common_prefix
    the backend's own count of reused tokens -> Verdict  judge
    client traffic -> hits, and what was evicted         match, Standing.used

Why the prefix is cut by tokens: a character prefix may end inside a token of the real request, and
models with recurrent layers cannot step back. Measured on llama-server b10068: a prefix that
overshoots by one character reuses 0 tokens on them, the token prefix loses at most one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from onebit_serve.core.errors import UsageError
from onebit_serve.core.slots import shared_tokens

__all__ = [
    "FILLERS",
    "PROBES",
    "PROOF_TEXTS",
    "REUSE_SLACK_TOKENS",
    "Entry",
    "Standing",
    "Totals",
    "Verdict",
    "cached_tokens",
    "changes_within_a_day",
    "common_prefix",
    "done_line",
    "entry_asked",
    "judge",
    "match",
    "names_time",
    "parse",
    "samples",
    "totals",
    "view",
]

# User texts that differ in their FIRST character, since that is what merges with the template's
# last token: a shared beginning would itself become part of the prefix.
PROBES: tuple[str, ...] = (
    "hello there",
    "Quick question",
    "7 times 6",
    " leading space",
    "\nnew line",
    "\n\ntwo new lines",
    "\ttab",
    "你好",
    "é accent",
    "😀 hi",
    '"quoted"',
    "<tag>",
    "_under",
    "-dash",
    "?",
)

# Two: the first finds a state that ends at the prefix, the second has to step back to it.
PROOF_TEXTS: tuple[str, ...] = ("Say hi.", "42 is what?")

# Prompts of one token each, used to push a slot's content into the host cache before the slot is
# pinned: a pinned request overwrites, an unpinned one saves first (llama.cpp, get_available_slot).
# Digits, since every vocabulary has them and no two share a token.
FILLERS: tuple[str, ...] = ("1", "2", "3", "4", "5", "6", "7", "8", "9", "0")

# llama-server b10068, measured: dense models lose 0 tokens, recurrent and hybrid ones 1, sliding
# window ones with a prefix shorter than their window up to 5 (their checkpoint sits 4 before it).
REUSE_SLACK_TOKENS = 5


class Entry(msgspec.Struct, frozen=True):
    """One beginning of conversations; what follows it is a user's message.

    Args:
        messages: As in chat completions.
        tools: As in chat completions; they change what the template writes.
        chat_template_kwargs: As llama-server takes them, for example `{"enable_thinking": false}`.
        label: How log and status call it: `entry 2`, or `entry 2 (thinking off)`.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    chat_template_kwargs: dict[str, Any] = {}
    label: str = ""

    @property
    def open_ended(self) -> bool:
        """Whether the entry is also a whole request by itself: it ends where a model answers."""
        return self.messages[-1].get("role") in ("user", "tool")


# --------------------------------------------------------------------------------- the file


def parse(text: str | bytes, where: str) -> tuple[Entry, ...]:
    """Read a warm prompts file.

    An entry is a list of messages, or an object with `messages` and any of `tools`,
    `chat_template_kwargs` and `thinking`; `"thinking": "both"` stands for two entries, one with
    `enable_thinking` true and one with false.

    Args:
        text: The file's content.
        where: How to call the file in errors.

    Raises:
        UsageError: Not JSON, or not of that form; the message names entry and message, from 1.
    """
    try:
        data = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise UsageError(
            f"{where} is not JSON: {fault}",
            hint='a list of lists of messages, as [[{"role": "system", "content": "..."}]]',
        ) from fault
    if not isinstance(data, list):
        raise _bad(where, f"the file holds {_kind(data)}, not a list of entries")
    entries: list[Entry] = []
    for number, item in enumerate(data, 1):
        place = f"entry {number}"
        if isinstance(item, list):
            entries.append(Entry(_messages(item, where, place), label=place))
        elif isinstance(item, dict):
            entries.extend(_long_form(item, where, place))
        else:
            raise _bad(where, f"{place} is {_kind(item)}, not a list of messages")
    if not entries:
        raise _bad(where, "the list is empty")
    return tuple(entries)


def _long_form(item: dict[str, Any], where: str, place: str) -> list[Entry]:
    known = {"messages", "tools", "chat_template_kwargs", "thinking"}
    unknown = sorted(set(item) - known)
    if unknown:
        raise _bad(where, f'{place} has the unknown key "{unknown[0]}"')
    if not isinstance(item.get("messages"), list):
        raise _bad(where, f'{place} has no list "messages"')
    messages = _messages(item["messages"], where, place)
    tools = item.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise _bad(where, f'{place}: "tools" is not a list of objects')
    kwargs = item.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise _bad(where, f'{place}: "chat_template_kwargs" is {_kind(kwargs)}, not an object')
    thinking = item.get("thinking")
    if thinking is None:
        return [Entry(messages, tuple(tools), kwargs, place)]
    if not isinstance(thinking, bool) and thinking != "both":
        raise _bad(where, f'{place}: "thinking" is neither true, false nor "both"')
    return [
        Entry(
            messages,
            tuple(tools),
            {**kwargs, "enable_thinking": on},
            f"{place} (thinking {'on' if on else 'off'})",
        )
        for on in ((True, False) if thinking == "both" else (thinking,))
    ]


def _messages(items: list[Any], where: str, place: str) -> tuple[dict[str, Any], ...]:
    if not items:
        raise _bad(where, f"{place} has no messages")
    for number, message in enumerate(items, 1):
        fault = _message_fault(message)
        if fault:
            raise _bad(where, f"{place}, message {number}: {fault}")
    return tuple(items)


def _message_fault(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {_kind(message)}, not an object"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        return 'has no "role"'
    content = message.get("content")
    if content is None:
        # Only a call of tools says nothing in words.
        return "" if message.get("tool_calls") else 'has no "content"'
    if isinstance(content, str):
        return ""
    if not isinstance(content, list):
        return f'"content" is {_kind(content)}, not text'
    for number, part in enumerate(content, 1):
        if not isinstance(part, dict) or part.get("type") != "text":
            return f"part {number} is not text"
        if not isinstance(part.get("text"), str):
            return f'part {number} has no "text"'
    return ""


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "nothing" if value is None else names.get(type(value), "a number")


def _bad(where: str, what: str) -> UsageError:
    return UsageError(
        f"{where}: {what}",
        hint='each entry is a list of messages such as {"role": "system", "content": "..."}',
    )


# ------------------------------------------------------------------------------- the prefix


def common_prefix(renderings: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the longest beginning that all token lists share."""
    if not renderings:
        return ()
    ordered = sorted(tuple(r) for r in renderings)
    first, last = ordered[0], ordered[-1]
    # Of sorted lists the outermost two differ earliest.
    return first[: shared_tokens(first, last)]


def names_time(template: str | None) -> bool:
    """Say whether a template may write the time; `None`, a template unknown, may."""
    return template is None or "strftime_now" in template


def changes_within_a_day(template: str) -> bool:
    """Say whether a template writes hours, minutes or seconds, as far as its formats are literal.

    A date is kept: it holds until midnight, and what it evicts then is noticed and repaired.
    """
    formats = re.findall(r"""strftime_now\(\s*["']([^"']*)["']""", template)
    return any(re.search(r"%[-_0^#]?[HIMSTRXcsrpfklNL+]", f) for f in formats)


# -------------------------------------------------------------------- the proof and the use


class Verdict(msgspec.Struct, frozen=True):
    """What a backend kept of one prefix, by its own count.

    Args:
        proven: Whether it is all there, but for what its kind of model always computes anew.
        reused_tokens: The smallest count of the probes; 0 where nothing was reported.
        why: What to tell when it is not proven.
    """

    proven: bool
    reused_tokens: int
    why: str = ""


def judge(prefix_tokens: int, reused: Sequence[int | None]) -> Verdict:
    """Judge the counts of cached tokens that probe requests came back with.

    Args:
        prefix_tokens: Length of what was put there.
        reused: The backend's count for each probe, `None` where it gave none.
    """
    counts = [n for n in reused if n is not None]
    if not counts or len(counts) < len(reused):
        return Verdict(proven=False, reused_tokens=0, why="the backend reports no cached tokens")
    least = min(prefix_tokens, *counts)
    lost = prefix_tokens - least
    if lost <= REUSE_SLACK_TOKENS and lost * 2 <= prefix_tokens:
        return Verdict(proven=True, reused_tokens=least)
    return Verdict(
        proven=False, reused_tokens=least, why=f"{least} of {prefix_tokens} tokens are reused"
    )


class Standing(msgspec.Struct, frozen=True):
    """How one warm prompt stands, as `/v1/status` shows it.

    Args:
        label: The entry, as in the log.
        tokens: Length of its prefix.
        slots: The slots it was pinned to; empty when it went through the host cache.
        reused_tokens: What the proof found.
        proven: Whether the proof passed.
        source: How it got there.
        why: Why it was skipped or is not proven; empty otherwise.
        hits: Client requests since that reused it.
        tokens_saved: Tokens that those did not have to prefill.
        evicted: It is repaired while idle: a client request found it gone, or it could not be
            proven, or put there, for a reason that may pass.
        same_as: The label of an earlier entry that renders alike, so that both are one prompt.
    """

    label: str
    tokens: int = 0
    slots: tuple[int, ...] = ()
    reused_tokens: int = 0
    proven: bool = False
    source: Literal["prefill", "disk", "none"] = "none"
    why: str = ""
    hits: int = 0
    tokens_saved: int = 0
    evicted: bool = False
    same_as: str = ""

    def used(self, cached_tokens: int) -> Standing:
        """Return the standing after a client request of this entry that reused so many tokens."""
        if not self.tokens:
            return self
        reused = min(cached_tokens, self.tokens)
        if self.proven and reused < self.reused_tokens - REUSE_SLACK_TOKENS:
            return msgspec.structs.replace(
                self, evicted=True, tokens_saved=self.tokens_saved + reused
            )
        return msgspec.structs.replace(
            self,
            hits=self.hits + (reused > 0),
            tokens_saved=self.tokens_saved + reused,
        )

    def carried(self, before: Standing) -> Standing:
        """Return this standing with the counts that the same entry had before a re-warm."""
        return msgspec.structs.replace(self, hits=before.hits, tokens_saved=before.tokens_saved)


class Totals(msgspec.Struct, frozen=True):
    """The sums that status and metrics show.

    Args:
        entry_count: Entries that are proven.
        tokens: Their prefix tokens; those that render alike count once.
        hits: Client requests that reused one.
        tokens_saved: Tokens that were not prefilled for clients.
    """

    entry_count: int
    tokens: int
    hits: int
    tokens_saved: int


def totals(standings: Sequence[Standing]) -> Totals:
    """Sum up the standings of all entries."""
    proven = [s for s in standings if s.proven]
    return Totals(
        entry_count=len(proven),
        tokens=sum({s.same_as or s.label: s.tokens for s in proven}.values()),
        hits=sum(s.hits for s in standings),
        tokens_saved=sum(s.tokens_saved for s in standings),
    )


def view(standings: Sequence[Standing]) -> dict[str, Any]:
    """Return what `/v1/status` shows."""
    entries = [msgspec.structs.asdict(standing) for standing in standings]
    return {**msgspec.structs.asdict(totals(standings)), "entries": entries}


def samples(standings: Sequence[Standing]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield what `/metrics` shows: name without prefix, labels, value."""
    sums = totals(standings)
    yield "warm_prompts_entry_count", {}, sums.entry_count
    yield "warm_prompts_tokens", {}, sums.tokens
    yield "warm_prompts_hits_total", {}, sums.hits
    yield "warm_prompts_tokens_saved_total", {}, sums.tokens_saved


def done_line(standings: Sequence[Standing], took_s: float) -> str:
    """Return the log line: completed are the proven ones, skipped all others."""
    sums = totals(standings)
    return (
        f"warm-up done (strict-prefix): {sums.entry_count} completed, "
        f"{len(standings) - sums.entry_count} skipped, "
        f"{sums.tokens} prompt tokens in {took_s:.1f} s"
    )


def match(
    messages: Any, entries: Sequence[Entry], *, tools: Any = None, kwargs: Any = None
) -> int | None:
    """Find the entry that a client's messages begin with; the longest wins.

    Args:
        messages: `messages` of a chat request, of any form.
        entries: The warm prompts.
        tools: Its `tools`, which change what the template writes.
        kwargs: Its `chat_template_kwargs`.

    Returns:
        The entry's index, or `None`.
    """
    if not isinstance(messages, list):
        return None
    switches = _switches(kwargs)
    best: int | None = None
    for index, entry in enumerate(entries):
        length = len(entry.messages)
        longer = best is None or length > len(entries[best].messages)
        if (
            longer
            and list(entry.messages) == messages[:length]
            and list(entry.tools) == (tools or [])
            and _switches(entry.chat_template_kwargs) == switches
        ):
            best = index
    return best


def _switches(kwargs: Any) -> dict[str, Any]:
    """Return template switches with llama-server's default: it thinks unless told not to."""
    return {"enable_thinking": True, **(kwargs if isinstance(kwargs, dict) else {})}


class _Asked(msgspec.Struct):
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None


_decode_asked = msgspec.json.Decoder(_Asked).decode
_CHATS = ("/v1/chat/completions", "/chat/completions")
_LONGEST_LOOK_BYTES = 8 << 20
# llama-server's own count, then OpenAI's. Text of a model cannot look like it: there the quotes
# are escaped.
_CACHED = re.compile(rb'"(?:cache_n|cached_tokens)"\s*:\s*(\d{1,9})')


def entry_asked(path: str, body: bytes, entries: Sequence[Entry]) -> int | None:
    """Return which entry a client's request begins with, or `None`.

    Args:
        path: The route.
        body: The request's body; one of more than 8 MiB is not looked at.
        entries: The warm prompts.
    """
    if path not in _CHATS or len(body) > _LONGEST_LOOK_BYTES:
        return None
    try:
        asked = _decode_asked(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return match(asked.messages, entries, tools=asked.tools, kwargs=asked.chat_template_kwargs)


def cached_tokens(tail: bytes) -> int | None:
    """Return the count of cached tokens that a reply ends with, or `None` without one.

    Args:
        tail: The end of the reply's body, streamed or not.
    """
    counts = _CACHED.findall(tail)
    return int(counts[-1]) if counts else None
