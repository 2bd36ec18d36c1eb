"""The shapes of llama-server's answers: plain values in, JSON values out."""

from __future__ import annotations

import os
import time
import zlib
from typing import Any

from . import text
from .engine import Job
from .wire import Connection

__all__ = ["Format", "embedding", "error", "format_for", "settings"]

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
PLAIN_ERRORS = {401, 404, 503}  # llama-server writes these in another order
FORMAT_MESSAGE = "The model produced output that does not match the expected Content-only format"
EMBEDDING_SIZE = 64


def error(status: int, message: str, **more: Any) -> dict[str, Any]:
    """Return the error envelope."""
    kind = more.pop("type", ERROR_TYPES.get(status, "server_error"))
    if status in PLAIN_ERRORS:
        return {"error": {"message": message, "type": kind, "code": status}}
    return {"error": {"code": status, "message": message, "type": kind, **more}}


def settings(body: dict[str, Any], *, chat: bool = False) -> dict[str, Any]:
    """Return `generation_settings`, the part that clients look at."""
    limit = body.get("n_predict", body.get("max_tokens", -1))
    return {
        "seed": body.get("seed", 4294967295),
        "temperature": body.get("temperature", 0.8),
        "top_k": body.get("top_k", 40),
        "top_p": body.get("top_p", 0.95),
        "min_p": body.get("min_p", 0.05),
        "max_tokens": limit,
        "n_predict": limit,
        "ignore_eos": bool(body.get("ignore_eos")),
        "stream": bool(body.get("stream")),
        "stop": body.get("stop") or [],
        "grammar": body.get("grammar") or "",
        "n_probs": 0,
        "chat_format": "peg-native" if chat else "Content-only",
        "reasoning_format": "deepseek",
        "timings_per_token": bool(body.get("timings_per_token")),
        "lora": [],
    }


def embedding(tokens: list[int]) -> list[float]:
    """Return a unit vector that depends on the tokens alone."""
    seed = zlib.crc32(repr(tokens).encode())
    raw = [((seed * (at + 1) * 2654435761) % 2000 - 999.5) / 1000 for at in range(EMBEDDING_SIZE)]
    norm = sum(value * value for value in raw) ** 0.5
    return [value / norm for value in raw]


def _name(prefix: str) -> str:
    return prefix + os.urandom(16).hex()


class Format:
    """How one route writes an answer; this one is `/completion`.

    Args:
        job: The request being answered.
        body: Its body.
        model: The name to show.
        fingerprint: `system_fingerprint`.
    """

    chat = False
    role_first = False

    def __init__(self, job: Job, body: dict[str, Any], model: str, fingerprint: str) -> None:
        self.job = job
        self.body = body
        self.model = model
        self.fingerprint = fingerprint
        self.id = _name("chatcmpl-")
        self.timed = bool(body.get("timings_per_token"))

    def _usage(self) -> dict[str, Any]:
        prompt, made = len(self.job.prompt), len(self.job.tokens)
        return {
            "completion_tokens": made,
            "prompt_tokens": prompt,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": self.job.cached},
        }

    def _finish(self) -> str:
        return "length" if self.job.stop_type == "limit" else "stop"

    def _progress(self, processed: int, ms: float) -> dict[str, Any]:
        total, cache = len(self.job.prompt), self.job.cached
        return {"total": total, "cache": cache, "processed": processed, "time_ms": int(ms)}

    def _timings(self) -> dict[str, Any]:
        return {"timings": self.job.timings()} if self.timed else {}

    def whole(self) -> Any:
        """Return the answer to a request that does not stream."""
        job = self.job
        return {
            "index": 0,
            "content": job.content,
            "tokens": job.tokens if self.body.get("return_tokens") else [],
            "id_slot": job.slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(job.tokens),
            "tokens_evaluated": len(job.prompt),
            "generation_settings": settings(self.body),
            "prompt": b"".join(map(text.piece, job.prompt)).decode("utf-8", "replace"),
            "has_new_line": "\n" in job.content,
            "truncated": job.truncated,
            "stop_type": job.stop_type,
            "stopping_word": job.stopping_word,
            "tokens_cached": len(job.prompt) + len(job.tokens) - 1,
            "timings": job.timings(),
        }

    def _partial(self, content: str, tokens: list[int]) -> dict[str, Any]:
        return {
            "index": 0,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self.job.tokens),
            "tokens_evaluated": len(self.job.prompt),
        }

    def begin(self, conn: Connection) -> None:
        """Send what comes before the first token."""

    def progress(self, conn: Connection, processed: int, ms: float) -> None:
        """Send a chunk of `return_progress`."""
        conn.event({**self._partial("", [0]), "prompt_progress": self._progress(processed, ms)})

    def token(self, conn: Connection, token: int, piece: str) -> None:
        """Send one token."""
        conn.event({**self._partial(piece, [token]), **self._timings()})

    def end(self, conn: Connection) -> None:
        """Send what comes after the last token."""
        conn.event({**self.whole(), "content": "", "tokens": []})


