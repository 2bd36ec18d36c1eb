from __future__ import annotations

import math

import pytest

from onebit_serve.core.config import Backend, Config, Server, Warmup
from onebit_serve.core.errors import UsageError
from onebit_serve.core.facts import BinaryFacts, Device, ModelFacts
from onebit_serve.core.plan import (
    LIBHSA_VARIABLE,
    BackendPlan,
    Found,
    Plan,
    choose_device,
    is_loopback,
    make,
    served_id,
    wants_libhsa,
)

HEAD = "-m m.gguf --host 127.0.0.1 --port {port} --alias m"
OPTIONS = dict.fromkeys(["--jinja", "--spec-type", "-ngl", "--device"], 1)


def binary(*devices: str, version: str = "version: 1 (571d0d5)", **more: object) -> BinaryFacts:
    return BinaryFacts(
        path="/opt/llama-server",
        version=version,
        devices=tuple(Device(name) for name in devices),
        **{"options": OPTIONS, **more},
    )


def plan(
    *,
    devices: tuple[str, ...] = ("HRX0", "Vulkan0", "ROCm0", "CUDA0"),
    facts: BinaryFacts | None = None,
    header: ModelFacts | None = None,
    environment: dict[str, str] | None = None,
    server: Server | None = None,
    warmup: Warmup | None = None,
    libhsa: str | None = None,
    embedded: bool = False,
    **backend: object,
) -> Plan:
    return make(
        Config(
            server=server or Server(),
            warmup=warmup or Warmup(),
        ),
        [
            Found(
                Backend(**{"model": "m.gguf", **backend}),
                facts or binary(*devices),
                header or ModelFacts("m.gguf", 1),
                libhsa,
            )
        ],
        environment=environment or {},
        embedded=embedded,
    )


def one(**arguments: object) -> BackendPlan:
    return plan(**arguments).backends[0]


def line(**arguments: object) -> str:
    return " ".join(one(**arguments).arguments)


@pytest.mark.parametrize(
    ("device", "word", "arguments"),
    [
        ("hrx", "hrx", "--device HRX0 -ngl 99 --jinja"),
        ("HRX", "hrx", "--device HRX0 -ngl 99 --jinja"),
        ("HRX0", "hrx", "--device HRX0 -ngl 99 --jinja"),
        ("vulkan", "vulkan", "--device Vulkan0 -ngl 99 --jinja"),
        ("rocm", "rocm", "--device ROCm0 -ngl 99 --jinja"),
        ("cpu", "cpu", "--device none"),
        ("none", "cpu", "--device none"),
        ("CUDA0", "CUDA0", "--device CUDA0 -ngl 99 --jinja"),
        ("cuda0", "CUDA0", "--device CUDA0 -ngl 99 --jinja"),
        ("CUDA0,Vulkan0", "CUDA0,Vulkan0", "--device CUDA0,Vulkan0 -ngl 99 --jinja"),
    ],
)
def test_a_device_word_becomes_arguments(device, word, arguments):
    made = one(device=device)
    assert made.device == word
    assert " ".join(made.arguments) == f"{HEAD} {arguments}"


@pytest.mark.parametrize(
    ("listed", "word"),
    [
        (("Vulkan0", "HRX0", "ROCm0"), "hrx"),
        (("ROCm0", "Vulkan0"), "vulkan"),
        (("CUDA0", "ROCm0"), "rocm"),
        (("BLAS", "CUDA0", "MTL0"), "CUDA0"),
        (("BLAS", "CPU"), "cpu"),
        ((), "cpu"),
    ],
)
def test_auto_takes_the_first_that_is_listed(listed, word):
    assert choose_device(Backend(device="auto"), binary(*listed)).word == word


@pytest.mark.parametrize(
    ("device", "listed", "says", "hint"),
    [
        ("hrx", ("Vulkan0", "CUDA0"), "lists no device hrx; it lists Vulkan0, CUDA0", "`cpu`"),
        ("vulkan", (), "lists no device vulkan; it lists none", "`cpu`"),
        ("Vulkan1", ("Vulkan0",), "lists no device Vulkan1; it lists Vulkan0", "did you mean"),
        ("vulcan", ("Vulkan0",), "lists no device vulcan", "did you mean vulkan?"),
        ("CUDA0,CUDA1", ("CUDA0",), "lists no device CUDA0,CUDA1", ""),
    ],
)
def test_a_device_that_is_not_listed_is_refused_with_those_that_are(device, listed, says, hint):
    with pytest.raises(UsageError) as caught:
        plan(device=device, devices=listed)
    assert says in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("model", "alias", "identity", "given"),
    [
        ("/a/b/Qwen.Q4.gguf", None, "Qwen.Q4", "Qwen.Q4"),
        ("x.GGUF", None, "x", "x"),
        ("x-00001-of-00003.gguf", None, "x", "x"),
        ("x-00001-of-003.gguf", None, "x-00001-of-003", "x-00001-of-003"),
        ("model.bin", None, "model.bin", "model.bin"),
        (".gguf", None, ".gguf", ".gguf"),
        ("x.gguf", "org/any: näme", "org/any: näme", "org/any: näme"),
        ("x.gguf", "first, second", "first", "first, second"),
    ],
)
def test_the_served_id_is_the_alias_or_the_file_name(model, alias, identity, given):
    assert served_id(Backend(model=model, alias=alias)) == identity
    made = one(model=model, alias=alias, device="cpu")
    assert made.served_id == identity
    assert made.arguments[made.arguments.index("--alias") + 1] == given


