"""Asking Laya: two ways to put one question, and a decision that never fails a request.

    HttpScorer   `POST /v1/systemone`: laya-serve, `laya[serve]`, a llama-server that has the route
    LineScorer   one JSON object a line on the stdin and stdout of ggmlc's `laya` daemon
    Router       size gate, memory of conversations, deadline, default: what the front door asks

A scorer that is down, slow, busy or talks nonsense means the default device: told once for each
time it begins, counted every time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import trio

from onebit_serve.core import laya
from onebit_serve.core.http import Reply
from onebit_serve.core.laya import Choice, Decision, DecisionCache, Opening, Tally
from onebit_serve.core.policy import Routes
from onebit_serve.live.upstream import GoneError

__all__ = [
    "HttpScorer",
    "LineScorer",
    "NoAnswerError",
    "Request",
    "Router",
    "Scorer",
    "is_healthy",
]

_OK = 200
_BUSY = (429, 503, 529)  # 529 is laya-serve's word for overload
_HEALTH_PATHS = ("/health", "/healthz")  # laya[serve] and llama-server, laya-serve 0.2.1
_LINE_LIMIT_BYTES = 1 << 20
_QUESTIONS_IN_LINE = 64

Request = Callable[[str, str, bytes], Awaitable[Reply]]


class NoAnswerError(Exception):
    """A question that got no answer.

    Args:
        word: `down`, `slow`, `busy` or `nonsense`, for counting.
        reason: For a person.
    """

    def __init__(self, word: str, reason: str) -> None:
        super().__init__(reason)
        self.word = word
        self.reason = reason


class Scorer(Protocol):
    """Something that can be asked about a text."""

    async def ask(self, text: str) -> Choice:
        """Return what the text is.

        Raises:
            NoAnswerError: Nothing usable came back.
        """


async def is_healthy(request: Request) -> bool:
    """Ask an HTTP scorer whether it is ready, by either of the names that scorers give it."""
    for path in _HEALTH_PATHS:
        with contextlib.suppress(GoneError, OSError):
            if (await request("GET", path, b"")).status == _OK:
                return True
    return False


class HttpScorer:
    """A scorer that is asked over HTTP.

    Args:
        request: Sends one request to it and returns the whole reply; raises `GoneError`.
        model: The model id to ask for.
    """

    def __init__(self, request: Request, model: str = "laya") -> None:
        self._request = request
        self._model = model

    async def ask(self, text: str) -> Choice:
        """Return what the text is; raises as `Scorer`."""
        body = msgspec.json.encode(laya.question(text, self._model))
        try:
            reply = await self._request("POST", "/v1/systemone", body)
        except (GoneError, OSError) as error:
            raise NoAnswerError("down", str(error)) from None
        if reply.status in _BUSY:
            raise NoAnswerError("busy", f"it answered {reply.status}")
        if reply.status != _OK:
            raise NoAnswerError("down", f"it answered {reply.status} to a question")
        return _read(reply.body)


class LineScorer:
    """A scorer that reads a JSON object a line, and writes one for each, matched by `id`.

    It owns no process: who does runs `write` beside it, feeds it what the process says, and tells
    when it is gone.
    """

    def __init__(self) -> None:
        self._lines_in, self._lines_out = trio.open_memory_channel[bytes](_QUESTIONS_IN_LINE)
        self._rest = b""
        self._numbers = itertools.count(1)
        self._waiting: dict[str, _Waiter] = {}
        self._gone = ""
        self.ready = trio.Event()

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the process's stdout; lines that are no JSON objects are noise."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_LIMIT_BYTES:
            self._rest = b""
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                self._take(msgspec.json.decode(line))

    def _take(self, said: Any) -> None:
        if not isinstance(said, dict):
            return
        if said.get("status") == "ready":
            self.ready.set()
        waiter = self._waiting.get(str(said.get("id")))
        if waiter:
            waiter.answer = said
            waiter.event.set()

    def gone(self, reason: str) -> None:
        """Fail all that is asked, now and later: the process has ended."""
        self._gone = reason
        for waiter in self._waiting.values():
            waiter.event.set()

    async def ask(self, text: str) -> Choice:
        """Return what the text is; raises as `Scorer`."""
        number = str(next(self._numbers))
        line = msgspec.json.encode({"id": number, **laya.question(text)}) + b"\n"
        waiter = self._waiting[number] = _Waiter()
        try:
            if not self._gone:
                self._lines_in.send_nowait(line)
                await waiter.event.wait()
        except trio.WouldBlock:
            raise NoAnswerError("slow", "it has not read the questions before") from None
        finally:
            del self._waiting[number]
        answer = waiter.answer
        if answer is None:
            raise NoAnswerError("down", self._gone)
        if "error" in answer:
            raise NoAnswerError("nonsense", f"it answered an error: {str(answer['error'])[:200]}")
        return _checked(answer)

    async def write(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Write the questions as they come, until the process reads no more.

        A task of its own, so that a question that is given up is never written by half.

        Args:
            send: Writes all of some bytes to the process's stdin.
        """
        try:
            async for line in self._lines_out:
                await send(line)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.gone(f"it reads no more: {error}")