class _Completions(Format):
    """`/v1/completions`."""

    def _chunk(self, piece: str, finish: str | None, **more: Any) -> dict[str, Any]:
        choice = {"text": piece, "index": 0, "logprobs": None, "finish_reason": finish}
        return {
            "choices": [choice],
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "object": "text_completion",
            **more,
            "id": self.id,
        }

    def whole(self) -> Any:
        done = self._chunk(self.job.content, self._finish(), usage=self._usage())
        return {**done, "timings": self.job.timings()}

    def progress(self, conn: Connection, processed: int, ms: float) -> None:
        conn.event(self._chunk("", None, prompt_progress=self._progress(processed, ms)))

    def token(self, conn: Connection, token: int, piece: str) -> None:
        del token
        conn.event({**self._chunk(piece, None), **self._timings()})

    def end(self, conn: Connection) -> None:
        last = self._chunk("", self._finish(), usage=self._usage())
        conn.event({**last, "timings": self.job.timings()})
        conn.event(b"[DONE]")


class _Chat(Format):
    """`/v1/chat/completions`."""

    chat = True

    def _chunk(self, delta: dict[str, Any] | None, finish: str | None = None) -> dict[str, Any]:
        choice = {"finish_reason": finish, "index": 0, "delta": delta}
        return {
            "choices": [] if delta is None else [choice],
            "created": int(time.time()),
            "id": self.id,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "object": "chat.completion.chunk",
        }

    def whole(self) -> Any:
        message = {"role": "assistant", "content": self.job.content}
        more = {}
        if self.body.get("verbose"):
            more["__verbose"] = Format(self.job, self.body, self.model, "").whole()
        return {
            "choices": [{"finish_reason": self._finish(), "index": 0, "message": message}],
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "object": "chat.completion",
            "usage": self._usage(),
            "id": self.id,
            **more,
            "timings": self.job.timings(),
        }

    def begin(self, conn: Connection) -> None:
        conn.event(self._chunk({"role": "assistant", "content": None}))

    def progress(self, conn: Connection, processed: int, ms: float) -> None:
        chunk = self._chunk({"role": "assistant", "content": None})
        conn.event({**chunk, "prompt_progress": self._progress(processed, ms)})

    def token(self, conn: Connection, token: int, piece: str) -> None:
        del token
        if piece:
            conn.event({**self._chunk({"content": piece}), **self._timings()})

    def end(self, conn: Connection) -> None:
        last = self._chunk({}, self._finish())
        timings = {"timings": self.job.timings()}
        if (self.body.get("stream_options") or {}).get("include_usage"):
            conn.event(last)
            conn.event({**self._chunk(None), "usage": self._usage(), **timings})
        else:
            conn.event({**last, **timings})
        conn.event(b"[DONE]")


