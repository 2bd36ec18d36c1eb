"""What `1bit doctor` finds on machines that lack something."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from onebit_serve.cli import doctor
from onebit_serve.live.leftovers import Leftover


def run(*words: str, **env: str):
    return CliRunner().invoke(doctor.command, words, env={**os.environ, **env})


@pytest.fixture
def closed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that may not be written, for root too."""
    folder = tmp_path / "closed"
    folder.mkdir()
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path) != str(folder) and allowed(path, mode)
    )
    return folder


def test_a_machine_on_which_all_is_well_exits_0(fake_llama):
    result = run("--llama-server", fake_llama, FAKE_LLAMA="devices='GPU0: one (9 MiB, 8 MiB free)'")
    assert result.exit_code == 0, result.output
    assert "ok    device        GPU0: one, 9 MiB" in result.output
    assert "hint" not in "".join(x for x in result.output.splitlines() if x.startswith("ok"))


def test_a_program_that_is_not_there_is_bad():
    result = run("--llama-server", "/nowhere/llama-server")
    assert result.exit_code == 1
    assert "bad   llama-server" in result.output
    assert "/nowhere/llama-server" in result.output


def test_no_device_is_no_fault(fake_llama):
    found = list(doctor.program(dict(os.environ), fake_llama))
    assert [one.mark for one in found] == ["ok", "note"]
    assert "--device auto takes the CPU" in found[1].said


def test_a_device_file_of_another_group_is_bad_and_the_group_is_named(closed_folder):
    (one,) = doctor.device_files((str(closed_folder),))
    assert one.mark == "bad"
    assert f"usermod -aG {closed_folder.group()} " in one.hint


def test_a_folder_that_cannot_be_written_is_said_with_what_is_lost(closed_folder, tmp_path):
    env = {"XDG_STATE_HOME": str(closed_folder), "XDG_CACHE_HOME": str(tmp_path / "new")}
    state, cache = doctor.folders(env)
    assert (state.mark, cache.mark) == ("note", "ok")
    assert "past traffic" in state.said
    assert "XDG_STATE_HOME" in state.hint
    assert not (tmp_path / "new").exists()


def test_without_a_home_nothing_is_kept():
    assert [one.mark for one in doctor.folders({})] == ["note", "note"]


def test_a_leftover_is_bad_and_how_to_end_it_is_said(monkeypatch, fake_llama):
    one = Leftover(4711, "llama-server", 8081, 5 << 30)
    monkeypatch.setattr("onebit_serve.live.leftovers.find", lambda: [one])
    result = run("--llama-server", fake_llama)
    assert result.exit_code == 1
    assert "kill 4711" in result.output
