from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_door import CHAT, Front, request_bytes
from llama_process import Llama, frames, until

Start = Callable[..., Front]
OK = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
SSE = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
END = "0\r\n\r\n"


def latin(text: str) -> str:
    """Return text as a script carries its UTF-8."""
    return text.encode().decode("latin-1")


def chunk(text: str) -> str:
    return f"{len(text.encode('latin-1')):x}\r\n{text}\r\n"


def event(value: Any) -> str:
    return chunk(latin(f"data: {json.dumps(value, ensure_ascii=False)}\n\n"))


def script(*steps: Any, **more: Any) -> bytes:
    return json.dumps({**more, "script": steps}).encode()


def ask(front: Front, *steps: Any, path: str = "/completion", **more: Any) -> httpx.Response:
    return front.client.post(path, content=script(*steps, **more))


def raw_answer(front: Front, *steps: Any, **more: Any) -> bytes:
    """Return all bytes that a client gets, up to the end of its connection."""
    body = script(*steps, stream=True, **more)
    with front.raw(request_bytes("/completion", body, "Connection: close")) as raw:
        return raw.rest()


# replies as they are


def test_the_bytes_of_a_stream_are_the_same_wherever_they_are_cut(scripted: Front) -> None:
    text = "".join(event({"content": word}) for word in ("Grüße", "\N{GRINNING FACE}", "日本語"))
    body = (text + END).encode("latin-1")
    answer = raw_answer(scripted, SSE, *(text + END), {"end": "close"})
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert rest == body
    assert b"\r\nX-Accel-Buffering: no" in head
    assert b"\r\nTransfer-Encoding: chunked" in head


def test_an_event_reaches_the_client_before_the_next_one_is_made(
    scripted: Front, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    body = script(SSE, event(1), {"gate": str(gate)}, event(2), END, stream=True)
    with scripted.raw(request_bytes("/completion", body)) as raw:
        raw.until(b"data: 1\n\n\r\n")
        gate.touch()
        raw.until(b"data: 2\n\n\r\n" + END.encode())


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
def test_a_stream_that_fails_before_its_first_token_keeps_its_status(
    scripted: Front, status: int
) -> None:
    body = '{"error":{"message":"no"}}'
    head = f"HTTP/1.1 {status} Its Own Words\r\nX-Its: own\r\nContent-Length: {len(body)}\r\n\r\n"
    reply = ask(scripted, head + body, stream=True)
    assert (reply.status_code, reply.reason_phrase) == (status, "Its Own Words")
    assert reply.json() == {"error": {"message": "no"}}
    assert reply.headers["x-its"] == "own"
    assert "x-accel-buffering" not in reply.headers


def test_headers_between_the_backend_and_us_stay_there(scripted: Front) -> None:
    head = "HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nConnection: keep-alive\r\n"
    reply = ask(scripted, head + "X-A: 1\r\nx-a: 2\r\nContent-Length: 2\r\n\r\n{}")
    assert "keep-alive" not in reply.headers
    assert reply.headers.get_list("x-a") == ["1", "2"]


def test_answers_before_the_answer_are_not_for_the_client(scripted: Front) -> None:
    early = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    reply = ask(scripted, early + OK)
    assert reply.json() == {}
    assert "link" not in reply.headers


def test_a_reply_without_a_length_ends_with_its_connection(scripted: Front) -> None:
    answer = raw_answer(scripted, "HTTP/1.1 200 OK\r\n\r\nall of it", {"end": "close"})
    assert answer.endswith(b"\r\nConnection: close\r\n\r\nall of it")


def test_a_reply_without_a_body_ends_with_its_head(scripted: Front) -> None:
    body = script("HTTP/1.1 204 No Content\r\n\r\n")
    with scripted.raw(request_bytes("/completion", body)) as raw:
        assert raw.until(b"\r\n\r\n").startswith(b"HTTP/1.1 204 ")
        assert raw.send(request_bytes("/livez", method="GET")).reply()[0] == 200


# faults


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([{"end": "close"}], "without a reply"),
        ([{"end": "reset"}], ""),
        (["HTTP/1.1 200 OK\r\nConte", {"end": "close"}], "without a reply"),
        (["SSH-2.0-OpenSSH_9\r\n\r\n", {"end": "close"}], "no HTTP"),
        (["HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", {"end": "close"}], "no HTTP"),
        ([{"times": ["HTTP/1.1 200 OK\r\nX: " + "a" * 1000, 100]}, {"end": "close"}], "head"),
    ],
)
def test_a_backend_that_fails_before_it_answers_is_502_with_the_cause(
    scripted: Front, steps: list[Any], words: str
) -> None:
    reply = ask(scripted, *steps, stream=True)
    assert reply.status_code == 502
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "backend_gone")
    assert error["message"].startswith("cpu failed before it answered: ")
    assert words in error["message"]


