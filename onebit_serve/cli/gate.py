"""`1bit gate`: check a build on hardware before it is released."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

import click

from onebit_serve.core.errors import ConfigError, UsageError

__all__ = ["command"]

_DEFAULT_CONFIG = "configs/hw-gate.toml"


@click.command("gate")
@click.argument("level", type=click.Choice(["quick", "full"]), default="quick")
@click.option("--config", type=click.Path(), help=f"The gate's file [{_DEFAULT_CONFIG}].")
@click.option("--profile", default="release", show_default=True, help="Which models of it.")
@click.option("--model", "models", multiple=True, metavar="NAME", help="Only this model; repeat.")
@click.option("--check", "checks", multiple=True, metavar="NAME", help="Only this check; repeat.")
@click.option("--binary", metavar="PATH", help="The llama-server to check.")
@click.option("--record", is_flag=True, help="Write references instead of checking against them.")
@click.option("--report", metavar="DIR", help="Where reports and evidence go.")
def command(
    level: str,
    config: str | None,
    profile: str,
    models: tuple[str, ...],
    checks: tuple[str, ...],
    binary: str | None,
    record: bool,  # noqa: FBT001
    report: str | None,
) -> None:
    """Check a build on hardware: known answers, divergence, placement, needles, warmth.

    Exit 0: all that was asked for ran and passed. 1: something failed. 2: usage. 4: something
    did not run.
    """
    raise SystemExit(
        _run(
            level,
            config=config,
            profile=profile,
            models=models,
            checks=checks,
            binary=binary,
            report=report,
            record=record,
        )
    )


def _run(
    level: str,
    *,
    config: str | None,
    profile: str,
    models: tuple[str, ...],
    checks: tuple[str, ...],
    binary: str | None,
    report: str | None,
    record: bool,
) -> int:
    import trio

    from onebit_serve.core.gate.config import parse, select
    from onebit_serve.gate.evidence import Evidence, gate_folder
    from onebit_serve.gate.record import RECORDED
    from onebit_serve.gate.run import Order, run
    from onebit_serve.live import machine
    from onebit_serve.live.device_lock import device_lock, lock_name

    env = dict(os.environ)
    place = Path(config or _DEFAULT_CONFIG)
    gate = parse(_read(place), str(place), env)
    chosen = select(gate, "full" if record else level, profile, models, checks)
    if record and not checks:
        chosen = [(model, tuple(c for c in run if c in RECORDED)) for model, run in chosen]
    program = machine.find_llama_server(binary, None, env)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    folder = Path(report) if report else gate_folder(env) / "reports" / stamp
    order = Order(
        level,
        chosen,
        place.resolve().parent / gate.references,
        program,
        record,
        shlex.join(["1bit", *sys.argv[1:]]),
    )
    with ExitStack() as held:
        for name in sorted({lock_name(model.device) for model, _ in chosen}):
            held.enter_context(device_lock(name, f"1bit gate {level}"))
        evidence = Evidence(folder)  # not before: it may be the folder of the gate that runs
        return trio.run(
            lambda: run(
                order,
                evidence,
                env,
                tell=lambda line: print(line, flush=True),
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
        )


def _read(place: Path) -> str:
    try:
        return place.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"the gate's configuration {place} is missing",
            hint="run it in the repository, or name the file with --config",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place} cannot be read: {error}", hint="check the file") from None
