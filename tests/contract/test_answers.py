"""What a loaded llama-server answers, of what we build on; the fake answers the same."""

from __future__ import annotations

import socket
from typing import Any

import openai
import pytest
from llama_process import DEADLINE_S, Llama, frames, received, until

TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}


def streamed(llama: Llama, path: str, **body: Any) -> tuple[str, list[Any]]:
    """Return the content type and the events of a streamed answer."""
    answer = llama.post(path, {"stream": True, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.headers["content-type"], frames(answer.text)


def said(content: str = "hi") -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def ids(first: int, count: int) -> list[int]:
    """Return ids of ordinary text in both vocabularies, another run for each `first`."""
    return [300 + (first * 37 + n * 11) % 600 for n in range(count)]


def test_health_is_ok(served: Llama) -> None:
    answer = served.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert served.get("/v1/health").status_code == 200


def test_a_head_request_gets_the_head_alone(served: Llama) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S) as sock:
        sock.sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(received(sock))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b""


def test_an_unknown_route_is_not_found_and_closes_the_connection(served: Llama) -> None:
    answer = served.get("/nope")
    assert answer.status_code == 404
    assert answer.headers["connection"] == "close"
    error = {"message": "File Not Found", "type": "not_found_error", "code": 404}
    assert answer.json() == {"error": error}


def test_the_first_alias_is_the_id_and_the_vocabulary_is_told(served: Llama) -> None:
    entry = served.get("/v1/models").json()["data"][0]
    assert entry["id"] == "pub"
    assert entry["aliases"] == ["pub", "second"]
    assert entry["meta"]["n_vocab"] > 1000
    assert entry["meta"]["n_ctx"] == 512


def test_props_tell_slots_context_and_template(served: Llama) -> None:
    props = served.get("/props").json()
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["model_alias"] == "pub"
    assert props["model_path"].endswith(".gguf")
    assert "message" in props["chat_template"]
    assert props["build_info"].startswith("b")
    assert props["is_sleeping"] is False


def test_slots_tell_what_they_do(served: Llama) -> None:
    served.complete(ids(1, 20), id_slot=0)
    slots = served.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert {"n_ctx", "is_processing", "id_task", "next_token"} <= set(slots[0])
    assert slots[0]["is_processing"] is False
    assert slots[0]["next_token"][0]["n_decoded"] == 2


def test_tokens_become_the_same_text_again(served: Llama) -> None:
    text = "Hello wörld 世界 🎉\n\nagain"
    tokens = served.post("/tokenize", {"content": text}).json()["tokens"]
    assert all(isinstance(token, int) for token in tokens)
    assert served.post("/detokenize", {"tokens": tokens}).json() == {"content": text}


def test_tokenize_gives_pieces_and_takes_no_content(served: Llama) -> None:
    pieces = served.post("/tokenize", {"content": "ab", "with_pieces": True}).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "ab"
    assert served.post("/tokenize", {}).json() == {"tokens": []}


def test_the_template_renders_and_its_tokens_are_those_of_the_chat(served: Llama) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *said("Hello there")]
    text = served.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert "Be kind." in text
    assert "Hello there" in text
    body = {"messages": messages, "add_generation_prompt": False}
    open_end = served.post("/apply-template", body).json()["prompt"]
    assert text.startswith(open_end)
    assert len(text) > len(open_end)
    wanted = {"content": text, "add_special": True, "parse_special": True}
    tokens = served.post("/tokenize", wanted).json()["tokens"]
    chat = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == len(tokens)
    sent = served.complete(tokens, n_predict=1, id_slot=0)
    again = served.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "id_slot": 0}
    ).json()
    assert sent["tokens_evaluated"] == len(tokens)
    assert again["timings"]["cache_n"] == len(tokens) - 1


def test_a_completion_of_ids_counts_and_times_itself(served: Llama) -> None:
    answer = served.complete(ids(2, 30), n_predict=3, temperature=0, id_slot=1, return_tokens=True)
    timings = answer["timings"]
    assert set(timings) >= TIMINGS
    assert timings["cache_n"] + timings["prompt_n"] == answer["tokens_evaluated"] == 30
    assert timings["predicted_n"] == answer["tokens_predicted"] == len(answer["tokens"]) == 3
    assert timings["prompt_ms"] > 0
    assert answer["id_slot"] == 1
    assert answer["stop_type"] == "limit"
    assert answer["model"] == "pub"
    assert answer["generation_settings"]["temperature"] == 0
    assert answer["tokens_cached"] == 32


