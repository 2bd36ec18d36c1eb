"""How each kind of scorer is started: its command line, its environment, how it is spoken to.

Scorers listen on every interface by default (`laya-serve` 0.2.1 and `laya[serve]` on 0.0.0.0,
ggmlc's `laya --serve` too), and what they are asked is what users write. So they are told to listen
on loopback by flag and by variable, and ggmlc's server is never used: its daemon needs no socket.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from onebit_serve.core.errors import ConfigError

__all__ = ["ScorerKind", "ScorerPlan", "scorer_plan"]

ScorerKind = Literal["daemon", "http", "llama-server"]

_LOOPBACK = "127.0.0.1"
_PROGRAMS: dict[ScorerKind, str] = {
    "daemon": "laya",
    "http": "laya-serve",
    "llama-server": "llama-server",
}
_HOST_FLAGS = ("--host", "-H", "--bind")


class ScorerPlan(msgspec.Struct, frozen=True):
    """A scorer as it will be started.

    Args:
        transport: `lines` for JSON lines on stdin and stdout, `http` for a port on loopback.
        arguments: Program and arguments; `{port}` stands for the port.
        set_env: Variables added to the user's environment; they win over the user's.
    """

    transport: Literal["lines", "http"]
    arguments: tuple[str, ...]
    set_env: dict[str, str] = {}

    def command(self, port: int) -> list[str]:
        """Return the whole command line for one port."""
        return [a.replace("{port}", str(port)) for a in self.arguments]

    def environment(self, port: int) -> dict[str, str]:
        """Return the variables to add for one port."""
        return {k: v.replace("{port}", str(port)) for k, v in self.set_env.items()}


def scorer_plan(
    kind: ScorerKind, *, command: Sequence[str] = (), model: str | None = None, help_text: str = ""
) -> ScorerPlan:
    """Return how to start a scorer.

    Args:
        kind: What it is.
        command: Program and arguments of the user's; by default the program of that kind on PATH.
        model: Its model file; the daemon and llama-server need one.
        help_text: What the program's `--help` printed, empty where it was not asked.

    Raises:
        ConfigError: A model is missing, or the command would listen beyond this machine.
    """
    words = tuple(command) or (_PROGRAMS[kind],)
    _refuse_other_hosts(words)
    if kind != "http" and model is None and len(words) == 1:
        raise ConfigError(
            f"the scorer {words[0]} needs a model", hint="name one by --laya-model FILE"
        )
    if kind == "daemon":
        return ScorerPlan("lines", _daemon(words, model, help_text))
    if kind == "llama-server":
        given = () if model is None else ("-m", model)
        return ScorerPlan("http", (*words, *given, *_where(words)))
    # `laya[serve]` reads its address from variables, laya-serve 0.2.1 from flags.
    variables = {"LAYA_HOST": _LOOPBACK, "LAYA_PORT": "{port}", "LAYA_PRELOAD": "1"}
    if model is not None:
        variables["LAYA_MODELS"] = model
    flags = _where(words) if re.search(r"--port\b", help_text) else ()
    return ScorerPlan("http", (*words, *flags), variables)


def _daemon(words: tuple[str, ...], model: str | None, help_text: str) -> tuple[str, ...]:
    if model is None or "daemon" in words or "--daemon" in words:
        return words
    program, *rest = words
    by_word = re.search(r"(?:^\s*|\blaya\s+)daemon\b", help_text, re.MULTILINE)
    if by_word and "--daemon" not in help_text:
        return (program, "daemon", model, *rest)
    return (program, model, "--daemon", *rest)


def _where(words: Sequence[str]) -> tuple[str, ...]:
    host = () if any(word in _HOST_FLAGS for word in words) else ("--host", _LOOPBACK)
    port = () if any("{port}" in word for word in words) else ("--port", "{port}")
    return (*host, *port)


def _refuse_other_hosts(words: Sequence[str]) -> None:
    for number, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag == "--serve":
            raise ConfigError(
                f"{word} of the scorer listens on every interface without a key",
                hint='use [laya] scorer = "daemon"',
            )
        if flag in _HOST_FLAGS:
            host = value or (words[number + 1] if number + 1 < len(words) else "")
            if host not in (_LOOPBACK, "localhost"):
                raise ConfigError(
                    f"the scorer would listen on {host or 'nothing'}, beyond this machine",
                    hint=f"leave {flag} out, or make it {_LOOPBACK}",
                )
