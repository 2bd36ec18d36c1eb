"""Measure warm prompts on this machine: reuse, time to first token, personas, restarts.

    python scripts/measure_warm_prompts.py reuse NAME=MODEL.gguf ...
    python scripts/measure_warm_prompts.py ttft NAME=MODEL.gguf ... [--tokens 500,1700] [--at 1,4,8]
    python scripts/measure_warm_prompts.py personas NAME=MODEL.gguf ...
    python scripts/measure_warm_prompts.py restart NAME=MODEL.gguf ...

Starts llama-servers of its own (`--llama-server`, else the one on PATH) on loopback, on the CPU,
and prints Markdown tables. `ttft` runs a cold and a warm server side by side and takes turns, then
both anew.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import trio

from onebit_serve.core.http import Reply
from onebit_serve.core.warm_prompts import parse
from onebit_serve.live.prefix import PromptWarmer
from onebit_serve.live.prompt_backend import Request
from onebit_serve.live.saves import Saves, private_directory
from onebit_serve.live.upstream import GoneError, open_stream

__all__ = ["main"]

FIRST = {
    "letter": "hello",
    "digit": "7 times",
    "space": " lead",
    "newline": "\nline",
    "tab": "\ttab",
    "CJK": "你好",
    "emoji": "😀 hi",
    "quote": '"so"',
}
SENTENCE = "Rule {n}: answer in the language of the question, be brief, and never invent a source. "
QUESTION = "{start} is what I think of. What is rule {n} about, in one word?"
OK = 200
LETTERS = str.maketrans("0123456789", "ghijklmnop")
FOUND = 0.95  # a sliding window loses five tokens, and one more with each use
ARMS = ("cold", "warm", "limit")
PIDS: dict[int, int] = {}  # of the servers, by port


async def exchange(port: int, method: str, path: str, body: bytes = b"") -> Reply:
    async with open_stream(port, method, path, body) as stream:
        return Reply(stream.status, await stream.read())


def requester(port: int) -> Request:
    async def request(method: str, path: str, body: bytes) -> Reply:
        return await exchange(port, method, path, body)

    return request


@contextlib.asynccontextmanager
async def server(program: str, model: str, *flags: str) -> AsyncIterator[int]:
    """Run a llama-server, ready, and yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "-m", model, "--port", str(port), "--device", "none", "--offline", *flags]
    child = subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    PIDS[port] = child.pid
    try:
        while True:
            with contextlib.suppress(GoneError):
                if (await exchange(port, "GET", "/health")).status == OK:
                    break
            if child.poll() is not None:
                raise SystemExit(f"{program} ended while it loaded {model}")
            await trio.sleep(0.01)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


