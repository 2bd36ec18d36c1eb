"""From a command line to a plan: read the file, find the programs, look at the model, decide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from onebit_serve.cli import flags
from onebit_serve.core import config as settings
from onebit_serve.core import plan, presets
from onebit_serve.core.access import Access
from onebit_serve.core.config import Backend, Config
from onebit_serve.core.errors import BackendError, ConfigError, UsageError
from onebit_serve.core.facts import BinaryFacts
from onebit_serve.core.plan import Found
from onebit_serve.core.prompt_plan import PromptFile
from onebit_serve.core.routing import wanted
from onebit_serve.live import doorkeeper, machine
from onebit_serve.live.files import check_regular, read_regular

__all__ = ["Prepared", "prepare", "read_config"]


# What decides which backend it is, and so which options are known.
_DECIDES = frozenset(
    f"backend.{key}"
    for key in ("device", "hrx_libhsa", "llama_server", "mlx_server", "prefill_device", "zinc")
)


_WORTH_A_LOOK_BYTES = 1 << 30  # smaller models fit where anything fits


class Prepared(msgspec.Struct, frozen=True):
    """What was found and what was decided.

    Args:
        request: The command line.
        config: All settings.
        found: The backends, each with its program and, where it is a file, its model.
        plan: What will run.
        access: Who may talk to it.
    """

    request: flags.Request
    config: Config
    found: tuple[Found, ...]
    plan: plan.Plan
    access: Access


def prepare(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    starts: bool = False,
    anew: bool = False,
    again: bool = False,
) -> Prepared:
    """Check a command line against files and programs, and plan its run.

    Args:
        words: What stood after `1bit serve`.
        environment: The user's environment.
        starts: The plan will be carried out: folders that it needs are made.
        anew: Programs are asked for their devices now, whatever they said last time.
        again: It is a reload: what was a pipe at the start cannot be read once more.

    Raises:
        UsageError: Anything that cannot work.
    """
    # Which options are the backend's depends on which backend it is, and that on our own options.
    request = flags.read(words, None)
    # Settings are settled twice, but a pipe says what it has to say once.
    read = functools.cache(functools.partial(read_config, again=again))
    config = _settle(request, environment, read)
    if config.backends:
        if request.child:
            raise UsageError(
                f"{request.child[0]} is for one backend, and there are several [[backends]]",
                hint="write it into `args` where the backend is",
            )
        found = tuple(_look(one, request, environment, anew=anew) for one in config.backends)
    else:
        one = _look(config.backend, request, environment, anew=anew)
        if request.unchecked:
            request = flags.read(words, one.binary.options)
            config = _settle(request, environment, read)
            one = _look(config.backend, request, environment, anew=anew)
        args = (*one.backend.args, *request.child)
        backend = msgspec.structs.replace(one.backend, args=args)
        config = msgspec.structs.replace(config, backend=backend)
        found = (msgspec.structs.replace(one, backend=backend),)
    prompts = _prompts(config, environment, make_folder=starts and not request.dry_run)
    access, warning = doorkeeper.rules(config.server, environment, again=again)

    def decide(ones: tuple[Found, ...]) -> plan.Plan:
        made = plan.make(
            config, ones, environment=environment, embedded=request.embedded, prompts=prompts
        )
        return msgspec.structs.replace(made, warnings=_memory_warnings(made, ones))

    decided = _routed(config, found, decide) if wanted(config.laya) else decide(found)
    warnings = ((warning,) if warning else ()) + decided.warnings
    decided = msgspec.structs.replace(decided, warnings=warnings)
    return Prepared(request=request, config=config, found=found, plan=decided, access=access)


def _routed(
    config: Config, found: tuple[Found, ...], decide: Callable[[tuple[Found, ...]], plan.Plan]
) -> plan.Plan:
    """Plan with routes: over the backends that are described, or over the devices there are."""
    from onebit_serve.cli import routing  # for those who route

    if config.backends:
        return routing.route(config, decide(found), found, {})
    found, unusable = routing.spread(found[0], lambda one: decide((one,)))
    return routing.keep_used(routing.route(config, decide(found), found, unusable))


def _memory_warnings(decided: plan.Plan, found: tuple[Found, ...]) -> tuple[str, ...]:
    """Return what to say of models that may not fit.

    Raises:
        BackendError: One cannot fit.
    """
    large = [
        (backend, one)
        for backend, one in zip(decided.backends, found, strict=True)
        if one.model and one.model.size_bytes >= _WORTH_A_LOOK_BYTES
    ]
    if not large:
        return ()
    from onebit_serve.core import memory  # psutil's import is worth it for large models only
    from onebit_serve.live.free_memory import machine_memory

    total_bytes, free_bytes = machine_memory()
    warnings = []
    for backend, one in large:
        fit = memory.check(
            backend,
            one.model,
            one.binary.devices,
            machine_total_bytes=total_bytes,
            machine_free_bytes=free_bytes,
        )
        if fit.word == "too_large" and not backend.limits.allow_cpu_fallback:
            raise BackendError(fit.message, hint="take a smaller quantisation, or another device")
        if fit.message:
            warnings.append(fit.message)
    return tuple(warnings)


def _look(
    backend: Backend, request: flags.Request, environment: Mapping[str, str], *, anew: bool
) -> Found:
    """Find what one backend needs."""
    libhsa = _libhsa(backend, environment)
    binary = _program(backend, request, environment, libhsa, anew=anew)
    is_file = _kind(backend) != "mlx"
    model = machine.model_facts(backend.model, environment) if backend.model and is_file else None
    if backend.mtp:
        machine.model_facts(backend.mtp, environment)
    return Found(backend=backend, binary=binary, model=model, libhsa=libhsa)


def read_config(path: str, *, again: bool = False) -> Config:
    """Read a configuration file.

    Args:
        path: Where; at the first time it may be a pipe.
        again: It was read before.

    Raises:
        ConfigError: It cannot be read, is no UTF-8 text, or says something that cannot be used.
    """
    try:
        if again:
            check_regular(Path(path))
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"--config {path}: there is no such file", hint="configs/serve.toml is a sample"
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            f"--config {path} is a directory", hint="name the file in it, for example serve.toml"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {path} is not UTF-8 text (byte {error.start})", hint="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--config {path} cannot be read: {reason}",
            hint="a reload reads regular files only; check also its owner and mode"
            if again
            else "check its owner and mode",
        ) from None
    return settings.parse(text, path)


def _prompts(config: Config, environment: Mapping[str, str], *, make_folder: bool) -> PromptFile:
    """Read the warm prompts, and find the folder where slots may be saved."""
    name = config.warm_prompts.file
    if name is None:
        return PromptFile()
    from onebit_serve.core.warm_prompts import parse  # for those who have such a file
    from onebit_serve.live.saves import private_directory, slots_folder

    where = f"--warm-prompts {name}"
    try:
        entries = parse(read_regular(name), where)
    except OSError as error:
        raise UsageError(
            f"{where} cannot be read: {error.strerror}",
            hint="name a JSON file: a list of lists of chat messages",
        ) from None
    folder = slots_folder(environment)
    if folder is not None and make_folder:
        try:
            private_directory(folder)
        except UsageError:
            if config.warm_prompts.save:
                raise
            folder = None  # without it slots are cleared in another way
    return PromptFile(entries, str(folder or ""))


def _settle(
    request: flags.Request, environment: Mapping[str, str], read: Callable[[str], Config]
) -> Config:
    config = Config() if request.config is None else read(request.config)
    config = settings.with_environment(config, environment)
    if request.embedded:
        program, model = machine.embedded()
        backend = msgspec.structs.replace(
            config.backend, llama_server=program, model=model, device="cpu"
        )
        config = msgspec.structs.replace(config, backend=backend)
    said = request.settings
    if request.unchecked:  # the value of an option that is not known yet may look like a flag
        said = {key: value for key, value in said.items() if key in _DECIDES}
    return settings.with_flags(config, said)


def _kind(backend: Backend) -> plan.Kind:
    preset = presets.PRESETS.get(backend.device.lower())
    return preset.kind if preset else "llama-server"


def _libhsa(backend: Backend, environment: Mapping[str, str]) -> str | None:
    if backend.hrx_libhsa and not Path(backend.hrx_libhsa).is_file():
        raise UsageError(
            f"--hrx-libhsa {backend.hrx_libhsa}: there is no such file",
            hint="name the libhsa-runtime64.so.1 itself",
        )
    return machine.find_libhsa() if plan.wants_libhsa(backend, environment) else None


def _program(
    backend: Backend,
    request: flags.Request,
    environment: Mapping[str, str],
    libhsa: str | None,
    *,
    anew: bool,
) -> BinaryFacts:
    kind = _kind(backend)
    if kind != "llama-server":
        named = backend.zinc if kind == "zinc" else backend.mlx_server
        return BinaryFacts(path=_other_program(kind, named, environment))
    flag = request.settings.get("backend.llama_server", ("", None))[1]
    if request.embedded and not flag:
        flag = backend.llama_server
    path = machine.find_llama_server(flag, backend.llama_server, environment)
    # HRX lists its device only where it finds the HSA runtime.
    hsa = backend.hrx_libhsa or libhsa
    asked = {**environment, **({plan.LIBHSA_VARIABLE: hsa} if hsa else {}), **backend.env}
    return machine.binary_facts(path, asked, anew=anew, for_cpu=backend.device == "cpu")


def _other_program(kind: plan.Kind, named: str | None, environment: Mapping[str, str]) -> str:
    import shutil  # slow to import, and only these programs need it

    program = named or presets.PRESETS[kind].program
    found = shutil.which(program, path=environment.get("PATH"))
    if found is None:
        flag = "--zinc" if kind == "zinc" else "--mlx-server"
        where = f"{flag} {named}: no program there" if named else f"{program} is not on PATH"
        raise UsageError(where, hint=f"name the program with {flag} PATH")
    return str(Path(found).absolute())
