from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from onebit_serve.cli.route import command
from onebit_serve.core.errors import ConfigError, UsageError

POLICY = {
    "default": "hrx",
    "classes": {"code": {"device": "CUDA0", "why": "faster"}, "long_doc": {"device": "rocm"}},
}


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(POLICY))
    return str(path)


def run(*words, text=None):
    return CliRunner().invoke(command, words, input=text, catch_exceptions=False)


def test_a_long_text_is_decided_without_asking(policy) -> None:
    result = run("--state", "-", "--policy", policy, text="x" * 2000)
    assert result.exit_code == 0
    assert "X-1bit-Route: long_doc - rocm" in result.output
    assert "2000 characters, 1024 or more" in result.output


def test_a_short_text_shows_what_would_follow_from_each_answer(policy) -> None:
    result = run("--state", "Write a function.", "--policy", policy)
    assert "code   -> CUDA0  (faster)" in result.output
    assert "else   -> hrx  (confidence below 0.16, or no answer)" in result.output


def test_a_device_that_cannot_run_the_model_is_told(policy) -> None:
    result = run("--state", "x", "--policy", policy, "--devices", "hrx,rocm")
    assert "note     code goes to hrx: CUDA0 cannot run this model" in result.output


def test_json_is_for_programs(policy) -> None:
    explained = json.loads(run("--state", "x" * 1024, "--policy", policy, "--json").output)
    assert (explained["class"], explained["device"]) == ("long_doc", "rocm")
    explained = json.loads(run("--state", "x", "--policy", policy, "--json").output)
    assert explained["if"]["code"]["device"] == "CUDA0"


def test_without_a_policy_all_goes_to_auto() -> None:
    assert "X-1bit-Route: long_doc - auto" in run("--state", "x" * 1024).output


def test_a_scorer_that_is_not_there_means_the_default(policy) -> None:
    result = run("--state", "x", "--policy", policy, "--scorer", "http://127.0.0.1:1")
    assert "X-1bit-Route: default - hrx" in result.output
    assert "Laya is down" in result.output


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--policy", "/nowhere/policy.json"), UsageError),
        (("--scorer", "http://example.org:80"), ConfigError),
    ],
)
def test_what_cannot_be_used_is_refused(words, error) -> None:
    with pytest.raises(error):
        run("--state", "x", *words)


def test_the_policy_that_we_ship_is_read(pytestconfig) -> None:
    shipped = pytestconfig.rootpath / "configs" / "route-policy.json"
    assert "short  -> vulkan" in run("--state", "x", "--policy", str(shipped)).output
