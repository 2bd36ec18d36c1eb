"""What the settings and the devices make of routing."""

from __future__ import annotations

import pytest

from onebit_serve.core.config import Laya
from onebit_serve.core.errors import ConfigError
from onebit_serve.core.facts import Device
from onebit_serve.core.plan import BackendPlan
from onebit_serve.core.policy import Policy, Route
from onebit_serve.core.route import named
from onebit_serve.core.routing import ScorerWish, device_words, in_words, scorer_wish, wanted
from onebit_serve.core.wire import Refusal


def backend(name, served_id, role="chat"):
    return BackendPlan(name, served_id, "cpu", "llama-server", role, "/bin/x", "m.gguf", ())


ONE = (backend("hrx", "m"), backend("vulkan", "m"))
TWO = (backend("big", "large"), backend("small", "tiny"))


@pytest.mark.parametrize(
    ("backends", "model", "found"),
    [
        (ONE, "", None),
        (ONE, "m", None),
        (ONE, "auto", None),
        (ONE, "gpt-4o", None),
        (ONE, "vulkan", "vulkan"),
        (ONE[:1], "m", None),
        (ONE[:1], "hrx", "hrx"),
        (TWO, "", None),
        (TWO, "auto", None),
        (TWO, "tiny", "small"),
        (TWO, "small", "small"),
        ((*ONE, backend("e", "embed", "embedding")), "embed", "e"),
        ((*ONE, backend("e", "embed", "embedding")), "other", None),
    ],
)
def test_a_request_names_a_backend_or_leaves_it_to_the_routes(backends, model, found):
    assert named(backends, model) == found


def test_an_unknown_model_among_several_is_refused_with_the_ids():
    refused = named(TWO, "gpt-4o")
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (404, "model_not_found")
    assert "large, tiny, and auto picks one" in refused.message


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ((), ("cpu",)),
        (("Vulkan0", "HRX0"), ("hrx", "vulkan", "cpu")),
        (("CUDA0", "ROCm0", "BLAS"), ("rocm", "CUDA0", "cpu")),
    ],
)
def test_devices_are_in_the_order_of_auto(listed, words):
    assert device_words([Device(name, "") for name in listed]) == words


def test_a_policy_may_call_devices_as_the_program_lists_them():
    policy = Policy("HRX0", {"code": Route("Vulkan0", "w"), "short": Route("CUDA0")})
    assert in_words(policy) == Policy(
        "hrx", {"code": Route("vulkan", "w"), "short": Route("CUDA0")}
    )


@pytest.mark.parametrize(
    ("settings", "is_on", "wish"),
    [
        (Laya(), False, None),
        (Laya(deadline_s=5), False, None),
        (Laya(policy="p.json"), True, None),
        (Laya(enabled=True), True, ScorerWish("http")),
        (Laya(model="m.gguf"), True, ScorerWish("daemon", model="m.gguf")),
        (Laya(scorer="http", model="laya-en"), True, ScorerWish("http", model="laya-en")),
        (Laya(url="http://127.0.0.1:9"), True, ScorerWish("http", port=9)),
        (
            Laya(scorer="llama-server", model="m.gguf"),
            True,
            ScorerWish("llama-server", ("/found",), "m.gguf"),
        ),
    ],
)
def test_the_settings_say_whether_and_whom_to_ask(settings, is_on, wish):
    assert wanted(settings) == is_on
    assert scorer_wish(settings, llama_server="/found", restart=True) == wish


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Laya(url="http://10.0.0.1:9"), "no address of a scorer on this machine"),
        (Laya(url="http://127.0.0.1:9", command=("laya",)), "and command one to start"),
        (Laya(url="http://127.0.0.1:9", scorer="daemon"), "one to start"),
        (Laya(scorer="daemon"), "needs a model"),
        (Laya(command=("laya-serve", "--host", "0.0.0.0")), "beyond this machine"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        scorer_wish(settings, llama_server="/found", restart=True)
