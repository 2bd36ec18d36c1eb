from __future__ import annotations

import pytest

from onebit_serve.core.errors import ConfigError
from onebit_serve.core.scorers import scorer_plan

FLAG_HELP = "usage: laya FILE.gguf [--daemon] [--device D]\n"
WORD_HELP = "usage: laya COMMAND\n\ncommands:\n  daemon FILE.gguf  answer lines\n  ask\n"
LAYA_SERVE_HELP = "usage: laya-serve [-h] [--version] [--host HOST] [--port PORT]\n"


@pytest.mark.parametrize(
    ("help_text", "arguments"),
    [
        (FLAG_HELP, ("laya", "l.gguf", "--daemon")),
        (WORD_HELP, ("laya", "daemon", "l.gguf")),
        ("usage: laya daemon FILE.gguf\n", ("laya", "daemon", "l.gguf")),
        ("", ("laya", "l.gguf", "--daemon")),
    ],
)
def test_the_daemon_is_started_in_the_form_that_its_help_shows(help_text, arguments) -> None:
    plan = scorer_plan("daemon", model="l.gguf", help_text=help_text)
    assert (plan.transport, plan.arguments) == ("lines", arguments)


def test_arguments_of_the_users_are_kept() -> None:
    plan = scorer_plan(
        "daemon", command=["laya", "--device", "hrx"], model="l.gguf", help_text=WORD_HELP
    )
    assert plan.arguments == ("laya", "daemon", "l.gguf", "--device", "hrx")
    whole = ["laya", "daemon", "l.gguf", "--family", "typed-decisions"]
    assert scorer_plan("daemon", command=whole, model="x.gguf").arguments == tuple(whole)


def test_laya_serve_is_told_its_address_by_flags_and_by_variables() -> None:
    plan = scorer_plan("http", help_text=LAYA_SERVE_HELP)
    assert plan.command(8077) == ["laya-serve", "--host", "127.0.0.1", "--port", "8077"]
    assert plan.set_env["LAYA_HOST"] == "127.0.0.1"


def test_a_server_without_such_flags_is_told_by_variables_alone() -> None:
    plan = scorer_plan("http", model="laya-english")
    assert plan.arguments == ("laya-serve",)
    assert plan.environment(8077) == {
        "LAYA_HOST": "127.0.0.1",
        "LAYA_MODELS": "laya-english",
        "LAYA_PORT": "8077",
        "LAYA_PRELOAD": "1",
    }


def test_a_port_that_the_user_placed_is_not_given_twice() -> None:
    plan = scorer_plan(
        "http", command=["uvx", "laya-serve", "--port={port}"], help_text=LAYA_SERVE_HELP
    )
    assert plan.command(1) == ["uvx", "laya-serve", "--port=1", "--host", "127.0.0.1"]


def test_a_llama_server_gets_model_and_address() -> None:
    plan = scorer_plan("llama-server", command=["/opt/llama-server"], model="l.gguf")
    assert plan.command(8077) == (
        ["/opt/llama-server", "-m", "l.gguf", "--host", "127.0.0.1", "--port", "8077"]
    )


@pytest.mark.parametrize("kind", ["daemon", "llama-server"])
def test_a_scorer_that_needs_a_model_says_so(kind) -> None:
    with pytest.raises(ConfigError) as caught:
        scorer_plan(kind)
    assert "--laya-model" in caught.value.hint


@pytest.mark.parametrize(
    "command",
    [
        ["laya-serve", "--host", "0.0.0.0"],
        ["laya-serve", "--host=192.168.1.2"],
        ["laya-serve", "--host"],
        ["laya", "l.gguf", "--serve"],
    ],
)
def test_a_scorer_that_would_listen_beyond_this_machine_is_refused(command) -> None:
    with pytest.raises(ConfigError):
        scorer_plan("http", command=command)
