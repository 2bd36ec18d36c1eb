from __future__ import annotations

import json

import pytest

from onebit_serve.core.errors import ConfigError
from onebit_serve.core.policy import MIN_CONFIDENCE, Policy, Route, parse_policy, resolve

DEVICES = ("hrx", "vulkan", "rocm", "cpu")
FULL = {
    "about": "measured on a Strix Halo",
    "min_confidence": 0.3,
    "default": "hrx",
    "classes": {"code": {"device": "vulkan", "why": "faster"}, "short": {"device": "hrx"}},
}


def parse(value):
    return parse_policy(json.dumps(value), "p.json", DEVICES)


def test_a_policy_is_read_with_its_reasons() -> None:
    assert parse(FULL) == Policy(
        "hrx",
        {"code": Route("vulkan", "faster"), "short": Route("hrx")},
        0.3,
        "measured on a Strix Halo",
    )


def test_a_key_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match='says "default" twice'):
        parse_policy('{"default": "cpu", "default": "hrx"}', "p.json", DEVICES)


def test_only_the_default_is_needed() -> None:
    assert parse({"default": "cpu"}) == Policy("cpu", {}, MIN_CONFIDENCE)


@pytest.mark.parametrize(
    ("value", "told", "hint"),
    [
        ([], "p.json: the file is not an object", ""),
        ({}, "p.json names no default", "default"),
        ({"default": "vulcan"}, 'default names the unknown device "vulcan"', "vulkan"),
        ({"default": 3}, "default is not text", ""),
        ({"default": "hrx", "deflaut": 1}, "deflaut is an unknown key", "default"),
        ({"default": "hrx", "classes": []}, "classes is not an object", ""),
        (
            {"default": "hrx", "classes": {"poetry": {"device": "hrx"}}},
            "classes.poetry is an unknown class",
            "code",
        ),
        ({"default": "hrx", "classes": {"code": {}}}, "classes.code names no device", "device"),
        ({"default": "hrx", "classes": {"code": "hrx"}}, "classes.code is not an object", ""),
        (
            {"default": "hrx", "classes": {"code": {"device": "npu"}}},
            'classes.code.device names the unknown device "npu"',
            "cpu",
        ),
        (
            {"default": "hrx", "classes": {"code": {"device": "hrx", "why": 1}}},
            "classes.code.why is not text",
            "",
        ),
        ({"default": "hrx", "min_confidence": 2}, "min_confidence is not a number from", ""),
        ({"default": "hrx", "min_confidence": True}, "min_confidence is not a number from", ""),
        ({"default": "hrx", "min_confidence": "0.2"}, "min_confidence is not a number from", ""),
    ],
)
def test_a_fault_is_told_with_its_place(value, told, hint) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(value)
    assert told in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("content", ["", "{", b"\xff"])
def test_what_is_no_json_is_told(content) -> None:
    with pytest.raises(ConfigError, match=r"p\.json is not JSON"):
        parse_policy(content, "p.json", DEVICES)


def test_every_class_has_a_device_and_a_reason() -> None:
    routes = resolve(parse(FULL), ["hrx", "vulkan"], {})
    assert routes.devices == {"code": "vulkan", "prose": "hrx", "short": "hrx", "long_doc": "hrx"}
    assert routes.whys["code"] == "faster"
    assert routes.whys["prose"] == "the policy has no word on it"
    assert routes.notes == ()
    assert routes.used == ("hrx", "vulkan")


def test_a_device_that_cannot_run_the_model_falls_back_to_the_default() -> None:
    routes = resolve(parse(FULL), ["hrx"], {"vulkan": "2 GiB are too little"})
    assert routes.devices["code"] == "hrx"
    assert routes.notes == (
        "code goes to hrx: vulkan cannot run this model (2 GiB are too little)",
    )


def test_a_default_that_cannot_is_replaced_by_the_first_of_auto_that_can() -> None:
    routes = resolve(parse(FULL), ["vulkan", "cpu"], {})
    assert routes.default == "vulkan"
    assert routes.devices["prose"] == "vulkan"
    assert routes.notes[0].startswith("the policy's default hrx cannot run this model")


def test_a_model_that_no_device_can_run_is_refused() -> None:
    with pytest.raises(ConfigError):
        resolve(parse(FULL), [], {})
