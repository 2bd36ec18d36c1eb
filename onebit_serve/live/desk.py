"""Answers one request after the other: who may ask, what is ours, what a backend answers.

A request for a backend is admitted (which may mean a wait in line), relayed, and counted out. One
whose backend died before it answered is sent once more to the restarted one, never a third time, so
that a request which kills its backend cannot kill the next.
"""

from __future__ import annotations

import math
import secrets
import time
from urllib.parse import unquote

import msgspec
import trio

from onebit_serve.core import access, metrics, route, view, wire
from onebit_serve.core.access import Access
from onebit_serve.core.config import Server
from onebit_serve.core.http import Headers, RequestHead
from onebit_serve.core.metrics import DoorCounters, Outcome
from onebit_serve.core.request_id import HEADER, RequestIds
from onebit_serve.core.wire import Refusal
from onebit_serve.live.connection import Connection
from onebit_serve.live.heartbeat import Heartbeat
from onebit_serve.live.house import House
from onebit_serve.live.lease import Lease, RefusedError, ReplacedError
from onebit_serve.live.log import Log
from onebit_serve.live.orders import Orders
from onebit_serve.live.pump import Pump
from onebit_serve.live.relay import CutError, Errand, relay
from onebit_serve.live.routing import Routed, Routing
from onebit_serve.live.supervise import Backend
from onebit_serve.live.upstream import GoneError

__all__ = ["Desk"]

_SENT_AT_MOST = 2
_LOG_LINES = 200
_MOST_LOG_LINES = 2000
_MOST_DIGITS = 9
_OWN_METRICS_S = 2.0


