from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from onebit_serve.core.config import Config, parse, with_environment, with_flags
from onebit_serve.core.errors import ConfigError, nearest

MANUAL = Path(__file__).parents[2] / "configs" / "serve.toml"
TABLES = ("server", "backend", "warmup", "warm_prompts", "laya", "log")
KEYS = [(t, key) for t in TABLES for key in getattr(Config(), t).__struct_fields__]


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(text, "serve.toml")
    return caught.value


def test_an_empty_file_is_the_defaults():
    assert parse("", "serve.toml") == Config()


def test_the_defaults_are_the_documented_ones():
    config = Config()
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert config.server.max_body_bytes == 64 * 1024 * 1024
    assert (config.server.park_s, config.server.ping_s) == (600, 0)
    assert (config.server.drain_s, config.server.stop_s) == (30, 10)
    backend = config.backend
    assert (backend.idle_s, backend.max_in_flight, backend.queue) == (0, 0, 64)
    assert (backend.restart, backend.allow_cpu_fallback) == (True, False)
    assert (backend.hang_s, backend.load_stall_s, backend.load_limit_s) == (120, 120, 0)
    warmup = config.warmup
    assert (warmup.enabled, warmup.idle, warmup.devices) == (True, True, None)
    assert (warmup.prompt_tokens, warmup.decode_tokens) == (465, 8)
    assert (warmup.deadline_s, warmup.budget_s, warmup.idle_max_ms) == (300, 3, 1000)


def test_a_file_sets_keys_of_every_kind():
    config = parse(
        """
        [server]
        port = 0
        stop_s = 2.5
        [backend]
        model = "m.gguf"
        args = ["-ngl", "0"]
        env = { GGML_VK_VISIBLE_DEVICES = "0" }
        mtp_p_min = 0.5
        [warmup]
        enabled = false
        devices = ["hrx"]
        [log]
        format = "json"
        """,
        "serve.toml",
    )
    assert (config.server.port, config.server.stop_s) == (0, 2.5)
    assert config.backend.args == ("-ngl", "0")
    assert config.backend.env == {"GGML_VK_VISIBLE_DEVICES": "0"}
    assert config.backend.mtp_p_min == 0.5
    assert (config.warmup.enabled, config.warmup.devices) == (False, ("hrx",))
    assert config.log.format == "json"


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        Config().server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("port = ", "serve.toml is not TOML", "configs/serve.toml"),
        ("port = " + "[" * 5000, "serve.toml is not TOML", "configs/serve.toml"),
        ("port = 1", "has an unknown key port outside a table", "write port under [server]"),
        ("enabled = true", "unknown key enabled outside", "write enabled under [warmup]"),
        ("[server]\nport = 1\nport = 2", "serve.toml is not TOML", "configs/serve.toml"),
        ("[servr]\n", "unknown table [servr]", "did you mean server?"),
        ("[zzz]\n", "unknown table [zzz]", "known are server"),
        ("[server]\nprot = 1", "[server] has no key prot", "did you mean port?"),
        ("[server]\nzzzzzz = 1", "[server] has no key zzzzzz", "its keys are host"),
        ("[backend]\nctx-size = 1", "[backend] has no key ctx-size", "did you mean ctx_size?"),
        ("server = 3", "server is 3, wanted a table", "write [server]"),
        ("backends = 3", "backends is no list of tables", "write [[backends]]"),
        ("[server]\nport = 'x'", "[server] port is 'x', wanted a port", "explains every key"),
        ("[server]\nport = 65536", "[server] port is 65536, wanted a port", ""),
        ("[server]\nport = -1", "[server] port is -1, wanted a port", ""),
        ("[server]\nport = true", "[server] port is true, wanted a port", ""),
        ("[server]\nport = 2020-01-01", "port is datetime.date(2020, 1, 1)", ""),
        ("[server]\nhost = ''", "host is '', wanted a text that is not empty", ""),
        ("[server]\nstop_s = -1", "stop_s is -1, wanted seconds, 0 or more", ""),
        ("[server]\nstop_s = nan", "stop_s is nan, wanted seconds, 0 or more", ""),
        ("[server]\nstop_s = inf", "stop_s is inf, wanted seconds, 0 or more", ""),
        ("[server]\nstop_s = '10 s'", "stop_s is '10 s', wanted seconds, 0 or more", ""),
        ("[server]\nmax_body_bytes = 1.5", "wanted a number of bytes, 0 or more", ""),
        ("[backend]\nmtp_p_min = 1.5", "wanted a number from 0 to 1", ""),
        ("[backend]\nparallel = -2", "wanted a number of slots", ""),
        ("[backend]\nargs = '-ngl 0'", "wanted a list of texts", ""),
        ("[backend]\nenv = { A = 1 }", "env is a table, wanted a table of texts", ""),
        ("[backend]\nrole = 'x'", "role is 'x', wanted chat or embedding or rerank", ""),
        ("[warmup]\nprompt_tokens = 0", "wanted a whole number, 1 or more", ""),
        ("[warmup]\nenabled = 1", "enabled is 1, wanted true or false", ""),
        ("[log]\nlevel = 'loud'", "wanted debug or info or warning or error", ""),
    ],
)
def test_what_cannot_be_used_is_refused_with_file_key_and_wish(text, message, hint):
    error = refused(text)
    assert message in error.message
    assert "serve.toml" in error.message
    assert hint in error.hint
    assert error.exit_code == 2


