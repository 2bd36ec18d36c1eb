"""Which warm prompts a backend gets, and what it must be started with so that it can keep them.

An explicit number of slots is part of it: without `-np` llama-server takes 4 slots with one shared
cache and clears idle ones, and parallel requests then miss a warmed prefix now and then (b10068,
measured).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from onebit_serve.core import options
from onebit_serve.core.config import Backend, WarmPrompts
from onebit_serve.core.facts import BinaryFacts, ModelFacts
from onebit_serve.core.kv_cache import bytes_per_token, types_of
from onebit_serve.core.warm_prompts import Entry

__all__ = ["PromptFile", "PromptPlan", "equip", "plan_prompts", "without_folder"]

_SLOTS = 4  # llama-server's own number (b10068)
_HOST_MIB = 8192  # llama-server's default of `--cache-ram` (b10068)
_FOLDER = "--slot-save-path"


class PromptFile(msgspec.Struct, frozen=True):
    """What was read for all backends.

    Args:
        entries: The warm prompts; none where no file is named.
        folder: Where slots may be saved, or empty.
    """

    entries: tuple[Entry, ...] = ()
    folder: str = ""


class PromptPlan(msgspec.Struct, frozen=True):
    """The warm prompts of one backend.

    Args:
        entries: They; none for a backend that does not chat.
        concurrency: Prompts rendered or prefilled at a time; 0 is one for each slot.
        host_bytes: Limit of its host cache in bytes; 0 is none, `None` no limit.
        token_bytes: Memory of one cached token in bytes; `None` where unknown.
        save_to: The folder where slots are saved after warming, or empty.
        folder: The folder that its program gets from us, and does not start without; or empty.
    """

    entries: tuple[Entry, ...] = ()
    concurrency: int = 0
    host_bytes: int | None = _HOST_MIB << 20
    token_bytes: int | None = None
    save_to: str = ""
    folder: str = ""


def equip(
    backend: Backend, file: PromptFile, binary: BinaryFacts, environment: Mapping[str, str]
) -> Backend:
    """Return a llama-server's settings with the slots, and the folder, that warm prompts need.

    What the user says of either stands.
    """
    if not file.entries:
        return backend
    told = "LLAMA_ARG_N_PARALLEL" in {**environment, **backend.env}
    if backend.parallel <= 0 and not told:
        backend = msgspec.structs.replace(backend, parallel=_SLOTS)
    if file.folder and _FOLDER in binary.options and not options.given(backend.args, _FOLDER):
        args = (*backend.args, _FOLDER, file.folder)
        backend = msgspec.structs.replace(backend, args=args)
    return backend


def plan_prompts(
    file: PromptFile,
    settings: WarmPrompts,
    arguments: Sequence[str],
    binary: BinaryFacts,
    model: ModelFacts | None,
    environment: Mapping[str, str],
) -> PromptPlan:
    """Return what a backend with this command line warms.

    Args:
        file: What was read.
        settings: `[warm_prompts]`.
        arguments: The command line.
        binary: The program's facts.
        model: The model's, where it is a file.
        environment: What the child sees.
    """
    host_bytes = _host_bytes(arguments, binary, environment)
    if not file.entries:
        return PromptPlan(host_bytes=host_bytes)
    folder = options.value(arguments, _FOLDER) or ""
    return PromptPlan(
        entries=file.entries,
        concurrency=settings.concurrency,
        host_bytes=host_bytes,
        token_bytes=_token_bytes(model, arguments),
        save_to=folder if settings.save else "",
        folder=folder if folder == file.folder else "",  # one that the user names is the user's
    )


def without_folder(command: Sequence[str]) -> list[str]:
    """Return a command line without the folder that `equip` put into it."""
    at = command.index(_FOLDER) if _FOLDER in command else len(command)
    return [*command[:at], *command[at + 2 :]]


def _host_bytes(
    arguments: Sequence[str], binary: BinaryFacts, environment: Mapping[str, str]
) -> int | None:
    if binary.options and "--cache-ram" not in binary.options:
        return 0
    said = options.value(arguments, "-cram", "--cache-ram")
    said = said or environment.get("LLAMA_ARG_CACHE_RAM") or str(_HOST_MIB)
    try:
        mib = int(said)
    except ValueError:  # llama-server refuses it
        mib = _HOST_MIB
    return None if mib < 0 else mib << 20


def _token_bytes(model: ModelFacts | None, arguments: Sequence[str]) -> int | None:
    size = None if model is None else bytes_per_token(model, *types_of(arguments))
    return None if size is None else math.ceil(size)
