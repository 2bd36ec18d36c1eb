"""HTTP/1.1 heads and framing: strict on the way in, rebuilt on the way on.

A request head is parsed by httptools (llhttp), which alone lets through what a proxy must not:
other transfer codings before `chunked`, transfer codings on HTTP/1.0, a missing or second `Host`,
HTTP/2.0 in the request line. `parse_head` refuses these too, so that a backend never sees framing
of a client's making: what is sent on is a head of ours with one `Content-Length`.

A response is framed by llhttp as well and passed on as it came; only its hop-by-hop header lines
are taken out (RFC 9110, section 7.6.1).

A client and a backend send the same head again and again, but for its `Content-Length`. So a head
is taken apart once, and remembered for every length that it comes with.
"""

from __future__ import annotations

import re
from functools import lru_cache

import httptools
import msgspec

__all__ = [
    "BadRequestError",
    "ChunkedBody",
    "Headers",
    "Reply",
    "RequestHead",
    "ResponseFramer",
    "ResponseHead",
    "parse_head",
    "request_bytes",
    "response_head",
    "too_large",
    "without",
]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_PASSED = _HOP_BY_HOP | {b"x-accel-buffering"}  # said by us, once
# What a backend is not told: a llama-server would echo the origin, and the key is not for it.
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"authorization",
    b"content-length",
    b"expect",
    b"host",
    b"origin",
    b"x-api-key",
}
_USUAL_TOKENS = frozenset({b"close", b"keep-alive"})
_SPACES = 2  # of a request line
_ABSOLUTE = re.compile(
    rb"http://(?P<authority>[^/?#]+)(?P<rest>[/?].*)?", re.IGNORECASE | re.DOTALL
)
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_LENGTH_LINE = re.compile(rb"\r\ncontent-length: ?(\d{1,18})(?=\r\n)", re.IGNORECASE)
_REMEMBERED_BYTES = 2048  # of a head; 256 heads of that size and what they came to are under 2 MB

Headers = tuple[tuple[bytes, bytes], ...]


class BadRequestError(Exception):
    """A request that is refused before anybody looks at what it asks for.

    Args:
        status: The HTTP status of the answer; the connection is closed after it.
        reason: What is wrong with it, for the client.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class RequestHead(msgspec.Struct, frozen=True):
    """The head of a request that keeps to the rules.

    Args:
        method: In capitals, as sent.
        target: Path and query as sent; it starts with `/`, also where a whole URL was sent.
        path: The target without its query; bytes that are not ASCII stay recognisably foreign.
        headers: Names in lower case, values as sent, in order, all but `Content-Length`.
        first: The first value of each of them.
        forwarded: The header lines that a backend gets, each with its CR LF: none that is between
            the client and us alone, its key and its origin included.
        content_length: Length of the body in bytes; 0 without one, `None` for a chunked body.
        keep_alive: Whether the client lets the connection go on.
        http_1_0: Whether the client speaks HTTP/1.0, and so cannot read chunks.
        expects_continue: Whether the client waits for `100 Continue` before it sends the body.
    """

    method: str
    target: bytes
    path: str
    headers: Headers
    first: dict[bytes, bytes]
    forwarded: bytes
    content_length: int | None
    keep_alive: bool
    http_1_0: bool
    expects_continue: bool

    def get(self, name: bytes) -> bytes | None:
        """Return the first value of a header whose name is given in lower case."""
        return self.first.get(name)


class _HeadReader:
    """Collects what llhttp finds in one request head."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


def parse_head(raw: bytes) -> RequestHead:
    """Parse one request head, which ends with its empty line.

    Args:
        raw: The head alone: nothing of a body, nothing of a next request.

    Raises:
        BadRequestError: With the status to answer: 400, 405 for CONNECT, 417 or 505.
    """
    said = _LENGTH_LINE.search(raw)
    if said is None or len(raw) > _REMEMBERED_BYTES:
        return _parse_head(raw)
    head = _remembered_head(b"%s0%s" % (raw[: said.start(1)], raw[said.end(1) :]))
    return msgspec.structs.replace(head, content_length=int(said[1]))


def _parse_head(raw: bytes) -> RequestHead:
    reader = _HeadReader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # the upgrade is not offered: the header is dropped and the request stays what it is
    except httptools.HttpParserError as error:
        raise BadRequestError(400, f"malformed request head: {error}") from None
    if raw.count(b"\n") != raw.count(b"\r\n") or raw.count(b" ", 0, raw.find(b"\r\n")) != _SPACES:
        raise BadRequestError(400, "malformed request head: its lines are not formed as they must")
    method = parser.get_method().decode("latin-1")
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise BadRequestError(505, f"HTTP/{version} is not spoken here, HTTP/1.1 is")
    if method == "CONNECT":
        raise BadRequestError(405, "CONNECT is not offered")
    target = reader.target
    if not target.startswith(b"/"):
        target = _origin_form(target, reader.headers)
    return _checked(method, target, reader.headers, http_1_0=version == "1.0")


