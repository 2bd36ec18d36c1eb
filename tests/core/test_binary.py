"""What llama-server b10068 prints about itself is understood; anything else yields less."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebit_serve.core.binary import parse_devices, parse_options, parse_version
from onebit_serve.core.facts import Device

PRINTED = Path(__file__).parent / "data" / "llama-server-b10068"


def printed(name: str) -> str:
    return (PRINTED / name).read_text()


def test_the_version_is_the_line_that_says_so() -> None:
    assert parse_version(printed("version.txt")) == "version: 1 (571d0d5)"


def test_driver_messages_around_the_version_are_not_the_version() -> None:
    assert parse_version("ggml_vulkan: Found 1\nversion: 7 (abc)\nbuilt") == "version: 7 (abc)"


def test_a_program_without_a_version_line_has_none() -> None:
    assert parse_version("ls (GNU coreutils) 9.1\n") is None
    assert parse_version("version:\n") is None


def test_a_software_vulkan_device_is_listed_with_its_memory() -> None:
    assert parse_devices(printed("devices-llvmpipe.txt")) == (
        Device(
            name="Vulkan0",
            description="llvmpipe (LLVM 15.0.6, 256 bits)",
            total_mib=2048,
            free_mib=2048,
        ),
    )


def test_a_machine_without_devices_lists_none() -> None:
    assert parse_devices(printed("devices-none.txt")) == ()


def test_devices_keep_their_order_and_what_comes_before_the_title_is_no_device() -> None:
    text = (
        "ggml_vulkan: Found 1 Vulkan devices:\n"
        "  decoy: not a device (1 MiB, 1 MiB free)\n"
        "Available devices:\n"
        "  HRX0: AMD Radeon 8060S (65536 MiB, 64000 MiB free)\n"
        "  Vulkan0: Radeon 8060S Graphics (RADV GFX1151) (98304 MiB, 97000 MiB free)\n"
        "  RPC[10.0.0.1:50052]: 10.0.0.1:50052 (8 MiB, 8 MiB free)\n"
    )
    assert [d.name for d in parse_devices(text)] == ["HRX0", "Vulkan0", "RPC[10.0.0.1:50052]"]
    assert parse_devices(text)[1].description == "Radeon 8060S Graphics (RADV GFX1151)"


def test_a_device_without_figures_has_unknown_memory() -> None:
    assert parse_devices("Available devices:\n  MTL0: Apple M4\n") == (
        Device(name="MTL0", description="Apple M4", total_mib=None, free_mib=None),
    )


def test_text_without_a_list_has_no_devices() -> None:
    assert parse_devices("error: invalid argument: --list-devices\n") == ()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("-m", 1),
        ("--model", 1),
        ("-h", 0),
        ("--version", 0),
        ("-ngl", 1),
        ("--gpu-layers", 1),
        ("--n-gpu-layers", 1),
        ("-fa", 1),
        ("--jinja", 0),
        ("--no-jinja", 0),
        ("-kvo", 0),
        ("-nkvo", 0),
        ("--no-kv-offload", 0),
        ("-ot", 1),
        ("--override-tensor", 1),
        ("--spec-type", 1),
        ("-devd", 1),
        ("--device-draft", 1),
        ("--rerank", 0),
        ("--embeddings", 0),
        ("--sse-ping-interval", 1),
        ("--fim-qwen-1.5b-default", 0),
        ("--lora-init-without-apply", 0),
        ("--control-vector-layer-range", 2),
        ("-np", 1),
    ],
)
def test_an_option_of_the_help_takes_so_many_values(option: str, values: int) -> None:
    assert parse_options(printed("help.txt"))[option] == values


def test_every_line_of_the_help_that_starts_with_a_dash_gives_options() -> None:
    text = printed("help.txt")
    options = parse_options(text)
    starts = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("-")]
    titles = [start for start in starts if start.strip("-") == ""]
    assert set(starts) - set(titles) <= set(options)
    assert len(options) == 407


def test_prose_and_titles_are_no_options() -> None:
    options = parse_options(
        "----- common params -----\n"
        "usage: server [--flag]\n"
        "    --indented N  prose that mentions --other\n"
    )
    assert options == {}
