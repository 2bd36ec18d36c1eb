from __future__ import annotations

import pytest

from onebit_serve.core.route import choose
from onebit_serve.core.wire import Refusal


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("/health", "health"),
        ("/v1/health", "health"),
        ("/readyz", "health"),
        ("/livez", "livez"),
        ("/v1/models", "models"),
        ("/models", "models"),
        ("/v1/status", "status"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_our_own_pages_are_ours(method, path, page):
    assert choose(method, path) == page


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/messages",
        "/completion",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/infill",
        "/props",
        "/slots/3",
    ],
)
def test_what_llama_server_does_is_relayed(path):
    assert choose("POST", path) == "relayed"
    assert choose("OPTIONS", path) == "relayed"


@pytest.mark.parametrize(
    "path", ["/", "/props", "/slots", "/index.html", "/_app/immutable/x-1.js", "/favicon.ico"]
)
def test_what_it_shows_is_relayed(path):
    assert choose("GET", path) == "relayed"
    assert choose("HEAD", path) == "relayed"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/cors-proxy"),
        ("POST", "/cors-proxy"),
        ("POST", "/models/load"),
        ("GET", "/tools"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "//v1/chat/completions"),
        ("POST", "/V1/chat/completions"),
        ("GET", "/_app/../cors-proxy"),
        ("GET", "/_app/%2e%2e/cors-proxy"),
        ("GET", "/a/b.js"),
        ("GET", "/..js"),
        ("POST", "/slots/x"),
        ("POST", "/slots/1/2"),
        ("POST", "/slots/1\n"),
        ("GET", ""),
    ],
)
def test_an_unknown_route_is_closed(method, path):
    refusal = choose(method, path)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/health"),
        ("DELETE", "/v1/models"),
        ("GET", "/v1/chat/completions"),
        ("PUT", "/completion"),
        ("POST", "/"),
        ("TRACE", "/props"),
    ],
)
def test_a_route_asked_with_the_wrong_method_says_so(method, path):
    refusal = choose(method, path)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (405, "method_not_allowed")
    assert path in refusal.message
