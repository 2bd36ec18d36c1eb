from __future__ import annotations

import os
import subprocess
import sys

import pytest

from onebit_serve.core.errors import NotRunError
from onebit_serve.live.device_lock import device_lock, lock_name

HOLDER = """
import sys
from onebit_serve.live.device_lock import device_lock
with device_lock("hrx", "1bit bench-serve", sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_names_of_one_chip_share_a_lock_and_the_cpu_has_its_own():
    assert {lock_name(word) for word in ("hrx", "vulkan", "rocm", "CUDA0", "auto")} == {
        "accelerator"
    }
    assert lock_name("cpu") == "cpu"


def test_a_second_measurement_is_told_who_holds_the_device(tmp_path):
    with (
        device_lock("hrx", "1bit gate full", str(tmp_path)),
        pytest.raises(NotRunError) as caught,
        device_lock("vulkan", "1bit bench-serve", str(tmp_path)),
    ):
        pass
    assert f"pid {os.getpid()} (1bit gate full)" in caught.value.message
    assert caught.value.exit_code == 4


def test_the_cpu_and_an_accelerator_may_be_measured_at_once(tmp_path):
    with device_lock("hrx", "a", str(tmp_path)), device_lock("cpu", "b", str(tmp_path)):
        pass


def test_a_lock_is_free_again_after_its_block(tmp_path):
    for _ in range(2):
        with device_lock("hrx", "a", str(tmp_path)):
            pass


def test_a_holder_that_was_killed_holds_nothing(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(NotRunError, match="bench-serve"),
            device_lock("hrx", "a", str(tmp_path)),
        ):
            pass
        holder.kill()
        holder.wait()
        with device_lock("hrx", "a", str(tmp_path)):
            pass


def test_a_symbolic_link_in_its_place_is_refused_and_not_followed(tmp_path):
    (tmp_path / "onebit-cpu.lock").symlink_to(tmp_path / "victim")
    with (
        pytest.raises(NotRunError, match="cannot be opened"),
        device_lock("cpu", "a", str(tmp_path)),
    ):
        pass
    assert not (tmp_path / "victim").exists()
