"""Measure one server: cells of model and concurrency, waves of requests, notes as they come.

A wave is `concurrency` requests sent together; the next wave begins when all have ended. So
request 1 of a fresh server is wave 1 at concurrency 1, and every wave meets an idle server.
What was measured is in the `Recorder` at any moment, whatever ends the measuring.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from typing import Any

import msgspec
import trio

from onebit_serve.bench import surroundings
from onebit_serve.bench.client import Endpoint, Stream, fetch, stream
from onebit_serve.core import prompts as texts
from onebit_serve.core.errors import OnebitError
from onebit_serve.core.results import Request, Results, Run, Usage, cell_name

__all__ = ["Recorder", "Settings", "measure", "new_run", "numbers_of"]

_ROUTE = "/v1/chat/completions"


class Settings(msgspec.Struct, frozen=True):
    """What is asked of a server.

    Args:
        prompts: The set's name, `short`, `medium`, `long`, or the file's.
        conversations: The prompts; the requests of each cell and target take them in turn.
        concurrency: How many requests at once, one cell each.
        max_tokens: Tokens to generate at most.
        repeats: Waves in a cell.
        models: Served ids to ask for; empty asks for the first that is served.
        system: A system prompt put before each conversation.
        system_name: The file it came from.
        unique: Start every first user message with words that no other request has.
        cache_prompt: False asks llama-server not to reuse its prompt cache.
        ignore_eos: True asks llama-server to generate `max_tokens` tokens, come what may.
        seed: Sent with every request.
        limit_s: Seconds after which one request is given up.
        count_tokens: Ask `/apply-template` and `/tokenize` for the length of the prompts before.
    """

    prompts: str
    conversations: tuple[texts.Prompt, ...]
    concurrency: tuple[int, ...] = (1,)
    max_tokens: int = 128
    repeats: int = 3
    models: tuple[str, ...] = ()
    system: str = ""
    system_name: str = ""
    unique: bool = True
    cache_prompt: bool = True
    ignore_eos: bool = False
    seed: int = 42
    limit_s: float = 600.0
    count_tokens: bool = True

    def stored(self) -> dict[str, Any]:
        """Return what is printed and kept with the results: all but the texts themselves."""
        kept: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        kept["conversations"] = len(self.conversations)
        kept["prompts_sha256"] = _sha256([prompt.messages for prompt in self.conversations])
        kept["system_sha256"] = _sha256(self.system) if self.system else ""
        kept["system"] = f"{self.system_name}, {len(self.system)} characters" if self.system else ""
        kept["temperature"] = 0
        kept["stream"] = True
        return {key: value for key, value in kept.items() if key != "system_name"}


class Recorder:
    """Collects one run; `results` is whole at any moment.

    Args:
        run: What is known of the run before it starts.
        told: Called with every request that has ended.
    """

    def __init__(self, run: Run, told: Callable[[Request], None] = lambda _: None) -> None:
        self.run = msgspec.structs.replace(run, complete=False, note="interrupted")
        self.requests: list[Request] = []
        self._told = told

    def add(self, request: Request) -> None:
        """Keep one request."""
        self.requests.append(request)
        self._told(request)

    def note(self, **fields: Any) -> None:
        """Change what is known of the run."""
        self.run = msgspec.structs.replace(self.run, **fields)

    @property
    def results(self) -> Results:
        """What there is so far."""
        return Results(runs=(self.run,), requests=tuple(self.requests))


def new_run(tag: str, url: str, **fields: Any) -> Run:
    """Return a run that starts now, with an id of its own."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Run(
        id=secrets.token_hex(6),
        tag=tag,
        started=now,
        url=url,
        machine=surroundings.machine(),
        versions=surroundings.versions(),
        **fields,
    )


