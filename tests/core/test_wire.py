from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebit_serve.core.wire import (
    Assembler,
    EventReader,
    Peek,
    Refusal,
    as_stream,
    error_event,
    peek,
    rename,
    with_model,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def stream(*events: object) -> bytes:
    """Return events as llama-server writes them, with the end of OpenAI's streams."""
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return data + b"data: [DONE]\n\n"


def assembled(*events: object) -> dict:
    assembler = Assembler()
    assembler.feed(stream(*events))
    return json.loads(assembler.body())


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (503, "unavailable_error")],
)
def test_a_refusal_is_an_envelope_of_openai(status, kind):
    body = json.loads(Refusal(status, "no", "why").body())
    assert body == {"error": {"message": "no", "type": kind, "code": "why"}}


def test_a_status_without_a_word_of_its_own_is_a_server_error():
    assert Refusal(502, "", "").type == "server_error"


def test_an_error_in_a_stream_is_one_event():
    refusal = Refusal(502, "gone\n\nfor good", "backend_gone")
    events = list(EventReader().feed(error_event(refusal)))
    assert events == [refusal.body()]


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (b'{"model":"m","stream":true,"messages":[1]}', Peek("m", stream=True)),
        (b'{"stream":false}', Peek()),
        (b'{"model":null,"stream":null}', Peek()),
        (b'{"model":7}', Peek()),
        (b'{"stream":"yes","model":"m"}', Peek()),
        (b"[1]", Peek()),
        (b"{", Peek()),
        (b"\xff\xfe", Peek()),
        (b"[" * 100_000, Peek()),
        (b"", Peek()),
    ],
)
def test_a_peek_sees_model_and_stream_or_nothing(body, seen):
    assert peek(body) == seen


@given(st.binary())
def test_no_body_breaks_a_peek(body):
    assert isinstance(peek(body), Peek)


def test_the_model_is_replaced_or_taken_out():
    body = b'{"model":"a","n":[1,{"x":null}]}'
    assert json.loads(with_model(body, "b")) == {"model": "b", "n": [1, {"x": None}]}
    assert json.loads(with_model(body, "")) == {"n": [1, {"x": None}]}


@pytest.mark.parametrize("body", [b"[1]", b"nonsense", b"", b"[" * 100_000])
def test_a_body_without_a_model_to_replace_stays_as_it_is(body):
    assert with_model(body, "b") == body


def test_a_reply_is_renamed_only_where_it_names_a_model():
    assert json.loads(rename(b'{"model":"/x.gguf","id":1}', "m")) == {"model": "m", "id": 1}
    for body in (b'{"id": 1}', b"[DONE]", b"[1]"):
        assert rename(body, "m") == body


@given(st.lists(JSON, max_size=4), st.integers(1, 7))
def test_events_are_the_same_wherever_the_bytes_are_cut(values, size):
    data, reader, found = stream(*values), EventReader(), []
    for at in range(0, len(data), size):
        found += reader.feed(data[at : at + size])
    assert [json.loads(event) for event in found[:-1]] == values
    assert found[-1] == b"[DONE]"


def test_comments_fields_and_line_ends_of_events_are_understood():
    reader = EventReader()
    data = b": ping\n\nevent: x\r\ndata: one\r\ndata:two\r\n\r\nid: 3\n\ndata:\n\n"
    assert list(reader.feed(data)) == [b"one\ntwo", b""]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", b'{"input":"x"}'),
        ("/v1/responses", b'{"input":"x"}'),
        ("/v1/chat/completions", b'{"n":2}'),
        ("/v1/chat/completions", b"nonsense"),
        ("/v1/chat/completions", b"[1]"),
        ("/completion", b'{"prompt":["a","b"]}'),
        ("/completion", b'{"prompt":[[1],[2]]}'),
    ],
)
def test_what_cannot_be_put_together_is_not_asked_for_as_a_stream(path, body):
    assert as_stream(path, body) is None


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("/v1/chat/completions", True),
        ("/chat/completions", True),
        ("/v1/completions", True),
        ("/completion", False),
        ("/completions", False),
    ],
)
def test_a_reply_is_asked_for_as_a_stream_with_its_usage(path, usage):
    asked = json.loads(as_stream(path, b'{"prompt":[1,2],"n":1}'))
    wanted = {"prompt": [1, 2], "n": 1, "stream": True}
    assert asked == wanted | ({"stream_options": {"include_usage": True}} if usage else {})


def chunk(delta: dict | None, finish: str | None = None, **more: object) -> dict:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more.pop("choice", {})}
    choices = [] if delta is None else [choice]
    return {"id": "1", "object": "chat.completion.chunk", "choices": choices, **more}


def test_a_chat_is_put_together_from_its_deltas():
    whole = assembled(
        chunk({"role": "assistant", "content": None}),
        chunk({"reasoning_content": "hm"}),
        chunk({"reasoning_content": "m"}),
        chunk({"content": "Grü"}),
        chunk({"content": "ße"}),
        chunk({}, "stop"),
        chunk(None, usage={"total_tokens": 3}, timings={"prompt_n": 1}),
    )
    assert whole == {
        "id": "1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Grüße",
                    "reasoning_content": "hmm",
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {"total_tokens": 3},
        "timings": {"prompt_n": 1},
    }


def call(index: int, **more: object) -> dict:
    return chunk({"tool_calls": [{"index": index, **more}]})


def test_tool_calls_are_put_together_by_their_index():
    whole = assembled(
        chunk({"role": "assistant", "content": None}),
        call(0, id="a", type="function", function={"name": "f", "arguments": ""}),
        call(0, function={"arguments": '{"x"'}),
        call(1, id="b", type="function", function={"name": "g", "arguments": "{}"}),
        call(0, function={"arguments": ":1}"}),
        chunk({}, "tool_calls"),
    )
    message = whole["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


def test_log_probabilities_of_a_chat_are_joined():
    first = {"logprobs": {"content": [{"token": "a"}]}}
    second = {"logprobs": {"content": [{"token": "b"}]}}
    whole = assembled(
        chunk({"content": "a"}, choice=first),
        chunk({"content": "b"}, choice=second),
        chunk({}, "length"),
    )
    assert whole["choices"][0]["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}]}


def test_a_completion_of_openai_is_put_together():
    def piece(text: str, finish: str | None, **more: object) -> dict:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
        return {"object": "text_completion", "choices": [choice], **more}

    whole = assembled(piece("a", None), piece("b", None), piece("", "length", usage={"n": 2}))
    choice = {"text": "ab", "index": 0, "logprobs": None, "finish_reason": "length"}
    assert whole == {"object": "text_completion", "choices": [choice], "usage": {"n": 2}}


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [(b"{}", []), (b'{"return_tokens":false}', []), (b'{"return_tokens":true}', [1, 2])],
)
def test_a_completion_of_llama_server_is_put_together(request_, tokens):
    assembler = Assembler(request_)
    assembler.feed(
        stream(
            {"index": 0, "content": "a", "tokens": [1], "stop": False},
            {"index": 0, "content": "b", "tokens": [2], "stop": False},
            {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": "limit"},
        )
    )
    wanted = {"content": "ab", "tokens": tokens, "stop": True, "stop_type": "limit"}
    assert json.loads(assembler.body()) == {"index": 0, **wanted}


def test_an_error_among_the_events_is_kept():
    assembler = Assembler()
    assembler.feed(stream(chunk({"content": "a"}), {"error": {"code": 500, "message": "bad"}}))
    assert assembler.error == {"code": 500, "message": "bad"}
    assert json.loads(assembler.body()) == {"error": assembler.error}
