"""What a test asks the fake to do wrong, or slowly: `FAKE_LLAMA` and `--fake-KEY VALUE`.

`FAKE_LLAMA` is split as a shell would, so values with spaces are quoted:
`load=3 fail="500@2+:Compute error"`. A flag wins over the variable. With `starts=FILE` a value may
list one alternative per start, `dead_at=5s|never`: the file counts the starts, and the last
alternative stays.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["KNOBS", "Chunks", "Death", "Failure", "Hang", "KnobError", "Knobs", "Refusal", "parse"]


class KnobError(Exception):
    """A knob that cannot be read; its text is one line for the user."""


class Moment(NamedTuple):
    """When something happens.

    Args:
        what: `load`, `health`, `request` or `time`.
        request: The number of the work request, from 1.
        chunk: After how many streamed tokens of that request; 0 is before its head.
        after_s: Seconds since the process started.
    """

    what: str
    request: int = 0
    chunk: int = 0
    after_s: float = 0.0


class Death(NamedTuple):
    """The end of the process at a moment: an exit code, or a signal where `signal` is not 0."""

    moment: Moment
    code: int
    signal: int


class Hang(NamedTuple):
    """No more answers from a moment on; `everything` stops `/health` too."""

    moment: Moment
    everything: bool


class Failure(NamedTuple):
    """An answer other than the right one.

    Args:
        kind: `status`, or one of `stream`, `format`, `reset`, `cut`.
        status: The HTTP status of `status`.
        first: The number of the first work request that gets it.
        last: The number of the last one; `None` is for ever.
        message: The message, or a whole JSON body where it starts with a brace.
    """

    kind: str
    status: int
    first: int
    last: int | None
    message: str


class Chunks(NamedTuple):
    """Where streamed bytes are cut: `bytes` and `join` with a size, `char`, or `none`."""

    kind: str
    size: int = 0


class Refusal(NamedTuple):
    """Refuse to load until some seconds after the end of the process that last held a file."""

    seconds: float
    file: str


_MOMENT = re.compile(r"(?:req ?(?P<req>\d+)(?:/chunk ?(?P<chunk>\d+))?|(?P<after>\d+(?:\.\d+)?)s)")
_FAIL = re.compile(
    r"(?P<what>[1-5]\d\d|stream|format|reset|cut)@(?P<n>\d+)(?P<more>\+|-\d+)?(?::(?P<text>.*))?",
    re.DOTALL,
)


def _moment(text: str) -> Moment:
    if text in {"load", "health"}:
        return Moment(text)
    found = _MOMENT.fullmatch(text)
    if not found:
        raise ValueError("a moment is load, health, req3, req3/chunk5 or 2.5s")
    if found["after"]:
        return Moment("time", after_s=float(found["after"]))
    if int(found["req"]) < 1:
        raise ValueError("requests are numbered from 1")
    return Moment("request", int(found["req"]), int(found["chunk"] or 0))


def _death(text: str) -> Death | None:
    if text in {"", "never"}:
        return None
    when, _, how = text.partition(":")
    how = how or "1"
    if how.isdecimal():
        return Death(_moment(when), int(how), 0)
    name = how.upper() if how.upper().startswith("SIG") else f"SIG{how.upper()}"
    try:
        return Death(_moment(when), 0, signal.Signals[name].value)
    except KeyError:
        raise ValueError(
            f"no signal is called {how}; write an exit code, KILL, SEGV, ..."
        ) from None


def _hang(text: str) -> Hang | None:
    if text in {"", "never"}:
        return None
    when, _, what = text.partition(":")
    if what not in {"", "all"}:
        raise ValueError("after the moment only :all may follow")
    return Hang(_moment(when), what == "all")


def _failures(text: str) -> tuple[Failure, ...]:
    rules = []
    for rule in filter(None, re.split(r";(?=\s*(?:[1-5]\d\d|stream|format|reset|cut)@)", text)):
        found = _FAIL.fullmatch(rule.strip())
        if not found:
            raise ValueError(
                "a failure is WHAT@N, @N+ or @N-M, then :MESSAGE; WHAT is a status, ..."
            )
        what, first, more = found["what"], int(found["n"]), found["more"]
        last = None if more == "+" else int(more[1:]) if more else first
        status = int(what) if what.isdecimal() else 200
        kind = "status" if what.isdecimal() else what
        rules.append(Failure(kind, status, first, last, found["text"] or "Compute error."))
    return tuple(rules)


def _chunks(text: str) -> Chunks:
    if text in {"none", "char"}:
        return Chunks(text)
    if text.isdecimal() and int(text) > 0:
        return Chunks("bytes", int(text))
    if text.startswith("join") and text[4:].isdecimal() and int(text[4:]) > 0:
        return Chunks("join", int(text[4:]))
    raise ValueError("none, char (inside every multi-byte character), N (bytes) or joinN (events)")


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("a number from 0 up")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a whole number from 0 up")
    return int(text)


def _switch(text: str) -> bool:
    if text.lower() not in {"1", "0", "yes", "no", "true", "false", "on", "off"}:
        raise ValueError("1 or 0")
    return text.lower() in {"1", "yes", "true", "on"}


def _first(text: str) -> tuple[float, int]:
    seconds, _, count = text.partition(":")
    return _number(seconds), _whole(count or "1")


def _layers(text: str) -> tuple[int, int]:
    done, _, every = text.partition("/")
    return _whole(done), _whole(every or done)


def _refusal(text: str) -> Refusal | None:
    if not text:
        return None
    seconds, colon, file = text.partition(":")
    if not colon or not file:
        raise ValueError("SECONDS:FILE")
    return Refusal(_number(seconds), file)


def _term(text: str) -> str:
    if text in {"llama", "obey", "ignore"} or text.isdecimal():
        return text
    raise ValueError("llama, obey, ignore, or how many signals to ignore first")


def _garbage(text: str) -> tuple[str, int]:
    kind, _, first = text.partition("@")
    kind = {"1": "all", "0": "none"}.get(kind, kind)
    if kind not in {"none", "all", "stream"}:
        raise ValueError("none, all or stream, and @N for 'from request N on'")
    return kind, _whole(first or "1")


def _one_of(*names: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names:
            raise ValueError(" or ".join(names))
        return text

    return check


class Knob(NamedTuple):
    """One knob: how it is read, its default as text, and what it does."""

    read: Callable[[str], object]
    default: str
    help: str


KNOBS: dict[str, Knob] = {
    "arch": Knob(_one_of("dense", "swa", "hybrid"), "dense", "how a cached prefix is reused"),
    "bos": Knob(_switch, "1", "a prompt that is text starts with a BOS token"),
    "build": Knob(_one_of("b10068", "0.6.0"), "b10068", "which llama-server to imitate"),
    "busy_port": Knob(_switch, "0", "fail as when the port is taken"),
    "cancel": Knob(
        _one_of("", "always", "streams-only", "never"), "", "which requests notice a lost client"
    ),
    "chunks": Knob(_chunks, "none", "where streamed bytes are cut"),
    "ctx_train": Knob(_whole, "8192", "the context of the model in tokens"),
    "dead_at": Knob(_death, "never", "when and how the process dies"),
    "devices": Knob(str, "", "what --list-devices prints, separated by ;"),
    "fail": Knob(_failures, "", "which work requests fail, and how"),
    "first": Knob(_first, "0", "extra seconds for the first request, or SECONDS:N for the first N"),
    "first_byte": Knob(_number, "0", "seconds before the first byte of each work answer"),
    "fork": Knob(
        _one_of("no", "group", "setsid", "stubborn"), "no", "a grandchild holds the pipes"
    ),
    "garbage": Knob(_garbage, "none", "answer with nonsense"),
    "hang_at": Knob(_hang, "never", "when answers stop while the process stays"),
    "health_delay": Knob(_number, "0", "seconds before each /health answer"),
    "ka": Knob(_number, "5", "seconds an idle connection is kept; 0 closes after each answer"),
    "last": Knob(str, "", "a line to print before dying"),
    "layers": Knob(_layers, "33/33", "how many layers the load log says were offloaded"),
    "line": Knob(str, "load_tensors: {percent} % of the tensors loaded", "the progress line"),
    "lines": Knob(_number, "0", "seconds between progress lines while loading"),
    "load": Knob(_number, "0", "seconds of loading, /health 503"),
    "model": Knob(_one_of("none", "hrx", "vulkan"), "none", "the cost model"),
    "noise": Knob(_number, "0", "bytes per second of log on stderr"),
    "page": Knob(_switch, "1", "a page at /"),
    "pps": Knob(_number, "0", "prompt tokens per second, in real time; 0 is at once"),
    "rec": Knob(str, "", "the JSON Lines file that records what happened"),
    "refuse": Knob(
        _refusal, "", "SECONDS:FILE: no memory until SECONDS after the other holder's end"
    ),
    "reply": Knob(_whole, "32", "tokens of an answer that nothing limits"),
    "scale": Knob(_number, "0.01", "real seconds per second of the cost model"),
    "starts": Knob(str, "", "the file that counts starts, for values with | in them"),
    "strict": Knob(_switch, "0", "refuse unknown options as llama-server does"),
    "template": Knob(_one_of("chatml", "date", "ignore", "think"), "chatml", "the chat template"),
    "term": Knob(_term, "llama", "what SIGTERM and SIGINT do"),
    "text": Knob(str, "plain", "plain, unicode, or the text to answer with"),
    "tps": Knob(_number, "0", "generated tokens per second, in real time; 0 is at once"),
    "version": Knob(str, "", "the first line of --version"),
}


class Knobs:
    """The knobs of one process, read."""

    arch: str
    bos: bool
    build: str
    busy_port: bool
    cancel: str
    chunks: Chunks
    ctx_train: int
    dead_at: Death | None
    devices: str
    fail: tuple[Failure, ...]
    first: tuple[float, int]
    first_byte: float
    fork: str
    garbage: tuple[str, int]
    hang_at: Hang | None
    health_delay: float
    ka: float
    last: str
    layers: tuple[int, int]
    line: str
    lines: float
    load: float
    model: str
    noise: float
    page: bool
    pps: float
    rec: str
    refuse: Refusal | None
    reply: int
    scale: float
    starts: str
    strict: bool
    template: str
    term: str
    text: str
    tps: float
    version: str


def _pairs(words: Iterable[str], where: str) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise KnobError(f"{where}: '{word}' is no key=value")
        pairs[name.replace("-", "_")] = value
    return pairs


def _count_start(file: str, *, serves: bool) -> int:
    path = Path(file)
    count = int(path.read_text() or 0) if path.exists() else 0
    if serves:
        path.write_text(str(count + 1))
    return count


def parse(environment: Mapping[str, str], flags: Iterable[str], *, serves: bool = True) -> Knobs:
    """Read the knobs of this start.

    Args:
        environment: Where `FAKE_LLAMA` is looked up.
        flags: The `KEY=VALUE` of each `--fake-KEY`.
        serves: Whether this start is to serve; one that only prints something is not counted.

    Raises:
        KnobError: A key is unknown or a value cannot be read.
    """
    try:
        words = shlex.split(environment.get("FAKE_LLAMA", ""))
    except ValueError as error:
        raise KnobError(f"FAKE_LLAMA: {error}") from None
    given = _pairs(words, "FAKE_LLAMA") | _pairs(flags, "--fake-KEY")
    for name in given:
        if name not in KNOBS:
            raise KnobError(f"unknown knob '{name}'; known: {', '.join(KNOBS)}")
    start = _count_start(given["starts"], serves=serves) if given.get("starts") else None
    knobs = Knobs()
    for name, knob in KNOBS.items():
        value = given.get(name, knob.default)
        if start is not None and name != "starts" and name in given:
            turns = value.split("|")
            value = turns[min(start, len(turns) - 1)]
        try:
            setattr(knobs, name, knob.read(value))
        except ValueError as error:
            raise KnobError(f"knob {name}={value!r} cannot be read: {error}") from None
    if not knobs.cancel:
        knobs.cancel = "always" if knobs.build == "b10068" else "streams-only"
    return knobs
