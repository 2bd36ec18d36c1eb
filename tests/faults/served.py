"""A `1bit serve` with several fake backends, as the tests of faults use it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from front_door import Front, Raw

__all__ = [
    "PROGRAM",
    "Answer",
    "Served",
    "Stream",
    "backend",
    "configuration",
    "is_alive",
    "wait_for",
]

POLL_S = 0.02
LIMIT_S = 20.0
PROGRAM = Path(sys.executable).with_name("1bit-fake-llama")


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Wait until a condition gives something true, and return that."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {limit_s} s in vain for {what}"
        time.sleep(POLL_S)
    return found


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Answer(NamedTuple):
    """What a client got: status, body as JSON, headers, and seconds it took."""

    status: int
    body: dict[str, Any]
    headers: httpx.Headers
    took_s: float

    @property
    def said(self) -> str:
        """The message of its error."""
        return str(self.body.get("error", {}).get("message", ""))


class Stream:
    """A streamed reply, read on demand."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self.head = b""

    def begun(self) -> Stream:
        """Read up to the first event."""
        self.head = self.raw.until(b"data: ")
        return self

    def end(self) -> str:
        """Read to the end, and say how it came: `answered`, `error event` or `cut`."""
        with self.raw:
            text = self.raw.rest()
        if b"data: [DONE]" in text:
            return "answered"
        return "error event" if b'data: {"error"' in text else "cut"


def backend(name: str, knobs: str = "", **keys: Any) -> dict[str, Any]:
    """Describe one backend: its knobs, with a `starts` file of its own, and its settings."""
    return {"name": name, "alias": name, "knobs": knobs, **keys}


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def configuration(
    folder: Path,
    model: str,
    *backends: dict[str, Any],
    server: dict[str, Any] | None = None,
    warm: bool = True,
    tables: str = "",
) -> Path:
    """Write a configuration and return its path; backends are warmed up although on the CPU."""
    lines = ["[server]", *(f"{k} = {_toml(v)}" for k, v in (server or {}).items())]
    lines += ["[warmup]", 'devices = ["cpu"]' if warm else "enabled = false"]
    lines += ["[backend]", f"model = {_toml(model)}", 'device = "cpu"']
    lines += [f"llama_server = {_toml(str(PROGRAM))}"]
    for described in backends:
        keys = dict(described)
        name, knobs = keys["name"], keys.pop("knobs")
        fake = f"rec={folder}/{name}.jsonl starts={folder}/{name}.starts {knobs}"
        pairs = [word.partition("=") for word in shlex.split(fake)]
        flags = [part for key, _, value in pairs for part in (f"--fake-{key}", value)]
        keys["args"] = [*flags, *keys.get("args", [])]
        lines += ["[[backends]]", *(f"{k} = {_toml(v)}" for k, v in keys.items())]
    path = folder / "serve.toml"
    path.write_text("\n".join([*lines, tables, ""]))
    return path


class Served(Front):
    """One started `1bit serve` with a configuration of `configuration`."""

    def view(self, name: str) -> dict[str, Any]:
        """Return what `/v1/status` shows of one backend."""
        shown = self.client.get("/v1/status").json()["backends"]
        found: dict[str, Any] = next(b for b in shown if b["name"] == name)
        return found

    def wait_view(self, name: str, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Wait until what is shown of a backend satisfies a condition, and return it."""
        seen: dict[str, Any] = {}

        def look() -> bool:
            assert self.process.poll() is None, self.log
            seen.clear()
            seen.update(self.view(name))
            return bool(condition(seen))

        try:
            wait_for(look, f"{name} to change")
        except AssertionError as error:
            raise AssertionError(f"{error}: {seen}") from None
        return seen

    def wait_state(self, name: str, *states: str, restarts: int | None = None) -> dict[str, Any]:
        """Wait until a backend is in one of some states, after so many restarts."""
        return self.wait_view(
            name, lambda v: v["state"] in states and restarts in (None, v["restarts"])
        )

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a backend's child; return its pid."""
        pid = int(self.view(name)["pid"])
        os.kill(pid, number)
        return pid

    def order(self, name: str, verb: str) -> httpx.Response:
        return self.client.post(f"/v1/backends/{name}/{verb}")

    def ask(self, name: str, said: str = "hi", **more: Any) -> Answer:
        """Ask for a chat reply on a connection of its own."""
        began_s = time.monotonic()
        answer = httpx.post(
            f"{self.url}/v1/chat/completions",
            json=self._chat(name, said, **more),
            trust_env=False,
            timeout=LIMIT_S,
            verify=False,
        )
        return Answer(answer.status_code, answer.json(), answer.headers, time.monotonic() - began_s)

    def stream(self, name: str, said: str = "hi", **more: Any) -> Stream:
        """Ask for a streamed reply."""
        body = json.dumps(self._chat(name, said, stream=True, **more)).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return Stream(self.raw(head.encode() + body))

    def _chat(self, name: str, said: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": said}]
        return {"model": name, "messages": messages, "max_tokens": 4, "temperature": 0, **more}

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Return what a backend recorded, of one kind."""
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for line in lines if (entry := json.loads(line))["event"] == event]

    def reached(self, name: str, said: str) -> int:
        """Return how often a chat with a text reached a backend."""
        requests = self.events(name, "request")
        return sum(f'"{said}"' in r.get("body", "") for r in requests if "chat" in r["path"])
