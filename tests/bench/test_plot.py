from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from onebit_serve.bench import plot
from onebit_serve.core import report
from onebit_serve.core.errors import UsageError
from onebit_serve.core.results import Request, Results

RESULTS = Results(
    requests=tuple(
        Request(
            run=f"{tag}{load}",
            tag=tag,
            model="a<b",
            prompts="long",
            concurrency=at_once,
            load=load,
            ttft_ms=typical + load,
        )
        for tag, typical in (("cold", 300.0), ("warm", 100.0))
        for load in range(5)
        for at_once in (1, 4)
    )
)


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_a_picture_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out.{suffix}"
    plot.draw(path, RESULTS, tables=[report.gain_table(RESULTS)])
    data = path.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
        return
    text = data.decode()
    assert "cold" in text
    assert "warm" in text
    assert "2.96x" in text
    assert "a<b" not in text
    assert ("<table>" in text) == (suffix == "html")


def test_nothing_to_draw_is_said(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="no cell has a decode tok/s"):
        plot.draw(tmp_path / "out.svg", RESULTS, "decode")


@pytest.mark.parametrize(("name", "said"), [("out.gif", r"\.gif"), ("out", "no suffix")])
def test_a_kind_of_picture_that_is_not_drawn_is_said(tmp_path, name, said):
    with pytest.raises(UsageError, match=said):
        plot.check(tmp_path / name)


def test_a_missing_folder_is_said(tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        plot.check(tmp_path / "none" / "out.svg")


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "out.svg").mkdir()
    with pytest.raises(UsageError, match="no file can be written there"):
        plot.check(tmp_path / "out.svg")


def test_a_disk_that_is_full_is_said(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def full(*_args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match=r"--plot .*out\.svg: No space left"):
        plot.draw(tmp_path / "out.svg", RESULTS)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        plot.check(tmp_path / "out.svg")
    assert "onebit-serve[plot]" in caught.value.hint
