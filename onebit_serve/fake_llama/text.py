"""Tokens, chat template and replies: deterministic, reversible, with no table to load.

The vocabulary is arithmetic. Ids 0-2 are the special tokens, 3-258 the bytes, 259 two newlines,
then every run of one to three letters a-z, first without and then with a space before it. Text is
cut greedily, so counts are exact, `detokenize(tokenize(t)) == t`, and two newlines in a row are one
token as in real vocabularies.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = [
    "BOS",
    "EOS",
    "N_VOCAB",
    "BadMessagesError",
    "piece",
    "render",
    "reply_tokens",
    "template_text",
    "tokenize",
]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS = 0, 2
_BYTES = len(_SPECIAL)
_TWO_NEWLINES = _BYTES + 256
_RUNS = _TWO_NEWLINES + 1
_RUN_COUNT = 26 + 26**2 + 26**3
N_VOCAB = _RUNS + 2 * _RUN_COUNT
_RUN_STARTS = (0, 0, 26, 26 + 26**2)
_CUT = re.compile(rb"\n\n| ?[a-z]{1,3}|.", re.DOTALL)
_CUT_SPECIAL = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")

_PLAIN = (
    "the sun comes up over the hills and the first train leaves the station while people talk "
    "about the weather and read the news on their way to work every day of the week "
)
_UNICODE = "朝の光が🌄山を照らす。 Grüße aus Köln — привет, 世界 🎉 naïve café; "
_GARBAGE = "的 ζq) ﷽{ 한ж ++ ȸ<unused> 7ง ;; ∑ь卐z ]] Ω"


class BadMessagesError(Exception):
    """Messages that llama-server refuses; `status` is its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def _ids(data: bytes) -> Iterator[int]:
    for found in _CUT.finditer(data):
        cut = found.group()
        if cut == b"\n\n":
            yield _TWO_NEWLINES
        elif cut.isalpha() or len(cut) > 1:
            letters = cut.lstrip(b" ")
            if not letters.islower():
                yield _BYTES + cut[0]
                continue
            number = 0
            for letter in letters:
                number = number * 26 + letter - 97
            number += _RUN_STARTS[len(letters)]
            yield _RUNS + number + (_RUN_COUNT if cut.startswith(b" ") else 0)
        else:
            yield _BYTES + cut[0]


def tokenize(text: str, *, bos: bool = False, parse_special: bool = True) -> list[int]:
    """Return the ids of a text, with the BOS token first where asked."""
    ids = [BOS] if bos else []
    for part in _CUT_SPECIAL.split(text) if parse_special else [text]:
        if parse_special and part in _SPECIAL:
            ids.append(_SPECIAL.index(part))
        elif part:
            ids.extend(_ids(part.encode("utf-8", "surrogatepass")))
    return ids


def piece(token: int) -> bytes:
    """Return the bytes that a token stands for."""
    if token < _BYTES:
        return _SPECIAL[token].encode()
    if token < _TWO_NEWLINES:
        return bytes([token - _BYTES])
    if token == _TWO_NEWLINES:
        return b"\n\n"
    space, number = divmod(token - _RUNS, _RUN_COUNT)
    length = 3 if number >= _RUN_STARTS[3] else 2 if number >= _RUN_STARTS[2] else 1
    number -= _RUN_STARTS[length]
    letters = bytes(97 + number // 26**place % 26 for place in range(length - 1, -1, -1))
    return (b" " if space else b"") + letters


def template_text(kind: str) -> str:
    """Return the Jinja text that `/props` shows for a template."""
    today = "{{ strftime_now('%H:%M:%S.%f') }}\n" if kind == "date" else ""
    content = "hello" if kind == "ignore" else "{{ message['content'] }}"
    tail = (
        "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}" if kind == "think" else ""
    )
    return (
        f"{today}{{% for message in messages %}}<|im_start|>{{{{ message['role'] }}}}\n{content}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        f"{tail}{{% endif %}}"
    )


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadMessagesError("Invalid 'content' type in messages: expected string or array")
    texts = []
    for part in content:
        if part.get("type") != "text":
            raise BadMessagesError(
                "image input is not supported - hint: if this is unexpected, you may need to "
                "provide the mmproj",
                500,
            )
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def render(body: dict[str, Any], kind: str) -> str:
    """Return the prompt that the ChatML template makes of a chat request's messages.

    Raises:
        BadMessagesError: There are no messages, or they are of a wrong shape.
    """
    messages = body.get("messages")
    if messages is None:
        raise BadMessagesError("'messages' is required")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadMessagesError("Expected 'messages' to be an array of objects")
    text = time.strftime("%H:%M:%S") + f".{time.time_ns()}\n" if kind == "date" else ""
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise BadMessagesError("Missing 'role' in message")
        said = "hello" if kind == "ignore" else _content(message)
        text += f"<|im_start|>{message['role']}\n{said}"
        if message["role"] == "assistant" and number == len(messages) - 1:
            return text
        text += "<|im_end|>\n"
    if body.get("add_generation_prompt", True):
        text += "<|im_start|>assistant\n"
        thinking = (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        if kind == "think" and not thinking:
            text += "<think>\n\n</think>\n\n"
    return text


def reply_tokens(
    prompt: Sequence[int], style: str, grammar: str, *, garbage: bool
) -> tuple[list[int], bool]:
    """Return the tokens a reply is made of, and whether they come round again.

    The same prompt always gets the same reply. Two grammars are obeyed: a literal, which is said
    once, and `[a-z]*`, which gets letters only.
    """
    literal = re.fullmatch(r'\s*root\s*::=\s*"((?:[^"\\]|\\.)*)"\s*', grammar)
    if literal:
        return tokenize(re.sub(r"\\(.)", r"\1", literal[1]), parse_special=False), False
    base = {"plain": _PLAIN, "unicode": _UNICODE}.get(style, style)
    if garbage:
        base = _GARBAGE
    elif "[a-z]*" in grammar:
        base = _PLAIN.replace(" ", "")
    words = base.split(" ")
    turn = 0 if base == style else zlib.crc32(repr(tuple(prompt)).encode()) % len(words)
    text = " ".join(words[turn:] + words[:turn])
    return tokenize(text if base == style else text.strip() + " ", parse_special=False), True
