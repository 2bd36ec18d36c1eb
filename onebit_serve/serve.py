"""`1bit serve`: the front door, its backends, and the word that they are ready.

Start: the door is bound before anything is spawned, answers 503 while the backends load and warm
up, and `ready on` is said once, when all of them are READY. A needed backend that fails in its
first start ends the process with 1.

Stop: TERM or Ctrl-C stops accepting and ends the backends in reverse order; a second Ctrl-C kills
them at once.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import trio

from onebit_serve import __version__
from onebit_serve.core.access import Access
from onebit_serve.core.plan import Plan
from onebit_serve.live import leftovers
from onebit_serve.live.desk import Desk
from onebit_serve.live.door import Door
from onebit_serve.live.house import House
from onebit_serve.live.log import Log
from onebit_serve.live.logfile import LogFile
from onebit_serve.live.notify import Notifier
from onebit_serve.live.orders import Orders
from onebit_serve.live.reaper import reap_strangers
from onebit_serve.live.routing import Routing
from onebit_serve.live.spawn import Spawned

__all__ = ["run"]

_GC_THRESHOLD = 20_000  # a relay makes little that refers to itself; the default is 700
_SCORER_S = 10.0  # that the word ready waits for a scorer at most; nothing needs one
_EXIT_FAILED = 1
_EXIT_KILLED = 130


def run(
    plan: Plan,
    access: Access,
    listener: socket.socket,
    replan: Callable[[], Plan],
    early: Mapping[str, Spawned],
) -> int:
    """Serve until told to stop.

    Args:
        plan: What to run.
        access: Who may talk to the front door.
        listener: The front door's socket, from `listener.bind`.
        replan: Reads the configuration again and plans anew, for a reload.
        early: Children that run already, by the name of their backend.

    Returns:
        The exit code: 0 when stopped on request, 1 when a needed backend failed, 130 when killed.
    """
    log = Log(plan.log.format, plan.log.level)
    if plan.log.file:
        log.file = LogFile(
            Path(plan.log.file).expanduser(),
            limit_bytes=plan.log.max_bytes,
            keep=plan.log.keep,
            on_trouble=log.warning,
        )
    for warning in plan.warnings:
        log.warning(warning)
    try:
        return trio.run(_Serve(plan, access, listener, replan, log).run, early)
    finally:
        log.close()


class _Serve:
    """One run of the program."""

    def __init__(
        self,
        plan: Plan,
        access: Access,
        listener: socket.socket,
        replan: Callable[[], Plan],
        log: Log,
    ) -> None:
        self._plan = plan
        self._access = access
        self._replan = replan
        self._listener = listener
        self._log = log
        self._exit_code = 0
        self._notifier = Notifier.take(os.environ)

    async def run(self, early: Mapping[str, Spawned]) -> int:
        """Run until stopped; return the exit code."""
        gc.set_threshold(_GC_THRESHOLD)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                house = House(self._plan, self._log, nursery)
                house.start(early)
                routing = Routing(house, self._log, nursery)
                if os.getpid() == 1:
                    nursery.start_soon(reap_strangers, lambda: house.pids() | routing.pids())
                orders = Orders(house, self._replan, self._log, routing.follow)
                server = self._plan.server
                door = Door(
                    self._listener,
                    server.max_body_bytes,
                    lambda inside: Desk(
                        house, routing, orders, self._access, server, self._log, __version__, inside
                    ),
                    self._log,
                )
                nursery.start_soon(self._notifier.run)
                nursery.start_soon(self._tell_leftovers)
                async with trio.open_nursery() as front:
                    front.start_soon(door.run)
                    front.start_soon(self._say_when_ready, house, routing, front.cancel_scope)
                    await self._until_told(signals, orders, nursery)
                    async with trio.open_nursery() as stopping:
                        stopping.start_soon(self._kill_when_told_again, signals, house)
                        await self._stop(house, door)
                        stopping.cancel_scope.cancel()
                    front.cancel_scope.cancel()
                if self._exit_code:
                    await house.stop()
                nursery.cancel_scope.cancel()
        return self._exit_code

    async def _say_when_ready(
        self, house: House, routing: Routing, front: trio.CancelScope
    ) -> None:
        """Say once that all needed backends are ready; end the run where one may not fail."""
        failed = await house.wait_started()
        if failed is None:
            await routing.wait_settled(_SCORER_S)
            self._log.say(f"ready on {self._url()}", url=self._url())
            self._notifier.ready(f"ready on {self._url()}")
            if all(backend.limits.restart for backend in self._plan.backends):
                return
            failed = await house.wait_failed()
        self._log.error(f"{failed.name} failed: {failed.cause}", backend=failed.name)
        self._exit_code = _EXIT_FAILED
        front.cancel()

    def _url(self) -> str:
        host, port, *_ = self._listener.getsockname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _until_told(
        self, signals: AsyncIterator[int], orders: Orders, nursery: trio.Nursery
    ) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                nursery.start_soon(self._reload, orders)
                continue
            self._log.say("stopping")
            self._notifier.stopping()
            return

    async def _reload(self, orders: Orders) -> None:
        self._notifier.reloading()
        await orders.reload()
        self._notifier.ready()

    async def _tell_leftovers(self) -> None:
        """Say which processes of an earlier life still run; it is for a person to end them."""
        for leftover in await trio.to_thread.run_sync(leftovers.find):
            self._log.warning(str(leftover), pid=leftover.pid)

    async def _stop(self, house: House, door: Door) -> None:
        left = await door.drain(self._plan.server.drain_s or math.inf)
        if left:
            self._log.warning(f"{left} requests are cut after {self._plan.server.drain_s:g} s")
        await house.stop()

    async def _kill_when_told_again(self, signals: AsyncIterator[int], house: House) -> None:
        async for number in signals:
            if number == signal.SIGINT:
                house.kill()
                self._log.close()
                os._exit(_EXIT_KILLED)