@pytest.mark.parametrize("wanted", [0, 1])
def test_no_token_and_one_token_are_the_same(served: Llama, wanted: int) -> None:
    answer = served.complete(ids(3, 10), n_predict=wanted)
    assert answer["tokens_predicted"] == 1
    assert answer["timings"]["predicted_ms"] == pytest.approx(0.001)


def test_the_same_prompt_again_computes_one_token(served: Llama) -> None:
    prompt = ids(4, 40)
    served.complete(prompt, id_slot=0)
    timings = served.complete(prompt, id_slot=0)["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (39, 1)


def test_a_prefix_is_reused_as_far_as_it_goes(served: Llama) -> None:
    prompt = ids(5, 40)
    served.complete(prompt, id_slot=0, n_predict=1)
    timings = served.complete([*prompt[:25], *ids(6, 10)], id_slot=0)["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (25, 10)


def test_an_unpinned_prompt_goes_to_the_slot_that_shares_its_head(served: Llama) -> None:
    prompt = ids(7, 60)
    served.complete(prompt, id_slot=1)
    served.complete(ids(8, 60), id_slot=0)
    assert served.complete([*prompt[:50], 950, 951])["id_slot"] == 1


def test_what_another_prompt_displaces_comes_back_from_the_host_cache(served: Llama) -> None:
    prompt = ids(9, 80)
    served.complete(prompt, n_predict=1)
    for other in range(20, 24):
        served.complete(ids(other, 70), n_predict=1)
    assert served.complete(prompt, n_predict=1)["timings"]["cache_n"] >= 75


def test_without_the_prompt_cache_nothing_is_reused(served: Llama) -> None:
    prompt = ids(10, 30)
    served.complete(prompt, id_slot=0)
    assert served.complete(prompt, id_slot=0, cache_prompt=False)["timings"]["cache_n"] == 0
    assert served.complete(prompt, id_slot=0)["timings"]["cache_n"] == 29


def test_a_slot_number_above_the_count_wraps(served: Llama) -> None:
    assert served.complete(ids(11, 5), id_slot=9)["id_slot"] == 1


def test_several_prompts_get_a_list_of_answers(served: Llama) -> None:
    answers = served.post("/completion", {"prompt": ["one", "two"], "n_predict": 1}).json()
    assert [answer["prompt"][-3:] for answer in answers] == ["one", "two"]


def test_text_and_ids_mix_in_one_prompt(served: Llama) -> None:
    answer = served.complete(["ab", 310, 311], n_predict=1)
    assert answer["tokens_evaluated"] >= 3


def test_the_letters_grammar_gives_letters(served: Llama) -> None:
    answer = served.complete(ids(12, 12), n_predict=8, grammar="root ::= [a-z]*")
    assert answer["content"] == "" or answer["content"].isalpha()


def test_a_literal_grammar_forces_its_text(served: Llama) -> None:
    answer = served.complete("say", n_predict=20, temperature=0, grammar='root ::= "red blue"')
    assert answer["content"] == "red blue"
    assert answer["stop_type"] == "eos"


def test_a_streamed_completion_is_one_event_a_token_and_no_done(served: Llama) -> None:
    kind, events = streamed(served, "/completion", prompt=ids(13, 20), n_predict=3)
    assert kind == "text/event-stream"
    assert [event["stop"] for event in events] == [False, False, False, True]
    assert [len(event["tokens"]) for event in events] == [1, 1, 1, 0]
    assert [event["tokens_predicted"] for event in events] == [1, 2, 3, 3]
    assert set(events[-1]["timings"]) >= TIMINGS
    assert events[-1]["content"] == ""
    assert events[0]["id_slot"] == -1
    assert events[-1]["id_slot"] in {0, 1}


def test_a_streamed_chat_is_role_content_finish_done(served: Llama) -> None:
    _, events = streamed(served, "/v1/chat/completions", messages=said(), max_tokens=3)
    first, *middle, finish, done = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert all(event["choices"][0]["delta"]["content"] for event in middle)
    assert finish["choices"][0] == {"finish_reason": "length", "index": 0, "delta": {}}
    assert set(finish["timings"]) >= TIMINGS
    assert done == "[DONE]"
    assert {event["model"] for event in events[:-1]} == {"pub"}
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events[:-1]}) == 1


