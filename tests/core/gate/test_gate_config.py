from __future__ import annotations

from pathlib import Path

import pytest

from onebit_serve.core.errors import ConfigError, UsageError
from onebit_serve.core.gate.config import parse, select

ROOT = Path(__file__).parents[3]
SHIPPED = (ROOT / "configs" / "hw-gate.toml").read_text()
RELEASE = [
    "qwen3.8-27b",
    "zaya1-8b",
    "qwen3-coder-30b-a3b",
    "qwen3-4b-iq4xs",
    "qwen3-0.6b",
    "qwen3-0.6b-kq8",
    "qwen3-0.6b-kvq8",
]
SMALL = """
[profiles.p]
quick = ["kat"]
full = ["ops", "kat", "kld"]
[kat]
tokens = 9
questions = [{ name = "a", user = "b" }]
[[models]]
name = "one"
profile = "p"
model = "${WHERE}/one.gguf"
device = "cpu"
omit = ["ops"]
kat = { tokens = 5 }
"""


def small(text=SMALL, env=None):
    return parse(text, "gate.toml", env if env is not None else {"WHERE": "/models"})


def test_the_shipped_file_has_the_seven_release_models_and_an_embedded_profile():
    gate = parse(SHIPPED, "hw-gate.toml", {"ONEBIT_MODELS": "/m", "ONEBIT_TINY_MODEL": "/t.gguf"})
    assert [m.name for m in gate.models if m.profile == "release"] == RELEASE
    chosen = select(gate, "full", "release", (), ())
    assert chosen[0][0].needle.tokens == 7000
    assert all({"kat", "kld", "placement", "needle", "ring", "warm"} <= set(c) for _, c in chosen)
    embedded = select(gate, "full", "embedded", (), ())
    assert [checks for _, checks in embedded] == [
        ("placement", "kat", "kld", "needle", "reuse", "warm")
    ]


def test_every_key_of_a_check_is_in_the_shipped_file():
    from onebit_serve.core.gate import config

    for table in (config.Kat, config.Kld, config.Needle, config.Warm, config.Reuse, config.Ops):
        for name in table.__struct_fields__:
            assert f"{name} = " in SHIPPED or f"{table.__name__.lower()}.{name}]]" in SHIPPED


def test_a_table_holds_for_all_models_and_a_model_overrides_single_keys():
    model = small().models[0]
    assert model.kat.tokens == 5
    assert model.kat.questions[0].name == "a"


def test_variables_of_the_environment_are_filled_in_and_unset_ones_stay():
    assert small().models[0].model == "/models/one.gguf"
    assert small(env={}).models[0].model == "${WHERE}/one.gguf"


def test_checks_run_in_their_order_without_those_that_the_model_omits():
    assert select(small(), "full", "p", (), ())[0][1] == ("kat", "kld")
    assert select(small(), "quick", "p", (), ())[0][1] == ("kat",)


def test_a_check_that_is_asked_for_by_name_runs_although_it_is_omitted():
    assert select(small(), "quick", "p", (), ("ops",))[0][1] == ("ops",)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("tokens = 9", "tokens = 9\nbogus = 1", "bogus"),
        ("tokens = 5", 'tokens = "many"', "tokens"),
        ('device = "cpu"', "", "device"),
        ('quick = ["kat"]', 'quick = ["cat"]', "cat"),
        ('omit = ["ops"]', 'omit = ["cat"]', "cat"),
        ('profile = "p"', 'profile = "q"', "'q'"),
        ('name = "one"', 'name = "../one"', "no file name"),
        ("[kat]", "[cat]", "cat"),
        ("[profiles.p]", "[profiles.p", "line"),
    ],
)
def test_what_is_wrong_is_refused_and_named(old, new, word):
    with pytest.raises(ConfigError) as caught:
        small(SMALL.replace(old, new))
    assert word in caught.value.message
    assert "gate.toml" in caught.value.message


def test_two_models_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two models"):
        small(SMALL + SMALL[SMALL.index("[[models]]") :])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("quick", "p", ("two",), ()), "two"),
        (("quick", "q", (), ()), "'q'"),
        (("quick", "p", (), ("cat",)), "cat"),
        (("quick", "p", (), ("load",)), "load"),
    ],
)
def test_what_is_asked_for_and_not_there_is_refused(arguments, word):
    with pytest.raises(UsageError) as caught:
        select(small(), *arguments)
    assert word in caught.value.message
