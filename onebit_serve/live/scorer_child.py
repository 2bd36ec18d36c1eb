"""The scorer as a child of ours, started, warmed, watched and restarted; or as an address.

    ChildScorer     lives by `core.life`, as a backend does: load, warm-up, ready, restart
    AddressScorer   runs elsewhere on this machine; it is only asked

Either is asked at once or not at all: one that loads, is gone or has stopped answering says so
without delay, so that no request waits for it. Three questions in a row without an answer make it
suspect: nobody else is sent to it until it has answered a question of ours, and a child that does
not within `HANG_S` is stopped and started again.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import trio

from onebit_serve.core import laya, life
from onebit_serve.core.errors import ConfigError
from onebit_serve.core.http import Reply
from onebit_serve.core.laya import Choice
from onebit_serve.core.life import Life, RestartPolicy, State
from onebit_serve.core.routing import ScorerWish
from onebit_serve.core.scorers import ScorerPlan, scorer_plan
from onebit_serve.live import probe
from onebit_serve.live.child import Child
from onebit_serve.live.log import Log
from onebit_serve.live.scorer import (
    HttpScorer,
    LineScorer,
    NoAnswerError,
    Request,
    Scorer,
    is_healthy,
)
from onebit_serve.live.spawn import child_environment, free_port, launch
from onebit_serve.live.upstream import exchange

__all__ = ["AddressScorer", "ChildScorer"]

HANG_S = 30.0
LOAD_S = 300.0  # weights may come from a hub
_WARM_UP_S = 60.0
_SLOW_IN_A_ROW = 3
_AGAIN_AFTER_S = 10.0  # as for a backend that gave up
_POLL_S = 0.05
_ANSWER_S = 5.0
_HELP_S = 5.0
_STOP_S = 5.0
_CAUSE_LINES = 3
_UNSET = (
    *("LAYA_API_KEY", "LAYA_SERVE_API_KEY", "LLAMA_API_KEY"),
    *("LLAMA_ARG_HOST", "LLAMA_ARG_MODEL", "LLAMA_ARG_PORT"),
)
_KEY_BYTES = 24
_PROBE = "hello"
_SILENT = ("down", "slow")


class _Watched:
    """Asks a scorer, and leaves it alone while it is suspect."""

    def __init__(self) -> None:
        self._scorer: Scorer | None = None
        self._slow = 0
        self._suspect = trio.Event()
        self.settled = trio.Event()

    async def ask(self, text: str) -> Choice:
        """Return what the text is; raises as `Scorer`."""
        scorer = self._scorer
        if scorer is None:
            raise NoAnswerError("down", self._absence())
        if self._suspect.is_set():
            raise NoAnswerError("slow", f"{self._slow} questions in a row had no answer")
        try:
            choice = await scorer.ask(text)
        except NoAnswerError as error:
            if error.word in _SILENT:
                self.missed()
            raise
        self._slow = 0
        return choice

    def missed(self) -> None:
        """Learn that a question had no answer, now or at the asker's deadline."""
        self._slow += 1
        if self._slow >= _SLOW_IN_A_ROW:
            self._suspect.set()

    def _absence(self) -> str:
        return "it is not there"

    async def _watch(self, scorer: Scorer) -> None:
        """Return when it has not answered a question of ours for `HANG_S`."""
        while True:
            await self._suspect.wait()
            with trio.move_on_after(HANG_S) as scope:
                await _until_heard(scorer)
            if scope.cancelled_caught:
                return
            self._trust()

    def _trust(self) -> None:
        self._slow = 0
        self._suspect = trio.Event()


async def _until_heard(scorer: Scorer) -> None:
    """Ask until it answers; that it is busy, or an answer that means nothing, is one too."""
    while True:
        try:
            await scorer.ask(_PROBE)
        except NoAnswerError as error:
            if error.word not in _SILENT:
                return
        else:
            return
        await trio.sleep(1.0)


