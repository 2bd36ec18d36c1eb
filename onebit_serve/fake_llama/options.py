"""llama-server's command line: the options a supervisor meets, read and printed as it does.

The table holds what llama-server b10068 lists under these names, in our own words. An option that
is not in it is accepted and recorded (with the next argument as its value, if that is no option),
so that the fake can stand in for other builds; the knob `strict` makes it an error, as there.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["OPTIONS", "Option", "OptionError", "Options", "help_text", "read"]


class OptionError(Exception):
    """A command line that llama-server refuses; its text is what is printed."""


class Option(NamedTuple):
    """One option.

    Args:
        names: Its spellings; the last `--` one that is not `--no-...` keys the value.
        value: The placeholder of its value; empty for a switch.
        help: What it does.
        env: The variable that stands for it.
    """

    names: tuple[str, ...]
    value: str
    help: str
    env: str = ""

    @property
    def key(self) -> str:
        """The name under which the value is kept."""
        return next(n for n in reversed(self.names) if not n.startswith("--no-")).lstrip("-")


def _option(names: str, help_: str, env: str = "") -> Option:
    spellings, _, value = names.partition(" ")
    return Option(tuple(spellings.split(",")), value, help_, f"LLAMA_ARG_{env}" if env else "")


_COMMON = (
    _option("-h,--help,--usage", "print usage and exit"),
    _option("--version", "show version and build info"),
    _option("-t,--threads N", "CPU threads for generation (default: -1)", "THREADS"),
    _option("-tb,--threads-batch N", "CPU threads for prompts (default: as --threads)"),
    _option("-c,--ctx-size N", "context in tokens (default: 0, 0 = from model)", "CTX_SIZE"),
    _option("-n,--predict,--n-predict N", "tokens to predict (default: -1)", "N_PREDICT"),
    _option("-b,--batch-size N", "logical maximum batch size (default: 2048)", "BATCH"),
    _option("-ub,--ubatch-size N", "physical maximum batch size (default: 512)", "UBATCH"),
    _option("--swa-full", "full-size SWA cache (default: false)", "SWA_FULL"),
    _option("-fa,--flash-attn [on|off|auto]", "Flash Attention (default: 'auto')", "FLASH_ATTN"),
    _option("-kvo,--kv-offload,-nkvo,--no-kv-offload", "KV cache offloading", "KV_OFFLOAD"),
    _option("-ctk,--cache-type-k TYPE", "KV cache type for K (default: f16)", "CACHE_TYPE_K"),
    _option("-ctv,--cache-type-v TYPE", "KV cache type for V (default: f16)", "CACHE_TYPE_V"),
    _option("--rpc SERVERS", "comma-separated list of RPC servers (host:port)", "RPC"),
    _option("--mlock", "keep the model in RAM", "MLOCK"),
    _option("--mmap,--no-mmap", "memory-map the model (default: enabled)", "MMAP"),
    _option("-dev,--device <dev1,dev2,..>", "devices to offload to (none = don't)", "DEVICE"),
    _option("--list-devices", "print list of available devices and exit"),
    _option("-ot,--override-tensor <pattern>=<type>,...", "override tensor buffer type"),
    _option("-ngl,--gpu-layers,--n-gpu-layers N", "layers in VRAM (default: auto)", "N_GPU_LAYERS"),
    _option("-sm,--split-mode {none,layer,row,tensor}", "split over GPUs", "SPLIT_MODE"),
    _option("-ts,--tensor-split N0,N1,N2,...", "share of each GPU", "TENSOR_SPLIT"),
    _option("-mg,--main-gpu INDEX", "the GPU to use (default: 0)", "MAIN_GPU"),
    _option("-fit,--fit [on|off]", "fit unset arguments to memory (default: 'on')", "FIT"),
    _option("--lora FNAME", "path to LoRA adapter"),
    _option("-m,--model FNAME", "model path to load", "MODEL"),
    _option("-hf,-hfr,--hf-repo <user>/<model>[:quant]", "Hugging Face repository", "HF_REPO"),
    _option("--log-disable", "Log disable"),
    _option("--log-file FNAME", "Log to file", "LOG_FILE"),
    _option("--log-colors [on|off|auto]", "colored logging (default: 'auto')", "LOG_COLORS"),
    _option("-v,--verbose,--log-verbose", "log all messages"),
    _option("--offline", "force use of cache, prevent network access", "OFFLINE"),
    _option("-lv,--verbosity,--log-verbosity N", "verbosity (default: 3)", "LOG_VERBOSITY"),
    _option("--log-prefix,--no-log-prefix", "prefix in log messages", "LOG_PREFIX"),
    _option("--log-timestamps,--no-log-timestamps", "timestamps in logs", "LOG_TIMESTAMPS"),
)
_SAMPLING = (
    _option("-s,--seed SEED", "RNG seed (default: -1, use random seed for -1)"),
    _option("--ignore-eos", "ignore end of stream token and continue generating"),
    _option("--temp,--temperature N", "temperature (default: 0.80)"),
    _option("--top-k N", "top-k sampling (default: 40, 0 = disabled)", "TOP_K"),
    _option("--top-p N", "top-p sampling (default: 0.95, 1.0 = disabled)"),
    _option("--min-p N", "min-p sampling (default: 0.05, 0.0 = disabled)"),
    _option("--grammar GRAMMAR", "BNF-like grammar to constrain generations"),
)
_SPECULATIVE = (
    _option("--spec-type TYPE", "type of speculative decoding (default: none)", "SPEC_TYPE"),
    _option("-md,--model-draft,--spec-draft-model FNAME", "draft model", "SPEC_DRAFT_MODEL"),
    _option("-ngld,--n-gpu-layers-draft,--spec-draft-ngl N", "draft layers in VRAM"),
    _option("--spec-draft-n-max N", "most tokens to draft (default: 3)"),
    _option("--spec-draft-p-min P", "minimum probability of a drafted token (default: 0.00)"),
)
_SERVER = (
    _option("--ctx-checkpoints,--swa-checkpoints N", "checkpoints per slot (default: 32)"),
    _option("-cram,--cache-ram N", "maximum cache size in MiB (default: 8192)", "CACHE_RAM"),
    _option("-kvu,--kv-unified,-no-kvu,--no-kv-unified", "one KV buffer for all", "KV_UNIFIED"),
    _option("--warmup,--no-warmup", "warmup with an empty run (default: enabled)", "WARMUP"),
    _option("--pooling {none,mean,cls,last,rank}", "pooling type for embeddings", "POOLING"),
    _option("-np,--parallel N", "number of server slots (default: -1, -1 = auto)", "N_PARALLEL"),
    _option("-cb,--cont-batching,-nocb,--no-cont-batching", "continuous batching"),
    _option("-mm,--mmproj FILE", "path to a multimodal projector file", "MMPROJ"),
    _option("-a,--alias STRING", "model name aliases, comma-separated", "ALIAS"),
    _option("--host HOST", "ip address to listen on (default: 127.0.0.1)", "HOST"),
    _option("--port PORT", "port to listen (default: 8080)", "PORT"),
    _option("--path PATH", "path to serve static files from", "STATIC_PATH"),
    _option("--api-prefix PREFIX", "prefix path the server serves from", "API_PREFIX"),
    _option("--ui,--webui,--no-ui,--no-webui", "the Web UI (default: enabled)", "UI"),
    _option("--embedding,--embeddings", "only support embeddings", "EMBEDDINGS"),
    _option("--rerank,--reranking", "enable reranking endpoint on server", "RERANKING"),
    _option("--api-key KEY", "API keys, comma-separated (default: none)"),
    _option("--api-key-file FNAME", "path to file containing API keys", "API_KEY_FILE"),
    _option("--chat-template-kwargs STRING", "additional params for the json template parser"),
    _option("-to,--timeout N", "read/write timeout in seconds (default: 3600)", "TIMEOUT"),
    _option("--sse-ping-interval N", "SSE ping interval (default: 30)", "SSE_PING_INTERVAL"),
    _option("--threads-http N", "threads for HTTP requests (default: -1)", "THREADS_HTTP"),
    _option("--cache-prompt,--no-cache-prompt", "prompt caching", "CACHE_PROMPT"),
    _option("--cache-reuse N", "min chunk to reuse via KV shifting (default: 0)", "CACHE_REUSE"),
    _option("--metrics", "prometheus metrics endpoint (default: disabled)", "ENDPOINT_METRICS"),
    _option("--props", "change properties via POST /props", "ENDPOINT_PROPS"),
    _option("--slots,--no-slots", "slots endpoint (default: enabled)", "ENDPOINT_SLOTS"),
    _option("--slot-save-path PATH", "path to save slot kv cache (default: disabled)"),
    _option("--models-dir PATH", "models for the router server", "MODELS_DIR"),
    _option("--jinja,--no-jinja", "use jinja template engine (default: enabled)", "JINJA"),
    _option("--reasoning-format FORMAT", "thought tags (default: auto)", "THINK"),
    _option("--reasoning-budget N", "token budget for thinking (default: -1)", "THINK_BUDGET"),
    _option("--chat-template JINJA_TEMPLATE", "custom jinja chat template", "CHAT_TEMPLATE"),
    _option("--chat-template-file JINJA_TEMPLATE_FILE", "file of a chat template"),
    _option("-sps,--slot-prompt-similarity SIMILARITY", "match a slot needs (default: 0.10)"),
    _option("--sleep-idle-seconds SECONDS", "sleep when idle (default: -1, disabled)"),
)
_SECTIONS = (
    ("common params", _COMMON),
    ("sampling params", _SAMPLING),
    ("speculative params", _SPECULATIVE),
    ("example-specific params", _SERVER),
)
OPTIONS = tuple(option for _, options in _SECTIONS for option in options)
_BY_NAME = {name: option for option in OPTIONS for name in option.names}
_NUMBERS = {"port", "ctx-size", "batch-size", "ubatch-size", "parallel", "cache-ram"}
_HELP_AT = 40
_LONG_AT = 6
_HELP_WIDTH = 70


class Options:
    """A command line that was read.

    Args:
        values: The value of each option by its long name; `1` or `0` for switches.
        unknown: The options that are not in the table, with their values.
        knobs: The `KEY=VALUE` of each `--fake-KEY`.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.unknown: list[str] = []
        self.knobs: list[str] = []

    def text(self, key: str, default: str = "") -> str:
        """Return an option's text."""
        return self.values.get(key, default)

    def number(self, key: str, default: int) -> int:
        """Return an option's number."""
        return int(self.values.get(key, default))

    def on(self, key: str, *, default: bool = False) -> bool:
        """Tell whether a switch is on."""
        return self.values.get(key, "1" if default else "0") == "1"

    @property
    def verbosity(self) -> int:
        """How much is logged: 3 is info, 4 adds what loading found."""
        return 99 if self.on("log-verbose") else self.number("log-verbosity", 3)


