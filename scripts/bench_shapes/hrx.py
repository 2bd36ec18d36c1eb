"""Against the fake with the costs of AMD's HRX: what is left, what is paid, what a client waits."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from _bench import Claim, environment, median_and_range, program, record, say, tiny_model
from running import FIRST_ONLY, Part, forget, serving

from onebit_serve.core.choose import choose
from onebit_serve.core.ladder import Costs, single, warms
from onebit_serve.core.report import Table
from onebit_serve.core.shapes import Demand, Shape, ShapeModel, Splitting, classes_for
from onebit_serve.fake_llama.costs import HRX_PREFILL_MS_PER_TOKEN
from onebit_serve.fake_llama.costs import Costs as FakeCosts
from onebit_serve.live.history import History, key_of, state_file

__all__ = ["best_share", "built", "collide", "needs", "ready", "share_of", "traffic"]

SCALE = 0.01
MIXES = ("flat", "agents", "chat")
STORED, FUTURE = 3000, 20_000
CLIENT_TOKENS = 64


def fake_flags(place: Path) -> tuple[str, ...]:
    """Return the flags of a server over the fake, with a context for 8,192 tokens a slot."""
    model = str(tiny_model(place))
    fake = program("1bit-fake-llama")
    return ("-m", model, "--device", "hrx", "--llama-server", fake, "-np", "4", "-c", "40000")


def fake_knobs(place: Path, scale: float) -> dict[str, str]:
    """Return what the fake is told: HRX's costs, a record that is new."""
    notes = place / "record.jsonl"
    notes.unlink(missing_ok=True)
    return {"FAKE_LLAMA": f"model=hrx scale={scale} rec={shlex.quote(str(notes))}"}


# ------------------------------------------------------------------- is anything left unbuilt


def built(place: Path) -> Part:
    """See which of 200 prompts of random lengths meet a shape unbuilt after the idle time.

    At HRX's own time 200 prompts take 20 minutes: they are not sent there, but looked up in what
    the record says was built.
    """
    arms = {
        "the plan": (SCALE, {}),
        "no plan": (SCALE, FIRST_ONLY),
        "the plan, own time": (1.0, {}),
    }
    part, rows = Part(), []
    for name, (scale, variables) in arms.items():
        say(f"built: {name}")
        home = place / f"built-{name.replace(' ', '-')}"
        more = {"ONEBIT_WARMUP_BUDGET_S": str(3 * scale), "ONEBIT_WARMUP_IDLE": "1", **variables}
        env = environment(home, **fake_knobs(place, scale), **more)
        forget(env)
        random = Random(3)
        lengths = [random.randint(1, 8192) for _ in range(200)]
        walls: list[float] = []
        with serving(place, fake_flags(place), env) as served:
            idle_s = served.until_idle_is_over() if variables is not FIRST_ONLY else 0.0
            shapes = served.backend().get("shapes", {})
            before = replies(place)
            if scale < 1:
                walls = [served.complete(range(5, 5 + n))[0] * 1000 for n in lengths]
        have = frozenset(shape for reply in before for shape in reply["shapes"])
        met = sum(bool(reply["unbuilt"]) for reply in replies(place)[len(before) :])
        if not walls:
            met = sum(not needs(n) <= have for n in lengths)
        late = [
            wall - n * HRX_PREFILL_MS_PER_TOKEN * scale
            for wall, n in zip(walls, lengths, strict=False)
        ]
        warmed = f"{shapes['warmed']} of {shapes['planned']}" if shapes else "-"
        row = (name, f"{scale:g}", warmed, f"{idle_s:.0f}", str(met), median_and_range(late, 1))
        rows.append(row)
        part.numbers[name] = {"met": met, "wall_ms": walls, "lengths": lengths}
        if variables is not FIRST_ONLY:
            text = f"{name}: of 200 requests, those that met a shape unbuilt"
            part.claims.append(Claim(text, met, 0))
    columns = (
        *("arm", "of HRX's time", "shapes warm", "idle, s", "met unbuilt, of 200"),
        "wall beyond the prefill, ms",
    )
    part.tables.append(Table("Prompts of 1 to 8192 tokens, HRX's costs", columns, tuple(rows)))
    return part


def replies(place: Path) -> list[dict[str, Any]]:
    """Return the fake's record of answers to work."""
    return [e for e in record(place / "record.jsonl") if e["event"] == "reply" and e.get("work")]


# ------------------------------------------------------------------------------ the share at ready


def traffic(kind: str, count: int, random: Random) -> list[int]:
    """Draw the prefill sizes of one kind of traffic."""
    if kind == "flat":
        return [random.randint(1, 8192) for _ in range(count)]
    if kind == "agents":  # a shared prefix is cached; tools answer with a few fixed lengths
        return [
            random.choice([37, 61, 61, 118, 430])
            if random.random() < 0.7  # noqa: PLR2004
            else random.randint(20, 900)
            for _ in range(count)
        ]
    return [max(1, int(random.lognormvariate(3.7, 0.7))) for _ in range(count)]


def needs(tokens: int) -> frozenset[str]:
    """Return the fake's names of the shapes that a prompt of so many tokens uses."""
    return frozenset(batch.shape for batch in FakeCosts("hrx", 1.0, 0, 0).batches(tokens, 512))


def share_of(lengths: Sequence[int], have: frozenset[str]) -> float:
    """Return the share of prompts that find all they use built."""
    return sum(needs(tokens) <= have for tokens in lengths) / len(lengths)


def best_share(lengths: Sequence[int], budget_s: float) -> float:
    """Return the share that one who knows the traffic and every cost reaches within a budget."""
    model = ShapeModel(Splitting(), classes_for("hrx"), 4)
    costs = Costs(request_s=0.0, token_s=HRX_PREFILL_MS_PER_TOKEN / 1000)
    fake = FakeCosts("hrx", 1.0, 0, 0)
    price = {}
    for shape in model.full_set():
        if not shape.sequences:
            (batch,) = fake.batches(shape.tokens, shape.tokens)
            price[shape] = batch.build_ms / 1000 + costs.warm(single(model, costs, shape))
    total = len(lengths)
    rows = [(model.prefill(n), count / total) for n, count in sorted(Counter(lengths).items())]
    have = warms(model, 465, (8,)) | {Shape(1, 1)}
    wanted = Demand(tuple(rows))
    return wanted.mass(choose(wanted, price, budget_s, have=have) | have)


def ready(place: Path) -> Part:
    """Store traffic, start at HRX's real costs, and see what is built when it is ready."""
    part, rows = Part(), []
    flags = fake_flags(place)
    for kind in MIXES:
        say(f"ready: {kind}")
        random = Random(7)
        home = place / f"ready-{kind}"
        env = environment(home, **fake_knobs(place, 1.0), ONEBIT_WARMUP_BUDGET_S="3")
        forget(env)
        history = History(state_file(env), key_of(flags[1], "hrx", flags[5]), print)
        for tokens in traffic(kind, STORED, random):
            history.note_prefill(tokens)
            history.note_decode(1)
        history.flush()
        with serving(place, flags, env) as served:
            spent_s, ready_s = served.backend()["shapes"]["spent_s"], served.ready_s
        have = frozenset(shape for reply in replies(place) for shape in reply["shapes"])
        future = traffic(kind, FUTURE, random)
        share, best = share_of(future, have), best_share(future, 3.0)
        rows.append(
            (
                kind,
                f"{share:.1%}",
                f"{best:.1%}",
                str(len(have)),
                f"{spent_s:.2f}",
                f"{ready_s:.1f}",
            )
        )
        part.numbers[kind] = {"share": share, "best": best, "spent_s": spent_s}
        part.claims.append(Claim(f"{kind}: points below the best share", 100 * (best - share), 5))
    columns = ("traffic", "pays nothing", "best", "shapes built", "spent, s", "to ready, s")
    part.tables.append(Table("At ready, 3 s of budget, HRX's own time", columns, tuple(rows)))
    return part


# ------------------------------------------------------------------------------------- collisions


def collide(place: Path, count: int) -> Part:
    """Send a warm client request while a synthetic one runs, and without.

    There is one slot, so that every synthetic request is a prefill, which cannot be cut short; the
    pauses are long enough for the warm-up to get on between two collisions.
    """
    part, walls = Part(), dict[str, list[float]]()
    ids = range(5, 5 + CLIENT_TOKENS)
    random = Random(5)
    for name, idle in (("none", "0"), ("collision", "1")):
        env = environment(place / "collide", **fake_knobs(place, 1.0), ONEBIT_WARMUP_IDLE=idle)
        forget(env)
        with serving(place, (*fake_flags(place), "-np", "1", "-c", "10000"), env) as served:
            served.complete(ids)
            found = walls.setdefault(name, [])
            while len(found) < count:
                say(f"collide: {name}, {len(found)} of {count}")
                if idle == "1":
                    if not until(lambda: bool(served.backend()["shapes"].get("now"))):
                        break
                    time.sleep(random.uniform(0, 3))
                    if not served.backend()["shapes"].get("now"):
                        continue  # it ended just before
                found.append(served.complete(ids)[0] * 1000)
    added = [wall - median(walls["none"]) for wall in walls["collision"]]
    rows = [
        (name, str(len(found)), f"{median(found):.0f}", f"{max(found):.0f}")
        for name, found in walls.items()
    ]
    part.tables.append(
        Table(
            f"A client's warm prompt of {CLIENT_TOKENS} tokens, HRX's own time",
            ("synthetic request at that time", "requests", "median, ms", "worst, ms"),
            tuple(rows),
        )
    )
    part.claims = [
        Claim(
            "collision: worst added latency, ms (768 of prefill, 191 of a build, 50)",
            max(added),
            1009,
        )
    ]
    part.numbers = {"wall_ms": walls, "median_added_ms": median(added)}
    return part


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
    """Wait until something holds; return whether it came to that."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.002)
    return True
