from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onebit_serve.core import prompts
from onebit_serve.core.errors import UsageError
from onebit_serve.core.prompts import Prompt

# a busy machine is no fault of the code
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(("name", "least", "most"), [("short", 60, 120), ("medium", 1200, 1700)])
def test_our_own_sets_hold_one_user_message_of_their_size(name, least, most):
    (prompt,) = prompts.built_in(name)
    (message,) = prompt.messages
    assert message["role"] == "user"
    assert least <= len(message["content"]) <= most


def test_the_long_set_is_long_and_always_the_same():
    (text,) = (m["content"] for m in prompts.built_in("long")[0].messages)
    assert 7000 <= len(text) <= 8000  # 2,532 tokens of SmolLM2
    assert text == prompts.built_in("long")[0].messages[0]["content"]
    assert len(set(text.splitlines())) == len(text.splitlines()) > 50


def test_a_file_may_mix_texts_conversations_and_objects():
    text = (
        '["hello", [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],'
        ' {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}], "name": "n"}],'
        ' "id": 7}]'
    )
    first, second, third = prompts.parse(text, name="p.json")
    assert first == Prompt(({"role": "user", "content": "hello"},), "entry 1")
    assert [m["role"] for m in second.messages] == ["system", "user"]
    assert third.messages[0]["name"] == "n"


def test_a_list_under_prompts_and_a_byte_order_mark_are_understood():
    assert len(prompts.parse('\ufeff{"prompts": ["a", "b"]}', name="p")) == 2


def test_an_assistant_message_of_tool_calls_needs_no_content():
    text = (
        '[[{"role": "user", "content": "u"},'
        ' {"role": "assistant", "content": null, "tool_calls": []}]]'
    )
    assert len(prompts.parse(text, name="p")[0].messages) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ('["a",\n"b"', "line 2 column"),
        ("[" * 100_000, "not JSON"),
        ("{}", "a list is needed at the top, not an object"),
        ('"a"', "not a text"),
        ("null", "not null"),
        ("[]", "the list is empty"),
        ('["a", ""]', "entry 2: the text is empty"),
        ('["a", 3]', "entry 2: a text or a list of messages is needed, not a number"),
        ('["a", true]', "entry 2: .* not a truth value"),
        ('["a", []]', "entry 2: there are no messages"),
        ('[{"text": "a"}]', "entry 1: the object has no `messages`"),
        ('[{"messages": {}}]', "entry 1: .* not an object"),
        ('[[{"role": "user", "content": "a"}, "b"]]', "entry 1, message 2: an object is needed"),
        ('[[{"content": "a"}]]', "entry 1, message 1: `role` must be a text, not null"),
        ('[[{"role": 1, "content": "a"}]]', "message 1: `role` must be a text, not a number"),
        ('[[{"role": "user"}]]', "message 1: `content` must be a text, not null"),
        (r'["a", "b\ud800"]', "entry 2: it cannot be sent: .*surrogates not allowed"),
        ('[[{"role": "user", "content": {}}]]', "`content` must be a text, not an object"),
    ],
)
def test_a_wrong_shape_is_said_with_its_place(text, said):
    with pytest.raises(UsageError, match=said) as caught:
        prompts.parse(text, name="p.json")
    assert "prompts file p.json" in caught.value.message
    assert "JSON list" in caught.value.hint


def test_the_unique_prefix_starts_the_first_user_message_and_leaves_the_rest_alone():
    prompt = Prompt(
        (
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "user", "content": "v"},
        )
    )
    sent = prompts.prepare(prompt, unique="one two: ")
    assert [m["content"] for m in sent] == ["s", "one two: u", "v"]
    assert prompt.messages[1]["content"] == "u"


def test_a_conversation_without_a_user_gets_the_prefix_at_its_start():
    prompt = Prompt(({"role": "tool", "content": "x"},))
    assert prompts.prepare(prompt, unique="a: ")[0]["content"] == "a: x"


def test_content_in_parts_gets_the_prefix_as_a_part():
    prompt = Prompt(({"role": "user", "content": [{"type": "text", "text": "u"}]},))
    sent = prompts.prepare(prompt, unique="a: ")[0]["content"]
    assert [part["text"] for part in sent] == ["a: ", "u"]


def test_a_system_prompt_is_put_before_and_joined_to_one_that_is_there():
    user = {"role": "user", "content": "u"}
    assert prompts.prepare(Prompt((user,)), system="S")[0] == {"role": "system", "content": "S"}
    own = Prompt(({"role": "system", "content": "own"}, user))
    sent = prompts.prepare(own, system="S")
    assert [m["content"] for m in sent] == ["S\n\nown", "u"]


@patient
@given(st.integers(0, 2**42 - 1), st.integers(0, 2**42 - 1))
def test_prefixes_are_unique_and_of_seven_words(one, other):
    assert (prompts.prefix(one) == prompts.prefix(other)) == (one == other)
    assert len(prompts.prefix(one).split()) == 7


def test_neighbouring_prefixes_differ_in_their_first_word():
    first = [prompts.prefix(number).split()[0] for number in range(64)]
    assert len(set(first)) == 64
