"""What a backend is started with so that it can keep warm prompts."""

from __future__ import annotations

import msgspec
import pytest

from onebit_serve.core import plan
from onebit_serve.core.config import Backend, Config, WarmPrompts
from onebit_serve.core.facts import BinaryFacts, ModelFacts
from onebit_serve.core.plan import Found
from onebit_serve.core.prompt_plan import PromptFile, PromptPlan, without_folder
from onebit_serve.core.warm_prompts import Entry

FILE = PromptFile((Entry(({"role": "system", "content": "Be brief."},)),), "/state/slots")
BINARY = BinaryFacts("/bin/llama-server", options={"--slot-save-path": 1, "--cache-ram": 1})
MODEL = ModelFacts(
    "m.gguf",
    1,
    architecture="llama",
    block_count=2,
    embedding_length=64,
    head_count=4,
    head_count_kv=2,
)


def planned(*, save=False, environment=None, binary=BINARY, **settings):
    backend = Backend(model="m.gguf", **{"device": "cpu", **settings})
    config = Config(backend=backend, warm_prompts=WarmPrompts(save=save, concurrency=3))
    found = [Found(backend, binary, MODEL)]
    made = plan.make(config, found, environment=environment or {}, prompts=FILE)
    return made.backends[0]


def test_a_backend_with_warm_prompts_gets_four_slots_and_a_place_to_erase_them():
    words = planned().arguments
    assert words[words.index("-np") + 1] == "4"
    assert words[words.index("--slot-save-path") + 1] == "/state/slots"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"parallel": 2}, ["-np", "2"]),
        ({"args": ("--parallel", "8")}, ["--parallel", "8"]),
        ({"environment": {"LLAMA_ARG_N_PARALLEL": "1"}}, []),
    ],
    ids=["setting", "argument", "variable"],
)
def test_the_users_own_number_of_slots_stands(settings, wanted):
    words = planned(**settings).arguments
    given = [i for i, word in enumerate(words) if word in ("-np", "--parallel")]
    assert [word for i in given for word in words[i : i + 2]] == wanted


def test_without_warm_prompts_nothing_is_added():
    backend = Backend(model="m.gguf", device="cpu")
    found = [Found(backend, BINARY, MODEL)]
    (one,) = plan.make(Config(backend=backend), found, environment={}).backends
    assert "-np" not in one.arguments
    assert "--slot-save-path" not in one.arguments
    assert one.prompts == PromptPlan()


def test_a_backend_that_does_not_chat_warms_no_prompts():
    one = planned(role="embedding")
    assert not one.prompts.entries
    assert "-np" not in one.arguments


def test_a_program_without_the_option_is_not_given_it():
    one = planned(binary=msgspec.structs.replace(BINARY, options={"--metrics": 0}))
    assert "--slot-save-path" not in one.arguments
    assert one.prompts.host_bytes == 0


@pytest.mark.parametrize(
    ("settings", "host_bytes"),
    [
        ({}, 8192 << 20),
        ({"args": ("-cram", "0")}, 0),
        ({"args": ("--cache-ram", "-1")}, None),
        ({"args": ("--cache-ram=100",)}, 100 << 20),
        ({"env": {"LLAMA_ARG_CACHE_RAM": "7"}}, 7 << 20),
    ],
)
def test_the_size_of_the_host_cache_is_what_the_child_was_told(settings, host_bytes):
    assert planned(**settings).prompts.host_bytes == host_bytes


def test_slots_are_saved_only_where_that_is_asked_for():
    assert planned().prompts.save_to == ""
    assert planned(save=True).prompts.save_to == "/state/slots"
    own = planned(save=True, args=("--slot-save-path", "/own"))
    assert own.prompts.save_to == "/own"
    assert own.arguments.count("--slot-save-path") == 1


def test_the_plan_says_how_much_at_once_and_what_a_token_takes():
    prompts = planned().prompts
    assert prompts.concurrency == 3
    # two layers, two heads of keys and values of 16 wide, two bytes each
    assert prompts.token_bytes == 2 * 2 * (16 + 16) * 2
    smaller = planned(args=("-ctk", "q8_0", "-ctv", "q4_1")).prompts
    assert smaller.token_bytes == 2 * 2 * 16 * (34 + 20) // 32


def test_only_a_folder_of_ours_is_ours_to_make_and_to_leave_out():
    ours = planned()
    assert ours.prompts.folder == "/state/slots"
    words = list(ours.arguments)
    at = words.index("--slot-save-path")
    assert without_folder(words) == words[:at] + words[at + 2 :]
    assert planned(args=("--slot-save-path", "/mine")).prompts.folder == ""
    assert without_folder(["-m", "m.gguf"]) == ["-m", "m.gguf"]
