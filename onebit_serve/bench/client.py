"""The client of the benchmark: one request, its stream, and when each part of it came.

Sockets and httptools rather than a full HTTP client, since at 64 streams of 100 tokens a second
the instrument must not be what is measured. The clock is read right after the bytes are, before
anything is parsed, and the first token is the first text that is not empty: a role chunk or a
progress report is no token. Text is `content`, `reasoning_content` or `reasoning`,
a part of a tool call, or a completion's `text`, whichever the backend generates first.

Proxies in the environment are not used, and no request is ever sent twice.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec
import trio

from onebit_serve.core.errors import OnebitError, UsageError

__all__ = ["Answer", "Endpoint", "Stream", "endpoint", "fetch", "resolve", "stream"]

_MAX_EVENT_BYTES = 16 * 1024 * 1024  # 31 MB is a full vocabulary of probabilities; none asked for
_MAX_DETAIL = 300
_RECEIVE_BYTES = 65536
_OK = 200
_TEXT = str | None


class Endpoint(msgspec.Struct, frozen=True):
    """A server's address.

    Args:
        host: As the user gave it, for the `Host` header.
        port: Its TCP port.
        base: Path before the routes; empty or starting with a slash.
        key: API key; empty for none.
        address: What a socket connects to, once `resolve` has filled it.
        family: The socket family of that address.
    """

    host: str
    port: int
    base: str = ""
    key: str = ""
    address: tuple[Any, ...] = ()
    family: int = 0

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"http://{self.authority}{self.base}"

    @property
    def authority(self) -> str:
        """Host and port, as the `Host` header has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Answer(msgspec.Struct, frozen=True):
    """A whole answer.

    Args:
        status: HTTP status.
        body: Its body.
    """

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body's value, or `None` where it is no JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


class _Delta(msgspec.Struct):
    content: _TEXT = None
    reasoning_content: _TEXT = None
    reasoning: Any = None
    tool_calls: Any = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: _TEXT = None
    finish_reason: _TEXT = None


class Timings(msgspec.Struct, frozen=True):
    """llama-server's `timings`; times in milliseconds, rates in tokens per second."""

    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    prompt_per_second: float | None = None
    predicted_n: int | None = None
    predicted_per_second: float | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct, frozen=True):
    """OpenAI's `usage`, in tokens."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    timings: Timings | None = None
    usage: TokenUsage | None = None
    error: Any = None


class Stream(msgspec.Struct):
    """How one streamed request went; times on the client's clock, in seconds.

    Args:
        began_s: Before the connection was opened.
        first_s: When the first text came.
        last_s: When the last text came.
        end_s: When it was over, well or not.
        texts: Events that carried text.
        finished: The stream said itself that it was complete.
        timings: The backend's own, where it gives them.
        usage: The backend's count of tokens, where it gives one.
        error: Kind of what went wrong; empty for success.
        detail: What was said of it.
    """

    began_s: float
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    texts: int = 0
    finished: bool = False
    timings: Timings | None = None
    usage: TokenUsage | None = None
    error: str = ""
    detail: str = ""

    def fail(self, kind: str, detail: object = "") -> None:
        """Note what went wrong first; later causes are consequences."""
        if not self.error:
            self.error = kind
            self.detail = " ".join(str(detail).split())[:_MAX_DETAIL]


def endpoint(url: str, *, key: str = "") -> Endpoint:
    """Read a URL.

    Args:
        url: `http://HOST[:PORT][/BASE]`; a base of `/v1` is understood and left out.
        key: API key; empty for none.

    Raises:
        UsageError: It is no such URL.
    """
    hint = "give it as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError as error:
        raise UsageError(f"--url {url}: {error}", hint=hint) from error
    if parts.scheme != "http":
        raise UsageError(f"--url {url}: only http is measured, not {parts.scheme}", hint=hint)
    if not parts.hostname or parts.username or parts.query or parts.fragment:
        raise UsageError(f"--url {url}: not the address of a server", hint=hint)
    if any(ord(letter) <= ord(" ") for letter in url):
        raise UsageError(f"--url {url!r}: holds a blank", hint=hint)
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(host=parts.hostname, port=port, base=base, key=key)


async def resolve(where: Endpoint) -> Endpoint:
    """Return the endpoint with an address that accepts connections.

    Looked up once, and not in each measured request. A name with several addresses (`localhost`
    is often both ::1 and 127.0.0.1) takes the first that answers.

    Raises:
        OnebitError: The name is unknown, or nothing answers there.
    """
    try:
        connected = await trio.open_tcp_stream(where.host, where.port)
    except OSError as error:
        raise OnebitError(
            f"{where.url}: cannot connect: {_reason(error)}",
            hint="is the server running there? start it with `1bit serve -m MODEL.gguf`",
        ) from error
    async with connected:
        address, family = connected.socket.getpeername(), connected.socket.family
    return msgspec.structs.replace(where, address=address, family=int(family))


async def fetch(where: Endpoint, method: str, path: str, body: object = None) -> Answer:
    """Send one small request and return its whole answer.

    Raises:
        OSError: The connection failed or ended early.
    """
    payload = b"" if body is None else msgspec.json.encode(body)
    reply = _Reply()
    with trio.socket.socket(where.family) as sock:
        await sock.connect(where.address)
        await _send(sock, _head(where, method, path, len(payload)) + payload)
        while not reply.complete:
            data = await sock.recv(_RECEIVE_BYTES)
            if not data:
                break
            try:
                reply.feed(data)
            except httptools.HttpParserError as error:
                raise OSError(f"not HTTP: {error}") from error
        if not reply.status:
            raise OSError("the connection was closed without an answer")
    return Answer(reply.status, bytes(reply.body))


async def stream(where: Endpoint, path: str, body: bytes, sink: Stream | None = None) -> Stream:
    """Send one streamed request and time what comes back.

    Never raises for what a server does: every failure is a kind of error in the answer.

    Args:
        where: A resolved endpoint.
        path: The route, for example `/v1/chat/completions`.
        body: The request, JSON with `"stream": true`.
        sink: Where to note it; what was seen is kept there when the caller cancels.
    """
    seen = sink or Stream(began_s=0.0)
    clock = time.perf_counter
    seen.began_s = clock()
    request = _head(where, "POST", path, len(body)) + body
    try:
        with trio.socket.socket(where.family) as sock:
            sock.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
            await sock.connect(where.address)
            await _send(sock, request)
            await _read(sock, seen)
    except ConnectionRefusedError as error:
        seen.fail("refused", error)
    except OSError as error:
        seen.fail("cut", _reason(error))
    finally:
        seen.end_s = clock()
    return seen


async def _read(sock: trio.socket.SocketType, seen: Stream) -> None:
    reply, events = _Reply(), _Events(seen)
    clock, receive = time.perf_counter, sock.recv
    while not reply.complete:
        data = await receive(_RECEIVE_BYTES)
        now = clock()
        if not data:
            break
        try:
            reply.feed(data)
        except httptools.HttpParserError as error:
            seen.fail("bad reply", f"not HTTP: {error}")
            return
        if reply.status == _OK and reply.body:
            events.feed(bytes(reply.body), now)
            reply.body.clear()
            if seen.error:
                return
    if reply.status and reply.status != _OK:
        seen.fail(f"http {reply.status}", _message(bytes(reply.body)))
    elif not reply.status:
        seen.fail("cut", "the connection was closed without an answer")
    elif not seen.finished:
        kind = "cut" if not reply.complete else "bad reply"
        seen.fail(kind, f"the stream ended after {seen.texts} texts without saying it was complete")
    elif not seen.texts:
        seen.fail("empty", "the answer holds no text")


class _Reply:
    """Callbacks of httptools: status and body of one answer, chunks already taken apart."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        self.status = status if status >= _OK else 0  # a 100 or 103 comes before the real one

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = self.status != 0


