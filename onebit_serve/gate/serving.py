"""`1bit serve` as a child of the gate, and requests to it."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from onebit_serve.core.gate.config import Limits, Model
from onebit_serve.core.gate.kld import Distribution
from onebit_serve.core.gate.tokens import Step, Token
from onebit_serve.core.gate.warm import Timing
from onebit_serve.live.child import Child, Exit, Tail
from onebit_serve.live.upstream import GoneError, exchange

__all__ = ["SERVE", "Client", "Completion", "ServerError", "Subject", "serving"]


def _serve_command() -> tuple[str, ...]:
    """Return `1bit serve` of the gate's own interpreter and package, whatever PATH says."""
    script = Path(sys.executable).with_name("1bit")
    # `-m` puts the current folder before all packages, so it comes second.
    program = (str(script),) if script.is_file() else (sys.executable, "-m", "onebit_serve.cli")
    return (*program, "serve")


SERVE = _serve_command()

_READY = re.compile(rb"1bit serve: ready on http://\S*:(\d+)")
_OK = 200
_SAID_LINES = 6


class ServerError(Exception):
    """The server did not start, did not answer, or answered with an error.

    Args:
        reason: What happened, for a report.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Recorder(Tail):
    """Writes all output into a file and watches it for the ready line.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ready = trio.Event()
        self.port = 0
        self._file = path.open("ab")
        self._line = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the output."""
        super().feed(data)
        self._file.write(data)
        self._file.flush()
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if not self.port and (match := _READY.search(line)):
                self.port = int(match[1])
                self.ready.set()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Completion(msgspec.Struct, frozen=True):
    """What a completion request gave.

    Args:
        text: The generated text.
        steps: The generated tokens with their leads; empty unless probabilities were asked for.
        distributions: The likeliest tokens at each step; empty likewise.
        cached: Prompt tokens that were not evaluated again.
        evaluated: Prompt tokens that were.
        timing: The server's own rates.
    """

    text: str
    steps: tuple[Step, ...]
    distributions: tuple[Distribution, ...]
    cached: int
    evaluated: int
    timing: Timing

    @property
    def tokens(self) -> tuple[Token, ...]:
        """Return the generated tokens."""
        return tuple(step.token for step in self.steps)


def _completion(reply: dict[str, Any]) -> Completion:
    steps: list[Step] = []
    distributions: list[Distribution] = []
    for entry in reply.get("completion_probabilities") or []:
        top = sorted(entry["top_logprobs"], key=lambda each: -each["logprob"])
        found = Distribution(
            tuple(each["id"] for each in top), tuple(each["logprob"] for each in top)
        )
        distributions.append(found)
        lead = found.lead() if found.ids else 0.0
        steps.append(Step(Token(entry["id"], entry["token"]), lead))
    timings = reply.get("timings") or {}
    return Completion(
        str(reply.get("content") or ""),
        tuple(steps),
        tuple(distributions),
        int(timings.get("cache_n") or 0),
        int(timings.get("prompt_n") or 0),
        Timing(
            float(timings.get("prompt_per_second") or 0.0),
            float(timings.get("predicted_per_second") or 0.0),
        ),
    )


class Client:
    """Requests to one running server, each on a connection of its own.

    Args:
        port: The server's front door.
        request_s: Seconds until a request counts as hung.
        child: The server, to tell a dead one from a silent one.
    """

    def __init__(self, port: int, request_s: float, child: Child) -> None:
        self.port = port
        self._request_s = request_s
        self._child = child

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Send JSON and return the status and the JSON that came back.

        Raises:
            ServerError: No whole answer came, or it is no JSON object.
        """
        with trio.move_on_after(self._request_s):
            try:
                reply = await exchange(self.port, "POST", path, msgspec.json.encode(body))
            except GoneError as error:
                raise ServerError(
                    f"POST {path}: {error.reason}{_last_words(self._child)}"
                ) from None
            try:
                answer = msgspec.json.decode(reply.body)
            except msgspec.DecodeError:
                answer = None
            if not isinstance(answer, dict):
                raise ServerError(f"POST {path} answered {reply.status} without a JSON object")
            return reply.status, answer
        raise ServerError(f"POST {path} was not answered within {self._request_s:g} s")

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send JSON where nothing but 200 will do.

        Raises:
            ServerError: As `post`, or another status.
        """
        status, answer = await self.post(path, body)
        if status != _OK:
            raise ServerError(f"POST {path} answered {status}: {problem(answer)}")
        return answer

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, special ones and the leading one included."""
        body = {"content": text, "add_special": True, "parse_special": True}
        found = (await self.ask("/tokenize", body)).get("tokens")
        if not isinstance(found, list):
            raise ServerError("POST /tokenize: the answer has no tokens")
        return tuple(found)

    async def prompt(
        self, messages: list[dict[str, str]], template: dict[str, Any]
    ) -> tuple[int, ...]:
        """Return the tokens that a chat with these messages would have."""
        body: dict[str, Any] = {"messages": messages}
        if template:
            body["chat_template_kwargs"] = template
        text = (await self.ask("/apply-template", body)).get("prompt")
        if not isinstance(text, str):
            raise ServerError("POST /apply-template: the answer has no prompt")
        return await self.tokenize(text)

    async def complete(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        cache: bool,
        probabilities: int = 0,
        grammar: str = "",
        ignore_eos: bool = False,
    ) -> Completion | str:
        """Complete a prompt greedily.

        Args:
            prompt: Token ids.
            tokens: How many to generate.
            cache: Whether a cached prefix may be used.
            probabilities: How many of the likeliest tokens to report at each step.
            grammar: GBNF that the answer keeps to.
            ignore_eos: Whether to go on past the end of the answer.

        Returns:
            The completion, or why the server refused: with 500 it refuses generated text that it
            takes for malformed (llama-server b10068), which on real hardware has been a symptom
            of wrong logits and so is an answer of its own, not a broken request.
        """
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": 0,
            "cache_prompt": cache,
            "stream": False,
        }
        if probabilities:
            body["n_probs"] = probabilities
        if grammar:
            body["grammar"] = grammar
        if ignore_eos:
            body["ignore_eos"] = True
        status, answer = await self.post("/completion", body)
        if status != _OK:
            return f"the server answered {status}: {problem(answer)}"
        try:
            return _completion(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"POST /completion: the answer has no usable {error}") from None


