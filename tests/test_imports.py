"""The layout holds: a module imports only from those above it, and a core knows no world.

`LAYOUT` is the order. A package of it (`core.gate`, `bench`) is one place: its modules may import
each other, without a circle, and all that stands above the package. A module that is listed and not
yet written is no fault; one that is written and not listed is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "onebit_serve"
ROOT = Path(__file__).parent.parent / PACKAGE
LAYOUT = re.findall(
    r"[\w.]+",
    """
    core.errors core.facts core.folders core.gguf core.binary core.caches core.http
    core.config core.presets core.options core.placement
    core.kv_cache core.slots core.warm_prompts core.prompt_plan
    core.policy core.laya core.scorers core.routing core.limits core.plan core.shapes core.warmup
    core.choose core.ladder core.climb core.discover
    core.pressure core.prompts
    core.life core.wire core.route core.view core.admit
    core.access core.request_id core.metrics core.memory core.news
    core.score core.results core.cells core.report core.gate
    live.files live.listener live.leftovers live.driver_caches live.saves live.spawn
    live.logfile live.log live.ring live.notify
    live.doorkeeper
    live.free_memory
    live.cache live.asking live.machine live.device_lock live.history live.prefetch
    live.child live.pump live.upstream live.scorer
    live.prompt_backend live.prefix live.prompts live.probe
    live.shaper
    live.pulse live.episode live.lease live.supervise live.idle live.room live.house
    live.scorer_child live.routing live.orders live.heartbeat live.relay
    live.hangup live.reaper live.connection live.desk live.door
    serve bench gate
    cli
""",
)
# Stands alone, so that it can be copied out and run anywhere.
ALONE = "fake_llama"
# A core takes values and returns values; what of the world it must not reach for.
WORLD = frozenset(
    re.findall(
        r"\w+",
        "asyncio fcntl http multiprocessing os pathlib psutil select selectors shutil signal "
        "socket ssl subprocess tempfile threading time trio urllib",
    )
)
# Third-party modules that have one home each.
HOMES = {"click": ("cli",), "rich": ("cli", "live.log"), "httpx": (), "requests": ()}


def source_files() -> dict[str, Path]:
    """Return every module by its name without the package's own: `core.errors`, `cli.flags`."""
    found: dict[str, Path] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


FILES = source_files()


def place(name: str) -> str:
    """Return the entry of the layout that a module belongs to, or the module itself."""
    for entry in (*LAYOUT, ALONE):
        if name == entry or name.startswith(f"{entry}."):
            return entry
    return name


def all_imports(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file imports anywhere in its text."""
    folders = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folders[: len(folders) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix(f"{PACKAGE}.")
                is_module = module.split(".")[0] == PACKAGE and inner in FILES
                yield f"{module}.{alias.name}" if is_module else module


def own_imports(name: str) -> set[str]:
    """Return the modules of ours that a module imports; the package's root is left out."""
    found = {
        full.removeprefix(PACKAGE).lstrip(".")
        for full in all_imports(FILES[name])
        if full.split(".")[0] == PACKAGE
    }
    return found - {""}


def arrow_fault(name: str, imported: str) -> str | None:
    """Return what is wrong with one module importing another, `None` where nothing is."""
    here, there = place(name), place(imported)
    if here == there:
        return None
    if ALONE in (here, there):
        return f"{name} imports {imported}, and {ALONE} stands alone"
    if here not in LAYOUT or there not in LAYOUT:
        return f"{name} imports {imported}, and one of them has no place in the layout"
    if LAYOUT.index(there) > LAYOUT.index(here):
        return f"{name} imports {imported}, which stands below it"
    return None


MODULES = [name for name in FILES if name and name not in ("core", "live")]


def test_every_module_has_a_place() -> None:
    lost = [name for name in MODULES if place(name) not in (*LAYOUT, ALONE)]
    assert not lost, f"give these a place in LAYOUT: {lost}"


def test_no_entry_of_the_layout_is_listed_twice() -> None:
    assert len(set(LAYOUT)) == len(LAYOUT)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_above_it(name: str) -> None:
    faults = [arrow_fault(name, imported) for imported in sorted(own_imports(name))]
    assert not [fault for fault in faults if fault]


def test_the_packages_that_only_hold_others_import_nothing_of_ours() -> None:
    for name in ("", "core", "live"):
        assert not own_imports(name), name


def test_no_circle_of_imports_inside_a_package() -> None:
    graph = {name: own_imports(name) - {name} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {error.args[1]}")


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("core.")])
def test_a_core_reaches_for_nothing_of_the_world(name: str) -> None:
    reached = {full.split(".")[0] for full in all_imports(FILES[name])} & WORLD
    assert not reached, f"{name} imports {sorted(reached)}: pass it the values instead"


@pytest.mark.parametrize("name", MODULES)
def test_a_third_party_module_is_imported_only_where_it_is_at_home(name: str) -> None:
    for full in all_imports(FILES[name]):
        homes = HOMES.get(full.split(".")[0])
        assert homes is None or place(name) in homes, f"{name} imports {full}"


@pytest.mark.parametrize(
    ("name", "imported", "complaint"),
    [
        ("core.plan", "core.config", None),
        ("core.config", "core.plan", "stands below it"),
        ("core.life", "live.child", "stands below it"),
        ("live.child", "core.life", None),
        ("serve", "cli", "stands below it"),
        ("cli.show", "serve", None),
        ("gate.programs", "gate.serving", None),
        ("gate.programs", "core.gate.ops", None),
        ("fake_llama.text", "core.errors", "stands alone"),
        ("bench.arms", "fake_llama", "stands alone"),
        ("core.stray", "core.errors", "no place"),
        ("serve", "stray", "no place"),
    ],
)
def test_an_arrow_is_judged_by_the_order(name: str, imported: str, complaint: str | None) -> None:
    fault = arrow_fault(name, imported)
    assert fault is None if complaint is None else complaint in (fault or "")