class Desk:
    """Answers requests.

    Args:
        house: Whom to relay to.
        routing: Who picks among them, where requests are routed.
        orders: Carries out what a person asks for.
        rules: Who may talk.
        settings: The `[server]` table.
        log: Where to say what happened.
        version: What `/v1/status` calls us.
        nursery: Where comments on waiting streams are sent from.

    Attributes:
        counters: What is counted before a backend is chosen.
    """

    def __init__(
        self,
        house: House,
        routing: Routing,
        orders: Orders,
        rules: Access,
        settings: Server,
        log: Log,
        version: str,
        nursery: trio.Nursery,
    ) -> None:
        self.counters = DoorCounters(refusals={})
        self._house = house
        self._routing = routing
        self._orders = orders
        self._rules = rules
        self._park_s = settings.park_s or math.inf
        self._ping_s = settings.ping_s
        self._log = log
        self._version = version
        self._nursery = nursery
        self._pump = Pump()
        self._ids = RequestIds(secrets.token_hex(4))
        self._since_s = time.monotonic()
        self._created_s = int(time.time())

    def id_line(self, head: RequestHead | None) -> bytes:
        """Return the header line with the id of a request that is refused as it is read.

        Args:
            head: Its head; `None` where that cannot be read, so that the id is one of ours.
        """
        return _id_line(self._ids.take(head.get(HEADER) if head else None))

    async def answer(self, connection: Connection, head: RequestHead, body: bytes) -> bool:
        """Answer one request; return whether the connection goes on."""
        given = head.get(HEADER)
        request_id = self._ids.take(given)
        lines = _id_line(request_id)
        if head.get(b"origin") is not None:
            lines += _lines(access.cors(self._rules, head))
        refusal = access.admit(self._rules, head)
        if refusal is not None:
            self.counters.refuse(refusal.code)
            return await connection.answer_refusal(head, refusal, lines)
        if head.method == "OPTIONS":
            lines = _id_line(request_id) + _lines(access.preflight(self._rules, head))
            return await connection.answer(head, 204, b"", lines=lines)
        choice = route.choose(head.method, head.path)
        if choice == "relayed":
            more = b"" if given else b"x-request-id: %s\r\n" % request_id.encode()
            return await self._answer_relayed(connection, head, body, lines, more)
        if isinstance(choice, route.Order):
            return await self._obey(connection, head, choice, body, lines)
        if isinstance(choice, Refusal):
            return await connection.answer_refusal(head, choice, lines)
        if choice == "metrics":
            return await connection.answer(
                head, 200, await self._metrics(), kind=metrics.CONTENT_TYPE, lines=lines
            )
        page = self._page(choice, head.path)
        if page.retry_after_s is not None:
            lines += b"Retry-After: %d\r\n" % page.retry_after_s
        return await connection.answer(
            head, page.status, msgspec.json.encode(page.body), lines=lines
        )

    # ------------------------------------------------------------------------ what is ours

    def _page(self, name: route.Page, path: str) -> view.Page:
        views = self._house.views()
        match name:
            case "livez":
                return view.livez()
            case "model":
                return view.model(
                    views, unquote(path.removeprefix(route.MODEL_PREFIX)), self._created_s
                )
            case "models":
                return view.models(views, self._created_s)
            case "status":
                shapes = {backend.plan.name: backend.shaper.view() for backend in self._house}
                return view.status(views, self._version, shapes, self._routing.view())
            case _:
                return view.health(views)

    async def _metrics(self) -> bytes:
        """Return the page of figures, with those that backends tell in time."""
        own: dict[str, str] = {}

        async def ask(backend: Backend) -> None:
            text = await backend.own_metrics()
            if text:
                own[backend.plan.name] = text

        with trio.move_on_after(_OWN_METRICS_S):
            async with trio.open_nursery() as nursery:
                for backend in self._house:
                    nursery.start_soon(ask, backend)
        self.counters.log_lines_dropped = self._log.dropped
        return metrics.render(
            self._house.views(),
            {backend.plan.name: backend.counters for backend in self._house},
            self.counters,
            version=self._version,
            uptime_s=time.monotonic() - self._since_s,
            own=own,
            tally=self._routing.tally,
        )

    async def _obey(
        self,
        connection: Connection,
        head: RequestHead,
        order: route.Order,
        body: bytes,
        lines: bytes,
    ) -> bool:
        """Do what a person asked for, and say how that went."""
        if order.verb == "logs":
            return await self._send_logs(connection, head, order.backend, lines)
        if order.verb == "clear" and _query(head).get(b"full") == b"1":
            order = msgspec.structs.replace(order, full=True)
        if order.verb == "route":
            done = await self._routing.explain(body)
        else:
            done = await self._orders.obey(order)
        if isinstance(done, Refusal):
            return await connection.answer_refusal(head, done, lines)
        return await connection.answer(
            head, done.status, msgspec.json.encode(done.body), lines=lines
        )

    async def _send_logs(
        self, connection: Connection, head: RequestHead, name: str, lines: bytes
    ) -> bool:
        """Send what a backend printed, and go on as it prints where that is asked for."""
        backend = self._house.get(name)
        if backend is None:
            return await connection.answer_refusal(head, self._orders.no_such_backend(name), lines)
        kind = b"text/plain; charset=utf-8"
        asked = _query(head)
        said = asked.get(b"lines", b"%d" % _LOG_LINES)
        if not said.isdigit():
            message = f"lines is a number, as in ?lines={_LOG_LINES}"
            return await connection.answer_refusal(
                head, Refusal(400, message, "bad_request"), lines
            )
        count = int(said) if len(said) < _MOST_DIGITS else _MOST_LOG_LINES
        count = min(count, _MOST_LOG_LINES)
        if asked.get(b"follow") != b"1":
            text = backend.output.last(count)
            return await connection.answer(head, 200, text, kind=kind, lines=lines)
        await connection.begin_chunks(head, kind=kind, lines=lines)
        async for piece in backend.output.follow(count):
            await connection.send_chunk(piece)
        await connection.send_chunk(b"")
        return False

    # ---------------------------------------------------------------- what a backend answers

    async def _answer_relayed(
        self, connection: Connection, head: RequestHead, body: bytes, lines: bytes, more: bytes
    ) -> bool:
        only = None if self._routing.on else self._house.only()
        peek = wire.Peek()
        if body and (only is None or self._ping_s or only.plan.assemble):
            peek = wire.peek(body)
        backend: Backend | Refusal | None = only
        routed: Routed | None = None
        if backend is None:
            backend, routed = await self._routing.pick(head.path, peek.model, body)
        if routed is not None:
            lines += routed.line
        if isinstance(backend, Refusal):
            self.counters.refuse(backend.code)
            return await connection.answer_refusal(head, backend, lines)
        errand = _errand(backend, head, body, peek, lines, more)
        heartbeat = None
        if self._ping_s and errand.stream and not errand.assemble and not head.http_1_0:
            heartbeat = Heartbeat(connection.sock, self._ping_s, lines)
            self._nursery.start_soon(heartbeat.run)
        outcome: Outcome = "client_gone"
        try:
            outcome, go_on = await self._ask(connection, backend, errand, heartbeat, routed)
        except CutError:
            outcome = "cut"
            raise
        finally:
            backend.counters.end(outcome)
            if heartbeat is not None:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                    await heartbeat.stop()
        return go_on

    async def _ask(
        self,
        connection: Connection,
        backend: Backend,
        errand: Errand,
        heartbeat: Heartbeat | None,
        routed: Routed | None,
    ) -> tuple[Outcome, bool]:
        """Send a request to its backend, and once more where that died before it answered."""
        name, reason = backend.plan.name, ""
        by = "laya" if routed and backend.plan.lazy else ""
        for attempt in range(1, _SENT_AT_MOST + 1):
            try:
                lease = backend.grant()
                if lease is None:
                    backend, lease = await self._admit(backend, again=attempt > 1, by=by)
            except RefusedError as error:
                refusal = error.refusal
                if reason:
                    message = f"{name} failed before it answered: {reason}; {refusal.message}"
                    refusal = Refusal(502, message, "backend_gone")
                go_on = await _send_refusal(connection, errand, refusal, heartbeat)
                return ("failed" if reason else "refused"), go_on
            try:
                go_on = await self._relay(connection, backend, lease, errand, heartbeat)
            except GoneError as error:
                reason = error.reason
                if attempt == _SENT_AT_MOST or not await lease.is_over():
                    break
            else:
                if routed is not None:
                    routed.replied(lease)
                return "answered", go_on
            backend.counters.replayed += 1
            self._log.say(f"a request to {name} is sent again: {reason}", backend=name)
        cause = backend.view().cause
        message = f"{name} failed before it answered: {cause or reason}"
        refusal = Refusal(502, message, "backend_gone")
        return "failed", await _send_refusal(connection, errand, refusal, heartbeat)

    async def _admit(self, backend: Backend, *, again: bool, by: str) -> tuple[Backend, Lease]:
        """Wait in line for a backend, or for the one that a reload put in its place meanwhile."""
        try:
            return backend, await backend.admit(self._park_s, again=again, by=by)
        except ReplacedError:
            name = backend.plan.name
        heir = self._house.named(name)
        if heir is None:
            message = f"{name} was taken out of the configuration"
            raise RefusedError(Refusal(503, message, "backend_unavailable", 1))
        return await self._admit(heir, again=again, by=by)

    async def _relay(
        self,
        connection: Connection,
        backend: Backend,
        lease: Lease,
        errand: Errand,
        heartbeat: Heartbeat | None,
    ) -> bool:
        whole = False
        try:
            go_on = await relay(errand, connection.sock, lease, self._pump, heartbeat)
            whole = True
            if lease.tail:
                backend.note_reply(errand.head.path, errand.body, b"".join(lease.tail))
        except GoneError:
            whole = True  # no slot works for it any more
            raise
        except CutError as error:
            whole = True
            name = backend.plan.name
            self._log.warning(f"a reply of {name} was cut: {error.reason}", backend=name)
            raise
        finally:
            backend.counters.request_bytes += len(errand.body)
            backend.counters.response_bytes += lease.size_bytes
            lease.end(whole=whole)
        return go_on