def test_context_and_slots_are_given_only_where_they_are_asked_for():
    assert line(device="cpu", ctx_size=4096, parallel=2).endswith("--device none -c 4096 -np 2")
    assert line(device="cpu", ctx_size=0, parallel=-1) == f"{HEAD} --device none"


def test_the_port_is_filled_in_at_the_start():
    command = one(device="cpu").command(4711)
    assert command[:7] == [
        "/opt/llama-server",
        *("-m", "m.gguf", "--host", "127.0.0.1", "--port", "4711"),
    ]


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        (("-ngl", "5"), "--device HRX0 --jinja -ngl 5"),
        (("--n-gpu-layers=5",), "--device HRX0 --jinja --n-gpu-layers=5"),
        (("--no-jinja",), "--device HRX0 -ngl 99 --no-jinja"),
        (("--ctx-size", "7"), "--device HRX0 -ngl 99 --jinja --ctx-size 7"),
        (("--device", "CUDA0"), "-ngl 99 --jinja --device CUDA0"),
        (("--no-warmup",), "--device HRX0 -ngl 99 --jinja --no-warmup"),
    ],
)
def test_the_users_own_arguments_replace_those_of_a_preset(args, kept):
    assert line(device="hrx", args=args) == f"{HEAD} {kept}"


def test_an_option_that_the_build_does_not_have_is_left_out():
    facts = binary("HRX0", options={"-ngl": 1})
    assert line(device="hrx", facts=facts) == f"{HEAD} --device HRX0 -ngl 99"
    facts = binary("HRX0", options={})
    assert line(device="hrx", facts=facts) == f"{HEAD} --device HRX0 -ngl 99 --jinja"


@pytest.mark.parametrize("word", ["--host", "--port=1", "--alias", "--api-key", "-a"])
def test_arguments_from_the_file_are_checked_too(word):
    with pytest.raises(UsageError, match="cannot be given to the backend"):
        plan(args=(word, "x"))


@pytest.mark.parametrize(
    ("role", "context", "trained", "args", "end"),
    [
        ("embedding", 8192, 2048, (), "-c 8192 --embedding -b 8192 -ub 8192"),
        ("embedding", 0, 2048, (), "--embedding -b 2048 -ub 2048"),
        ("embedding", 0, 131072, (), "--embedding -b 8192 -ub 8192"),
        ("embedding", 0, None, (), "--embedding"),
        ("rerank", 0, 512, (), "--reranking -b 512 -ub 512"),
        ("embedding", 0, 2048, ("-ub", "9"), "--embedding -b 2048 -ub 9"),
        ("chat", 0, 2048, ("--embeddings",), "-b 2048 -ub 2048 --embeddings"),
        ("chat", 0, 2048, ("--rerank",), "-b 2048 -ub 2048 --rerank"),
    ],
)
def test_the_batch_of_embeddings_follows_the_context(role, context, trained, args, end):
    header = ModelFacts("m.gguf", 1, context_length=trained)
    made = one(device="cpu", role=role, ctx_size=context, args=args, header=header)
    assert " ".join(made.arguments) == f"{HEAD} --device none {end}"
    assert made.role == ("embedding" if "embedding" in end else "rerank")


def test_a_draft_head_adds_speculation():
    assert line(device="cpu", mtp="h.gguf", mtp_max=3, mtp_p_min=0.5).endswith(
        "--spec-type draft-mtp -md h.gguf -ngld 99 --spec-draft-n-max 3 --spec-draft-p-min 0.5"
    )
    assert line(device="cpu", mtp="h.gguf").endswith("--spec-type draft-mtp -md h.gguf -ngld 99")


