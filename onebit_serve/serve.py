"""`1bit serve`: the front door, its backends, and the word that they are ready.

Start: the door is bound before anything is spawned, answers 503 while the backends load and warm
up, and `ready on` is said once, when all of them are READY. A needed backend that fails in its
first start ends the process with 1.

Stop: TERM or Ctrl-C stops accepting and ends the backends in reverse order; a second Ctrl-C kills
them at once.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator

import trio

from onebit_serve import __version__
from onebit_serve.core.errors import PortTakenError, UsageError
from onebit_serve.core.life import RestartPolicy, State
from onebit_serve.core.plan import Plan
from onebit_serve.live.door import Door
from onebit_serve.live.log import Log
from onebit_serve.live.supervise import Backend

__all__ = ["bind", "run"]

_BACKLOG = 512
_GC_THRESHOLD = 20_000  # a relay makes little that refers to itself; the default is 700
_EXIT_FAILED = 1
_EXIT_KILLED = 130


def bind(host: str, port: int) -> socket.socket:
    """Take the front door's address.

    Args:
        host: An address or a name of this machine.
        port: The port; 0 takes a free one.

    Raises:
        PortTakenError: Somebody else has it; the message names the process where it can be seen.
        UsageError: The host is no address of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host} is no address: {error}", hint="try 127.0.0.1") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {port} on {host} is taken{_holder(port)}",
                hint="stop it, or choose another with -p ([server] port); -p 0 takes a free one",
            ) from None
        if error.errno == errno.EACCES:
            raise PortTakenError(
                f"port {port} on {host} may not be used", hint="ports under 1024 need privileges"
            ) from None
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def _holder(port: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid
            if listens and connection.laddr and connection.laddr.port == port:
                name = psutil.Process(connection.pid).name()
                return f" by pid {connection.pid} ({name})"
    return ""


def run(plan: Plan, listener: socket.socket) -> int:
    """Serve until told to stop.

    Args:
        plan: What to run.
        listener: The front door's socket, from `bind`.

    Returns:
        The exit code: 0 when stopped on request, 1 when a needed backend failed, 130 when killed.
    """
    log = Log(plan.log.format, plan.log.level)
    try:
        return trio.run(_Serve(plan, listener, log).run)
    finally:
        log.close()


class _Serve:
    """One run of the program."""

    def __init__(self, plan: Plan, listener: socket.socket, log: Log) -> None:
        self._plan = plan
        self._listener = listener
        self._log = log
        self._exit_code = 0
        self._backends: tuple[Backend, ...] = ()

    async def run(self) -> int:
        """Run until stopped; return the exit code."""
        gc.set_threshold(_GC_THRESHOLD)
        self._backends = tuple(
            Backend(
                backend,
                self._log,
                policy=RestartPolicy(enabled=False),
                stop_s=self._plan.server.stop_s,
            )
            for backend in self._plan.backends
        )
        door = Door(self._listener, self._plan.server, self._backends, self._log, __version__)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                for backend in self._backends:
                    nursery.start_soon(backend.run)
                    backend.want()
                async with trio.open_nursery() as front:
                    front.start_soon(door.run)
                    front.start_soon(self._until_signalled, signals, front.cancel_scope)
                    front.start_soon(self._until_ready, front.cancel_scope)
                self._listener.close()
                async with trio.open_nursery() as stopping:
                    stopping.start_soon(self._kill_when_signalled_again, signals)
                    await self._stop_backends()
                    stopping.cancel_scope.cancel()
                nursery.cancel_scope.cancel()
        return self._exit_code

    async def _until_ready(self, front: trio.CancelScope) -> None:
        for backend in self._backends:
            view = await backend.wait_for(lambda v: v.state in (State.READY, State.FAILED))
            if view.state is State.FAILED:
                self._log.error(f"{view.name} failed to start: {view.cause}")
                self._exit_code = _EXIT_FAILED
                front.cancel()
                return
        self._log.say(f"ready on {self._url()}", url=self._url())

    def _url(self) -> str:
        host, port, *_ = self._listener.getsockname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _until_signalled(self, signals: AsyncIterator[int], front: trio.CancelScope) -> None:
        async for _ in signals:
            self._log.say("stopping")
            front.cancel()
            return

    async def _stop_backends(self) -> None:
        for backend in reversed(self._backends):
            backend.halt()
            await backend.wait_for(lambda v: v.state in (State.STOPPED, State.FAILED))

    async def _kill_when_signalled_again(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGINT:
                for backend in self._backends:
                    backend.kill()
                self._log.close()
                os._exit(_EXIT_KILLED)
