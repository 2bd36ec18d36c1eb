"""The word to systemd: ready, stopping, what goes on, and that we are alive.

The protocol is sd_notify(3): one datagram with `NAME=value` lines to the socket that NOTIFY_SOCKET
names. Without that variable every call does nothing, and a manager that does not listen is no
fault of ours: nothing here raises or waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping

import trio

__all__ = ["VARIABLES", "Notifier"]

# Read by `Notifier.take` and then removed: a backend is not the service.
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Tells the service manager what goes on.

    Args:
        address: The socket: a path, or a name in the abstract namespace after `@`; empty for none.
        watchdog_s: Seconds within which the manager wants a sign of life; 0 where it wants none.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._socket: socket.socket | None = None
        if address.startswith(("@", "/")):
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)  # noqa: FBT003

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> Notifier:
        """Make one from the environment, and remove what is only for us from it.

        A watchdog that was meant for another process of the unit (WATCHDOG_PID) is not ours.
        """
        address, limit_us, pid = (environment.pop(name, "") for name in VARIABLES)
        ours = not pid or pid == str(os.getpid())
        watchdog_s = int(limit_us) / 1e6 if ours and limit_us.isdigit() else 0.0
        return cls(address, watchdog_s)

    def ready(self, status: str = "") -> None:
        """Say that the service serves; said again it ends a reload."""
        self._send("READY=1", *_status(status))

    def reloading(self, status: str = "") -> None:
        """Say that the configuration is read again; `ready` ends it."""
        # systemd wants the moment, on the monotonic clock, for Type=notify-reload.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", *_status(status))

    def stopping(self, status: str = "") -> None:
        """Say that the service ends."""
        self._send("STOPPING=1", *_status(status))

    def status(self, status: str) -> None:
        """Say what goes on, for `systemctl status`."""
        self._send(*_status(status))

    async def run(self) -> None:
        """Give a sign of life at half of what the manager allows, until cancelled.

        It runs on the loop that does the work: when that is stuck there is no sign, and the manager
        starts the service again.
        """
        if self._socket is None or not self._watchdog_s:
            return
        while True:
            self._send("WATCHDOG=1")
            await trio.sleep(self._watchdog_s / 2)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None or not lines:
            return
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(lines).encode(errors="replace"), self._address)


def _status(text: str) -> list[str]:
    said = " ".join(text.split())
    return [f"STATUS={said}"] if said else []
