"""Against a real llama-server on software Vulkan: the first time against the second."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from _bench import Claim, environment, program, say, tiny_model
from running import FIRST_ONLY, Part, Served, forget, serving

from onebit_serve.core.errors import OnebitError
from onebit_serve.core.report import Table

__all__ = ["LENGTHS", "discover", "vulkan"]

LENGTHS = (*range(1, 9), 9, 16, 33, 64, 65, 100, 465, 600)
PREFIX_TOKENS, NEW_TOKENS = 600, (3, 7, 20, 30)
SHORT_TOKENS = 8  # up to here each is a class of its own


def vulkan(
    place: Path,
    loads: int,
    flash: str,
    chosen: Sequence[str] = (),
    lengths: Sequence[int] = LENGTHS,
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
    server = ("-np", "1", "-c", "2048", "--", "-fa", flash)
    flags = ("-m", str(tiny_model(place)), "--device", "vulkan", *server)
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


def discover(place: Path, flash: str) -> Part:
    """Let `1bit warm --discover` find the classes of software Vulkan."""
    off = {"GGML_VK_VISIBLE_DEVICES": "0", "MESA_SHADER_CACHE_DISABLE": "true"}
    env = environment(place / "discover", **off)
    flags = ("-m", str(tiny_model(place)), "--device", "vulkan", "--no-warmup", "-np", "1")
    flags = (*flags, "--", "-fa", flash)
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
