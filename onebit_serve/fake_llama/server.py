"""The server: what each route answers, and the faults on the way."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from . import replies, text
from .engine import Engine, Job, LeftError, Progress
from .knobs import Failure, Moment
from .options import Options
from .prompts import HttpError, chat_ids, json_body, prompts, unsupported
from .replies import error
from .routes import Routes
from .wire import Connection, GoneError, Request, dumps
from .world import World

__all__ = ["Server"]

RECORDED_BODY_BYTES = 64 * 1024
OPEN = {"/health", "/v1/health"}
OPEN_B10068 = OPEN | {"/v1/models", "/models", "/api/tags", "/"}
EMBEDDING_ROUTES = {"/embedding", "/embeddings", "/v1/embeddings"}
RERANK_ROUTES = {"/rerank", "/reranking", "/v1/rerank", "/v1/reranking"}


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
        keys = [k for k in options.text("api-key").split(",") if k]
        if file := options.text("api-key-file"):
            lines = Path(file).read_text().splitlines()
            keys += [line for line in lines if line and not line.startswith("#")]
        self._keys = keys
        self._build = "b1-571d0d5" if world.knobs.build == "b10068" else "b1-86a2835"
        self._routes = Routes(options, world, self._engine, self._names, self._build)

    @property
    def engine(self) -> Engine:
        """The model behind it."""
        return self._engine

    def loaded(self) -> None:
        """Stop answering 503."""
        self._loaded = True

    def stop(self) -> None:
        """Take no more connections, wait until those that worked are gone, and end the process."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
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
        conn = Connection(
            sock, next(self._numbers), knobs.ka, knobs.chunks, deaf=knobs.cancel == "never"
        )
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
                self._routes.answer(conn, request)
        except HttpError as problem:
            self._refuse(conn, request, number, problem.status, problem.value)
        except (TypeError, ValueError, AttributeError, KeyError) as problem:
            why = f"[json.exception.type_error.302] {problem}"
            self._refuse(conn, request, number, 400, error(400, why))
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
        import hashlib  # not needed by those who only start and stop it

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
        body = json_body(request, self._world)
        form = replies.format_for(request.path) or replies.Format
        if "max_output_tokens" in body:
            body["max_tokens"] = body["max_output_tokens"]
        given, several = (
            ([chat_ids(body, self._world)], False) if form.chat else prompts(body, self._world)
        )
        jobs = [self._job(conn, number, ids, body) for ids in given]
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
        except GoneError:  # a write failed before the next look at the connection
            if not conn.left and ended == "left":
                self._world.rec.write("gone", connection=conn.number, work=number)
            raise
        finally:
            for job in jobs:
                self._note(conn, job, ended, started_s)

    def _one(self, conn: Connection, answer: replies.Format) -> None:
        """Do one job and, if it streams, send it on the way."""
        job, begun = answer.job, False
        wants_progress = bool(answer.body.get("return_progress"))
        with closing(self._engine.run(job)) as events:  # a slot is given back whatever happens
            for event in events:
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
            raise unsupported("embeddings", "--embeddings")
        import base64  # as hashlib

        body = json_body(request, self._world)
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
            raise unsupported("reranking", "--reranking")
        body = json_body(request, self._world)
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
