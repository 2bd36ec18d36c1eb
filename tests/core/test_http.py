from __future__ import annotations

import pytest

from onebit_serve.core import http
from onebit_serve.core.http import BadRequestError, ChunkedBody, ResponseFramer, parse_head

LIMIT = 1000


def head(*lines, method=b"POST", target=b"/v1/completions", version=b"HTTP/1.1"):
    first = b"%s %s %s" % (method, target, version)
    return b"\r\n".join([first, *lines, b"", b""])


HOST = b"Host: 127.0.0.1:8000"


def test_a_plain_head_is_read_whole():
    parsed = parse_head(head(HOST, b"Content-Length: 12", b"X-A: 1", target=b"/completion?x=/y"))
    assert (parsed.method, parsed.target, parsed.path) == (
        "POST",
        b"/completion?x=/y",
        "/completion",
    )
    assert parsed.content_length == 12
    assert parsed.keep_alive
    assert parsed.get(b"x-a") == b"1"
    assert parsed.get(b"x-b") is None


@pytest.mark.parametrize(
    ("url", "target", "path"),
    [
        (b"http://127.0.0.1:8000/completion?x=/y", b"/completion?x=/y", "/completion"),
        (b"HTTP://127.0.0.1:8000/health", b"/health", "/health"),
        (b"http://127.0.0.1:8000", b"/", "/"),
        (b"http://127.0.0.1:8000/", b"/", "/"),
        (b"http://127.0.0.1:8000?x=1", b"/?x=1", "/"),
        (b"http://127.0.0.1:8000/http://elsewhere/", b"/http://elsewhere/", "/http://elsewhere/"),
    ],
)
def test_a_target_that_is_a_whole_url_is_read_as_its_path(url, target, path):
    parsed = parse_head(head(HOST, target=url))
    assert (parsed.target, parsed.path) == (target, path)


def test_the_host_of_a_whole_url_is_compared_without_regard_to_case():
    parsed = parse_head(head(b"Host: LocalHost", target=b"http://localHOST/health"))
    assert parsed.path == "/health"
    assert parsed.get(b"host") == b"LocalHost"


@pytest.mark.parametrize(
    ("lines", "version", "keep_alive"),
    [
        ([HOST], b"HTTP/1.1", True),
        ([HOST, b"Connection: close"], b"HTTP/1.1", False),
        ([HOST], b"HTTP/1.0", False),
        ([HOST, b"Connection: keep-alive"], b"HTTP/1.0", True),
    ],
)
def test_keep_alive_follows_version_and_connection(lines, version, keep_alive):
    assert parse_head(head(*lines, version=version)).keep_alive is keep_alive


def test_a_chunked_body_has_no_length():
    assert parse_head(head(HOST, b"Transfer-Encoding: chunked")).content_length is None


def test_an_offer_to_upgrade_is_declined_by_ignoring_it():
    parsed = parse_head(head(HOST, b"Connection: upgrade", b"Upgrade: h2c", method=b"GET"))
    assert parsed.method == "GET"
    assert parsed.forwarded == b""


def test_expect_is_noted_on_1_1_and_ignored_on_1_0():
    assert parse_head(head(HOST, b"Expect: 100-continue")).expects_continue
    assert not parse_head(head(HOST, b"Expect: 100-continue", version=b"HTTP/1.0")).expects_continue


