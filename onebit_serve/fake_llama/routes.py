"""The routes that do no work for a model: state, models, tokens, slots, metrics."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from . import replies, text
from .engine import Engine
from .knobs import Moment
from .options import Options
from .prompts import HttpError, chat_ids, json_body, unsupported, valid_ids
from .wire import Connection, Request, dumps
from .world import World

__all__ = ["Routes"]

N_PARAMS = 134_515_008
PAGE = b"<!doctype html><title>llama.cpp</title><p>The fake has no chat page.</p>\n"
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


class Routes:
    """Answers what needs no work.

    Args:
        options: llama-server's options.
        world: The process, with the knobs.
        engine: The model.
        names: The aliases, the served one first.
        build: `build_info`.
    """

    def __init__(
        self, options: Options, world: World, engine: Engine, names: list[str], build: str
    ) -> None:
        self._options = options
        self._world = world
        self._engine = engine
        self._names = names
        self._build = build
        self._model_path = options.text("model", "fake.gguf")

    def answer(self, conn: Connection, request: Request) -> None:
        """Answer one request.

        Raises:
            HttpError: Any answer but 200.
        """
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
            "/apply-template": self._apply_template,
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
                raise unsupported("metrics endpoint", "--metrics")
            self._metrics(conn)
        elif path == "/" and self._world.knobs.page and options.on("webui", default=True):
            conn.answer(200, PAGE, content_type="text/html; charset=utf-8")
        else:
            raise HttpError(404, "File Not Found")

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
            raise unsupported("slots action", "--slot-save-path")
        number = request.path.removeprefix("/slots/")
        if not number.isdecimal():
            raise HttpError(400, "Invalid slot ID")
        slot = self._engine.slots.all[int(number) % len(self._engine.slots.all)]
        action = request.query.get("action", "")
        if action == "erase":
            erased, slot.tokens, slot.checkpoints = len(slot.tokens), [], []
            return {"id_slot": slot.number, "n_erased": erased}
        name = str(json_body(request, self._world).get("filename", ""))
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
        body = json_body(request, self._world)
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
        ids = valid_ids(json_body(request, self._world).get("tokens") or [])
        return {"content": b"".join(map(text.piece, ids)).decode("utf-8", "replace")}

    def _apply_template(self, request: Request) -> Any:
        body = json_body(request, self._world)
        return {"prompt": text.render(body, self._world.knobs.template)}

    def _count_tokens(self, request: Request) -> Any:
        return {"input_tokens": len(chat_ids(json_body(request, self._world), self._world))}

    def _infill(self, _: Request) -> Any:
        missing = "prefix token is missing. suffix token is missing. middle token is missing. "
        raise HttpError(501, f"Infill is not supported by this model: {missing}")