def test_a_backend_that_takes_no_connections_is_replaced_and_the_request_sent_again(
    start_scripted: Start,
) -> None:
    front = start_scripted().ready()
    port = front.backend()["port"]
    assert ask(front, {"deaf": True}, OK, {"end": "close"}).status_code == 200
    until(lambda: refused(port), "the listener to close")
    assert ask(front, OK).status_code == 200
    assert front.backend()["restarts"] == 1
    assert front.backend()["port"] != port


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_stream_that_breaks_ends_in_an_error_and_never_as_if_it_were_whole(
    scripted: Front, how: str
) -> None:
    for pieces in ([event(1)], [event(1), chunk("data: {")]):
        answer = raw_answer(scripted, SSE, *pieces, {"end": how})
        text = b"".join(unchunked(answer)).decode()
        last = text.rstrip().rpartition("\n\ndata: ")[2]
        assert json.loads(last)["error"]["code"] == "backend_gone"
        assert "[DONE]" not in text
        assert not answer.endswith(END.encode())


def unchunked(answer: bytes) -> Iterator[bytes]:
    """Give the chunks of a body whose last one may be missing."""
    rest = answer.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        yield rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


@pytest.mark.parametrize("sent", ["5\r\ndat", "5", "5\r\ndata:"])
def test_a_stream_that_breaks_inside_a_chunk_is_only_cut(scripted: Front, sent: str) -> None:
    whole = SSE + event(1) + sent
    answer = raw_answer(scripted, whole, {"end": "close"})
    assert answer.partition(b"\r\n\r\n")[2] == (event(1) + sent).encode()


@pytest.mark.parametrize(
    "reply",
    [
        "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        CHUNKED + chunk("half"),
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9\r\n\r\nhalf",
    ],
)
def test_another_body_that_breaks_is_only_cut(scripted: Front, reply: str) -> None:
    body = reply.partition("\r\n\r\n")[2].encode()
    assert raw_answer(scripted, reply, {"end": "close"}).partition(b"\r\n\r\n")[2] == body


