"""Measure warm prompts in a running `1bit serve`: a clearing under load, and a kill.

    python scripts/measure_prompt_clearing.py NAME=MODEL.gguf ... [--llama-server PROGRAM]

For each model `1bit serve` runs on the CPU with one prompt of about `--tokens` tokens. Three
clients ask without a pause while the cache is cleared, by `DELETE /v1/cache/prefix` and with
`?full=1`, and while the backend is killed. Prints a Markdown table: requests by outcome, seconds
until the backend is proven warm again, and what the first request after the kill reused.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["main"]

CLIENTS = 3
SENTENCE = "Rule {n}: answer in the language of the question, be brief, and never invent a source. "
DONE = "warm-up done (strict-prefix):"
LIMIT_S = 120.0
OK = 200


class Served:
    """A running `1bit serve`."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "log"
        state = {"XDG_STATE_HOME": str(folder / "state")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "onebit_serve.cli", "serve", "-p", str(self.port), *words],
                stdout=log,
                stderr=log,
                env={**os.environ, **state},
            )

    def said(self, text: str) -> int:
        """Return how often the log says something."""
        return self.log.read_text().count(text)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send one request; status 0 stands for no whole reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, json.dumps(body) if body else None)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, None
        finally:
            connection.close()

    def chat(self, system: str, text: str) -> tuple[int, Any]:
        """Ask for a few tokens."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0}
        return self.ask("POST", "/v1/chat/completions", body)

    def status(self) -> Any:
        """Return what `/v1/status` shows of the backend."""
        return self.ask("GET", "/v1/status")[1]["backends"][0]

    def wait_said(self, text: str, times: int) -> float:
        """Wait until the log has said something so often; return the seconds that took."""
        began_s = time.monotonic()
        while self.said(text) < times:
            if self.process.poll() is not None or time.monotonic() - began_s > LIMIT_S:
                raise SystemExit(self.log.read_text())
            time.sleep(0.005)
        return time.monotonic() - began_s


@contextlib.contextmanager
def load(served: Served, system: str) -> Iterator[Counter[int]]:
    """Have clients ask without a pause; yield the count of their answers by status."""
    counted: Counter[int] = Counter()
    stop = threading.Event()

    def client(number: int) -> None:
        while not stop.is_set():
            counted[served.chat(system, f"{number}: what is rule {sum(counted.values())}?")[0]] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        while sum(counted.values()) < CLIENTS:
            time.sleep(0.005)
        yield counted
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measure(name: str, words: list[str], tokens: int) -> None:
    """Run one server through all of it, and print its rows."""
    system = "".join(SENTENCE.format(n=n) for n in range(tokens // 20))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = folder / "prompts.json"
        file.write_text(json.dumps([[{"role": "system", "content": system}]]))
        settings = folder / "serve.toml"
        settings.write_text("[warm_prompts]\nsave = true\n")
        for how in ("DELETE", "DELETE ?full=1", "kill, by disk", "kill, by prefill"):
            if how == "kill, by prefill":
                settings.write_text("")
            served = Served(
                folder, [*words, "--warm-prompts", str(file), "--config", str(settings)]
            )
            try:
                served.wait_said("ready on", 1)
                done = served.said(DONE)
                if how.startswith("kill"):
                    began_s = time.monotonic()
                    os.kill(served.status()["pid"], signal.SIGKILL)
                    served.wait_said("is ready again", 1)
                    took_s = time.monotonic() - began_s
                    status, reply = served.chat(system, "hello")
                    answers = str(status)
                else:
                    with load(served, system) as counted:
                        served.ask(
                            "DELETE", "/v1/cache/prefix" + how.removeprefix("DELETE").strip()
                        )
                        took_s = served.wait_said(DONE, done + 1)
                    answers = ", ".join(f"{n} x {s or 'cut'}" for s, n in sorted(counted.items()))
                    _, reply = served.chat(system, "hello")
                (entry,) = served.status()["warm_prompts"]["entries"]
                reused = f"{reply['timings']['cache_n']} of {entry['tokens']}"
                row(name, how, f"{took_s:.2f}", answers, reused, entry["source"])
            finally:
                served.process.terminate()
                served.process.wait()


def row(*cells: object) -> None:
    """Print one row of the table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def main() -> None:
    """Read the command line and measure every model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--llama-server")
    parser.add_argument("--tokens", type=int, default=500)
    options = parser.parse_args()
    row("model", "what", "s until warm", "answers meanwhile", "reused after", "source")
    row(*["---"] * 6)
    program = ["--llama-server", options.llama_server] if options.llama_server else []
    for word in options.models:
        name, _, model = word.partition("=")
        words = ["-m", model, "--device", "cpu", "-c", "8192", "-t", "1", *program]
        measure(name, words, options.tokens)


if __name__ == "__main__":
    main()