async def _send_refusal(
    connection: Connection, errand: Errand, refusal: Refusal, heartbeat: Heartbeat | None
) -> bool:
    if heartbeat is not None and await heartbeat.stop():
        await heartbeat.end(refusal)
        return errand.head.keep_alive
    return await connection.answer_refusal(errand.head, refusal, errand.lines)


def _query(head: RequestHead) -> dict[bytes, bytes]:
    """Return what a target asks for after its `?`; of several of a name the last."""
    return dict(part.partition(b"=")[::2] for part in head.target.partition(b"?")[2].split(b"&"))


def _id_line(request_id: str) -> bytes:
    return b"X-Request-Id: %s\r\n" % request_id.encode()


def _lines(headers: Headers) -> bytes:
    return b"".join(b"%s: %s\r\n" % header for header in headers)


def _errand(
    backend: Backend,
    head: RequestHead,
    body: bytes,
    peek: wire.Peek,
    lines: bytes,
    more: bytes,
) -> Errand:
    """Prepare a request for its backend; bodies of llama-server backends pass unchanged."""
    plan = backend.plan
    model = ""
    if plan.upstream_model is not None and body:
        body = wire.with_model(body, plan.upstream_model)
        model = plan.served_id
    if plan.assemble and not peek.stream:
        streamed = wire.as_stream(head.path, body)
        if streamed is not None:
            return Errand(
                head, streamed, stream=True, assemble=True, model=model, more=more, lines=lines
            )
    return Errand(head, body, stream=peek.stream, model=model, more=more, lines=lines)
