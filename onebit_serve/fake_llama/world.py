"""The process around the server: its log, its record, its death, its signals and its offspring."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .knobs import Knobs, Moment, Refusal
from .options import Options

__all__ = ["Log", "Recorder", "World", "memory_is_short"]

STARTED = time.monotonic()
GRANDCHILD_LIFE_S = 600
NOISE_LINE = (
    b"0.00.000.000 I slot update_slots: id  0 | task 0 | noise of the fake, nothing else here\n"
)
_LEVELS = {"E": 1, "W": 2, "I": 3, "D": 5}


class Log:
    """llama-server's log on stderr. One lock: a reader that stops reading stops the server."""

    def __init__(self, options: Options) -> None:
        self._lock = threading.Lock()
        self._most = options.verbosity if not options.on("log-disable") else -1
        self._stamp = options.on("log-timestamps", default=True)
        self._prefix = options.on("log-prefix", default=True)

    def say(self, text: str, level: str = "I", verbosity: int = 0) -> None:
        """Print one line, if the verbosity asked for allows it."""
        if (verbosity or _LEVELS[level]) > self._most:
            return
        micros = int((time.monotonic() - STARTED) * 1e6)
        stamp = (
            f"{micros // 60_000_000}.{micros // 1_000_000 % 60:02d}."
            f"{micros // 1000 % 1000:03d}.{micros % 1000:03d} "
        )
        line = (stamp if self._stamp else "") + (f"{level} " if self._prefix else "") + text + "\n"
        self.raw(line.encode())

    def raw(self, data: bytes) -> None:
        """Write bytes to stderr; a pipe nobody holds any more is no error."""
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(2, data) :]


class Recorder:
    """The JSON Lines file of the knob `rec`: one object per event, whole lines at once."""

    def __init__(self, file: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(file, flags, 0o600) if file else None

    def write(self, event: str, **fields: Any) -> None:
        """Add one event with the time of the clock and the process id."""
        if self._fd is not None:
            line = {"event": event, "time": time.time(), "pid": os.getpid(), **fields}
            os.write(self._fd, (json.dumps(line, ensure_ascii=False) + "\n").encode())


def memory_is_short(refusal: Refusal) -> bool:
    """Tell whether the memory that a file stands for is still taken; if not, take it.

    The holder keeps a lock on the file, so its end is seen however it ends; from the moment a
    newcomer sees it, the memory takes some seconds to come back.
    """
    fd = os.open(refusal.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    text = os.read(fd, 100).decode()
    os.lseek(fd, 0, os.SEEK_SET)
    if text == "held":
        text = str(time.time())
        os.ftruncate(fd, os.write(fd, text.encode()))
    if text and time.time() < float(text) + refusal.seconds:
        os.close(fd)
        return True
    os.lseek(fd, 0, os.SEEK_SET)
    os.ftruncate(fd, os.write(fd, b"held"))
    return False  # the descriptor stays open, and with it the lock, until the process ends


class World:
    """What can happen to the process.

    Args:
        knobs: What was asked for.
        log: Where lines go.
        rec: Where events go.
    """

    def __init__(self, knobs: Knobs, log: Log, rec: Recorder) -> None:
        self.knobs = knobs
        self.log = log
        self.rec = rec
        self.hung = threading.Event()
        self.hung_all = threading.Event()
        self.stopping = threading.Event()
        self._signals = 0
        self._dying = False
        self._on_stop: Callable[[], None] = lambda: None

    def exit(self, code: int) -> None:
        """End the process at once."""
        self.rec.write("exit", code=code)
        os._exit(code)

    def reached(self, moment: Moment) -> None:
        """Die or hang, if that was asked for at this moment."""
        death, hang = self.knobs.dead_at, self.knobs.hang_at
        if death and death.moment == moment:
            if self.knobs.last:
                self.log.raw(self.knobs.last.encode() + b"\n")
            self.rec.write("dies", code=death.code, signal=death.signal)
            if death.signal:
                self._dying = True
                os.kill(os.getpid(), death.signal)
                threading.Event().wait()
            os._exit(death.code)
        if hang and hang.moment == moment:
            self.rec.write("hangs", everything=hang.everything)
            self.hung.set()
            if hang.everything:
                self.hung_all.set()

    @staticmethod
    def start_thread(work: Callable[[], None]) -> None:
        """Start a thread that no signal is given to: it must reach the main thread's sleep."""
        handled = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        threading.Thread(target=work, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)

    def _at(self, moment: Moment) -> None:
        time.sleep(max(0.0, moment.after_s - (time.monotonic() - STARTED)))
        self.reached(moment)

    def start_clocks(self) -> None:
        """Start what happens by the clock: noise, and death or a hang after some seconds."""
        for what in (self.knobs.dead_at, self.knobs.hang_at):
            if what and what.moment.what == "time":
                self.start_thread(partial(self._at, what.moment))
        if self.knobs.noise:
            self.start_thread(self._make_noise)

    def _make_noise(self) -> None:
        pause_s = max(0.01, len(NOISE_LINE) / self.knobs.noise)
        lines = max(1, round(self.knobs.noise * pause_s / len(NOISE_LINE)))
        due = time.monotonic()
        while True:
            self.log.raw(NOISE_LINE * lines)
            due += pause_s
            time.sleep(max(0.0, due - time.monotonic()))

    def fork_grandchild(self) -> None:
        """Leave a process behind that holds our stdout and stderr, for ten minutes at most."""
        if self.knobs.fork == "no":
            return
        child = os.fork()
        if child:
            self.rec.write("fork", grandchild=child)
            return
        if self.knobs.fork == "setsid":
            os.setsid()
        if self.knobs.fork == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(GRANDCHILD_LIFE_S)
        os._exit(0)

    def handle_signals(self, *, loaded: bool, on_stop: Callable[[], None] = lambda: None) -> None:
        """Install the handlers: llama-server has none until the model is loaded."""
        self._on_stop = on_stop
        mode = self.knobs.term
        for number in (signal.SIGTERM, signal.SIGINT):
            if mode == "llama" and not loaded:
                signal.signal(number, signal.SIG_DFL)
            else:
                signal.signal(number, self._signalled)

    def _signalled(self, number: int, _frame: object) -> None:
        if self._dying:  # only the main thread may take a handler away
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signals += 1
        mode = self.knobs.term
        self.rec.write("signal", signal=number, count=self._signals)
        if mode == "ignore" or (mode.isdecimal() and self._signals <= int(mode)):
            return
        if mode == "llama":
            if self.stopping.is_set():
                self.log.raw(b"Received second interrupt, terminating immediately.\n")
                self.exit(1)
            self.stopping.set()
            self.start_thread(self._on_stop)
            return
        self.say_goodbye()
        self.exit(0)

    def say_goodbye(self) -> None:
        """Print llama-server's last line."""
        self.log.say("srv    operator(): operator(): cleaning up before exit...")


def open_descriptors() -> list[int]:
    """Return the descriptors open in this process, where /proc tells."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return []
    found = []
    for name in os.listdir(folder):  # noqa: PTH208 - Path.iterdir would hold one more open
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            found.append(int(name))
    return sorted(found)
