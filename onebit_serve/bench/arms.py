"""Arm against arm: a fresh server for every arm, load, model and concurrency, interleaved.

What differs between two starts of one server (where memory landed, what else the machine did) is
larger than what differs between two requests, so each load is a new process, and the arms take
turns: the order is turned round and rotated from load to load, so that a machine that grows warm
or busy does so for every arm alike. The first arm also runs a second time as itself, and what the
two differ by is the machine's noise.

A server here is whatever prints `ready on http://HOST:PORT` on its standard error.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import trio

from onebit_serve.bench import surroundings
from onebit_serve.bench.client import Endpoint, endpoint, resolve
from onebit_serve.bench.run import Recorder, Settings, measure, new_run
from onebit_serve.core.caches import CACHES
from onebit_serve.core.errors import OnebitError, UsageError
from onebit_serve.core.report import against_itself
from onebit_serve.core.results import Request, Results, merge
from onebit_serve.live.device_lock import lock_name
from onebit_serve.live.prefetch import parts_of

__all__ = [
    "Arm",
    "Comparison",
    "Keep",
    "Server",
    "Session",
    "forget",
    "model_files",
    "order",
    "parse_arm",
    "put_together",
]

Keep = Literal["keep", "drop"]

SERVE = (sys.executable, "-m", "onebit_serve.cli", "serve")
"""How `1bit serve` is started: by this very Python, whatever PATH says."""

_READY = re.compile(r"ready on (http://[^\s\"]+)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_LAST_LINES = 30
_SHOWN_LINES = 5
# A supervisor's own grace for requests in flight and for its child: 30 s and 10 s by default.
_STOP_S = 45.0
_REST_S = 5.0  # for what a wrapper leaves behind when it ends before its server
_LOOK_S = 0.02
_READ_BYTES = 65536
_DEATH_SIGNAL = ("setpriv", "--pdeathsig", "TERM", "--")  # util-linux; else an orphan is possible

# Where drivers keep what they compiled, and where this project keeps the shapes of past traffic.
_CACHES = (
    *sorted({cache.variable for caches in CACHES.values() for cache in caches}),
    "XDG_STATE_HOME",
)


class Arm(msgspec.Struct, frozen=True):
    """One way to start the server.

    Args:
        tag: Its name in results.
        flags: Flags it gets before the ones that all arms share.
        environment: Variables it gets.
    """

    tag: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class Comparison(msgspec.Struct, frozen=True):
    """What `ab` is to do.

    Args:
        arms: At least one; the first is the baseline.
        loads: Fresh starts of each.
        settings: What to ask each server.
        arguments: What every server is started with.
        models: Model files, one server each; empty where `arguments` names the model.
        noise: Run the first arm a second time, against itself.
        direct: Measure the backend beside the front door, wave by wave.
        page_cache: `drop` asks the kernel to forget the model file before each start.
        caches: `drop` gives each start empty shader, kernel and state directories.
        key: API key of the front door; empty for none.
        start_limit_s: Seconds until a server that is not ready is given up.
        command: The program and its first words.
    """

    arms: tuple[Arm, ...]
    loads: int
    settings: Settings
    arguments: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    noise: bool = True
    direct: bool = False
    page_cache: Keep = "keep"
    caches: Keep = "keep"
    key: str = ""
    start_limit_s: float = 600.0
    command: tuple[str, ...] = SERVE

    @property
    def every_arm(self) -> tuple[Arm, ...]:
        """The arms, and the first one once more where the noise is asked for."""
        if not self.noise:
            return self.arms
        again = msgspec.structs.replace(self.arms[0], tag=against_itself(self.arms[0].tag))
        return (*self.arms, again)

    @property
    def requests(self) -> int:
        """How many requests all of it is."""
        waves = self.settings.repeats * sum(self.settings.concurrency) * (2 if self.direct else 1)
        return len(self.every_arm) * self.loads * max(1, len(self.models)) * waves

    @property
    def locks(self) -> list[str]:
        """The locks of the devices that the flags name; where none is named any may be chosen."""
        named = set()
        for arm in self.arms:
            words = [*arm.flags, *self.arguments]
            devices = {a for flag, a in itertools.pairwise(words) if flag == "--device"}
            devices |= {word[len("--device=") :] for word in words if word.startswith("--device=")}
            named |= {lock_name(device) for device in devices or {"auto"}}
        return sorted(named)


def parse_arm(text: str) -> Arm:
    """Read `NAME="VARIABLE=value ... --flag ..."`: variables first, then flags, quoted as in sh.

    Raises:
        UsageError: There is no name, or the quotes do not close.
    """
    hint = 'give it as --arm cold="ONEBIT_NO_WARMUP=1" or --arm warm="--warm-prompts F.json"'
    tag, equals, rest = text.partition("=")
    if not equals or not tag.strip():
        raise UsageError(f"--arm {text}: no name before a `=`", hint=hint)
    try:
        words = collections.deque(shlex.split(rest))
    except ValueError as error:
        raise UsageError(f"--arm {text}: {error}", hint=hint) from error
    environment = {}
    while words and _VARIABLE.match(words[0]):
        name, _, value = words.popleft().partition("=")
        environment[name] = value
    return Arm(tag.strip(), tuple(words), environment)


def order(arms: Sequence[Arm], load: int) -> list[Arm]:
    """Return the order of one load, from 1: rotated, and turned round every second time."""
    shift = (load - 1) // 2 % len(arms)
    turned = [*arms[shift:], *arms[:shift]]
    return turned if load % 2 else turned[::-1]


class Session:
    """One `ab`, whose results so far can be asked for at any moment.

    Args:
        comparison: What to do.
        told: Called with every request that has ended.
        began: Called when a server is started, with what it is for.
    """

    def __init__(
        self,
        comparison: Comparison,
        told: Callable[[Request], None] = lambda _: None,
        began: Callable[[str], None] = lambda _what: None,
    ) -> None:
        self._comparison = comparison
        self._told = told
        self._began = began
        self._recorders: list[Recorder] = []
        self._server: Server | None = None

    @property
    def results(self) -> Results:
        """What there is so far."""
        return merge(recorder.results for recorder in self._recorders)

    def kill(self) -> None:
        """Kill the server that runs now, if any, with all of its group."""
        if self._server is not None:
            self._server.kill()

    async def run(self) -> None:
        """Run every arm and load.

        Raises:
            OnebitError: A server did not come up, or none of a cell's requests succeeded.
            UsageError, where the page cache is to be dropped of a model that no flag names.
        """
        wanted = self._comparison
        for arm, model in itertools.product(wanted.arms, wanted.models or ("",)):
            if wanted.page_cache == "drop":
                _check_model(arm.tag, self._flags(arm, model))
        for load in range(1, wanted.loads + 1):
            for arm in order(wanted.every_arm, load):
                for model in wanted.models or ("",):
                    for concurrency in wanted.settings.concurrency:
                        await self._one(arm, load, model, concurrency)

    def _flags(self, arm: Arm, model: str) -> list[str]:
        return put_together(arm.flags, ("-m", model) if model else (), self._comparison.arguments)

    async def _one(self, arm: Arm, load: int, model: str, concurrency: int) -> None:
        wanted = self._comparison
        cell = f"{Path(model).stem + ', ' if model else ''}{concurrency} at once"
        self._began(f"arm {arm.tag}, load {load} of {wanted.loads}: {cell}")
        flags = self._flags(arm, model)
        if wanted.page_cache == "drop":
            forget(model_files(flags))
        with _fresh_caches(wanted.caches) as caches:
            environment = caches | arm.environment
            self._server = server = Server(
                [*wanted.command, "-p", "0", *flags], os.environ | environment
            )
            async with server.running(wanted.start_limit_s, f"arm {arm.tag}, load {load}") as url:
                run = new_run(
                    arm.tag,
                    url,
                    load=load,
                    flags=tuple(flags),
                    environment=environment,
                    ready_ms=server.ready_ms,
                )
                recorder = Recorder(run, self._told)
                self._recorders.append(recorder)
                settings = msgspec.structs.replace(wanted.settings, concurrency=(concurrency,))
                targets = await self._targets(url)
                await measure(settings, targets, recorder, hash_files=load == 1)

    async def _targets(self, url: str) -> dict[str, Endpoint]:
        door = await resolve(endpoint(url, key=self._comparison.key))
        if not self._comparison.direct:
            return {"door": door}
        status = await surroundings.get_json(door, "/v1/status")
        port, pid = _chat_backend(status, url)
        beside = Endpoint(host="127.0.0.1", port=port, key=_child_key(pid))
        return {"door": door, "direct": await resolve(beside)}


def _chat_backend(status: object, url: str) -> tuple[int, int | None]:
    """Return port and pid of the one backend that answers chats at the front door."""
    chat = [b for b in surroundings.backends_of(status) if b.get("role", "chat") == "chat"]
    if len(chat) > 1:
        names = ", ".join(str(backend.get("name")) for backend in chat)
        raise UsageError(
            f"{url}: --direct with several chat backends ({names}), any of which may answer",
            hint="measure a server of one chat backend, or leave out --direct",
        )
    ports = surroundings.backend_ports(chat)
    if not ports:
        raise OnebitError(
            f"{url}: --direct found no backend's port at /v1/status",
            hint="leave out --direct, or measure a server that has that route",
        )
    state = chat[0].get("state", "ready")
    if state != "ready":
        raise OnebitError(
            f"{url}: --direct: the backend {chat[0].get('name')} is {state} and not ready",
            hint="see the server's log; a lazy backend is only started by its first request",
        )
    return ports[0]


class Server:
    """A server in a session of its own, whose standard error is read for as long as it lives.

    Args:
        command: Program and arguments.
        environment: All of its environment.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._ready = trio.Event()
        self._ended = False
        self.ready_ms: float | None = None

    def _by_hand(self) -> str:
        ours = (n for n, v in sorted(self._environment.items()) if os.environ.get(n) != v)
        variables = [f"{name}={shlex.quote(self._environment[name])}" for name in ours]
        return " ".join([*variables, shlex.join(self._command)])

    def kill(self) -> None:
        """Kill it and all of its group at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> bool:
        """Send a signal to the whole group and say whether there still is one.

        The server may be a child of what was started, and outlive it.
        """
        if self._process is None or self._ended:
            return False
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # the latter is macOS' word for the former
            return False
        return True

    @contextlib.asynccontextmanager
    async def running(self, limit_s: float, who: str) -> AsyncIterator[str]:
        """Start it, give its URL once it is ready, and stop it at the end.

        Raises:
            OnebitError: It ended or took too long before it was ready.
        """
        began_s = trio.current_time()
        process = self._spawn(who)
        failure: OnebitError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, process)
            nursery.start_soon(self._wait, process)
            try:
                await self._until_ready(process, limit_s, who)
                self.ready_ms = round((trio.current_time() - began_s) * 1000, 1)
                yield self._url
            except OnebitError as error:
                failure = error  # raised below, where no nursery wraps it in a group
            finally:
                with trio.CancelScope(shield=True):
                    await self._stop(process)
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _until_ready(
        self, process: subprocess.Popen[bytes], limit_s: float, who: str
    ) -> None:
        with trio.move_on_after(limit_s) as limit:
            await self._ready.wait()
        if limit.cancelled_caught:
            what = f"was not ready after {limit_s:g} s"
        elif not self._url:
            what = f"ended with code {process.returncode} before it was ready"
        else:
            return
        raise OnebitError(
            f"{who}: the server {what}; its last lines: {self._said()}",
            hint=f"try it by hand: {self._by_hand()}",
        )

    def _spawn(self, who: str) -> subprocess.Popen[bytes]:
        # On the main thread: a parent-death signal fires when the thread that forked ends.
        guard = _DEATH_SIGNAL if shutil.which(_DEATH_SIGNAL[0]) else ()
        program = self._command[0]
        if shutil.which(program) is None:
            raise UsageError(f"{who}: {program} is no program that can be started")
        self._process = subprocess.Popen(
            [*guard, *self._command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        return self._process

    async def _read(self, process: subprocess.Popen[bytes]) -> None:
        if process.stderr is None:
            return
        rest = b""
        # a duplicate, since trio closes what it is given and Popen closes its own
        async with trio.lowlevel.FdStream(os.dup(process.stderr.fileno())) as stream:
            while data := await stream.receive_some(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-_READ_BYTES:]
                for line in lines:
                    self._line(line.decode(errors="replace").rstrip())

    def _line(self, line: str) -> None:
        self._lines.append(line)
        found = _READY.search(line)
        if found and not self._url:
            self._url = found[1]
            self._ready.set()

    async def _wait(self, process: subprocess.Popen[bytes]) -> None:
        await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        self._ready.set()  # without a URL: whoever waits sees that it ended

    async def _stop(self, process: subprocess.Popen[bytes]) -> None:
        self._signal(signal.SIGTERM)
        with trio.move_on_after(_STOP_S):
            await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
            with trio.move_on_after(_REST_S):
                while self._signal(0):  # noqa: ASYNC110 - a group tells nobody that it is empty
                    await trio.sleep(_LOOK_S)
        self.kill()
        await trio.to_thread.run_sync(process.wait)
        self._ended = True  # from here on its number may be another's
        if process.stderr is not None:
            process.stderr.close()

    def _said(self) -> str:
        shown = [line for line in self._lines if line][-_SHOWN_LINES:]
        return " | ".join(shown) or "none"


def put_together(*parts: Sequence[str]) -> list[str]:
    """Join command lines; what follows a `--` in any of them is the backend's and stands last."""
    ours: list[str] = []
    backends: list[str] = []
    for part in parts:
        words = list(part)
        cut = words.index("--") if "--" in words else len(words)
        ours += words[:cut]
        backends += words[cut + 1 :]
    return [*ours, *(["--", *backends] if backends else [])]


