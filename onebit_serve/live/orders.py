"""What a person may ask of a running server: start, stop, restart, warm a backend; reload."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import trio

from onebit_serve.core.errors import OnebitError
from onebit_serve.core.plan import Plan
from onebit_serve.core.route import Order
from onebit_serve.core.view import Page
from onebit_serve.core.wire import Refusal
from onebit_serve.live.house import House
from onebit_serve.live.log import Log
from onebit_serve.live.supervise import Backend

__all__ = ["Orders"]

_OK, _ACCEPTED = 200, 202


class Orders:
    """Carries out orders.

    Args:
        house: The backends.
        replan: Reads the configuration again and plans anew; it may block, and raises
            `OnebitError` for what cannot be used.
        log: Where to say what happened.
        changed: Called when the house has another plan.
    """

    def __init__(
        self,
        house: House,
        replan: Callable[[], Plan],
        log: Log,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._house = house
        self._changed = changed
        self._replan = replan
        self._log = log

    def no_such_backend(self, name: str) -> Refusal:
        """Refuse an order for a backend that is not there."""
        names = ", ".join(view.name for view in self._house.views())
        return Refusal(404, f"there is no backend {name}; there are {names}", "not_found")

    async def obey(self, order: Order) -> Page | Refusal:
        """Carry out one order; return what to answer."""
        if order.verb == "reload":
            return await self.reload()
        if order.verb == "clear":
            return await self._clear(full=order.full)
        backend = self._house.get(order.backend)
        if backend is None:
            return self.no_such_backend(order.backend)
        match order.verb:
            case "start":
                self._house.room.start(backend, ordered=True)
            case "stop":
                self._house.room.forget(backend)
                backend.halt()
                message = f"{backend.plan.name} was stopped by order"
                backend.dismiss(Refusal(503, message, "backend_unavailable", 1))
            case "restart":
                backend.halt()
                backend.want()
            case _:
                return await self._warm(backend)
        self._log.say(f"{order.backend}: {order.verb} was asked for", backend=order.backend)
        await trio.lowlevel.checkpoint()
        return Page(_ACCEPTED, {"name": order.backend, "order": order.verb})

    async def _warm(self, backend: Backend) -> Page | Refusal:
        result = await backend.warm_again()
        if result is None:
            view = backend.view()
            return Refusal(409, f"{view.name} is {view.state.value}, not ready", "not_ready")
        return Page(_OK, {"name": backend.plan.name, **msgspec.to_builtins(result)})

    async def _clear(self, *, full: bool) -> Page | Refusal:
        """Empty the prompt caches, and have the warm prompts put back behind the traffic."""
        chats = [
            backend
            for backend in self._house
            if backend.plan.role == "chat" and (full or backend.plan.kind == "llama-server")
        ]
        cleared: list[str] = []
        wanted = False
        for backend in chats:
            if full:
                done = self._house.renew(backend)
            else:
                done = await backend.forget()
            if done:
                cleared.append(backend.plan.name)
                wanted = wanted or backend.prompts.wanted
        if not cleared:
            state = ", ".join(f"{b.plan.name} is {b.view().state.value}" for b in chats)
            return Refusal(409, f"no prompt cache to clear: {state or 'no backend'}", "not_ready")
        scope = "all" if full else "slots"
        self._log.say(f"the prompt cache of {', '.join(cleared)} is cleared ({scope})")
        body = {"status": "cleared", "rewarm_scheduled": wanted, "scope": scope}
        return Page(_OK, body)

    async def reload(self) -> Page | Refusal:
        """Read the configuration again and change to it; a broken one changes nothing."""
        now = self._house.plan.server
        try:
            plan = await trio.to_thread.run_sync(self._replan)
            done = await self._house.reload(plan)
        except OnebitError as error:
            hint = f" (hint: {error.hint})" if error.hint else ""
            message = f"nothing was reloaded: {error.message}{hint}"
            self._log.error(message)
            return Refusal(400, message, "reload_failed")
        for warning in plan.warnings:
            self._log.warning(warning)
        self._changed()
        said = "; ".join(f"{what} {', '.join(names)}" for what, names in done.items() if names)
        if (now.host, now.port) != (plan.server.host, plan.server.port):
            said += "; host and port change at the next start only"
        self._log.say(f"reloaded: {said or 'nothing to do'}")
        return Page(_OK, {"reloaded": done})