class AddressScorer(_Watched):
    """A scorer that runs already.

    Args:
        wish: What is known of it; `port` is set.
        log: Where to say what happened.
    """

    def __init__(self, wish: ScorerWish, log: Log) -> None:
        super().__init__()
        self._port = wish.port or 0
        self._log = log
        self._kind = wish.kind
        self._request = _requester(self._port, "")
        self._model = _model_id(wish)

    async def run(self) -> None:
        """Warm it as soon as it is there, then ask it again whenever it stops answering."""
        said = False
        while not await _answers(self._request):
            if not said:
                self._log.warning(f"nobody answers at Laya's address, port {self._port}, yet")
            said = True
            self.settled.set()
            await trio.sleep(1.0)
        scorer = HttpScorer(self._request, self._model)
        await _warm(scorer)
        self._scorer = scorer
        self.settled.set()
        while True:
            await self._watch(scorer)

    def pids(self) -> frozenset[int]:
        """Return the processes that are waited for here: none."""
        return frozenset()

    def view(self) -> dict[str, Any]:
        """Return what `/v1/status` shows."""
        state = "silent" if self._suspect.is_set() else "asked"
        return {"kind": self._kind, "port": self._port, "state": state}


class ChildScorer(_Watched):
    """A scorer that is ours: one child after the other.

    Args:
        wish: What to run.
        log: Where to say what happened.
    """

    def __init__(self, wish: ScorerWish, log: Log) -> None:
        super().__init__()
        self._wish = wish
        self._log = log
        self._policy = RestartPolicy(enabled=wish.restart)
        self._life = Life(since_s=time.monotonic())
        self._child: Child | None = None
        self._port: int | None = None
        self._asked = trio.Event()
        self._hung = ""
        self._load_ms: float | None = None
        self._warm_up_ms: float | None = None
        self.name = Path((wish.command or ("laya",))[0]).name

    def pids(self) -> frozenset[int]:
        """Return the processes that are waited for here."""
        return frozenset(self._child.pids if self._child else ())

    def view(self) -> dict[str, Any]:
        """Return what `/v1/status` shows."""
        now = self._life
        fields = {
            "kind": self._wish.kind,
            "program": self.name,
            "state": now.state.value,
            "since_s": round(time.monotonic() - now.since_s, 1),
            "restarts": now.restarts,
            "pid": self._child.pid if self._child else None,
            "port": self._port,
            "load_ms": self._load_ms,
            "warm_up_ms": self._warm_up_ms,
            "cause": now.cause,
            "degraded": now.degraded,
        }
        return {name: value for name, value in fields.items() if value not in (None, "")}

    def _absence(self) -> str:
        """Say why nobody can be asked, and have one that gave up tried again after a while."""
        now = self._life
        is_over = now.state is State.FAILED and time.monotonic() - now.since_s > _AGAIN_AFTER_S
        if is_over and self._wish.restart:
            self._asked.set()
        return f"it is {now.state.value}" + (f": {now.cause}" if now.cause else "")

    async def run(self) -> None:
        """Keep it running until cancelled; it is ended then."""
        self._step(life.Wanted())
        while True:
            cause = await self._one_child()
            self._scorer = None
            self._trust()
            self.settled.set()
            pause_s = self._step(life.Exited(cause))
            self._log.error(f"Laya {cause}")
            if self._life.state is State.BACKOFF:
                await trio.sleep(pause_s)
                self._step(life.PauseOver())
            else:
                self._asked = trio.Event()
                await self._asked.wait()
                self._step(life.Wanted())

    def _step(self, event: life.Event) -> float:
        """Move on; return the pause before the next start, where one is asked for."""
        self._life, effects = life.step(self._life, event, time.monotonic(), self._policy)
        return next((e.pause_s for e in effects if isinstance(e, life.Pause)), 0.0)

    async def _one_child(self) -> str:
        """Run one child to its end, and return how it ended, in words."""
        self._hung = ""
        try:
            port = self._port = free_port()
            plan = await self._plan(port)
            key = os.urandom(_KEY_BYTES).hex() if self._wish.kind == "llama-server" else ""
            child, began_s = self._spawn(plan, port, key), time.monotonic()
        except (OSError, ConfigError) as error:
            return f"could not be started: {error}"
        self._child = child
        line = LineScorer() if plan.transport == "lines" else None
        exits: list[str] = []
        try:
            async with trio.open_nursery() as nursery:

                async def see_out() -> None:
                    with trio.CancelScope(shield=True):
                        exits.append(str(await child.run(line.feed if line else None)))
                    nursery.cancel_scope.cancel()

                nursery.start_soon(see_out)
                nursery.start_soon(self._live, child, line, port, key, began_s)
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        await child.stop(_STOP_S)
        finally:
            self._child = None
            if line is not None:
                line.gone("it has ended")
        if self._hung:
            return f"is stopped: {self._hung}"
        lines = " | ".join(child.tail.last(_CAUSE_LINES)) or "(none)"
        state = self._life.state.value
        return f"exited ({exits[0]}) while {state}; its last lines: {lines}"

    async def _plan(self, port: int) -> ScorerPlan:
        wish = self._wish
        plan = scorer_plan(wish.kind, command=wish.command, model=wish.model)
        if wish.kind == "llama-server":
            return plan
        # A program that does not know --help may serve instead: then on loopback too, and shortly.
        variables = child_environment(_UNSET, {**wish.set_env, **plan.environment(port)})
        text = b""
        with trio.move_on_after(_HELP_S):
            done = await trio.run_process(
                [plan.arguments[0], "--help"],
                capture_stdout=True,
                stderr=subprocess.STDOUT,
                check=False,
                env=variables,
            )
            text = done.stdout or b""
        return scorer_plan(
            wish.kind,
            command=wish.command,
            model=wish.model,
            help_text=text.decode(errors="replace"),
        )

    def _spawn(self, plan: ScorerPlan, port: int, key: str) -> Child:
        more = {**self._wish.set_env, **plan.environment(port)}
        more |= {"LLAMA_API_KEY": key} if key else {}
        environment = child_environment(_UNSET, more)
        command = plan.command(port)
        self.name = Path(command[0]).name
        return Child(*launch(command, environment, pipes=plan.transport == "lines"))

    async def _live(
        self, child: Child, line: LineScorer | None, port: int, key: str, began_s: float
    ) -> None:
        """Wait until it is loaded, warm it, let it be asked, and stop it when it hangs."""
        async with trio.open_nursery() as nursery:
            request = _requester(port, key)
            scorer: Scorer = line or HttpScorer(request, _model_id(self._wish))
            if line is not None:
                nursery.start_soon(line.write, child.write)
            with trio.move_on_after(LOAD_S) as loading:
                if line is not None:
                    await line.ready.wait()
                else:
                    self._hung = await _until_up(request, child.pid, port)
            if loading.cancelled_caught:
                self._hung = f"not loaded after {LOAD_S:g} s"
            if not self._hung:
                self._load_ms = round((time.monotonic() - began_s) * 1000, 1)
                self._step(life.Healthy())
                degraded, self._warm_up_ms = await _warm(scorer)
                self._step(life.Warmed(degraded))
                self._scorer = scorer
                self.settled.set()
                if degraded:
                    self._log.warning(f"Laya ({self.name}) is not warm: {degraded}")
                else:
                    self._log.say(
                        f"Laya ({self.name}) is ready: loaded in {self._load_ms:.0f} ms, "
                        f"warmed in {self._warm_up_ms:.0f} ms"
                    )
                await self._watch(scorer)
                self._hung = f"no answer for {HANG_S:g} s"
            await child.stop(_STOP_S)
            nursery.cancel_scope.cancel()


