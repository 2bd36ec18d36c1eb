from __future__ import annotations

import pytest

from onebit_serve.core.gate.needle import Fact, Reply, found, judge, user_text

SAFE = Fact("The code of the safe is 7394.", "What is the code of the safe?", "7394")


def reply(text="It is 7394.", depth=0.5, tokens=7000, problem=""):
    return Reply(depth, SAFE, tokens, text, problem)


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 10), (1.0, 20)])
def test_the_fact_stands_at_its_depth_and_the_question_comes_last(depth, place):
    text = user_text(SAFE, 20, depth)
    body = text.removeprefix("Read this text.\n\n").split("\n\n")[0]
    assert body[: body.index(SAFE.text)].count(".") == place
    assert text.count("7394") == 1
    assert text.endswith(SAFE.question)


def test_an_answer_counts_in_any_case_of_letters():
    papaya = Fact("The secret word is papaya.", "What is the secret word?", "papaya")
    assert found(Reply(0.5, papaya, 100, 'The secret word is "Papaya."'))


def test_all_found_passes():
    assert judge([reply(), reply(depth=0.9)], want_tokens=7000).status == "PASS"


def test_a_forgotten_middle_fails_and_says_at_which_depth():
    said = judge([reply(depth=0.1), reply("I do not know.", 0.5)], want_tokens=7000)
    assert said.status == "FAIL"
    assert "depth 0.5" in said.reason
    assert "I do not know." in said.reason


def test_a_reply_that_the_server_refused_counts_as_wrong():
    said = judge([reply("", problem="the server answered 500: does not match")], want_tokens=7000)
    assert said.status == "FAIL"
    assert said.data["refused"] == 1


def test_missed_facts_are_accepted_up_to_their_number():
    replies = [reply("no"), reply(), reply()]
    assert judge(replies, want_tokens=7000, max_missed=1).status == "PASS"


def test_a_prompt_that_came_out_too_short_makes_no_pass():
    assert judge([reply(tokens=5000)], want_tokens=7000).status == "FAIL"
