"""From configuration and facts to what will be run: commands, environment, warm-up, order."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from onebit_serve.core import options, presets
from onebit_serve.core.caches import CachePlan, plan_caches
from onebit_serve.core.config import Backend, Config, Log, Server
from onebit_serve.core.errors import UsageError, nearest
from onebit_serve.core.facts import BinaryFacts, ModelFacts
from onebit_serve.core.folders import cache_folder
from onebit_serve.core.limits import Limits, limits_of
from onebit_serve.core.placement import LOG_LEVEL
from onebit_serve.core.presets import Preset
from onebit_serve.core.prompt_plan import PromptFile, PromptPlan, equip, plan_prompts
from onebit_serve.core.routing import RoutingPlan

__all__ = [
    "LIBHSA_VARIABLE",
    "BackendPlan",
    "Found",
    "Kind",
    "Limits",
    "Plan",
    "Role",
    "WarmUp",
    "choose_device",
    "is_loopback",
    "make",
    "served_id",
    "wants_libhsa",
]

Kind = Literal["llama-server", "zinc", "mlx"]
Role = Literal["chat", "embedding", "rerank"]


class WarmUp(msgspec.Struct, frozen=True):
    """The synthetic request that a backend gets between load and ready.

    Args:
        prompt_tokens: Tokens of its prompt; sized down where the context is smaller.
        decode_tokens: Tokens it generates.
        deadline_s: Seconds until a warm-up that still progresses is cancelled, its retry included;
            infinite where there is no limit.
        skip: Why there is none (`cpu`, `off`), or empty.
        budget_s: Seconds that further shapes may take before ready; 0 warms none.
        idle: Whether the rest is warmed while the backend is idle.
        idle_max_s: Longest predicted prefill of that, in seconds; 0 is no limit.
    """

    prompt_tokens: int = 465
    decode_tokens: int = 8
    deadline_s: float = 300.0
    skip: str = ""
    budget_s: float = 0.0
    idle: bool = False
    idle_max_s: float = 1.0


class BackendPlan(msgspec.Struct, frozen=True):
    """One backend as it will be started.

    Args:
        name: Its name in status, logs and the admin routes; unique in a plan.
        served_id: The model id that clients see.
        device: The word that log lines use (`hrx`, `vulkan`, `rocm`, `cpu`, `zinc`, `mlx`, or a
            listed name such as `CUDA0`).
        kind: What program it is, and so which protocol details hold.
        role: What the model is for.
        binary: The program, absolute.
        model: The model as the command line names it.
        arguments: Its command line without the program; `{port}` stands for the port.
        set_env: Variables added to the user's environment.
        unset_env: Variables of the user's environment that the child must not see.
        warm_up: The synthetic request between load and ready.
        upstream_model: For zinc and mlx only: the id to put into `model` on the way in ("" removes
            the key); `None` leaves bodies unchanged.
        assemble: Replies that don't stream are asked for as streams and put together here, since
            this build does not notice a client that leaves otherwise.
        lazy: It starts when a request first needs it, and `/health` does not wait for it.
        limits: How long and how much it may take.
        prompts: What is put into its prompt cache before ready.
        caches: Where its driver and runtime keep what they compile.
        size_bytes: Its model's size, which is about what loading it takes; 0 where unknown.
    """

    name: str
    served_id: str
    device: str
    kind: Kind
    role: Role
    binary: str
    model: str
    arguments: tuple[str, ...]
    set_env: dict[str, str] = {}
    unset_env: tuple[str, ...] = ()
    warm_up: WarmUp = WarmUp()
    upstream_model: str | None = None
    assemble: bool = False
    lazy: bool = False
    limits: Limits = Limits()
    prompts: PromptPlan = PromptPlan()
    caches: CachePlan = CachePlan()
    size_bytes: int = 0

    def command(self, port: int) -> list[str]:
        """Return the whole command line for one port."""
        return [self.binary, *(a.replace("{port}", str(port)) for a in self.arguments)]

    def same_child(self, other: BackendPlan) -> bool:
        """Whether a child that was started for the other plan serves this one as well.

        Whether it is lazy, when it leaves and how many it takes is asked at the moment it counts.
        """
        names = ("idle_s", "max_in_flight", "pin", "queue")
        theirs = {name: getattr(other.limits, name) for name in names}
        limits = msgspec.structs.replace(self.limits, **theirs)
        return msgspec.structs.replace(self, lazy=other.lazy, limits=limits) == other


class Plan(msgspec.Struct, frozen=True):
    """All that one run of `1bit serve` needs to know.

    Args:
        server: The front door's settings; port 0 takes a free one.
        log: How and where to log.
        backends: In order of start; they are stopped in reverse.
        warnings: What to say before the start.
        routing: How requests are routed, `None` where their `model` alone decides.
    """

    server: Server
    log: Log
    backends: tuple[BackendPlan, ...]
    warnings: tuple[str, ...] = ()
    routing: RoutingPlan | None = None


# Where HRX looks for the HSA runtime (IREE's documentation of the amdgpu driver).
LIBHSA_VARIABLE = "IREE_HAL_AMDGPU_LIBHSA_PATH"


class Found(msgspec.Struct, frozen=True):
    """What was found for one backend.

    Args:
        backend: Its settings.
        binary: What is known of the program that will run.
        model: What the model's header says; `None` for a model that is no file (mlx).
        libhsa: The HSA runtime that was found, for HRX.
    """

    backend: Backend
    binary: BinaryFacts
    model: ModelFacts | None = None
    libhsa: str | None = None


def make(
    config: Config,
    found: Sequence[Found],
    *,
    environment: Mapping[str, str],
    embedded: bool = False,
    prompts: PromptFile | None = None,
) -> Plan:
    """Decide what one run of `1bit serve` starts, and how.

    Args:
        config: All settings.
        found: The backends, in order of start, with what was found for each.
        environment: The user's environment.
        embedded: The embedded default was asked for: its warm-up shows on the CPU too.
        prompts: The warm prompts of all backends that chat, `None` for none.

    Raises:
        UsageError: The settings contradict each other, a binary or a model.
    """
    file = prompts or PromptFile()
    plans = [_backend(config, one, environment, file, embedded=embedded) for one in found]
    server = msgspec.structs.replace(config.server, host=config.server.host.strip("[]"))
    return Plan(server=server, log=config.log, backends=_named(plans))


def _named(plans: Sequence[BackendPlan]) -> tuple[BackendPlan, ...]:
    """Give those without a name one: the device's word, or the served id among several."""
    named: list[BackendPlan] = []
    for plan in plans:
        alone = len(plans) == 1
        twins = [one for one in plans if one.served_id == plan.served_id]
        same = f"{plan.served_id}-{plan.device}" if len(twins) > 1 else plan.served_id
        name = plan.name or (plan.device if alone else same)
        if name in {one.name for one in named}:
            raise UsageError(
                f"two backends are called {name}", hint="give each its own `name` in [[backends]]"
            )
        named.append(msgspec.structs.replace(plan, name=name))
    return tuple(named)


