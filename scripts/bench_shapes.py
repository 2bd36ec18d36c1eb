#!/usr/bin/env python3
"""Measure what the plan of shapes buys a client, and what it may cost one.

    python scripts/bench_shapes.py --part built      # the fake: is any shape left, 15 minutes
    python scripts/bench_shapes.py --part ready      # the fake: the share that pays nothing, two
    python scripts/bench_shapes.py --part collide    # the fake: a client in mid-warm-up, five
    python scripts/bench_shapes.py --part file       # a padded model of 4 GiB and a cold disk, one
    python scripts/bench_shapes.py --part vulkan     # software Vulkan, 15 minutes for each load
    python scripts/bench_shapes.py --part discover   # software Vulkan, 8 minutes

Without --part all of them run. `built`, `ready` and `collide` ask the stand-in for llama-server
with the costs of AMD's HRX, which notes the shapes that every request used and which it met
unbuilt. `vulkan` and `discover` ask a real llama-server on Mesa's software Vulkan with a tiny model
and Mesa's cache of shaders off, unless said otherwise.

Exit code 1: something broke. With --check also: a claim failed or was not measured.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
import trio
from _bench import (
    Claim,
    about,
    alone,
    claim_table,
    environment,
    median_and_range,
    options,
    outcomes,
    program,
    record,
    say,
    tiny_model,
    write,
)

from onebit_serve.cli.ask import Door
from onebit_serve.core.choose import choose
from onebit_serve.core.errors import OnebitError
from onebit_serve.core.ladder import Costs, single, warms
from onebit_serve.core.report import Table
from onebit_serve.core.shapes import Demand, Shape, ShapeModel, Splitting, classes_for
from onebit_serve.fake_llama.costs import HRX_PREFILL_MS_PER_TOKEN
from onebit_serve.fake_llama.costs import Costs as FakeCosts
from onebit_serve.live.history import History, key_of, state_file
from onebit_serve.live.prefetch import fetch

__all__ = ["Part", "best_share", "needs", "share_of", "traffic"]

NAME = "shapes"
START_LIMIT_S, STOP_LIMIT_S, IDLE_LIMIT_S = 900.0, 60.0, 900.0
SCALE = 0.01
MIXES = ("flat", "agents", "chat")
STORED, FUTURE = 3000, 20_000
CLIENT_TOKENS = 64
LENGTHS = (*range(1, 9), 9, 16, 33, 64, 65, 100, 465, 600)
PREFIX_TOKENS, NEW_TOKENS = 600, (3, 7, 20, 30)
SHORT_TOKENS = 8  # up to here each is a class of its own
PADDED_BYTES = 4 << 30
OK = 200
WITHOUT_PREFETCH = """
import sys
from onebit_serve.live import prefetch
prefetch.WORTH_BYTES = 1 << 62
from onebit_serve.cli import main
sys.exit(main(sys.argv[1:]))
"""
FIRST_ONLY = {"ONEBIT_WARMUP_BUDGET_S": "0", "ONEBIT_WARMUP_IDLE": "0"}


class Part(msgspec.Struct):
    """What one part of the benchmark found.

    Args:
        tables: For people.
        claims: What was claimed.
        numbers: Behind them.
    """

    tables: list[Table] = []
    claims: list[Claim] = []
    numbers: dict[str, Any] = {}


class Served(msgspec.Struct, frozen=True):
    """A running `1bit serve`.

    Args:
        door: Its front door.
        log: Its log.
        ready_s: Seconds from its start to the ready line.
    """

    door: Door
    log: Path
    ready_s: float

    def backend(self) -> dict[str, Any]:
        """Return what status says of its one backend."""
        found: dict[str, Any] = self.door.get("/v1/status").data()["backends"][0]
        return found

    def complete(self, ids: Sequence[int], **more: Any) -> tuple[float, dict[str, Any]]:
        """Send a prompt; return the seconds it took and the backend's timings.

        Raises:
            OnebitError: It was not answered as it must be.
        """
        body = {"prompt": list(ids), "n_predict": 1, "temperature": 0, "cache_prompt": False}
        began_s = time.perf_counter()
        answer = self.door.post("/completion", {**body, "grammar": "root ::= [a-z]*", **more})
        took_s = time.perf_counter() - began_s
        if answer.status != OK:
            raise OnebitError(f"a prompt of {len(ids)} tokens: {answer.complaint()}")
        return took_s, answer.data()["timings"]

    def until_idle_is_over(self) -> float:
        """Wait until nothing more is warmed; return the seconds that took."""
        began_s = changed_s = time.monotonic()
        before: object = None
        while time.monotonic() < changed_s + 4:  # four idle pauses
            if time.monotonic() > began_s + IDLE_LIMIT_S:
                raise OnebitError("the idle warm-up did not end in time")
            seen = self.backend().get("shapes", {})
            now = (seen.get("warmed"), len(seen.get("requests", ())), seen.get("now"))
            if now != before or seen.get("now"):
                before, changed_s = now, time.monotonic()
            say(f"idle: {seen.get('warmed')} of {seen.get('planned')} shapes")
            time.sleep(0.25)
        return changed_s - began_s


@contextlib.contextmanager
def serving(
    place: Path, flags: Sequence[str], variables: Mapping[str, str], *start: str
) -> Iterator[Served]:
    """Start a server, give it once it is ready, and stop it.

    Raises:
        OnebitError: It was not ready in time.
    """
    log = place / "serve.log"
    command = [*(start or (program("1bit"),)), "serve", *flags, "-p", "0"]
    began_s = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(command, stderr=out, env=dict(variables), start_new_session=True)
    try:
        while not (found := re.search(r"ready on (\S+)\n", log.read_text(errors="replace"))):
            if child.poll() is not None or time.monotonic() > began_s + START_LIMIT_S:
                raise OnebitError(f"it was not ready: {log.read_text(errors='replace')[-500:]}")
            time.sleep(0.005)
        yield Served(Door(found[1]), log, time.monotonic() - began_s)
    finally:
        child.terminate()
        try:
            child.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


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


def forget(env: Mapping[str, str]) -> None:
    """Remove the history of an earlier run."""
    file = state_file(env)
    if file is not None:
        for suffix in ("", "-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)


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


# ------------------------------------------------------------------------------- software Vulkan


def vulkan(
    place: Path, loads: int, chosen: Sequence[str] = (), lengths: Sequence[int] = LENGTHS
) -> Part:
    """Time prompts of every class, and after a cached prefix, the first time and the second."""
    part = Part()
    new_tokens = [n for n in NEW_TOKENS if n > SHORT_TOKENS or n in lengths]
    arms: dict[str, dict[str, str]] = {
        "no plan": FIRST_ONLY,
        "at ready": {"ONEBIT_WARMUP_BUDGET_S": "3", "ONEBIT_WARMUP_IDLE": "0"},
        "after idle": {"ONEBIT_WARMUP_BUDGET_S": "3", "ONEBIT_WARMUP_IDLE": "1"},
        "after idle, shader cache kept": {
            "ONEBIT_WARMUP_BUDGET_S": "3",
            "ONEBIT_WARMUP_IDLE": "1",
            "MESA_SHADER_CACHE_DISABLE": "false",
        },
    }
    arms = {name: variables for name, variables in arms.items() if name in (chosen or arms)}
    flags = ("-m", str(tiny_model(place)), "--device", "vulkan", "-np", "1", "-c", "2048")
    ratios = dict[str, dict[int, list[tuple[float, float]]]]()
    prefixed = dict[str, dict[int, list[tuple[float, float]]]]()
    starts = dict[str, list[str]]()
    for load, (name, variables) in itertools.product(range(1, loads + 1), arms.items()):
        kept = "kept" in name
        # A home of its own for each load, so that nothing is known; the kept one is filled first.
        home = place / ("vulkan-kept" if kept else f"vulkan-{load}-{name.replace(' ', '-')}")
        off = {"GGML_VK_VISIBLE_DEVICES": "0", "MESA_SHADER_CACHE_DISABLE": "true"}
        env = environment(home, **{**off, **variables})
        forget(env)
        if kept:
            with serving(place, flags, env) as served:
                served.until_idle_is_over()
                vulkan_lengths(served, lengths)
        with serving(place, flags, env) as served:
            say(f"vulkan: load {load}, {name}")
            idle_s = served.until_idle_is_over() if "idle" in name else 0.0
            shapes = served.backend().get("shapes", {})
            warmed = f"{shapes['warmed']} of {shapes['planned']}" if shapes else "-"
            said = (
                f"{served.ready_s:.1f}",
                f"{shapes.get('spent_s', 0):.1f}",
                f"{idle_s:.0f}",
                warmed,
            )
            starts.setdefault(name, []).append("|".join(said))
            # In the arm without a plan the prefix comes first in its own load, below.
            if name != "no plan":
                merge(prefixed.setdefault(name, {}), vulkan_prefix(served, new_tokens))
            merge(ratios.setdefault(name, {}), vulkan_lengths(served, lengths))
        if name == "no plan":
            with serving(place, flags, env) as served:
                merge(prefixed.setdefault(name, {}), vulkan_prefix(served, new_tokens))
    names = tuple(arms)
    part.tables = [
        Table(
            "Software Vulkan, to ready and to idle",
            ("arm", "to ready, s", "synthetic requests, s", "idle, s", "shapes warm"),
            tuple((name, *one.split("|")) for name in names for one in starts[name]),
        ),
        first_second("Software Vulkan, first / second, ms, by prompt tokens", ratios, names),
        first_second(
            f"The same, new tokens after a cached prefix of {PREFIX_TOKENS}", prefixed, names
        ),
    ]
    idle = ratios.get("after idle", {})
    worst = [first / second for pairs in idle.values() for first, second in pairs]
    text = "after idle: worst first / second of any length"
    part.claims = [Claim(text, max(worst, default=None), 2)]
    part.numbers = {"lengths": ratios, "prefix": prefixed, "starts": starts}
    return part


def first_second(
    title: str,
    found: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]],
    names: Sequence[str],
) -> Table:
    """Return a table with the medians over the loads of first and second times."""

    def cell(pairs: Sequence[tuple[float, float]]) -> str:
        first, second = (median(times) * 1000 for times in zip(*pairs, strict=True))
        return f"{first:.0f} / {second:.0f}"

    rows = [(str(n), *(cell(found[name][n]) for name in names)) for n in found[names[0]]]
    return Table(title, ("tokens", *names), tuple(rows))


def merge(
    into: dict[int, list[tuple[float, float]]], found: Mapping[int, tuple[float, float]]
) -> None:
    """Add one load's pairs."""
    for tokens, pair in found.items():
        into.setdefault(tokens, []).append(pair)


