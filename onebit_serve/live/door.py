"""The front door: accepts connections, answers what is ours, relays the rest.

Each connection has one task. A request for a backend is admitted (which may mean a wait in line),
relayed, and counted out; one whose backend died before it answered is sent once more to the
restarted one, never a third time, so that a request which kills its backend cannot kill the next.

`drain` stops accepting and lets what runs come to its end.
"""

from __future__ import annotations

import errno
import math
import socket
import time
from contextlib import suppress

import msgspec
import trio

from onebit_serve.core import route, view, wire
from onebit_serve.core.config import Server
from onebit_serve.core.http import BadRequestError, RequestHead
from onebit_serve.core.wire import Refusal
from onebit_serve.live.connection import Connection, LeftError
from onebit_serve.live.hangup import HangUpWatch
from onebit_serve.live.heartbeat import Heartbeat
from onebit_serve.live.house import House
from onebit_serve.live.log import Log
from onebit_serve.live.orders import Orders
from onebit_serve.live.pump import Pump
from onebit_serve.live.relay import ClientGoneError, CutError, Errand, relay
from onebit_serve.live.supervise import Backend, Lease, RefusedError
from onebit_serve.live.upstream import GoneError

__all__ = ["Door"]

_CONNECTIONS = 1000  # nginx: 512 a worker
_ACCEPT_PAUSE_S = 0.1
_LATE_LOOK_S = 1.0
_SENT_AT_MOST = 2
_LOG_LINES = 200


