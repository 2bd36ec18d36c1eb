"""The prompts of the benchmark: three sets of our own, or the user's file.

`long` is a logbook written by the few lines at the end of this module, so that its text is ours,
is the same everywhere, and takes no room. Token counts are those of SmolLM2's tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from onebit_serve.core.errors import UsageError

__all__ = ["SETS", "Message", "Prompt", "built_in", "parse", "prefix", "prepare"]

Message = dict[str, Any]
"""One chat message: `role`, `content`, and whatever else the user's file gives it."""

SETS = ("short", "medium", "long")

_SHORT = "In two sentences, explain to a curious child why the sea looks blue from a cliff."

_MEDIUM = """\
You help the keeper of a small museum of tools. Below are her notes on one object. Write the label \
that hangs beside it: a title of at most five words, then one paragraph of about eighty words for \
visitors who have never held such a thing.

Notes. A brace, which is a crank for turning a drill bit by hand. Beech, brass plates let into the \
sides, made about 1860 in a workshop of three people near the river. The pad at the top is turned \
from a darker wood, perhaps box, and is worn hollow on one side: its owner leaned on it with the \
chest, always from the left. The chuck takes square shanks and is closed by a spring catch that \
still works. On the underside somebody burned the letters W. T. with a hot wire, and a later hand \
cut a small anchor beside them. The boat builder who gave it to us says that his grandfather used \
it to bore the holes for copper rivets in planking, some two hundred a day in the busy months, and \
that the sound of it through an open door told the street that a hull was being closed. He also \
says that nobody was allowed to borrow it. Two of the brass screws are replacements made of steel; \
the keeper wants them left as they are, since a repair is part of what happened to a tool. The \
object weighs nine hundred grams and lies well in both hands. It is shown with a rivet, a rove, \
and a strip of larch with one finished hole, so that children may put a finger through it.
"""


class Prompt(msgspec.Struct, frozen=True):
    """One conversation to send.

    Args:
        messages: Its messages in order, at least one.
        place: Where it stands in the user's file (`entry 2`); empty for our own.
    """

    messages: tuple[Message, ...]
    place: str = ""


def built_in(name: str) -> tuple[Prompt, ...]:
    """Return one of our own sets: `short` (18 tokens), `medium` (325), `long` (2,532).

    Each holds one text, so that all requests of a cell are of one shape: a backend that builds
    something for every new prompt length would otherwise be measured building.
    """
    text = {"short": lambda: _SHORT, "medium": lambda: _MEDIUM, "long": _logbook}[name]()
    return (Prompt(({"role": "user", "content": text},)),)