def _usage(option: Option) -> str:
    names = [f"{name}," for name in option.names[:-1]] + [option.names[-1]]
    head = f"{names[0]:<6} {' '.join(names[1:])}" if len(names[0]) < _LONG_AT and names[1:] else ""
    head = (head or " ".join(names)) + (f" {option.value}" if option.value else "")
    lines = textwrap.wrap(option.help, _HELP_WIDTH) + (
        [f"(env: {option.env})"] if option.env else []
    )
    indent = " " * _HELP_AT
    if len(head) < _HELP_AT:
        head = f"{head:<{_HELP_AT}}{lines.pop(0)}"
    return "\n".join([head, *(indent + line for line in lines)]) + "\n"


def help_text() -> str:
    """Return what `--help` prints, in llama-server's layout."""
    sections = []
    for title, options in _SECTIONS:
        sections.append(f"----- {title} -----\n\n" + "".join(map(_usage, options)))
    knobs = "\n\n----- of the fake only -----\n\n--fake-KEY VALUE".ljust(_HELP_AT + 35)
    return (
        "\n\n".join(sections)
        + f"{knobs}a knob, see docs/fake-backend.md\n{' ' * 40}(env: FAKE_LLAMA)\n"
    )


def _refuse(name: str, why: str) -> OptionError:
    return OptionError(
        f'error while handling argument "{name}": {why}\n\nusage:\n{_usage(_BY_NAME[name])}\n'
        "\nto show complete usage, run with -h\n"
    )


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word[1:2].isdigit()


def _take(options: Options, name: str, rest: list[str]) -> None:
    """Read one known option; its value is the next argument."""
    option = _BY_NAME[name]
    if not option.value:
        negative = name.startswith(("--no-", "-no")) or name == "-nkvo"
        options.values[option.key] = "0" if negative else "1"
        return
    if not rest:
        raise _refuse(name, "expected value for argument")
    value = rest.pop(0)
    if option.key in _NUMBERS:
        try:
            int(value)
        except ValueError:
            raise _refuse(name, "stoi") from None
    options.values[option.key] = value


def read(
    arguments: Sequence[str], environment: Mapping[str, str], *, strict: bool = False
) -> Options:
    """Read a command line, over what `LLAMA_ARG_*` and `LLAMA_API_KEY` say.

    Args:
        arguments: The command line without the program.
        environment: The process's environment.
        strict: An unknown option is an error.

    Raises:
        OptionError: As llama-server: a value is missing or no number.
    """
    options = Options()
    for option in OPTIONS:
        if option.env and option.env in environment:
            value = environment[option.env]
            switch = "0" if value.lower() in {"0", "off", "false", "disabled"} else "1"
            options.values[option.key] = value if option.value else switch
    if environment.get("LLAMA_API_KEY"):
        options.values["api-key"] = environment["LLAMA_API_KEY"]
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("--fake-"):
            key, equals, value = word[7:].partition("=")
            if not equals and not rest:
                raise OptionError(f"error: expected value for {word}\n")
            options.knobs.append(f"{key}={value if equals else rest.pop(0)}")
        elif word in _BY_NAME:
            _take(options, word, rest)
        elif strict or _is_value(word):
            raise OptionError(f"error: invalid argument: {word}\n")
        else:
            options.unknown.append(word)
            if rest and _is_value(rest[0]):
                options.unknown.append(rest.pop(0))
    return options