def test_prefill_on_hrx_sets_flash_attention_and_variables():
    made = one(device="vulkan", prefill_device="hrx", prefill_min_tokens=64, libhsa="/r/l.so")
    assert " ".join(made.arguments).endswith("--device Vulkan0 -ngl 99 --jinja -fa on")
    assert made.set_env == {
        "ONEBIT_PREFILL_DEVICE": "HRX0",
        "ONEBIT_PREFILL_MIN_TOKENS": "64",
        LIBHSA_VARIABLE: "/r/l.so",
    }


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": None}, "no model is named"),
        ({"mtp_max": 3}, "need --mtp"),
        ({"mtp_p_min": 0.0}, "need --mtp"),
        ({"mtp": "h", "facts": binary("HRX0", options={"-ngl": 1})}, "needs --spec-type"),
        ({"prefill_device": "hrx", "device": "rocm"}, "needs --device vulkan, not rocm"),
        ({"prefill_device": "hrx"}, "needs --device vulkan, not hrx"),
        ({"prefill_device": "cpu", "device": "vulkan"}, "only hrx can prefill"),
        (
            {"prefill_device": "hrx", "device": "vulkan", "devices": ("Vulkan0",)},
            "lists no device hrx",
        ),
        ({"prefill_min_tokens": 3}, "needs --prefill-device"),
        ({"device": "zinc", "parallel": 2}, "--parallel is not for zinc"),
        ({"device": "zinc", "mtp": "h"}, "--mtp is not for zinc"),
        ({"device": "zinc", "prefill_device": "hrx"}, "--prefill-device is not for zinc"),
        ({"device": "mlx", "ctx_size": 9}, "--ctx-size is not for mlx"),
        ({"device": "mlx", "role": "rerank"}, "--reranking is not for mlx"),
        ({"env": {"LLAMA_API_KEY": "k"}}, "sets LLAMA_API_KEY"),
        ({"env": {"LLAMA_ARG_PORT": "1"}}, "sets LLAMA_ARG_PORT"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, says):
    with pytest.raises(UsageError) as caught:
        plan(**settings)
    assert says in caught.value.message
    assert caught.value.hint


def test_zinc_has_a_command_line_of_its_own():
    made = one(device="zinc", facts=BinaryFacts("/opt/zinc"), ctx_size=512, args=("-x",))
    assert made.command(9) == ["/opt/zinc", *["-m", "m.gguf", "-p", "9", "-c", "512", "-x"]]
    assert (made.kind, made.device, made.served_id) == ("zinc", "zinc", "m")
    assert made.set_env == {"RADV_PERFTEST": "coop_matrix"}
    assert made.upstream_model == ""
    assert made.warm_up.skip == ""


def test_mlx_serves_a_hub_id():
    made = one(device="mlx", facts=BinaryFacts("/opt/mlx"), model="org/Name-4bit")
    assert made.arguments == ("org/Name-4bit", "--port", "{port}")
    assert (made.kind, made.served_id, made.upstream_model) == ("mlx", *["org/Name-4bit"] * 2)


def test_bodies_of_llama_server_pass_unchanged():
    assert one().upstream_model is None


@pytest.mark.parametrize(
    ("environment", "settings", "libhsa", "wanted"),
    [
        ({}, {"device": "hrx"}, "/found", "/found"),
        ({}, {"device": "hrx"}, None, None),
        ({LIBHSA_VARIABLE: "/mine"}, {"device": "hrx"}, "/found", None),
        ({LIBHSA_VARIABLE: "/mine"}, {"device": "hrx", "hrx_libhsa": "/flag"}, None, "/flag"),
        ({}, {"device": "hrx", "env": {LIBHSA_VARIABLE: "/file"}}, "/found", "/file"),
        ({}, {"device": "vulkan"}, "/found", None),
    ],
)
def test_hrx_gets_its_runtime_and_the_users_value_wins(environment, settings, libhsa, wanted):
    made = one(environment=environment, libhsa=libhsa, **settings)
    assert made.set_env.get(LIBHSA_VARIABLE) == wanted


@pytest.mark.parametrize(
    ("environment", "settings", "wanted"),
    [
        ({}, {"device": "auto"}, True),
        ({}, {"device": "HRX0"}, True),
        ({}, {"device": "vulkan", "prefill_device": "hrx"}, True),
        ({}, {"device": "vulkan"}, False),
        ({}, {"device": "hrx", "hrx_libhsa": "/flag"}, False),
        ({LIBHSA_VARIABLE: "/mine"}, {"device": "hrx"}, False),
        ({}, {"device": "hrx", "env": {LIBHSA_VARIABLE: "/file"}}, False),
    ],
)
def test_the_runtime_is_looked_for_only_where_it_matters(environment, settings, wanted):
    assert wants_libhsa(Backend(**settings), environment) is wanted


def test_a_variable_that_the_user_set_wins_over_the_presets():
    made = one(device="zinc", environment={"RADV_PERFTEST": "mine"})
    assert made.set_env == {}


