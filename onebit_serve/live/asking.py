"""Ask a program what it says of itself: several questions at once, each with a limit.

Without trio: it is asked before the event loop starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from onebit_serve.core.errors import UsageError

if TYPE_CHECKING:
    import selectors
    import subprocess

__all__ = ["Answer", "ask", "on_path"]

_ASK_LIMIT_S: Final = 20.0
_MAX_OUTPUT_BYTES: Final = 1 << 20  # llama-server b10068's help has 54 kB
_EXEC_FAILED: Final = (126, 127)  # POSIX and setpriv: found but not executable, not found


def on_path(name: str, env: Mapping[str, str]) -> str | None:
    """Return the absolute path of a program on the PATH of an environment, `None` without one."""
    for folder in env.get("PATH", os.defpath).split(os.pathsep):
        candidate = Path(folder or ".", name)
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate.absolute())
    return None


class Answer(msgspec.Struct):
    """What one question got: text, whether it is whole, and why the program could not run."""

    text: str = ""
    complete: bool = False
    broken: str = ""


def ask(path: str, questions: tuple[str, ...], env: Mapping[str, str]) -> tuple[Answer, ...]:
    """Run the program once per question, all at once, and collect what each run printed."""
    import selectors
    import subprocess

    setpriv = on_path("setpriv", os.environ)
    prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
    children: list[subprocess.Popen[bytes]] = []
    texts = [bytearray() for _ in questions]
    overdue = set(range(len(questions)))
    try:
        with selectors.DefaultSelector() as pipes:
            with _no_interrupt():
                for question in questions:
                    child = subprocess.Popen(
                        [*prefix, path, question],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        env=dict(env),
                        start_new_session=True,
                    )
                    children.append(child)
            for number, child in enumerate(children):
                pipes.register(child.stdout or -1, selectors.EVENT_READ, number)
            _collect(pipes, texts, overdue)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be run: {error.strerror}", hint="check that it is a program"
        ) from None
    finally:
        for number, child in enumerate(children):
            _end(child, late=number in overdue)
    return tuple(
        _answer(text.decode("utf-8", "replace"), child.returncode, late=number in overdue)
        for number, (child, text) in enumerate(zip(children, texts, strict=True))
    )


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Put a stop off, so that no child is started and forgotten.

    The children are born with these signals blocked: they answer and end, or are killed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(pipes: selectors.BaseSelector, texts: list[bytearray], overdue: set[int]) -> None:
    """Read every pipe to its end, the limit of time or the limit of output."""
    end_s = time.monotonic() + _ASK_LIMIT_S
    while pipes.get_map() and (left_s := end_s - time.monotonic()) > 0:
        for ready, _ in pipes.select(left_s):
            chunk = os.read(ready.fd, 1 << 16)
            texts[ready.data] += chunk
            if not chunk:
                overdue.discard(ready.data)
            if not chunk or len(texts[ready.data]) > _MAX_OUTPUT_BYTES:
                pipes.unregister(ready.fileobj)


def _end(child: subprocess.Popen[bytes], *, late: bool) -> None:
    """Reap a child; one that is late, or lingers after its output ended, is killed with its group.

    Until it is reaped its id cannot be another's, so the group that is killed is its own.
    """
    import subprocess

    with child:
        if not late:
            try:
                child.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                late = True
        if late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _answer(text: str, returncode: int, *, late: bool) -> Answer:
    broken = ""
    if not late and returncode < 0:
        broken = f"it was ended by {signal.Signals(-returncode).name}"
    elif not late and returncode in _EXEC_FAILED:
        broken = f"it could not be started (exit code {returncode})"
    return Answer(text=text, complete=not late and not broken, broken=broken)