async def measure(
    settings: Settings, targets: dict[str, Endpoint], recorder: Recorder, *, hash_files: bool = True
) -> None:
    """Run every cell and leave all of it in the recorder.

    Args:
        settings: What to ask.
        targets: Resolved endpoints by name; the first is the one described, `door` as a rule.
            With several, their waves take turns.
        recorder: Where everything goes.
        hash_files: Hash binary and model at the end, where they are local.

    Raises:
        OnebitError: No request of a cell succeeded, so that going on would tell nothing.
    """
    door = next(iter(targets.values()))
    facts = await surroundings.server_facts(door)
    models = settings.models or (_first_chat_model(facts),)
    recorder.note(server=facts, settings=settings.stored() | {"models": list(models)})
    if settings.count_tokens:
        counted = await _count_tokens(door, settings)
        recorder.note(settings=recorder.run.settings | {"prompt_tokens": counted})
    backends = surroundings.backends_of(facts.get("status"))
    pids = [pid for _, pid in surroundings.backend_ports(backends) if pid]
    watch = surroundings.Watch(surroundings.find_server(door), pids)
    numbers = _numbers()
    used: list[Usage] = []
    began_s = trio.current_time()
    failure: OnebitError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        try:
            for model, concurrency in itertools.product(models, settings.concurrency):
                cell = _Cell(
                    settings,
                    recorder,
                    model=model,
                    concurrency=concurrency,
                    numbers=numbers,
                    began_s=began_s,
                )
                watch.start()
                try:
                    await cell.run(targets)
                    if "status" in facts:  # a lazy backend may have started within the cell
                        watch.tell(await surroundings.backend_pids(door))
                finally:
                    used += watch.finish(cell_name(model, settings.prompts, concurrency))
                    recorder.note(usage=tuple(used))
        except OnebitError as error:
            failure = error  # raised below, where no nursery wraps it in a group
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    recorder.note(complete=True, note="")
    if hash_files:
        # a path that another machine says of itself may be some other file here
        path = facts.get("props", {}).get("model_path") if surroundings.is_local(door) else None
        files = await trio.to_thread.run_sync(
            partial(surroundings.files_of, watch, path), abandon_on_cancel=True
        )
        recorder.note(files=files)


class _Cell:
    """The waves of one model at one concurrency."""

    def __init__(
        self,
        settings: Settings,
        recorder: Recorder,
        *,
        model: str,
        concurrency: int,
        numbers: Iterator[int],
        began_s: float,
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        self._model = model
        self._concurrency = concurrency
        self._numbers = numbers
        self._began_s = began_s

    async def run(self, targets: dict[str, Endpoint]) -> None:
        """Send all waves; raises OnebitError when none of a target's had a success."""
        waves: dict[str, list[Request]] = {}
        succeeded: set[str] = set()
        for repeat in range(1, self._settings.repeats + 1):
            # alternates over waves and loads, so that neither target always meets the other's
            # leavings, nor always gets request 1 of a fresh server
            turned = (self._recorder.run.load + repeat) % 2
            for target, where in list(targets.items())[:: -1 if turned else 1]:
                wave = waves[target] = await self._wave(where, target, repeat)
                if any(not request.error for request in wave):
                    succeeded.add(target)
                if _is_gone(wave):
                    self._stop(wave, f"the server went away in wave {repeat}")
        for target, wave in waves.items():
            if target not in succeeded:
                by = f" by the way `{target}`" if len(targets) > 1 else ""
                self._stop(wave, f"no request succeeded{by}")

    def _stop(self, wave: list[Request], what: str) -> None:
        self._recorder.note(note=what)
        last = wave[-1]
        raise OnebitError(
            f"{self._recorder.run.url}: {what} of {last.cell}: {last.error}: {last.detail}",
            hint="see the server's log; what was measured until then is kept",
        )

    async def _wave(self, where: Endpoint, target: str, repeat: int) -> list[Request]:
        before = (repeat - 1) * self._concurrency
        bodies = [self._body(before + place) for place in range(self._concurrency)]
        wave: list[Request] = []

        async def one(place: int, body: bytes) -> None:
            started_s = trio.current_time() - self._began_s
            seen = Stream(began_s=0.0)
            with trio.move_on_after(self._settings.limit_s) as limit:
                await stream(where, _ROUTE, body, seen)
            if limit.cancelled_caught:
                seen.fail("timeout", f"no end after {self._settings.limit_s:g} s")
            request = Request(
                run=self._recorder.run.id,
                tag=self._recorder.run.tag,
                model=self._model,
                prompts=self._settings.prompts,
                concurrency=self._concurrency,
                load=self._recorder.run.load,
                repeat=repeat,
                stream=place,
                target=target,
                started_s=round(started_s, 4),
                **numbers_of(seen),
            )
            wave.append(request)
            self._recorder.add(request)

        async with trio.open_nursery() as nursery:
            for place, body in enumerate(bodies, 1):
                nursery.start_soon(one, place, body)
        return wave

    def _body(self, turn: int) -> bytes:
        settings = self._settings
        # counted within the cell, so that arms, loads and targets are asked the same in each place
        conversation = settings.conversations[turn % len(settings.conversations)]
        unique = texts.prefix(next(self._numbers)) if settings.unique else ""
        body = {
            "messages": texts.prepare(conversation, unique=unique, system=settings.system),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "seed": settings.seed,
            "max_tokens": settings.max_tokens,
        }
        if self._model:
            body["model"] = self._model
        # only when asked for, since these are llama-server's own and others may refuse them
        if not settings.cache_prompt:
            body["cache_prompt"] = False
        if settings.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body)