class _Responses(Format):
    """`/v1/responses`."""

    chat = True

    def _item(self) -> dict[str, Any]:
        part = {
            "type": "output_text",
            "annotations": [],
            "logprobs": [],
            "text": self.job.content,
        }
        return {
            "content": [part],
            "id": "msg_" + self.id[9:],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        }

    def whole(self) -> Any:
        made, prompt = len(self.job.tokens), len(self.job.prompt)
        return {
            "completed_at": int(time.time()),
            "created_at": int(time.time()),
            "id": "resp_" + self.id[9:],
            "model": self.model,
            "object": "response",
            "output": [self._item()],
            "status": "completed",
            "usage": {
                "input_tokens": prompt,
                "output_tokens": made,
                "total_tokens": prompt + made,
                "input_tokens_details": {"cached_tokens": self.job.cached},
            },
        }

    def _event(self, conn: Connection, kind: str, **fields: Any) -> None:
        conn.event({"type": kind, **fields}, kind)

    def begin(self, conn: Connection) -> None:
        response = {"id": "resp_" + self.id[9:], "object": "response", "status": "in_progress"}
        self._event(conn, "response.created", response=response)
        self._event(conn, "response.in_progress", response=response)
        item = {**self._item(), "content": [], "status": "in_progress"}
        self._event(conn, "response.output_item.added", item=item)
        part = {"type": "output_text", "text": ""}
        self._event(conn, "response.content_part.added", item_id=item["id"], part=part)

    def progress(self, conn: Connection, processed: int, ms: float) -> None:
        pass

    def token(self, conn: Connection, token: int, piece: str) -> None:
        del token
        item = "msg_" + self.id[9:]
        if piece:
            self._event(conn, "response.output_text.delta", item_id=item, delta=piece)

    def end(self, conn: Connection) -> None:
        item = self._item()
        content = self.job.content
        self._event(conn, "response.output_text.done", item_id=item["id"], text=content)
        part = item["content"][0]
        self._event(conn, "response.content_part.done", item_id=item["id"], part=part)
        self._event(conn, "response.output_item.done", item=item)
        timings = self.job.timings()
        self._event(conn, "response.completed", response=self.whole(), timings=timings)


class _Messages(Format):
    """`/v1/messages`."""

    chat = True

    def _reason(self) -> str:
        return "max_tokens" if self.job.stop_type == "limit" else "end_turn"

    def whole(self) -> Any:
        job = self.job
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": job.content}],
            "model": self.model,
            "stop_reason": self._reason(),
            "stop_sequence": None,
            "usage": {
                "cache_read_input_tokens": job.cached,
                "input_tokens": len(job.prompt) - job.cached,
                "output_tokens": len(job.tokens),
            },
        }

    def begin(self, conn: Connection) -> None:
        message = {**self.whole(), "content": [], "stop_reason": None}
        conn.event({"type": "message_start", "message": message}, "message_start")
        block = {"type": "text", "text": ""}
        start = {"type": "content_block_start", "index": 0, "content_block": block}
        conn.event(start, "content_block_start")

    def progress(self, conn: Connection, processed: int, ms: float) -> None:
        pass

    def token(self, conn: Connection, token: int, piece: str) -> None:
        del token
        delta = {"type": "text_delta", "text": piece}
        event = {"type": "content_block_delta", "index": 0, "delta": delta}
        conn.event(event, "content_block_delta")

    def end(self, conn: Connection) -> None:
        conn.event({"type": "content_block_stop", "index": 0}, "content_block_stop")
        delta = {"stop_reason": self._reason(), "stop_sequence": None}
        usage = {"output_tokens": len(self.job.tokens)}
        conn.event({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta")
        conn.event({"type": "message_stop"}, "message_stop")


_FORMATS: dict[str, type[Format]] = {
    "/completion": Format,
    "/completions": Format,
    "/v1/completions": _Completions,
    "/chat/completions": _Chat,
    "/v1/chat/completions": _Chat,
    "/v1/responses": _Responses,
    "/responses": _Responses,
    "/v1/messages": _Messages,
}


def format_for(path: str) -> type[Format] | None:
    """Return how a generating route answers; `None` where the path is no such route."""
    return _FORMATS.get(path)
