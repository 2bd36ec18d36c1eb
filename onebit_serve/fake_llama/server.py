"""The server: what each route answers, and the faults on the way."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from . import replies, text
from .engine import Engine, Job, LeftError, Progress
from .knobs import Failure, Moment
from .options import Options
from .replies import error
from .wire import Connection, GoneError, Request, dumps
from .world import World

__all__ = ["Server"]

RECORDED_BODY_BYTES = 64 * 1024
N_PARAMS = 134_515_008
PAGE = b"<!doctype html><title>llama.cpp</title><p>The fake has no chat page.</p>\n"
OPEN = {"/health", "/v1/health"}
OPEN_B10068 = OPEN | {"/v1/models", "/models", "/api/tags", "/"}
EMBEDDING_ROUTES = {"/embedding", "/embeddings", "/v1/embeddings"}
RERANK_ROUTES = {"/rerank", "/reranking", "/v1/rerank", "/v1/reranking"}
METRICS = (
    ("prompt_tokens_total", "counter", "Number of prompt tokens processed."),
    ("prompt_tokens_cached_total", "counter", "Number of prompt tokens taken from the cache."),
    ("prompt_seconds_total", "counter", "Prompt process time"),
    ("tokens_predicted_total", "counter", "Number of generation tokens processed."),
    ("tokens_predicted_seconds_total", "counter", "Predict process time"),
    ("n_decode_total", "counter", "Total number of llama_decode() calls"),
    ("n_tokens_max", "counter", "Largest observed n_tokens."),
    ("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s."),
    ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s."),
    ("requests_processing", "gauge", "Number of requests processing."),
    ("requests_deferred", "gauge", "Number of requests deferred."),
    ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per llama_decode() call"),
)


class HttpError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status = status
        self.value = error(status, message, **more)


class Server:
    """Answers like llama-server.

    Args:
        options: Its command line.
        world: The process, with the knobs.
        listener: The bound and listening socket.
    """

    def __init__(self, options: Options, world: World, listener: socket.socket) -> None:
        self._options = options
        self._world = world
        self._listener = listener
        self._engine = Engine(options, world)
        self._loaded = False
        self._numbers = itertools.count(1)
        self._working = 0
        model = options.text("model", "fake.gguf")
        names = [n for n in options.text("alias").split(",") if n]
        self._names = names or [model]
        self._model_path = model
        keys = [k for k in options.text("api-key").split(",") if k]
        if file := options.text("api-key-file"):
            lines = Path(file).read_text().splitlines()
            keys += [line for line in lines if line and not line.startswith("#")]
        self._keys = keys
        self._build = "b1-571d0d5" if world.knobs.build == "b10068" else "b1-86a2835"

    @property
    def engine(self) -> Engine:
        """The model behind it."""
        return self._engine

    def loaded(self) -> None:
        """Stop answering 503."""
        self._loaded = True

    def stop(self) -> None:
        """Take no more connections, wait until those that worked are gone, and end the process."""
        self._listener.close()
        with self._engine.changed:
            while self._working:
                self._engine.changed.wait(0.05)
        self._world.say_goodbye()
        self._world.exit(0)

    def serve(self) -> None:
        """Accept connections until the listener closes, each on a thread of its own."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connection, args=(sock,), daemon=True).start()

    def _connection(self, sock: socket.socket) -> None:
        knobs, rec = self._world.knobs, self._world.rec
        conn = Connection(sock, next(self._numbers), knobs.ka, knobs.chunks)
        rec.write("connected", connection=conn.number)
        try:
            while not conn.over:
                request = conn.read()
                if request is None:
                    break
                self._answer(conn, request)
            rec.write("closed", connection=conn.number)
        except GoneError:
            rec.write("cut", connection=conn.number)
        except OSError as problem:
            rec.write("cut", connection=conn.number, error=str(problem))
        finally:
            conn.close()

    def _forever(self, conn: Connection) -> None:
        """Answer nothing any more; what the client does is still recorded."""
        while not conn.gone(1):
            pass
        self._world.rec.write("gone", connection=conn.number, hung=True)
        threading.Event().wait()

    def _answer(self, conn: Connection, request: Request) -> None:
        if self._world.hung_all.is_set():
            self._forever(conn)
        generates = replies.format_for(request.path) is not None
        works = generates or request.path in EMBEDDING_ROUTES | RERANK_ROUTES
        number = 0
        if works and request.method == "POST" and self._loaded:
            number = self._engine.next_work()
        self._record(conn, request, number)
        conn.written_at.clear()
        try:
            if request.method == "OPTIONS":
                allow = "Access-Control-Allow-Methods: GET, POST, DELETE, OPTIONS"
                headers = "Access-Control-Allow-Headers: *"
                fields = ("Access-Control-Allow-Credentials: true", headers, allow)
                conn.answer(200, b"", content_type="text/html", fields=fields)
                return
            self._admit(request)
            if number:
                self._work(conn, request, number)
            else:
                self._plain(conn, request)
        except HttpError as problem:
            self._refuse(conn, request, number, problem.status, problem.value)
        except text.BadMessagesError as problem:
            self._refuse(conn, request, number, problem.status, error(problem.status, str(problem)))

    def _refuse(
        self, conn: Connection, request: Request, number: int, status: int, value: Any
    ) -> None:
        if number:
            self._world.log.say(f"srv    operator(): got exception: {dumps(value).decode()}", "W")
            self._world.rec.write("reply", work=number, path=request.path, status=status)
        conn.answer(status, dumps(value))

    def _record(self, conn: Connection, request: Request, number: int) -> None:
        if not self._world.knobs.rec:
            return
        body: dict[str, Any] = {
            "body_bytes": len(request.body),
            "body_sha256": hashlib.sha256(request.body).hexdigest(),
        }
        if len(request.body) <= RECORDED_BODY_BYTES:
            body["body"] = request.body.decode("utf-8", "replace")
        self._world.rec.write(
            "request",
            connection=conn.number,
            work=number or None,
            method=request.method,
            path=request.target,
            headers=request.lines,
            **body,
        )

    def _admit(self, request: Request) -> None:
        """Refuse while loading, and without the key."""
        if not self._loaded:
            raise HttpError(503, "Loading model")
        free = OPEN_B10068 if self._world.knobs.build == "b10068" else OPEN
        if not self._keys or request.path in free:
            return
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not {bearer, request.headers.get("x-api-key", "")} & set(self._keys):
            raise HttpError(401, "Invalid API Key")

    # routes that do no work

    def _plain(self, conn: Connection, request: Request) -> None:
        path, options = request.path, self._options
        if path.startswith("/slots/") and request.method == "POST":
            conn.answer(200, dumps(self._slot_action(request)))
            return
        get = {
            "/health": self._health,
            "/v1/health": self._health,
            "/v1/models": self._models,
            "/models": self._models,
            "/props": self._props,
            "/fake/shapes": lambda _: {"built": sorted(self._engine.built)},
        }
        post = {
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/apply-template": lambda r: {"prompt": self._rendered(self._json(r))},
            "/v1/messages/count_tokens": self._count_tokens,
            "/infill": self._infill,
        }
        table = post if request.method == "POST" else get
        if path in table:
            conn.answer(200, dumps(table[path](request)))
        elif path == "/slots" and request.method == "GET":
            conn.answer(200, dumps(self._slots(request)))
        elif path == "/metrics" and request.method == "GET":
            if not options.on("metrics"):
                raise self._unsupported("metrics endpoint", "--metrics")
            self._metrics(conn)
        elif path == "/" and self._world.knobs.page and options.on("webui", default=True):
            conn.answer(200, PAGE, content_type="text/html; charset=utf-8")
        else:
            raise HttpError(404, "File Not Found")

    @staticmethod
    def _unsupported(what: str, flag: str) -> HttpError:
        return HttpError(501, f"This server does not support {what}. Start it with `{flag}`")

    def _health(self, _: Request) -> Any:
        self._world.reached(Moment("health"))
        if self._world.hung_all.is_set():
            threading.Event().wait()
        if self._world.knobs.health_delay:
            threading.Event().wait(self._world.knobs.health_delay)
        return {"status": "ok"}

    def _models(self, _: Request) -> Any:
        name = self._names[0]
        kind = "embedding" if self._options.on("embeddings") else "completion"
        old = {"name": name, "model": name, "type": "model", "capabilities": [kind]}
        meta = {
            "vocab_type": 2,
            "n_vocab": text.N_VOCAB,
            "n_ctx": self._engine.n_ctx,
            "n_ctx_train": self._world.knobs.ctx_train,
            "n_embd": replies.EMBEDDING_SIZE,
            "n_params": N_PARAMS,
            "size": 96_576_768,
            "ftype": "Q4_1",
        }
        entry = {
            "id": name,
            "aliases": self._names,
            "tags": [],
            "object": "model",
            "created": int(time.time()),
            "owned_by": "llamacpp",
            "meta": meta,
        }
        return {"models": [old], "object": "list", "data": [entry]}

    def _props(self, _: Request) -> Any:
        options = self._options
        return {
            "default_generation_settings": {
                "params": replies.settings({}),
                "n_ctx": self._engine.n_ctx,
            },
            "total_slots": len(self._engine.slots.all),
            "model_alias": self._names[0],
            "model_ftype": "Q4_1",
            "model_path": self._model_path,
            "modalities": {"vision": False, "video": False, "audio": False},
            "media_marker": "<__media__>",
            "endpoint_slots": options.on("slots", default=True),
            "endpoint_props": options.on("props"),
            "endpoint_metrics": options.on("metrics"),
            "ui": options.on("webui", default=True),
            "ui_settings": {},
            "chat_template": text.template_text(self._world.knobs.template),
            "chat_template_caps": {"supports_system_role": True, "supports_tools": False},
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "build_info": self._build,
            "is_sleeping": False,
        }

    def _slots(self, request: Request) -> Any:
        if not self._options.on("slots", default=True):
            raise HttpError(501, "This server does not support slots endpoint.")
        shown = []
        for slot in self._engine.slots.all:
            entry: dict[str, Any] = {
                "id": slot.number,
                "n_ctx": self._engine.n_ctx,
                "speculative": False,
                "is_processing": slot.busy,
            }
            if slot.task >= 0:
                state = {
                    "has_next_token": slot.busy,
                    "has_new_line": False,
                    "n_remain": slot.remaining,
                    "n_decoded": slot.decoded,
                }
                entry |= {
                    "id_task": slot.task,
                    "n_prompt_tokens": len(slot.tokens),
                    "n_prompt_tokens_processed": slot.prompt_done,
                    "n_prompt_tokens_cache": slot.prompt_cached,
                    "params": replies.settings({"stream": slot.stream}),
                    "next_token": [state],
                }
            shown.append(entry)
        if request.query.get("fail_on_no_slot") and all(s["is_processing"] for s in shown):
            raise HttpError(503, "no slot available")
        return shown

    def _slot_action(self, request: Request) -> Any:
        folder = self._options.text("slot-save-path")
        if not folder:
            raise self._unsupported("slots action", "--slot-save-path")
        number = request.path.removeprefix("/slots/")
        if not number.isdecimal():
            raise HttpError(400, "Invalid slot ID")
        slot = self._engine.slots.all[int(number) % len(self._engine.slots.all)]
        action = request.query.get("action", "")
        if action == "erase":
            erased, slot.tokens, slot.checkpoints = len(slot.tokens), [], []
            return {"id_slot": slot.number, "n_erased": erased}
        name = str(self._json(request).get("filename", ""))
        if action not in {"save", "restore"}:
            raise HttpError(400, "Invalid action")
        if not name or "/" in name:
            raise HttpError(400, "Invalid filename")
        file = Path(folder) / name
        if action == "save":
            state = {"model": self._model_path, "tokens": slot.tokens, "marks": slot.checkpoints}
            size = file.write_bytes(dumps(state))
            report = {"n_saved": len(slot.tokens), "n_written": size, "timings": {"save_ms": 0.4}}
        else:
            try:
                state = json.loads(file.read_bytes())
                if state["model"] != self._model_path:
                    raise ValueError
            except (OSError, ValueError, KeyError):
                why = "No available space in KV cache or invalid slot save file"
                raise HttpError(400, f"Unable to restore slot: {why}") from None
            slot.tokens, slot.checkpoints = state["tokens"], state["marks"]
            size = file.stat().st_size
            count = len(slot.tokens)
            report = {"n_restored": count, "n_read": size, "timings": {"restore_ms": 0.3}}
        return {"id_slot": slot.number, "filename": name, **report}

    def _metrics(self, conn: Connection) -> None:
        engine = self._engine
        totals, seconds = engine.totals, engine.seconds
        busy = sum(slot.busy for slot in engine.slots.all)
        values: dict[str, float] = {
            "prompt_tokens_total": totals["prompt_n"],
            "prompt_tokens_cached_total": totals["cache_n"],
            "prompt_seconds_total": seconds["prompt"],
            "tokens_predicted_total": totals["predicted_n"],
            "tokens_predicted_seconds_total": seconds["predicted"],
            "n_decode_total": totals["decodes"],
            "n_tokens_max": totals["n_max"],
            "prompt_tokens_seconds": totals["prompt_n"] / (seconds["prompt"] or 1),
            "predicted_tokens_seconds": totals["predicted_n"] / (seconds["predicted"] or 1),
            "requests_processing": busy,
            "requests_deferred": engine.waiting,
            "n_busy_slots_per_decode": float(bool(totals["decodes"])),
        }
        lines = [
            f"# HELP llamacpp:{name} {about}\n# TYPE llamacpp:{name} {kind}\n"
            f"llamacpp:{name} {values[name]:g}\n"
            for name, kind, about in METRICS
        ]
        conn.answer(200, "".join(lines).encode(), content_type="text/plain; version=0.0.4")

    def _tokenize(self, request: Request) -> Any:
        body = self._json(request)
        content = body.get("content")
        if content is None:
            return {"tokens": []}
        ids = text.tokenize(
            str(content),
            bos=bool(body.get("add_special")) and self._world.knobs.bos,
            parse_special=bool(body.get("parse_special", True)),
        )
        if not body.get("with_pieces"):
            return {"tokens": ids}
        pieces = []
        for token in ids:
            data = text.piece(token)
            try:
                pieces.append({"id": token, "piece": data.decode()})
            except UnicodeDecodeError:
                pieces.append({"id": token, "piece": list(data)})
        return {"tokens": pieces}

    def _detokenize(self, request: Request) -> Any:
        ids = self._valid(self._json(request).get("tokens") or [])
        return {"content": b"".join(map(text.piece, ids)).decode("utf-8", "replace")}

    def _count_tokens(self, request: Request) -> Any:
        return {"input_tokens": len(self._chat_ids(self._json(request)))}

    def _infill(self, _: Request) -> Any:
        missing = "prefix token is missing. suffix token is missing. middle token is missing. "
        raise HttpError(501, f"Infill is not supported by this model: {missing}")

    # prompts

    def _json(self, request: Request) -> dict[str, Any]:
        try:
            value = json.loads(request.body)
        except ValueError as problem:
            status = 500 if self._world.knobs.build == "b10068" else 400
            why = f"parse error at line 1, column {getattr(problem, 'pos', 0) + 1}: {problem}"
            raise HttpError(status, f"[json.exception.parse_error.101] {why}") from None
        if not isinstance(value, dict):
            raise HttpError(400, "[json.exception.type_error.304] cannot use at() with this type")
        return value

    def _rendered(self, body: dict[str, Any]) -> str:
        return text.render(body, self._world.knobs.template)

    def _chat_ids(self, body: dict[str, Any]) -> list[int]:
        if "input" in body and "messages" not in body:  # /v1/responses
            said = body["input"]
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
            if body.get("instructions"):
                messages = [{"role": "system", "content": body["instructions"]}, *messages]
            body = {**body, "messages": messages}
        elif isinstance(body.get("system"), str):  # /v1/messages
            messages = body.get("messages") or []
            body = {**body, "messages": [{"role": "system", "content": body["system"]}, *messages]}
        return text.tokenize(self._rendered(body), bos=self._world.knobs.bos)

    @staticmethod
    def _valid(ids: list[Any]) -> list[int]:
        if not all(isinstance(i, int) and 0 <= i < text.N_VOCAB for i in ids):
            raise HttpError(400, "Prompt contains invalid tokens")
        return ids

    def _prompt_ids(self, prompt: Any) -> list[int]:
        """Return the ids of one prompt: text, ids, or both in one list."""
        bos = self._world.knobs.bos
        if isinstance(prompt, str):
            return text.tokenize(prompt, bos=bos)
        if not isinstance(prompt, list) or not prompt:
            raise HttpError(
                400,
                '"prompt" must not be empty'
                if prompt == []
                else '"prompt" elements must be a string, a list of tokens, a list of '
                "mixed strings & tokens, or a list of prompts",
            )
        ids: list[int] = []
        for place, part in enumerate(prompt):
            if isinstance(part, str):
                ids += text.tokenize(part, bos=bos and place == 0)
            else:
                ids += self._valid([part])
        return ids

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        """Return the prompts of a completion, and whether they came as a list of prompts."""
        if "prompt" not in body:
            raise HttpError(400, "[json.exception.out_of_range.403] key 'prompt' not found")
        prompt = body["prompt"]
        several = (
            isinstance(prompt, list)
            and bool(prompt)
            and (
                all(isinstance(p, str) for p in prompt) or any(isinstance(p, list) for p in prompt)
            )
        )
        if several:
            return [self._prompt_ids(p) for p in prompt], True
        return [self._prompt_ids(prompt)], False

    # work

    def _work(self, conn: Connection, request: Request, number: int) -> None:
        with self._engine.changed:
            self._working += 1
        try:
            self._world.reached(Moment("request", number))
            if self._world.hung.is_set():
                self._forever(conn)
            if self._failed(conn, number):
                return
            if request.path in EMBEDDING_ROUTES:
                self._embed(conn, request, number)
            elif request.path in RERANK_ROUTES:
                self._rerank(conn, request, number)
            else:
                self._generate(conn, request, number)
        finally:
            with self._engine.changed:
                self._working -= 1
                self._engine.changed.notify_all()

    def _failure(self, number: int, *kinds: str) -> Failure | None:
        for rule in self._world.knobs.fail:
            matches = rule.first <= number and (rule.last is None or number <= rule.last)
            if matches and rule.kind in kinds:
                return rule
        return None

    def _failed(self, conn: Connection, number: int) -> bool:
        """Fail before the head, if this request is to."""
        rule = self._failure(number, "status", "reset", "cut")
        if rule is None:
            return False
        self._world.rec.write("reply", work=number, status=rule.status, failed=rule.kind)
        if rule.kind == "status":
            value = error(rule.status, rule.message)
            body = rule.message.encode() if rule.message.startswith("{") else dumps(value)
            conn.answer(rule.status, body)
            return True
        if rule.kind == "cut":
            conn.start_stream()
        conn.close(reset=rule.kind == "reset")
        raise GoneError

    def _pause(self, conn: Connection, number: int, *, stream: bool, seconds: float) -> None:
        """Wait, notice a client that left, and freeze once the process was told to stop."""
        if self._world.hung.is_set():
            self._forever(conn)
        before = conn.left
        left = conn.gone(seconds)
        if left and not before:
            self._world.rec.write("gone", connection=conn.number, work=number)
        cancel = self._world.knobs.cancel
        if left and (cancel == "always" or (cancel == "streams-only" and stream)):
            self._world.log.say(f"srv          stop: cancel task, id_task = {number}", "W")
            raise LeftError
        if self._world.stopping.is_set():
            if stream and self._world.knobs.build == "b10068":
                conn.cut()
            while not conn.gone(0.1):
                pass
            raise LeftError

    def _job(self, conn: Connection, number: int, ids: list[int], body: dict[str, Any]) -> Job:
        n_ctx = self._engine.n_ctx
        if len(ids) >= n_ctx:
            raise HttpError(
                400,
                f"request ({len(ids)} tokens) exceeds the available context size "
                f"({n_ctx} tokens), try increasing it",
                type="exceed_context_size_error",
                n_prompt_tokens=len(ids),
                n_ctx=n_ctx,
            )
        stream = bool(body.get("stream"))
        return Job(
            number,
            ids,
            body,
            lambda seconds: self._pause(conn, number, stream=stream, seconds=seconds),
        )

    def _generate(self, conn: Connection, request: Request, number: int) -> None:
        if self._options.on("embeddings") or self._options.on("reranking"):
            why = "the current context does not support logits computation. skipping"
            raise HttpError(500, why)
        body = self._json(request)
        form = replies.format_for(request.path) or replies.Format
        if "max_output_tokens" in body:
            body["max_tokens"] = body["max_output_tokens"]
        prompts, several = ([self._chat_ids(body)], False) if form.chat else self._prompts(body)
        jobs = [self._job(conn, number, ids, body) for ids in prompts]
        answers = [form(job, body, self._names[0], self._build) for job in jobs]
        started_s = time.monotonic()
        ended = "left"
        try:
            for answer in answers:
                if self._world.knobs.first_byte:
                    answer.job.pause(self._world.knobs.first_byte)
                self._one(conn, answer)
            ended = "done"
            if jobs[0].stream:
                conn.end_stream()
            else:
                if self._failure(number, "format"):
                    raise HttpError(500, replies.FORMAT_MESSAGE)
                wholes = [answer.whole() for answer in answers]
                conn.answer(200, dumps(wholes if several else wholes[0]))
        except LeftError:
            raise GoneError from None
        finally:
            for job in jobs:
                self._note(conn, job, ended, started_s)

    def _one(self, conn: Connection, answer: replies.Format) -> None:
        """Do one job and, if it streams, send it on the way."""
        job, begun = answer.job, False
        wants_progress = bool(answer.body.get("return_progress"))
        for event in self._engine.run(job):
            if not job.stream:
                continue
            if isinstance(event, Progress):
                if wants_progress:
                    self._head(conn)
                    answer.progress(conn, event.processed, event.ms)
                continue
            self._head(conn)
            if not begun:
                begun = True
                answer.begin(conn)
            answer.token(conn, event.id, event.text)
            if rule := self._failure(job.number, "stream"):
                self._stream_error(conn, rule.message)
                return
        if job.stream and self._failure(job.number, "format"):
            self._stream_error(conn, replies.FORMAT_MESSAGE)
        elif job.stream:
            answer.end(conn)

    @staticmethod
    def _head(conn: Connection) -> None:
        if not conn.streaming:
            conn.start_stream()

    def _stream_error(self, conn: Connection, message: str) -> None:
        conn.event(message.encode() if message.startswith("{") else error(500, message))

    def _note(self, conn: Connection, job: Job, ended: str, started_s: float) -> None:
        self._world.rec.write(
            "reply",
            work=job.number,
            status=200,
            ended=ended,
            slot=job.slot,
            stream=job.stream,
            seconds=time.monotonic() - started_s,
            first_event=conn.written_at[0] if conn.written_at else None,
            last_event=conn.written_at[-1] if conn.written_at else None,
            events=len(conn.written_at),
            tokens=len(job.tokens),
            shapes=job.shapes,
            unbuilt=job.unbuilt,
            timings=job.timings(),
        )

    def _texts(self, conn: Connection, number: int, texts: list[str]) -> list[list[int]]:
        bos = self._world.knobs.bos
        found = [text.tokenize(t, bos=bos) for t in texts]
        ubatch = self._engine.ubatch
        for ids in found:
            if len(ids) > ubatch:
                why = "input is too large to process. increase the physical batch size"
                raise HttpError(
                    500,
                    f"{why} (current batch size: {ubatch})".replace(
                        "input is", f"input ({len(ids)} tokens) is"
                    ),
                )
        if self._world.knobs.first_byte:
            conn.gone(self._world.knobs.first_byte)
        seconds, count = self._world.knobs.first
        if number <= count and seconds:
            conn.gone(seconds)
        self._world.rec.write("reply", work=number, status=200, tokens=sum(map(len, found)))
        return found

    def _embed(self, conn: Connection, request: Request, number: int) -> None:
        if not self._options.on("embeddings"):
            raise self._unsupported("embeddings", "--embeddings")
        body = self._json(request)
        given = body.get("input", body.get("content"))
        if not given:
            raise HttpError(400, '"input" or "content" must be provided')
        ids = self._texts(conn, number, [given] if isinstance(given, str) else given)
        vectors = [replies.embedding(i) for i in ids]
        if request.path != "/v1/embeddings":
            shown = [{"index": at, "embedding": [v]} for at, v in enumerate(vectors)]
            conn.answer(200, dumps(shown))
            return
        packed = body.get("encoding_format") == "base64"
        data = []
        for at, vector in enumerate(vectors):
            raw = struct.pack(f"<{len(vector)}f", *vector)
            value: Any = base64.b64encode(raw).decode() if packed else vector
            data.append({"embedding": value, "index": at, "object": "embedding"})
        total = sum(map(len, ids))
        usage = {"prompt_tokens": total, "total_tokens": total}
        answer = {"model": self._names[0], "object": "list", "usage": usage, "data": data}
        conn.answer(200, dumps(answer))

    def _rerank(self, conn: Connection, request: Request, number: int) -> None:
        if not self._options.on("reranking"):
            raise self._unsupported("reranking", "--reranking")
        body = self._json(request)
        query, documents = body.get("query"), body.get("documents", body.get("texts"))
        if not isinstance(query, str):
            raise HttpError(400, '"query" must be provided')
        if not documents:
            raise HttpError(400, '"documents" must be a non-empty string array')
        ids = self._texts(conn, number, [f"{query}\n{document}" for document in documents])
        words = set(query.lower().split())
        scores = [float(len(words & set(str(d).lower().split()))) - 0.92 for d in documents]
        order = sorted(range(len(scores)), key=lambda at: -scores[at])
        results = [{"index": at, "relevance_score": scores[at]} for at in order]
        total = sum(map(len, ids))
        usage = {"prompt_tokens": total, "total_tokens": total}
        answer = {"model": self._names[0], "object": "list", "usage": usage, "results": results}
        conn.answer(200, dumps(answer))
