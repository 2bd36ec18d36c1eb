"""One backend's way up its ladder: what to send next, what is warm, what it cost and gained.

A `Climb` is a value. `before` and `idle` say what to send next; `completed` and `served` return
the climb after it. Real requests warm shapes too, and teach what a warm request costs, so nothing
is sent for what traffic has built already.

A plan takes up to half a second of CPU on a device with a class for every length: call what plans
(`begin`, `before`, `idle`) in a worker thread.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from onebit_serve.core.ladder import (
    CHEAP_S,
    Costs,
    Ladder,
    Request,
    Warmed,
    calibrate,
    climb,
    default_first_s,
    learn,
    single,
    warms,
)
from onebit_serve.core.shapes import Demand, Histogram, Shape, ShapeModel, demand

__all__ = ["UNPINNED", "Climb", "ClimbView", "begin", "free_slots", "is_used"]

UNPINNED = -1
"""The `id_slot` that leaves the choice of a slot to the server."""

SURPRISE = 2.0
"""A plan is made anew when first uses cost this many times more, or less, than it assumed."""


class ClimbView(msgspec.Struct, frozen=True):
    """What status shows.

    Args:
        planned: Shapes of the backend in all.
        warmed: Shapes that are warm, by synthetic or real requests.
        cheap: Shapes left out since their first use costs next to nothing.
        share: Share of prefills that would pay nothing now, as far as traffic is known.
        spent_s: Seconds of synthetic requests, first and second ones.
        gained_s: Seconds that first uses cost here and will not cost a client.
        requests: Every synthetic request: what it warmed, its first and second seconds.
        now: The synthetic request that runs at this moment, or empty.
    """

    planned: int
    warmed: int
    cheap: int
    share: float
    spent_s: float
    gained_s: float
    requests: tuple[tuple[str, float, float | None], ...]
    now: str = ""


class Climb(msgspec.Struct, frozen=True):
    """Where one backend is on its ladder.

    Args:
        model: The backend's shapes.
        wanted: How likely they are.
        costs: What is known of their costs; keep it with `History.save_costs`.
        done: What is warm.
        sent: What was sent and completed.
        ladder: The plan in use.
        is_planned: Whether `ladder` was planned at all.
        assumed_first_s: What the plan took a first use to cost.
        idle_max_s: Limit of a prefill's predicted warm time while idle, in seconds; 0 is none.
    """

    model: ShapeModel
    wanted: Demand
    costs: Costs
    done: frozenset[Shape] = frozenset()
    sent: tuple[Warmed, ...] = ()
    ladder: Ladder = Ladder()
    is_planned: bool = False
    assumed_first_s: float = 0.0
    idle_max_s: float = 1.0

    def before(self, budget_left_s: float) -> tuple[Climb, Request | None]:
        """Return what to send next before ready, `None` when nothing more fits the budget.

        Args:
            budget_left_s: What is left of `budget_s`, by the clock.
        """
        after = self._without_done()
        if after.ladder.before and not self._is_surprised():
            request = after.ladder.before[0]
            if self.predicted_s(request) <= budget_left_s:
                return after, request
        after = self._planned(budget_left_s)
        return after, after.ladder.before[0] if after.ladder.before else None

    def idle(
        self,
        slots: Sequence[Mapping[str, Any]],
        *,
        host_cache: bool,
        ours: Container[int] = (),
    ) -> tuple[Climb, Request | None, tuple[int, ...]]:
        """Return what to send next while idle, and the `id_slot` of each of its requests.

        Args:
            slots: The answer of `GET /slots`.
            host_cache: Whether the server keeps what a slot loses (`--cache-ram` not 0).
            ours: Ids of slots that hold nothing but a synthetic prompt.
        """
        after = self._without_done()
        if not self.is_planned or self._is_surprised() or self._has_changed():
            after = self._planned(0.0)
        for request in after.ladder.idle:
            # What is known of the time of a token may have changed since the plan.
            pins = free_slots(slots, request.sequences, host_cache=host_cache, ours=ours)
            if pins and self._is_short(request):
                return after, request, pins
        return after, None, ()

    def completed(
        self,
        request: Request,
        first_s: float,
        again_s: float | None = None,
        *,
        may_be_built: bool = False,
    ) -> Climb:
        """Return the climb after a synthetic request that ran to its end.

        Args:
            request: What was sent.
            first_s: Seconds it took; of a burst, until the last one ended.
            again_s: Seconds of the same sent once more right after it.
            may_be_built: Whether something else may have built its shapes before it: a client's
                request that ended early or ran beside another, or a run that filled a cache.
        """
        warmed = Warmed(request, first_s, again_s)
        costs = learn(self.costs, warmed, already=self.done, may_be_built=may_be_built)
        if again_s is not None and max(request.decode_tokens) == 1:
            costs = calibrate(costs, request.prompt_tokens, again_s)
        return msgspec.structs.replace(
            self,
            costs=costs,
            done=self.done | request.shapes,
            sent=(*self.sent, warmed),
        )

    def seems_cheap(self, request: Request, first_s: float) -> bool:
        """Tell whether a request was so fast that only the same once more tells what it cost."""
        return bool(request.shapes - self.done) and first_s - self.costs.warm(request) < CHEAP_S

    def served(
        self, prompt_tokens: int, prompt_s: float, *, sequences: int = 1, step_s: float = 0.0
    ) -> Climb:
        """Return the climb after a client's request that ran to its end.

        Args:
            prompt_tokens: `timings.prompt_n`.
            prompt_s: `timings.prompt_ms` in seconds.
            sequences: The most that decoded together with it.
            step_s: Seconds per decode step; 0 where it made none or they were not alone.
        """
        used = self.model.prefill(prompt_tokens) | self.model.decode(sequences)
        costs = self.costs
        if used <= self.done and sequences == 1:
            costs = calibrate(costs, prompt_tokens, prompt_s, step_s)
        return msgspec.structs.replace(self, costs=costs, done=self.done | used)

    def forgotten(self) -> Climb:
        """Return the climb of a child that lost all it had built."""
        return msgspec.structs.replace(self, done=frozenset(), ladder=Ladder(), is_planned=False)

    def view(self) -> ClimbView:
        """Return what status shows."""
        full = frozenset(self.model.full_set())
        gained_s = sum(
            max(0.0, one.first_s - one.again_s) for one in self.sent if one.again_s is not None
        )
        prefills = [row for row in self.wanted.rows if not any(s.sequences for s in row[0])]
        return ClimbView(
            planned=len(full),
            warmed=len(full & self.done),
            cheap=len(self.ladder.cheap),
            share=Demand(tuple(prefills)).mass(self.done | set(self.ladder.cheap)),
            spent_s=sum(one.first_s + (one.again_s or 0.0) for one in self.sent),
            gained_s=gained_s,
            requests=tuple((one.request.label(), one.first_s, one.again_s) for one in self.sent),
        )

    def _without_done(self) -> Climb:
        def left(requests: Iterable[Request]) -> tuple[Request, ...]:
            return tuple(request for request in requests if not request.shapes <= self.done)

        ladder = msgspec.structs.replace(
            self.ladder, before=left(self.ladder.before), idle=left(self.ladder.idle)
        )
        return msgspec.structs.replace(self, ladder=ladder)

    def _is_short(self, request: Request) -> bool:
        return not self.idle_max_s or self.costs.prefill(request) <= self.idle_max_s

    def _has_changed(self) -> bool:
        """Tell whether more could be sent while idle than was planned."""
        waiting = any(not request.shapes <= self.done for request in self.ladder.before)
        shapes = [shape for shape in self.ladder.too_long if shape not in self.done]
        return waiting or any(
            self._is_short(single(self.model, self.costs, shape)) for shape in shapes
        )

    def _is_surprised(self) -> bool:
        low, high = sorted(
            max(CHEAP_S, cost) for cost in (self.assumed_first_s, self.costs.first_s)
        )
        return high > SURPRISE * low

    def predicted_s(self, request: Request) -> float:
        """Return the seconds that a request is expected to take, first uses included."""
        new = request.shapes - self.done
        return self.costs.warm(request) + sum(self.costs.first(shape) for shape in new)

    def _planned(self, budget_s: float) -> Climb:
        ladder = climb(
            self.model,
            self.wanted,
            self.costs,
            budget_s,
            done=self.done,
            idle_max_s=self.idle_max_s,
        )
        return msgspec.structs.replace(
            self, ladder=ladder, is_planned=True, assumed_first_s=self.costs.first_s
        )


def begin(
    model: ShapeModel,
    device: str,
    *,
    histogram: Histogram | None = None,
    costs: Costs | None = None,
    cache_found: bool = False,
    first_prompt_tokens: int = 0,
    first_prompt_s: float = 0.0,
    first_decode_tokens: int = 1,
    first_step_s: float = 0.0,
    idle_max_s: float = 1.0,
) -> Climb:
    """Return a climb that has not planned yet.

    Args:
        model: The backend; its classes are the discovered ones, else `classes_for`.
        device: The device, for what a first use is expected to cost.
        histogram: What `History.load` gave.
        costs: What `History.load` gave; `None` where nothing was measured.
        cache_found: Whether a driver or runtime cache was found.
        first_prompt_tokens: Prompt of the warm-up request that ran already; 0 if none did.
        first_prompt_s: Seconds of its prefill, first uses included; 0 is unknown.
        first_decode_tokens: Tokens it generated.
        first_step_s: Seconds of one of them, first uses included; 0 is unknown.
        idle_max_s: `[warmup] idle_max_ms` in seconds.
    """
    done = frozenset[Shape]()
    if first_prompt_tokens:
        done = warms(model, first_prompt_tokens, (first_decode_tokens,))
    if costs is None:
        costs = Costs(first_s=default_first_s(device, cache_found=cache_found))
        if first_step_s > 0:
            costs = msgspec.structs.replace(costs, step_s=first_step_s)
    # What the first request took, cold, is a limit to what the next ones take.
    token_s, step_s = costs.token_s, costs.step_s
    if first_prompt_tokens and first_prompt_s > 0:
        token_s = min(token_s, first_prompt_s / first_prompt_tokens)
    if first_step_s > 0:
        step_s = min(step_s, first_step_s)
    costs = msgspec.structs.replace(costs, token_s=token_s, step_s=step_s)
    return Climb(
        model,
        demand(model, histogram),
        costs,
        done,
        assumed_first_s=costs.first_s,
        idle_max_s=idle_max_s,
    )


def free_slots(
    slots: Sequence[Mapping[str, Any]],
    count: int,
    *,
    host_cache: bool,
    ours: Container[int] = (),
) -> tuple[int, ...]:
    """Return what so many synthetic requests at once are pinned to; nothing where they must wait.

    They go to slots of ours, then to empty ones. A slot that holds a prefix is never pinned:
    builds differ in whether that saves what it displaces. What is `UNPINNED` goes where the server
    likes, and it saves to its host cache what it displaces; with `--cache-ram 0` all of a prefix
    was lost (llama-server b10068, measured on dense and hybrid models).

    Args:
        slots: The answer of `GET /slots`.
        count: How many are sent at once.
        host_cache: Whether the server has a host cache.
        ours: Ids of slots that hold nothing but a synthetic prompt.
    """
    idle = [slot for slot in slots if not slot.get("is_processing")]
    own = [slot["id"] for slot in idle if slot["id"] in ours]
    empty = [slot["id"] for slot in idle if slot["id"] not in ours and not is_used(slot)]
    if count <= len(own) + len(empty):
        return tuple([*own, *empty][:count])
    return (UNPINNED,) * count if host_cache and count <= len(idle) else ()


def is_used(slot: Mapping[str, Any]) -> bool:
    """Tell whether a slot of `GET /slots` may hold a prompt.

    Builds that do not say how long it is still name the last task, from the first one on.
    """
    if "n_prompt_tokens" in slot:
        return bool(slot["n_prompt_tokens"])
    task = slot.get("id_task", -1)
    return isinstance(task, int) and task >= 0
