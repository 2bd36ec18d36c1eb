"""Which backend a request goes to, where Laya picks; it holds the router and its scorer.

A request that names a backend itself goes there. Any other one that is a conversation goes where
the router says, and its reply carries the decision; the rest goes to the default device's backend.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import trio

from onebit_serve.core import route
from onebit_serve.core.laya import ROUTED_PATHS, Decision, Tally
from onebit_serve.core.routing import RoutingPlan, ScorerWish
from onebit_serve.core.view import Page
from onebit_serve.core.wire import Refusal, peek
from onebit_serve.live.house import House
from onebit_serve.live.lease import Lease
from onebit_serve.live.log import Log
from onebit_serve.live.scorer import Router
from onebit_serve.live.scorer_child import AddressScorer, ChildScorer
from onebit_serve.live.supervise import Backend

__all__ = ["Routed", "Routing"]

_OFF = Refusal(
    409,
    "requests are not routed here: start with --laya and --device auto or [[backends]]",
    "routing_off",
)


class Routed:
    """A request that was routed.

    Args:
        decision: Where it goes, and why.
        tally: Counts its reply.
        began_s: When it came, on the monotonic clock.

    Attributes:
        line: The header line of its reply, with its CR LF.
    """

    def __init__(self, decision: Decision, tally: Tally, began_s: float) -> None:
        self.line = b"X-1bit-Route: %s\r\n" % decision.header.encode()
        self._decision = decision
        self._tally = tally
        self._began_s = began_s

    def replied(self, lease: Lease) -> None:
        """Count its reply, which has just come to its end."""
        now_s = time.monotonic()
        first_s = lease.answered_s or now_s
        self._tally.replied(self._decision, first_s - self._began_s, now_s - self._began_s)


class Routing:
    """Picks backends; without routes in the house's plan it is off.

    Args:
        house: The backends.
        log: Where to say what happened.
        nursery: Where the scorer's task lives.
    """

    def __init__(self, house: House, log: Log, nursery: trio.Nursery) -> None:
        self._house = house
        self._log = log
        self._nursery = nursery
        self._plan: RoutingPlan | None = None
        self._router: Router | None = None
        self._wish: ScorerWish | None = None
        self._scorer: AddressScorer | ChildScorer | None = None
        self._scope = trio.CancelScope()
        self.follow()

    @property
    def on(self) -> bool:
        """Whether requests are routed."""
        return self._plan is not None

    def follow(self) -> None:
        """Take over what the house's plan says now; what conversations are is kept."""
        plan = self._plan = self._house.plan.routing
        wish = plan.scorer if plan else None
        if wish != self._wish:
            self._wish = wish
            self._scope.cancel()
            self._scope, self._scorer = trio.CancelScope(), None
            if wish is not None:
                make = ChildScorer if wish.port is None else AddressScorer
                self._scorer = make(wish, self._log)
                self._nursery.start_soon(self._run, self._scorer, self._scope)
        if plan is None:
            return
        if self._router is None:
            self._router = Router(
                plan.routes, None, deadline_s=plan.deadline_s, say=self._log.warning
            )
        self._router.routes = plan.routes
        self._router.deadline_s = plan.deadline_s
        self._router.scorer = self._scorer
        self._router.missed = self._scorer.missed if self._scorer else lambda: None

    async def _run(self, scorer: AddressScorer | ChildScorer, scope: trio.CancelScope) -> None:
        with scope:
            await scorer.run()

    async def wait_settled(self, limit_s: float) -> None:
        """Wait until the scorer is ready or has failed, `limit_s` seconds at most."""
        if self._scorer is not None:
            with trio.move_on_after(limit_s):
                await self._scorer.settled.wait()

    def pids(self) -> frozenset[int]:
        """Return the scorer's processes."""
        return self._scorer.pids() if self._scorer else frozenset()

    async def pick(
        self, path: str, model: str, body: bytes
    ) -> tuple[Backend | Refusal, Routed | None]:
        """Return which backend takes a request, and how it came to that where it was routed.

        Args:
            path: The route.
            model: The request's `model`; empty without one.
            body: The whole body.
        """
        began_s = time.monotonic()
        plan, router = self._plan, self._router
        if plan is None or router is None:
            return self._house.pick(path, model), None
        plans = [backend.plan for backend in self._house]
        named = route.named(plans, model)
        if isinstance(named, Refusal):
            return named, None
        if named is not None:
            return self._backend(named, plan), None
        if path in ROUTED_PATHS:
            decision = await router.decide(path, body)
            plan = self._plan or plan  # a reload may have come while it was asked
            if decision is not None:
                name = plan.backends.get(decision.device, "")
                return self._backend(name, plan), Routed(decision, router.tally, began_s)
        picked = route.pick(plans, path, "")  # the one that alone can do this, if it is so
        return self._backend(picked if isinstance(picked, str) else "", plan), None

    def _backend(self, name: str, plan: RoutingPlan) -> Backend | Refusal:
        """Return a backend by its name, or the default device's."""
        default = plan.backends[plan.routes.default]
        backend = self._house.named(name) or self._house.named(default)
        if backend is None:
            return Refusal(503, f"the backend {default} is not there", "backend_unavailable", 10)
        return backend

    async def explain(self, body: bytes) -> Page | Refusal:
        """Say where a request would go and why; it is neither counted nor remembered."""
        plan, router = self._plan, self._router
        if plan is None or router is None:
            return _OFF
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            message = "send the body of a request: a JSON object with messages, prompt or input"
            return Refusal(400, message, "no_request")
        named = route.named([backend.plan for backend in self._house], peek(body).model)
        if isinstance(named, Refusal):
            return named
        if named is not None:
            return self._explained(named, plan, {"why": f"the request names {named} itself"})
        asks = fields.keys() & {"messages", "prompt", "input"}
        decision = await router.explain("/v1/chat/completions", body) if asks else None
        if decision is None:
            return Refusal(400, "the request has no messages, prompt or input", "no_request")
        return self._explained(
            plan.backends.get(decision.device, ""),
            plan,
            {
                "class": decision.kind,
                "confidence": decision.confidence,
                "why": decision.why,
                "header": f"X-1bit-Route: {decision.header}",
                "remembered": decision.remembered,
            },
        )

    def _explained(self, name: str, plan: RoutingPlan, fields: dict[str, Any]) -> Page | Refusal:
        backend = self._backend(name, plan)
        if isinstance(backend, Refusal):
            return backend
        view = backend.view()
        where = {"device": view.device, "backend": view.name, "state": view.state.value}
        return Page(200, {**where, **fields})

    def view(self) -> dict[str, Any] | None:
        """Return what `/v1/status` shows; `None` while it is off."""
        plan, router = self._plan, self._router
        if plan is None or router is None:
            return None
        policy = {"default": plan.routes.default, "devices": plan.routes.devices}
        scorer = self._scorer.view() if self._scorer else None
        return {"policy": policy, "scorer": scorer, **router.tally.view()}

    @property
    def tally(self) -> Tally | None:
        """The counts; `None` while it is off."""
        return self._router.tally if self.on and self._router else None
