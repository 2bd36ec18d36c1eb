"""The changelog speaks of the version that the program has, in the form it promises."""

from __future__ import annotations

import re
from pathlib import Path

import tomli

import onebit_serve

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CHANGELOG.md").read_text()
HEADINGS = ["Security", "Removed", "Deprecated", "Added", "Changed", "Fixed"]
RELEASE = re.compile(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2}|unreleased)$", re.MULTILINE)


def releases() -> list[tuple[str, str, str]]:
    """Return version, date and text of each release, in the file's order."""
    parts = RELEASE.split(TEXT)[1:]
    return list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))


def test_the_newest_release_is_the_version_of_the_program_and_of_the_package() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert releases()[0][0] == onebit_serve.__version__ == project["version"]


def test_every_second_level_heading_is_a_release() -> None:
    assert len(re.findall(r"^## ", TEXT, re.MULTILINE)) == len(releases())


def test_releases_stand_newest_first_and_only_the_newest_may_be_unreleased() -> None:
    versions = [tuple(map(int, version.split("."))) for version, _, _ in releases()]
    assert versions == sorted(set(versions), reverse=True)
    assert "unreleased" not in [date for _, date, _ in releases()[1:]]


def test_a_release_has_only_the_promised_headings_in_their_order_and_none_is_empty() -> None:
    for version, _, text in releases():
        _, *sections = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
        names = sections[::2]
        assert names, version
        assert names == [name for name in HEADINGS if name in names], version
        for name, body in zip(names, sections[1::2], strict=True):
            assert body.strip().startswith("- "), f"{version}: {name} says nothing"