def test_a_long_value_is_cut_in_the_message():
    assert len(refused(f"[server]\nport = '{'x' * 9999}'").message) < 250


def test_several_backends_are_checked():
    assert "[backends] has no key mdel" in refused("[[backends]]\nmdel = 'a'").message


def test_several_backends_take_their_defaults_from_backend_and_flags_win_over_both():
    text = "[backend]\nctx_size = 1\n[[backends]]\nmodel = 'a'\n[[backends]]\nctx_size = 3"
    config = with_flags(parse(text, "f"), {"backend.parallel": ("-np", "4")})
    assert [(b.model, b.ctx_size, b.parallel) for b in config.backends] == [
        ("a", 1, 4),
        (None, 3, 4),
    ]


def test_a_flag_for_one_backend_is_refused_where_there_are_several():
    config = parse("[[backends]]\nmodel = 'a'\n[[backends]]\nmodel = 'b'", "f")
    with pytest.raises(ConfigError, match="-m is for one backend, and there are 2"):
        with_flags(config, {"backend.model": ("-m", "c")})


def test_the_manual_is_the_defaults():
    assert parse(MANUAL.read_text(), "serve.toml") == Config()


@pytest.mark.parametrize(("table", "key"), KEYS, ids=".".join)
def test_the_manual_has_every_key_with_what_it_does(table, key):
    section = re.split(r"^\[(\w+)\]$", MANUAL.read_text(), flags=re.MULTILINE)
    lines = section[section.index(table) + 1].splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(rf"(# )?{key} = ", line))
    assert re.match(r"# .{5,}", lines[at - 1])


def test_the_manual_puts_nothing_off():
    assert not re.search(r"later\)|this version|loopback only", MANUAL.read_text())


def test_commented_keys_of_the_manual_can_be_used():
    table, tried = "", 0
    for line in MANUAL.read_text().splitlines():
        if found := re.fullmatch(r"\[(\w+)\]", line):
            table = found[1]
        found = re.fullmatch(r"# (\w+ = .+)", line)
        if found:
            assert parse(f"[{table}]\n{found[1]}", "serve.toml") != Config()
            tried += 1
    assert tried >= 10


