"""Routing at plan time: the policy is read, the devices are held against it, backends are made."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from onebit_serve.core import presets, routing
from onebit_serve.core.config import Config, Laya
from onebit_serve.core.errors import BackendError, ConfigError, OnebitError, UsageError
from onebit_serve.core.plan import LIBHSA_VARIABLE, BackendPlan, Found, Plan
from onebit_serve.core.policy import Policy, parse_policy, resolve
from onebit_serve.core.routing import RoutingPlan, ScorerWish
from onebit_serve.core.scorers import scorer_plan
from onebit_serve.live.files import read_regular

__all__ = ["describe", "keep_used", "route", "spread"]

_OWN_PROGRAM = ("zinc", "mlx")


def spread(one: Found, make: Callable[[Found], object]) -> tuple[tuple[Found, ...], dict[str, str]]:
    """Make one backend of each device that can run the model.

    Args:
        one: The backend that the settings describe, with `device = "auto"`.
        make: Plans a backend; raises `UsageError` or `BackendError` where it cannot run.

    Returns:
        The backends in the order of `auto`, and why others cannot run it.

    Raises:
        UsageError: A device was named, or none can run the model.
    """
    if one.backend.device.lower() != "auto":
        raise UsageError(
            f"routing has nothing to choose from with --device {one.backend.device}",
            hint="use --device auto, or describe several [[backends]]",
        )
    unusable = dict.fromkeys(_OWN_PROGRAM, "it needs a [[backends]] of its own")
    found: list[Found] = []
    first: OnebitError | None = None
    for word in routing.device_words(one.binary.devices):
        backend = msgspec.structs.replace(one.backend, device=word, name=word)
        there = msgspec.structs.replace(one, backend=backend)
        try:
            make(there)
        except (UsageError, BackendError) as error:
            unusable[word] = error.message
            first = first or error
        else:
            found.append(there)
    if not found and first is not None:
        raise first
    listed = {device.name for device in one.binary.devices}
    for preset in presets.PRESETS.values():
        if preset.listed and preset.listed not in listed:
            unusable[preset.word] = f"{one.binary.path} does not list {preset.listed}"
    return tuple(found), unusable


def route(config: Config, plan: Plan, found: Sequence[Found], unusable: Mapping[str, str]) -> Plan:
    """Put the routes into a plan; the default device's backend is needed and stays.

    Args:
        config: All settings.
        plan: The plan, with a backend for every device that can run the model.
        found: What was found for each backend.
        unusable: Other devices, with the reason.

    Raises:
        ConfigError: The policy cannot be used here.
    """
    chats = [backend for backend in plan.backends if backend.role == "chat"]
    listed = [device for one in found for device in one.binary.devices]
    here = {backend.device for backend in chats}
    usable = [word for word in routing.device_words(listed) if word in here]
    usable += [backend.device for backend in chats if backend.device not in usable]
    if not usable:
        raise UsageError(
            "routing needs a backend that chats", hint="leave --laya and [laya] out, or add one"
        )
    policy = _policy(config.laya, {*here, *(device.name for device in listed)}, usable)
    reasons = {**dict.fromkeys(presets.PRESETS, "no backend is on it"), **unusable}
    routes = resolve(policy, list(dict.fromkeys(usable)), reasons)
    by_device: dict[str, str] = {}
    for backend in chats:
        if (
            backend.device in routes.used
            and by_device.setdefault(backend.device, backend.name) != backend.name
        ):
            raise ConfigError(
                f"{by_device[backend.device]} and {backend.name} are both on {backend.device}, "
                "and routing knows a backend by its device",
                hint="put one of them on another device, or leave that device out of the policy",
            )
    libhsa = next(filter(None, (b.set_env.get(LIBHSA_VARIABLE) for b in chats)), None)
    wish = routing.scorer_wish(
        config.laya,
        llama_server=next(
            (b.binary for b in plan.backends if b.kind == "llama-server"), found[0].binary.path
        ),
        restart=all(backend.limits.restart for backend in chats),
        set_env={LIBHSA_VARIABLE: libhsa} if libhsa else {},
    )
    _check_there(wish)
    planned = RoutingPlan(routes, by_device, config.laya.deadline_s, wish)
    default = by_device[routes.default]
    backends = tuple(_needed(b) if b.name == default else b for b in plan.backends)
    warnings = (*plan.warnings, *routes.notes)
    return msgspec.structs.replace(plan, backends=backends, routing=planned, warnings=warnings)


def keep_used(plan: Plan) -> Plan:
    """Leave out the devices that no route leads to; all but the default's start when picked."""
    if plan.routing is None:
        return plan
    order = {device: number for number, device in enumerate(plan.routing.routes.used)}
    used = sorted((b for b in plan.backends if b.device in order), key=lambda b: order[b.device])
    lazy = (msgspec.structs.replace(backend, lazy=True) for backend in used[1:])
    return msgspec.structs.replace(plan, backends=(used[0], *lazy))


def _needed(backend: BackendPlan) -> BackendPlan:
    limits = msgspec.structs.replace(backend.limits, idle_s=0.0)
    return msgspec.structs.replace(backend, lazy=False, limits=limits)


def _policy(settings: Laya, names: set[str], usable: Sequence[str]) -> Policy:
    """Read the policy; without one all goes to the first device, and the counts tell the rest."""
    if settings.policy is None:
        return Policy(usable[0])
    try:
        text = read_regular(settings.policy)
    except OSError as error:
        raise ConfigError(
            f"--route-policy {settings.policy} cannot be read: {error.strerror}",
            hint="configs/route-policy.json is an example",
        ) from None
    known = {*names, *presets.PRESETS, *(p.listed for p in presets.PRESETS.values() if p.listed)}
    return routing.in_words(parse_policy(text, settings.policy, known))


def _check_there(wish: ScorerWish | None) -> None:
    """Raise where a scorer that is ours to start is not there."""
    if wish is None or wish.port is not None:
        return
    program = scorer_plan(wish.kind, command=wish.command, model=wish.model).arguments[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"the scorer {program} is not on PATH",
            hint="install it, name it by [laya] command, or its address by [laya] url",
        )
    if wish.kind != "http" and wish.model is not None and not Path(wish.model).is_file():
        raise ConfigError(
            f"--laya-model {wish.model}: there is no such file", hint="name Laya's .gguf file"
        )


def describe(planned: RoutingPlan) -> list[str]:
    """Return the routes and the scorer as lines for people."""
    wish, routes = planned.scorer, planned.routes
    asked = "nobody is asked: only the size decides"
    if wish is not None and wish.port is not None:
        asked = f"Laya on port {wish.port} is asked"
    elif wish is not None:
        made = scorer_plan(wish.kind, command=wish.command, model=wish.model)
        asked = f"Laya ({Path(made.arguments[0]).name}) is asked"
    reasons = {name: f" ({why})" if why else "" for name, why in routes.whys.items()}
    return [
        asked,
        *(f"{name} -> {device}{reasons.get(name, '')}" for name, device in routes.devices.items()),
        f"else -> {routes.default}",
    ]
