from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import backend_plan

from onebit_serve.core.plan import BackendPlan, WarmUp
from onebit_serve.core.warmup import (
    SEED_TEXT,
    chat_request,
    completion_request,
    embedding_request,
    is_refused_output,
    prompt_ids,
    prompt_tokens_that_fit,
    rerank_request,
    rerank_words_that_fit,
    step_ms,
)


@pytest.mark.parametrize(
    ("context", "tokens"),
    [(None, 465), (8192, 465), (475, 465), (474, 464), (256, 246), (128, 118), (11, 1), (1, 1)],
)
def test_the_prompt_is_sized_down_to_the_context(context, tokens):
    assert prompt_tokens_that_fit(465, 8, context) == tokens


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 600))
def test_the_prompt_has_exactly_so_many_tokens_all_of_the_vocabulary(seed, tokens):
    ids = prompt_ids(seed, tokens)
    assert len(ids) == tokens
    assert set(ids) <= set(seed)


def test_a_tokenizer_that_makes_nothing_is_an_error():
    with pytest.raises(ValueError, match="no tokens"):
        prompt_ids([], 5)


def test_the_completion_is_deterministic_uncached_and_of_fixed_length():
    body = completion_request([1, 2], 8)
    assert body["prompt"] == [1, 2]
    assert body["n_predict"] == 8
    assert body["temperature"] == 0
    assert body["cache_prompt"] is False
    assert body["ignore_eos"] is True
    assert body["grammar"] == "root ::= [a-z]*"
    assert body["stream"] is True


def plan(upstream_model: str | None) -> BackendPlan:
    return backend_plan(
        name="zinc",
        device="zinc",
        kind="zinc",
        warm_up=WarmUp(prompt_tokens=100, decode_tokens=3),
        upstream_model=upstream_model,
    )


def test_a_backend_without_token_ids_is_asked_to_chat_in_words():
    body = chat_request(plan(""))
    assert len(body["messages"][0]["content"].split()) == 100
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (3, 0, True)
    assert "model" not in body
    assert chat_request(plan("org/Name"))["model"] == "org/Name"


def test_an_embedding_is_asked_for_by_token_ids_and_a_rank_by_words():
    assert embedding_request([3, 4]) == {"input": [3, 4]}
    body = rerank_request(90)
    assert len(body["documents"]) == 1
    assert len(body["documents"][0].split()) == 90


@pytest.mark.parametrize(
    ("tokens", "seed_tokens", "words"),
    [(465, 52, 449), (465, 156, 139), (465, 1, 449), (20, 156, 1), (1, 52, 1)],
)
def test_a_rank_is_asked_for_in_as_many_words_as_its_tokens_allow(tokens, seed_tokens, words):
    assert len(SEED_TEXT.split()) == 52
    assert rerank_words_that_fit(tokens, seed_tokens) == words


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        (b"The model produced output that does not match the expected Content-only format", True),
        (b'{"error":{"message":"output that does not match the expected peg format"}}', True),
        (b"Compute error.", False),
        (b"", False),
    ],
)
def test_only_the_refusal_of_meaningless_text_counts_as_done(said, refused):
    assert is_refused_output(said) is refused


def test_a_decode_step_is_timed_without_the_token_of_the_prefill():
    assert step_ms(8, 140.0) == pytest.approx(20.0)
    assert step_ms(1, 0.01) == 0
    assert step_ms(0, 0.0) == 0