def test_children_do_not_see_keys_nor_what_we_set():
    made = one(device="vulkan", ctx_size=512)
    assert {
        "LLAMA_API_KEY",
        "LLAMA_ARG_MODEL",
        "LLAMA_ARG_HOST",
        "LLAMA_ARG_PORT",
        "LLAMA_ARG_ALIAS",
        "LLAMA_ARG_DEVICE",
        "LLAMA_ARG_N_GPU_LAYERS",
        "LLAMA_ARG_CTX_SIZE",
        "LLAMA_ARG_API_PREFIX",
    } <= set(made.unset_env)
    assert "LLAMA_ARG_N_PARALLEL" not in made.unset_env
    assert "LLAMA_ARG_CTX_SIZE" not in one(device="vulkan").unset_env


@pytest.mark.parametrize(
    ("device", "warmup", "embedded", "skip"),
    [
        ("hrx", Warmup(), False, ""),
        ("CUDA0", Warmup(), False, ""),
        ("cpu", Warmup(), False, "cpu"),
        ("cpu", Warmup(), True, ""),
        ("cpu", Warmup(enabled=False), True, "off"),
        ("cpu", Warmup(enabled=False), False, "off"),
        ("hrx", Warmup(enabled=False), False, "off"),
        ("hrx", Warmup(devices=("vulkan",)), False, "off"),
        ("hrx", Warmup(devices=("HRX",)), False, ""),
        ("hrx", Warmup(devices=("HRX0",)), False, ""),
        ("cpu", Warmup(devices=("cpu",)), False, ""),
        ("cpu", Warmup(devices=()), False, "cpu"),
        ("CUDA0", Warmup(devices=("cuda0",)), False, ""),
    ],
)
def test_the_warm_up_is_skipped_for_a_reason(device, warmup, embedded, skip):
    assert one(device=device, warmup=warmup, embedded=embedded).warm_up.skip == skip


@pytest.mark.parametrize(
    ("name", "hint"), [("vulcan", "did you mean vulkan?"), ("zzz", "names like Vulkan0")]
)
def test_a_device_to_warm_up_that_is_none_is_refused(name, hint):
    with pytest.raises(UsageError, match=f"names no device: {name}") as caught:
        one(device="hrx", warmup=Warmup(devices=("hrx", name)))
    assert hint in caught.value.hint


def test_the_warm_up_has_its_limits():
    made = one(warmup=Warmup(prompt_tokens=9, decode_tokens=2, deadline_s=5.0)).warm_up
    assert (made.prompt_tokens, made.decode_tokens, made.deadline_s) == (9, 2, 5.0)


def test_zero_is_no_limit():
    limits = one(hang_s=0.0, load_stall_s=0.0, load_limit_s=0.0).limits
    assert (limits.hang_s, limits.load_stall_s, limits.load_limit_s) == (math.inf,) * 3
    limits = one(hang_s=5.0, load_stall_s=6.0, load_limit_s=7.0).limits
    assert (limits.hang_s, limits.load_stall_s, limits.load_limit_s) == (5.0, 6.0, 7.0)


def several(*backends: dict[str, object]) -> tuple[str, ...]:
    found = [
        Found(Backend(**{"model": "m.gguf", **one}), binary("Vulkan0"), ModelFacts("m.gguf", 1))
        for one in backends
    ]
    return tuple(one.name for one in make(Config(), found, environment={}).backends)


def test_several_backends_are_called_by_their_served_ids():
    assert several({"model": "a.gguf"}, {"model": "b.gguf"}) == ("a", "b")
    assert several({"name": "x"}, {"alias": "y"}) == ("x", "y")
    assert several({"device": "cpu"}, {"device": "vulkan"}) == ("m-cpu", "m-vulkan")


def test_two_backends_of_one_name_are_refused():
    with pytest.raises(UsageError, match="two backends are called m-cpu"):
        several({"device": "cpu"}, {"device": "cpu"})
    assert one(warmup=Warmup(deadline_s=0.0)).warm_up.deadline_s == math.inf


@pytest.mark.parametrize(
    ("version", "assemble"),
    [
        ("version: 1 (571d0d5)", False),
        ("version: 1 (86a2835)", True),
        ("version: 0.6.0-dev (86a2835)", True),
        (None, False),
    ],
)
def test_builds_that_miss_departures_are_asked_for_streams(version, assemble):
    assert one(facts=binary("Vulkan0", version=version)).assemble is assemble


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_hosts_are_served(host):
    assert plan(server=Server(host=host)).server.host == host.strip("[]")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", "127.evil.org"])
def test_other_hosts_are_not_loopback(host):
    assert not is_loopback(host)


def test_a_backend_is_named_by_its_device_or_its_key():
    assert one(device="hrx").name == "hrx"
    assert one(device="hrx", name="main").name == "main"
