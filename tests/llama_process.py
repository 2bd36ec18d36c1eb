"""A llama-server, real or fake, as a test starts it: process, port, log, record, requests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

DEADLINE_S = 60.0


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until a condition gives something true, and return that."""
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {deadline_s} s in vain for {what}"
        time.sleep(0.005)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def frames(text: str) -> list[Any]:
    """Return the events of a stream: JSON values, and `[DONE]` as text."""
    assert text.endswith("\n\n")
    events = []
    for frame in text.strip("\n").split("\n\n"):
        data = [line for line in frame.split("\n") if line.startswith("data: ")]
        for line in data:
            value = line.removeprefix("data: ")
            events.append(value if value == "[DONE]" else json.loads(value))
    return events


class Llama:
    """One started server.

    Args:
        binary: The program.
        folder: Where its log and record go.
        arguments: Its command line without host and port.
        knobs: `FAKE_LLAMA`, where it is the fake.
        environment: Variables on top of ours.
        port: Its port; a free one otherwise.
    """

    def __init__(
        self,
        binary: str,
        folder: Path,
        *arguments: str,
        knobs: str = "",
        environment: dict[str, str] | None = None,
        port: int = 0,
    ) -> None:
        self.port = port or free_port()
        name = f"{self.port}-{time.monotonic_ns()}"
        self._log = folder / f"{name}.log"
        self._rec = folder / f"{name}.jsonl"
        self.url = f"http://127.0.0.1:{self.port}"
        env = {**os.environ, "FAKE_LLAMA": f"rec={self._rec} {knobs}", **(environment or {})}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [binary, "--port", str(self.port), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self.client = httpx.Client(
            base_url=self.url,
            timeout=DEADLINE_S,
            trust_env=False,
            verify=False,
            # llama-server closes a connection after a stream without a word.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def record(self, event: str) -> list[dict[str, Any]]:
        """Return the recorded events of one kind."""
        if not self._rec.exists():
            return []
        lines = self._rec.read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    def health(self) -> int:
        """Return the status of `/health` on a fresh connection; 0 where nobody answers."""
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, verify=False).status_code
        except httpx.TransportError:
            return 0

    def ready(self) -> Llama:
        """Wait until it is loaded."""

        def look() -> bool:
            assert self.process.poll() is None, self.log
            return self.health() == 200

        until(look, "the server to be loaded")
        return self

    def wait(self) -> int:
        """Wait until it has ended, and return its code."""
        return self.process.wait(DEADLINE_S)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def complete(self, prompt: Any, **more: Any) -> dict[str, Any]:
        """Return what `/completion` says to a prompt."""
        answer = self.post(
            "/completion", {"prompt": prompt, "n_predict": 2, "temperature": 0, **more}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, said: str = "hi", **more: Any) -> httpx.Response:
        messages = [{"role": "user", "content": said}]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, **more}
        return self.post("/v1/chat/completions", body)

    def open_stream(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a streamed request on a raw socket, and return that after the first bytes."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
        data = json.dumps({"stream": True, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        return sock

    def busy(self) -> int:
        """Return how many slots are at work."""
        return sum(slot["is_processing"] for slot in self.get("/slots").json())

    def stop(self) -> None:
        """End it for good."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)


def received(sock: socket.socket) -> Iterator[bytes]:
    """Give what arrives on a socket until its end."""
    while data := sock.recv(65536):
        yield data
