from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import trio

from onebit_serve.core.config import Server
from onebit_serve.live.notify import Notifier

UNIT = (Path(__file__).parents[2] / "configs" / "1bit-serve.service").read_text()


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """Return a socket as systemd has it, and its name."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@onebit-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0"))
        sock.settimeout(10)
        yield sock, name


def heard(sock):
    return sock.recv(4096).decode().split("\n")


def test_each_word_is_one_datagram(manager):
    sock, name = manager
    notifier = Notifier(name)
    notifier.ready("serves m on vulkan")
    assert heard(sock) == ["READY=1", "STATUS=serves m on vulkan"]
    notifier.status("loading\nfor 3 s")
    assert heard(sock) == ["STATUS=loading for 3 s"]
    notifier.stopping()
    assert heard(sock) == ["STOPPING=1"]
    notifier.reloading()
    word, moment = heard(sock)
    assert word == "RELOADING=1"
    assert re.fullmatch(r"MONOTONIC_USEC=\d+", moment)
    notifier.close()
    notifier.ready()


def test_what_is_only_for_us_is_taken_out_of_the_environment(manager):
    sock, name = manager
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/"}
    notifier = Notifier.take(environment)
    assert environment == {"PATH": "/"}
    notifier.ready()
    assert heard(sock) == ["READY=1"]
    notifier.close()


@pytest.mark.parametrize("address", ["", "vsock:2:1", "relative", "/nowhere/at/all", "@nobody-is"])
async def test_without_a_manager_nothing_happens(address):
    notifier = Notifier(address, watchdog_s=0.0)
    notifier.ready("x")
    notifier.stopping()
    with trio.fail_after(5):
        await notifier.run()
    notifier.close()


async def test_the_watchdog_is_fed_at_half_its_limit(manager, autojump_clock):
    del autojump_clock
    sock, name = manager
    sock.setblocking(False)  # noqa: FBT003
    beats = []
    environment = {
        "NOTIFY_SOCKET": name,
        "WATCHDOG_USEC": "60000000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    notifier = Notifier.take(environment)
    with trio.move_on_after(95):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.run)
            while True:
                await trio.sleep(1)
                try:
                    beats.append((heard(sock), round(trio.current_time()) % 30))
                except BlockingIOError:
                    continue
    assert [word for word, _ in beats] == [["WATCHDOG=1"]] * 4
    notifier.close()


async def test_a_watchdog_of_another_process_is_not_fed(manager):
    sock, name = manager
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    notifier = Notifier.take(environment)
    with trio.fail_after(5):
        await notifier.run()
    sock.setblocking(False)  # noqa: FBT003
    with pytest.raises(BlockingIOError):
        heard(sock)
    notifier.close()


def test_a_manager_that_does_not_read_is_not_waited_for(manager):
    _, name = manager
    notifier = Notifier(name)
    for _ in range(10_000):  # more than any socket's queue holds
        notifier.status("x" * 1000)
    notifier.close()


def unit(key):
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


def test_the_unit_file_gives_a_stop_the_time_it_may_take():
    defaults = Server()
    (limit_s,) = unit("TimeoutStopSec")
    assert float(limit_s) > defaults.drain_s + defaults.stop_s


def test_the_unit_file_waits_for_ready_and_signals_us_alone():
    assert unit("Type") == ["notify"]
    assert unit("KillMode") == ["mixed"]
    assert unit("TimeoutStartSec") == ["infinity"]
    assert float(unit("WatchdogSec")[0]) >= 10
    assert "serve" in unit("ExecStart")[0]
    assert "HUP" in unit("ExecReload")[0]
