"""Starts a backend's program and its guard, with or without an event loop.

The eager backends are started before trio is imported: that and the front door take longer than
all that comes before, and meanwhile the children load.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from onebit_serve.core.errors import UsageError
from onebit_serve.core.plan import BackendPlan, Plan
from onebit_serve.core.prompt_plan import without_folder
from onebit_serve.live import driver_caches, leftovers

__all__ = ["Spawned", "child_environment", "free_port", "launch", "spawn", "spawn_eager"]

_GUARD = 'read -r line || kill -9 "-$0"'
_KEY_BYTES = 24
# A backend is not the service that systemd started, and the door's keys are not its.
_NOT_FOR_A_CHILD = ("NOTIFY_SOCKET", "ONEBIT_API_KEY", "WATCHDOG_PID", "WATCHDOG_USEC")


class Spawned(msgspec.Struct, frozen=True):
    """A backend's process, just started.

    Args:
        process: It.
        guard: The process that ends its group when we are gone.
        port: Its port.
        key: The API key that only we know, or empty where the program has none.
        at_s: When it was started, on the monotonic clock.
        caches_found: Driver and runtime caches that held something before it was started.
        caches_lacking: Folders for them that cannot be made or written to.
        slots_lacking: Why it was started without a folder for saved slots, or empty.
    """

    process: subprocess.Popen[bytes]
    guard: subprocess.Popen[bytes]
    port: int
    key: str
    at_s: float
    caches_found: tuple[str, ...] = ()
    caches_lacking: tuple[str, ...] = ()
    slots_lacking: str = ""


def spawn_eager(plan: Plan) -> dict[str, Spawned]:
    """Start every backend that does not wait for a request; return them by name.

    One that cannot be started is left out: it is tried again where that can be told.
    """
    found = {}
    for backend in plan.backends:
        if not backend.lazy:
            with contextlib.suppress(OSError):
                found[backend.name] = spawn(backend)
    return found


def spawn(plan: BackendPlan) -> Spawned:
    """Start a backend's program on a free port; call it on the main thread.

    Raises:
        OSError: The program cannot be started.
    """
    port = free_port()
    environment = child_environment(plan.unset_env, plan.set_env)
    key = ""
    if plan.kind == "llama-server":
        # not by `secrets`, whose imports take longer than the rest of this
        key = environment["LLAMA_API_KEY"] = os.urandom(_KEY_BYTES).hex()
    caches_found = driver_caches.found(plan.caches)
    lacking = driver_caches.make_folders(plan.caches)  # one that cannot be made costs time only
    command = plan.command(port)
    slots_lacking = _slots_lacking(plan.prompts.folder)
    if slots_lacking:
        command = without_folder(command)
    at_s = time.monotonic()
    launched = launch(command, environment)
    return Spawned(*launched, port, key, at_s, caches_found, lacking, slots_lacking)


def _slots_lacking(folder: str) -> str:
    """Make the folder for saved slots; return why that is impossible, or nothing.

    Somebody may have removed it since the last start, and llama-server exits where it is missing.
    """
    if not folder:
        return ""
    from onebit_serve.live.saves import private_directory  # for those who have warm prompts

    try:
        private_directory(Path(folder))
    except UsageError as error:
        return error.message
    return ""


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def child_environment(unset: Sequence[str], more: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment as a child gets it.

    Args:
        unset: Variables that it must not see.
        more: Variables to add; they win over the user's.
    """
    dropped = {*unset, *_NOT_FOR_A_CHILD}
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**environment, **more, leftovers.VARIABLE: leftovers.marker()}


def launch(
    command: Sequence[str], environment: Mapping[str, str], *, pipes: bool = False
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Start a program in a session of its own, and its guard; call it on the main thread.

    Args:
        command: Program and arguments; the program must exist.
        environment: The child's whole environment.
        pipes: It is spoken to on stdin and stdout, so that stderr has a pipe of its own.

    Raises:
        OSError: The program cannot be started.
    """
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(2, "no such program, or it may not be executed", command[0])
    setpriv = shutil.which("setpriv")
    prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
    process = subprocess.Popen(
        [*prefix, program, *command[1:]],
        stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if pipes else subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        bufsize=0,
    )
    try:
        guard = subprocess.Popen(
            ["sh", "-c", _GUARD, str(process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath},
            start_new_session=True,
            bufsize=0,
        )
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process, guard
