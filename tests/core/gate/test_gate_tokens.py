from __future__ import annotations

from onebit_serve.core.gate.tokens import Answer, Step, Token, decided, difference, judge

WORDS = ["One", " two", " three", " four", " five", " six", " seven", " eight"]


def tokens(words=WORDS):
    return tuple(Token(100 + n, word) for n, word in enumerate(words))


def answer(name="count", words=WORDS):
    return Answer(name, (1, 2), tuple(Step(token, 2.0) for token in tokens(words)))


def test_the_same_answer_passes_and_may_go_on():
    assert judge([answer()], {"count": tokens([*WORDS, " nine"])}).status == "PASS"


def test_a_wrong_seventh_token_fails_and_is_shown_in_context():
    wrong = list(tokens())
    wrong[6] = Token(7, " zebra")
    found = judge([answer()], {"count": tuple(wrong)})
    assert found.status == "FAIL"
    assert "first difference at token 7" in found.reason
    assert "' zebra' (id 7)" in found.detail
    assert "' seven' (id 106)" in found.detail
    assert "' six" in found.detail or " six" in found.detail
    assert found.figure == "6/8 tokens of 1 answers"


def test_the_same_text_in_other_tokens_is_a_difference():
    assert difference(tokens(), (Token(1, "One"), *tokens()[1:])) == 0


def test_an_answer_that_ends_early_differs_where_it_ends():
    assert difference(tokens(), tokens()[:3]) == 3
    assert judge([answer()], {"count": tokens()[:3]}).status == "FAIL"


def test_a_refused_answer_is_a_failure_with_its_message():
    found = judge([answer()], {"count": "the server answered 500: does not match"})
    assert found.status == "FAIL"
    assert "does not match" in found.reason


def test_an_answer_that_is_missing_is_a_failure():
    assert judge([answer()], {}).status == "FAIL"


def test_a_reference_ends_before_its_first_undecided_token():
    leads = [2.0, 0.6, 0.4, 3.0]
    steps = tuple(Step(token, lead) for token, lead in zip(tokens(), leads, strict=False))
    assert decided(steps, 0.5) == steps[:2]
    assert decided(steps, 0.1) == steps
