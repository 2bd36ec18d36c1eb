from __future__ import annotations

import hashlib
import json
import random
import re
import time

import pytest
from front_door import Front, request_bytes
from llama_process import until

OK = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
HELLO = json.dumps({"script": [OK]}).encode()
NEXT = "GET /props?tag={tag}-next HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
START = "POST /completion?tag={tag} HTTP/1.1\r\n"

# What proxies have been split with, and what no client of ours sends.
AMBIGUOUS = {
    "length-and-coding": (
        "Host: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "coding-and-length": (
        "Host: 127.0.0.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
    ),
    "two-equal-lengths": "Host: 127.0.0.1\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "two-lengths": "Host: 127.0.0.1\r\nContent-Length: 2\r\nContent-Length: 60\r\n\r\n{}",
    "length-list": "Host: 127.0.0.1\r\nContent-Length: 2, 2\r\n\r\n{}",
    "length-plus": "Host: 127.0.0.1\r\nContent-Length: +2\r\n\r\n{}",
    "length-minus": "Host: 127.0.0.1\r\nContent-Length: -2\r\n\r\n{}",
    "length-hex": "Host: 127.0.0.1\r\nContent-Length: 0x2\r\n\r\n{}",
    "length-spaced": "Host: 127.0.0.1\r\nContent-Length: 2 2\r\n\r\n{}",
    "length-empty": "Host: 127.0.0.1\r\nContent-Length:\r\n\r\n{}",
    "length-overflow": "Host: 127.0.0.1\r\nContent-Length: 18446744073709551618\r\n\r\n{}",
    "length-space-colon": "Host: 127.0.0.1\r\nContent-Length : 2\r\n\r\n{}",
    "coding-gzip": "Host: 127.0.0.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding-twice": "Host: 127.0.0.1\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "coding-two-lines": (
        "Host: [::1]\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "coding-identity": "Host: 127.0.0.1\r\nTransfer-Encoding: identity\r\n\r\n",
    "coding-unknown": "Host: 127.0.0.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding-quoted": 'Host: 127.0.0.1\r\nTransfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "coding-tab": "Host: 127.0.0.1\r\nTransfer-Encoding: chunked\x0b\r\n\r\n0\r\n\r\n",
    "coding-space-colon": "Host: 127.0.0.1\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "coding-empty": "Host: 127.0.0.1\r\nTransfer-Encoding:\r\n\r\n",
    "folded-coding": "Host: 127.0.0.1\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "folded": "Host: 127.0.0.1\r\nX-A: 1\r\n two\r\n\r\n",
    "no-host": "\r\n",
    "two-hosts": "Host: 127.0.0.1\r\nHost: y\r\n\r\n",
    "bare-lf": "Host: 127.0.0.1\nX-A: 1\r\n\r\n",
    "only-lf": "Host: 127.0.0.1\n\n",
    "bare-cr": "Host: 127.0.0.1\r\nX-A: 1\rX-B: 2\r\n\r\n",
    "nul-in-value": "Host: 127.0.0.1\r\nX-A: 1\x002\r\n\r\n",
    "nul-in-name": "Host: 127.0.0.1\r\nX-\x00A: 1\r\n\r\n",
    "no-colon": "Host: 127.0.0.1\r\nX-A\r\n\r\n",
    "space-in-name": "Host: 127.0.0.1\r\nX A: 1\r\n\r\n",
    "first-line-folded": " Host: 127.0.0.1\r\nHost: 127.0.0.1\r\n\r\n",
    "chunk-negative": "Host: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "chunk-overflow": (
        "Host: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000002\r\n{}\r\n0\r\n\r\n"
    ),
    "chunk-hex": "Host: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "chunk-no-end": "Host: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n",
    "chunk-lf": "Host: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
    "chunk-extension-lf": (
        "Host: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n2;a\nb\r\n{}\r\n0\r\n\r\n"
    ),
    "chunk-size-missing": "Host: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n\r\n{}\r\n0\r\n\r\n",
    "after-the-chunks": "Host: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "expectation": "Host: 127.0.0.1\r\nExpect: 200-ok\r\nContent-Length: 2\r\n\r\n{}",
}
WHOLE = {
    "http-2": "POST /completion?tag={tag} HTTP/2.0\r\nHost: 127.0.0.1\r\n\r\n",
    "http-2-preface": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http-1-2": "GET /props?tag={tag} HTTP/1.2\r\nHost: 127.0.0.1\r\n\r\n",
    "http-0-9": "GET /props?tag={tag}\r\n\r\n",
    "http-lower": "GET /props?tag={tag} http/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "http-1-0-chunked": (
        "POST /completion?tag={tag} HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "two-spaces": "POST  /completion?tag={tag} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "tab": "GET\t/props?tag={tag}\tHTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "space-in-target": "GET /props?tag={tag} x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "absolute": "GET http://x/props?tag={tag} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "asterisk": "OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "connect": "CONNECT x:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "unknown-method": "FOO /props?tag={tag} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "lower-method": "get /props?tag={tag} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "no-http": "SSH-2.0-OpenSSH_9\r\n\r\n",
    "tls": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}