@pytest.mark.parametrize(
    ("variables", "table", "key", "value"),
    [
        ({"ONEBIT_SERVER_PORT": "8001"}, "server", "port", 8001),
        ({"ONEBIT_SERVER_STOP_S": "2.5"}, "server", "stop_s", 2.5),
        ({"ONEBIT_BACKEND_MODEL": "7"}, "backend", "model", "7"),
        ({"ONEBIT_BACKEND_ALIAS": "null"}, "backend", "alias", "null"),
        ({"ONEBIT_BACKEND_MTP_P_MIN": "0.5"}, "backend", "mtp_p_min", 0.5),
        ({"ONEBIT_BACKEND_ARGS": "-a 'b c'"}, "backend", "args", ("-a", "b c")),
        ({"ONEBIT_BACKEND_ENV": "A=b=c,D="}, "backend", "env", {"A": "b=c", "D": ""}),
        ({"ONEBIT_WARMUP_DEVICES": "hrx, vulkan"}, "warmup", "devices", ("hrx", "vulkan")),
        ({"ONEBIT_WARMUP_ENABLED": "no"}, "warmup", "enabled", False),
        ({"ONEBIT_SERVER_PORT": ""}, "server", "port", 8000),
        ({"ONEBIT_NO_WARMUP": "1"}, "warmup", "enabled", False),
        ({"ONEBIT_NO_WARMUP": "TRUE"}, "warmup", "enabled", False),
        ({"ONEBIT_NO_WARMUP": "yes"}, "warmup", "enabled", False),
        ({"ONEBIT_NO_WARMUP": "0"}, "warmup", "enabled", True),
        ({"ONEBIT_NO_WARMUP": "false"}, "warmup", "enabled", True),
        ({"ONEBIT_NO_WARMUP": "no"}, "warmup", "enabled", True),
        ({"ONEBIT_NO_WARMUP": ""}, "warmup", "enabled", True),
        (
            {"ONEBIT_NO_WARMUP": "1", "ONEBIT_WARMUP_ENABLED": "true"},
            "warmup",
            "enabled",
            False,
        ),
    ],
)
def test_a_variable_sets_its_key(variables, table, key, value):
    config = with_environment(Config(), variables)
    assert getattr(getattr(config, table), key) == value


@pytest.mark.parametrize(
    ("variables", "message", "hint"),
    [
        ({"ONEBIT_SERVER_PORT": "x"}, "ONEBIT_SERVER_PORT is 'x', wanted a port", ""),
        ({"ONEBIT_SERVER_STOP_S": "nan"}, "ONEBIT_SERVER_STOP_S is nan, wanted seconds", ""),
        ({"ONEBIT_WARMUP_ENABLED": "maybe"}, "is 'maybe', wanted true or false", ""),
        ({"ONEBIT_BACKEND_ARGS": "'a"}, "cannot be split into words", ""),
        ({"ONEBIT_NO_WARMUP": "maybe"}, "ONEBIT_NO_WARMUP is 'maybe'", "1, true and yes"),
        ({"ONEBIT_SERVER_PROT": "1"}, "ONEBIT_SERVER_PROT names no key", "ONEBIT_SERVER_PORT?"),
        ({"ONEBIT_LOG_ZZZ": "1"}, "ONEBIT_LOG_ZZZ names no key", ""),
        ({"ONEBIT_NO_WARMPU": "1"}, "ONEBIT_NO_WARMPU names no key", "ONEBIT_NO_WARMUP?"),
        ({"ONEBIT_LAMA_SERVER": "a"}, "names no key", "ONEBIT_LLAMA_SERVER?"),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused_by_name(variables, message, hint):
    with pytest.raises(ConfigError) as caught:
        with_environment(Config(), variables)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "name",
    ["ONEBIT_PREFILL_DEVICE", "ONEBIT_PREFILL_MIN_TOKENS", "ONEBIT_LLAMA_SERVER", "ONEBIT_HRX_X"],
)
def test_variables_of_backends_are_left_alone(name):
    assert with_environment(Config(), {name: "1"}) == Config()


def test_flags_win_over_variables_and_those_over_the_file():
    config = parse("[server]\nport = 1\nstop_s = 1\n[log]\nformat = 'json'", "serve.toml")
    config = with_environment(config, {"ONEBIT_SERVER_PORT": "2", "ONEBIT_SERVER_STOP_S": "2"})
    config = with_flags(config, {"server.port": ("-p", "3")})
    assert config.server == msgspec.structs.replace(Config().server, port=3, stop_s=2)
    assert config.log.format == "json"


def test_a_flag_that_cannot_be_used_is_named_as_it_was_spelled():
    with pytest.raises(ConfigError, match=r"--ctx-size is '4k', wanted a whole number"):
        with_flags(Config(), {"backend.ctx_size": ("--ctx-size", "4k")})


def test_the_nearest_word_is_a_hint_and_nothing_else_is():
    assert nearest("prot", ("host", "port")) == "did you mean port?"
    assert nearest("zzz", ("host", "port")) == ""
