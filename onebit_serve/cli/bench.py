"""`1bit bench-serve`, its `compare` and its `ab`: reads options and files, draws, writes, exits."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from onebit_serve.cli.bench_output import Progress, comparison_tables, draw, measured
from onebit_serve.cli.numbers import Finite
from onebit_serve.core import prompts as texts
from onebit_serve.core import report, results, score
from onebit_serve.core.cells import METRICS, gains
from onebit_serve.core.errors import UsageError

if TYPE_CHECKING:
    from onebit_serve.bench.run import Settings

__all__ = ["command"]

FORMATS = ("table", "csv", "json", "md")
_MAX_AT_ONCE = 4096

_Function = Callable[..., Any]


def _stack(*options: _Function) -> Callable[[_Function], _Function]:
    def add(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_request_options = _stack(
    click.option(
        "--prompts",
        default="medium",
        metavar="short|medium|long|FILE",
        show_default=True,
        help="A set of our own, or a JSON list of texts or of lists of messages.",
    ),
    click.option("--system-prompt-file", metavar="FILE", help="Text put before each prompt."),
    click.option(
        "--concurrency",
        default="1",
        metavar="N[,N...]",
        show_default=True,
        help="Requests sent together; one cell of the table each.",
    ),
    click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True),
    click.option(
        "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Waves a cell."
    ),
    click.option("--seed", type=int, default=42, show_default=True),
    click.option(
        "--unique-prefix/--no-unique-prefix",
        default=True,
        show_default=True,
        help="Start each user text with words of its own, so that no cache knows it.",
    ),
    click.option(
        "--prompt-cache/--no-prompt-cache",
        default=True,
        show_default=True,
        help="Without: ask llama-server to reuse nothing (`cache_prompt` false).",
    ),
    click.option(
        "--ignore-eos",
        is_flag=True,
        help="Ask llama-server to go on to --max-tokens, so that all replies are of one length.",
    ),
    click.option(
        "--request-limit",
        type=Finite(min=0, min_open=True),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="Give a request up after this.",
    ),
    click.option(
        "--skip-preflight-token-count",
        is_flag=True,
        help="Do not ask for the prompts' token counts first; implied by --system-prompt-file.",
    ),
    click.option("--api-key-file", metavar="FILE", help="Or the variable ONEBIT_API_KEY."),
)
_output_options = _stack(
    click.option("--output", metavar="FILE", help="Write every request there, as --format says."),
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMATS),
        help="Of FILE (by its suffix where not given), else of the standard output.",
    ),
)


@click.group(
    name="bench-serve",
    invoke_without_command=True,
    short_help="Measure a server, compare results, arm against arm.",
    epilog="Exits 0 when done or stopped by Ctrl-C (what there is gets written), 1 when the server "
    "cannot be reached, goes away, or a cell has no success, 2 for options and files.",
)
@click.option("--url", metavar="URL", help="The server, for example http://127.0.0.1:8000.")
@click.option("--model", "models", multiple=True, help="Served id; once for each to measure.")
@click.option("--tag", default="", help="Name of the arm that this is, for `compare`.")
@_request_options
@_output_options
@click.pass_context
def command(
    context: click.Context, /, url: str | None, models: tuple[str, ...], tag: str, **options: Any
) -> int | None:
    """Measure a running server with streamed chat completions.

    Sends waves of --concurrency requests and reports time to first token, time per token, rates,
    cached tokens, errors, and the memory and processor time of local servers.
    """
    if context.invoked_subcommand is not None:
        _refuse_options_before(context, context.invoked_subcommand)
        return None
    if url is None:
        raise UsageError("--url is missing", hint="1bit bench-serve --url http://127.0.0.1:8000")
    from onebit_serve.bench import client, run

    settings = _settings(options, models)
    output, form = _output(options)
    where = client.endpoint(url, key=_key(options["api_key_file"]))
    total = settings.repeats * sum(settings.concurrency) * max(1, len(settings.models))
    shown = Progress(total)
    recorder = run.Recorder(run.new_run(tag, where.url), shown.told)

    async def work() -> None:
        await run.measure(settings, {"door": await client.resolve(where)}, recorder)

    return measured(work, lambda: recorder.results, output, form, shown)


@command.command("compare", short_help="Speedups of results, cell by cell.")
@click.argument("files", nargs=-1, metavar="BASE.csv OTHER.csv ...")
@click.option("--metric", type=click.Choice(tuple(METRICS)), default="ttft", show_default=True)
@click.option("--by-file", is_flag=True, help="Take each file for an arm, whatever its tags say.")
@click.option("--plot", metavar="FILE.svg|.png|.html", help="Draw it (needs matplotlib).")
@click.option(
    "--fail-under",
    type=Finite(min=0, min_open=True),
    metavar="X",
    help="Exit 1 unless every cell of every arm was measured, is at least X times faster, and has "
    "not clearly more errors.",
)
@click.option("--format", "form", type=click.Choice(("table", "json", "md")), default="table")
def compare(
    files: tuple[str, ...],
    metric: str,
    *,
    by_file: bool,
    plot: str | None,
    fail_under: float | None,
    form: str,
) -> int:
    """Compare results; the first arm is the baseline.

    An arm is a tag; a file without tags is an arm of its own name, or of its path where two files
    have one name. Files of one tag are loads of one arm. One file that holds several arms, as `ab`
    writes it, is enough.
    """
    if not files:
        raise UsageError("nothing to compare", hint="1bit bench-serve compare cold.csv warm.csv")
    if plot:
        from onebit_serve.bench.plot import check

        check(Path(plot))
    named = _file_tags(files)
    every = results.merge(_read(name, tag, by_file=by_file) for name, tag in named)
    if len({request.tag for request in every.requests}) < 2:  # noqa: PLR2004 - two arms
        tags = sorted({repr(request.tag) for request in every.requests}) or ["none"]
        raise UsageError(
            f"only one arm in {', '.join(files)}: {', '.join(tags)}",
            hint="give a second file, or --by-file where both were written under one tag",
        )
    tables = comparison_tables(every, metric)
    notes = (
        *report.noise_lines(every),
        *report.differences(every.runs),
        *report.lost_lines(every),
    )
    if form == "json":
        _print_json({"gains": gains(every, metric), "notes": notes})
    elif form == "md":
        click.echo(report.markdown(tables, lines=notes), nl=False)
    else:
        draw(tables, notes)
    if plot:
        from onebit_serve.bench import plot as picture

        picture.draw(Path(plot), every, metric, tables=tables)
    return 0 if fail_under is None else _judged(every, metric, fail_under)


@command.command("ab", short_help="Fresh servers per arm and load, interleaved.")
@click.option(
    "--arm",
    "arm_texts",
    multiple=True,
    metavar='NAME="VARIABLE=value --flag ..."',
    help="A way to start the server; the first is the baseline.",
)
@click.option("--loads", type=click.IntRange(1), default=3, show_default=True)
@click.option("--model", "models", multiple=True, metavar="FILE", help="Passed on as -m.")
@click.option("--noise/--no-noise", default=True, help="Run the first arm against itself too.")
@click.option("--direct", is_flag=True, help="Measure the backend beside the front door too.")
@click.option(
    "--page-cache",
    type=click.Choice(("keep", "drop")),
    default="keep",
    show_default=True,
    help="Of the model file, before each start.",
)
@click.option(
    "--caches",
    type=click.Choice(("keep", "drop")),
    default="keep",
    show_default=True,
    help="Compiled shaders and kernels, and the shapes of past traffic.",
)
@click.option(
    "--start-limit",
    type=Finite(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Until ready.",
)
@click.option("--server", metavar="COMMAND", help="Start this instead of `1bit serve`.")
@_request_options
@_output_options
@click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED)
def ab(arm_texts: tuple[str, ...], models: tuple[str, ...], **options: Any) -> int:
    """Start servers and compare arms: ... ab --arm cold="..." --arm warm="..." -- -m MODEL.gguf.

    Everything after `--` is given to `1bit serve`, for every arm. Each arm, load, model and
    concurrency gets a fresh server on a free port. Says request 1 against the best later one, the
    arms against the first, and what the first arm differs by from itself.

    Exits 4 when another measurement or a gate holds the device.
    """
    from onebit_serve.bench import arms
    from onebit_serve.live.device_lock import device_lock

    if not arm_texts:
        raise UsageError("no --arm", hint='--arm cold="ONEBIT_NO_WARMUP=1" --arm warm=""')
    parsed = tuple(arms.parse_arm(text) for text in arm_texts)
    tags = [arm.tag for arm in parsed]
    if len(set(tags)) < len(tags):
        raise UsageError(f"--arm: two arms of one name among {', '.join(tags)}")
    stems = [Path(model).stem for model in models]
    if len(set(stems)) < len(stems):  # their served ids, and so their cells, would be one
        raise UsageError(
            f"--model: two files of one name among {', '.join(models)}",
            hint="measure them in two runs, or give them names of their own by links",
        )
    output, form = _output(options)
    import shlex

    wanted = arms.Comparison(
        arms=parsed,
        loads=options["loads"],
        settings=_settings(options, ()),
        arguments=tuple(options["serve_arguments"]),
        models=models,
        noise=options["noise"],
        direct=options["direct"],
        page_cache=options["page_cache"],
        caches=options["caches"],
        key=_key(options["api_key_file"]),
        start_limit_s=options["start_limit"],
        command=tuple(shlex.split(options["server"])) if options["server"] else arms.SERVE,
    )
    shown = Progress(wanted.requests)
    session = arms.Session(wanted, shown.told, shown.began)
    with contextlib.ExitStack() as held:
        for name in wanted.locks:
            held.enter_context(device_lock(name, "1bit bench-serve ab"))
        return measured(session.run, lambda: session.results, output, form, shown, session.kill)


def _refuse_options_before(context: click.Context, subcommand: str) -> None:
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is ParameterSource.COMMANDLINE:
            raise UsageError(
                f"{option.opts[0]} before {subcommand} is not for {subcommand}",
                hint=f"give options after it: 1bit bench-serve {subcommand} {option.opts[0]} ...",
            )


def _settings(options: dict[str, Any], models: tuple[str, ...]) -> Settings:
    from onebit_serve.bench.run import Settings

    name = options["prompts"]
    if name in texts.SETS:
        conversations = texts.built_in(name)
    else:
        path = Path(name)
        conversations = texts.parse(_text(path, "--prompts"), name=name)
        name = path.stem
    system_file = options["system_prompt_file"]
    system = _text(Path(system_file), "--system-prompt-file") if system_file else ""
    if system_file and not system.strip():
        raise UsageError(f"--system-prompt-file {system_file}: the file is empty")
    return Settings(
        prompts=name,
        conversations=conversations,
        concurrency=_numbers(options["concurrency"]),
        max_tokens=options["max_tokens"],
        repeats=options["repeats"],
        models=models,
        system=system,
        system_name=system_file or "",
        unique=options["unique_prefix"],
        cache_prompt=options["prompt_cache"],
        ignore_eos=options["ignore_eos"],
        seed=options["seed"],
        limit_s=options["request_limit"],
        # a count is no inference here, but a server may make it one, and a system prompt is what
        # a warm cache is about
        count_tokens=not (options["skip_preflight_token_count"] or system_file),
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(1 <= number <= _MAX_AT_ONCE for number in found):
        raise UsageError(
            f"--concurrency {text}: not a list of numbers from 1 to {_MAX_AT_ONCE}",
            hint="give it as 1,4,8",
        )
    return tuple(dict.fromkeys(found))


def _text(path: Path, option: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # line ends as they are
    except OSError as error:
        hint = f"sets of our own are {', '.join(texts.SETS)}" if option == "--prompts" else ""
        raise UsageError(f"{option} {path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {path}: not UTF-8 at byte {error.start}") from error


def _key(file: str | None) -> str:
    if file is None:
        return os.environ.get("ONEBIT_API_KEY", "").strip()
    lines = _text(Path(file), "--api-key-file").split()
    if not lines:
        raise UsageError(f"--api-key-file {file}: the file is empty")
    return lines[0]


def _output(options: dict[str, Any]) -> tuple[Path | None, str]:
    """Return where results go and in which form; says before measuring what cannot be written."""
    form: str | None = options["form"]
    if options["output"] is None:
        return None, form or "table"
    path = Path(options["output"])
    if form is None:
        form = path.suffix.lower()[1:] if path.suffix.lower()[1:] in FORMATS[1:] else None
    if form is None:
        raise UsageError(
            f"--output {path}: its suffix names no form", hint="end it in .csv, .json or .md"
        )
    if _is_standard_output(path):
        return None, form
    folder = path.resolve().parent  # where a link leads to
    # a device or a pipe is written into, a file is replaced
    changed = path if path.exists() and not path.is_file() else folder
    if path.is_dir() or not folder.is_dir() or not os.access(changed, os.W_OK):
        raise UsageError(f"--output {path}: no file can be written there")
    return path, form


def _is_standard_output(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def _judged(every: results.Results, metric: str, fail_under: float) -> int:
    tags = {request.tag for request in every.requests}
    again = {report.against_itself(tag) for tag in tags}
    code = 0
    for gain in gains(every, metric):
        if gain.tag in again:
            continue
        place = f"{gain.tag} {gain.model} {gain.prompts} x{gain.concurrency}"
        outcome = score.judge(gain.comparison.speedup, at_least=fail_under)
        speedup = gain.comparison.speedup
        figure = "-" if speedup is None else f"{speedup:.3g}x"
        if outcome != "pass":
            code = 1
            asked = f"at least {fail_under:g}x was asked for"
            click.echo(f"{outcome}: {place}: {figure}, {asked}", err=True)
        if gain.fails_more:
            code = 1
            failed = f"{gain.errors} of {gain.requests} requests failed"
            base = f"{gain.base_errors} of {gain.base_requests} of {gain.base}"
            click.echo(f"fail: {place}: {failed}, and {base}", err=True)
    return code


def _file_tags(files: Sequence[str]) -> list[tuple[str, str]]:
    """Return each file with the name of the arm that it may be: its stem, or else its path."""
    stems = Counter(Path(name).stem for name in dict.fromkeys(files))
    return [(name, Path(name).stem if stems[Path(name).stem] == 1 else name) for name in files]


def _read(name: str, file_tag: str, *, by_file: bool) -> results.Results:
    found = results.read(_text(Path(name), "results file"), name=name)

    def named(tag: str) -> str:
        return file_tag if by_file or not tag else tag

    return results.Results(
        runs=tuple(msgspec.structs.replace(r, tag=named(r.tag)) for r in found.runs),
        requests=tuple(msgspec.structs.replace(r, tag=named(r.tag)) for r in found.requests),
    )


def _print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