VECTORS = {name: START + rest for name, rest in AMBIGUOUS.items()} | WHOLE


@pytest.mark.parametrize("name", VECTORS)
def test_what_can_be_read_in_two_ways_is_refused_and_nothing_after_it_is_read(
    scripted: Front, name: str
) -> None:
    assert len(VECTORS) >= 30
    data = (VECTORS[name] + NEXT).replace("{tag}", name).encode("latin-1")
    with scripted.raw(data) as raw:
        answer = raw.rest()
    assert len(re.findall(rb"HTTP/1\.1 \d\d\d ", answer)) <= 1
    if answer:
        status = int(answer.split()[1])
        assert 400 <= status < 500 or status == 505, answer
        assert b"\r\nConnection: close\r\n" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    # Whatever had reached the backend would stand in its record before this request does.
    scripted.client.get(f"/props?tag={name}-after").raise_for_status()
    assert [entry["path"] for entry in scripted.requests(name)][-1] == f"/props?tag={name}-after"
    assert scripted.requests(f"tag={name}-next") == []
    assert [e for e in scripted.requests() if e["path"].endswith(f"tag={name}")] == []


def test_the_backend_sees_one_framing_of_ours(scripted: Front) -> None:
    data = request_bytes(
        "/completion?tag=framing&x=%20",
        HELLO,
        "Connection: keep-alive, X-Secret",
        "X-Secret: 1",
        "Keep-Alive: timeout=5",
        "Proxy-Authorization: Basic x",
        "TE: trailers",
        "Upgrade: websocket",
        "X-Kept: a b",
        "Accept: x",
    )
    with scripted.raw(data) as raw:
        assert raw.reply()[2] == b"{}"
    (seen,) = scripted.requests("tag=framing&x=%20")
    names = [line.partition(":")[0].lower() for line in seen["headers"]]
    # The backend's own key may be added, a client's is never passed on twice.
    assert sorted(names) == [
        *("accept", "authorization", "content-length", "host", "x-kept", "x-request-id")
    ]
    assert len(names) == len(set(names))
    assert any(line.startswith("host: 127.0.0.1:") for line in seen["headers"])


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_chunked_body_arrives_whole_and_with_its_length(scripted: Front, size: int) -> None:
    body = json.dumps({"script": [OK], "pad": "ü" * 9}, ensure_ascii=False).encode()
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    data = b"".join(b"%X;ext=1\r\n%s\r\n" % (len(c), c) for c in chunks)
    head = f"POST /completion?tag=chunked-{size} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    with scripted.raw(head.encode() + data + b"0\r\nX-Trailer: 1\r\n\r\n") as raw:
        assert raw.reply()[0] == 200
    (seen,) = scripted.requests(f"tag=chunked-{size}")
    assert seen["body_sha256"] == hashlib.sha256(body).hexdigest()
    assert f"content-length: {len(body)}" in seen["headers"]
    assert not any("transfer-encoding" in line.lower() for line in seen["headers"])


def test_a_target_that_is_a_whole_url_reaches_the_backend_as_a_path(scripted: Front) -> None:
    data = request_bytes("http://127.0.0.1/completion?tag=whole-url", HELLO)
    with scripted.raw(data) as raw:
        assert raw.reply()[2] == b"{}"
    (seen,) = scripted.requests("tag=whole-url")
    assert seen["path"] == "/completion?tag=whole-url"


