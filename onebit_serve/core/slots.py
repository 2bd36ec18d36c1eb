"""Slots: which prefix is pinned to which, what goes through the host cache, what is on disk.

llama-server chooses a slot by the longest shared beginning, else the least recently used one; it
saves what it displaces to its host cache, unless the newcomer shares more than half of it or is
pinned to the slot (`id_slot`). All of it measured on llama-server b10068.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

__all__ = [
    "Placement",
    "Room",
    "SlotPlan",
    "plan_slots",
    "save_name",
    "shared_tokens",
]

# Above half, llama-server's host cache does not save what a newcomer displaces (measured: 49 %
# shared is saved and restored, 51 % is lost).
_SHARED_TOO_MUCH = 0.5


def shared_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two lists share from their start."""
    for count, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return count
    return min(len(left), len(right))


class Room(msgspec.Struct, frozen=True):
    """What a backend has for prompts.

    Args:
        slots: Its slots, from `/props`.
        slot_tokens: Context of one slot, in tokens.
        host_bytes: Limit of its host cache in bytes (`--cache-ram`); 0 is none, `None` no limit.
        token_bytes: Memory of one cached token, in bytes; `None` where unknown.
    """

    slots: int
    slot_tokens: int
    host_bytes: int | None = 0
    token_bytes: int | None = None


class Placement(msgspec.Struct, frozen=True):
    """Where one prefix goes.

    Args:
        entry: Its index in the list of prefixes.
        slots: The slots it is pinned to; empty when it goes through the host cache or nowhere.
        refused: Why it is not kept; empty when it is.
    """

    entry: int
    slots: tuple[int, ...] = ()
    refused: str = ""


class SlotPlan(msgspec.Struct, frozen=True):
    """What goes where, and what that takes.

    Args:
        placements: One for each prefix, in their order.
        host_tokens: Tokens that the host cache has to keep.
        host_bytes: The same in bytes, an estimate; `None` where a token's size is unknown.
        pinned: Whether every kept prefix has a slot of its own, so that none needs the host cache.
    """

    placements: tuple[Placement, ...]
    host_tokens: int = 0
    host_bytes: int | None = 0
    pinned: bool = True


def plan_slots(prefixes: Sequence[Sequence[int]], room: Room) -> SlotPlan:
    """Decide which prefix is pinned to which slots and which goes through the host cache.

    Where all fit, each has a slot, and slots left over repeat the first ones, so that parallel
    requests find it too. Where they do not, prefixes that share half of their head or more keep
    slots of their own (the host cache loses them), the others go through the host cache, the first
    of the file last, since the last stay in the slots.

    Args:
        prefixes: Token lists, in the file's order; an empty one is refused.
        room: What the backend has.
    """
    refused: dict[int, str] = {}
    for index, prefix in enumerate(prefixes):
        if not prefix:
            refused[index] = "no token is common to all user texts"
        elif len(prefix) >= room.slot_tokens:
            refused[index] = f"{len(prefix)} tokens do not fit a slot of {room.slot_tokens}"
    kept = [i for i in range(len(prefixes)) if i not in refused]
    if len(kept) <= room.slots:
        return _one_slot_each(prefixes, kept, refused, room.slots)

    twins = _twins(prefixes, kept)
    if room.host_bytes == 0:
        for index in kept[room.slots :]:
            refused[index] = f"all {room.slots} slots are taken, and there is no host cache"
        return _one_slot_each(prefixes, kept[: room.slots], refused, room.slots)
    return _through_host(prefixes, kept, twins, refused, room)


def _one_slot_each(
    prefixes: Sequence[Sequence[int]], kept: list[int], refused: dict[int, str], slots: int
) -> SlotPlan:
    homes: dict[int, list[int]] = {index: [] for index in kept}
    for slot in range(slots if kept else 0):
        homes[kept[slot % len(kept)]].append(slot)
    return SlotPlan(
        tuple(
            Placement(i, tuple(homes.get(i, ())), refused.get(i, "")) for i in range(len(prefixes))
        )
    )


def _twins(prefixes: Sequence[Sequence[int]], kept: list[int]) -> dict[int, list[int]]:
    """Find for each prefix the others that share too much of its head, or it of theirs."""
    found: dict[int, list[int]] = {i: [] for i in kept}
    for place, left in enumerate(kept):
        for right in kept[place + 1 :]:
            shorter = min(len(prefixes[left]), len(prefixes[right]))
            shared = shared_tokens(prefixes[left], prefixes[right])
            if shared >= _SHARED_TOO_MUCH * shorter:
                found[left].append(right)
                found[right].append(left)
    return found


def _through_host(
    prefixes: Sequence[Sequence[int]],
    kept: list[int],
    twins: dict[int, list[int]],
    refused: dict[int, str],
    room: Room,
) -> SlotPlan:
    # One slot stays free for what passes through the host cache.
    own_slots = room.slots - 1
    own: list[int] = []
    host: list[int] = []
    for index in kept:
        partners = [t for t in twins[index] if t in own or t in host]
        # A partner that was to pass through the host cache needs a slot too, from now on.
        moving = [t for t in partners if t in host]
        if partners and len(own) + len(moving) + 1 > own_slots:
            refused[index] = (
                f"it shares half of its head or more with prompt {partners[0] + 1}, "
                f"and no slot of its own is left"
            )
            continue
        if partners:
            host = [t for t in host if t not in moving]
            own += [*moving, index]
        else:
            host.append(index)
    tokens = sum(len(prefixes[i]) for i in host)
    placements = tuple(
        Placement(i, (own.index(i),) if i in own else (), refused.get(i, ""))
        for i in range(len(prefixes))
    )
    size = None if room.token_bytes is None else tokens * room.token_bytes
    return SlotPlan(placements, tokens, size, pinned=not host)


def save_name(prefix: Sequence[int], *, binary: str, model: str, flags: Iterable[str]) -> str:
    """Return the name of the file that keeps a slot's state for exactly this use.

    Args:
        prefix: The tokens in the slot.
        binary: What identifies the program: path, size, time of change, version.
        model: The same of the model.
        flags: The child's command line without port and paths of its own.
    """
    key = msgspec.json.encode([binary, model, list(flags), list(prefix)])
    import hashlib  # takes 6 ms, of a start that mostly has no prompts

    return f"warm-{hashlib.sha256(key).hexdigest()[:32]}.bin"