def _origin_form(target: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return path and query of a target that is a whole URL (RFC 9112, section 3.2.2).

    Its host must be the one of `Host`, by which it is decided who may talk to us.
    """
    url = _ABSOLUTE.fullmatch(target)
    if url is None:
        raise BadRequestError(400, "the request target must be a path, or an http:// URL")
    hosts = [value.lower() for name, value in headers if name == b"host"]
    if hosts != [url["authority"].lower()]:
        raise BadRequestError(400, "the request target and the Host header name different hosts")
    rest = url["rest"] or b"/"
    return rest if rest.startswith(b"/") else b"/" + rest


_remembered_head = lru_cache(maxsize=128)(_parse_head)


def _checked(
    method: str, target: bytes, headers: list[tuple[bytes, bytes]], *, http_1_0: bool
) -> RequestHead:
    """Make a head of headers whose framing keeps to the rules."""
    names = [name for name, _ in headers]
    first = dict(reversed(headers))
    hosts = names.count(b"host")
    if hosts > 1 or (not hosts and not http_1_0):
        raise BadRequestError(400, "a request carries exactly one Host header")
    tokens: frozenset[bytes] = frozenset()
    if b"connection" in first:
        said = b",".join(value for name, value in headers if name == b"connection").lower()
        tokens = frozenset(token.strip() for token in said.split(b","))
    dropped = _NOT_FORWARDED | tokens if tokens - _USUAL_TOKENS else _NOT_FORWARDED
    length = _body_length(names, first, http_1_0=http_1_0)
    first.pop(b"content-length", None)
    return RequestHead(
        method=method,
        target=target,
        path=target.partition(b"?")[0].decode("latin-1"),
        headers=tuple(header for header in headers if header[0] != b"content-length"),
        first=first,
        forwarded=b"".join([b"%s: %s\r\n" % h for h in headers if h[0] not in dropped]),
        content_length=length,
        keep_alive=b"keep-alive" in tokens if http_1_0 else b"close" not in tokens,
        http_1_0=http_1_0,
        expects_continue=b"expect" in first and _expects_continue(headers, http_1_0=http_1_0),
    )


def _body_length(names: list[bytes], first: dict[bytes, bytes], *, http_1_0: bool) -> int | None:
    length, coding = first.get(b"content-length"), first.get(b"transfer-encoding")
    if coding is not None:
        several = names.count(b"transfer-encoding") > 1
        if http_1_0 or length is not None or several or coding.lower() != b"chunked":
            raise BadRequestError(400, "the only transfer coding is `chunked`, alone, on HTTP/1.1")
        return None
    if length is None:
        return 0
    if names.count(b"content-length") > 1 or not length.isdigit():
        raise BadRequestError(400, "Content-Length must be one number")
    return int(length)


def _expects_continue(headers: list[tuple[bytes, bytes]], *, http_1_0: bool) -> bool:
    if any(name == b"expect" and value.lower() != b"100-continue" for name, value in headers):
        raise BadRequestError(417, "the only expectation that can be met is 100-continue")
    return not http_1_0  # RFC 9110, 10.1.1: ignored in an HTTP/1.0 request


class ChunkedBody:
    """Decodes one chunked request body; what follows it is noticed and never looked at.

    Args:
        limit_bytes: Decoded bytes at most.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._parts: list[bytes] = []
        self.complete = False
        self.followed = False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Keep a piece of the body (called by llhttp)."""
        self._size_bytes += len(data)
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """Note the end of the body (called by llhttp)."""
        self.complete = True

    def on_message_begin(self) -> None:
        """Note that something follows the body (called by llhttp)."""
        self.followed = self.complete

    def feed(self, data: bytes) -> None:
        """Decode the next bytes of the connection.

        Raises:
            BadRequestError: 400 for malformed chunks, 413 past the limit.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.complete:
                raise BadRequestError(400, f"malformed chunked body: {error}") from None
            self.followed = True
        if self._size_bytes > self._limit_bytes:
            raise BadRequestError(413, too_large(self._limit_bytes))

    def body(self) -> bytes:
        """Return the decoded body."""
        return b"".join(self._parts)


def too_large(limit_bytes: int) -> str:
    """Say that a body is too large, and where the limit comes from."""
    return f"the body is larger than [server] max_body_bytes = {limit_bytes}"


def request_bytes(
    method: str, target: bytes, lines: bytes, body: bytes, *, host: bytes, close: bool
) -> bytes:
    """Build the request that a backend sees: one framing, no hop-by-hop header.

    Args:
        method: The method.
        target: Path and query.
        lines: Header lines, each with its CR LF, of which none frames the body.
        body: The whole body.
        host: Value of `Host`.
        close: Whether to ask for the connection to be closed after the reply.
    """
    first = b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method.encode("ascii"), target, host)
    length = b""
    if body or method not in _BODILESS:
        length = b"content-length: %d\r\n" % len(body)
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    return b"".join((first, lines, length, end, body))