def test_usage_takes_the_timings_to_a_chunk_of_its_own(served: Llama) -> None:
    options = {"include_usage": True}
    _, events = streamed(
        served, "/v1/chat/completions", messages=said(), max_tokens=3, stream_options=options
    )
    finish, usage, done = events[-3:]
    assert "timings" not in finish
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    details = usage["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == usage["timings"]["cache_n"]
    assert done == "[DONE]"


def test_progress_comes_before_the_role(served: Llama) -> None:
    prompt = "word " * 60
    _, events = streamed(
        served,
        "/v1/chat/completions",
        messages=said(prompt),
        max_tokens=1,
        return_progress=True,
        cache_prompt=False,
    )
    progress = [e["prompt_progress"] for e in events if "prompt_progress" in e]
    assert "prompt_progress" in events[0]
    assert progress[0]["processed"] == progress[0]["cache"] == 0
    assert progress[-1]["processed"] == progress[-1]["total"]
    assert events[len(progress)]["choices"][0]["delta"]["role"] == "assistant"


def test_progress_of_a_completion_has_no_content(served: Llama) -> None:
    _, events = streamed(
        served, "/completion", prompt=ids(14, 30), n_predict=1, return_progress=True
    )
    assert events[0]["content"] == ""
    assert events[0]["prompt_progress"]["total"] == 30


def test_timings_can_come_with_every_token(served: Llama) -> None:
    _, events = streamed(
        served, "/completion", prompt=ids(15, 30), n_predict=3, timings_per_token=True
    )
    assert [event["timings"]["predicted_n"] for event in events] == [1, 2, 3, 3]


def test_openai_completions_stream_text_and_end_with_usage(served: Llama) -> None:
    _, events = streamed(served, "/v1/completions", prompt="abc", max_tokens=2)
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "length"]
    assert events[-2]["usage"]["completion_tokens"] == 2
    assert events[-1] == "[DONE]"
    whole = served.post("/v1/completions", {"prompt": "abc", "max_tokens": 2}).json()
    assert whole["object"] == "text_completion"
    assert set(whole["timings"]) >= TIMINGS