def _backend(
    config: Config,
    found: Found,
    environment: Mapping[str, str],
    prompts: PromptFile,
    *,
    embedded: bool,
) -> BackendPlan:
    backend, binary, model, libhsa = found.backend, found.binary, found.model, found.libhsa
    if backend.model is None:
        raise UsageError("no model is named", hint="name one with -m MODEL.gguf, or try --embedded")
    options.check_extra(backend.args)
    preset = choose_device(backend, binary)
    _check_fits(backend, preset, binary)
    if _role(backend) != "chat":
        prompts = PromptFile()
    elif preset.kind == "llama-server":
        backend = equip(backend, prompts, binary, environment)
    seen = {**environment, **backend.env}
    devices = f"{preset.word},hrx" if backend.prefill_device else preset.word
    caches = plan_caches(devices, seen, root=cache_folder(environment))
    set_env = {**caches.set_env, **_set_env(backend, preset, environment, libhsa)}
    build = {"llama-server": _llama_server, "zinc": _zinc, "mlx": _mlx}[preset.kind]
    identity = served_id(backend, preset.kind)
    arguments = build(backend, preset, binary, model, identity)
    unset_env = (*options.ALWAYS_UNSET, *options.variables_of(arguments))
    for name in backend.env:
        if name in unset_env:
            raise UsageError(
                f"[backend] env sets {name}, which `1bit serve` keeps from the backend",
                hint="use the flag or key of the same meaning",
            )
    return BackendPlan(
        name=backend.name or "",
        served_id=identity,
        device=preset.word,
        kind=preset.kind,
        role=_role(backend),
        binary=binary.path,
        model=backend.model or "",
        arguments=tuple(arguments),
        set_env=set_env,
        unset_env=unset_env,
        warm_up=_warm_up(config, preset, embedded=embedded),
        upstream_model={"llama-server": None, "zinc": "", "mlx": backend.model}[preset.kind],
        assemble=preset.kind == "llama-server" and presets.misses_departures(binary.version),
        lazy=backend.lazy,
        limits=limits_of(backend),
        prompts=plan_prompts(prompts, config.warm_prompts, arguments, binary, model, seen),
        caches=caches,
        size_bytes=model.size_bytes if model else 0,
    )