class ResponseFramer:
    """Finds where a response ends; the bytes themselves are the caller's to pass on.

    Args:
        keep_body: Whether to keep the decoded body for `take_body`.

    Attributes:
        complete: The response is whole.
        between_chunks: The last byte seen ended a chunk, or the head.
    """

    def __init__(self, *, keep_body: bool = False) -> None:
        self._parts: list[bytes] = []
        if keep_body:
            self.on_body = self._parts.append
        self._parser = httptools.HttpResponseParser(self)
        self.feed = self._parser.feed_data
        self.head_complete = False
        self.complete = False
        self.between_chunks = False

    def on_headers_complete(self) -> None:
        """Note that the head is whole (called by llhttp)."""
        self.head_complete = True
        self.between_chunks = True

    def on_chunk_header(self) -> None:
        """Note that a chunk has begun (called by llhttp)."""
        self.between_chunks = False

    def on_chunk_complete(self) -> None:
        """Note that a chunk is whole (called by llhttp)."""
        self.between_chunks = True

    def on_message_complete(self) -> None:
        """Note the end of the response (called by llhttp)."""
        self.complete = True

    @property
    def status(self) -> int:
        """The status code, once the head is whole."""
        return int(self._parser.get_status_code())

    def take_body(self) -> bytes:
        """Return what of the body was decoded since the last call."""
        body = b"".join(self._parts)
        self._parts.clear()
        return body


class ResponseHead(msgspec.Struct, frozen=True):
    """A response head on its way to the client.

    Args:
        status: The status code.
        lines: Status line and header lines without the hop-by-hop ones, each with its CR LF, but
            with the transfer coding; the empty line is left to the caller.
        chunked: Whether the body comes in chunks.
        length: Value of `Content-Length`, or `None`.
        event_stream: Whether the body is `text/event-stream`.
        keep_alive: Whether the backend lets the connection go on.
    """

    status: int
    lines: bytes
    chunked: bool
    length: int | None
    event_stream: bool
    keep_alive: bool


def response_head(raw: bytes) -> ResponseHead:
    """Take a backend's response head apart, leaving out what is between it and us alone.

    Args:
        raw: The head with its empty line.

    Raises:
        ValueError: It is no response head.
    """
    said = _LENGTH_LINE.search(raw)
    if len(raw) > _REMEMBERED_BYTES:
        return _response_head(raw)
    if said is None:
        return _remembered_response(raw)
    head = _remembered_response(raw[: said.start()] + raw[said.end() :])
    if head.length is not None:
        raise ValueError("there are two lengths")
    length = int(said[1])
    lines = b"%scontent-length: %d\r\n" % (head.lines, length)
    return msgspec.structs.replace(head, lines=lines, length=length)


def _response_head(raw: bytes) -> ResponseHead:
    status, *fields = raw[:-4].split(b"\r\n")
    if not status.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")):
        raise ValueError("no HTTP/1 status line")
    kept = [b"HTTP/1.1" + status[8:]]
    chunked, length, event_stream = False, None, False
    keep_alive = status.startswith(b"HTTP/1.1")
    for field in fields:
        name, colon, value = field.partition(b":")
        name = name.lower()
        if not colon:
            raise ValueError("a header line has no colon")
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            chunked = b"chunked" in value.lower()
        elif name == b"content-type":
            event_stream = value.lstrip().startswith(b"text/event-stream")
        elif name == b"connection":
            keep_alive = keep_alive and b"close" not in value.lower()
            continue
        elif name in _NOT_PASSED or name.startswith(b"access-control-"):
            continue  # a llama-server echoes any origin; who may read is the door's to say
        kept.append(field)
    if event_stream:
        kept.append(b"X-Accel-Buffering: no")  # nginx in front of us passes each event on
    kept.append(b"")
    return ResponseHead(
        int(status[9:12]), b"\r\n".join(kept), chunked, length, event_stream, keep_alive
    )


_remembered_response = lru_cache(maxsize=128)(_response_head)


def without(lines: bytes, *names: bytes) -> bytes:
    """Return a response head's lines without those headers; names in lower case."""
    return b"".join(
        line
        for line in lines.splitlines(keepends=True)
        if line.partition(b":")[0].lower() not in names
    )


class Reply(msgspec.Struct, frozen=True):
    """A whole response of a backend, as the supervisor's own requests see it.

    Args:
        status: HTTP status.
        body: The decoded body.
    """

    status: int
    body: bytes
