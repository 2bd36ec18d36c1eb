"""Generation without a model: slots, costs and timings of one request, step by step."""

from __future__ import annotations

import codecs
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from . import text
from .costs import Costs
from .knobs import Moment
from .options import Options
from .slots import Slot, Slots
from .world import World

__all__ = ["Engine", "Job", "LeftError", "Progress", "Token"]

NO_DECODE_MS = 0.001
WAIT_STEP_S = 0.02


class LeftError(Exception):
    """The client left, and this build notices for this kind of request."""


class Progress(NamedTuple):
    """How much of the prompt is done, after so many milliseconds."""

    processed: int
    ms: float


class Token(NamedTuple):
    """One generated token; `text` is empty where it ends inside a character."""

    id: int
    text: str


class Job:
    """One request for text.

    Args:
        number: Its place among the work requests, from 1.
        prompt: The token ids.
        body: The request's body, for `n_predict` and the rest.
        pause: Waits some seconds; raises `LeftError` when the client is gone and that counts.
    """

    def __init__(
        self, number: int, prompt: list[int], body: dict[str, Any], pause: Callable[[float], None]
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.pause = pause
        self.stream = bool(body.get("stream"))
        limit = body.get("n_predict", body.get("max_tokens", body.get("max_completion_tokens")))
        self.limit = -1 if limit is None else max(1, int(limit)) if int(limit) >= 0 else -1
        self.pinned = int(body.get("id_slot", -1))
        self.cache = bool(body.get("cache_prompt", True))
        self.grammar = str(body.get("grammar") or "")
        stop = body.get("stop") or []
        self.stop = [stop] if isinstance(stop, str) else [str(s) for s in stop]
        self.ignore_eos = bool(body.get("ignore_eos"))
        self.slot = -1
        self.task = -1
        self.cached = 0
        self.prompt_ms = 0.0
        self.predicted_ms = NO_DECODE_MS
        self.tokens: list[int] = []
        self.content = ""
        self.stop_type = "limit"
        self.stopping_word = ""
        self.truncated = False
        self.shapes: list[str] = []
        self.unbuilt: list[str] = []

    def timings(self) -> dict[str, float]:
        """Return llama-server's `timings`, computed."""
        prompt_n, predicted_n = max(1, len(self.prompt) - self.cached), max(1, len(self.tokens))
        prompt_ms = max(self.prompt_ms, 0.001)
        return {
            "cache_n": self.cached,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / prompt_n,
            "prompt_per_second": 1000 * prompt_n / prompt_ms,
            "predicted_n": predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": self.predicted_ms / predicted_n,
            "predicted_per_second": 1000 * predicted_n / self.predicted_ms,
        }

    def meets(self, shape: str, built: set[str]) -> bool:
        """Note a shape; tell whether it was built already."""
        was = not shape or shape in built
        if shape and shape not in self.shapes:
            self.shapes.append(shape)
        if not was:
            self.unbuilt.append(shape)
            built.add(shape)
        return was


class Engine:
    """The model behind the server.

    Args:
        options: llama-server's options.
        world: The process, with the knobs.
    """

    def __init__(self, options: Options, world: World) -> None:
        knobs = world.knobs
        self._world = world
        parallel = options.number("parallel", -1)
        self.unified = options.on("kv-unified", default=parallel < 1)
        count = parallel if parallel > 0 else 4
        asked = options.number("ctx-size", 0) or knobs.ctx_train
        self.n_ctx = asked if self.unified else -(-(-(-asked // 256) * 256 // count) // 256) * 256
        self.ubatch = options.number("ubatch-size", 512)
        self.batch = options.number("batch-size", 2048)
        self._cache = options.on("cache-prompt", default=True)
        self.costs = Costs(knobs.model, knobs.scale, knobs.pps, knobs.tps)
        similarity = float(options.text("slot-prompt-similarity", "0.1"))
        host_mib = options.number("cache-ram", 8192)
        self.slots = Slots(
            count, knobs.arch, similarity, float("inf") if host_mib < 0 else host_mib * 2.0**20
        )
        self.built: set[str] = set()
        self.changed = threading.Condition()
        self._device = threading.Lock()
        self._tasks = 0
        self.works = 0
        self.waiting = 0
        self.decoding = 0
        self.totals = dict.fromkeys(("prompt_n", "cache_n", "predicted_n", "decodes", "n_max"), 0)
        self.seconds = {"prompt": 0.0, "predicted": 0.0}

    def next_work(self) -> int:
        """Count one more work request."""
        with self.changed:
            self.works += 1
            return self.works

    def run(self, job: Job) -> Generator[Progress | Token, None, None]:
        """Do one request; what it yields can be streamed as it comes.

        Raises:
            LeftError: The client left.
        """
        slot = self._take(job)
        try:
            yield from self._prefill(job, slot)
            yield from self._decode(job, slot)
        finally:
            with self.changed:
                slot.tokens = slot.tokens + job.tokens[:-1]
                self.slots.release(slot)
                self._count(job)
                self.changed.notify_all()
            self._report(job)

    def _wait_for_slot(self, job: Job) -> tuple[Slot, str]:
        with self.changed:
            self.waiting += 1
        try:
            while True:
                with self.changed:
                    if taken := self.slots.take(job.prompt, job.pinned):
                        return taken
                    self.changed.wait(WAIT_STEP_S)
                job.pause(0)
        finally:
            with self.changed:
                self.waiting -= 1

    def _take(self, job: Job) -> Slot:
        slot, how = self._wait_for_slot(job)
        with self.changed:
            if not (job.cache and self._cache):
                slot.tokens, slot.checkpoints = [], []
            self._tasks += 1
            job.slot, job.task, slot.task = slot.number, self._tasks, self._tasks
            job.cached = slot.reusable(job.prompt, self.slots.arch)
            slot.start(job.prompt, job.cached, self.slots.arch, self.ubatch)
            slot.prompt_cached, slot.prompt_done, slot.decoded = job.cached, 0, 0
            slot.stream = job.stream
        say = self._world.log.say
        say(f"slot get_availabl: id {slot.number:2d} | task -1 | {how}")
        head = f"id {slot.number:2d} | task {job.task} |"
        say(f"slot launch_slot_: {head} processing task, is_child = 0")
        return slot

    def _prefill(self, job: Job, slot: Slot) -> Iterator[Progress]:
        seconds, count = self._world.knobs.first
        done = job.cached
        yield Progress(done, 0)
        if job.number <= count and seconds:
            job.pause(seconds)
            job.prompt_ms += seconds * 1000
        since_check = 0
        for batch in self.costs.batches(len(job.prompt) - job.cached, self.ubatch):
            with self._device:
                built = job.meets(batch.shape, self.built)
                ms = batch.ms + (0.0 if built else batch.build_ms)
                time.sleep(self.costs.prefill_wall_s(ms))
            job.prompt_ms += ms
            done += batch.tokens
            since_check += batch.tokens
            slot.prompt_done = done - job.cached
            self.totals["decodes"] += 1
            if since_check >= self.batch or done == len(job.prompt):
                since_check = 0
                job.pause(0)
            yield Progress(done, job.prompt_ms)

    def _limit(self, job: Job) -> tuple[int, str]:
        """Return how many tokens at most, and why it ends there."""
        room = self.n_ctx - len(job.prompt)
        if job.limit < 0 and not job.ignore_eos and self._world.knobs.reply < room:
            return self._world.knobs.reply, "eos"
        if job.limit < 0 or job.limit > room:
            job.truncated = True
            return room, "limit"
        return job.limit, "limit"

    def _decode(self, job: Job, slot: Slot) -> Iterator[Token]:
        kind, first = self._world.knobs.garbage
        garbage = job.number >= first and (kind == "all" or (kind == "stream" and job.stream))
        reply, again = text.reply_tokens(
            job.prompt, self._world.knobs.text, job.grammar, garbage=garbage
        )
        most, job.stop_type = self._limit(job)
        if not again and len(reply) < most:
            most, job.stop_type = len(reply), "eos"
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        with self.changed:
            self.decoding += 1
        try:
            for number in range(most):
                if number:
                    self._step(job)
                token = reply[number % len(reply)]
                piece = decoder.decode(text.piece(token))
                job.tokens.append(token)
                slot.decoded, slot.remaining = number + 1, most - number - 1
                before = len(job.content)
                if self._stopped(job, piece):
                    yield Token(token, job.content[before:])
                    return
                job.content += piece
                yield Token(token, piece)
                self._world.reached(Moment("request", job.number, number + 1))
                job.pause(0)
        finally:
            with self.changed:
                self.decoding -= 1

    def _step(self, job: Job) -> None:
        shape = self.costs.decode_shape(self.decoding)
        with self._device:  # a prefill on the device holds up everybody's next token
            built = job.meets(shape, self.built)
        ms = self.costs.step_ms(shape, built=built, met_unbuilt=shape in job.unbuilt)
        job.predicted_ms = (0 if job.predicted_ms == NO_DECODE_MS else job.predicted_ms) + ms
        self.totals["decodes"] += 1
        wall_s = self.costs.decode_wall_s(ms)
        if wall_s:
            job.pause(wall_s)

    def _stopped(self, job: Job, piece: str) -> bool:
        """End the text before a stop word, if one came."""
        for word in job.stop:
            at = (job.content + piece).find(word)
            if at >= 0:
                job.stop_type, job.stopping_word = "word", word
                job.content = (job.content + piece)[:at]
                return True
        return False

    def _count(self, job: Job) -> None:
        timings = job.timings()
        self.totals["prompt_n"] += int(timings["prompt_n"])
        self.totals["cache_n"] += job.cached
        self.totals["predicted_n"] += len(job.tokens)
        self.totals["n_max"] = max(self.totals["n_max"], len(job.prompt) + len(job.tokens))
        self.seconds["prompt"] += job.prompt_ms / 1000
        self.seconds["predicted"] += job.predicted_ms / 1000

    def _report(self, job: Job) -> None:
        t = job.timings()
        head = f"id {job.slot:2d} | task {job.task} |"
        say = self._world.log.say
        say(
            f"slot print_timing: {head} prompt eval time = {t['prompt_ms']:10.2f} ms / "
            f"{t['prompt_n']:5.0f} tokens ({t['prompt_per_token_ms']:8.2f} ms per token, "
            f"{t['prompt_per_second']:8.2f} tokens per second)"
        )
        say(
            f"slot print_timing: {head}        eval time = {t['predicted_ms']:10.2f} ms / "
            f"{t['predicted_n']:5.0f} tokens ({t['predicted_per_token_ms']:8.2f} ms per token, "
            f"{t['predicted_per_second']:8.2f} tokens per second)"
        )
        total = len(job.prompt) + len(job.tokens)
        say(f"slot      release: {head} stop processing: n_tokens = {total}, truncated = 0")