def choose_device(backend: Backend, binary: BinaryFacts) -> Preset:
    """Choose the device: the one asked for, or the first of `auto` that the binary lists.

    Raises:
        UsageError: The binary does not list what was asked for.
    """
    listed = {device.name.lower(): device.name for device in binary.devices}
    asked = "cpu" if backend.device.lower() == "none" else backend.device.lower()
    by_listed = {p.listed.lower(): p for p in presets.PRESETS.values() if p.listed}
    if asked == "auto":
        words = [
            word
            for word in presets.AUTO_ORDER
            if (presets.PRESETS[word].listed or "").lower() in listed
        ]
        others = [name for name in listed.values() if name not in presets.NOT_FOR_AUTO]
        return presets.preset(next(iter([*words, *others, "cpu"])))
    found = presets.PRESETS.get(asked) or by_listed.get(asked)
    if found is None:
        # Several devices at once are llama-server's own `--device CUDA0,CUDA1`.
        parts = asked.split(",")
        if all(part in listed for part in parts):
            return presets.preset(",".join(listed[part] for part in parts))
    elif found.listed is None or found.listed.lower() in listed:
        return found
    names = ", ".join(listed.values()) or "none"
    raise UsageError(
        f"{binary.path} lists no device {backend.device}; it lists {names}",
        hint=nearest(asked, (*presets.PRESETS, *listed))
        if found is None
        else "name one that it lists, `cpu`, or another --llama-server",
    )


def wants_libhsa(backend: Backend, environment: Mapping[str, str]) -> bool:
    """Say whether the HSA runtime has to be looked for: HRX may run, and nobody named one."""
    told = backend.hrx_libhsa or environment.get(LIBHSA_VARIABLE) or LIBHSA_VARIABLE in backend.env
    return not told and (
        backend.device.lower() in {"auto", "hrx", "hrx0"} or backend.prefill_device is not None
    )


