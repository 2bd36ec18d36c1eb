from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebit_serve.core.errors import UsageError
from onebit_serve.core.warm_prompts import (
    PROBES,
    Standing,
    cached_tokens,
    changes_within_a_day,
    common_prefix,
    done_line,
    entry_asked,
    judge,
    match,
    names_time,
    parse,
    samples,
    totals,
    view,
)

SYSTEM = {"role": "system", "content": "Be brief."}


def test_a_file_is_a_list_of_lists_of_messages() -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    one, two = parse(json.dumps([[SYSTEM], [SYSTEM, user, call]]), "p.json")
    assert one.messages == (SYSTEM,)
    assert one.label == "entry 1"
    assert two.messages == (SYSTEM, user, call)


def test_an_entry_may_carry_tools_and_template_switches() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    long_form = {"messages": [SYSTEM], "tools": [tool], "chat_template_kwargs": {"x": 1}}
    (entry,) = parse(json.dumps([long_form]), "p.json")
    assert entry.tools == (tool,)
    assert entry.chat_template_kwargs == {"x": 1}


def test_thinking_both_is_two_entries() -> None:
    on, off = parse(json.dumps([{"messages": [SYSTEM], "thinking": "both"}]), "p.json")
    assert on.chat_template_kwargs == {"enable_thinking": True}
    assert off.chat_template_kwargs == {"enable_thinking": False}
    assert off.label == "entry 1 (thinking off)"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("nonsense", "p.json is not JSON"),
        (b"\xff\xfe", "p.json is not JSON"),
        ("[" * 5000 + "]" * 5000, "p.json is not JSON"),
        ("{}", "the file holds an object"),
        ("[]", "the list is empty"),
        ("[3]", "entry 1 is a number"),
        ("[[]]", "entry 1 has no messages"),
        (json.dumps([[SYSTEM], [SYSTEM, "hi"]]), "entry 2, message 2: is text, not an object"),
        ('[[{"content": "x"}]]', 'entry 1, message 1: has no "role"'),
        ('[[{"role": "system"}]]', 'entry 1, message 1: has no "content"'),
        ('[[{"role": "system", "content": 1}]]', 'entry 1, message 1: "content" is a number'),
        (
            '[[{"role": "user", "content": [{"type": "image_url"}]}]]',
            "entry 1, message 1: part 1 is not text",
        ),
        (
            '[[{"role": "user", "content": [{"type": "text"}]}]]',
            'entry 1, message 1: part 1 has no "text"',
        ),
        ('[{"tools": []}]', 'entry 1 has no list "messages"'),
        (json.dumps([{"messages": [SYSTEM], "tool": []}]), 'entry 1 has the unknown key "tool"'),
        (json.dumps([{"messages": [SYSTEM], "tools": [1]}]), 'entry 1: "tools" is not a list'),
        (
            json.dumps([{"messages": [SYSTEM], "chat_template_kwargs": []}]),
            'entry 1: "chat_template_kwargs" is a list',
        ),
        (json.dumps([{"messages": [SYSTEM], "thinking": 1}]), 'entry 1: "thinking" is neither'),
    ],
)
def test_a_fault_is_told_with_its_entry_and_message(content, told) -> None:
    with pytest.raises(UsageError) as caught:
        parse(content, "p.json")
    assert told in caught.value.message
    assert caught.value.hint


def test_the_probes_differ_in_their_first_character() -> None:
    firsts = [probe[:2] if probe.startswith("\n\n") else probe[0] for probe in PROBES]
    assert len(set(firsts)) == len(PROBES)


@pytest.mark.parametrize(
    ("lists", "prefix"),
    [
        ([], ()),
        ([[1, 2, 3]], (1, 2, 3)),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5]], (1, 2)),
        ([[1, 2], [1, 2, 3]], (1, 2)),
        ([[1], [2]], ()),
        ([[], [1]], ()),
    ],
)
def test_the_prefix_is_what_all_token_lists_begin_with(lists, prefix) -> None:
    assert common_prefix(lists) == prefix


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.lists(st.integers(0, 3)), min_size=1))
def test_the_prefix_begins_every_list_and_no_longer_one_does(head, tails) -> None:
    lists = [head + tail for tail in tails]
    prefix = common_prefix(lists)
    size = len(prefix)
    assert size >= len(head)
    assert all(tuple(one[:size]) == prefix for one in lists)
    assert len({tuple(one[: size + 1]) for one in lists}) > 1 or min(map(len, lists)) == size


@pytest.mark.parametrize(
    ("template", "within_a_day"),
    [
        ("{{ strftime_now('%d %b %Y') }}", False),
        ("{{ strftime_now('%H:%M') }}", True),
        ('{{ strftime_now( "%-I o\'clock" ) }}', True),
        ("{{ strftime_now(format) }}", False),
        ("{{ messages[0].content }}", False),
    ],
)
def test_a_template_that_writes_hours_is_known_by_its_formats(template, within_a_day) -> None:
    assert changes_within_a_day(template) is within_a_day


