from __future__ import annotations

import pytest

from onebit_serve.core.placement import judge, tells, wanted

# llama-server b10068 with a tiny model at -lv 4, as it printed it.
ON_VULKAN = """\
0.00.126.699 I load_tensors: offloading output layer to GPU
0.00.126.708 I load_tensors: offloading 1 repeating layers to GPU
0.00.126.714 I load_tensors: offloaded 3/3 layers to GPU
0.00.126.721 I load_tensors:   CPU_Mapped model buffer size =     0.17 MiB
0.00.126.728 I load_tensors:      Vulkan0 model buffer size =     0.54 MiB
0.00.127.399 I llama_context: Vulkan_Host  output buffer size =     0.01 MiB
0.00.127.583 I llama_kv_cache:    Vulkan0 KV buffer size =     2.00 MiB
0.00.130.905 I sched_reserve:    Vulkan0 compute buffer size =    80.38 MiB
0.00.130.905 I sched_reserve: Vulkan_Host compute buffer size =    16.38 MiB
"""
# The same with -ngl 99 where no device is visible.
ON_THE_CPU = """\
0.00.131.750 I load_tensors: offloading output layer to GPU
0.00.135.881 I load_tensors: offloading 1 repeating layers to GPU
0.00.135.888 I load_tensors: offloaded 3/3 layers to GPU
0.00.135.898 I load_tensors:   CPU_Mapped model buffer size =     0.71 MiB
0.00.136.235 I llama_context:        CPU  output buffer size =     0.01 MiB
0.00.136.426 I llama_kv_cache:        CPU KV buffer size =     2.00 MiB
0.00.141.387 I sched_reserve:        CPU compute buffer size =     9.64 MiB
"""
# The same with -ngl 1.
IN_PART = """\
0.00.281.965 I load_tensors: offloading output layer to GPU
0.00.281.966 I load_tensors: offloading 0 repeating layers to GPU
0.00.281.966 I load_tensors: offloaded 1/3 layers to GPU
0.00.281.968 I load_tensors:   CPU_Mapped model buffer size =     0.71 MiB
0.00.281.968 I load_tensors:      Vulkan0 model buffer size =     0.17 MiB
"""
# The same at -lv 3, the default.
SILENT = """\
0.00.087.541 I srv    load_model: loading model 'tiny-llama.gguf'
0.00.185.144 I srv  llama_server: model loaded
"""
# A published log of a ROCm build on four cards (github.com/iacopPBK/llama.cpp-gfx906, its issues).
ON_ROCM = """\
load_tensors: offloading 61 repeating layers to GPU
load_tensors: offloaded 63/63 layers to GPU
load_tensors:          CPU model buffer size =   251.85 MiB
load_tensors:        ROCm0 model buffer size = 27022.95 MiB
load_tensors:        ROCm1 model buffer size = 26590.20 MiB
"""
# Made after the lines above: no HRX log is published that we know of.
ON_HRX = ON_VULKAN.replace("Vulkan0", "HRX0")


@pytest.mark.parametrize(
    ("log", "device", "word"),
    [
        (ON_VULKAN, "Vulkan0", "ok"),
        (ON_VULKAN, "vulkan0", "ok"),
        (ON_VULKAN, "HRX0", "fallback"),
        (ON_VULKAN, "Vulkan1", "fallback"),
        (ON_THE_CPU, "Vulkan0", "fallback"),
        (ON_THE_CPU, "none", "ok"),
        (ON_THE_CPU, "", "ok"),
        (IN_PART, "Vulkan0", "fallback"),
        (SILENT, "Vulkan0", "unknown"),
        ("", "Vulkan0", "unknown"),
        (ON_ROCM, "ROCm0,ROCm1", "ok"),
        (ON_ROCM, "ROCm0", "ok"),
        (ON_HRX, "HRX0", "ok"),
        (ON_THE_CPU, "HRX0", "fallback"),
    ],
)
def test_a_log_is_held_against_the_device_asked_for(log, device, word):
    assert judge(log.splitlines(), device).word == word


def test_offloaded_layers_do_not_hide_that_all_is_on_the_cpu():
    found = judge(ON_THE_CPU.splitlines(), "Vulkan0")
    assert found.reason == "no weights are on Vulkan0: the log says CPU_Mapped 0.71 MiB"


def test_a_part_of_the_layers_is_named():
    assert "only 1 of 3 layers" in judge(IN_PART.splitlines(), "Vulkan0").reason
    assert judge(IN_PART.splitlines(), "Vulkan0", all_layers=False).word == "ok"


def test_an_empty_buffer_on_the_device_counts_for_nothing():
    log = ["load_tensors: Vulkan0 model buffer size = 0.00 MiB"]
    assert judge(log, "Vulkan0").word == "fallback"


def test_the_buffers_of_a_device_count_for_it():
    for name in ("MTL0_Mapped", "MTL0", "MTL0_Private"):
        log = [f"load_tensors: {name} model buffer size = 1.00 MiB"]
        assert judge(log, "MTL0").word == "ok"
    # Memory of the host that a device can read is the host's.
    assert judge(["x Vulkan_Host model buffer size = 5.00 MiB"], "Vulkan0").word == "fallback"


@pytest.mark.parametrize("log", [ON_VULKAN, ON_THE_CPU, IN_PART])
def test_the_lines_that_tell_are_enough(log):
    kept = [line for line in log.splitlines() if tells(line)]
    assert judge(kept, "Vulkan0") == judge(log.splitlines(), "Vulkan0")
    assert len(kept) < len(log.splitlines())


def test_a_model_in_part_is_seen_though_its_draft_is_whole():
    assert judge([*IN_PART.splitlines(), *ON_VULKAN.splitlines()], "Vulkan0").word == "fallback"


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("--device Vulkan0 -ngl 99 --jinja", ("Vulkan0", True)),
        ("--device HRX0 -ngl 20", ("HRX0", False)),
        ("-dev CUDA0,CUDA1 --gpu-layers all", ("CUDA0,CUDA1", True)),
        ("--device Vulkan0", ("Vulkan0", False)),
        ("--device none", ("none", False)),
        ("-m m.gguf", ("", False)),
    ],
)
def test_a_command_line_says_what_was_asked_for(line, asked):
    assert wanted(line.split()) == asked