def served_id(backend: Backend, kind: Kind = "llama-server") -> str:
    """Return the model id that clients see: the alias, else the file's name without `.gguf`.

    A split model drops its `-00001-of-00003` (llama.cpp's naming). mlx models have an id already.
    """
    if backend.alias:
        # llama-server takes several names, the first one is the model's id.
        return backend.alias.partition(",")[0].strip() or backend.alias
    model = backend.model or ""
    if kind == "mlx":
        return model
    name = model.rstrip("/").rpartition("/")[2]
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.IGNORECASE) or name


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach a listening host."""
    host = host.strip("[]")
    return host in {"localhost", "::1"} or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))


def _uses_hrx(backend: Backend, preset: Preset) -> bool:
    return preset.word == "hrx" or (backend.prefill_device or "").lower() == "hrx"


def _role(backend: Backend) -> Role:
    if options.given(backend.args, "--embedding"):
        return "embedding"
    return "rerank" if options.given(backend.args, "--reranking") else backend.role


def _check_fits(backend: Backend, preset: Preset, binary: BinaryFacts) -> None:
    """Raise where settings need each other, or a program that this device does not run."""
    if preset.kind != "llama-server":
        for flag, is_set in (
            ("--ctx-size", backend.ctx_size and preset.kind == "mlx"),
            ("--parallel", backend.parallel > 0),
            ("--mtp", backend.mtp),
            ("--prefill-device", backend.prefill_device),
            ("--embedding and --reranking", backend.role != "chat"),
        ):
            if is_set:
                raise UsageError(f"{flag} is not for {preset.word}", hint="leave it out")
    if not backend.mtp and (backend.mtp_max or backend.mtp_p_min is not None):
        raise UsageError(
            "--mtp-max and --mtp-p-min need --mtp", hint="name the draft head with --mtp HEAD.gguf"
        )
    if backend.mtp and binary.options and "--spec-type" not in binary.options:
        raise UsageError(
            f"--mtp needs --spec-type, which {binary.path} does not have",
            hint="use a newer llama-server",
        )
    if backend.prefill_device:
        if backend.prefill_device.lower() != "hrx":
            raise UsageError(
                f"--prefill-device {backend.prefill_device}: only hrx can prefill for another",
                hint="write --prefill-device hrx",
            )
        if preset.word != "vulkan":
            raise UsageError(
                f"--prefill-device hrx needs --device vulkan, not {preset.word}",
                hint="add --device vulkan",
            )
        choose_device(msgspec.structs.replace(backend, device="hrx"), binary)
    elif backend.prefill_min_tokens:
        raise UsageError(
            "--prefill-min-tokens needs --prefill-device", hint="add --prefill-device hrx"
        )


def _llama_server(
    backend: Backend,
    preset: Preset,
    binary: BinaryFacts,
    model: ModelFacts | None,
    identity: str,
) -> list[str]:
    head = ["-m", backend.model or "", "--host", "127.0.0.1", "--port", "{port}"]
    head += ["--alias", backend.alias or identity]
    soft: list[tuple[str, ...]] = []
    if preset.device_argument:
        soft.append(("--device", preset.device_argument))
    soft += [p for p in preset.arguments if not binary.options or p[0] in binary.options]
    if "--metrics" in binary.options:
        soft.append(("--metrics",))
    if preset.word != "cpu" and "-lv" in binary.options:
        soft.append(("-lv", str(LOG_LEVEL)))
    if backend.ctx_size:
        soft.append(("-c", str(backend.ctx_size)))
    if backend.parallel > 0:
        soft.append(("-np", str(backend.parallel)))
    role = _role(backend)
    if role != "chat":
        soft.append(("--embedding",) if role == "embedding" else ("--reranking",))
        batch = _embedding_batch_tokens(backend, model)
        soft += [("-b", str(batch)), ("-ub", str(batch))] if batch else []
    if backend.mtp:
        soft += [("--spec-type", "draft-mtp"), ("-md", backend.mtp), ("-ngld", "99")]
        if backend.mtp_max:
            soft.append(("--spec-draft-n-max", str(backend.mtp_max)))
        if backend.mtp_p_min is not None:
            soft.append(("--spec-draft-p-min", str(backend.mtp_p_min)))
    if backend.prefill_device:
        soft.append(("-fa", "on"))
    # What the user says in llama-server's own words wins over what a preset or a key says.
    kept = [word for one in soft if not options.given(backend.args, one[0]) for word in one]
    return [*head, *kept, *backend.args]


def _embedding_batch_tokens(backend: Backend, model: ModelFacts | None) -> int:
    """Return the batch that holds the longest input of an embedding or reranking backend."""
    if backend.ctx_size:
        return backend.ctx_size
    trained = (model.context_length if model else None) or 0
    return min(trained, presets.EMBEDDING_BATCH_LIMIT_TOKENS)


def _zinc(
    backend: Backend, _preset: Preset, _binary: BinaryFacts, _model: ModelFacts | None, _id: str
) -> list[str]:
    context = ["-c", str(backend.ctx_size)] if backend.ctx_size else []
    return ["-m", backend.model or "", "-p", "{port}", *context, *backend.args]


def _mlx(
    backend: Backend, _preset: Preset, _binary: BinaryFacts, _model: ModelFacts | None, _id: str
) -> list[str]:
    return [backend.model or "", "--port", "{port}", *backend.args]


def _set_env(
    backend: Backend, preset: Preset, environment: Mapping[str, str], libhsa: str | None
) -> dict[str, str]:
    made = {n: v for n, v in preset.variables.items() if n not in environment}
    if _uses_hrx(backend, preset):
        path = backend.hrx_libhsa or (None if environment.get(LIBHSA_VARIABLE) else libhsa)
        if path:
            made[LIBHSA_VARIABLE] = path
    if backend.prefill_device:
        made["ONEBIT_PREFILL_DEVICE"] = "HRX0"
        if backend.prefill_min_tokens:
            made["ONEBIT_PREFILL_MIN_TOKENS"] = str(backend.prefill_min_tokens)
    return {**made, **backend.env}


def _warm_up(config: Config, preset: Preset, *, embedded: bool) -> WarmUp:
    devices = config.warmup.devices
    if devices is None:
        wanted = preset.warm or embedded
    else:
        names = {presets.device_word(name) for name in devices}
        wanted = embedded or not names.isdisjoint(
            {preset.word.lower(), (preset.listed or "").lower()}
        )
    off = "cpu" if preset.word == "cpu" else "off"
    return WarmUp(
        prompt_tokens=config.warmup.prompt_tokens,
        decode_tokens=config.warmup.decode_tokens,
        deadline_s=config.warmup.deadline_s or math.inf,
        skip="off" if not config.warmup.enabled else "" if wanted else off,
        budget_s=config.warmup.budget_s,
        idle=config.warmup.idle,
        idle_max_s=config.warmup.idle_max_ms / 1000,
    )
