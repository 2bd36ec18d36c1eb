"""The set-up installs once, again when what it installs changed, and says what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "setup.sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a project with a virtual environment whose pip only writes down what it is asked."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\ncase $1 in -m) echo "$@" >> {tmp_path}/asked ;; '
        f'*) exec {sys.executable} "$@" ;; esac\n'
    )
    python.chmod(0o755)
    return tmp_path


def set_up(checkout: Path, *, python: str = "", alone: str = "alone==1") -> str:
    """Run the set-up; return what pip was asked to do in it."""
    asked = checkout / "asked"
    asked.unlink(missing_ok=True)
    subprocess.run(
        [SCRIPT, "venv", "venv/.installed", ".[test]", alone],
        cwd=checkout,
        env={**os.environ, "PYTHON": python},
        check=True,
        capture_output=True,
    )
    return asked.read_text() if asked.exists() else ""


def test_the_project_comes_with_its_dependencies_and_the_small_model_without_any(
    checkout: Path,
) -> None:
    project, model = set_up(checkout).splitlines()
    assert project.endswith("--editable .[test]")
    assert model.endswith("--no-deps alone==1")


def test_a_second_set_up_asks_for_nothing_even_when_the_files_look_newer(checkout: Path) -> None:
    assert set_up(checkout)
    (checkout / "pyproject.toml").touch()
    assert set_up(checkout) == ""


def test_a_change_of_what_is_installed_is_installed(checkout: Path) -> None:
    set_up(checkout)
    assert set_up(checkout, alone="alone==2")
    (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert set_up(checkout, alone="alone==2")


def test_a_set_up_that_fails_is_tried_again(checkout: Path) -> None:
    python = checkout / "venv" / "bin" / "python"
    works = python.read_text()
    python.write_text(works.replace("-m) ", "-m) exit 1; "))
    with pytest.raises(subprocess.CalledProcessError):
        set_up(checkout)
    python.write_text(works)
    assert set_up(checkout)


def test_without_a_suitable_python_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    failed = subprocess.run(
        [SCRIPT, "venv", "venv/.installed", ".", ""],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": "/nowhere/python3"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert failed.returncode == 1
    assert "/nowhere/python3" in failed.stderr
    assert "hint: " in failed.stderr
    assert not (tmp_path / "venv").exists()