def test_a_whole_url_does_not_get_round_the_check_of_the_host(scripted: Front) -> None:
    for url, host, status in (
        ("http://evil.example/health", "127.0.0.1", 400),
        ("http://127.0.0.1/health", "evil.example", 400),
        ("http://evil.example/health", "evil.example", 403),
    ):
        with scripted.raw(f"GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()) as raw:
            assert raw.reply()[0] == status


def test_a_client_that_waits_to_be_told_to_go_on_is_told(scripted: Front) -> None:
    head = f"Expect: 100-continue\r\nContent-Length: {len(HELLO)}\r\n\r\n"
    start = "POST /completion?tag=waits HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with scripted.raw((start + head).encode()) as raw:
        assert raw.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.send(HELLO)
        assert raw.reply()[0] == 200
    (seen,) = scripted.requests("tag=waits")
    assert not any("expect" in line.lower() for line in seen["headers"])


def test_a_request_too_large_is_refused_before_its_body_is_asked_for(scripted: Front) -> None:
    head = "POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\n"
    with scripted.raw(f"{head}Content-Length: 99999999999\r\n\r\n".encode()) as raw:
        status, _, body = raw.reply()
    assert status == 413
    assert "max_body_bytes" in json.loads(body)["error"]["message"]


def test_other_expectations_cannot_be_met(scripted: Front) -> None:
    with scripted.raw(request_bytes("/completion", HELLO, "Expect: x")) as raw:
        assert raw.reply()[0] == 417


def test_pipelined_requests_are_answered_in_order(scripted: Front) -> None:
    gets = [request_bytes(p, method="GET") for p in ("/livez", "/v1/models", "/nowhere")]
    scripts = [
        request_bytes("/completion", json.dumps({"script": [OK.replace("{}", f"{n:2}")]}).encode())
        for n in range(3)
    ]
    with scripted.raw(
        b"\r\n".join([gets[0], scripts[0], scripts[1], *gets[1:], scripts[2]])
    ) as raw:
        replies = [raw.reply() for _ in range(6)]
    assert [status for status, _, _ in replies] == [200, 200, 200, 200, 404, 200]
    assert [replies[n][2] for n in (1, 2, 5)] == [b" 0", b" 1", b" 2"]


def test_a_connection_goes_on_until_the_client_asks_to_close(scripted: Front) -> None:
    with scripted.raw() as raw:
        for _ in range(3):
            assert raw.send(request_bytes("/completion", HELLO)).reply()[0] == 200
        raw.send(request_bytes("/completion", HELLO, "Connection: close"))
        status, headers, _ = raw.reply()
        assert (status, headers["connection"]) == (200, "close")
        assert raw.rest() == b""


def test_a_reply_to_http_1_0_has_no_chunks(scripted: Front) -> None:
    chunks = (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    )
    body = json.dumps({"script": [chunks]}).encode()
    with scripted.raw(request_bytes("/completion", body, version="1.0")) as raw:
        head, _, rest = raw.rest().partition(b"\r\n\r\n")
    assert rest == b"onetwo"
    assert b"transfer-encoding" not in head.lower()
    assert b"Connection: close" in head
    with scripted.raw(b"GET /livez HTTP/1.0\r\n\r\n") as raw:
        assert b'{"status":"ok"}' in raw.rest()


@pytest.mark.parametrize("path", ["/health", "/livez", "/v1/models", "/v1/status", "/props"])
def test_a_head_request_gets_the_head_alone(scripted: Front, path: str) -> None:
    asked = request_bytes(path, method="HEAD") + request_bytes("/livez", method="GET")
    with scripted.raw(asked) as raw:
        assert raw.reply(to_head=True)[0] == 200
        status, headers, body = raw.reply()
        assert headers.pop("x-request-id")
        assert (status, body) == (200, b'{"status":"ok"}')
        assert headers == {
            "content-type": "application/json; charset=utf-8",
            "content-length": str(len(body)),
        }


def test_options_are_answered(scripted: Front) -> None:
    for path in ("/v1/chat/completions", "/health"):
        assert scripted.client.options(path).status_code < 300


MINE = "X-Request-Id: mine"


@pytest.mark.parametrize(
    ("data", "status", "is_mine"),
    [
        (request_bytes("/livez", b"", MINE, "X-A : 1", method="GET"), 400, False),
        (request_bytes("/livez", b"", MINE, method="GET", version="2.0"), 505, False),
        (request_bytes("/completion", b"{}", MINE, "Expect: x"), 417, False),
        (request_bytes("/completion", b"", MINE).replace(b": 0\r", b": 99999999999\r"), 413, True),
        (request_bytes("/livez", b"", MINE, method="OPTIONS"), 204, True),
        (request_bytes("/livez", b"", method="OPTIONS"), 204, False),
        (request_bytes("/livez", b"", MINE, "Origin: http://x", method="OPTIONS"), 204, True),
    ],
)
def test_what_no_page_or_backend_answers_has_an_id_too(
    scripted: Front,
    data: bytes,
    status: int,
    is_mine: bool,  # noqa: FBT001
) -> None:
    with scripted.raw(data) as raw:
        said, headers, _ = raw.reply(to_head=status == 204)
    assert said == status
    assert (headers["x-request-id"] == "mine") is is_mine
    assert re.fullmatch(r"mine|[0-9a-f]{8}-\d+", headers["x-request-id"])


@pytest.mark.parametrize("path", ["/cors-proxy?url=http://x", "/nowhere", "/v1/files", "/../props"])
def test_an_unknown_route_is_404_in_the_envelope_of_openai(scripted: Front, path: str) -> None:
    with scripted.raw(request_bytes(path, method="GET")) as raw:
        status, _, body = raw.reply()
    assert status == 404
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("not_found_error", "not_found")
    assert scripted.requests("cors-proxy") == []


def test_a_route_asked_with_the_wrong_method_keeps_the_connection(scripted: Front) -> None:
    with scripted.raw(request_bytes("/v1/chat/completions", method="GET")) as raw:
        assert raw.reply()[0] == 405
        assert raw.send(request_bytes("/livez", method="GET")).reply()[0] == 200


@pytest.mark.parametrize(
    ("query", "status"),
    [
        *(("", 200), ("?lines=0", 200), ("?lines=5&follow=0", 200), (f"?lines={'9' * 40}", 200)),
        *(("?lines=abc", 400), ("?lines=-1", 400), ("?lines=", 400), ("?follow=1&lines=x", 400)),
    ],
)
def test_lines_of_a_log_are_counted_by_a_number(scripted: Front, query: str, status: int) -> None:
    reply = scripted.client.get(f"/v1/backends/cpu/logs{query}")
    assert reply.status_code == status
    if status == 400:
        assert reply.json()["error"]["message"].startswith("lines is a number")


def test_our_own_pages_in_every_form(scripted: Front) -> None:
    for path in ("/health", "/v1/health", "/readyz"):
        assert scripted.client.get(path).json() == {"status": "ok"}
    (model,) = scripted.client.get("/v1/models").json()["data"]
    assert (model["id"], model["device"], model["object"]) == ("tiny-llama", "cpu", "model")
    assert time.time() - 3600 < model["created"] <= time.time()
    assert isinstance(model["created"], int)
    assert scripted.client.get("/v1/models/tiny%2Dllama").json() == model
    assert scripted.client.get("/v1/models/other").status_code == 404
    assert scripted.client.post("/v1/models/tiny-llama").status_code == 405
    shown = scripted.backend()
    assert (shown["state"], shown["restarts"], shown["in_flight"]) == ("ready", 0, 0)
    assert shown["port"] != scripted.port
    assert shown["warm_up_skipped"] == "cpu"


def test_large_bodies_pass_both_ways_unchanged(scripted: Front) -> None:
    size = 20 << 20
    pad = random.Random(2).randbytes(size // 2).hex()
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n"
    script = json.dumps({"script": [answer, {"times": ["0123456789abcdef", size // 16]}]})
    body = f'{script[:-1]}, "pad": "{pad}"}}'.encode()
    reply = scripted.client.post("/completion?tag=large", content=body)
    assert reply.content == b"0123456789abcdef" * (size // 16)
    (seen,) = scripted.requests("tag=large")
    assert seen["body_bytes"] == len(body)
    assert seen["body_sha256"] == hashlib.sha256(body).hexdigest()


def test_a_slow_reader_loses_nothing_and_holds_up_nobody(scripted: Front) -> None:
    size = 20 << 20
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n"
    script = json.dumps({"script": [answer, {"times": ["0123456789abcdef", size // 16]}]})
    with scripted.raw(request_bytes("/completion", script.encode())) as slow:
        for _ in range(5):
            assert scripted.client.post("/completion", content=HELLO).status_code == 200
        assert slow.reply()[2] == b"0123456789abcdef" * (size // 16)


SHORT = {
    "_HEAD_LIMIT_S": 0.3,
    "_BODY_GAP_S": 0.3,
    "_IDLE_LIMIT_S": 0.6,
    "_LATE_LOOK_S": 0.05,
    "_CONNECTIONS": 40,
}


@pytest.fixture(scope="module")
def strict(scripted_llama, tiny_models, tmp_path_factory):
    front = Front(
        tmp_path_factory.mktemp("strict"),
        *("-m", str(tiny_models / "tiny-llama.gguf"), "--device=cpu"),
        *("--llama-server", scripted_llama),
        constants=SHORT,
        environment={"ONEBIT_SERVER_MAX_BODY_BYTES": "100000"},
    )
    try:
        yield front.ready()
    finally:
        front.stop()


@pytest.mark.parametrize("size", [100_001, 5_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413_and_names_it(strict: Front, size: int, chunked: bool) -> None:  # noqa: FBT001
    body = b"x" * size
    if chunked:
        head = b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        data = head + b"%x\r\n%s\r\n" % (len(body), body)
    else:
        data = request_bytes("/completion", body)
    with strict.raw() as raw:
        try:
            raw.send(data)
        except OSError:
            assert size > 1 << 20  # so much is not read any more once it is refused
        status, headers, answer = raw.reply()
    assert (status, headers["connection"]) == (413, "close")
    assert "max_body_bytes = 100000" in json.loads(answer)["error"]["message"]


def test_a_body_of_just_the_limit_passes(strict: Front) -> None:
    body = HELLO[:-1] + b',"x":"' + b"x" * 100_000
    body = body[: 100_000 - 2] + b'"}'
    assert strict.client.post("/completion", content=body).status_code == 200


def test_a_head_over_the_limit_is_refused(strict: Front) -> None:
    with strict.raw(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: " + b"a" * 70_000) as raw:
        assert raw.reply()[0] in (400, 431)
    fits = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: " + b"a" * 60_000 + b"\r\n\r\n"
    with strict.raw(fits) as raw:
        assert raw.reply()[0] == 200


def test_a_client_that_begins_with_tls_is_told_at_once(strict: Front) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)
    with strict.raw(hello) as raw:
        status, _, body = raw.reply()
    assert status == 400
    assert b"this is TLS" in body


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"G",
        b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{",
        b"POST /completion HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
def test_a_client_that_takes_its_time_is_closed(strict: Front, start: bytes) -> None:
    with strict.raw(start) as raw:
        assert raw.rest() == b""


def test_a_head_that_drips_is_closed_however_it_drips(strict: Front) -> None:
    with strict.raw(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n") as raw:
        raw.sock.settimeout(0.02)

        def closed() -> bool:
            """Send a letter, and look whether the other side is still there."""
            try:
                raw.send(b"X")
                return raw.sock.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        until(closed, "the end of the connection")


def test_too_many_connections_are_closed_and_the_door_goes_on(strict: Front) -> None:
    waiting = [strict.raw() for _ in range(60)]
    for raw in waiting:
        assert raw.rest() == b""
        raw.sock.close()
    assert strict.client.get("/livez").status_code == 200


def test_a_client_that_leaves_in_its_own_request_disturbs_nobody(strict: Front) -> None:
    for data in (
        b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{",
        b"GE",
        b"",
    ):
        strict.raw(data).sock.close()
    assert strict.client.get("/livez").status_code == 200
    assert strict.said("failed") == []
