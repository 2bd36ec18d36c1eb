"""The manual tells what the program has: every flag, every key, every target, every link."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import click
import pytest

from onebit_serve.cli import COMMANDS, one_bit

ROOT = Path(__file__).parent.parent
FIRST_ANSWER = ROOT / "scripts" / "first_answer.py"
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]}
FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


@pytest.fixture(scope="module")
def everything() -> str:
    return "\n".join(PAGES.values())


def help_of(name: str) -> str:
    group = click.Context(one_bit, info_name="1bit")
    command = one_bit.get_command(group, name)
    assert command is not None
    return command.get_help(click.Context(command, parent=group, info_name=name))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_a_command_stands_in_the_manual(name: str, everything: str) -> None:
    known = set(FLAG.findall(everything))
    flags = {
        flag
        for line in help_of(name).splitlines()
        if line.lstrip().startswith("-")
        for flag in FLAG.findall(re.split(r"\s{2,}", line.strip())[0])
    }
    assert flags
    assert flags <= known, f"missing: {sorted(flags - known)}"


def test_every_key_of_the_configuration_stands_in_the_manual(everything: str) -> None:
    text = (ROOT / "configs" / "serve.toml").read_text()
    keys = re.findall(r"^(?:# )?([a-z_]+) = ", text, re.MULTILINE)
    assert len(keys) > 20
    assert not [key for key in keys if f"`{key}`" not in everything]


def test_the_pages_that_are_generated_are_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_docs.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_readme_asks_the_next_question_as_make_serve_prints_it() -> None:
    printed = runpy.run_path(str(FIRST_ANSWER))
    wanted = json.loads(printed["body"](printed["NEXT_QUESTION"]))
    said = re.search(r"-d '(\{.+?\})'", README, re.DOTALL)
    assert said
    assert json.loads(said[1]) == wanted


def test_the_readme_says_where_the_command_is_before_it_is_used() -> None:
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    assert blocks.index(". .venv/bin/activate\n") < blocks.index("1bit ")


def makefile_targets() -> set[str]:
    listed = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(re.findall(r"^  make ([a-z-]+)", listed.stdout, re.MULTILINE))


def test_make_help_lists_the_targets_that_people_and_machines_call() -> None:
    wanted = {"help", "serve", "fmt", "check", "test", "test-slow", "docs", "gate"}
    assert wanted <= makefile_targets()


def test_every_make_target_that_the_manual_names_exists() -> None:
    targets = makefile_targets()
    for path, text in PAGES.items():
        for named in re.findall(r"(?:`|^)make ((?:[a-z][a-z-]* ?)+)", text, re.MULTILINE):
            assert set(named.split()) <= targets, f"{path.name}: make {named}"


def test_every_link_to_a_file_of_the_project_leads_to_one() -> None:
    for path, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if "://" not in link:
                assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_every_path_in_backticks_in_the_readme_is_there() -> None:
    for named in re.findall(r"`((?:configs|docs|scripts|tests|onebit_serve)/[\w./-]*)`", README):
        assert (ROOT / named).exists(), named