async def chat(port: int, system: str, text: str) -> tuple[int, float]:
    """Ask for one token; return the cached tokens and the seconds it took."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    body = {"messages": messages, "max_tokens": 1, "temperature": 0}
    started_s = trio.current_time()
    reply = await exchange(port, "POST", "/v1/chat/completions", json.dumps(body).encode())
    took_s = trio.current_time() - started_s
    if reply.status != OK:
        raise SystemExit(f"a chat was answered {reply.status}: {reply.body[:300]!r}")
    return json.loads(reply.body)["timings"]["cache_n"], took_s


async def prompt_of(port: int, tokens: int, salt: str = "") -> str:
    """Return a system prompt of about so many tokens."""
    text = salt + "".join(SENTENCE.format(n=n) for n in range(tokens // 8))
    reply = await exchange(port, "POST", "/tokenize", json.dumps({"content": text}).encode())
    return text[: int(len(text) * tokens / len(json.loads(reply.body)["tokens"]))]


def warmer(port: int, *systems: str, saves: Saves | None = None, host: bool = True) -> PromptWarmer:
    entries = parse(json.dumps([[{"role": "system", "content": s}] for s in systems]), "-")
    return PromptWarmer(
        requester(port), entries, saves=saves, host_bytes=(8192 << 20) if host else 0
    )


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def head(*cells: object) -> None:
    row(*cells)
    row(*["---"] * len(cells))


async def reuse(models: dict[str, str], options: argparse.Namespace) -> None:
    """Tokens that the first request after a warm-up loses, by its first character."""
    head("model", "prefix", *FIRST)
    for (name, model), tokens in itertools.product(models.items(), options.tokens):
        flags = ("-np", "1", "-c", "8192")
        async with server(options.llama_server, model, *flags) as port:
            system = await prompt_of(port, tokens)
            lost = []
            for text in FIRST.values():
                one = warmer(port, system)
                await one.clear()
                await one.warm()
                (standing,) = one.standings
                cached, _ = await chat(port, system, text)
                lost.append(max(0, standing.tokens - cached) if standing.proven else standing.why)
            row(name, standing.tokens, *lost)


def cpu_s(port: int) -> float:
    times = psutil.Process(PIDS[port]).cpu_times()
    return times.user + times.system


def question(number: int) -> str:
    """Return a user text that no other one shares its beginning with: it would be cached too."""
    start = hashlib.sha256(str(number).encode()).hexdigest()[:8].translate(LETTERS)
    return QUESTION.format(start=start.capitalize(), n=number)


class Waves(msgspec.Struct):
    """What the waves of one cell took, by arm.

    Args:
        times_s: Seconds of each request.
        spent_s: CPU seconds of a request, the mean of each wave.
    """

    times_s: dict[str, list[float]] = {}
    spent_s: dict[str, list[float]] = {}


async def wave(
    port: int, system: str, at_once: int, texts: itertools.count[int], spent: list[float]
) -> list[float]:
    """Send so many chats at once; return the seconds of each, and note the CPU seconds of one."""
    took: list[float] = []
    before_s = cpu_s(port)

    async def one() -> None:
        took.append((await chat(port, system, question(next(texts))))[1])

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(one)
    spent.append((cpu_s(port) - before_s) / at_once)
    return took


async def ttft(models: dict[str, str], options: argparse.Namespace) -> None:
    """Cold against warm, in turns on two servers; the limit are other questions right after cold.

    At the limit only the user's tokens are left to prefill, and all else is the same: reading,
    rendering and tokenising a long prompt takes its time, cached or not.

    The processor's time of a request beside its wall time: other work on the machine does not
    lengthen it much.
    """
    columns = [f"{arm} {what}ms" for what in ("", "CPU ") for arm in ARMS]
    head("model", "prompt", "at once", *columns, "warm / limit", "warm / limit CPU")
    for name, model in models.items():
        found = dict[tuple[int, int], Waves]()
        for _ in range(options.servers):
            await pair_of_servers(model, options, found)
        for (tokens, at_once), waves in found.items():
            medians = [statistics.median(waves.times_s[arm]) for arm in ARMS]
            means = [statistics.mean(waves.spent_s[arm]) for arm in ARMS]
            cells = [f"{1000 * value:.0f}" for value in (*medians, *means)]
            of_limit = [f"{warm / limit:.2f}" for _, warm, limit in (medians, means)]
            row(name, tokens, at_once, *cells, *of_limit)


async def pair_of_servers(
    model: str, options: argparse.Namespace, found: dict[tuple[int, int], Waves]
) -> None:
    """Measure every prompt and concurrency on a cold and a warm server of their own."""
    texts = itertools.count(100)
    context = options.slots * (max(options.tokens) + 256)
    flags = (
        "-np",
        str(options.slots),
        "-c",
        str(context),
        "-cram",
        "0",
        "-t",
        str(options.threads),
    )
    async with (
        server(options.llama_server, model, *flags) as cold_port,
        server(options.llama_server, model, *flags) as warm_port,
    ):
        for tokens in options.tokens:
            system = await prompt_of(warm_port, tokens)
            one = warmer(warm_port, system, host=False)
            await one.clear()
            await one.warm()
            for at_once in options.at:
                waves = found.setdefault((tokens, at_once), Waves())
                for turn in range(max(1, options.repeats // at_once)):
                    await warmer(cold_port, system).clear()
                    salted = f"{turn} {system}"
                    for arm, port, said in (
                        ("cold", cold_port, salted),
                        ("warm", warm_port, system),
                        ("limit", cold_port, salted),
                    ):
                        spent_s = waves.spent_s.setdefault(arm, [])
                        took_s = await wave(port, said, at_once, texts, spent_s)
                        waves.times_s.setdefault(arm, []).extend(took_s)


async def personas(models: dict[str, str], options: argparse.Namespace) -> None:
    """Twelve system prompts on four slots: first requests that found theirs, two rounds."""
    head("model", "host cache", "proven", "round 1", "round 2")
    for (name, model), host in itertools.product(models.items(), (True, False)):
        flags = ("-np", "4", "-c", "8192", *(() if host else ("-cram", "0")))
        async with server(options.llama_server, model, *flags) as port:
            systems = [
                await prompt_of(port, options.tokens[0], f"Persona {n * 7919} {chr(97 + n) * 5}. ")
                for n in range(12)
            ]
            one = warmer(port, *systems, host=host)
            await one.warm()
            rounds = []
            for text in ("Who are you?", "And what else?"):
                hits = 0
                for system, standing in zip(systems, one.standings, strict=True):
                    cached, _ = await chat(port, system, text)
                    hits += bool(standing.tokens) and cached >= FOUND * standing.tokens
                rounds.append(hits)
            proven = sum(s.proven for s in one.standings)
            row(name, "yes" if host else "no", proven, *rounds)


async def restart(models: dict[str, str], options: argparse.Namespace) -> None:
    """Kill the server; time from its next health to warm, and what the first request reuses."""
    head("model", "prompt", "by prefill ms", "by disk ms", "reused of", "source")
    for (name, model), tokens in itertools.product(models.items(), options.tokens):
        with tempfile.TemporaryDirectory() as folder:
            directory = private_directory(Path(folder, "slots"))
            saves = Saves(directory, binary=options.llama_server, model=model)
            flags = ("-np", "1", "-c", "8192", "--slot-save-path", str(directory))
            took = []
            for _ in range(2):
                async with server(options.llama_server, model, *flags) as port:
                    system = await prompt_of(port, tokens)
                    one = warmer(port, system, saves=saves)
                    started_s = trio.current_time()
                    await one.warm()
                    took.append(f"{1000 * (trio.current_time() - started_s):.0f}")
                    (standing,) = one.standings
                    cached, _ = await chat(port, system, "hello")
            row(name, standing.tokens, *took, f"{cached} of {standing.tokens}", standing.source)


MEASURES = {"reuse": reuse, "ttft": ttft, "personas": personas, "restart": restart}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Read the command line and run one measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--llama-server", default=shutil.which("llama-server"))
    parser.add_argument("--tokens", type=numbers, default=[500])
    parser.add_argument("--at", type=numbers, default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=4, help="requests a cell, in waves (4)")
    parser.add_argument("--servers", type=int, default=2, help="pairs of servers, in turn (2)")
    parser.add_argument("--slots", type=int, default=8, help="of each server (8)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if not options.llama_server:
        parser.error("no llama-server on PATH: name one by --llama-server")
    # A TERM ends this as Ctrl-C does, so that no server is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    models = dict(word.split("=", 1) for word in options.models)
    trio.run(functools.partial(MEASURES[options.measure], models, options))


if __name__ == "__main__":
    main()
