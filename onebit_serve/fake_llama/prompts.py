"""From the body of a request to token ids, or to the refusal that llama-server sends."""

from __future__ import annotations

import json
from typing import Any

from . import text
from .replies import error
from .wire import Request
from .world import World

__all__ = ["HttpError", "chat_ids", "json_body", "prompts", "unsupported", "valid_ids"]


class HttpError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status = status
        self.value = error(status, message, **more)


def unsupported(what: str, flag: str) -> HttpError:
    """Return the refusal of something that a flag would turn on."""
    return HttpError(501, f"This server does not support {what}. Start it with `{flag}`")


def json_body(request: Request, world: World) -> dict[str, Any]:
    """Return the body of a request that must be a JSON object."""
    try:
        value = json.loads(request.body)
    except ValueError as problem:
        status = 500 if world.knobs.build == "b10068" else 400
        why = f"parse error at line 1, column {getattr(problem, 'pos', 0) + 1}: {problem}"
        raise HttpError(status, f"[json.exception.parse_error.101] {why}") from None
    if not isinstance(value, dict):
        raise HttpError(400, "[json.exception.type_error.304] cannot use at() with this type")
    return value


def chat_ids(body: dict[str, Any], world: World) -> list[int]:
    """Return the ids of the prompt that a chat request of any of the three kinds makes."""
    if "input" in body and "messages" not in body:  # /v1/responses
        said = body["input"]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if body.get("instructions"):
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
        body = {**body, "messages": messages}
    elif isinstance(body.get("system"), str):  # /v1/messages
        messages = body.get("messages") or []
        body = {**body, "messages": [{"role": "system", "content": body["system"]}, *messages]}
    return text.tokenize(text.render(body, world.knobs.template), bos=world.knobs.bos)


def valid_ids(ids: list[Any]) -> list[int]:
    """Return ids that are all in the vocabulary."""
    if not all(isinstance(i, int) and 0 <= i < text.N_VOCAB for i in ids):
        raise HttpError(400, "Prompt contains invalid tokens")
    return ids


def _prompt_ids(prompt: Any, world: World) -> list[int]:
    """Return the ids of one prompt: text, ids, or both in one list."""
    bos = world.knobs.bos
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
            ids += valid_ids([part])
    return ids


def prompts(body: dict[str, Any], world: World) -> tuple[list[list[int]], bool]:
    """Return the prompts of a completion, and whether they came as a list of prompts."""
    if "prompt" not in body:
        raise HttpError(400, "[json.exception.out_of_range.403] key 'prompt' not found")
    prompt = body["prompt"]
    several = (
        isinstance(prompt, list)
        and bool(prompt)
        and (all(isinstance(p, str) for p in prompt) or any(isinstance(p, list) for p in prompt))
    )
    if several:
        return [_prompt_ids(p, world) for p in prompt], True
    return [_prompt_ids(prompt, world)], False
