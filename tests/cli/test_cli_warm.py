"""`1bit warm` against running servers: one more warm-up, and what a device's classes are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from front_door import Front
from llama_process import Llama, until

from onebit_serve.core.shapes import VULKAN_STARTS, classes_for
from onebit_serve.live.history import History, key_of, state_file


@pytest.fixture
def start(fake_llama, tiny_models, tmp_path):
    """Start a front door over a fake backend with a device's costs."""
    started = []

    def begin(device, *arguments, arch="llama", environment=None, knobs=""):
        front = Front(
            tmp_path,
            *("-m", str(tiny_models / f"tiny-{arch}.gguf"), "--llama-server", fake_llama),
            *("--device", device, "-np", "2", *arguments),
            knobs=f"model={device} scale=0.001 {knobs}",
            environment=environment,
            shapes=True,
        )
        started.append(front)
        return front

    yield begin
    for front in started:
        front.stop()


def warm(tmp_path, *words):
    """Run `1bit warm` with the state of the server that a test started."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ONEBIT_")}
    env["XDG_STATE_HOME"] = str(tmp_path / "xdg" / "state")
    command = [sys.executable, "-m", "onebit_serve.cli", "warm", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=120, check=False
    )


def kept(tmp_path, fake_llama, model, device):
    file = state_file({"XDG_STATE_HOME": str(tmp_path / "xdg" / "state")})
    return History(file, key_of(str(model), device, fake_llama), print).load().classes


def test_it_sends_one_more_warm_up_to_every_backend(start, tmp_path):
    front = start("hrx", environment={"ONEBIT_WARMUP_IDLE": "0"}).ready()
    before = len(front.requests("/completion"))
    done = warm(tmp_path, "--url", front.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hrx: a warm-up of 465 tokens took ")
    assert len(front.requests("/completion")) == before + 1


def test_a_backend_that_is_not_there_is_said(start, tmp_path):
    front = start("hrx", "--no-warmup").ready()
    for words in (["nobody"], ["--discover", "nobody"]):
        done = warm(tmp_path, "--url", front.url, *words)
        assert done.returncode in (1, 2)
        assert "there is no backend nobody" in done.stderr


@pytest.mark.parametrize(
    ("arch", "knobs"), [("llama", ""), ("gemma3", "arch=swa")], ids=["dense", "checkpoints"]
)
def test_the_classes_are_found_and_later_starts_use_them(
    start, tmp_path, fake_llama, tiny_models, arch, knobs
):
    front = start("vulkan", "--no-warmup", arch=arch, knobs=knobs).ready()
    done = warm(tmp_path, "--url", front.url, "--discover")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    model = tiny_models / f"tiny-{arch}.gguf"
    assert f"kept for {model.name} on vulkan" in done.stdout
    assert kept(tmp_path, fake_llama, model, "vulkan").starts == VULKAN_STARTS
    again = warm(tmp_path, "--url", front.url, "--discover")
    assert again.returncode == 1
    assert "has served prompts already" in again.stderr
    front.stop()
    later = start("vulkan", arch=arch, knobs=knobs).ready()
    until(lambda: later.backend()["shapes"]["planned"] == len(VULKAN_STARTS) + 2, "the plan")


def test_a_device_that_builds_for_every_length_is_told_by_few(start, tmp_path):
    front = start("hrx", "--no-warmup").ready()
    done = warm(tmp_path, "--url", front.url, "--discover", "hrx")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "each of 1 to 512 tokens is a class of its own" in done.stdout
    assert done.stdout.count("s, then") <= 20


def test_a_backend_that_was_warmed_cannot_be_looked_at(start, tmp_path):
    front = start("hrx").ready()
    done = warm(tmp_path, "--url", front.url, "--discover")
    assert done.returncode == 1
    assert "was warmed up already" in done.stderr
    assert "--no-warmup" in done.stderr


def test_a_llama_server_itself_is_looked_at_where_its_device_is_said(
    fake_llama, tiny_models, tmp_path
):
    model = tiny_models / "tiny-llama.gguf"
    llama = Llama(fake_llama, tmp_path, "-m", str(model), knobs="model=none").ready()
    try:
        assert warm(tmp_path, "--url", llama.url).returncode == 1
        refused = warm(tmp_path, "--url", llama.url, "--discover")
        assert (refused.returncode, "is no 1bit serve" in refused.stderr) == (2, True)
        words = ["--device", "vulkan", "--llama-server", fake_llama]
        done = warm(tmp_path, "--url", llama.url, "--discover", *words)
    finally:
        llama.stop()
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing is kept" in done.stdout
    assert kept(tmp_path, fake_llama, model, "vulkan") is None


def test_classes_fit_another_micro_batch():
    hrx = classes_for("hrx", 512)
    assert hrx.upto(1024) == classes_for("hrx", 1024)
    assert classes_for("vulkan").upto(32).starts == VULKAN_STARTS[:9]