def problem(answer: dict[str, Any]) -> str:
    """Return the message of an error reply."""
    error = answer.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error or answer)[:200]


def _last_words(child: Child) -> str:
    lines = child.tail.last(_SAID_LINES)
    return "; the server's last lines: " + " / ".join(lines) if lines else ""


class Subject(msgspec.Struct, frozen=True):
    """A model as it is started: everything a server process needs.

    Args:
        model: Its configuration.
        path: Its file.
        binary: The llama-server.
        env: The gate's own environment.
    """

    model: Model
    path: str
    binary: str
    env: dict[str, str]

    def command(self, *, warm_up: bool = True, extra: Sequence[str] = ()) -> list[str]:
        """Return the command line of a server.

        Args:
            warm_up: Whether it warms up, as a release does.
            extra: Further arguments of the llama-server.
        """
        model = self.model
        arguments = ["-m", self.path, "--device", model.device, "-c", str(model.ctx_size)]
        arguments += ["-p", "0", "--llama-server", self.binary]
        arguments.append("--no-restart")  # a gate wants to see a death, not to have it mended
        if not warm_up:
            arguments.append("--no-warmup")
        passed_on = [*model.args, *extra]
        return [*SERVE, *arguments, *(("--", *passed_on) if passed_on else ())]

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process of this model.

        A known answer holds only for a request that is alone on its server, so nothing is warmed
        while the server is idle.
        """
        return {"ONEBIT_WARMUP_IDLE": "0", **self.env, **self.model.env, **more}


@asynccontextmanager
async def serving(
    nursery: trio.Nursery,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    limits: Limits,
) -> AsyncIterator[Client]:
    """Start a server, hand out a client once it is ready, and stop it whatever happens.

    Args:
        nursery: Watches the child; it must outlive the block, also when the block is cancelled.
        command: Program and arguments.
        environment: The server's whole environment.
        log: Takes what it prints.
        limits: How long starting, requests and stopping may take.

    Raises:
        ServerError: It ended, or was not ready in time.
    """
    recorder = Recorder(log)
    try:
        child = Child.spawn(command, environment)
    except OSError as error:
        recorder.close()
        raise ServerError(f"{command[0]} cannot be started: {error}") from None
    child.tail = recorder
    gone = trio.Event()
    ended: list[Exit] = []

    async def watch() -> None:
        ended.append(await child.run())
        gone.set()
        recorder.ready.set()

    nursery.start_soon(watch)
    try:
        with trio.move_on_after(limits.ready_s):
            await recorder.ready.wait()
        if gone.is_set():
            raise ServerError(f"the server ended with {ended[0]}{_last_words(child)}")
        if not recorder.port:
            raise ServerError(f"no ready line within {limits.ready_s:g} s{_last_words(child)}")
        yield Client(recorder.port, limits.request_s, child)
    finally:
        with trio.CancelScope(shield=True):
            await child.stop(limits.stop_s)
            if not gone.is_set():
                child.kill()
                with trio.move_on_after(limits.stop_s):
                    await gone.wait()
        recorder.close()