def vulkan_lengths(served: Served, lengths: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return first and second seconds of every length."""
    found = {}
    for tokens in lengths:
        say(f"vulkan: {tokens} tokens")
        first_s, second_s = (
            served.complete([20 + (i * 7 + turn) % 200 for i in range(tokens)])[0]
            for turn in (0, 1)
        )
        found[tokens] = (first_s, second_s)
    print(f"bench-shapes: {served.log.parent.name}: {found}", file=sys.stderr, flush=True)
    return found


def vulkan_prefix(served: Served, new_tokens: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return first and second seconds of prompts whose beginning is cached, by new tokens."""
    prefix = [20 + i * 7 % 200 for i in range(PREFIX_TOKENS)]
    served.complete(prefix, cache_prompt=True)
    found = {}
    for tokens in new_tokens:
        pair = []
        for turn in (1, 2):
            new = [20 + (i * 11 + 50 * turn + tokens) % 200 for i in range(tokens)]
            took_s, timings = served.complete([*prefix, *new], cache_prompt=True)
            if timings["prompt_n"] != tokens:
                raise OnebitError(f"{timings['prompt_n']} tokens were prefilled, not {tokens}")
            pair.append(took_s)
        found[tokens] = (pair[0], pair[1])
    print(f"bench-shapes: after a prefix: {found}", file=sys.stderr, flush=True)
    return found


def discover(place: Path) -> Part:
    """Let `1bit warm --discover` find the classes of software Vulkan."""
    off = {"GGML_VK_VISIBLE_DEVICES": "0", "MESA_SHADER_CACHE_DISABLE": "true"}
    env = environment(place / "discover", **off)
    flags = ("-m", str(tiny_model(place)), "--device", "vulkan", "--no-warmup", "-np", "1")
    say("discover")
    with serving(place, flags, env) as served:
        began_s = time.monotonic()
        command = [program("1bit"), "warm", "--discover", "--url", served.door.url]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - began_s
    if done.returncode:
        raise OnebitError(f"1bit warm --discover: {done.stderr}")
    line = next(line for line in done.stdout.splitlines() if "classes" in line)
    found = {int(n) for n in re.findall(r"\d+", line.partition(", from")[2].partition("tokens")[0])}
    missing = {3, 4, 5, 6, 7, 8, 9, 33, 65} - found
    rows = ((", ".join(map(str, sorted(found))), f"{took_s:.0f}"),)
    return Part(
        [Table("Discovered on software Vulkan", ("classes begin at, tokens", "took, s"), rows)],
        [Claim("classes of 3 to 9, 33 and 65 tokens that were not found", len(missing), 0)],
        {"said": done.stdout},
    )


# ------------------------------------------------------------------------------------ a cold file


def drop(file: Path) -> None:
    """Take a file out of the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def padded(place: Path) -> Path:
    """Return a model whose file has 4 GiB behind its weights, made if need be."""
    model = place / "padded.gguf"
    if not model.exists() or model.stat().st_size < PADDED_BYTES:
        tiny = tiny_model(place).read_bytes()
        block = os.urandom(64 << 20)
        with model.open("wb") as file:
            file.write(tiny)
            for _ in range(PADDED_BYTES // len(block)):
                file.write(block)
    return model


def cold_file(place: Path, rounds: int) -> Part:
    """Time dd, the prefetch alone, and starts with a cold and a warm file, in turns."""
    say("file: making 4 GiB")
    model = padded(place)
    flags = ("-m", str(model), "--device", "cpu")
    env = environment(place / "file")
    times = dict[str, list[float]]()

    def note(name: str, took_s: float) -> None:
        times.setdefault(name, []).append(took_s)

    for turn in range(rounds):
        say(f"file: round {turn + 1} of {rounds}")
        drop(model)
        began_s = time.monotonic()
        dd = ["dd", f"if={model}", "of=/dev/null", "bs=8M", "status=none"]
        subprocess.run(dd, check=True)
        note("dd bs=8M", time.monotonic() - began_s)
        drop(model)
        note("prefetch alone", trio.run(fetch, [model]).took_s)
        with serving(place, flags, env) as served:
            note("to ready, warm file", served.ready_s)
        drop(model)
        with serving(place, flags, env) as served:
            note("to ready, cold file", served.ready_s)
        drop(model)
        without = (sys.executable, "-c", WITHOUT_PREFETCH)
        with serving(place, flags, env, *without) as served:
            note("to ready, cold file, no prefetch", served.ready_s)
    model.unlink()
    middle = {name: median(found) for name, found in times.items()}
    cost_s = middle["to ready, cold file"] - middle["to ready, warm file"]
    rows = tuple((name, median_and_range(found, 2)) for name, found in times.items())
    return Part(
        [
            Table(
                f"A model of {PADDED_BYTES / 2**30:.0f} GiB, padded, on the CPU",
                ("what", "s"),
                rows,
            )
        ],
        [
            Claim("prefetch / dd", middle["prefetch alone"] / middle["dd bs=8M"], 1.15),
            Claim("(cold to ready - warm to ready) / dd", cost_s / middle["dd bs=8M"], 1.15),
        ],
        {"times_s": times},
    )


def main() -> int:
    """Measure and report; return the exit code."""
    parser = options(__doc__)
    names = ("built", "ready", "collide", "file", "vulkan", "discover")
    parser.add_argument("--part", choices=names, action="append", help="one part, or several")
    parser.add_argument("--loads", type=int, default=3, help="fresh starts an arm on Vulkan (3)")
    parser.add_argument("--collisions", type=int, default=200, help="how many (200)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds with the cold file (3)")
    parser.add_argument("--arm", action="append", help="an arm on Vulkan, or several; else all")
    parser.add_argument("--lengths", help="prompt lengths on Vulkan, with commas; else all")
    asked = parser.parse_args()
    lengths = [int(n) for n in asked.lengths.split(",")] if asked.lengths else LENGTHS
    load_before = os.getloadavg()[0]
    parts, missing = dict[str, Part](), dict[str, str]()
    with alone(NAME) as place:
        work: dict[str, Callable[[], Part]] = {
            "built": lambda: built(place),
            "ready": lambda: ready(place),
            "collide": lambda: collide(place, asked.collisions),
            "file": lambda: cold_file(place, asked.rounds),
            "vulkan": lambda: vulkan(place, asked.loads, asked.arm or (), lengths),
            "discover": lambda: discover(place),
        }
        for name in asked.part or names:
            try:
                parts[name] = work[name]()
            except (OnebitError, OSError, subprocess.SubprocessError) as error:  # noqa: PERF203
                missing[name] = str(error)
    say("")
    claims = [claim for part in parts.values() for claim in part.claims]
    facts = [*about(load_before), *(f"{name} not measured: {why}" for name, why in missing.items())]
    tables = [table for part in parts.values() for table in part.tables]
    numbers = {name: part.numbers for name, part in parts.items()}
    result = {"about": facts, "missing": missing, "claims": outcomes(claims), "parts": numbers}
    write(NAME, [*tables, *([claim_table(claims)] if claims else [])], facts, result)
    missed = asked.check and any(claim.outcome != "pass" for claim in claims)
    return 1 if missing or missed else 0


if __name__ == "__main__":
    sys.exit(main())
