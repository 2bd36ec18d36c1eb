from __future__ import annotations

import json

import pytest

from onebit_serve.core.errors import ConfigError
from onebit_serve.core.laya import (
    BadAnswerError,
    Choice,
    Decision,
    DecisionCache,
    Tally,
    by_size,
    decide,
    opening,
    question,
    read_answer,
    scorer_port,
)
from onebit_serve.core.policy import Routes

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Write a function."}
ROUTES = Routes(
    "hrx",
    {"code": "vulkan", "prose": "hrx", "short": "cpu", "long_doc": "hrx"},
    {"code": "it decodes faster there"},
)


def read(path, body):
    return opening(path, json.dumps(body).encode())


def parts(*texts, kind="text"):
    return [{"type": kind, "text": text} for text in texts]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/chat/completions", {"messages": [SYSTEM, USER]}, "Write a function."),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}, *parts("a", "b")]}]},
            "a\nb",
        ),
        ("/v1/chat/completions", {"messages": [SYSTEM]}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, None),
        ("/v1/chat/completions", {"messages": [7, USER]}, "Write a function."),
        ("/v1/completions", {"prompt": "Once"}, "Once"),
        ("/v1/completions", {"prompt": ["Once", "Twice"]}, "Once"),
        ("/completion", {"prompt": [1, 2, 3]}, None),
        ("/completion", {"prompt": [1, "Once"]}, "Once"),
        ("/v1/responses", {"input": "Hello"}, "Hello"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": parts("Hello", kind="input_text")}]},
            "Hello",
        ),
        ("/v1/messages", {"system": "x", "messages": [{**USER, "content": parts("hi")}]}, "hi"),
    ],
)
def test_the_first_user_message_is_what_is_judged(path, body, text) -> None:
    assert read(path, body).text == text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", b'{"input": "x"}'),
        ("/tokenize", b'{"content": "x"}'),
        ("/v1/chat/completions", b"{"),
        ("/v1/chat/completions", b"[]"),
        ("/v1/chat/completions", b'{"messages": 1}'),
    ],
)
def test_what_is_no_conversation_is_not_routed(path, body) -> None:
    assert opening(path, body) is None


def test_later_turns_have_the_key_of_the_first() -> None:
    path = "/v1/chat/completions"
    first = read(path, {"messages": [SYSTEM, USER]})
    reply = {"role": "assistant", "content": "def f(): ..."}
    turned = {"content": "Write a function.", "role": "user"}
    later = read(path, {"messages": [SYSTEM, turned, reply, USER], "temperature": 1})
    assert later.key == first.key
    assert (first.first_turn, later.first_turn) == (True, False)


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        (
            "/v1/messages",
            {"system": "s", "messages": [USER]},
            {
                "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
                "messages": [USER],
            },
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": parts("hi")}]},
            {"messages": [{"role": "user", "content": "hi"}]},
        ),
        ("/v1/responses", {"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_however_a_client_writes_an_opening_its_key_is_the_same(path, one, other) -> None:
    assert read(path, one).key == read(path, other).key


@pytest.mark.parametrize("levels", [980, 990, 995, 5000])
def test_what_is_nested_deeply_goes_to_the_default(levels) -> None:
    deep = b'{"messages":[{"role":"user","content":[' + b"[" * levels + b"]" * levels + b"]}]}"
    found = opening("/v1/chat/completions", deep)
    assert found is not None
    assert found.text is None


def test_a_mark_before_the_body_changes_nothing() -> None:
    body = json.dumps({"messages": [USER]}).encode()
    path = "/v1/chat/completions"
    assert opening(path, b"\xef\xbb\xbf" + body) == opening(path, body)


def test_a_failure_is_no_answer_to_remember() -> None:
    cache = DecisionCache()
    assert cache.put("k", Choice("", failed=True)).failed
    assert cache.put("k", Choice("code", 0.7)).kind == "code"
    assert cache.put("k", Choice("", failed=True)).kind == "code"


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        ("/v1/chat/completions", {"messages": [SYSTEM, USER]}, {"messages": [USER]}),
        (
            "/v1/messages",
            {"system": "a", "messages": [USER]},
            {"system": "b", "messages": [USER]},
        ),
        ("/v1/responses", {"input": "x", "instructions": "a"}, {"input": "x"}),
        ("/v1/completions", {"prompt": "a"}, {"prompt": "b"}),
    ],
)
def test_other_openings_have_other_keys(path, one, other) -> None:
    assert read(path, one).key != read(path, other).key


def test_a_text_of_1024_code_points_is_a_long_document_without_asking() -> None:
    assert by_size("é" * 1023) is None
    assert by_size("😀" * 1024).kind == "long_doc"
    assert by_size("é" * 1024).confidence is None


def test_the_question_names_three_classes_and_the_text() -> None:
    asked = question("hi", "laya-english")
    assert (asked["state"], asked["model"]) == ("hi", "laya-english")
    ((_, only),) = asked["questions"].items()
    assert only["type"] == "choice"
    assert set(only["criteria"]) == {"code", "prose", "short"}