def test_a_template_that_nobody_knows_may_write_the_time() -> None:
    assert names_time(None)
    assert names_time("{{ strftime_now(f) }}")
    assert not names_time("{{ messages }}")


@pytest.mark.parametrize(
    ("tokens", "counts", "proven", "reused"),
    [
        (600, [600, 601], True, 600),  # dense: more than the prefix may be shared by chance
        (600, [599], True, 599),
        (600, [595], True, 595),
        (600, [594], False, 594),
        (600, [600, 0], False, 0),
        (16, [11], True, 11),
        (6, [2], False, 2),  # four of six lost is no proof, whatever the slack
        (600, [None], False, 0),
        (600, [600, None], False, 0),
        (600, [], False, 0),
    ],
)
def test_only_the_backends_own_count_proves_a_prefix(tokens, counts, proven, reused) -> None:
    verdict = judge(tokens, counts)
    assert (verdict.proven, verdict.reused_tokens) == (proven, reused)
    assert bool(verdict.why) is not proven


WARM = Standing("entry 1", tokens=600, slots=(0,), reused_tokens=599, proven=True)


def test_a_request_that_reuses_the_prefix_is_a_hit() -> None:
    used = WARM.used(640).used(599)
    assert (used.hits, used.tokens_saved, used.evicted) == (2, 1199, False)


def test_a_request_that_finds_the_prefix_gone_marks_it_for_repair() -> None:
    used = WARM.used(84)
    assert (used.hits, used.tokens_saved, used.evicted) == (0, 84, True)


def test_an_entry_that_was_never_warm_is_not_evicted() -> None:
    assert not Standing("entry 1", tokens=600).used(0).evicted
    assert Standing("entry 1").used(5) == Standing("entry 1")


def test_totals_and_the_log_line_count_what_is_proven() -> None:
    standings = [WARM.used(600), Standing("entry 2", tokens=831, proven=True), Standing("entry 3")]
    sums = totals(standings)
    assert (sums.entry_count, sums.tokens, sums.hits, sums.tokens_saved) == (2, 1431, 1, 600)
    assert done_line(standings, 0.21) == (
        "warm-up done (strict-prefix): 2 completed, 1 skipped, 1431 prompt tokens in 0.2 s"
    )


def test_a_request_belongs_to_the_longest_entry_that_it_begins_with() -> None:
    user = {"role": "user", "content": "hi"}
    entries = parse(json.dumps([[SYSTEM], [SYSTEM, user], [{**SYSTEM, "content": "x"}]]), "p")
    assert match([SYSTEM, {"role": "user", "content": "other"}], entries) == 0
    assert match([SYSTEM, user, user], entries) == 1
    assert match([user], entries) is None
    assert match("no list", entries) is None


def test_status_and_metrics_show_the_sums_and_each_entry() -> None:
    standings = [WARM.used(600), Standing("entry 2", why="the template ignores the user's text")]
    shown = view(standings)
    assert (shown["entry_count"], shown["tokens_saved"]) == (1, 600)
    assert [entry["slots"] for entry in shown["entries"]] == [(0,), ()]
    assert shown["entries"][1]["why"] == "the template ignores the user's text"
    assert {name: value for name, _, value in samples(standings)} == {
        "warm_prompts_entry_count": 1,
        "warm_prompts_tokens": 600,
        "warm_prompts_hits_total": 1,
        "warm_prompts_tokens_saved_total": 600,
    }


def test_a_request_is_an_entrys_only_with_the_same_tools_and_switches() -> None:
    tool = {"type": "function", "function": {"name": "search"}}
    text = {"messages": [SYSTEM], "thinking": "both"}
    entries = parse(json.dumps([text, {"messages": [SYSTEM], "tools": [tool]}]), "p.json")

    def asked(path="/v1/chat/completions", **more):
        body = {"messages": [SYSTEM, {"role": "user", "content": "hi"}], **more}
        return entry_asked(path, json.dumps(body).encode(), entries)

    assert asked() == 0  # templates think unless told not to
    assert asked(chat_template_kwargs={"enable_thinking": False}) == 1
    assert asked(tools=[tool]) == 2
    assert asked(tools=[tool, tool]) is None
    assert asked(chat_template_kwargs={"language": "de"}) is None
    assert asked("/v1/embeddings") is None
    assert entry_asked("/v1/chat/completions", b"{", entries) is None


def test_the_last_count_of_a_reply_is_the_one_and_a_models_words_are_none() -> None:
    stream = b'data: {"timings":{"cache_n":3}}\n\ndata: {"timings":{"cache_n": 57}}\n\n[DONE]'
    assert cached_tokens(stream) == 57
    assert cached_tokens(b'{"usage":{"prompt_tokens_details":{"cached_tokens":12}}}') == 12
    assert cached_tokens(json.dumps({"content": 'it says "cache_n": 9'}).encode()) is None
