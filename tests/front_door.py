"""A running `1bit serve` as tests use it: process, log, record of its backend, raw requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from llama_process import DEADLINE_S, free_port, received, until

__all__ = ["CHAT", "Front", "Raw", "lazy_backends", "request_bytes"]

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
_NOT_OURS = ("ONEBIT_", "LLAMA_", "GGML_", "FAKE_LLAMA", "SCRIPT_")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")

# Starts the command with constants of the live layer set to other values.
_WITH_CONSTANTS = """
import contextlib, importlib, json, sys
names = ("door", "connection", "supervise", "episode", "relay", "prefetch", "history")
names += ("lease", "idle", "scorer_child", "shaper")
for name in ("serve", *(f"live.{name}" for name in names)):
    with contextlib.suppress(ImportError):
        module = importlib.import_module(f"onebit_serve.{name}")
        for constant, value in json.loads(sys.argv[1]).items():
            if hasattr(module, constant):
                setattr(module, constant, value)
from onebit_serve.cli import main
sys.exit(main(sys.argv[2:]))
"""


def request_bytes(
    target: str, body: bytes = b"", *headers: str, method: str = "POST", version: str = "1.1"
) -> bytes:
    """Return a request with its one `Content-Length`."""
    lines = [f"{method} {target} HTTP/{version}", "Host: 127.0.0.1", *headers]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Raw:
    """One connection to the front door, in bytes."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self._data = b""

    def __enter__(self) -> Raw:  # noqa: PYI034 - typing.Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> Raw:
        self.sock.sendall(data)
        return self

    def until(self, end: bytes) -> bytes:
        """Return what comes up to some bytes, these included."""
        while end not in self._data:
            data = self.sock.recv(65536)
            assert data, f"the connection ended with {self._data!r}"
            self._data += data
        cut = self._data.index(end) + len(end)
        found, self._data = self._data[:cut], self._data[cut:]
        return found

    def exactly(self, size: int) -> bytes:
        while len(self._data) < size:
            data = self.sock.recv(65536)
            assert data, f"the connection ended with {self._data[:200]!r}"
            self._data += data
        found, self._data = self._data[:size], self._data[size:]
        return found

    def reply(self, *, to_head: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of a reply that has a length or comes in chunks."""
        first, *lines = self.until(b"\r\n\r\n")[:-4].decode("latin-1").split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        body = b""
        if to_head:
            pass
        elif "content-length" in headers:
            body = self.exactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(self.until(b"\r\n"), 16):
                body += self.exactly(size)
                assert self.exactly(2) == b"\r\n"
            assert self.exactly(2) == b"\r\n"
        return int(first.split()[1]), headers, body

    def rest(self) -> bytes:
        """Return all that still comes, to the end of the connection; a reset is an end."""
        data, self._data = self._data, b""
        try:
            return data + b"".join(received(self.sock))
        except ConnectionResetError:
            return data


class Front:
    """One started `1bit serve`.

    Args:
        folder: Where its log, its backend's record and its caches go.
        arguments: Its command line without `-p`.
        knobs: `FAKE_LLAMA`, where the backend is the fake.
        environment: Variables on top of a clean environment.
        constants: Constants of the live layer, by name, that get another value.
        port: Its port; a free one otherwise.
        stderr: Where its log goes instead of a file.
        shapes: Whether it warms further shapes, as it does by default. What most tests count and
            time is the first warm-up request, so it is off here where nobody asks for it.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        knobs: str = "",
        environment: dict[str, str] | None = None,
        constants: dict[str, float] | None = None,
        port: int = 0,
        stderr: int | None = None,
        shapes: bool = False,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self._log = folder / f"front-{self.port}.log"
        self._rec = folder / f"front-{self.port}.jsonl"
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_NOT_OURS) and name.lower() not in _PROXIES
        }
        for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
            env[f"XDG_{kind}_HOME"] = str(folder / "xdg" / kind.lower())
        env["XDG_RUNTIME_DIR"] = str(folder / "xdg" / "runtime")
        env["FAKE_LLAMA"] = f"rec={self._rec} {knobs}"
        env["SCRIPT_REC"] = str(self._rec)
        if not shapes:
            env |= {"ONEBIT_WARMUP_BUDGET_S": "0", "ONEBIT_WARMUP_IDLE": "0"}
        env |= environment or {}
        if constants:
            program = [sys.executable, "-c", _WITH_CONSTANTS, json.dumps(constants)]
        else:
            program = [sys.executable, "-m", "onebit_serve.cli"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*program, "serve", "-p", str(self.port), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log if stderr is None else stderr,
                env=env,
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def said(self, piece: str) -> list[str]:
        """Return the lines of the log that hold a text."""
        return [line for line in self.log.splitlines() if piece in line]

    def wait_said(self, piece: str) -> str:
        """Wait until a line of the log holds a text, and return the first one."""
        return until(lambda: self.said(piece), f"{piece!r} in the log")[0]

    def record(self, event: str) -> list[dict[str, Any]]:
        """Return what the backend recorded, of one kind."""
        if not self._rec.exists():
            return []
        lines = self._rec.read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    def requests(self, piece: str = "") -> list[dict[str, Any]]:
        """Return the requests that reached the backend, by a piece of their target."""
        return [entry for entry in self.record("request") if piece in entry["path"]]

    def health(self) -> httpx.Response | None:
        """Ask `/health` on a fresh connection; `None` where nobody answers."""
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=DEADLINE_S)
        except httpx.TransportError:
            return None

    def wait_health(self, word: str) -> httpx.Response:
        """Wait until `/health` gives a word as its status."""

        def look() -> httpx.Response | None:
            assert self.process.poll() is None, self.log
            answer = self.health()
            return answer if answer and answer.json()["status"] == word else None

        found: httpx.Response = until(look, f"{word} from /health")
        return found

    def ready(self) -> Front:
        """Wait until it says that it is ready."""

        def look() -> bool:
            assert self.process.poll() is None, self.log
            return bool(self.said("ready on"))

        until(look, "the ready line")
        return self

    def backend(self) -> dict[str, Any]:
        """Return what `/v1/status` shows of the first backend."""
        shown: dict[str, Any] = self.client.get("/v1/status").json()["backends"][0]
        return shown

    def raw(self, data: bytes = b"") -> Raw:
        return Raw(self.port).send(data)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        """End it for good: kindly first, so that its backend ends too."""
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_LISTED = "devices='GPU0: one (98304 MiB, 97520 MiB free);GPU1: two (98304 MiB, 97520 MiB free)'"


def lazy_backends(
    folder: Path, program: str, model: str, knobs: dict[str, str], *, keys: str = ""
) -> Path:
    """Write a configuration of a CPU that is the default and of lazy backends with knobs."""
    tables = [f'[backend]\nmodel = "{model}"\nllama_server = "{program}"\n{keys}']
    for name, said in {"cpu": "", **knobs}.items():
        fake = f"rec={folder}/{name}.jsonl starts={folder}/{name}.starts {_LISTED} {said}"
        lazy = "false" if name == "cpu" else "true"
        tables.append(
            f'[[backends]]\nname = "{name}"\ndevice = "{name}"\nalias = "m"\nlazy = {lazy}\n'
            f"env = {{ FAKE_LLAMA = {json.dumps(fake)} }}"
        )
    file = folder / "serve.toml"
    file.write_text("\n".join(tables))
    return file