def parse(text: str, *, name: str) -> tuple[Prompt, ...]:
    """Read a prompts file: a JSON list whose entries are texts or conversations.

    A text is one user message. A conversation is a list of messages, or an object that holds them
    as `messages`; further keys of a message are kept, further keys of the object are not sent.

    Args:
        text: What the file holds.
        name: Its name, for errors.

    Raises:
        UsageError: It is not JSON, or of another shape; the message names entry and message.
    """
    try:
        entries = json.loads(text.lstrip("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"prompts file {name}: not JSON: {error}", hint=_SHAPE) from error
    if isinstance(entries, dict) and "prompts" in entries:
        entries = entries["prompts"]
    if not isinstance(entries, list):
        raise _wrong(name, "", f"a list is needed at the top, not {_kind(entries)}")
    if not entries:
        raise _wrong(name, "", "the list is empty")
    found = tuple(_prompt(entry, name, f"entry {n}") for n, entry in enumerate(entries, 1))
    for prompt in found:
        _check_sendable(prompt, name)
    return found


def prepare(prompt: Prompt, *, unique: str = "", system: str = "") -> list[Message]:
    """Return the messages as they are sent.

    The unique prefix goes to the start of the first user message, so that what stands before it,
    the system prompt, stays shared between requests and can be found in a cache.

    Args:
        prompt: The conversation.
        unique: Text that no other request starts with; empty for none.
        system: A system prompt to put before it; before the conversation's own, where it has one.
    """
    messages = [dict(message) for message in prompt.messages]
    if unique:
        first = next((m for m in messages if m["role"] == "user"), messages[0])
        first["content"] = _before(unique, first["content"])
    if system and messages[0]["role"] == "system":
        messages[0]["content"] = _before(system + "\n\n", messages[0]["content"])
    elif system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def prefix(number: int) -> str:
    """Return the unique prefix of a number from 0 to 2**42 - 1: seven plain words and a colon.

    Plain words and not digits, since those split into different numbers of tokens, and a new
    prompt length costs some backends 130-200 ms of building (HRX, measured). The fast changing
    word stands first, so that two prefixes differ in their first token.
    """
    words = [_WORDS[(number >> shift) % len(_WORDS)] for shift in range(0, 42, 6)]
    return " ".join(words) + ": "


def _before(text: str, content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": text}, *content]
    return text + (content or "")


_SHAPE = (
    'expected a JSON list of texts, or of lists of {"role": ..., "content": ...}, '
    'or of {"messages": [...]}'
)


def _wrong(name: str, place: str, what: str) -> UsageError:
    where = f"prompts file {name}" + (f", {place}" if place else "")
    return UsageError(f"{where}: {what}", hint=_SHAPE)


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _prompt(entry: object, name: str, place: str) -> Prompt:
    if isinstance(entry, str):
        if not entry.strip():
            raise _wrong(name, place, "the text is empty")
        return Prompt(({"role": "user", "content": entry},), place)
    if isinstance(entry, dict):
        if "messages" not in entry:
            raise _wrong(name, place, "the object has no `messages`")
        entry = entry["messages"]
    if not isinstance(entry, list):
        raise _wrong(name, place, f"a text or a list of messages is needed, not {_kind(entry)}")
    if not entry:
        raise _wrong(name, place, "there are no messages")
    for number, message in enumerate(entry, 1):
        _check_message(message, name, f"{place}, message {number}")
    return Prompt(tuple(entry), place)


def _check_sendable(prompt: Prompt, name: str) -> None:
    try:
        msgspec.json.encode(prompt.messages)
    except (ValueError, RecursionError) as error:  # half a surrogate pair is in no UTF-8
        raise _wrong(name, prompt.place, f"it cannot be sent: {error}") from error


def _check_message(message: object, name: str, place: str) -> None:
    if not isinstance(message, dict):
        raise _wrong(name, place, f"an object is needed, not {_kind(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(name, place, f"`role` must be a text, not {_kind(role)}")
    content = message.get("content")
    if content is None and role == "assistant":
        return  # a message of tool calls has none
    if not isinstance(content, (str, list)):
        raise _wrong(name, place, f"`content` must be a text, not {_kind(content)}")


# Sixty-four words that common vocabularies hold as one token each, with and without a space.
_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
    *("kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line"),
    *("end", "member", "law", "car"),
)


def _logbook() -> str:
    """Return the keeper's log of fifty days on a lighthouse, with a question before it."""
    winds = ("north", "west", "south-west", "east", "north-west", "south", "north-east")
    seas = ("flat", "a long swell", "short steep waves", "white caps", "a heavy sea from the bar")
    ships = ("a brig", "two trawlers", "the mail boat", "a collier", "nobody", "a pilot cutter")
    works = (
        "trimmed the wicks and washed the lower panes",
        "oiled the clockwork and timed one turn at ninety seconds",
        "painted the rail on the lee side while it was dry",
        "carried eleven cans of oil up from the landing",
        "mended the boat's rudder with a strap of copper",
        "counted the stores and found the flour damp on top",
        "wrote to the board again about the cracked step",
    )
    days = []
    for day in range(1, 51):
        wind, sea, ship = winds[day % 7], seas[day * 3 % 5], ships[day * 5 % 6]
        glass = 740 + day * 7 % 31
        days.append(
            f"Day {day}. Wind {wind}, glass at {glass}, {sea}. Passed by: {ship}. "
            f"We {works[day * 2 % 7]}. Lamp lit at {4 + day % 3}:{day * 11 % 60:02d}."
        )
    question = (
        "Below is the log of a lighthouse. Tell in one paragraph how the keepers spent their "
        "time, which ships passed most often, and what you would ask them about the cracked step."
    )
    return "\n".join([question, "", *days])
