"""Which shapes to warm, in what order and by which requests: before ready, and while idle.

Before ready the best set that fits a budget is sent (`choose`), as few requests as possible: one
prompt warms a full micro-batch and a rest, one burst every number of sequences up to its own. The
plan keeps to its seconds as far as the costs are known.

While idle the rest runs, short requests first, each so short that a client which comes in between
waits no longer than `idle_max_s` for what cannot be cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from onebit_serve.core.choose import choose
from onebit_serve.core.shapes import Demand, Shape, ShapeModel

__all__ = [
    "CHEAP_S",
    "Costs",
    "Ladder",
    "Request",
    "Warmed",
    "calibrate",
    "climb",
    "default_first_s",
    "learn",
    "single",
    "warms",
]

BURST_STEPS, BURST_S = 8, 0.15
"""The shortest sequence of a burst takes so many steps and so long: all others arrive before it
ends, on a fast backend and a busy machine too."""
STAGGER_STEPS, STAGGER_S = 2, 0.02
"""How much longer the next one takes, so that each number of sequences decodes together."""
MOST_STEPS = 400
CHEAP_S = 0.010
"""A first use that costs less than this beyond its warm time is not worth a request."""
FIRST_S = {"hrx": 0.165}
OTHER_FIRST_S = 0.5
"""First-use costs before any was measured: HRX 130-200 ms on a 27B model. Elsewhere half a second
is a start that the first request corrects (software Vulkan: 0.05-15 s a class)."""
ENOUGH_MEASURED = 3
LONG_TOKENS = 64
"""Prompts from here on tell the time of a token, shorter ones that of a request."""
LEARNING = 0.5


class Costs(msgspec.Struct, frozen=True):
    """What requests cost, measured where it was and predicted elsewhere.

    Args:
        request_s: Seconds of a request besides its tokens.
        token_s: Seconds a prefilled token takes when warm.
        step_s: Seconds a decode step takes when warm.
        first_s: Seconds a first use costs beyond its warm time, where it was not measured.
        measured: The same where it was measured.
    """

    request_s: float = 0.02
    token_s: float = 0.001
    step_s: float = 0.03
    first_s: float = 0.5
    measured: dict[Shape, float] = {}

    def first(self, shape: Shape) -> float:
        """Return the seconds that the first use of a shape costs beyond its warm time."""
        return max(0.0, self.measured.get(shape, self.first_s))

    def warm(self, request: Request) -> float:
        """Return the seconds a request takes when all it uses is warm."""
        return self.prefill(request) + (max(request.decode_tokens) - 1) * self.step_s

    def prefill(self, request: Request) -> float:
        """Return the warm seconds of the part that a server does not cancel: the prefill."""
        return self.request_s + request.prompt_tokens * request.sequences * self.token_s


class Request(msgspec.Struct, frozen=True):
    """One synthetic request, or several sent at once and pinned to slots of their own.

    Args:
        prompt_tokens: Tokens of every prompt (`cache_prompt` false, ids without meaning).
        decode_tokens: `n_predict` of each request; its length is how many are sent at once. The
            first token comes out of the prefill, so 1 means no decode step.
        shapes: What it warms.
    """

    prompt_tokens: int
    decode_tokens: tuple[int, ...] = (1,)
    shapes: frozenset[Shape] = frozenset()

    @property
    def sequences(self) -> int:
        """Return how many requests are sent at once."""
        return len(self.decode_tokens)

    def label(self) -> str:
        """Return the words that status and logs use."""
        return (
            f"{self.sequences} sequences" if self.sequences > 1 else f"{self.prompt_tokens} tokens"
        )


class Warmed(msgspec.Struct, frozen=True):
    """What one synthetic request showed.

    Args:
        request: What was sent.
        first_s: Seconds it took.
        again_s: Seconds the same took at once after it, where it was sent again.
    """

    request: Request
    first_s: float
    again_s: float | None = None


class Ladder(msgspec.Struct, frozen=True):
    """A plan.

    Args:
        before: What to send before ready, in this order.
        idle: What to send while idle, in this order.
        before_s: Predicted seconds of `before`.
        mass: Share of prefills and decode steps (each adds up to 1) that pay nothing afterwards.
        cheap: Shapes left out since their first use costs next to nothing.
        too_long: Shapes left out of `idle` since even their warm time passes the limit.
    """

    before: tuple[Request, ...] = ()
    idle: tuple[Request, ...] = ()
    before_s: float = 0.0
    mass: float = 0.0
    cheap: tuple[Shape, ...] = ()
    too_long: tuple[Shape, ...] = ()


def default_first_s(device: str, *, cache_found: bool = False) -> float:
    """Return what a first use is expected to cost on a device whose costs nobody measured.

    Args:
        device: The word of log lines, or a listed name.
        cache_found: Whether a driver or runtime cache of an earlier run lies there. With it the
            same first uses cost a tenth and less (software Vulkan: 71 s down to 0.6 s).
    """
    name = device.lower()
    known = [cost for prefix, cost in FIRST_S.items() if name.startswith(prefix)]
    cost = known[0] if known else OTHER_FIRST_S
    return cost / 10 if cache_found else cost


def warms(model: ShapeModel, prompt_tokens: int, decode_tokens: Sequence[int]) -> frozenset[Shape]:
    """Return the shapes that a completed request, or burst of requests, has warmed."""
    if len(decode_tokens) == 1:
        stepped = model.decode(1) if decode_tokens[0] > 1 else frozenset()
        return model.prefill(prompt_tokens) | stepped
    # Prompts of one token each are micro-batches of one token per sequence, like decode steps; as
    # the sequences end one after the other, every smaller number of them decodes together too.
    return model.decode(len(decode_tokens))


def single(model: ShapeModel, costs: Costs, shape: Shape) -> Request:
    """Return the cheapest request that warms one shape."""
    prompt, decode = 1, _staggered(costs, shape.sequences)
    if not shape.sequences:
        prompt, decode = model.splitting.prompt_for(shape.tokens), (1,)
    return Request(prompt, decode, warms(model, prompt, decode))


def _staggered(costs: Costs, sequences: int) -> tuple[int, ...]:
    step_s = max(costs.step_s, BURST_S / MOST_STEPS)
    shortest = max(BURST_STEPS, math.ceil(BURST_S / step_s))
    longer = max(STAGGER_STEPS, math.ceil(STAGGER_S / step_s))
    return tuple(shortest + longer * i for i in range(sequences))


def _cost(model: ShapeModel, costs: Costs, shape: Shape) -> float:
    """Return the seconds that one more shape adds to a plan."""
    warm = costs.warm(single(model, costs, shape))
    if shape.sequences > 1:
        # The burst that warms the smaller numbers only grows by one sequence.
        fewer = Shape(tokens=shape.sequences - 1, sequences=shape.sequences - 1)
        warm -= costs.warm(single(model, costs, fewer))
    return costs.first(shape) + warm


def climb(
    model: ShapeModel,
    wanted: Demand,
    costs: Costs,
    budget_s: float,
    *,
    done: Iterable[Shape] = (),
    idle_max_s: float = 1.0,
) -> Ladder:
    """Plan the warm-up of one backend.

    Args:
        model: The backend.
        wanted: How likely its shapes are.
        costs: What is known of their costs.
        budget_s: Seconds to spend before ready; 0 is none.
        done: Shapes that are warm already (the first warm-up request's, say).
        idle_max_s: Seconds of predicted warm time above which nothing is sent while idle; 0 is
            no limit.
    """
    warm = frozenset(done)
    left = [shape for shape in model.full_set() if shape not in warm and _fits(model, shape)]
    cheap = tuple(shape for shape in left if costs.measured.get(shape, CHEAP_S) < CHEAP_S)
    left = [shape for shape in left if shape not in cheap]
    have = warm | frozenset(cheap)
    price = {shape: _cost(model, costs, shape) for shape in left}
    chosen = choose(wanted, price, budget_s, have=have)
    before = _packed(model, costs, _by_worth(wanted, price, chosen, have))
    have |= chosen
    rest = [shape for shape in left if shape not in chosen]
    longest = idle_max_s or float("inf")
    singles = {shape: single(model, costs, shape) for shape in rest}
    too_long = tuple(shape for shape in rest if costs.prefill(singles[shape]) > longest)
    ordered = _by_worth(wanted, price, [shape for shape in rest if shape not in too_long], have)
    # Two bands: a client that comes meanwhile should meet a short one as often as possible.
    ordered.sort(key=lambda shape: costs.prefill(singles[shape]) > longest / 4)
    return Ladder(
        before=before,
        idle=tuple(singles[shape] for shape in ordered),
        before_s=_total_s(costs, before, warm),
        mass=wanted.mass(have),
        cheap=cheap,
        too_long=too_long,
    )


def _fits(model: ShapeModel, shape: Shape) -> bool:
    room = model.context_tokens
    return not room or model.splitting.prompt_for(shape.tokens) < room


def _total_s(costs: Costs, requests: Iterable[Request], warm: frozenset[Shape]) -> float:
    total_s = 0.0
    for request in requests:
        total_s += costs.warm(request) + sum(costs.first(new) for new in request.shapes - warm)
        warm |= request.shapes
    return total_s


def _packed(model: ShapeModel, costs: Costs, shapes: Sequence[Shape]) -> tuple[Request, ...]:
    """Return the requests that warm `shapes` in about this order, several by one where possible.

    A prompt of a full micro-batch and a rest warms both; one burst of the most sequences warms all
    smaller numbers on its way down.
    """
    requests: list[Request] = []
    done: set[Shape] = set()
    most = max((shape.sequences for shape in shapes), default=0)
    full = model.classes.representative(model.splitting.ubatch_tokens)
    for shape in shapes:
        if shape in done:
            continue
        if shape.sequences:
            request = single(model, costs, Shape(tokens=most, sequences=most))
        elif shape.tokens == full == model.splitting.ubatch_tokens:
            request = _with_a_rest(model, costs, shape, [s for s in shapes if s not in done])
        else:
            request = single(model, costs, shape)
        requests.append(request)
        done |= request.shapes
    return tuple(requests)


def _with_a_rest(model: ShapeModel, costs: Costs, full: Shape, shapes: Sequence[Shape]) -> Request:
    """Return a request for the full micro-batch that warms another wanted size on its way."""
    for rest in shapes:
        if not rest.sequences and rest != full:
            prompt = model.splitting.ubatch_tokens + model.splitting.prompt_for(rest.tokens)
            request = Request(prompt, (1,), warms(model, prompt, (1,)))
            room = model.context_tokens
            if {full, rest} <= request.shapes and (not room or prompt < room):
                return request
    return single(model, costs, full)


def _by_worth(
    wanted: Demand, price: Mapping[Shape, float], shapes: Iterable[Shape], have: frozenset[Shape]
) -> list[Shape]:
    """Order shapes by the mass they free per second, counting what was warmed before them."""
    left = set(shapes)
    gains: dict[frozenset[Shape], float] = {}
    for need, weight in wanted.rows:
        if (lacking := need - have) and lacking <= left:
            gains[lacking] = gains.get(lacking, 0.0) + weight
    worth = {need: gain / sum(price[s] for s in need) for need, gain in gains.items()}
    ordered: list[Shape] = []
    while worth:
        best = max(worth, key=worth.__getitem__)
        ordered += sorted(best, key=lambda shape: (price[shape], shape))
        left -= best
        for need in [need for need in gains if not need.isdisjoint(best)]:
            gain = gains.pop(need)
            del worth[need]
            if lacking := need - best:
                gains[lacking] = gains.get(lacking, 0.0) + gain
                worth[lacking] = gains[lacking] / sum(price[s] for s in lacking)
    return ordered + sorted(left, key=lambda shape: (price[shape], shape))


def learn(
    costs: Costs, warmed: Warmed, *, already: Iterable[Shape] = (), may_be_built: bool = False
) -> Costs:
    """Return the costs as one more synthetic request showed them.

    A request that was sent twice tells what the first use cost beyond its warm time. Sent once,
    its predicted warm time stands for the second. What several new shapes cost together is shared
    among them, and the median of what was measured predicts the rest.

    What is measured as cheap is never sent again, in later starts neither, so it must be sure: a
    prediction may have been too long, the share of several may hide one that is dear, and the shape
    may have been built before.

    Args:
        costs: What was known.
        warmed: The request and its times.
        already: Shapes that were warm before it.
        may_be_built: Whether something else may have built its shapes before it.
    """
    new = warmed.request.shapes - frozenset(already)
    if not new:
        return costs
    again_s = warmed.again_s if warmed.again_s is not None else costs.warm(warmed.request)
    extra_s = max(0.0, warmed.first_s - again_s)
    share = extra_s / len(new)
    if may_be_built and share < CHEAP_S:
        return costs
    if warmed.again_s is None or extra_s >= CHEAP_S:
        share = max(share, CHEAP_S)
    measured = {**costs.measured, **dict.fromkeys(new, share)}
    first_s = median(measured.values()) if len(measured) >= ENOUGH_MEASURED else costs.first_s
    return msgspec.structs.replace(costs, measured=measured, first_s=first_s)


def calibrate(costs: Costs, prompt_tokens: int, prompt_s: float, step_s: float = 0.0) -> Costs:
    """Return the costs as a reply whose shapes were all warm showed them.

    Args:
        costs: What was known.
        prompt_tokens: `timings.prompt_n`.
        prompt_s: `timings.prompt_ms` in seconds.
        step_s: Seconds per decode step, `timings.predicted_per_token_ms` in seconds; 0 is unknown.
    """
    if prompt_tokens <= 0:
        return costs
    token_s, request_s, known_step_s = costs.token_s, costs.request_s, costs.step_s
    if prompt_tokens >= LONG_TOKENS:
        token_s += LEARNING * (max(0.0, prompt_s - request_s) / prompt_tokens - token_s)
    else:
        request_s += LEARNING * (max(0.0, prompt_s - token_s * prompt_tokens) - request_s)
    if step_s > 0:
        known_step_s += LEARNING * (step_s - known_step_s)
    return msgspec.structs.replace(
        costs,
        token_s=min(token_s, prompt_s / prompt_tokens),
        request_s=request_s,
        step_s=known_step_s,
    )