def test_chunks_that_are_none_are_cut(scripted: Front, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = script(CHUNKED + chunk("one"), {"gate": str(gate)}, "zz\r\n", {"gone": True})
    with scripted.raw(request_bytes("/completion", body)) as raw:
        raw.until(b"one\r\n")
        gate.touch()
        assert not raw.rest().endswith(END.encode())


def test_a_kept_connection_that_went_stale_is_replaced_without_a_word(
    scripted: Front, tmp_path: Path
) -> None:
    for number in range(3):
        gate = tmp_path / str(number)
        # It is closed only after the reply has arrived, so that it is kept first.
        assert ask(scripted, OK, {"gate": str(gate)}, {"end": "reset"}).status_code == 200
        gate.touch()
        assert scripted.client.get(f"/props?stale={number}").status_code == 200
        assert len(scripted.requests(f"stale={number}")) == 1


def test_a_request_that_kills_its_backend_is_502_with_the_exit(start_scripted: Start) -> None:
    front = start_scripted().ready()
    assert ask(front, OK).status_code == 200  # there is a kept connection now
    front.client.close()
    front.client = httpx.Client(base_url=front.url, timeout=60, trust_env=False)
    reply = ask(front, {"end": "exit"}, path="/completion?tag=deadly")
    assert reply.status_code in (502, 503)
    assert reply.json()["error"]["message"]
    front.wait_said("exited (code 9)")
    assert len(front.requests("deadly")) <= 2  # once more after a restart, at most


# clients that leave


def left_in(front: Front, tag: str, *steps: Any, wait: bytes = b"") -> float:
    """Leave in the middle of a request; return the seconds until the backend noticed."""
    target = f"/completion?tag={tag}"
    body = script(*steps, {"gone": True}, stream=True)
    with front.raw(request_bytes(target, body)) as raw:
        until(lambda: front.requests(target), "the request to arrive")
        if wait:
            raw.until(wait)
        assert not [e for e in front.record("gone") if e["path"] == target]
        left_s = time.time()
    seen = until(lambda: [e for e in front.record("gone") if e["path"] == target], "its notice")
    return float(seen[0]["time"] - left_s)


@pytest.mark.parametrize("when", ["before-the-head", "in-a-stream", "in-a-body", "not-reading"])
def test_a_client_that_leaves_is_passed_on_to_the_backend_at_once(
    scripted: Front, when: str
) -> None:
    steps: list[Any] = {
        "before-the-head": [],
        "in-a-stream": [SSE, event(1)],
        "in-a-body": ["HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: 1\n\n\r\n"],
        "not-reading": ["HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"],
    }[when]
    waits = b"data: 1\n\n\r\n" if when.startswith("in-") else b""
    # 100 ms are promised; the bound leaves room for a machine that does other things too.
    assert left_in(scripted, when, *steps, wait=waits) < 1.0


def test_a_client_that_leaves_with_its_next_request_unread_is_noticed(scripted: Front) -> None:
    body = script({"gone": True})
    target = "/completion?tag=pipelined"
    both = request_bytes(target, body) + request_bytes("/props?tag=behind", method="GET")
    with scripted.raw(both):
        until(lambda: scripted.requests(target), "the request to arrive")
    until(lambda: [e for e in scripted.record("gone") if e["path"] == target], "its notice")
    assert scripted.requests("tag=behind") == []


def test_the_slot_of_a_client_who_left_is_busy_until_the_backend_says_otherwise(
    scripted: Front,
) -> None:
    busy = scripted.folder / "busy"
    busy.touch()
    try:
        left_in(scripted, "abandoned", SSE, event(1), wait=b"data: 1")
        until(lambda: scripted.backend()["abandoned"], "the slot to count as abandoned")
        assert scripted.backend()["in_flight"] == 0
    finally:
        busy.unlink()
    until(lambda: not scripted.backend()["abandoned"], "the slot to be free")


def test_requests_in_flight_are_counted(scripted: Front, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = script({"gate": str(gate)}, OK)
    with scripted.raw(request_bytes("/completion", body)) as raw:
        until(lambda: scripted.backend()["in_flight"] == 1, "the request to be in flight")
        gate.touch()
        assert raw.reply()[0] == 200
    until(lambda: scripted.backend()["in_flight"] == 0, "the request to be done")


# backends of other kinds


@pytest.fixture(scope="module", params=["zinc", "mlx"])
def foreign(
    request: pytest.FixtureRequest,
    scripted_llama: str,
    tiny_models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Front, str | None]]:
    """A front door before a backend that knows its model by another id, and that id."""
    kind = str(request.param)
    model = str(tiny_models / "tiny-llama.gguf") if kind == "zinc" else "org/Name"
    flags = ("-m", model, "--alias", "pub", "--device", kind)
    program = ("--zinc" if kind == "zinc" else "--mlx-server", scripted_llama)
    front = Front(tmp_path_factory.mktemp(kind), *flags, *program)
    try:
        yield front.ready(), None if kind == "zinc" else "org/Name"
    finally:
        front.stop()


def test_another_kind_of_backend_is_asked_by_its_own_id(
    foreign: tuple[Front, str | None],
) -> None:
    front, model = foreign
    assert [m["id"] for m in front.client.get("/v1/models").json()["data"]] == ["pub"]
    answer = json.dumps({"model": "/x/y.gguf", "choices": []})
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n"
    path = f"/v1/chat/completions?tag={model}"
    reply = ask(front, head + answer, path=path, model="pub", messages=["ü"])
    assert reply.json() == {"model": "pub", "choices": []}
    (seen,) = front.requests(path)
    sent = json.loads(seen["body"].encode("latin-1"))
    assert sent.get("model") == model
    assert sent["messages"] == ["ü"]


def test_a_stream_of_another_kind_of_backend_bears_our_id_in_every_event(
    foreign: tuple[Front, str | None],
) -> None:
    front, _ = foreign
    events = [{"model": "/x", "n": n, "text": "ü"} for n in range(3)]
    text = "".join(map(event, events)) + chunk("data: [DONE]\n\n") + END
    reply = ask(front, SSE, *text, stream=True, path="/v1/chat/completions", model="pub")
    assert frames(reply.text) == [{**e, "model": "pub"} for e in events] + ["[DONE]"]
    assert reply.headers["x-accel-buffering"] == "no"
    broken = raw_answer(front, SSE, event(events[0]), {"end": "close"})
    assert b'"backend_gone"' in broken
    assert not broken.endswith(END.encode())


def test_the_warm_up_of_another_kind_of_backend_is_one_chat(
    foreign: tuple[Front, str | None],
) -> None:
    front, model = foreign
    first = front.requests("/v1/chat/completions")[0]
    body = json.loads(first["body"])
    assert body.get("model") == model
    assert body["max_tokens"] == 8
    assert len(front.said("warm-up request on port")) == 1


# builds that miss departures on replies that do not stream

VARIES = ("id", "created", "timings", "generation_settings")


@pytest.fixture(scope="module")
def assembling(
    fake_llama: str, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Front, Llama]]:
    """A front door that puts replies together, and the same backend without one."""
    folder = tmp_path_factory.mktemp("assembling")
    model = str(tiny_models / "tiny-llama.gguf")
    knobs = "build=0.6.0 text=unicode tps=400"
    front = Front(folder, "-m", model, "--device=cpu", "--llama-server", fake_llama, knobs=knobs)
    plain = Llama(fake_llama, folder, "-m", model, "--alias", "tiny-llama", knobs=knobs)
    try:
        yield front.ready(), plain.ready()
    finally:
        front.stop()
        plain.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/chat/completions", {**CHAT, "max_tokens": 20}),
        ("/v1/chat/completions", {**CHAT, "stop": ["a"], "max_tokens": None}),
        ("/v1/completions", {"prompt": "once", "max_tokens": 9}),
        ("/completion", {"prompt": "once", "n_predict": 9}),
        ("/completion", {"prompt": "once", "n_predict": 9, "return_tokens": True}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5}),
        ("/v1/messages", CHAT),
        ("/v1/chat/completions", {"messages": "wrong"}),
    ],
)
def test_a_reply_that_was_put_together_equals_the_one_that_never_streamed(
    assembling: tuple[Front, Llama], path: str, body: dict[str, Any]
) -> None:
    front, plain = assembling
    ours, theirs = front.post(path, body), plain.post(path, body)
    assert ours.status_code == theirs.status_code
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    assert comparable(ours.json()) == comparable(theirs.json())


