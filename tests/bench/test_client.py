from __future__ import annotations

import json

import pytest
import trio
from tiny_server import TinyServer

from onebit_serve.bench import client
from onebit_serve.core.errors import OnebitError, UsageError

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
ROUTE = "/v1/chat/completions"


async def chat(server, **more):
    where = await client.resolve(client.endpoint(server.url, **more))
    with trio.fail_after(10):
        return await client.stream(where, ROUTE, BODY)


async def test_the_first_token_is_the_first_text_that_is_not_empty():
    with TinyServer(texts=["", "", "one ", "two"], first_s=0.05) as server:
        seen = await chat(server)
    assert (seen.error, seen.texts, seen.finished) == ("", 2, True)
    assert seen.first_s - seen.began_s >= 0.05
    assert seen.began_s < seen.first_s <= seen.last_s <= seen.end_s


async def test_counts_of_the_backend_are_kept():
    timings = {"cache_n": 3, "prompt_n": 7, "prompt_ms": 1.5, "predicted_n": 3, "more": 1}
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    with TinyServer(timings=timings, usage=usage) as server:
        seen = await chat(server)
    assert (seen.timings.cache_n, seen.timings.prompt_n) == (3, 7)
    assert seen.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("pieces", [1, 2, 7])
async def test_events_may_be_cut_anywhere(pieces):
    with TinyServer(texts=["grüße ", "世界 ", "🌊"], pieces=pieces) as server:
        seen = await chat(server)
    assert (seen.error, seen.texts) == ("", 3)


@pytest.mark.parametrize(
    ("choice", "texts"),
    [
        (b'{"delta":{"content":"hm"}}', 1),
        (b'{"delta":{"reasoning_content":"hm"}}', 1),
        (b'{"delta":{"content":null,"reasoning":"hm"}}', 1),
        (b'{"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}', 1),
        (b'{"text":"plain completion"}', 1),
        (b'{"delta":{"role":"assistant","content":"","reasoning":"","tool_calls":[]}}', 0),
    ],
)
def test_whatever_is_generated_is_text(choice, texts):
    seen = client.Stream(began_s=0.0)
    client._Events(seen).feed(b'data:{"choices":[' + choice + b"]}\r\n\r\n: ping\n\n", 1.0)
    assert (seen.error, seen.texts, seen.first_s) == ("", texts, 1.0 if texts else None)


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("cut", "cut", "without saying it was complete"),
        ("silent", "cut", "closed without an answer"),
        ("garbage", "bad reply", "not HTTP"),
        ("status", "http 503", "Loading model"),
        ("sse error", "sse error", "Compute error"),
        ("no end", "bad reply", "without saying it was complete"),
        ("empty", "empty", "no text"),
        ("bad json", "bad reply", "no chat chunk"),
    ],
)
async def test_every_failure_has_a_kind_and_a_cause(fault, kind, detail):
    with TinyServer(fault=fault) as server:
        seen = await chat(server)
    assert seen.error == kind
    assert detail in seen.detail
    assert seen.end_s >= seen.began_s


async def test_a_refused_connection_is_a_kind_of_error_and_no_exception():
    server = TinyServer()
    where = await client.resolve(client.endpoint(server.url))
    server.close()
    seen = await client.stream(where, ROUTE, BODY)
    assert seen.error == "refused"


async def test_what_was_seen_before_a_cancel_is_kept():
    with TinyServer(texts=["one", *["more"] * 500], gap_s=0.02) as server:
        where = await client.resolve(client.endpoint(server.url))
        seen = client.Stream(began_s=0.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stream, where, ROUTE, BODY, seen)
            with trio.fail_after(10):
                while not seen.texts:  # noqa: ASYNC110 - the client tells nobody of a text
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
    assert seen.first_s is not None
    assert not seen.finished


async def test_the_key_and_the_host_are_sent_and_a_v1_in_the_url_is_understood():
    with TinyServer() as server:
        where = await client.resolve(client.endpoint(server.url + "/v1/", key="secret"))
        await client.stream(where, ROUTE, BODY)
    head = server.heads[-1]
    assert head.startswith(f"POST {ROUTE} HTTP/1.1")
    assert "Authorization: Bearer secret" in head
    assert f"Host: 127.0.0.1:{server.port}" in head


async def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with TinyServer() as server:
        assert (await chat(server)).error == ""


async def test_a_page_is_fetched_whole():
    with TinyServer(routes={"/props": {"total_slots": 4}}) as server:
        where = await client.resolve(client.endpoint(server.url))
        answer = await client.fetch(where, "GET", "/props")
        missing = await client.fetch(where, "GET", "/nothing")
    assert (answer.status, answer.json()) == (200, {"total_slots": 4})
    assert missing.status == 404


async def test_a_server_that_closes_without_an_answer_is_an_os_error():
    with TinyServer(fault="silent") as server:
        where = await client.resolve(client.endpoint(server.url))
        with pytest.raises(OSError, match="without an answer"):
            await client.fetch(where, "POST", ROUTE, {})


async def test_nobody_there_is_said_with_address_cause_and_hint():
    server = TinyServer()
    server.close()
    with pytest.raises(OnebitError, match=f"127.0.0.1:{server.port}: cannot connect") as caught:
        await client.resolve(client.endpoint(server.url))
    assert caught.value.exit_code == 1
    assert "1bit serve" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:8000",
        "http://",
        "http://127.0.0.1:port",
        "http://127.0.0.1:99999",
        "http://user@127.0.0.1",
        "http://127.0.0.1/?a=1",
        "ftp://127.0.0.1",
        "http://127.0.0.1:80/a b",
        "http://[::1",
    ],
)
def test_what_is_no_address_of_a_server_is_a_usage_error(url):
    with pytest.raises(UsageError, match="--url"):
        client.endpoint(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost", "http://localhost:80"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://host:1/proxy/v1/", "http://host:1/proxy"),
    ],
)
def test_addresses_are_read(url, shown):
    assert client.endpoint(url).url == shown