async def _warm(scorer: Scorer) -> tuple[str, float]:
    """Ask once for each length; return why that failed, or nothing, and milliseconds."""
    began_s = time.monotonic()
    why = f"the warm-up took longer than {_WARM_UP_S:g} s"
    with trio.move_on_after(_WARM_UP_S):
        try:
            for text in laya.WARM_UP_TEXTS:
                await scorer.ask(text)
            why = ""
        except NoAnswerError as error:
            why = f"the warm-up failed: {error}"
    return why, round((time.monotonic() - began_s) * 1000, 1)


async def _until_up(request: Request, pid: int, port: int) -> str:
    """Wait until it is healthy on a port that is its own; return what keeps it from being used.

    What it is asked is what users write, so one that other machines can reach is not.
    """
    while True:
        beyond = probe.listens_beyond(pid)
        if beyond:
            return f"it listens on {beyond}, beyond this machine: add --host 127.0.0.1 to command"
        if await _answers(request) and probe.owns_port(pid, port):
            return ""
        await trio.sleep(_POLL_S)


async def _answers(request: Request) -> bool:
    with trio.move_on_after(_ANSWER_S):
        return await is_healthy(request)
    return False


def _requester(port: int, key: str) -> Request:
    async def request(method: str, path: str, body: bytes) -> Reply:
        return await exchange(port, method, path, body, key)

    return request


def _model_id(wish: ScorerWish) -> str:
    """Return the id to ask an HTTP scorer for; a file is no id."""
    return wish.model if wish.kind == "http" and wish.model else "laya"