def comparable(reply: Any) -> Any:
    """Return a reply without what differs from one request to the next."""
    if isinstance(reply, list):
        return [comparable(part) for part in reply]
    if not isinstance(reply, dict):
        return reply
    kept = {k: comparable(v) for k, v in reply.items() if k not in VARIES and "_at" not in k}
    return {k: v for k, v in kept.items() if k != "id_slot"}


def test_a_client_who_leaves_a_reply_that_is_put_together_stops_the_backend(
    assembling: tuple[Front, Llama],
) -> None:
    front, _ = assembling
    body = json.dumps({**CHAT, "max_tokens": 5000}).encode()
    before = len(front.requests("/v1/chat/completions"))
    with front.raw(request_bytes("/v1/chat/completions", body)):
        until(lambda: len(front.requests("/v1/chat/completions")) > before, "the request")
    left = until(lambda: [r for r in front.record("reply") if r.get("ended") == "left"], "its end")
    assert left[-1]["tokens"] < 5000


@pytest.fixture(scope="module")
def assembling_scripts(
    scripted_llama: str, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    model = str(tiny_models / "tiny-llama.gguf")
    front = Front(
        tmp_path_factory.mktemp("assembling-scripts"),
        *("-m", model, "--device=cpu", "--llama-server", scripted_llama),
        environment={"SCRIPT_VERSION": "version: 1 (86a2835)"},
    )
    try:
        yield front.ready()
    finally:
        front.stop()


def delta(value: dict[str, Any], finish: str | None = None, **more: Any) -> str:
    choice = {"index": 0, "delta": value, "finish_reason": finish, **more}
    return event({"object": "chat.completion.chunk", "choices": [choice]})


def test_tool_calls_and_log_probabilities_are_put_together(assembling_scripts: Front) -> None:
    def call(**more: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, **more}]}

    steps = [
        delta({"role": "assistant", "content": None}),
        delta(call(id="a", type="function", function={"name": "f", "arguments": "{"})),
        delta(call(function={"arguments": "}"}), logprobs={"content": [{"token": "}"}]}),
        delta({}, "tool_calls"),
        event({"object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 2}}),
        chunk("data: [DONE]\n\n"),
        END,
    ]
    reply = ask(assembling_scripts, SSE, *steps, path="/v1/chat/completions").json()
    (choice,) = reply["choices"]
    made = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert choice["message"]["tool_calls"] == [made]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["logprobs"] == {"content": [{"token": "}"}]}
    assert reply["usage"] == {"total_tokens": 2}


def test_an_error_in_a_stream_that_is_put_together_is_an_error(assembling_scripts: Front) -> None:
    error = {"error": {"code": 500, "message": "Compute error.", "type": "server_error"}}
    reply = ask(
        assembling_scripts, SSE, delta({"content": "a"}), event(error), END, path="/completion"
    )
    assert reply.status_code == 500
    assert reply.json() == error


@pytest.mark.parametrize("pieces", [[], [delta({"content": "a"})]])
def test_a_backend_that_dies_while_a_reply_is_put_together_is_502(
    assembling_scripts: Front, pieces: list[str]
) -> None:
    reply = ask(assembling_scripts, SSE, *pieces, {"end": "close"}, path="/v1/chat/completions")
    assert reply.status_code == 502
    assert reply.json()["error"]["code"] == "backend_gone"


def test_an_event_that_is_no_json_is_502_where_a_reply_is_put_together(
    assembling_scripts: Front,
) -> None:
    steps = (SSE, chunk("data: {no json\n\n"), END, {"end": "close"})
    reply = ask(assembling_scripts, *steps, path="/v1/chat/completions")
    assert reply.status_code == 502
    assert "no JSON" in reply.json()["error"]["message"]
