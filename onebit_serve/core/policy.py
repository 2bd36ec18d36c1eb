"""The route policy: which class of requests goes to which device, and why.

Laya says what a request is, a measured policy says where it goes. The file is JSON:

    {"min_confidence": 0.16, "default": "hrx",
     "classes": {"code": {"device": "vulkan", "why": "decodes 1.3x faster there"}, ...}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from onebit_serve.core.errors import ConfigError, nearest

__all__ = ["CLASSES", "MIN_CONFIDENCE", "Policy", "Route", "Routes", "parse_policy", "resolve"]

CLASSES = ("code", "prose", "short", "long_doc")
# Of 200 labelled requests the least confident quarter was 84 % right, the rest 98 to 100 % (Laya's
# own measurement); below this the answer is worth no detour.
MIN_CONFIDENCE = 0.16


class Route(msgspec.Struct, frozen=True):
    """Where one class goes.

    Args:
        device: The device's word.
        why: What was measured; for people.
    """

    device: str
    why: str = ""


class Policy(msgspec.Struct, frozen=True):
    """A policy file.

    Args:
        default: The device for all that is in no class, or not surely.
        classes: Where classes go; those left out go to the default.
        min_confidence: Least confidence, 0 to 1, at which a class counts.
        about: Free text of the file.
    """

    default: str
    classes: dict[str, Route] = {}
    min_confidence: float = MIN_CONFIDENCE
    about: str = ""


class Routes(msgspec.Struct, frozen=True):
    """A policy as it holds on this machine.

    Args:
        default: The device for what is in no class; it can run the model.
        devices: Class to device, for every class.
        whys: Class to the reason, as the policy or the fallback gives it.
        notes: What fell back, one line each, to be said once.
        min_confidence: As in the policy.
    """

    default: str
    devices: dict[str, str]
    whys: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    min_confidence: float = MIN_CONFIDENCE

    @property
    def used(self) -> tuple[str, ...]:
        """Every device that a request may go to, the default first."""
        return tuple(dict.fromkeys([self.default, *self.devices.values()]))


def parse_policy(text: str | bytes, where: str, devices: Collection[str]) -> Policy:
    """Read a policy file.

    Args:
        text: Its content.
        where: How to call the file in errors.
        devices: The words that name a device, whether or not it can run the model.

    Raises:
        ConfigError: Not JSON, or not of that form; the message names the place.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f'{where} says "{twice}" twice', hint="leave one of them out")
        return fields

    try:
        data = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as fault:
        raise ConfigError(
            f"{where} is not JSON: {fault}",
            hint="configs/route-policy.json is an example",
        ) from fault
    fields = _fields(data, where, "", ("about", "min_confidence", "default", "classes"))
    if "default" not in fields:
        raise ConfigError(f"{where} names no default", hint='add "default": "DEVICE"')
    classes = _fields(fields.get("classes", {}), where, "classes", CLASSES, "class")
    return Policy(
        default=_device(fields["default"], where, "default", devices),
        classes={
            name: _route(route, where, f"classes.{name}", devices)
            for name, route in classes.items()
        },
        min_confidence=_confidence(fields.get("min_confidence", MIN_CONFIDENCE), where),
        about=_text(fields.get("about", ""), where, "about"),
    )


def _route(value: Any, where: str, place: str, devices: Collection[str]) -> Route:
    fields = _fields(value, where, place, ("device", "why"))
    if "device" not in fields:
        raise ConfigError(f"{where}: {place} names no device", hint='add "device": "DEVICE"')
    return Route(
        _device(fields["device"], where, f"{place}.device", devices),
        _text(fields.get("why", ""), where, f"{place}.why"),
    )


def _fields(
    value: Any, where: str, place: str, known: Sequence[str], kind: str = "key"
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {place or 'the file'} is not an object", hint="write { ... }")
    for name in value:
        if name not in known:
            inside = f"{place}.{name}" if place else name
            raise ConfigError(
                f"{where}: {inside} is an unknown {kind}",
                hint=nearest(name, known) or f"known are {', '.join(known)}",
            )
    return value


def _device(value: Any, where: str, place: str, devices: Collection[str]) -> str:
    word = _text(value, where, place)
    if word not in devices:
        known = ", ".join(sorted(devices))
        raise ConfigError(
            f'{where}: {place} names the unknown device "{word}"',
            hint=nearest(word, devices) or f"known are {known}",
        )
    return word


def _text(value: Any, where: str, place: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {place} is not text", hint='write it as "..."')
    return value


def _confidence(value: Any, where: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= 1:
        raise ConfigError(
            f"{where}: min_confidence is not a number from 0 to 1",
            hint=f"the default is {MIN_CONFIDENCE:g}",
        )
    return float(value)


def resolve(policy: Policy, usable: Sequence[str], unusable: Mapping[str, str]) -> Routes:
    """Fit a policy to the devices that can run the model.

    Args:
        policy: What is wished.
        usable: Devices that can run it, in the order of `auto`; at least one.
        unusable: Others, with the reason.

    Raises:
        ConfigError: No device can run the model.
    """
    if not usable:
        raise ConfigError("no device of the route policy can run this model")
    notes: list[str] = []

    def reason(device: str) -> str:
        return unusable.get(device, "it is not there")

    default = policy.default
    if default not in usable:
        default = usable[0]
        notes.append(
            f"the policy's default {policy.default} cannot run this model "
            f"({reason(policy.default)}), so {default} is the default"
        )
    devices: dict[str, str] = {}
    whys: dict[str, str] = {}
    for name in CLASSES:
        route = policy.classes.get(name)
        if route is None:
            devices[name], whys[name] = default, "the policy has no word on it"
        elif route.device in usable:
            devices[name], whys[name] = route.device, route.why
        else:
            devices[name] = default
            whys[name] = f"{route.device} cannot run this model ({reason(route.device)})"
            notes.append(f"{name} goes to {default}: {whys[name]}")
    return Routes(default, devices, whys, tuple(notes), policy.min_confidence)
