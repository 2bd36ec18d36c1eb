"""What travels in the bodies: the error envelope, a peek at a request, server-sent events.

Bodies of llama-server backends pass unchanged, so nothing here is on the way of a reply's bytes.
The exceptions are named in the contract: zinc and mlx backends know another model id
(`with_model`), and builds that do not notice a client who leaves a reply that doesn't stream are
asked for a stream, which `Assembler` puts together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = [
    "Assembler",
    "EventReader",
    "Peek",
    "Refusal",
    "as_stream",
    "error_event",
    "is_fatal",
    "peek",
    "rename",
    "with_model",
]

_ERROR_LOOK_BYTES = 4096
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    505: "invalid_request_error",
}


class Refusal(msgspec.Struct, frozen=True):
    """An answer of ours that says no, in OpenAI's envelope.

    Args:
        status: HTTP status.
        message: What and why, for the person behind the client.
        code: A word that programs can match.
        retry_after_s: Value of `Retry-After` in seconds, or `None`.
    """

    status: int
    message: str
    code: str
    retry_after_s: int | None = None

    @property
    def type(self) -> str:
        """OpenAI's word for this kind of error."""
        return _TYPES.get(self.status, "server_error")

    def body(self) -> bytes:
        """Return the JSON body."""
        error = {"message": self.message, "type": self.type, "code": self.code}
        return msgspec.json.encode({"error": error})


def error_event(refusal: Refusal) -> bytes:
    """Return the refusal as one server-sent event, for a stream that has begun already."""
    return b"data: " + refusal.body() + b"\n\n"


class Peek(msgspec.Struct, frozen=True):
    """What we need to know of a request's body; the rest of it is not ours.

    Args:
        model: The model id asked for; empty without one.
        stream: Whether the reply is asked for as server-sent events.
    """

    model: str = ""
    stream: bool = False


class _PeekFields(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


_decode_peek = msgspec.json.Decoder(_PeekFields).decode


def peek(body: bytes) -> Peek:
    """Look at the top of a JSON body.

    A body that is no JSON object, or names a model that is no string, peeks as empty: what is wrong
    with it is for the backend to say, whose words the client knows.

    Args:
        body: The whole body; about 0.4 ms a megabyte.
    """
    try:
        fields = _decode_peek(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return Peek()
    return Peek(fields.model or "", bool(fields.stream))


def with_model(body: bytes, model: str) -> bytes:
    """Return a JSON body with another `model`, or without one where it is empty.

    A body that is no JSON object is returned as it is.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    if not isinstance(fields, dict):
        return body
    if model:
        fields["model"] = model
    else:
        fields.pop("model", None)
    return msgspec.json.encode(fields)


def rename(body: bytes, model: str) -> bytes:
    """Return a reply with our id where it names a model, else as it is."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body
    if not isinstance(fields, dict) or "model" not in fields:
        return body
    fields["model"] = model
    return msgspec.json.encode(fields)


def is_fatal(body: bytes) -> bool:
    """Tell whether an error body is one that a healthy backend does not send.

    llama-server answers `Compute error` once its device has failed, and goes on doing so.
    """
    return b"compute error" in body[:_ERROR_LOOK_BYTES].lower()


class EventReader:
    """Cuts a stream of bytes into the data of its server-sent events.

    Follows the WHATWG grammar as far as LLM servers use it: `data` lines are joined, comments and
    other fields are left out, lines end with LF or CR LF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each event that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")  # noqa: PLW2901
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


_ASSEMBLED = frozenset(
    {
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/completions",
        "/completion",
        "/completions",
    }
)


def as_stream(path: str, body: bytes) -> bytes | None:
    """Return the request that asks for the same reply as a stream, or `None` where there is none.

    Only routes whose streamed events carry all that the whole reply has are asked so: chat
    completions and completions, OpenAI's and llama-server's own, one choice each.

    Args:
        path: The route.
        body: The client's JSON body, which does not ask for a stream.
    """
    if path not in _ASSEMBLED:
        return None
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("n", 1) not in (1, None):
        return None
    if isinstance(fields.get("prompt"), list) and any(
        isinstance(part, (str, list)) for part in fields["prompt"]
    ):
        return None  # several prompts, or a mixed one, which we cannot tell from several
    fields["stream"] = True
    if path.startswith("/v1/") or "chat" in path:
        fields["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(fields)


class Assembler:
    """Puts the events of a streamed reply together into the reply that does not stream.

    Chat deltas are merged field by field: strings are joined, `tool_calls` by their index. In
    llama-server's own `/completion` the last event carries everything but the text and the tokens,
    which the whole reply has only where they are asked for.

    Args:
        request: The body of the request that is answered.
    """

    def __init__(self, request: bytes = b"") -> None:
        self._return_tokens = b'"return_tokens"' in request and bool(
            msgspec.json.decode(request).get("return_tokens")
        )
        self._events = EventReader()
        self._whole: dict[str, Any] = {}
        self._text = ""
        self._tokens: list[Any] = []
        self._probabilities: list[Any] = []
        self._choice: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None

    def feed(self, data: bytes) -> None:
        """Take the next decoded bytes of the stream."""
        for event in self._events.feed(data):
            if event != b"[DONE]":
                self._add(msgspec.json.decode(event))

    def _add(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
        elif "choices" in event:
            self._add_choices(event)
        else:
            self._text += event.get("content") or ""
            self._tokens += event.get("tokens") or []
            self._probabilities += event.get("completion_probabilities") or []
            self._whole.update(event)

    def _add_choices(self, event: dict[str, Any]) -> None:
        self._whole.update({k: v for k, v in event.items() if k != "choices"})
        for choice in event["choices"]:
            delta = choice.get("delta")
            if delta is not None:
                _merge(self._choice.setdefault("message", {}), delta)
            self._text += choice.get("text") or ""
            if choice.get("finish_reason"):
                self._choice["finish_reason"] = choice["finish_reason"]
            if choice.get("logprobs"):
                kept = self._choice.setdefault("logprobs", {})
                for key, values in choice["logprobs"].items():
                    kept.setdefault(key, []).extend(values or [])

    def body(self) -> bytes:
        """Return the whole reply as JSON; an error that came in the stream is all of it."""
        if self.error is not None:
            return msgspec.json.encode({"error": self.error})
        whole = self._whole
        kind = whole.get("object")
        if kind == "chat.completion.chunk":
            message = {"role": "assistant", "content": None, **self._choice.pop("message", {})}
            choice = {"index": 0, "message": message, "finish_reason": None, **self._choice}
            whole |= {"object": "chat.completion", "choices": [choice]}
        elif kind == "text_completion":
            choice = {"index": 0, "text": self._text, "logprobs": None, "finish_reason": None}
            whole["choices"] = [choice | self._choice]
        else:
            whole["content"] = self._text
            whole["tokens"] = self._tokens if self._return_tokens else []
            if self._probabilities:
                whole["completion_probabilities"] = self._probabilities
        return msgspec.json.encode(whole)


def _merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            _merge_calls(message.setdefault("tool_calls", []), value or [])
        elif key == "role" or not isinstance(value, str):
            message[key] = message.get(key) if value is None else value
        else:
            message[key] = (message.get(key) or "") + value


def _merge_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        index = delta.get("index", len(calls))
        while len(calls) <= index:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        function = call["function"]
        for key, value in (delta.get("function") or {}).items():
            function[key] = function.get(key, "") + (value or "")
        call.update({k: v for k, v in delta.items() if k in ("id", "type") and v})
