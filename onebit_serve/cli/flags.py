"""The flags of `1bit serve` and `1bit check`, and the command that reads them.

Each flag of a setting names its key, `table.key`; its value is checked there. click draws the help
and picks the command, but does not split these command lines: llama-server spells long options with
one dash (`-ngl 99`, `-np 4`), which click would take apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec

from onebit_serve.core import options
from onebit_serve.core.errors import UsageError

__all__ = ["FLAGS", "Flag", "Request", "ServeCommand", "read"]


class Flag(click.Option):
    """A flag with the key it sets.

    Args:
        names: All spellings, the one for messages and help first.
        key: `table.key`, or a bare word for what is no setting.
        group: The heading in the help.
        help: What it does.
        metavar: What its value is; `None` takes no value.
        sets: What a flag without a value sets.
    """

    def __init__(
        self,
        *names: str,
        key: str,
        group: str,
        help: str,  # noqa: A002 - click's own name
        metavar: str | None = None,
        sets: object = True,
    ) -> None:
        super().__init__(
            [*names, key.replace(".", "__")], help=help, metavar=metavar, is_flag=metavar is None
        )
        self.key = key
        self.group = group
        self.sets = sets


_MODEL, _DOOR, _SPEED, _ROUTING, _PROGRAMS, _RUN = (
    "Model and device",
    "Front door",
    "Speculation, prefill and prompts",
    "Routing",
    "Programs",
    "This run",
)

FLAGS: tuple[Flag, ...] = (
    Flag(
        "-m",
        "--model",
        key="backend.model",
        group=_MODEL,
        metavar="MODEL.gguf",
        help="The model, a GGUF file (for mlx a Hugging Face id).",
    ),
    Flag(
        "--embedded",
        key="embedded",
        group=_MODEL,
        help="Serve the small model of an installed package on the CPU; needs no -m.",
    ),
    Flag(
        "--device",
        "-dev",
        key="backend.device",
        group=_MODEL,
        metavar="NAME",
        help="auto (default), hrx, vulkan, rocm, cpu, zinc, mlx, or a name that "
        "`llama-server --list-devices` prints.",
    ),
    Flag(
        "-c",
        "--ctx-size",
        key="backend.ctx_size",
        group=_MODEL,
        metavar="TOKENS",
        help="Context size; 0 (default) leaves it to the backend.",
    ),
    Flag(
        "-np",
        "--parallel",
        key="backend.parallel",
        group=_MODEL,
        metavar="N",
        help="Slots; 0 (default) leaves them to llama-server.",
    ),
    Flag(
        "-a",
        "--alias",
        key="backend.alias",
        group=_MODEL,
        metavar="NAME",
        help="The model id that clients see; default: the file's name without .gguf.",
    ),
    Flag(
        "--embedding",
        "--embeddings",
        key="backend.role",
        group=_MODEL,
        sets="embedding",
        help="Serve an embedding model.",
    ),
    Flag(
        "--reranking",
        key="backend.role",
        group=_MODEL,
        sets="rerank",
        help="Serve a reranking model.",
    ),
    Flag(
        "-p",
        "--port",
        key="server.port",
        group=_DOOR,
        metavar="PORT",
        help="Port to listen on, default 8000; 0 takes a free one and says which.",
    ),
    Flag(
        "--host",
        key="server.host",
        group=_DOOR,
        metavar="HOST",
        help="Address to listen on, default 127.0.0.1.",
    ),
    Flag(
        "--api-key-file",
        key="server.api_key_file",
        group=_DOOR,
        metavar="FILE",
        help="API keys, one a line; without it $ONEBIT_API_KEY, or no key is needed.",
    ),
    Flag(
        "--allow-remote",
        key="server.allow_remote",
        group=_DOOR,
        help="Let other machines in without an API key.",
    ),
    Flag(
        "--mtp",
        key="backend.mtp",
        group=_SPEED,
        metavar="HEAD.gguf",
        help="Draft several tokens at once with this head (multi-token prediction).",
    ),
    Flag(
        "--mtp-max", key="backend.mtp_max", group=_SPEED, metavar="N", help="Most tokens drafted."
    ),
    Flag(
        "--mtp-p-min",
        key="backend.mtp_p_min",
        group=_SPEED,
        metavar="P",
        help="Least probability of a drafted token, 0 to 1.",
    ),
    Flag(
        "--prefill-device",
        key="backend.prefill_device",
        group=_SPEED,
        metavar="hrx",
        help="Prefill on HRX, decode on Vulkan; needs --device vulkan.",
    ),
    Flag(
        "--prefill-min-tokens",
        key="backend.prefill_min_tokens",
        group=_SPEED,
        metavar="N",
        help="Shortest prompt that the prefill device takes.",
    ),
    Flag(
        "--warm-prompts",
        key="warm_prompts.file",
        group=_SPEED,
        metavar="FILE.json",
        help="Put these system prompts into the prompt cache before ready: a list of lists of "
        "chat messages.",
    ),
    Flag(
        "--warm-prompts-concurrency",
        key="warm_prompts.concurrency",
        group=_SPEED,
        metavar="N",
        help="Most prompts prefilled at once; 0 (default) is one for each slot.",
    ),
    Flag(
        "--laya",
        key="laya.enabled",
        group=_ROUTING,
        help="Let Laya class each conversation and the route policy pick its device; needs "
        "--device auto or [[backends]].",
    ),
    Flag(
        "--laya-model",
        key="laya.model",
        group=_ROUTING,
        metavar="FILE",
        help="Laya's model file; implies --laya.",
    ),
    Flag(
        "--route-policy",
        key="laya.policy",
        group=_ROUTING,
        metavar="FILE",
        help="Which class goes to which device, a JSON file; without --laya only the size decides.",
    ),
    Flag(
        "--llama-server",
        key="backend.llama_server",
        group=_PROGRAMS,
        metavar="PATH",
        help="The llama-server to run; default: $ONEBIT_LLAMA_SERVER, the configuration, an "
        "installed package, PATH.",
    ),
    Flag(
        "--hrx-libhsa",
        key="backend.hrx_libhsa",
        group=_PROGRAMS,
        metavar="PATH",
        help="The libhsa-runtime64.so.1 for HRX; default: the first below /opt/rocm-therock.",
    ),
    Flag(
        "--zinc",
        key="backend.zinc",
        group=_PROGRAMS,
        metavar="PATH",
        help="The zinc to run for --device zinc; default: zinc on PATH.",
    ),
    Flag(
        "--mlx-server",
        key="backend.mlx_server",
        group=_PROGRAMS,
        metavar="PATH",
        help="The server to run for --device mlx; default: lemon-mlx-server on PATH.",
    ),
    Flag(
        "--config",
        key="config",
        group=_RUN,
        metavar="FILE.toml",
        help="Settings; flags win over ONEBIT_TABLE_KEY variables, and they over the file.",
    ),
    Flag(
        "--no-warmup",
        key="warmup.enabled",
        group=_RUN,
        sets=False,
        help="Say ready without a warm-up, as ONEBIT_NO_WARMUP=1 does.",
    ),
    Flag(
        "--no-restart",
        key="backend.restart",
        group=_RUN,
        sets=False,
        help="Exit with 1 when a backend fails, as a plain child of another supervisor should.",
    ),
    Flag(
        "--dry-run",
        key="dry_run",
        group=_RUN,
        help="Print the command, the environment and the plan; start nothing.",
    ),
    Flag(
        "--log-format",
        key="log.format",
        group=_RUN,
        metavar="plain|json",
        help="Lines to read (default), or one JSON object a line.",
    ),
)


class Request(msgspec.Struct, frozen=True):
    """What a command line asks for.

    Args:
        settings: `table.key` to the flag as it was spelled and its value.
        child: Arguments of the backend, those after `--` last.
        unchecked: Some of them were not compared with the backend's help.
        config: The configuration file.
        embedded: Serve the embedded default.
        dry_run: Only say what would be done.
    """

    settings: dict[str, tuple[str, Any]]
    child: tuple[str, ...] = ()
    unchecked: bool = False
    config: str | None = None
    embedded: bool = False
    dry_run: bool = False


def read(words: Sequence[str], child: Mapping[str, int] | None) -> Request:
    """Read a command line.

    Args:
        words: What stood after `1bit serve`.
        child: The backend's options, or `None` while the backend is not known.

    Raises:
        UsageError: As `options.split`; two flags that contradict each other.
    """
    flags = {name: flag for flag in FLAGS for name in flag.opts}
    counts = {name: 0 if flag.is_flag else 1 for name, flag in flags.items()}
    parts = options.split(words, counts, child)
    found: dict[str, tuple[str, Any]] = {}
    for name, value in parts.own:
        flag = flags[name]
        if flag.is_flag and flag.key in found and found[flag.key][1] != flag.sets:
            raise UsageError(
                f"{found[flag.key][0]} and {name} contradict each other", hint="choose one"
            )
        found[flag.key] = (name, flag.sets if flag.is_flag else value)
    return Request(
        settings={key: said for key, said in found.items() if "." in key},
        child=(*parts.child, *parts.extra),
        unchecked=child is None and bool(parts.child),
        config=found["config"][1] if "config" in found else None,
        embedded="embedded" in found,
        dry_run="dry_run" in found,
    )


class ServeCommand(click.Command):
    """A command that takes the flags of `1bit serve` and llama-server's own."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(
            name,
            params=list(FLAGS),
            context_settings={"help_option_names": ["-h", "--help"]},
            options_metavar="-m MODEL.gguf [OPTIONS] [LLAMA-SERVER OPTIONS] [-- BACKEND ARGUMENTS]",
            **attributes,
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Hand the words to the callback as they are; only `--help` is click's."""
        own = args[: args.index("--")] if "--" in args else args
        if "--help" in own or "-h" in own:
            return super().parse_args(ctx, ["--help"])
        ctx.params = {"words": tuple(args)}
        return []

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags in groups."""
        for group in dict.fromkeys(flag.group for flag in FLAGS):
            rows = [flag.get_help_record(ctx) for flag in FLAGS if flag.group == group]
            with formatter.section(group):
                formatter.write_dl([row for row in rows if row])
        with formatter.section("Anything else"):
            formatter.write_text(
                "Any other option that the llama-server's --help lists is passed on to it "
                "(-ngl 99, -fa on, --temp 0.7); what stands after -- goes to the backend as it is."
            )
