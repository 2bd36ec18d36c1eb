"""Routing as it is planned: the settings, the devices and the policy into one value.

settings -> is routing on, which scorer is meant            wanted, scorer_wish
program's devices -> words in the order of `auto`           device_words
policy and devices -> backends by device                    RoutingPlan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from onebit_serve.core import laya as judging
from onebit_serve.core import presets
from onebit_serve.core.config import Laya
from onebit_serve.core.errors import ConfigError
from onebit_serve.core.facts import Device
from onebit_serve.core.policy import Policy, Routes
from onebit_serve.core.scorers import ScorerKind, scorer_plan

__all__ = ["RoutingPlan", "ScorerWish", "device_words", "in_words", "scorer_wish", "wanted"]


class ScorerWish(msgspec.Struct, frozen=True):
    """The scorer as the settings want it.

    Args:
        kind: What it is.
        command: Program and arguments of the user's.
        model: Its model; a file, but for `http`.
        port: The port it listens on already; `None` where it is ours to start.
        restart: Whether it is started again when it fails.
        set_env: Variables that its device needs.
    """

    kind: ScorerKind
    command: tuple[str, ...] = ()
    model: str | None = None
    port: int | None = None
    restart: bool = True
    set_env: dict[str, str] = {}


class RoutingPlan(msgspec.Struct, frozen=True):
    """How requests are routed.

    Args:
        routes: The policy as it holds here.
        backends: Device word to the name of its backend, for every device that is used.
        deadline_s: Seconds that a decision may take; 0 is no limit.
        scorer: Who is asked; `None` for nobody, so that only the size decides.
    """

    routes: Routes
    backends: dict[str, str]
    deadline_s: float = 2.0
    scorer: ScorerWish | None = None


def wanted(settings: Laya) -> bool:
    """Say whether the settings ask for routing."""
    given = (settings.scorer, settings.model, settings.url, settings.command, settings.policy)
    return settings.enabled or any(given)


def scorer_wish(
    settings: Laya, *, llama_server: str, restart: bool, set_env: Mapping[str, str] | None = None
) -> ScorerWish | None:
    """Return which scorer the settings mean; `None` where they only give a policy.

    Args:
        settings: The `[laya]` table.
        llama_server: The llama-server that was found, for the scorer of that kind.
        restart: Whether what fails is started again.
        set_env: Variables that a scorer on the backends' devices needs, as they do.

    Raises:
        ConfigError: They contradict each other, or the scorer could not be started like that.
    """
    asked = settings.scorer or settings.model or settings.url or settings.command
    if not settings.enabled and not asked:
        return None
    kind = settings.scorer or ("daemon" if settings.model and not settings.url else "http")
    if settings.url:
        if settings.command or kind == "daemon":
            what = "command" if settings.command else 'scorer = "daemon"'
            raise ConfigError(
                f"[laya] url names a scorer that runs, and {what} one to start",
                hint="leave one of them out",
            )
        port = judging.scorer_port(settings.url)
        return ScorerWish(kind, model=settings.model, port=port)
    command = settings.command
    if kind == "llama-server" and not command:
        command = (llama_server,)
    scorer_plan(kind, command=command, model=settings.model)  # refuses what cannot be started
    return ScorerWish(kind, command, settings.model, restart=restart, set_env=dict(set_env or {}))


def device_words(listed: Sequence[Device]) -> tuple[str, ...]:
    """Return the words of the devices that a llama-server lists, in the order of `auto`."""
    names = {device.name.lower(): device.name for device in listed}
    ordered = [
        word for word in presets.AUTO_ORDER if (presets.PRESETS[word].listed or "").lower() in names
    ]
    taken = {(presets.PRESETS[word].listed or "").lower() for word in ordered}
    others = [
        name for low, name in names.items() if low not in taken and name not in presets.NOT_FOR_AUTO
    ]
    return (*ordered, *others, "cpu")


def in_words(policy: Policy) -> Policy:
    """Return a policy that calls devices as log lines do: `vulkan` for `Vulkan0`."""
    words = {one.listed: one.word for one in presets.PRESETS.values() if one.listed}
    classes = {
        name: msgspec.structs.replace(route, device=words.get(route.device, route.device))
        for name, route in policy.classes.items()
    }
    default = words.get(policy.default, policy.default)
    return msgspec.structs.replace(policy, default=default, classes=classes)