class _Events:
    """Takes server-sent events apart, across whatever pieces they come in."""

    def __init__(self, seen: Stream) -> None:
        self._seen = seen
        self._rest = b""
        self._decode = msgspec.json.Decoder(_Event).decode

    def feed(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)
        if len(self._rest) > _MAX_EVENT_BYTES:
            self._seen.fail("bad reply", f"an event of more than {_MAX_EVENT_BYTES} bytes")

    def _event(self, data: bytes, now: float) -> None:
        seen = self._seen
        if data == b"[DONE]":
            seen.finished = True
            return
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            seen.fail("bad reply", f"an event that is no chat chunk: {error}")
            return
        if event.error is not None:
            seen.fail("sse error", _message(msgspec.json.encode({"error": event.error})))
        for choice in event.choices:
            delta = choice.delta
            if choice.text or (delta and delta.has_text):
                if seen.first_s is None:
                    seen.first_s = now
                seen.last_s = now
                seen.texts += 1
            if choice.finish_reason:
                seen.finished = True
        seen.timings = event.timings or seen.timings
        seen.usage = event.usage or seen.usage


def _head(where: Endpoint, method: str, path: str, length: int) -> bytes:
    lines = [f"{method} {where.base}{path} HTTP/1.1", f"Host: {where.authority}"]
    if where.key:
        lines.append(f"Authorization: Bearer {where.key}")
    # llama-server closes after every stream without saying so; asked to, it says so
    lines += ["Content-Type: application/json", f"Content-Length: {length}", "Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode()


async def _send(sock: trio.socket.SocketType, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[await sock.send(rest) :]


def _message(body: bytes) -> str:
    """Return what an error body says: OpenAI's envelope, or its text."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:_MAX_DETAIL].decode(errors="replace")
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)


def _reason(error: OSError) -> str:
    """Return the cause, also of trio's "all attempts failed"."""
    causes = getattr(error.__cause__, "exceptions", None)
    if causes:
        return str(causes[-1])
    return str(error.__cause__ or error.strerror or error)