def answer(choice="code", probabilities=(0.8, 0.1, 0.1), **more):
    shares = dict(zip(("code", "prose", "short"), probabilities, strict=True))
    return {"answers": {"kind": {"choice": choice, "probabilities": shares, **more}}}


def test_an_answer_is_a_class_with_its_confidence() -> None:
    assert read_answer(answer(confidence=0.71)) == Choice("code", 0.71, "asked Laya")


@pytest.mark.parametrize(
    ("probabilities", "confidence"),
    [((1 / 3, 1 / 3, 1 / 3), 0.0), ((1, 0, 0), 1.0), ((0.8, 0.1, 0.1), 0.418)],
)
def test_a_confidence_that_is_missing_is_taken_from_the_probabilities(
    probabilities, confidence
) -> None:
    found = read_answer(answer(probabilities=probabilities)).confidence
    assert found == pytest.approx(confidence, abs=0.001)


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        7,
        [],
        {},
        {"answers": {}},
        {"answers": {"kind": "code"}},
        {"answers": {"kind": {"choice": "code"}}},
        answer("poetry", confidence=0.5),
        answer(["code"], confidence=0.5),
        answer(confidence=1.5),
        answer(confidence=-0.1),
        answer(confidence=float("nan")),
        answer(confidence="0.9"),
        answer(confidence=True),
        answer(probabilities=(0.8, 0.8, 0.8), confidence=0.5),
        answer(probabilities=(0.1, 0.1, 0.8), confidence=0.5),
        answer(probabilities=("a", 0, 0), confidence=0.5),
        answer(probabilities=(float("nan"), 0, 0), confidence=0.5),
        {"answers": {"kind": {"choice": "code", "probabilities": {"code": 1}, "confidence": 1}}},
    ],
)
def test_nonsense_is_no_answer(nonsense) -> None:
    with pytest.raises(BadAnswerError):
        read_answer(nonsense)


@pytest.mark.parametrize(
    ("choice", "header"),
    [
        (Choice("code", 0.71), "code 0.71 vulkan"),
        (Choice("short", 0.16), "short 0.16 cpu"),
        (Choice("short", 0.1599), "default - hrx"),
        (Choice("long_doc"), "long_doc - hrx"),
        (Choice("", why="Laya is down"), "default - hrx"),
    ],
)
def test_the_header_is_three_words(choice, header) -> None:
    assert decide(choice, ROUTES).header == header


def test_a_decision_says_why() -> None:
    assert decide(Choice("code", 0.71, "asked Laya"), ROUTES).why == (
        "asked Laya: it decodes faster there"
    )
    assert decide(Choice("prose", 0.02), ROUTES).why == "prose with confidence 0.02, below 0.16"


def test_conversations_are_remembered_up_to_a_limit_the_longest_unused_go_first() -> None:
    cache = DecisionCache(limit=2)
    cache.put("a", Choice("code"))
    cache.put("b", Choice("prose"))
    assert cache.get("a") == Choice("code")
    cache.put("c", Choice("short"))
    assert len(cache) == 2
    assert cache.get("b") is None
    assert cache.get("a") == Choice("code")


def test_the_first_of_two_turns_decides() -> None:
    cache = DecisionCache()
    cache.put("a", Choice("code"))
    assert cache.put("a", Choice("prose")) == Choice("code")


def test_counts_are_kept_by_class_and_device() -> None:
    tally = Tally()
    code = Decision("code", "vulkan", 0.7)
    tally.asked = 1
    tally.decided(code, 0.025)
    tally.decided(Decision("code", "vulkan", 0.7, remembered=True), 0.0)
    tally.replied(code, 0.5, 2.0)
    tally.failed("slow")
    view = tally.view()
    assert view["asked"] == 1
    assert view["failures"] == {"slow": 1}
    (row,) = view["routes"]
    assert (row["class"], row["device"], row["decisions"], row["remembered"]) == (
        "code",
        "vulkan",
        2,
        1,
    )
    assert (row["decide_most_s"], row["replies"], row["reply_s"]) == (0.025, 1, 2.0)
    samples = {name: (labels, value) for name, labels, value in tally.samples()}
    assert samples["route_decisions_total"] == ({"class": "code", "device": "vulkan"}, 2)
    assert samples["laya_failures_total"] == ({"reason": "slow"}, 1)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8077", "http://localhost:8077/", "http://127.0.0.1:8077/v1/systemone"],
)
def test_a_scorers_address_is_a_port_of_this_machine(url) -> None:
    assert scorer_port(url) == 8077


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8077",
        "https://127.0.0.1:8077",
        "http://example.org:8077",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:65536",
        "http://127.0.0.1:8077@example.org:80",
    ],
)
def test_any_other_address_is_refused(url) -> None:
    with pytest.raises(ConfigError):
        scorer_port(url)
