"""What every file of the project keeps to: its docstrings, its size, and what it is not about."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "onebit_serve").rglob("*.py"))
LONGEST_LINES = 500
# Paths of one machine, and words about how a project comes about instead of about the project.
# Written in pieces, so that this file does not find itself.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"/root/\w",
            r"/home/(?!u\b|user\b|you\b)\w",  # but an example's user has a home
            r"(?<![\w.])/work/\w",
            r"/tmp/w\b",
            r"\bspec\.md\b",
            r"\bshared/\w",
            "models-to-learn" + "-from",
            "llama-server" + r"-facts",
            "field" + r"-reports",
            "laya" + r"-facts",
            r"\b(?:see|of|from|per) (?:the )?spec\b",
            r"\bspec section\b",
            r"\bthe brief\b",
            r"\b[Hh]elper [A-H]\b",
            r"\bsub-?agents?\b",
            r"\b[Ii]ssues? #?\d{1,2}\b",  # llama.cpp's have more digits
        )
    )
)
# Files that say these words on purpose.
ALLOWED = {"tests/test_repository.py"}


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return sorted(name for name in listed.stdout.split("\0") if (ROOT / name).is_file())


def test_no_file_carries_a_path_of_a_machine_or_speaks_of_its_own_making() -> None:
    found = []
    for name in tracked_files():
        if name in ALLOWED:
            continue
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            word = FORBIDDEN.search(line)
            if word:
                found.append(f"{name}:{number}: {word.group()!r}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("see spec.md", True),
        ("/root" + "/x", True),
        ("as section 5 of the spec", True),
        ("fixed in issue 12", True),
        ("/usr/bin/env", False),
        ("/home/user/models", False),
        ("a specification", False),
    ],
)
def test_the_forbidden_words_are_found(text: str, *, is_found: bool) -> None:
    assert bool(FORBIDDEN.search(text)) == is_found


def place(name: str) -> tuple[int, str]:
    """Return where a name stands in `__all__`: constants, then classes, then functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_and_what_it_offers(path: Path) -> None:
    tree = ast.parse(path.read_text())
    docstring = ast.get_docstring(tree) or ""
    assert docstring.split("\n")[0].endswith((".", "?", ":")), "the first line is a sentence"
    if path.name in ("__init__.py", "__main__.py"):
        return
    offered = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and [ast.unparse(target) for target in node.targets] == ["__all__"]
    ]
    assert len(offered) == 1, "__all__ is missing"
    assert list(offered[0]) == sorted(set(offered[0]), key=place), "__all__ is not sorted"
    defined = {
        name.id if isinstance(name, ast.Name) else getattr(name, "name", "")
        for node in ast.walk(tree)
        for name in ([node] if not isinstance(node, ast.Assign | ast.AnnAssign) else ast.walk(node))
    }
    assert set(offered[0]) <= defined, "__all__ offers what is not there"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_long_module_says_why_it_is_long(path: Path) -> None:
    text = path.read_text()
    lines = len(text.splitlines())
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert lines <= LONGEST_LINES or re.search(r"\blong\b|\blines\b|\bone file\b", docstring), (
        f"{lines} lines: split it, or say in its docstring why it is this long"
    )


def test_every_command_of_the_makefile_is_executable() -> None:
    for name in (".ci/run", "scripts/setup.sh", "scripts/software_vulkan.sh"):
        assert (ROOT / name).stat().st_mode & 0o111, name
