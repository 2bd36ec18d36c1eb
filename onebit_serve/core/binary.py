"""Read what a llama-server prints about itself: `--version`, `--list-devices`, `--help`.

All three are text for people, so the parsers take what they know and leave the rest; a build that
prints something else yields less, never an error. Formats as of llama-server b10068.
"""

from __future__ import annotations

import re
from typing import Final

from onebit_serve.core.facts import Device

__all__ = ["parse_devices", "parse_options", "parse_version"]

_DEVICES_TITLE: Final = "Available devices:"
# `  Vulkan0: AMD Radeon 8060S (RADV GFX1151) (65536 MiB, 64000 MiB free)`
_DEVICE: Final = re.compile(
    r"^\s+(?P<name>\S+?):\s+(?P<description>.*?)"
    r"(?:\s+\((?P<total>\d+) MiB, (?P<free>\d+) MiB free\))?\s*$"
)
_VERSION: Final = re.compile(r"^version:\s*\S.*$", re.MULTILINE)
# `-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers ...`: names from the first column,
# each but the last with a comma; one space, then the values; two spaces or more, then the prose.
_OPTION: Final = re.compile(r"(--?[A-Za-z0-9][\w.-]*)(,?)")
_VALUES: Final = re.compile(r" ((?:\S| (?! ))+)")
_BRACKETED: Final = re.compile(r"<[^>]*>|\{[^}]*\}|\[[^\]]*\]")


def parse_version(text: str) -> str | None:
    """Return the line that names the version, for example `version: 1 (571d0d5)`.

    Args:
        text: What `--version` printed, driver messages included.
    """
    found = _VERSION.search(text)
    return found.group().strip() if found else None


def parse_devices(text: str) -> tuple[Device, ...]:
    """Return the devices in the order of the list; nothing before its title counts.

    Args:
        text: What `--list-devices` printed, driver messages included.
    """
    _, title, listed = text.partition(_DEVICES_TITLE)
    if not title:
        return ()
    devices: list[Device] = []
    for line in listed.splitlines()[1:]:
        found = _DEVICE.match(line)
        if found:
            devices.append(
                Device(
                    name=found["name"],
                    description=found["description"],
                    total_mib=int(found["total"]) if found["total"] else None,
                    free_mib=int(found["free"]) if found["free"] else None,
                )
            )
    return tuple(devices)


def parse_options(text: str) -> dict[str, int]:
    """Return every option that the help lists, aliases too, with how many values it takes.

    Almost all take none or one; `--control-vector-layer-range` of b10068 takes two.

    Args:
        text: What `--help` printed.
    """
    options: dict[str, int] = {}
    for line in text.splitlines():
        names, end = _names(line)
        values = _VALUES.match(line, end)
        # A placeholder such as `<tensor name pattern>=<buffer type>` is one value.
        count = len(_BRACKETED.sub("_", values[1]).split()) if values and names else 0
        options.update(dict.fromkeys(names, count))
    return options


def _names(line: str) -> tuple[list[str], int]:
    """Return the option names that a help line starts with and where the last one ends."""
    names: list[str] = []
    end = 0
    found = _OPTION.match(line)
    while found:
        names.append(found[1])
        end = found.end()
        if not found[2]:
            break
        while line[end : end + 1] == " ":
            end += 1
        found = _OPTION.match(line, end)
    return names, end
