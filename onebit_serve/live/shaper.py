"""Warms one backend's shapes: what fits the budget before ready, the rest while nobody waits.

    warm      before ready, for every child anew: the first start, a restart, a lazy one, a reload
    note      what a client's request prefilled: it teaches what to warm first at the next start
    idle      nobody is waiting: go on; `busy` cancels that at once, since a client came
    hear      the child woke from its sleep: what it had built is gone
    keep      writes what was learnt to the history, from time to time and at the end

What to send, and in what order, is `core.climb`'s to say. A synthetic request is cancelled by
closing its connection; a llama-server looks for that between batches only, so what is in the works
is finished first. Idle requests are therefore short.

A slot counts as ours while it still shows what our last request left in it: such a one is used
again before an empty one, so that a backend without a host cache has its rest warmed too. A slot
that holds a client's prompt is left to the server's own choice, since it saves that prompt then.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from onebit_serve.core import options, warmup
from onebit_serve.core.plan import BackendPlan
from onebit_serve.core.warmup import WarmUpResult
from onebit_serve.live.child import EXIT_NOTICE_S
from onebit_serve.live.log import Log
from onebit_serve.live.prompts import WOKE, PromptKeeper
from onebit_serve.live.upstream import GoneError, exchange

if TYPE_CHECKING:  # imported when the child loads: nothing here may delay its start
    from onebit_serve.core.climb import Climb, ClimbView
    from onebit_serve.core.ladder import Request
    from onebit_serve.live.history import History

__all__ = ["Shaper"]

_OK = 200
_IDLE_S = 1.0  # an agent's next request is often there by then
_BUSY_POLL_S = 0.5
_DEATHS_AT_MOST = 2  # one may be chance; a third and a fourth would use up the restarts
# A first use may not be cut short: a backend that compiles hears of a client only afterwards. So it
# is begun when nobody came for this many times as long as it is expected to take, and a client that
# comes at random seldom meets it.
_QUIET_TIMES = 4
_TAIL_BYTES = 16384
_PROMPT_TOKENS = re.compile(rb'"prompt_n"\s*:\s*(\d+)')
_PROMPT_MS = re.compile(rb'"prompt_ms"\s*:\s*([\d.]+)')
_PREDICTED_TOKENS = re.compile(rb'"predicted_n"\s*:\s*(\d+)')
_PREDICTED_MS = re.compile(rb'"predicted_ms"\s*:\s*([\d.]+)')


class _RefusedError(Exception):
    """The backend answers, but not what a plan needs."""


class _Child(msgspec.Struct, frozen=True):
    """Whom to send to: its port and key, ids its tokenizer made, and how it shows that it works."""

    port: int
    key: str
    seed_ids: list[int]
    hear: Callable[[], None]


class Shaper:
    """The shapes of one backend, over all its children.

    Args:
        plan: The backend.
        log: Where to say what happened.
        prompts: Its warm prompts, which go before the idle warm-up.

    Attributes:
        wanted: Whether there is anything to do for this backend.
    """

    def __init__(self, plan: BackendPlan, log: Log, prompts: PromptKeeper) -> None:
        warm_up = plan.warm_up
        can = plan.kind == "llama-server" and plan.role == "chat" and plan.device != "cpu"
        self.wanted = can and not warm_up.skip and (warm_up.budget_s > 0 or warm_up.idle)
        self._plan = plan
        self._log = log
        self._prompts = prompts
        self._climb: Climb | None = None
        self._child: _Child | None = None
        self._history: History | None = None
        self._saved: Climb | None = None
        self._scope: trio.CancelScope | None = None
        self._ours: dict[int, object] = {}
        self._now = ""
        self._is_done = self._climbed = self._others_came = self._broke_off = False
        self._deaths = self._ended_requests = 0
        self._some_cache = self._cache_filled = False
        self._quiet_since_s = 0.0
        self._ended = trio.Event()

    def __repr__(self) -> str:
        return f"<Shaper {self._plan.name}: {self.view()}>"

    @property
    def active(self) -> bool:
        """Whether replies are worth a look at their counts."""
        return self._child is not None and self._climb is not None

    @property
    def work(self) -> tuple[int, ...]:
        """Show that a synthetic request runs, and move on with each that ends; else empty."""
        return (self._ended_requests,) if self._now else ()

    def view(self) -> ClimbView | None:
        """Return what status shows; `None` where nothing is planned. It takes milliseconds."""
        if self._climb is None or self._child is None:  # what was warm went with its child
            return None
        return msgspec.structs.replace(self._climb.view(), now=self._now)

    # -------------------------------------------------------------------------- before ready

    async def warm(
        self,
        port: int,
        key: str,
        hear: Callable[[], None],
        first: WarmUpResult,
        *,
        cache_found: bool = False,
    ) -> None:
        """Warm what fits the budget, of a child that is about to be ready.

        Args:
            port: Its port.
            key: Its API key, or empty.
            hear: Called whenever it shows that it works.
            first: What its first warm-up request came to.
            cache_found: Whether its driver's or runtime's cache held something at its start.
        """
        self._some_cache = cache_found
        self._climbed = self._others_came = False
        self._climb = self._child = None
        self._ours = {}
        self._is_done = False
        if not self.wanted or first.failure or self._deaths >= _DEATHS_AT_MOST:
            return
        began_s = trio.current_time()
        with trio.move_on_after(self._plan.warm_up.deadline_s):
            try:
                await self._meet(port, key, hear, first)
                await self._climb_before()
                self._ours = _by_id(await self._slots())  # nobody else was let in so far
                self._others_came = self._prompts.wanted  # they build shapes as clients do
            except GoneError as error:
                self._say(f"no further shapes are warmed: {error}")
                await trio.sleep(EXIT_NOTICE_S)
            except _RefusedError as error:
                self._say(f"no further shapes are warmed: {error}")
            finally:
                self._log.progress(self._plan.name)
        if self._climb is not None and self._climb.sent:
            sent, took_s = len(self._climb.sent), trio.current_time() - began_s
            seen = await trio.to_thread.run_sync(self._climb.view, abandon_on_cancel=True)
            self._say(
                f"{sent} further requests warmed {seen.warmed} of {seen.planned} shapes "
                f"in {took_s:.1f} s"
            )

    async def _meet(
        self, port: int, key: str, hear: Callable[[], None], first: WarmUpResult
    ) -> None:
        """Ask the child what it is, and the history what is known of its kind."""
        from onebit_serve.core.climb import begin
        from onebit_serve.core.shapes import ShapeModel, Splitting, classes_for

        plan = self._plan
        props = await _json(port, key, "GET", "/props")
        text = {"content": warmup.SEED_TEXT, "add_special": False}
        seed = await _json(port, key, "POST", "/tokenize", text)
        try:
            slots, context = props["total_slots"], props["default_generation_settings"]["n_ctx"]
            self._child = _Child(port, key, seed["tokens"], hear)
            warmup.prompt_ids(seed["tokens"], 1)
        except (KeyError, TypeError, ValueError) as error:
            raise _RefusedError(f"it did not say what a plan needs ({error!r})") from None
        history = self._kept()
        if not self._some_cache:  # what an earlier run filled is gone
            await trio.to_thread.run_sync(partial(history.save_filled, filled=False))
        load = partial(history.load, cache_found=self._some_cache)
        remembered = await trio.to_thread.run_sync(load)
        self._cache_filled = remembered.cache_filled
        ubatch = self._number(512, "LLAMA_ARG_UBATCH", "-ub", "--ubatch-size")
        batch = self._number(2048, "LLAMA_ARG_BATCH", "-b", "--batch-size")
        splitting = Splitting(min(ubatch, batch), batch, bool(first.checkpoints))
        model = ShapeModel(
            splitting,
            (remembered.classes or classes_for(plan.device, ubatch)).upto(ubatch),
            slots,
            context,
        )
        self._climb = await trio.to_thread.run_sync(
            partial(
                begin,
                model,
                plan.device,
                histogram=remembered.histogram,
                costs=remembered.costs,
                cache_found=self._cache_filled,
                first_prompt_tokens=first.prompt_tokens or 0,
                first_prompt_s=first.prompt_ms / 1000,
                first_decode_tokens=first.decode_tokens or 1,
                first_step_s=first.step_ms / 1000,
                idle_max_s=plan.warm_up.idle_max_s,
            ),
            abandon_on_cancel=True,
        )

    async def _climb_before(self) -> None:
        name, budget_s = self._plan.name, self._plan.warm_up.budget_s
        end_s = trio.current_time() + budget_s
        while (left_s := end_s - trio.current_time()) > 0 and self._climb is not None:
            after, request = await trio.to_thread.run_sync(
                self._climb.before, left_s, abandon_on_cancel=True
            )
            self._climb = after
            if request is None:
                return
            share = 1 - (end_s - trio.current_time()) / budget_s
            self._log.progress(name, f"{name}: warming {request.label()}", share)
            took_s, again_s = await self._send(request, range(request.sequences)), None
            doubtful = self._may_be_built()
            if not doubtful and after.seems_cheap(request, took_s):
                again_s = await self._send(request, range(request.sequences))
            self._climb = after.completed(request, took_s, again_s, may_be_built=doubtful)

    # ------------------------------------------------------------------------ client traffic

    def note(self, tail: bytes, in_flight: int) -> None:
        """Learn from the counts that a whole reply ends with.

        Args:
            tail: The end of the reply's body.
            in_flight: How many requests the backend had with it.
        """
        end = tail[-_TAIL_BYTES:]
        tokens, took_ms = _PROMPT_TOKENS.findall(end), _PROMPT_MS.findall(end)
        if not self.active or self._history is None or not tokens or not took_ms:
            return
        self._history.note_prefill(int(tokens[-1]))
        self._history.note_decode(in_flight)
        # Whether the others decoded at that time is not known: only its own steps count as warm.
        with contextlib.suppress(ValueError):
            alone = in_flight == 1
            prompt_s = float(took_ms[-1]) / 1000
            steps = _PREDICTED_TOKENS.findall(end) or [b"0"]
            steps_ms = _PREDICTED_MS.findall(end) or [b"0"]
            step_s = warmup.step_ms(int(steps[-1]), float(steps_ms[-1])) / 1000
            if alone and self._climb is not None:
                self._climb = self._climb.served(int(tokens[-1]), prompt_s, step_s=step_s)

    def busy(self) -> None:
        """Note that a client's request came: it goes first."""
        self._others_came = True
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None

    def idle(self, nursery: trio.Nursery) -> None:
        """Note that no client waits for the backend; go on with what is left."""
        wanted = self._plan.warm_up.idle and self._climb is not None and not self._is_done
        if wanted and self._scope is None:
            self._scope = trio.CancelScope()
            self._quiet_since_s = trio.current_time()
            nursery.start_soon(self._climb_idle, self._scope)

    def gone(self, *, died: bool = False) -> None:
        """Note that the child is gone, and what was warm with it.

        Args:
            died: Nobody had asked it to end. What ends it in a synthetic request is not sent to
                one child after the other until the restarts are used up.
        """
        if died and (self._now or self._broke_off):
            self._deaths += 1
            if self._deaths == _DEATHS_AT_MOST:
                self._say(f"no more shapes are warmed: it ended {self._deaths} times in one")
        self._broke_off = False
        self.busy()
        self._child = None
        self._is_done = True

    def hear(self, output: bytes) -> None:
        """Look at what the child prints, for its waking from a sleep, which unloads all."""
        if self._climb is not None and WOKE in output:
            self._climb = self._climb.forgotten()
            self._ours = {}
            self._is_done = False

    async def _climb_idle(self, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(_IDLE_S)
            try:
                while await self._idle_step():
                    pass
            except (GoneError, _RefusedError) as error:
                self._is_done = True
                self._say(f"no further shapes are warmed while idle: {error}")
        if self._scope is scope:
            self._scope = None

    async def _idle_step(self) -> bool:
        """Send the next request twice; return whether there may be more."""
        climb = self._climb
        if climb is None:
            return False
        if await self._sleeps():
            return False
        slots = await self._slots()
        if self._prompts.at_work or any(slot.get("is_processing") for slot in slots):
            # what a client left behind, or what we cancelled: it is not idle yet
            await trio.sleep(_BUSY_POLL_S)
            return True
        ours = {id_ for id_, slot in _by_id(slots).items() if self._ours.get(id_) == slot}
        host_cache = self._plan.prompts.host_bytes != 0
        planned = partial(climb.idle, slots, host_cache=host_cache, ours=ours)
        after, request, pinned = await trio.to_thread.run_sync(planned, abandon_on_cancel=True)
        self._climb = after
        if request is None:
            self._is_done = not after.ladder.idle
            if self._is_done:
                if self._history is not None:
                    filled = partial(self._history.save_filled, filled=True)
                    await trio.to_thread.run_sync(filled)
                seen = await trio.to_thread.run_sync(after.view, abandon_on_cancel=True)
                if self._climbed:
                    self._say(f"warmed {seen.warmed} of {seen.planned} shapes, the last while idle")
            return False
        quiet_s = trio.current_time() - self._quiet_since_s
        if (rest_s := _QUIET_TIMES * after.predicted_s(request) - quiet_s) > 0:
            await trio.sleep(rest_s)
            return True
        first_s = await self._send(request, pinned)
        again_s = await self._send(request, pinned)
        # `served` cannot have come between: a client's request would have cancelled this
        doubtful = self._may_be_built()
        self._climb = after.completed(request, first_s, again_s, may_be_built=doubtful)
        self._climbed = True
        before, left = _by_id(slots), _by_id(await self._slots())
        self._ours = {
            id_: slot for id_, slot in left.items() if id_ in ours or slot != before.get(id_)
        }
        return True

    def _may_be_built(self) -> bool:
        """Tell whether anything else may have built what is sent.

        What a client's request built is not always known: it may have ended early, or run beside
        another. A cache that this backend did not fill may be another model's, or hold a part.
        """
        return self._others_came or (self._some_cache and not self._cache_filled)

    async def _sleeps(self) -> bool:
        """Tell whether the child sleeps; this question, unlike `/slots`, does not wake it."""
        child = self._child
        props = await _json(child.port, child.key, "GET", "/props") if child else None
        return isinstance(props, dict) and props.get("is_sleeping") is True

    async def _slots(self) -> list[dict[str, Any]]:
        child = self._child
        if child is None:
            raise _RefusedError("the backend is gone")
        slots = await _json(child.port, child.key, "GET", "/slots")
        if not isinstance(slots, list) or not all(isinstance(slot, dict) for slot in slots):
            raise _RefusedError("/slots answered no list of slots")
        return slots

    # ----------------------------------------------------------------------------- the history

    async def keep(self) -> None:
        """Write what was learnt from time to time, and once more at the end."""
        from onebit_serve.live.history import FLUSH_S

        if not self.wanted:
            return
        try:
            while not self._ended.is_set():
                with trio.move_on_after(FLUSH_S):
                    await self._ended.wait()
                await trio.to_thread.run_sync(self._write)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._write)

    def end(self) -> None:
        """End `keep`, for a backend that is stopped for good."""
        self._ended.set()

    def _write(self) -> None:
        if self._history is not None:
            self._history.flush()
            climb = self._climb
            if climb is not None and climb.sent and climb is not self._saved:
                self._history.save_costs(climb.costs, cache_found=self._cache_filled)
                self._saved = climb

    def _kept(self) -> History:
        from onebit_serve.live.history import History, key_of, state_file

        if self._history is None:
            plan = self._plan
            key = key_of(plan.model, plan.device, plan.binary)
            self._history = History(state_file(os.environ), key, self._say)
        return self._history

    # ----------------------------------------------------------------------------------- small

    async def _send(self, request: Request, slots: Sequence[int]) -> float:
        """Send a synthetic request, a burst at once; return the seconds until the last ended."""
        child = self._child
        if child is None:
            raise _RefusedError("the backend is gone")
        failures: list[Exception] = []
        ids = warmup.prompt_ids(child.seed_ids, request.prompt_tokens)

        async def one(decode_tokens: int, slot: int) -> None:
            body = warmup.completion_request(ids, decode_tokens) | {"id_slot": slot}
            data = msgspec.json.encode(body)
            try:
                reply = await exchange(child.port, "POST", "/completion", data, child.key)
            except GoneError as error:
                self._broke_off = True
                failures.append(error)
                return
            failed = reply.status != _OK or b'\ndata: {"error"' in b"\n" + reply.body
            if failed and not warmup.is_refused_output(reply.body):
                failures.append(_RefusedError(f"HTTP {reply.status} from /completion"))

        child.hear()
        began_s = trio.current_time()
        self._now = request.label()
        try:
            async with trio.open_nursery() as nursery:
                for decode_tokens, slot in zip(request.decode_tokens, slots):  # noqa: B905 - 3.10
                    nursery.start_soon(one, decode_tokens, slot)
        finally:
            self._now = ""
            self._ended_requests += 1
        took_s = trio.current_time() - began_s
        child.hear()
        if failures:
            raise failures[0]
        return took_s

    def _number(self, otherwise: int, variable: str, *spellings: str) -> int:
        plan = self._plan
        users = "" if variable in plan.unset_env else os.environ.get(variable, "")
        said = options.value(plan.arguments, *spellings) or plan.set_env.get(variable, users)
        try:
            return max(1, int(said)) if said else otherwise
        except ValueError:  # llama-server refuses it
            return otherwise

    def _say(self, line: str) -> None:
        self._log.say(f"{self._plan.name}: {line}", backend=self._plan.name)


async def _json(
    port: int, key: str, method: str, path: str, body: dict[str, Any] | None = None
) -> Any:
    data = msgspec.json.encode(body) if body is not None else b""
    reply = await exchange(port, method, path, data, key)
    if reply.status != _OK:
        raise _RefusedError(f"HTTP {reply.status} from {path}")
    try:
        return msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        raise _RefusedError(f"{path} answered no JSON") from None


def _by_id(slots: list[dict[str, Any]]) -> dict[int, object]:
    return {slot["id"]: slot for slot in slots if "id" in slot}
