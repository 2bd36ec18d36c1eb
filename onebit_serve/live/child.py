"""One child process: its own session, a death signal, a guard, drained output, a bounded stop.

A child must not outlive us, however we end. Three things see to it:

    - we stop its group ourselves, by the ladder of `Child.stop`;
    - `setpriv --pdeathsig KILL` (util-linux) ends it when the thread that forked it ends, so it is
      forked on the main thread and never by trio's worker threads, which end after ten idle
      seconds;
    - a guard, a `sh` in a session of its own, waits for the end of a pipe whose other end only we
      hold, and then kills the child's whole group, grandchildren included.

An exit is noticed through a pidfd where the kernel has one. The group is killed before the child is
reaped, while its number cannot have gone to somebody else.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import msgspec
import trio

from onebit_serve.live.spawn import launch

__all__ = ["EXIT_NOTICE_S", "Child", "Exit", "Tail"]

EXIT_NOTICE_S = 0.5
"""An exit is told when the output is drained, a tenth of a second at most. A child that is dying
takes its answers with it: whoever misses one waits so long, to let its exit be heard first."""

_BLOCK_BYTES = 65536
_LINE_LIMIT_BYTES = 2000
_TAIL_LINES = 200
_EXIT_POLL_S = 0.05  # only where the kernel has no pidfd
_AFTER_KILL_S = 2.0


class Exit(msgspec.Struct, frozen=True):
    """How a process ended.

    Args:
        code: Its exit code, or `None` when a signal ended it.
        signal: The signal's number, or `None`.
    """

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        """Return `code 1` or `signal SIGSEGV`."""
        if self.signal is None:
            return f"code {self.code}"
        try:
            return f"signal {signal.Signals(self.signal).name}"
        except ValueError:
            return f"signal {self.signal}"

    @classmethod
    def of(cls, returncode: int) -> Exit:
        """Read `subprocess`'s return code."""
        return cls(signal=-returncode) if returncode < 0 else cls(code=returncode)


class Tail:
    """The last lines of an output, whatever its size.

    Args:
        lines: How many lines are kept; a line is cut at 2,000 bytes.
    """

    def __init__(self, lines: int = _TAIL_LINES) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=lines)
        self._rest = b""
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the output."""
        self.total_bytes += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        self._lines.extend(line[:_LINE_LIMIT_BYTES] for line in lines)
        self._rest = rest[:_LINE_LIMIT_BYTES]

    def last(self, count: int) -> list[str]:
        """Return up to so many of the last lines that say something, oldest first."""
        lines = [*self._lines, self._rest]
        said = [text for line in lines if (text := line.decode(errors="replace").strip())]
        return said[-count:]


class Child:
    """A process of ours and its group.

    Attributes:
        pid: Its process id, which is also that of its group and session.
        tail: The last lines it printed, stdout and stderr as they came.
    """

    def __init__(self, process: subprocess.Popen[bytes], guard: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._guard = guard
        self._exited = trio.Event()
        self._drained = trio.Event()
        self._exit: Exit | None = None
        self.pid = process.pid
        self.tail = Tail()

    def __repr__(self) -> str:
        """Tell the pid and how it ended, if it did."""
        return f"<Child pid {self.pid} {self._exit or 'running'}>"

    @classmethod
    def spawn(cls, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a program in a session of its own; call it on the main thread.

        Args:
            command: Program and arguments; the program must exist.
            environment: The child's whole environment.

        Raises:
            OSError: The program cannot be started.
        """
        return cls(*launch(command, environment))

    async def run(self, on_output: Callable[[bytes], None] | None = None) -> Exit:
        """Drain the child's output until it is gone; it must be run as long as the child lives.

        Args:
            on_output: Called with each piece of output, after the tail has it; where stderr has a
                pipe of its own, with stdout's only.

        Returns:
            How it ended. Its group is dead and it is reaped by then.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain, self._process.stdout, on_output, self._drained)
            if self._process.stderr:
                nursery.start_soon(self._drain, self._process.stderr, None, trio.Event())
            await self._wait_gone()
            with trio.move_on_after(0.1):  # a grandchild may hold the pipe open for ever
                await self._drained.wait()
            nursery.cancel_scope.cancel()
        self._close()
        exit_ = Exit.of(self._process.wait())
        self._exit = exit_
        self._exited.set()
        return exit_

    async def _drain(
        self,
        pipe: IO[bytes] | None,
        on_output: Callable[[bytes], None] | None,
        drained: trio.Event,
    ) -> None:
        if pipe is None:
            return
        fd = pipe.fileno()
        os.set_blocking(fd, False)
        while True:
            await trio.lowlevel.wait_readable(fd)
            try:
                data = os.read(fd, _BLOCK_BYTES)
            except BlockingIOError:
                continue
            if not data:
                drained.set()
                return
            self.tail.feed(data)
            if on_output:
                on_output(data)

    async def write(self, data: bytes) -> None:
        """Write all of some bytes to its stdin, which must be a pipe.

        Raises:
            OSError: It reads no more.
            trio.ClosedResourceError: It has ended.
        """
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            raise trio.ClosedResourceError
        fd = pipe.fileno()
        os.set_blocking(fd, False)
        while data:
            await trio.lowlevel.wait_writable(fd)
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(fd, data) :]

    async def _wait_gone(self) -> None:
        """Wait until the child is a zombie, and kill what is left of its group."""
        fd = self._pidfd()
        if fd is not None:
            try:
                await trio.lowlevel.wait_readable(fd)
            finally:
                os.close(fd)
        else:
            while not self._is_zombie():  # noqa: ASYNC110 - there is no event to wait for
                await trio.sleep(_EXIT_POLL_S)
        self._signal(signal.SIGKILL)

    def _pidfd(self) -> int | None:
        """Return a pidfd, or `None` where the kernel has none or no descriptor is left."""
        if not hasattr(os, "pidfd_open"):
            return None
        try:
            return os.pidfd_open(self.pid)
        except OSError:
            return None

    def _is_zombie(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def _close(self) -> None:
        if self._process.stdin:
            trio.lowlevel.notify_closing(self._process.stdin)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()
        if self._guard.stdin:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(b"done\n")
            self._guard.stdin.close()
        self._guard.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def stop(self, limit_s: float) -> None:
        """End the child: TERM, TERM again, KILL of its group; `run` must be running beside it.

        A llama-server that streams to a client ignores the first TERM until the connection closes,
        and exits at once on a second one (b10068, measured). Close its connections first.

        Args:
            limit_s: Seconds until KILL; the second TERM is sent after two fifths of them.
        """
        for number, wait_s in (
            (signal.SIGTERM, limit_s * 0.4),
            (signal.SIGTERM, limit_s * 0.6),
            (signal.SIGKILL, _AFTER_KILL_S),
        ):
            if self._exited.is_set():
                return
            self._signal(number)
            self._signal(signal.SIGCONT)  # a stopped process acts on TERM only when it goes on
            with trio.move_on_after(wait_s):
                await self._exited.wait()

    @property
    def pids(self) -> tuple[int, int]:
        """The processes that somebody here waits for: the child and its guard."""
        return self.pid, self._guard.pid

    def kill(self) -> None:
        """Kill the group at once."""
        if self._exit is None:
            self._signal(signal.SIGKILL)
