from __future__ import annotations

import msgspec
import pytest

from onebit_serve.core.facts import Device, ModelFacts
from onebit_serve.core.memory import Fit, Memory, Need, check, judge, memory_of, need
from onebit_serve.core.plan import BackendPlan
from onebit_serve.live.machine import model_facts

GIB = 1 << 30
# What the headers of a Llama 3 8B say.
LLAMA = ModelFacts(
    "m.gguf",
    8 * GIB,
    block_count=32,
    embedding_length=4096,
    head_count=32,
    head_count_kv=8,
)


def test_the_cache_of_a_known_model_is_computed():
    # llama.cpp prints 1024.00 MiB for Llama 3 8B with 8,192 tokens in f16.
    assert need(LLAMA, ctx_tokens=8192) == Need(8 * GIB, GIB)


def test_a_quantised_cache_is_smaller():
    cache = need(LLAMA, ctx_tokens=8192, key_type="q8_0", value_type="q8_0").cache_bytes
    assert cache == GIB * 34 // 64


def test_lengths_in_the_header_win_over_the_share_of_a_head():
    facts = msgspec.structs.replace(LLAMA, key_length=256, value_length=64)
    assert need(facts, ctx_tokens=1).cache_bytes == 32 * 8 * (256 + 64) * 2


@pytest.mark.parametrize("gone", ["block_count", "head_count"])
def test_what_the_header_does_not_say_is_not_guessed(gone):
    facts = msgspec.structs.replace(LLAMA, **{gone: None})
    assert need(facts, ctx_tokens=8192).cache_bytes is None


def test_a_context_that_the_program_chooses_is_not_guessed():
    assert need(LLAMA).cache_bytes is None
    assert need(LLAMA, ctx_tokens=8, key_type="new_type").cache_bytes is None


@pytest.mark.parametrize(
    ("cache", "total", "free", "word"),
    [
        (None, 7, None, "too_large"),
        (None, 7, 6, "too_large"),
        (None, 16, 7, "tight"),
        (2, 16, 9, "tight"),
        (9, 16, None, "tight"),
        (None, 16, None, "fits"),
        (1, 16, 9, "fits"),
        (None, 8, 8, "fits"),
        (None, None, 7, "tight"),
        (1, None, None, "unknown"),
    ],
)
def test_a_need_is_held_against_what_there_is(cache, total, free, word):
    wanted = Need(8 * GIB, cache and cache * GIB)
    memory = Memory("Vulkan0", total and total * GIB, free and free * GIB)
    assert judge(wanted, memory, "m").word == word


def test_the_message_says_need_and_have():
    assert judge(Need(8 * GIB), Memory("Vulkan0", 7 * GIB), "m") == Fit(
        "too_large", "m cannot fit: its weights need 8.0 GiB, Vulkan0 has 7.0 GiB in all"
    )
    found = judge(Need(8 * GIB, GIB), Memory("this machine", 16 * GIB, GIB // 2), "m")
    assert found.message == (
        "m may not fit: it needs about 8.0 GiB for its weights and at most 1.0 GiB for its "
        "context, this machine has 512 MiB free"
    )


def look(device, *listed):
    return memory_of(device, listed, machine_total_bytes=2, machine_free_bytes=1)


def test_the_memory_is_that_of_the_device():
    listed = Device("Vulkan0", "a card", 2048, 1024)
    assert look("vulkan0", listed) == Memory("Vulkan0", 2 * GIB, GIB)
    assert look("none", listed) == look("") == Memory("this machine", 2, 1)


def test_an_unknown_device_has_unknown_memory():
    listed = (Device("HRX0", "a card"), Device("CUDA0", "a card", 0, 0))
    assert look("HRX0", *listed) == Memory("HRX0")
    assert look("CUDA0", *listed) == Memory("CUDA0")
    assert look("CUDA0,HRX0", *listed) == Memory("CUDA0,HRX0")


def test_a_real_header_gives_the_facts(tiny_models):
    # llama-server b10068 prints for it, with 8,192 cells: K (f16): 1.00 MiB, V (f16): 1.00 MiB.
    facts = model_facts(str(tiny_models / "tiny-llama.gguf"))
    assert need(facts, ctx_tokens=8192).cache_bytes == 2 << 20


def planned(line, kind="llama-server"):
    words = tuple(line.split())
    return BackendPlan("gpu", "m", "x", kind, "chat", "/llama-server", "m.gguf", words)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--device Vulkan0 -ngl 99", "too_large"),
        ("--device Vulkan1 -ngl 99", "unknown"),
        ("--device Vulkan0 -ngl 10", "unknown"),
        ("--device Vulkan0 -ngl 99 --cpu-moe", "unknown"),
        ("--device Big0 -ngl 99 -c 8192", "fits"),
        ("--device Big0 -ngl 99 -c 131072", "tight"),
        ("--device Big0 -ngl 99 -c 131072 -ctk q4_0 -ctv q4_0", "fits"),
        ("--device none", "tight"),
        ("--device none --no-mmap", "too_large"),
    ],
)
def test_a_backend_is_judged_by_its_command_line(line, word):
    listed = (Device("Vulkan0", "", 4096, None), Device("Big0", "", 16384, None))
    machine = {"machine_total_bytes": 4 * GIB, "machine_free_bytes": 2 * GIB}
    assert check(planned(line), LLAMA, listed, **machine).word == word
    assert check(planned(line), None, listed, **machine).word == "unknown"
    assert check(planned(line, "zinc"), LLAMA, listed, **machine).word == "unknown"
