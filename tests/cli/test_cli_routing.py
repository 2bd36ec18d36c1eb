"""What `--laya` plans: a backend of each device that is used, the default's first and eager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onebit_serve.cli.prepare import prepare
from onebit_serve.cli.show import describe_plan
from onebit_serve.core.errors import UsageError
from onebit_serve.core.plan import Plan

SIZE = "(9 MiB, 9 MiB free)"
DEVICES = f"devices='HRX0: a {SIZE};Vulkan0: b {SIZE};CUDA0: c {SIZE}'"
ADDRESS = {"ONEBIT_LAYA_URL": "http://127.0.0.1:9"}


@pytest.fixture
def plan(fake_llama: str, tiny_models: Path, tmp_path: Path):
    model = str(tiny_models / "tiny-llama.gguf")

    def make(policy: Any = None, *words: str, config: str = "", **variables: str) -> Plan:
        flags = ["-m", model] if not config else []
        if policy is not None:
            (tmp_path / "p.json").write_text(json.dumps(policy))
            flags += ["--route-policy", str(tmp_path / "p.json")]
        if config:
            file = tmp_path / "serve.toml"
            file.write_text(config.replace("MODEL", json.dumps(model)))
            flags += ["--config", str(file)]
        environment = {"PATH": "/usr/bin:/bin", "FAKE_LLAMA": DEVICES, **ADDRESS, **variables}
        return prepare(["--llama-server", fake_llama, *flags, *words], environment).plan

    return make


def shown(plan: Plan) -> list[tuple[str, str, bool]]:
    return [(one.name, one.device, one.lazy) for one in plan.backends]


def test_each_device_that_is_used_gets_a_backend_and_no_other(plan) -> None:
    policy = {
        "default": "vulkan",
        "classes": {"code": {"device": "CUDA0"}, "long_doc": {"device": "HRX0", "why": "fast"}},
    }
    made = plan(policy, "--laya")
    assert shown(made) == [
        ("vulkan", "vulkan", False),
        ("CUDA0", "CUDA0", True),
        ("hrx", "hrx", True),
    ]
    text = describe_plan(made, {})
    assert "Laya on port 9 is asked" in text
    assert "long_doc -> hrx (fast)" in text
    assert "when a request first needs it" in text


def test_without_a_policy_all_goes_to_the_first_of_auto(plan) -> None:
    assert shown(plan(None, "--laya")) == [("hrx", "hrx", False)]


def test_a_policy_alone_routes_by_size_and_asks_nobody(plan) -> None:
    made = plan({"default": "cpu"}, ONEBIT_LAYA_URL="")
    assert made.routing.scorer is None
    assert shown(made) == [("cpu", "cpu", False)]


TWO = """
[backend]
model = MODEL
idle_s = 5
[[backends]]
name = "main"
device = "hrx"
lazy = true
[[backends]]
name = "other"
device = "{device}"
lazy = true
"""


def test_described_backends_keep_what_they_say_but_for_the_defaults_one(plan) -> None:
    made = plan({"default": "hrx"}, config=TWO.format(device="cpu"))
    assert shown(made) == [("main", "hrx", False), ("other", "cpu", True)]
    assert [one.limits.idle_s for one in made.backends] == [0, 5]
    assert made.routing.backends == {"hrx": "main"}
    assert made.routing.routes.used == ("hrx",)


@pytest.mark.parametrize(
    ("words", "policy", "config", "variables", "said"),
    [
        (["--laya", "--device", "cpu"], None, "", {}, "nothing to choose from"),
        (["--laya", "--embedding"], None, "", {}, "a backend that chats"),
        (["--laya"], {"default": "vulcan"}, "", {}, 'unknown device "vulcan"'),
        (["--route-policy", "/none"], None, "", {}, "cannot be read"),
        (["--laya"], None, "", {"ONEBIT_LAYA_URL": ""}, "laya-serve is not on PATH"),
        (["--laya-model", "none"], None, "", {"ONEBIT_LAYA_URL": ""}, "laya is not on PATH"),
        ([], None, "", {"ONEBIT_LAYA_URL": "http://10.1.1.1:1"}, "no address of a scorer"),
        ([], None, TWO.format(device="hrx"), {}, "both on hrx"),
    ],
)
def test_what_cannot_be_routed_is_refused(plan, words, policy, config, variables, said) -> None:
    with pytest.raises(UsageError) as caught:
        plan(policy, *words, config=config, **variables)
    assert said in caught.value.message
    assert caught.value.hint