class _Waiter:
    def __init__(self) -> None:
        self.event = trio.Event()
        self.answer: dict[str, Any] | None = None


def _read(body: bytes) -> Choice:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise NoAnswerError("nonsense", "its answer is not JSON") from None
    return _checked(answer)


def _checked(answer: Any) -> Choice:
    try:
        return laya.read_answer(answer)
    except laya.BadAnswerError as error:
        raise NoAnswerError("nonsense", f"its answer means nothing: {error}") from None


class Router:
    """Decides where requests go; one for the front door.

    Args:
        routes: The policy as it holds here; may be replaced at any time.
        scorer: Who is asked, `None` while there is nobody; may be replaced at any time.
        deadline_s: Seconds that an answer may take, 0 for no limit; may be replaced at any time.
        say: Takes one line for the user.

    Attributes:
        missed: Told whenever the scorer had no answer at the deadline; may be replaced.
    """

    def __init__(
        self,
        routes: Routes,
        scorer: Scorer | None,
        *,
        deadline_s: float,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.routes = routes
        self.scorer = scorer
        self.tally = Tally()
        self.deadline_s = deadline_s
        self.missed: Callable[[], None] = lambda: None
        self._say = say
        self._remembered = DecisionCache()
        self._failing = False

    def __repr__(self) -> str:
        """Tell how many conversations are known."""
        return f"<Router {len(self._remembered)} conversations, default {self.routes.default}>"

    async def decide(self, path: str, body: bytes) -> Decision | None:
        """Decide where a request goes; it takes `deadline_s` at most, and never raises.

        Args:
            path: The route.
            body: The whole body.

        Returns:
            `None` for what is not routed: it goes to the default device, without a header.
        """
        started_s = trio.current_time()
        opening = laya.opening(path, body)
        if opening is None:
            return None
        choice = self._known(opening)
        if choice:
            decision = laya.decide(choice, self.routes, remembered=True)
        else:
            choice = self._remembered.put(opening.key, self._counted(await self._judge(opening)))
            decision = laya.decide(choice, self.routes)
        self.tally.decided(decision, trio.current_time() - started_s)
        return decision

    async def explain(self, path: str, body: bytes) -> Decision | None:
        """Decide as `decide` does, and neither remember nor count it."""
        opening = laya.opening(path, body)
        if opening is None:
            return None
        choice = self._known(opening)
        if choice:
            return laya.decide(choice, self.routes, remembered=True)
        return laya.decide((await self._judge(opening))[0], self.routes)

    def _known(self, opening: Opening) -> Choice | None:
        """Return what a conversation was found to be.

        A later turn stays where the first one went, whatever the reason; a new conversation that
        begins alike is asked about again where nobody answered then.
        """
        choice = self._remembered.get(opening.key)
        return None if choice and choice.failed and opening.first_turn else choice

    async def warm_up(self) -> None:
        """Ask once for each length that a scorer compiles on its own.

        It takes as long as it takes: the caller sets a deadline.

        Raises:
            NoAnswerError: The scorer does not answer.
        """
        if self.scorer is None:
            raise NoAnswerError("down", "there is no scorer")
        for text in laya.WARM_UP_TEXTS:
            await self.scorer.ask(text)

    async def _judge(self, opening: Opening) -> tuple[Choice, NoAnswerError | None]:
        """Return what it is and, where somebody was asked, whether that failed."""
        text = opening.text
        if text is None:
            return Choice("", why="no user message in words"), None
        sized = laya.by_size(text)
        if sized:
            return sized, None
        if self.scorer is None:
            return Choice("", why="nobody is asked: only the size decides"), None
        try:
            return await self._ask(self.scorer, text), None
        except NoAnswerError as error:
            return Choice("", why=f"Laya is {error.word}: {error}", failed=True), error

    def _counted(self, judged: tuple[Choice, NoAnswerError | None]) -> Choice:
        """Count a question and say when answers stop and come again; return the choice."""
        choice, error = judged
        if error is not None:
            self.tally.asked += 1
            self.tally.failed(error.word)
            if not self._failing:
                self._say(f"Laya does not answer, requests go to the default device: {error}")
            self._failing = True
            return Choice("", why=f"Laya was {error.word}", failed=True)  # what is kept is short
        if choice.confidence is not None:
            self.tally.asked += 1
            if self._failing:
                self._say("Laya answers again")
            self._failing = False
        return choice

    async def _ask(self, scorer: Scorer, text: str) -> Choice:
        with trio.move_on_after(self.deadline_s or float("inf")):
            return await scorer.ask(text)
        self.missed()
        raise NoAnswerError("slow", f"no answer in {self.deadline_s:g} s")
