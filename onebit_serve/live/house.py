"""All backends of one `1bit serve`: who takes a request, and what a person may do to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

import trio

from onebit_serve.core import route
from onebit_serve.core.errors import OnebitError
from onebit_serve.core.life import State
from onebit_serve.core.plan import BackendPlan, Plan
from onebit_serve.core.view import BackendView
from onebit_serve.core.wire import Refusal
from onebit_serve.live.idle import unload_when_idle
from onebit_serve.live.log import Log
from onebit_serve.live.logfile import LogFile
from onebit_serve.live.room import Room, begun
from onebit_serve.live.spawn import Spawned
from onebit_serve.live.supervise import Backend

__all__ = ["House"]


async def _is_up(backend: Backend) -> bool:
    """Start a backend; return whether it became ready."""
    backend.want()
    await begun(backend)  # it may have failed before
    view = await backend.wait_for(lambda v: v.state in (State.READY, State.FAILED))
    return view.state is State.READY


class House:
    """The backends, in order of start.

    Args:
        plan: What runs.
        log: Where to say what happened.
        nursery: Where each backend's task lives.

    Attributes:
        plan: What runs.
        room: Starts lazy backends.
    """

    def __init__(self, plan: Plan, log: Log, nursery: trio.Nursery) -> None:
        self.plan = plan
        self._log = log
        self._nursery = nursery
        self._backends: dict[str, Backend] = {}
        self._reloading = trio.Lock()
        self.room = Room(self.__iter__, log, nursery)
        for backend_plan in plan.backends:
            self._backends[backend_plan.name] = self._make(backend_plan, plan)

    def _make(self, backend_plan: BackendPlan, plan: Plan) -> Backend:
        file = None
        if plan.log.backends_dir:
            name = backend_plan.name.replace("/", "_")
            file = LogFile(
                Path(plan.log.backends_dir).expanduser() / f"{name}.log",
                limit_bytes=plan.log.max_bytes,
                keep=plan.log.keep,
                on_trouble=self._log.warning,
            )
        backend = Backend(backend_plan, self._log, stop_s=plan.server.stop_s, file=file)
        backend.starter = self.room.start
        self._nursery.start_soon(self._run, backend)
        return backend

    async def _run(self, backend: Backend) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(unload_when_idle, backend, self._log)
            await backend.run()
            nursery.cancel_scope.cancel()

    def __iter__(self) -> Iterator[Backend]:
        """Go through the backends in order of start."""
        return iter(tuple(self._backends.values()))

    def named(self, name: str) -> Backend | None:
        """Return a backend by its name."""
        return self._backends.get(name)

    def get(self, name: str) -> Backend | None:
        """Return a backend by its name, as it stands in a path."""
        return self.named(unquote(name))

    def views(self) -> tuple[BackendView, ...]:
        """Return what can be seen of the backends now."""
        return tuple(backend.view() for backend in self._backends.values())

    def pids(self) -> frozenset[int]:
        """Return the processes that are waited for here."""
        return frozenset(pid for backend in self._backends.values() for pid in backend.pids())

    def only(self) -> Backend | None:
        """Return the backend that takes every request, where there is but one."""
        return next(iter(self._backends.values())) if len(self._backends) == 1 else None

    def pick(self, path: str, model: str) -> Backend | Refusal:
        """Return which of several backends takes a request, or why none does."""
        picked = route.pick([b.plan for b in self._backends.values()], path, model)
        return picked if isinstance(picked, Refusal) else self._backends[picked]

    def start(self, early: Mapping[str, Spawned]) -> None:
        """Start every eager backend, or take over the child that was started already.

        Args:
            early: What was started before the event loop, by the backend's name.
        """
        for backend in self._backends.values():
            if not backend.plan.lazy:
                backend.early = early.get(backend.plan.name)
                backend.want()

    async def wait_started(self) -> BackendView | None:
        """Wait until every eager backend is ready; return the first that failed, if one did."""
        for backend in tuple(self._backends.values()):
            if not backend.plan.lazy:
                view = await backend.wait_for(lambda v: v.state in (State.READY, State.FAILED))
                if view.state is State.FAILED:
                    return view
        return None

    async def wait_failed(self) -> BackendView:
        """Wait until any backend has failed, and return it."""
        found: list[BackendView] = []

        async def watch(backend: Backend, done: Callable[[], None]) -> None:
            found.append(await backend.wait_for(lambda v: v.state is State.FAILED))
            done()

        async with trio.open_nursery() as nursery:
            for backend in tuple(self._backends.values()):
                nursery.start_soon(watch, backend, nursery.cancel_scope.cancel)
        return found[0]

    async def reload(self, plan: Plan) -> dict[str, list[str]]:
        """Change to another plan; what it has in common with this one goes on untouched.

        A backend whose child would be another one is started and warmed beside the old one, which
        is then drained and stopped. One that fails leaves the old one in its place.

        Args:
            plan: The plan to change to.

        Returns:
            Names of the backends that were kept, started, stopped, and that failed.

        Raises:
            OnebitError: The device that everything falls back to does not start: nothing changed.
        """
        async with self._reloading:
            done: dict[str, list[str]] = {"kept": [], "started": [], "stopped": [], "failed": []}
            wanted: dict[str, Backend] = {}
            for backend_plan in plan.backends:
                name, old = backend_plan.name, self._backends.get(backend_plan.name)
                if old is not None and backend_plan.same_child(old.plan):
                    wanted[name] = old
                    is_up = backend_plan.lazy or not old.plan.lazy or await _is_up(old)
                    done["kept" if is_up else "failed"].append(name)
                    continue
                new = self._make(backend_plan, plan)
                is_up = backend_plan.lazy or await _is_up(new)
                done["started" if is_up else "failed"].append(name)
                if is_up or old is None:
                    wanted[name] = new
                else:
                    wanted[name] = old
                    new.retire()
            self._refuse_without_default(plan, wanted, done)
            for backend_plan in plan.backends:
                if backend_plan.same_child(wanted[backend_plan.name].plan):
                    wanted[backend_plan.name].adopt(backend_plan)
            gone = [b for b in self._backends.values() if b not in wanted.values()]
            self.plan = plan
            self._backends = wanted
            for backend in gone:
                self.room.forget(backend)
                backend.hand_over()
                if backend.plan.name not in wanted:
                    done["stopped"].append(backend.plan.name)
                self._nursery.start_soon(self._retire, backend, plan.server.drain_s)
            return done

    def _refuse_without_default(
        self, plan: Plan, wanted: dict[str, Backend], done: dict[str, list[str]]
    ) -> None:
        """Keep what is there where the new default device's backend failed."""
        routing = plan.routing
        default = routing.backends[routing.routes.default] if routing else ""
        if default not in done["failed"]:
            return
        cause = wanted[default].view().cause
        for name, backend in wanted.items():
            if self._backends.get(name) is not backend:
                self._nursery.start_soon(self._retire, backend, 0.0)
        raise OnebitError(f"{default}, the default device's backend, did not start: {cause}")

    async def _retire(self, backend: Backend, drain_s: float) -> None:
        with trio.move_on_after(drain_s or float("inf")):
            await backend.wait_for(lambda v: not v.in_flight)
        await self._stop_one(backend)
        backend.retire()

    def renew(self, backend: Backend) -> bool:
        """Restart a backend behind the traffic; return whether it runs at all.

        Requests that it works on go on for `drain_s`; those that come meanwhile wait in line.
        """
        if not backend.view().state.live:
            return False
        if not backend.held:
            self._nursery.start_soon(self._renew, backend)
        return True

    async def _renew(self, backend: Backend) -> None:
        backend.hold()
        try:
            with trio.move_on_after(self.plan.server.drain_s or float("inf")):
                await backend.wait_for(lambda v: not v.in_flight)
            backend.halt()
            backend.want()
            await backend.wait_for(lambda v: v.state is not State.READY)
        finally:
            backend.release()

    async def stop(self) -> None:
        """Stop every backend, the last started first."""
        for backend in reversed(tuple(self._backends.values())):
            await self._stop_one(backend)

    async def _stop_one(self, backend: Backend) -> None:
        backend.halt()
        await backend.wait_for(lambda v: v.state.down)

    def kill(self) -> None:
        """Kill every child at once."""
        for backend in self._backends.values():
            backend.kill()
