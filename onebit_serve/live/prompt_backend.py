"""What warm prompts ask of a backend: render, tokenise, prefill, empty, save and restore a slot.

All it knows of the world is `Request`, so that it does not matter how the bytes get there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from onebit_serve.core import warm_prompts as prompts
from onebit_serve.core.http import Reply
from onebit_serve.core.warm_prompts import Entry
from onebit_serve.live.saves import Saves
from onebit_serve.live.upstream import GoneError

__all__ = ["PromptBackend", "Props", "RefusedError", "Request"]

Request = Callable[[str, str, bytes], Awaitable[Reply]]

_OK = 200
_NOT_FOUND = 404
_NOT_SUPPORTED = 501
# Makes a model produce text that the backend can parse, whatever its weights (llama-server b10068
# answers 500 to meaningless output).
_GRAMMAR = "root ::= [a-z]*"
_MEANINGLESS = b"does not match the expected"
_REASON_CHARACTERS = 200


class RefusedError(Exception):
    """Why one entry cannot be warmed; its text becomes the entry's `why`."""


class Props(msgspec.Struct, frozen=True):
    """What a backend says of itself.

    Args:
        slots: How many it has.
        slot_tokens: Context of one, in tokens.
        template: Its chat template; `None` where it does not say.
    """

    slots: int
    slot_tokens: int
    template: str | None


class PromptBackend:
    """One backend.

    Args:
        request: Sends one request to it and returns the whole reply; raises `GoneError`.
        saves: Where slots are kept across restarts; `None` for nowhere.
    """

    def __init__(self, request: Request, saves: Saves | None = None) -> None:
        self._send = request
        self._saves = saves

    async def look(self) -> Props:
        """Ask for slots, context and template."""
        reply = await self._request("GET", "/props", b"")
        props = _object(reply.body)
        if reply.status != _OK or props is None:
            raise RefusedError("this backend has no /props")
        settings = props.get("default_generation_settings")
        context = settings.get("n_ctx") if isinstance(settings, dict) else None
        template = props.get("chat_template")
        return Props(
            slots=_whole(props.get("total_slots"), 1),
            slot_tokens=_whole(context, 1 << 31),
            template=template if isinstance(template, str) else None,
        )

    async def render(self, entry: Entry, user_text: str | None) -> str:
        """Render an entry by the backend's template, followed by a user's text if one is given."""
        body: dict[str, Any] = {"messages": list(entry.messages)}
        if user_text is not None:
            body["messages"].append({"role": "user", "content": user_text})
        if entry.tools:
            body["tools"] = list(entry.tools)
        if entry.chat_template_kwargs:
            body["chat_template_kwargs"] = entry.chat_template_kwargs
        answer = await self._ask("/apply-template", body)
        prompt = answer.get("prompt")
        if not isinstance(prompt, str):
            raise RefusedError("/apply-template answered without a prompt")
        return prompt

    async def tokens(self, text: str) -> list[int]:
        """Tokenise a rendering as the chat route does."""
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens = (await self._ask("/tokenize", body)).get("tokens")
        if not isinstance(tokens, list):
            raise RefusedError("/tokenize answered without tokens")
        return tokens

    async def complete(self, tokens: Sequence[int], slot: int, *, keep: bool = True) -> int | None:
        """Prefill tokens, and return the count of those that were cached, `None` without one."""
        answer = await self._completion(tokens, slot, keep=keep)
        cached = answer.get("timings", {}).get("cache_n")
        return cached if isinstance(cached, int) else None

    async def _completion(
        self, tokens: Sequence[int], slot: int, *, keep: bool = True
    ) -> dict[str, Any]:
        body = {
            "prompt": list(tokens),
            "n_predict": 1,
            "temperature": 0,
            "cache_prompt": keep,
            "id_slot": slot,
            "grammar": _GRAMMAR,
        }
        return await self._ask("/completion", body)

    async def erase(self, slot: int) -> None:
        """Empty a slot; one that is busy is waited for."""
        reply = await self._request("POST", f"/slots/{slot}?action=erase", b"{}")
        if reply.status in (_NOT_FOUND, _NOT_SUPPORTED):
            # No erase without a place for saved slots; one foreign token does the same.
            await self.complete(await self.tokens(prompts.FILLERS[0]), slot, keep=False)

    async def make_room(self, number: int) -> int:
        """Push the least recently used slot's content into the host cache, and return that slot."""
        filler = await self.tokens(prompts.FILLERS[number % len(prompts.FILLERS)])
        slot = (await self._completion(filler[-1:], -1)).get("id_slot")
        return slot if isinstance(slot, int) and slot >= 0 else 0

    async def restore(self, prefix: tuple[int, ...], slot: int) -> bool:
        """Put a saved slot back, and return whether it is exactly this prefix."""
        if self._saves is None:
            return False
        path = self._saves.path(prefix)
        if not self._saves.holds(path):
            return False
        reply = await self._slot_action(slot, "restore", path.name)
        if reply.get("n_restored") == len(prefix):
            self._saves.touch(path)
            return True
        self._saves.remove(path)  # refused, or of other content: it will be written anew
        return False

    async def save(self, prefix: tuple[int, ...], slot: int) -> None:
        """Save a slot that holds exactly this prefix, unless it is saved already."""
        if self._saves is None:
            return
        path = self._saves.path(prefix)
        if path.is_file():
            return
        part = self._saves.part(path)
        reply = await self._slot_action(slot, "save", part.name)
        if reply.get("n_saved") == len(prefix):
            self._saves.adopt(part, path)
        else:
            self._saves.remove(part)

    async def _slot_action(self, slot: int, action: str, name: str) -> dict[str, Any]:
        body = msgspec.json.encode({"filename": name})
        reply = await self._request("POST", f"/slots/{slot}?action={action}", body)
        return (_object(reply.body) or {}) if reply.status == _OK else {}

    async def _request(self, method: str, path: str, body: bytes) -> Reply:
        try:
            return await self._send(method, path, body)
        except (GoneError, OSError) as error:
            # Whether it died is for the supervisor to see; here one entry is not warm.
            raise RefusedError(f"the backend went away: {error}") from None

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._request("POST", path, msgspec.json.encode(body))
        if reply.status == _OK:
            return _object(reply.body) or {}
        if _MEANINGLESS in reply.body:
            return {}  # the work was done, only its text was refused
        if reply.status == _NOT_FOUND:
            raise RefusedError(f"this backend has no {path}")
        error = (_object(reply.body) or {}).get("error")
        message = error.get("message") if isinstance(error, dict) else None
        reason = " ".join(str(message or "no reason given").split())
        if len(reason) > _REASON_CHARACTERS:  # what a template raised itself stands at the end
            reason = f"{reason[: _REASON_CHARACTERS // 2]} ... {reason[-_REASON_CHARACTERS // 2 :]}"
        raise RefusedError(f"{path} answered {reply.status}: {reason}")


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise
