"""Laya: what kind of request this is, and what follows from it.

    body -> Opening (the text that is judged, the key of its conversation)   opening
    text -> long_doc without asking, or the question to ask                  by_size, question
    the scorer's answer -> class and confidence, or nonsense                 read_answer
    both -> the decision and the header that tells it                        decide
    decisions -> counts, so that a policy can be argued with data            Tally

Asked which device should run a request, the model says the same one whatever the request; so it is
asked about the request, and the policy picks the device.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec

from onebit_serve.core.errors import ConfigError
from onebit_serve.core.policy import Routes

__all__ = [
    "LONG_CHARACTERS",
    "ROUTED_PATHS",
    "WARM_UP_TEXTS",
    "BadAnswerError",
    "Choice",
    "Decision",
    "DecisionCache",
    "Opening",
    "Row",
    "Tally",
    "by_size",
    "decide",
    "opening",
    "question",
    "read_answer",
    "scorer_port",
]

# Code points. Long pasted texts are Laya's slowest and worst decisions (30 to 56 % right).
LONG_CHARACTERS = 1024
ROUTED_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/completions",
        "/completions",
        "/completion",
        "/v1/responses",
        "/v1/messages",
    }
)
_TEXT_PARTS = ("text", "input_text")
_CRITERIA = {
    "code": "source code, a command or a configuration, or an explanation or fix of one",
    "prose": "several sentences or paragraphs of prose: an essay, a letter, a story, advice",
    "short": "a word, a name, a number, a date or one short sentence",
}
_INSTRUCTIONS = "What kind of answer does this request need?"
_QUESTION = "kind"
_LAST_PORT = 65535

# One for each length that a scorer compiles on its own at first use (64, 128, 256 and 512 tokens in
# ggmlc's laya); a word is about a token, and the question itself takes about 60.
WARM_UP_TEXTS = tuple("hello " * words for words in (1, 40, 150, 400))


# --------------------------------------------------------------------------- the request


class Opening(msgspec.Struct, frozen=True):
    """How a conversation begins.

    Args:
        text: The first user message; `None` where there is none in words.
        key: The same for every turn of the conversation.
        first_turn: Whether nothing follows that message.
    """

    text: str | None
    key: str
    first_turn: bool = True


def opening(path: str, body: bytes) -> Opening | None:
    """Read how the conversation of a request begins.

    Args:
        path: The route; chat completions, completions, responses and Anthropic messages differ.
        body: The request's JSON body.

    Returns:
        `None` for routes that are not routed, and for bodies that only a backend can judge.
    """
    if path not in ROUTED_PATHS:
        return None
    try:
        fields = msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"))  # backends skip the mark
        return _opening(fields) if isinstance(fields, dict) else None
    except msgspec.DecodeError:
        return None
    except RecursionError:  # backends read deeper
        return Opening(None, hashlib.sha256(body).hexdigest())


def _opening(fields: dict[str, Any]) -> Opening | None:
    head = [_gist(fields.get("system")), _gist(fields.get("instructions"))]
    if "messages" in fields:
        return _of_messages(fields["messages"], head)
    said = fields.get("input", fields.get("prompt"))
    if isinstance(said, list) and not any(isinstance(item, dict) for item in said):
        said = next((item for item in said if isinstance(item, str)), None)
    if isinstance(said, list):
        return _of_messages(said, head)
    return _of_messages([{"role": "user", "content": said}], head)


def _of_messages(messages: Any, head: list[Any]) -> Opening | None:
    if not isinstance(messages, list):
        return None
    gists = []
    for count, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        gists.append([message.get("role"), _gist(content)])
        if message.get("role") == "user":
            return Opening(_words(content), _key([*head, gists]), count == len(messages))
    return Opening(None, _key([*head, gists]))


def _words(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [
        part["text"]
        for part in content
        if isinstance(part, dict)
        and part.get("type") in _TEXT_PARTS
        and isinstance(part.get("text"), str)
    ]
    return "\n".join(texts) if texts else None


def _gist(content: Any) -> list[str]:
    """Return what stays the same of a content from turn to turn.

    Clients write a text as a string or as a part, move `cache_control` on, and do not promise the
    order of fields.
    """
    if not isinstance(content, list):
        content = [{"type": "text", "text": content}]
    gist = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
            gist.append(str(part.get("text")))
            continue
        said = part
        if isinstance(part, dict):
            said = sorted((k, v) for k, v in part.items() if k != "cache_control")
        gist.append(hashlib.sha256(msgspec.json.encode(said)).hexdigest())
    return gist


def _key(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# ----------------------------------------------------------------------- question and answer


class Choice(msgspec.Struct, frozen=True):
    """What a request was found to be.

    Args:
        kind: A class of the policy, or empty where there is none.
        confidence: 0 to 1, of a scorer's answer; `None` where nobody was asked or could say.
        why: How it came to that; for people.
        failed: Nobody answered, so that the next conversation like this is asked about again.
    """

    kind: str
    confidence: float | None = None
    why: str = ""
    failed: bool = False


def by_size(text: str) -> Choice | None:
    """Return `long_doc` for a text that is too long to ask about, else `None`."""
    if len(text) < LONG_CHARACTERS:
        return None
    return Choice("long_doc", why=f"{len(text)} characters, {LONG_CHARACTERS} or more")


def question(text: str, model: str = "laya") -> dict[str, Any]:
    """Return the one typed question about a text, as `POST /v1/systemone` takes it.

    Args:
        text: The request's first user message.
        model: The scorer's model id; `laya` is known to every scorer.
    """
    criteria: dict[str, Any] = dict(_CRITERIA)
    asked = {"type": "choice", "instructions": _INSTRUCTIONS, "criteria": criteria}
    return {"state": text, "model": model, "questions": {_QUESTION: asked}}


def scorer_port(url: str) -> int:
    """Return the port of a scorer's address, which must be on this machine.

    Args:
        url: `http://127.0.0.1:PORT`, with or without `/v1/systemone`.

    Raises:
        ConfigError: It is no such address; what users write stays on this machine.
    """
    found = re.fullmatch(r"http://(?:127\.0\.0\.1|localhost):(\d{1,5})/?(?:v1/systemone)?", url)
    if not found or not 0 < int(found[1]) <= _LAST_PORT:
        raise ConfigError(
            f"{url} is no address of a scorer on this machine",
            hint="write http://127.0.0.1:PORT",
        )
    return int(found[1])


class BadAnswerError(ValueError):
    """A scorer's answer that means nothing."""


def read_answer(answer: Any) -> Choice:
    """Check a scorer's decoded answer.

    Raises:
        BadAnswerError: It is no answer to `question`.
    """
    try:
        found = answer["answers"][_QUESTION]
        kind, probabilities = found["choice"], found.get("probabilities")
    except (KeyError, TypeError, AttributeError, IndexError):
        raise BadAnswerError("it has no choice") from None
    if not isinstance(kind, str) or kind not in _CRITERIA:
        raise BadAnswerError(f"it chose {str(kind)[:40]!r}, which was not asked")
    if probabilities is not None:
        _check(probabilities, kind)
    confidence = found.get("confidence")
    if confidence is None and probabilities is not None:
        confidence = _certainty(list(probabilities.values()))
    if not _is_share(confidence):
        raise BadAnswerError("its confidence is no number from 0 to 1")
    return Choice(kind, float(confidence), "asked Laya")


def _is_share(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value <= 1  # not true of NaN


def _check(probabilities: Any, kind: str) -> None:
    if not isinstance(probabilities, dict) or set(probabilities) != set(_CRITERIA):
        raise BadAnswerError("its probabilities are not those of the classes asked")
    values = list(probabilities.values())
    if not all(_is_share(value) for value in values) or not math.isclose(
        sum(values), 1, abs_tol=0.02
    ):
        raise BadAnswerError("its probabilities are none")
    if probabilities[kind] < max(values) - 0.001:
        raise BadAnswerError("it did not choose what it holds most likely")


def _certainty(probabilities: list[float]) -> float:
    """Return Laya's confidence: 1 - H(p) / log(k), 0 for a uniform answer."""
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    return min(1.0, max(0.0, 1 - entropy / math.log(len(probabilities))))


# ------------------------------------------------------------------------------- decision


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes.

    Args:
        kind: Its class, or `default`.
        device: The device's word.
        confidence: Of the class; `None` for `long_doc` and `default`.
        why: For people: how it came to the class, and why the class goes there.
        remembered: An earlier turn of the conversation had decided it.
    """

    kind: str
    device: str
    confidence: float | None = None
    why: str = ""
    remembered: bool = False

    @property
    def header(self) -> str:
        """The value of `X-1bit-Route`: always three words."""
        share = "-" if self.confidence is None else f"{self.confidence:.2f}"
        return f"{self.kind} {share} {self.device}"


def decide(choice: Choice, routes: Routes, *, remembered: bool = False) -> Decision:
    """Turn what a request is into where it goes."""
    sure = choice.confidence is None or choice.confidence >= routes.min_confidence
    if choice.kind and sure:
        why = ": ".join(filter(None, (choice.why, routes.whys.get(choice.kind))))
        device = routes.devices[choice.kind]
        return Decision(choice.kind, device, choice.confidence, why, remembered)
    why = choice.why
    if choice.kind:
        why = (
            f"{choice.kind} with confidence {choice.confidence:.2f}, "
            f"below {routes.min_confidence:g}"
        )
    return Decision("default", routes.default, None, why, remembered)


class DecisionCache:
    """What conversations were found to be, the longest unused forgotten first.

    Args:
        limit: Conversations at most; one takes about 300 bytes.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._choices: OrderedDict[str, Choice] = OrderedDict()

    def __len__(self) -> int:
        """Return how many conversations are known."""
        return len(self._choices)

    def get(self, key: str) -> Choice | None:
        """Return what a conversation was found to be."""
        if key in self._choices:
            self._choices.move_to_end(key)
        return self._choices.get(key)

    def put(self, key: str, choice: Choice) -> Choice:
        """Remember it, unless another turn was first and had an answer; return what holds."""
        held = self._choices.get(key)
        if held is None or held.failed:
            held = self._choices[key] = choice
        self._choices.move_to_end(key)
        if len(self._choices) > self._limit:
            self._choices.popitem(last=False)
        return held


# --------------------------------------------------------------------------------- counts


class Row(msgspec.Struct):
    """What happened to one class on one device.

    Args:
        decisions: Requests that were sent there.
        remembered: Those of them that an earlier turn had decided.
        decide_s: Seconds spent on deciding, in all.
        decide_most_s: The longest of them.
        replies: Replies that came to their end.
        first_byte_s: Seconds to their first byte, in all.
        reply_s: Seconds to their last, in all.
    """

    decisions: int = 0
    remembered: int = 0
    decide_s: float = 0.0
    decide_most_s: float = 0.0
    replies: int = 0
    first_byte_s: float = 0.0
    reply_s: float = 0.0


class Tally:
    """Counts by class and device, and how the scorer does."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.asked = 0
        self.failures: dict[str, int] = {}

    def decided(self, decision: Decision, took_s: float) -> None:
        """Count a decision and the seconds it took."""
        row = self._row(decision)
        row.decisions += 1
        row.remembered += decision.remembered
        row.decide_s += took_s
        row.decide_most_s = max(row.decide_most_s, took_s)

    def replied(self, decision: Decision, first_byte_s: float, reply_s: float) -> None:
        """Count a whole reply: seconds from the request to its first and last byte."""
        row = self._row(decision)
        row.replies += 1
        row.first_byte_s += first_byte_s
        row.reply_s += reply_s

    def failed(self, word: str) -> None:
        """Count a question that got no answer: `down`, `slow`, `busy` or `nonsense`."""
        self.failures[word] = self.failures.get(word, 0) + 1

    def view(self) -> dict[str, Any]:
        """Return what `/v1/status` shows."""
        return {
            "asked": self.asked,
            "failures": dict(self.failures),
            "routes": [
                {"class": kind, "device": device, **msgspec.structs.asdict(row)}
                for (kind, device), row in sorted(self.rows.items())
            ],
        }

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield what `/metrics` shows: name without prefix, labels, value."""
        yield "laya_questions_total", {}, self.asked
        for word, count in sorted(self.failures.items()):
            yield "laya_failures_total", {"reason": word}, count
        for (kind, device), row in sorted(self.rows.items()):
            labels = {"class": kind, "device": device}
            yield "route_decisions_total", labels, row.decisions
            yield "route_decision_seconds_total", labels, row.decide_s
            yield "route_replies_total", labels, row.replies
            yield "route_first_byte_seconds_total", labels, row.first_byte_s
            yield "route_reply_seconds_total", labels, row.reply_s

    def _row(self, decision: Decision) -> Row:
        return self.rows.setdefault((decision.kind, decision.device), Row())
