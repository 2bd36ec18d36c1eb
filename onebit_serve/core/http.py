"""HTTP/1.1 heads and framing: strict on the way in, rebuilt on the way on.

A request head is parsed by httptools (llhttp), which alone lets through what a proxy must not:
other transfer codings before `chunked`, transfer codings on HTTP/1.0, a missing or second `Host`,
HTTP/2.0 in the request line. `parse_head` refuses these too, so that a backend never sees framing
of a client's making: what is sent on is a head of ours with one `Content-Length`.

A response is framed by llhttp as well and passed on as it came; only its hop-by-hop header lines
are taken out (RFC 9110, section 7.6.1).
"""

from __future__ import annotations

from collections.abc import Sequence

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
_OURS_UPSTREAM = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_OF_THE_FRAMING = frozenset(
    {b"connection", b"content-length", b"expect", b"host", b"transfer-encoding"}
)
_SPACES = 2  # of a request line
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_LONGEST_PLAIN_CONNECTION = len("keep-alive")  # a longer value may name other headers
_NO_CONTENT, _NOT_MODIFIED = 204, 304

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
        target: Path and query as sent; it starts with `/`.
        headers: Names in lower case, values as sent, in order.
        content_length: Length of the body in bytes; 0 without one, `None` for a chunked body.
        keep_alive: Whether the client lets the connection go on.
        http_1_0: Whether the client speaks HTTP/1.0, and so cannot read chunks.
        expects_continue: Whether the client waits for `100 Continue` before it sends the body.
    """

    method: str
    target: bytes
    headers: Headers
    content_length: int | None
    keep_alive: bool
    http_1_0: bool
    expects_continue: bool

    @property
    def path(self) -> str:
        """The target without its query; bytes that are not ASCII stay recognisably foreign."""
        return self.target.partition(b"?")[0].decode("latin-1")

    def get(self, name: bytes) -> bytes | None:
        """Return the first value of a header whose name is given in lower case."""
        return next((value for key, value in self.headers if key == name), None)


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
    if not reader.target.startswith(b"/"):
        raise BadRequestError(400, "the request target must be a path")
    return _checked(method, reader.target, reader.headers, http_1_0=version == "1.0")


def _checked(
    method: str, target: bytes, headers: list[tuple[bytes, bytes]], *, http_1_0: bool
) -> RequestHead:
    """Make a head of headers whose framing keeps to the rules."""
    hosts = 0
    lengths: list[bytes] = []
    codings: list[bytes] = []
    expectations: list[bytes] = []
    connection = b""
    for name, value in headers:
        if name not in _OF_THE_FRAMING:
            continue
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            lengths.append(value)
        elif name == b"connection":
            connection += value.lower() + b","
        elif name == b"transfer-encoding":
            codings.append(value)
        else:
            expectations.append(value)
    if hosts > 1 or (not hosts and not http_1_0):
        raise BadRequestError(400, "a request carries exactly one Host header")
    tokens = {token.strip() for token in connection.split(b",")} if connection else ()
    return RequestHead(
        method=method,
        target=target,
        headers=tuple(headers),
        content_length=_body_length(lengths, codings, http_1_0=http_1_0),
        keep_alive=b"keep-alive" in tokens if http_1_0 else b"close" not in tokens,
        http_1_0=http_1_0,
        expects_continue=_expects_continue(expectations, http_1_0=http_1_0),
    )


def _body_length(lengths: list[bytes], codings: list[bytes], *, http_1_0: bool) -> int | None:
    if codings:
        if http_1_0 or lengths or [c.lower() for c in codings] != [b"chunked"]:
            raise BadRequestError(400, "the only transfer coding is `chunked`, alone, on HTTP/1.1")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise BadRequestError(400, "Content-Length must be one number")
    return int(lengths[0])


def _expects_continue(expectations: list[bytes], *, http_1_0: bool) -> bool:
    if not expectations:
        return False
    if [e.lower() for e in expectations] != [b"100-continue"]:
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
    method: str,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    *,
    host: bytes,
    close: bool,
) -> bytes:
    """Build the request that a backend sees: one framing, no hop-by-hop header.

    Args:
        method: The method.
        target: Path and query.
        headers: The client's headers, names in lower case.
        body: The whole body.
        host: Value of `Host`.
        close: Whether to ask for the connection to be closed after the reply.
    """
    dropped = _OURS_UPSTREAM
    lines = [f"{method} ".encode("ascii"), target, b" HTTP/1.1\r\nhost: ", host, b"\r\n"]
    for name, value in headers:
        if name == b"connection" and len(value) > _LONGEST_PLAIN_CONNECTION:
            dropped = dropped | {token.strip().lower() for token in value.split(b",")}
    for name, value in headers:
        if name not in dropped:
            lines += (name, b": ", value, b"\r\n")
    if body or method not in _BODILESS:
        lines.append(b"content-length: %d\r\n" % len(body))
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    lines.append(body)
    return b"".join(lines)


class ResponseFramer:
    """Finds where a response ends; the bytes themselves are the caller's to pass on.

    Args:
        to_head: Whether it answers a HEAD request, and so has no body.
        keep_body: Whether to keep the decoded body for `take_body`.

    Attributes:
        complete: The response is whole.
        between_chunks: The last byte seen ended a chunk, or the head.
        keep_alive: The backend lets the connection go on after this response.
    """

    def __init__(self, *, to_head: bool = False, keep_body: bool = False) -> None:
        self._to_head = to_head
        self._parts: list[bytes] = []
        if keep_body:
            self.on_body = self._parts.append
        self._parser = httptools.HttpResponseParser(self)
        self.feed = self._parser.feed_data
        self.head_complete = False
        self.complete = False
        self.between_chunks = False
        self.keep_alive = False

    def on_headers_complete(self) -> None:
        """Note that the head is whole (called by llhttp)."""
        self.head_complete = True
        self.between_chunks = True
        self.keep_alive = bool(self._parser.should_keep_alive())  # llhttp forgets it at the end

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

    @property
    def bodiless(self) -> bool:
        """Whether a response of this status, to this method, ends with its head."""
        return self._to_head or self.status in (_NO_CONTENT, _NOT_MODIFIED)

    def take_body(self) -> bytes:
        """Return what of the body was decoded since the last call."""
        body = b"".join(self._parts)
        self._parts.clear()
        return body


class ResponseHead(msgspec.Struct, frozen=True):
    """A response head on its way to the client.

    Args:
        lines: Status line and header lines without the hop-by-hop ones, each with its CR LF, but
            with the transfer coding; the empty line is left to the caller.
        chunked: Whether the body comes in chunks.
        length: Value of `Content-Length`, or `None`.
        event_stream: Whether the body is `text/event-stream`.
    """

    lines: bytes
    chunked: bool
    length: int | None
    event_stream: bool


def response_head(raw: bytes) -> ResponseHead:
    """Take a backend's response head apart, leaving out what is between it and us alone.

    Args:
        raw: The head with its empty line, already accepted by a `ResponseFramer`.
    """
    status, *fields = raw[:-4].split(b"\r\n")
    kept = [b"HTTP/1.1" + status[8:]]
    chunked, length, event_stream = False, None, False
    for field in fields:
        name, _, value = field.partition(b":")
        name = name.lower()
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            chunked = b"chunked" in value.lower()
        elif name == b"content-type":
            event_stream = value.lstrip().startswith(b"text/event-stream")
        elif name in _HOP_BY_HOP or name.startswith(b"access-control-"):
            continue  # a llama-server echoes any origin; which may read is the door's to say
        kept.append(field)
    if event_stream:
        kept.append(b"X-Accel-Buffering: no")  # nginx in front of us passes each event on
    kept.append(b"")
    return ResponseHead(b"\r\n".join(kept), chunked, length, event_stream)


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