def forget(paths: Sequence[Path]) -> None:
    """Ask the kernel to drop files from its page cache, where it has such a call."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def model_files(flags: Sequence[str]) -> list[Path]:
    """Return the files that the flags name, the model and its heads, each with all of its parts."""
    named = [Path(word.rpartition("=")[2]) for word in flags]
    return [part for path in named if path.is_file() for part in parts_of(path)]


def _check_model(tag: str, flags: Sequence[str]) -> None:
    if not any(path.suffix.lower() == ".gguf" for path in model_files(flags)):
        raise UsageError(
            f"--page-cache drop: the flags of arm {tag} name no GGUF file whose pages to drop",
            hint="name the model with -m, or leave --page-cache at keep",
        )


@contextlib.contextmanager
def _fresh_caches(caches: Keep) -> Iterator[dict[str, str]]:
    if caches == "keep":
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="onebit-bench-") as folder:
        fresh = {}
        for name in _CACHES:
            place = Path(folder) / name.lower().strip("_")
            place.mkdir()
            fresh[name] = str(place)
        yield fresh


def _child_key(pid: int | None) -> str:
    """Return the key that a backend was given by its environment, which only its owner may read."""
    if pid is None:
        return ""
    try:
        return str(psutil.Process(pid).environ().get("LLAMA_API_KEY", ""))
    except (psutil.Error, OSError):
        return ""