def test_a_whole_chat_answer(served: Llama) -> None:
    answer = served.chat(model="somebody-else").json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "pub"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["finish_reason"] in {"length", "stop"}
    usage = answer["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert set(answer["timings"]) >= TIMINGS


def test_the_connection_closes_after_a_stream_without_a_word(served: Llama) -> None:
    with served.open_stream("/completion", {"prompt": ids(16, 5), "n_predict": 1}) as sock:
        answer = b"".join(received(sock))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Keep-Alive: timeout=5, max=100" in head
    assert b"Transfer-Encoding: chunked" in head
    assert body.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {}, "'messages' is required"),
        ("/completion", {}, "key 'prompt' not found"),
        ("/completion", {"prompt": []}, '"prompt" must not be empty'),
        ("/completion", {"prompt": [99_999_999]}, "Prompt contains invalid tokens"),
    ],
)
def test_a_bad_request_is_400_and_json_also_when_it_asked_for_a_stream(
    served: Llama, path: str, body: dict[str, Any], message: str, *, stream: bool
) -> None:
    answer = served.post(path, {**body, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)


def test_a_body_that_is_no_json_is_an_error(served: Llama) -> None:
    answer = served.client.post("/v1/chat/completions", content=b"{bad")
    assert answer.status_code in {400, 500}
    assert "parse_error.101" in answer.json()["error"]["message"]


def test_a_prompt_of_the_whole_context_is_too_long_and_one_less_fits(served: Llama) -> None:
    answer = served.post("/completion", {"prompt": ids(17, 512), "stream": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (512, 512)
    assert served.complete(ids(17, 511), n_predict=1)["tokens_evaluated"] == 511


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/embeddings"), ("POST", "/v1/rerank"), ("GET", "/metrics")],
)
def test_what_was_not_switched_on_is_501(served: Llama, method: str, path: str) -> None:
    answer = served.client.request(method, path, json={"input": "x", "query": "x"})
    assert answer.status_code == 501
    assert answer.json()["error"]["type"] == "not_supported_error"
    assert "Start it with `--" in answer.json()["error"]["message"]


def test_a_preflight_is_answered(served: Llama) -> None:
    origin = {"Origin": "http://example.test"}
    answer = served.client.options("/v1/chat/completions", headers=origin)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://example.test"
    assert "POST" in answer.headers["access-control-allow-methods"]


def test_a_chunked_body_is_understood(served: Llama) -> None:
    answer = served.client.post("/tokenize", content=iter([b'{"content":', b'"abc"}']))
    assert len(answer.json()["tokens"]) == 1


def test_one_connection_takes_many_requests(served: Llama) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=DEADLINE_S) as sock:
        for _ in range(5):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += sock.recv(65536)


def test_a_request_may_ask_for_the_connection_to_close(served: Llama) -> None:
    answer = served.get("/health", headers={"Connection": "close"})
    assert answer.headers["connection"] == "close"


def test_a_client_that_leaves_a_stream_frees_the_slot(served: Llama) -> None:
    until(lambda: not served.busy(), "idle slots")
    body = {"prompt": "once", "n_predict": 400, "ignore_eos": True}
    with served.open_stream("/completion", body) as sock:
        next(received(sock))
        assert served.busy() == 1
    until(lambda: not served.busy(), "the slot to be free again", 20)


def test_a_client_that_leaves_a_plain_request_frees_the_slot(served: Llama) -> None:
    until(lambda: not served.busy(), "idle slots")
    body = {"prompt": "once", "n_predict": 400, "ignore_eos": True, "stream": False}
    with served.open_stream("/completion", body):
        until(served.busy, "a busy slot")
    until(lambda: not served.busy(), "the slot to be free again", 20)


def test_slots_are_saved_erased_and_restored(served: Llama) -> None:
    prompt = ids(18, 50)
    served.complete(prompt, id_slot=0, n_predict=1)
    saved = served.post("/slots/0?action=save", {"filename": "a.bin"}).json()
    assert saved["n_saved"] == 50
    erased = served.post("/slots/0?action=erase").json()
    assert erased == {"id_slot": 0, "n_erased": 50}
    restored = served.post("/slots/0?action=restore", {"filename": "a.bin"}).json()
    assert restored["n_restored"] == 50
    timings = served.complete([*prompt, 950, 951], id_slot=0)["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (50, 2)
    refused = served.post("/slots/0?action=restore", {"filename": "b.bin"})
    assert refused.status_code == 400
    assert served.post("/slots/0?action=save", {"filename": "a/b"}).status_code == 400


def test_responses_and_messages_are_served_too(served: Llama) -> None:
    responses = served.post("/v1/responses", {"input": "hi", "max_output_tokens": 2}).json()
    assert responses["output"][0]["content"][0]["type"] == "output_text"
    assert responses["usage"]["output_tokens"] == 2
    messages = served.post("/v1/messages", {"max_tokens": 2, "messages": said()}).json()
    assert messages["content"][0]["type"] == "text"
    assert messages["stop_reason"] == "max_tokens"
    counted = served.post("/v1/messages/count_tokens", {"messages": said()}).json()
    usage = messages["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_their_streams_name_their_events(served: Llama) -> None:
    _, events = streamed(served, "/v1/responses", input="hi", max_output_tokens=2)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    _, events = streamed(served, "/v1/messages", max_tokens=2, messages=said())
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_delta") == 2


def test_the_openai_client_works(served: Llama) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=DEADLINE_S) as client:
        assert [model.id for model in client.models.list()] == ["pub"]
        whole = client.chat.completions.create(
            model="pub",
            messages=said(),
            max_tokens=3,
            temperature=0,  # type: ignore[arg-type]
        )
        parts = client.chat.completions.create(
            model="pub",
            messages=said(),
            max_tokens=3,
            temperature=0,
            stream=True,  # type: ignore[arg-type]
        )
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert text
