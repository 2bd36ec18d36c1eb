"""What a benchmark leaves behind: the schema of its files, and how they are written and read.

A file holds runs and requests. A run is one server under one load of it: machine, versions,
hashes, flags, settings, resources. A request is one measured request and names its run. The same
two structs are written in two shapes:

* JSON: `{"schema": "onebit-bench/1", "runs": [...], "requests": [...]}`
* CSV: one row a request; every run has a row of its own before them, whose last cell holds the
  run as JSON. So the file is a plain table: filter on `record`, and a spreadsheet or pandas
  reads it.

Stored files outlive the program, so within one version of the schema fields are only ever added,
with defaults: a column or field that this version does not know is ignored, one that it knows and
does not find takes its default. Anything else gets a new number and a reader of its own here.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec

from onebit_serve.core.errors import UsageError

__all__ = [
    "SCHEMA",
    "Request",
    "Results",
    "Run",
    "Usage",
    "merge",
    "read",
    "write_csv",
    "write_json",
]

SCHEMA = "onebit-bench/1"
_FAMILY = "onebit-bench/"
_MAX_CELL = 2**31 - 1  # the facts of a run with many cells and backends pass csv's own 128 KiB


class Usage(msgspec.Struct, frozen=True):
    """What a local process used while one cell was measured.

    Args:
        cell: The cell, as `Request.cell` names it.
        role: `client`, `supervisor`, `backend`, `helper` (what else the supervisor started), or
            `server` where there is no supervisor.
        name: The program's base name.
        pid: Its process id.
        rss_bytes: Highest resident memory seen, in bytes, sampled twice a second.
        cpu_s: Processor seconds, user and system.
        wall_s: Seconds the cell took.
    """

    cell: str
    role: str
    name: str
    pid: int
    rss_bytes: int
    cpu_s: float
    wall_s: float


class Run(msgspec.Struct, frozen=True):
    """One server that was measured, from the first request to the last.

    Args:
        id: Unique among all runs of all files.
        tag: The arm, as the user named it.
        started: When, in UTC (ISO 8601).
        url: The address that was measured.
        load: The number of the fresh start, from 1; 1 where the server was not ours to start.
        complete: False where the run was interrupted or the server went away.
        note: Why it is not complete.
        settings: What was asked of the server (prompts, max_tokens, seed, ...).
        machine: Processor, memory, system, as far as known.
        versions: Of this program, Python and the server.
        server: What the server's own routes say of it.
        files: Binary and model: path, size in bytes, SHA-256 and of what.
        flags: How the server was started, where we did.
        environment: Variables that were set for it, where we did.
        ready_ms: From spawn to the ready line, in milliseconds, where we started it.
        usage: Memory and processor time by process and cell, where local.
    """

    id: str
    tag: str
    started: str
    url: str
    load: int = 1
    complete: bool = True
    note: str = ""
    settings: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}
    server: dict[str, Any] = {}
    files: dict[str, dict[str, Any]] = {}
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    ready_ms: float | None = None
    usage: tuple[Usage, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """One measured request. Times are the client's, from before the connection is opened.

    Args:
        run: The id of its run.
        tag: The arm.
        model: The id it asked for.
        prompts: The prompt set.
        concurrency: How many requests were sent together.
        load: The number of the fresh start, from 1.
        repeat: The wave within its cell, from 1.
        stream: Its place within the wave, from 1.
        target: `door`, or `direct` for the backend beside it.
        started_s: Seconds since the run's start.
        ttft_ms: To the first text that is not empty.
        total_ms: To the end of the stream.
        tpot_ms: (last text - first text) / (tokens - 1).
        prompt_tokens: Tokens of the prompt, cached ones included.
        cached_tokens: How many of them the backend had in its cache.
        output_tokens: Tokens generated.
        prefill_tok_s: Prompt tokens per second, cached ones left out.
        decode_tok_s: Generated tokens per second.
        rates_by: Who timed the two rates: `backend` or `client`.
        wait_ms: TTFT less the backend's own prefill time: connection, relay and queue.
        error: Its kind (`refused`, `cut`, `http 503`, ...); empty for success.
        detail: What the server or the system said of it.
    """

    run: str
    tag: str
    model: str
    prompts: str
    concurrency: int
    load: int = 1
    repeat: int = 1
    stream: int = 1
    target: str = "door"
    started_s: float = 0.0
    ttft_ms: float | None = None
    total_ms: float | None = None
    tpot_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    rates_by: str = ""
    wait_ms: float | None = None
    error: str = ""
    detail: str = ""

    @property
    def cell(self) -> str:
        """Name what is compared with the same of another arm."""
        return cell_name(self.model, self.prompts, self.concurrency)


class Results(msgspec.Struct, frozen=True):
    """All that one file holds.

    Args:
        runs: In order of start.
        requests: In order of start.
        schema: The version of the file's form.
    """

    runs: tuple[Run, ...] = ()
    requests: tuple[Request, ...] = ()
    schema: str = SCHEMA


def cell_name(model: str, prompts: str, concurrency: int) -> str:
    """Return the name of a cell of the table."""
    return f"{model} {prompts} x{concurrency}"


def merge(parts: Iterable[Results]) -> Results:
    """Put several results into one, in the order given; a run that comes again counts once."""
    known: set[str] = set()
    runs: list[Run] = []
    requests: list[Request] = []
    for part in tuple(parts):
        again = {run.id for run in part.runs if run.id in known}
        runs += [run for run in part.runs if run.id not in again]
        requests += [request for request in part.requests if request.run not in again]
        known |= {run.id for run in part.runs}
    return Results(runs=tuple(runs), requests=tuple(requests))


def write_json(results: Results) -> str:
    """Return results as JSON text, one line a run or request so that a diff can be read."""
    lines = ['{"schema": ' + _json(results.schema) + ",", '"runs": [']
    lines += _lines(results.runs)
    lines += ["],", '"requests": [']
    lines += _lines(results.requests)
    return "\n".join([*lines, "]}", ""])


def write_csv(results: Results) -> str:
    """Return results as CSV text; see the top of this module for its form."""
    out = io.StringIO()
    table = csv.writer(out)  # ends lines as RFC 4180 does
    table.writerow(_COLUMNS)
    for run in results.runs:
        row = dict.fromkeys(_COLUMNS, "")
        row |= {"schema": SCHEMA, "record": "run", "run": _cell(run.id), "tag": _cell(run.tag)}
        row |= {"load": str(run.load), "facts": _json(run)}
        table.writerow(row.values())
    for request in results.requests:
        cells = [_cell(getattr(request, name)) for name in Request.__struct_fields__]
        table.writerow([SCHEMA, "request", *cells, ""])
    return out.getvalue()


def read(text: str, *, name: str) -> Results:
    """Read a results file, CSV or JSON.

    Args:
        text: What the file holds.
        name: Its name, for errors.

    Raises:
        UsageError: It is no results file, of a version that this program cannot read, or damaged.
    """
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        return _read_json(text.lstrip("\ufeff"), name)
    return _read_csv(text.lstrip("\ufeff"), name)


_COLUMNS = ("schema", "record", *Request.__struct_fields__, "facts")
_NUMBERS = {
    field.name: int if int in (field.type, *get_args(field.type)) else float
    for field in msgspec.structs.fields(Request)
    if {int, float} & {field.type, *get_args(field.type)}
}
# What a spreadsheet takes for a formula when a cell starts with it (OWASP, "CSV Injection").
_DANGEROUS = ("=", "+", "-", "@", "\t", "\r", "\n")


def _cell(value: object) -> str:
    """Return one cell; text that a spreadsheet would run gets a quote before it."""
    if value is None:
        return ""
    if isinstance(value, str):
        value = _utf8(value)
        return "'" + value if value.startswith((*_DANGEROUS, "'")) else value
    return repr(value)


def _uncell(text: str) -> str:
    return text.removeprefix("'")


def _json(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return _utf8(json.dumps(msgspec.to_builtins(value), ensure_ascii=False))


def _utf8(text: str) -> str:
    """Return text that can be written: a path need not be UTF-8, and no result is lost to one."""
    return text.encode(errors="replace").decode()


def _lines(items: Sequence[object]) -> list[str]:
    return [_json(item) + ("," if n < len(items) else "") for n, item in enumerate(items, 1)]


def _check_version(schema: object, name: str) -> None:
    if schema == SCHEMA:
        return
    if isinstance(schema, str) and schema.startswith(_FAMILY):
        raise UsageError(
            f"{name}: written as {schema[:40]}, and this program reads {SCHEMA}",
            hint="read it with the version of onebit-serve that wrote it, or measure again",
        )
    raise UsageError(
        f"{name}: not a results file of bench-serve (no schema {_FAMILY}N in it)",
        hint="give a file that `1bit bench-serve --output FILE.csv` or FILE.json wrote",
    )


def _read_json(text: str, name: str) -> Results:
    try:
        raw = msgspec.json.decode(text)
        _check_version(raw.get("schema"), name)
        return msgspec.convert(raw, Results)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: damaged: {error}", hint=_DAMAGED) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{name}: not JSON: {error}", hint=_DAMAGED) from error


_DAMAGED = "was it edited, or cut off? measure again, or repair that place"


def _read_csv(text: str, name: str) -> Results:
    # A spreadsheet that saves the file may use ";" and quotes of its own; the header tells.
    head = text.partition("\n")[0]
    delimiter = ";" if head.count(";") > head.count(",") else ","
    csv.field_size_limit(_MAX_CELL)
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    whole = text.endswith(("\n", "\r"))
    runs, requests = [], []
    try:
        if "schema" not in (table.fieldnames or ()):
            _check_version(None, name)
        for row in table:
            place = f"{name} line {table.line_num}"
            if not whole and None in row.values():  # spreadsheets may leave out empty last cells
                raise UsageError(f"{place}: the file ends within a row", hint=_DAMAGED)
            _check_version(row["schema"], name)
            if row.get("record") == "run":
                runs.append(_run_of(row, place))
            elif row.get("record") == "request":
                requests.append(_request_of(row, place))
    except csv.Error as error:
        raise UsageError(f"{name} line {table.line_num}: {error}", hint=_DAMAGED) from error
    if not runs and not requests:
        raise UsageError(f"{name}: holds no runs and no requests", hint=_DAMAGED)
    return Results(runs=tuple(runs), requests=tuple(requests))


def _run_of(row: dict[str, str], place: str) -> Run:
    try:
        return msgspec.json.decode(row.get("facts") or "", type=Run)
    except msgspec.DecodeError as error:
        raise UsageError(f"{place}: cell `facts`: {error}", hint=_DAMAGED) from error


def _request_of(row: dict[str, str], place: str) -> Request:
    values: dict[str, object] = {}
    for field in Request.__struct_fields__:
        text = row.get(field)
        if not text:
            continue
        if field not in _NUMBERS:
            values[field] = _uncell(text)
            continue
        try:
            values[field] = _NUMBERS[field](text)
        except ValueError as error:
            raise UsageError(
                f"{place}: column {field}: {text[:40]!r} is no number", hint=_DAMAGED
            ) from error
    for needed in ("run", "tag", "model", "prompts"):
        values.setdefault(needed, "")
    try:
        return msgspec.convert(values, Request)
    except msgspec.ValidationError as error:
        raise UsageError(f"{place}: {error}", hint=_DAMAGED) from error