def numbers_of(seen: Stream) -> dict[str, Any]:
    """Return a request's numbers: the backend's rates where it gives them, else the client's."""
    if seen.error:
        end = {} if seen.end_s is None else {"total_ms": _ms(seen.end_s - seen.began_s)}
        return {"error": seen.error, "detail": seen.detail, **end}
    if seen.first_s is None or seen.last_s is None or seen.end_s is None:
        raise ValueError(f"a stream without an error and without text: {seen}")
    timings, usage = seen.timings, seen.usage
    tokens, prompt, cached = seen.texts, None, None
    if usage is not None:
        tokens = usage.completion_tokens or tokens
        prompt = usage.prompt_tokens
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else None
    ttft_s, decode_s = seen.first_s - seen.began_s, seen.last_s - seen.first_s
    found: dict[str, Any] = {
        "ttft_ms": _ms(ttft_s),
        "total_ms": _ms(seen.end_s - seen.began_s),
        "rates_by": "client",
    }
    if timings is not None and timings.prompt_n is not None:
        tokens = timings.predicted_n or tokens
        cached = timings.cache_n if timings.cache_n is not None else cached
        prompt = prompt if prompt is not None else timings.prompt_n + (cached or 0)
    fresh = None if prompt is None else prompt - (cached or 0)
    prefill = fresh / ttft_s if fresh and ttft_s > 0 else None
    decode = (tokens - 1) / decode_s if tokens > 1 and decode_s > 0 else None
    if timings is not None and timings.prompt_per_second is not None:
        found["rates_by"] = "backend"
        prefill = timings.prompt_per_second if timings.prompt_n else None
        # one token is sampled from the prefill's own logits: b10068 says 0.001 ms and a million/s
        decode = timings.predicted_per_second if tokens > 1 else None
        if timings.prompt_ms is not None:
            found["wait_ms"] = max(0.0, round(_ms(ttft_s) - timings.prompt_ms, 3))
    return found | {
        # texts that all came in one piece, through a proxy that buffers, have no time between them
        "tpot_ms": _ms(decode_s / (tokens - 1)) if tokens > 1 and decode_s > 0 else None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": tokens,
        "prefill_tok_s": None if prefill is None else round(prefill, 3),
        "decode_tok_s": None if decode is None else round(decode, 3),
    }


def _sha256(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _is_gone(wave: list[Request]) -> bool:
    return all(request.error == "refused" for request in wave)


def _numbers() -> Iterator[int]:
    """Count from a random start, so that no two runs share a prefix."""
    number = secrets.randbits(41)
    while True:
        yield number
        number += 1


def _first_chat_model(facts: dict[str, Any]) -> str:
    for model in facts.get("models", []):
        if model.get("role", "chat") == "chat":
            return str(model["id"])
    return ""


async def _count_tokens(where: Endpoint, settings: Settings) -> list[int] | None:
    """Return the prompts' tokens by the server's own template, or `None`; the model is not run."""
    counts = []
    for conversation in settings.conversations:
        messages = texts.prepare(conversation, system=settings.system)
        with trio.move_on_after(settings.limit_s):
            try:
                filled = await fetch(where, "POST", "/apply-template", {"messages": messages})
                prompt = filled.json()["prompt"]
                body = {"content": prompt, "add_special": True}
                answer = await fetch(where, "POST", "/tokenize", body)
                counts.append(len(answer.json()["tokens"]))
            except (OSError, KeyError, TypeError):
                return None
    return counts
