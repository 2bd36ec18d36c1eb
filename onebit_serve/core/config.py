"""The settings of `1bit serve`: TOML text, variables and flags into one checked struct.

Three layers write the same keys, each wins over the one before: `parse` (the file), then
`with_environment` (`ONEBIT_TABLE_KEY`), then `with_flags`. Every value is checked where it enters,
so an error names the file, the variable or the flag it came from. `configs/serve.toml` is the
manual of the keys. Reading the file is the caller's: this module takes text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from onebit_serve.core.errors import ConfigError, nearest

__all__ = [
    "Backend",
    "Config",
    "Laya",
    "Log",
    "Server",
    "WarmPrompts",
    "Warmup",
    "parse",
    "with_environment",
    "with_flags",
]

# The upper bounds only catch slips (a size in bits, milliseconds for seconds); the description is
# what an error message says is wanted.
Port = Annotated[
    int, Meta(ge=0, le=65535, description="a port from 0 to 65535 (0 takes a free one)")
]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1, description="a whole number, 0 or more")]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1, description="a whole number, 1 or more")]
Slots = Annotated[
    int, Meta(ge=-1, le=4096, description="a number of slots (0 or -1: llama-server's)")
]
Bytes = Annotated[int, Meta(ge=0, le=2**50, description="a number of bytes, 0 or more")]
Seconds = Annotated[float, Meta(ge=0, le=1e9, description="seconds, 0 or more")]
Milliseconds = Annotated[float, Meta(ge=0, le=1e9, description="milliseconds, 0 or more")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Switch = Annotated[bool, Meta(description="true or false")]
Text = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
Texts = Annotated[tuple[Text, ...], Meta(description="a list of texts")]
Words = Annotated[tuple[str, ...], Meta(description="a list of texts")]
Variables = Annotated[dict[Text, str], Meta(description='a table of texts, { NAME = "value" }')]


class Server(msgspec.Struct, frozen=True):
    """The front door: `[server]`.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        api_key_file: File with one API key a line.
        allow_remote: Listen on a host that is not loopback without a key.
        allowed_hosts: More values of `Host` that are answered.
        allowed_origins: More values of `Origin` that may write.
        max_body_bytes: Largest request body in bytes; 0 is no limit.
        park_s: Seconds a request waits for a backend that starts or restarts; 0 is no limit.
        ping_s: Seconds of silence after which a waiting stream gets a comment; 0 is never.
        drain_s: Seconds that running requests get at a stop; 0 is no limit.
        stop_s: Seconds that a backend gets to end, from the first signal until it is killed.
    """

    host: Text = "127.0.0.1"
    port: Port = 8000
    api_key_file: Text | None = None
    allow_remote: Switch = False
    allowed_hosts: Texts = ()
    allowed_origins: Texts = ()
    max_body_bytes: Bytes = 64 * 1024 * 1024
    park_s: Seconds = 600.0
    ping_s: Seconds = 0.0
    drain_s: Seconds = 30.0
    stop_s: Seconds = 10.0


class Backend(msgspec.Struct, frozen=True):
    """One child server: `[backend]`, and the defaults of every `[[backends]]`.

    Args:
        name: Its name in status and logs; the device's word where there is none.
        model: The GGUF file, or the Hugging Face id for mlx.
        device: `hrx`, `vulkan`, `rocm`, `cpu`, `zinc`, `mlx`, `auto`, or a listed name.
        alias: The served id; else the model's file name without `.gguf`.
        ctx_size: Context in tokens; 0 leaves it to the program.
        parallel: Slots; 0 or -1 leaves them to the program.
        llama_server: The llama-server to run.
        hrx_libhsa: The `libhsa-runtime64.so.1` that HRX loads.
        zinc: The zinc to run.
        mlx_server: The lemon-mlx-server to run.
        mtp: Draft head for multi-token prediction, a GGUF file.
        mtp_max: Most tokens drafted at once; 0 leaves it to llama-server.
        mtp_p_min: Least probability of a drafted token; `None` leaves it to llama-server.
        prefill_device: Device that prefills for `device = "vulkan"`.
        prefill_min_tokens: Shortest prompt that `prefill_device` takes; 0 leaves it to the program.
        role: What the model is for.
        args: Further arguments of the program.
        env: Variables added to its environment.
        lazy: Start at the first request.
        idle_s: Seconds without a request after which a lazy one is stopped; 0 is never.
        pin: Never stop it to make room for another.
        max_in_flight: Most requests it gets at once; 0 is no limit.
        queue: Most requests that wait for it.
        restart: Start it again when it dies.
        hang_s: Seconds without progress on real work after which it counts as hung; 0 is never.
        load_stall_s: Seconds without progress after which a load has failed; 0 is never.
        load_limit_s: Seconds after which a load has failed; 0 is never.
        allow_cpu_fallback: Accept layers on the CPU that were meant for the device.
    """

    name: Text | None = None
    model: Text | None = None
    device: Text = "auto"
    alias: Text | None = None
    ctx_size: Count = 0
    parallel: Slots = 0
    llama_server: Text | None = None
    hrx_libhsa: Text | None = None
    zinc: Text | None = None
    mlx_server: Text | None = None
    mtp: Text | None = None
    mtp_max: Count = 0
    mtp_p_min: Share | None = None
    prefill_device: Text | None = None
    prefill_min_tokens: Count = 0
    role: Literal["chat", "embedding", "rerank"] = "chat"
    args: Words = ()
    env: Variables = {}
    lazy: Switch = False
    idle_s: Seconds = 0.0
    pin: Switch = False
    max_in_flight: Count = 0
    queue: Count = 64
    restart: Switch = True
    hang_s: Seconds = 120.0
    load_stall_s: Seconds = 120.0
    load_limit_s: Seconds = 0.0
    allow_cpu_fallback: Switch = False


class Warmup(msgspec.Struct, frozen=True):
    """The synthetic requests before ready, and while idle: `[warmup]`.

    Args:
        enabled: Off is off for every device.
        devices: Devices that are warmed up; `None` is every one but `cpu`.
        prompt_tokens: Tokens of the first request's prompt.
        decode_tokens: Tokens it generates.
        deadline_s: Seconds until one that still progresses is cancelled; 0 is no limit.
        budget_s: Seconds that further shapes may take before ready.
        idle: Warm the remaining shapes while the backend is idle.
        idle_max_ms: Longest idle prefill in predicted milliseconds; 0 is no limit. 512 tokens at
            the speed of a 27B model on HRX (1.5 ms a token) are within it.
    """

    enabled: Switch = True
    devices: Texts | None = None
    prompt_tokens: Positive = 465
    decode_tokens: Positive = 8
    deadline_s: Seconds = 300.0
    budget_s: Seconds = 3.0
    idle: Switch = True
    idle_max_ms: Milliseconds = 1000.0


class WarmPrompts(msgspec.Struct, frozen=True):
    """System prompts that are cached before ready: `[warm_prompts]`.

    Args:
        file: JSON list of lists of chat messages.
        concurrency: Most prompts prefilled at once; 0 is one for each slot.
        save: Keep what was computed on disk, for the next start.
    """

    file: Text | None = None
    concurrency: Count = 0
    save: Switch = False


class Laya(msgspec.Struct, frozen=True):
    """The model that sorts requests into classes: `[laya]`.

    Args:
        enabled: Route requests; also on where `scorer`, `model`, `url`, `command` or `policy` is.
        scorer: How it is asked.
        model: Its file.
        url: Its address, where it runs already.
        command: How to start it.
        policy: JSON file that maps class to device.
        deadline_s: Seconds it has for one answer.
    """

    enabled: Switch = False
    scorer: Literal["daemon", "http", "llama-server"] | None = None
    model: Text | None = None
    url: Text | None = None
    command: Words = ()
    policy: Text | None = None
    deadline_s: Seconds = 2.0


class Log(msgspec.Struct, frozen=True):
    """What is said on stderr: `[log]`.

    Args:
        format: Lines to read, or one JSON object a line.
        level: The least important line that is said.
        file: A file that gets the same lines.
        backends_dir: Folder that gets what each backend prints, as `NAME.log`.
        max_bytes: Size in bytes at which a file turns over; 0 is never.
        keep: How many full files are kept of each.
    """

    format: Literal["plain", "json"] = "plain"
    level: Literal["debug", "info", "warning", "error"] = "info"
    file: Text | None = None
    backends_dir: Text | None = None
    max_bytes: Bytes = 10 * 1024 * 1024
    keep: Count = 3


class Config(msgspec.Struct, frozen=True):
    """All settings of one run."""

    server: Server = Server()
    backend: Backend = Backend()
    backends: tuple[Backend, ...] = ()
    warmup: Warmup = Warmup()
    warm_prompts: WarmPrompts = WarmPrompts()
    laya: Laya = Laya()
    log: Log = Log()


# `ONEBIT_*` variables that are no keys: ours, and those that backends read.
OTHER_VARIABLES = frozenset(
    {
        "ONEBIT_API_KEY",
        "ONEBIT_LLAMA_SERVER",
        "ONEBIT_NO_WARMUP",
        "ONEBIT_PREFILL_DEVICE",
        "ONEBIT_PREFILL_MIN_TOKENS",
        "ONEBIT_SUPERVISOR",
        "ONEBIT_URL",
    }
)

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})

_TABLES: dict[str, type[msgspec.Struct]] = {
    "server": Server,
    "backend": Backend,
    "warmup": Warmup,
    "warm_prompts": WarmPrompts,
    "laya": Laya,
    "log": Log,
}

_T = TypeVar("_T", bound=msgspec.Struct)


_OF_ONE = frozenset({"alias", "model", "name"})  # what several backends cannot have in common


def parse(text: str, where: str) -> Config:
    """Read a configuration file's text.

    Args:
        text: TOML.
        where: The file's name, for messages.

    Raises:
        ConfigError: It is not TOML, has an unknown table or key, or a value that cannot be used.
    """
    import tomli  # only those who have a file pay for its parser

    try:
        document = tomli.loads(text)
    except (tomli.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not TOML: {error}", hint="see configs/serve.toml") from None
    config = Config()
    several = document.pop("backends", None)
    for table, content in document.items():
        if table not in _TABLES:
            what = (
                f"table [{table}]" if isinstance(content, dict) else f"key {table} outside a table"
            )
            raise ConfigError(f"{where} has an unknown {what}", hint=_place_of(table))
        if not isinstance(content, dict):
            raise ConfigError(
                f"{where}: {table} is {_shown(content)}, wanted a table", hint=f"write [{table}]"
            )
        config = _replace(config, table, _fill(getattr(config, table), table, content, where))
    if several is not None:
        config = msgspec.structs.replace(config, backends=_backends(config, several, where))
    return config


def with_environment(config: Config, environment: Mapping[str, str]) -> Config:
    """Return the settings with what `ONEBIT_TABLE_KEY` variables and `ONEBIT_NO_WARMUP` say.

    Raises:
        ConfigError: A value cannot be used, or a variable looks like ours and names no key.
    """
    keys = _variables()
    for name in sorted(n for n in environment if n.startswith("ONEBIT_")):
        if name in keys:
            if not environment[name]:
                continue  # set to nothing is not set, as shells have it
            table, key = keys[name]
            config = _set(config, table, key, environment[name], name)
        elif name not in OTHER_VARIABLES:
            _refuse_variable(name)
    said = environment.get("ONEBIT_NO_WARMUP", "").strip().lower()
    if said not in _TRUE | _FALSE:
        raise ConfigError(
            f"ONEBIT_NO_WARMUP is {_shown(said)}, wanted true or false",
            hint="1, true and yes turn the warm-up off; 0, false, no and nothing keep it",
        )
    if said in _TRUE:
        config = _set(config, "warmup", "enabled", value=False, where="ONEBIT_NO_WARMUP")
    return config


def with_flags(config: Config, flags: Mapping[str, tuple[str, Any]]) -> Config:
    """Return the settings with what the command line says.

    Args:
        config: The settings so far.
        flags: `table.key` to the flag's name, for messages, and its value; text is converted.

    Raises:
        ConfigError: A value cannot be used.
    """
    for path, (flag, value) in flags.items():
        table, key = path.split(".")
        config = _set(config, table, key, value, flag)
    return config


@cache
def _variables() -> dict[str, tuple[str, str]]:
    return {
        f"ONEBIT_{table}_{key}".upper(): (table, key)
        for table, struct in _TABLES.items()
        for key in struct.__struct_fields__
    }


def _refuse_variable(name: str) -> None:
    # Backends have variables of their own: only what begins like a table of ours, or is a letter
    # or two from a known name, is a slip.
    known = (*_variables(), *OTHER_VARIABLES)
    hint = nearest(name, known, cutoff=0.9)
    if hint or any(name.startswith(f"ONEBIT_{table}_".upper()) for table in _TABLES):
        raise ConfigError(
            f"the variable {name} names no key of the configuration",
            hint=hint or nearest(name, known) or "unset it",
        )


def _replace(config: Config, table: str, content: msgspec.Struct) -> Config:
    changed: dict[str, Any] = {table: content}
    return msgspec.structs.replace(config, **changed)


def _set(config: Config, table: str, key: str, value: object, where: str) -> Config:
    field = _fields(_TABLES[table])[key]
    if isinstance(value, str):
        value = _from_text(value, field.type, where)
    changed = {key: _checked(value, field, where)}
    if table == "backend" and config.backends:
        if key in _OF_ONE:
            raise ConfigError(
                f"{where} is for one backend, and there are {len(config.backends)} [[backends]]",
                hint=f"write {key} where the backend is",
            )
        several = tuple(msgspec.structs.replace(one, **changed) for one in config.backends)
        config = msgspec.structs.replace(config, backends=several)
    return _replace(config, table, msgspec.structs.replace(getattr(config, table), **changed))


def _fill(base: _T, table: str, content: dict[str, Any], where: str) -> _T:
    fields = _fields(type(base))
    changed = {}
    for key, value in content.items():
        if key not in fields:
            raise ConfigError(
                f"{where}: [{table}] has no key {key}",
                hint=nearest(key, tuple(fields)) or f"its keys are {', '.join(fields)}",
            )
        changed[key] = _checked(value, fields[key], f"{where}: [{table}] {key}")
    return msgspec.structs.replace(base, **changed)


def _backends(config: Config, several: object, where: str) -> tuple[Backend, ...]:
    if not isinstance(several, list) or not all(isinstance(one, dict) for one in several):
        raise ConfigError(f"{where}: backends is no list of tables", hint="write [[backends]]")
    return tuple(_fill(config.backend, "backends", one, where) for one in several)


def _place_of(name: str) -> str:
    homes = [home for home in _TABLES if hasattr(getattr(Config(), home), name)]
    if homes:
        return f"write {name} under {' or '.join(f'[{home}]' for home in homes)}"
    return nearest(name, (*_TABLES, "backends")) or f"known are {', '.join(_TABLES)}"


@cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(struct)}


def _checked(value: object, field: msgspec.structs.FieldInfo, label: str) -> Any:
    try:
        return msgspec.convert(value, field.type)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{label} is {_shown(value)}, wanted {_wanted(field.type)}",
            hint="configs/serve.toml explains every key",
        ) from None


def _from_text(text: str, wanted: Any, where: str) -> object:
    """Read a variable's or a flag's text as what a key wants; what does not fit stays text."""
    kinds = _kinds(wanted)
    if bool in kinds and text.strip().lower() in _TRUE | _FALSE:
        return text.strip().lower() in _TRUE
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                return text
    if wanted is Words:  # arguments, as a shell would split them
        import shlex

        try:
            return shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{where} cannot be split into words: {error}") from None
    if tuple in kinds:
        return [word.strip() for word in text.split(",") if word.strip()]
    if dict in kinds:
        pairs = (pair.partition("=") for pair in text.split(",") if pair.strip())
        return {name.strip(): value for name, _, value in pairs}
    return text


def _kinds(wanted: Any) -> frozenset[type]:
    """Return the plain types behind an annotation: `Annotated[int, ...] | None` has int."""
    if get_origin(wanted) is Annotated:
        return _kinds(get_args(wanted)[0])
    if get_origin(wanted) in {Union, UnionType}:
        return frozenset().union(*(_kinds(one) for one in get_args(wanted)))
    return frozenset({get_origin(wanted) or wanted})


def _wanted(wanted: Any) -> str:
    """Say in words what a key takes."""
    if get_origin(wanted) is Literal:
        return " or ".join(get_args(wanted))
    if get_origin(wanted) is Annotated:
        return str(get_args(wanted)[1].description)
    return " or ".join(_wanted(one) for one in get_args(wanted) if one is not type(None))


def _shown(value: object) -> str:
    """Show a value as it was written, cut to a line."""
    limit = 80
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