MALFORMED = {
    "length and chunked": head(HOST, b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "chunked and length": head(HOST, b"Transfer-Encoding: chunked", b"Content-Length: 5"),
    "gzip before chunked": head(HOST, b"Transfer-Encoding: gzip, chunked"),
    "chunked before gzip": head(HOST, b"Transfer-Encoding: chunked, gzip"),
    "two codings in two lines": head(
        HOST, b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"
    ),
    "chunked twice": head(HOST, b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "identity": head(HOST, b"Transfer-Encoding: identity"),
    "a coding with a vertical tab": head(HOST, b"Transfer-Encoding: \x0bchunked"),
    "chunked on 1.0": head(HOST, b"Transfer-Encoding: chunked", version=b"HTTP/1.0"),
    "two equal lengths": head(HOST, b"Content-Length: 13", b"Content-Length: 13"),
    "two different lengths": head(HOST, b"Content-Length: 13", b"Content-Length: 14"),
    "a list of lengths": head(HOST, b"Content-Length: 13, 13"),
    "a length with a plus": head(HOST, b"Content-Length: +13"),
    "a negative length": head(HOST, b"Content-Length: -1"),
    "a length with an underscore": head(HOST, b"Content-Length: 1_3"),
    "a hexadecimal length": head(HOST, b"Content-Length: 0xd"),
    "an empty length": head(HOST, b"Content-Length:"),
    "an endless length": head(HOST, b"Content-Length: " + b"9" * 5000),
    "space before the colon": head(HOST, b"Content-Length : 13"),
    "a space in a name": head(HOST, b"X Y: 1"),
    "a line without colon": head(HOST, b"nonsense"),
    "a folded line": head(HOST, b"X-A: 1\r\n  more"),
    "a folded transfer coding": head(HOST, b"Transfer-Encoding:\r\n chunked"),
    "a NUL in a value": head(HOST, b"X-A: a\x00b"),
    "a bare CR in a value": head(HOST, b"X-A: a\rb"),
    "one bare LF": head(HOST).replace(b"\r\nHost", b"\nHost"),
    "a bare LF in a value": head(HOST, b"X-A: a\nX-B: b"),
    "no host": head(),
    "two hosts": head(HOST, b"Host: other"),
    "a foreign scheme": head(HOST, version=b"HTTPS/1.1"),
    "a second space before the version": head(HOST, version=b" HTTP/1.1"),
    "a control byte in the target": head(HOST, target=b"/a\x01b"),
    "a target that is no path": head(HOST, target=b"completion"),
    "a target on another host": head(HOST, target=b"http://elsewhere/"),
    "a target on another port": head(HOST, target=b"http://127.0.0.1:8001/"),
    "a target on the host without its port": head(HOST, target=b"http://127.0.0.1/"),
    "a target with a user": head(HOST, target=b"http://127.0.0.1:8000@elsewhere/"),
    "a target with a user of ours": head(HOST, target=b"http://u@127.0.0.1:8000/"),
    "a target of another scheme": head(HOST, target=b"https://127.0.0.1:8000/"),
    "a target without a host": head(b"Host:", target=b"http:///health"),
    "a target with a fragment for a path": head(HOST, target=b"http://127.0.0.1:8000#/"),
    "a target with a host and two hosts": head(HOST, HOST, target=b"http://127.0.0.1:8000/"),
    "a target with a host and none": head(target=b"http://127.0.0.1:8000/"),
    "a target with a host on 1.0 and none": head(target=b"http://localhost/", version=b"HTTP/1.0"),
    "an asterisk": head(HOST, method=b"OPTIONS", target=b"*"),
    "an unknown method": head(HOST, method=b"GE7"),
    "a method in lower case": head(HOST, method=b"post"),
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_head_is_refused_with_400(raw):
    with pytest.raises(BadRequestError) as caught:
        parse_head(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (head(HOST, version=b"HTTP/1.2"), (400, 505)),
        (head(HOST, version=b"HTTP/2.0"), (400, 505)),
        (head(HOST, version=b"HTTP/0.9"), (400, 505)),
        (b"GET /\r\n\r\n", (400, 505)),
        (head(HOST, method=b"CONNECT", target=b"elsewhere:443"), (400, 405)),
        (head(HOST, b"Expect: magic"), (417,)),
        (head(HOST, b"Expect: 100-continue", b"Expect: magic"), (417,)),
    ],
)
def test_what_is_not_spoken_here_is_refused_with_its_own_status(raw, status):
    with pytest.raises(BadRequestError) as caught:
        parse_head(raw)
    assert caught.value.status in status


def test_the_backend_sees_one_length_and_no_hop_by_hop_header():
    parsed = parse_head(
        head(
            HOST,
            b"Content-Length: 2",
            b"Connection: keep-alive, X-Secret",
            b"X-Secret: 1",
            b"Keep-Alive: timeout=5",
            b"TE: trailers",
            b"Trailer: X-T",
            b"Proxy-Authorization: Basic eA==",
            b"Expect: 100-continue",
            b"Authorization: Bearer k",
            b"X-Api-Key: k",
            b"Origin: http://elsewhere",
            b"Accept: */*",
        )
    )
    sent = http.request_bytes(
        "POST", b"/x", parsed.forwarded, b"{}", host=b"127.0.0.1:9", close=False
    )
    assert sent == (
        b"POST /x HTTP/1.1\r\nhost: 127.0.0.1:9\r\naccept: */*\r\ncontent-length: 2\r\n\r\n{}"
    )


def test_a_chunked_body_is_decoded_however_it_is_cut():
    raw = b"5\r\nhello\r\n1;ext=1\r\n \r\n5\r\nworld\r\n0\r\n\r\n"
    for size in range(1, len(raw) + 1):
        chunks = ChunkedBody(LIMIT)
        for at in range(0, len(raw), size):
            assert not chunks.complete
            chunks.feed(raw[at : at + size])
        assert chunks.complete
        assert chunks.body() == b"hello world"
        assert not chunks.followed


@pytest.mark.parametrize("tail", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00"])
def test_what_follows_a_chunked_body_is_noticed(tail):
    chunks = ChunkedBody(LIMIT)
    chunks.feed(b"2\r\n{}\r\n0\r\n\r\n" + tail)
    assert chunks.complete
    assert chunks.followed
    assert chunks.body() == b"{}"


@pytest.mark.parametrize(
    "raw",
    [
        b"x\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\n0\n\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"-1\r\nhello\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"FFFFFFFFFFFFFFFFF\r\nhello\r\n",
        b"\r\n5\r\nhello\r\n",
    ],
)
def test_malformed_chunks_are_refused(raw):
    chunks = ChunkedBody(LIMIT)
    with pytest.raises(BadRequestError) as caught:
        chunks.feed(raw)
    assert caught.value.status == 400


def test_a_chunked_body_past_the_limit_is_refused_with_the_name_of_the_limit():
    chunks = ChunkedBody(10)
    with pytest.raises(BadRequestError, match="max_body_bytes = 10") as caught:
        chunks.feed(b"b\r\nhello world\r\n")
    assert caught.value.status == 413


RESPONSES = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"hello"),
    "chunked": (
        b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"5\r\nhello\r\n0\r\n\r\n",
    ),
    "nothing": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
}


@pytest.mark.parametrize(("raw_head", "body"), RESPONSES.values(), ids=RESPONSES)
def test_the_end_of_a_response_is_found_exactly_however_it_is_cut(raw_head, body):
    raw = raw_head + body
    for size in range(1, len(raw) + 1):
        framer = ResponseFramer(keep_body=True)
        for at in range(0, len(raw), size):
            assert not framer.complete
            framer.feed(raw[at : at + size])
        assert framer.complete
        assert framer.take_body() == (b"hello" if body else b"")


def test_between_chunks_is_known():
    framer = ResponseFramer()
    framer.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert framer.between_chunks
    framer.feed(b"5\r\nhel")
    assert not framer.between_chunks
    framer.feed(b"lo\r\n")
    assert framer.between_chunks


@pytest.mark.parametrize(
    "raw",
    [
        b"SPDY/3 200 OK\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    ],
)
def test_what_is_no_response_head_is_not_taken_for_one(raw):
    with pytest.raises(ValueError, match=r".+"):
        http.response_head(raw)


@pytest.mark.parametrize(
    ("raw", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\n\r\n", False),
    ],
)
def test_a_backend_says_whether_its_connection_goes_on(raw, keep_alive):
    assert http.response_head(raw).keep_alive is keep_alive


def test_a_response_head_loses_what_is_between_us_and_the_backend():
    taken = http.response_head(
        b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nKeep-Alive: timeout=5, max=100\r\n"
        b"Connection: close\r\nContent-Type: text/event-stream\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    assert taken.lines == (
        b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
        b"Transfer-Encoding: chunked\r\nX-Accel-Buffering: no\r\n"
    )
    assert (taken.chunked, taken.length, taken.event_stream) == (True, None, True)


def test_a_head_that_comes_again_with_another_length_is_the_same_but_for_that():
    heads = [parse_head(head(HOST, b"X-A: 1", b"Content-Length: %d" % n)) for n in (7, 0, 70000)]
    assert [one.content_length for one in heads] == [7, 0, 70000]
    assert len({one.forwarded for one in heads}) == 1
    assert heads[0].get(b"content-length") is None
    for name in (b"Transfer-Encoding: chunked", b"Content-Length: 7"):
        with pytest.raises(BadRequestError):
            parse_head(head(HOST, b"X-A: 1", b"Content-Length: 7", name))


def test_a_reply_that_comes_again_with_another_length_is_the_same_but_for_that():
    said = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
    for length in (12, 0, 345):
        taken = http.response_head(said % (length, b"Keep-Alive: timeout=5\r\n"))
        assert taken.length == length
        assert taken.lines.lower().count(b"content-length: %d\r\n" % length) == 1
        assert taken.lines.lower().count(b"content-length") == 1
        assert b"Keep-Alive" not in taken.lines
    with pytest.raises(ValueError, match="two lengths"):
        http.response_head(said % (12, b"Content-Length: 13\r\n"))


def test_a_head_too_large_to_be_remembered_is_read_as_any_other():
    large = b"X-A: " + b"a" * 5000
    assert parse_head(head(HOST, large, b"Content-Length: 5")).content_length == 5
    taken = http.response_head(b"HTTP/1.1 200 OK\r\n%s\r\nContent-Length: 5\r\n\r\n" % large)
    assert (taken.length, taken.lines.count(b"Content-Length")) == (5, 1)