class Door:
    """Answers what is ours and relays the rest.

    Args:
        listener: Bound and listening.
        settings: The `[server]` table.
        house: Whom to relay to.
        orders: Carries out what a person asks for.
        log: Where to say what happened.
        version: What `/v1/status` calls us.
    """

    def __init__(
        self,
        listener: socket.socket,
        settings: Server,
        house: House,
        orders: Orders,
        log: Log,
        version: str,
    ) -> None:
        self._listener = listener
        self._settings = settings
        self._park_s = settings.park_s or math.inf
        self._ping_s = settings.ping_s
        self._nursery: trio.Nursery
        self._house = house
        self._orders = orders
        self._log = log
        self._version = version
        self._watch = HangUpWatch()
        self._pump = Pump()
        self._connections: set[Connection] = set()
        self._draining = False
        self._empty = trio.Event()

    async def run(self) -> None:
        """Accept connections until drained or cancelled."""
        self._listener.setblocking(False)  # noqa: FBT003
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._watch.run)
            nursery.start_soon(self._close_late_ones)
            with suppress(trio.ClosedResourceError):  # by `drain`
                while True:
                    await trio.lowlevel.wait_readable(self._listener)
                    await self._accept_all(nursery)

    async def drain(self, limit_s: float) -> int:
        """Stop accepting, let the requests that run come to their end, and close the rest.

        Args:
            limit_s: Seconds to wait for them.

        Returns:
            How many requests were still running at the limit.
        """
        self._draining = True
        trio.lowlevel.notify_closing(self._listener)
        self._listener.close()
        for connection in self._connections:
            if connection.idle:
                connection.scope.cancel()
        with trio.move_on_after(limit_s):
            while self._connections:
                self._empty = trio.Event()
                await self._empty.wait()
        return len(self._connections)

    async def _accept_all(self, nursery: trio.Nursery) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._log.error(f"cannot take a connection: {error.strerror}")
                    await trio.sleep(_ACCEPT_PAUSE_S)
                    return
                continue  # that client went away before we came
            if len(self._connections) >= _CONNECTIONS:
                sock.close()
                continue
            sock.setblocking(False)  # noqa: FBT003
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nursery.start_soon(self._serve, sock)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection; whatever happens to it stays in here."""
        fd = sock.fileno()
        with trio.CancelScope() as scope:
            connection = Connection(sock, scope, self._settings.max_body_bytes)
            self._connections.add(connection)
            try:
                self._watch.watch(fd, scope)
                await self._answer_all(connection)
            except (OSError, LeftError, ClientGoneError, CutError):
                pass  # nobody is left to tell
            except Exception as error:  # noqa: BLE001 - one connection must not end the others
                self._log.error(f"a connection failed: {type(error).__name__}: {error}")
            finally:
                self._connections.discard(connection)
                self._watch.forget(fd)
                sock.close()
                if not self._connections:
                    self._empty.set()

    async def _close_late_ones(self) -> None:
        """Close connections that are past what they may take for the step they are in.

        One look a second at all of them: a deadline of trio's for each step costs more than the
        parsing of the head it guards.
        """
        while True:
            await trio.sleep(_LATE_LOOK_S)
            now_s = time.monotonic()
            for connection in self._connections:
                if connection.due_s < now_s:
                    connection.scope.cancel()

    async def _answer_all(self, connection: Connection) -> None:
        while not self._draining:
            try:
                request = await connection.read()
            except BadRequestError as error:
                await connection.refuse(error)
                return
            if request is None or not await self._answer(connection, *request):
                return

    async def _answer(self, connection: Connection, head: RequestHead, body: bytes) -> bool:
        """Answer one request; return whether the connection goes on."""
        choice = route.choose(head.method, head.path)
        if isinstance(choice, Refusal):
            return await connection.answer_refusal(head, choice)
        if isinstance(choice, route.Order):
            return await self._obey(connection, head, choice)
        if choice != "relayed":
            page = self._page(choice)
            retry = b"Retry-After: %d\r\n" % page.retry_after_s if page.retry_after_s else b""
            return await connection.answer(
                head, page.status, msgspec.json.encode(page.body), lines=retry
            )
        peek = wire.peek(body) if body else wire.Peek()
        backend = self._house.pick(head.path, peek.model)
        if isinstance(backend, Refusal):
            return await connection.answer_refusal(head, backend)
        return await self._ask(connection, backend, _errand(backend, head, body, peek))

    async def _obey(self, connection: Connection, head: RequestHead, order: route.Order) -> bool:
        """Do what a person asked for, and say how that went."""
        if order.verb == "logs":
            return await self._send_logs(connection, head, order.backend)
        done = await self._orders.obey(order)
        if isinstance(done, Refusal):
            return await connection.answer_refusal(head, done)
        return await connection.answer(head, done.status, msgspec.json.encode(done.body))

    async def _send_logs(self, connection: Connection, head: RequestHead, name: str) -> bool:
        backend = self._house.get(name)
        if backend is None:
            return await connection.answer_refusal(head, self._orders.no_such_backend(name))
        text = "".join(f"{line}\n" for line in backend.output(_LOG_LINES))
        return await connection.answer(head, 200, text.encode(), kind=b"text/plain; charset=utf-8")

    def _page(self, name: route.Page) -> view.Page:
        match name:
            case "livez":
                return view.livez()
            case "models":
                return view.models(self._house.views())
            case "status":
                return view.status(self._house.views(), self._version)
            case _:
                return view.health(self._house.views())

    async def _ask(self, connection: Connection, backend: Backend, errand: Errand) -> bool:
        """Answer a request from its backend, with comments meanwhile where they are asked for."""
        if not errand.stream or errand.assemble or errand.head.http_1_0 or not self._ping_s:
            return await self._ask_backend(connection, backend, errand, None)
        heartbeat = Heartbeat(connection.sock, self._ping_s, b"".join(errand.headers))
        self._nursery.start_soon(heartbeat.run)
        try:
            return await self._ask_backend(connection, backend, errand, heartbeat)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await heartbeat.stop()

    async def _ask_backend(
        self,
        connection: Connection,
        backend: Backend,
        errand: Errand,
        heartbeat: Heartbeat | None,
    ) -> bool:
        """Send a request to its backend, and once more where that died before it answered."""
        name, reason = backend.plan.name, ""
        for attempt in range(1, _SENT_AT_MOST + 1):
            try:
                lease = backend.grant() or await backend.admit(
                    self._park_s, again=attempt > 1
                )
            except RefusedError as error:
                refusal = error.refusal
                if reason:
                    message = f"{name} failed before it answered: {reason}; {refusal.message}"
                    refusal = Refusal(502, message, "backend_gone")
                return await self._send_refusal(connection, errand, refusal, heartbeat)
            try:
                return await self._relay(connection, backend, lease, errand, heartbeat)
            except GoneError as error:
                reason = error.reason
                if attempt == _SENT_AT_MOST or not await lease.wait_left():
                    break
            self._log.say(f"a request to {name} is sent again: {reason}", backend=name)
        message = f"{name} failed before it answered: {reason}"
        refusal = Refusal(502, message, "backend_gone")
        return await self._send_refusal(connection, errand, refusal, heartbeat)

    async def _send_refusal(
        self,
        connection: Connection,
        errand: Errand,
        refusal: Refusal,
        heartbeat: Heartbeat | None,
    ) -> bool:
        if heartbeat is not None and await heartbeat.stop():
            await heartbeat.end(refusal)
            return errand.head.keep_alive
        return await connection.answer_refusal(errand.head, refusal, b"".join(errand.headers))

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
        except GoneError:
            whole = True  # no slot works for it any more
            raise
        except CutError as error:
            whole = True
            name = backend.plan.name
            self._log.warning(f"a reply of {name} was cut: {error.reason}", backend=name)
            raise
        finally:
            lease.end(whole=whole)
        return go_on


def _errand(backend: Backend, head: RequestHead, body: bytes, peek: wire.Peek) -> Errand:
    """Prepare a request for its backend; bodies of llama-server backends pass unchanged."""
    plan = backend.plan
    model = ""
    if plan.upstream_model is not None and body:
        body = wire.with_model(body, plan.upstream_model)
        model = plan.served_id
    if plan.assemble and not peek.stream:
        streamed = wire.as_stream(head.path, body)
        if streamed is not None:
            return Errand(head, streamed, stream=True, assemble=True, model=model)
    return Errand(head, body, stream=peek.stream, model=model)
