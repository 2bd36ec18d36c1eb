"""Run a gate: all models one after another, every result on disk before the next check begins."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import trio

from onebit_serve.core.gate import ring, warm
from onebit_serve.core.gate.config import Model
from onebit_serve.core.gate.reference import Origin, Reference, decode, refusal
from onebit_serve.core.gate.report import Run, clock, time_left_s
from onebit_serve.core.gate.verdict import (
    Finding,
    Result,
    exit_code,
    failed,
    first_look,
    not_run,
    result_line,
)
from onebit_serve.gate import programs, requests
from onebit_serve.gate.evidence import Evidence, Kept, gate_folder
from onebit_serve.gate.identify import MissingError, identify, model_path
from onebit_serve.gate.record import RECORDED, record
from onebit_serve.gate.serving import Client, ServerError, Subject, serving

__all__ = ["Order", "run"]

_SERVED = ("kat", "kld", "needle", "reuse")
_KILLED = 130


class Order(msgspec.Struct, frozen=True):
    """What is to be done.

    Args:
        level: `quick` or `full`.
        chosen: Models with their checks, in order.
        references: Folder of the references.
        binary: The llama-server, absolute.
        record: Write references instead of checking against them.
        command: The command line, for the report.
    """

    level: str
    chosen: list[tuple[Model, tuple[str, ...]]]
    references: Path
    binary: str
    record: bool = False
    command: str = ""


async def run(
    order: Order,
    evidence: Evidence,
    env: dict[str, str],
    *,
    tell: Callable[[str], None],
    progress: Callable[[str], None],
) -> int:
    """Run it all and write the reports.

    Args:
        order: What is to be done.
        evidence: Where everything goes.
        env: The environment of the servers.
        tell: Takes each result line and the summary.
        progress: Takes a line about how far it is.

    Returns:
        The exit code. SIGINT and SIGTERM end the run early, with reports and without processes;
        a second one ends it at once.
    """
    gate = _Gate(order, evidence, env, tell, progress)
    async with trio.open_nursery() as nursery:
        work = trio.CancelScope()
        try:
            with work:
                nursery.start_soon(_on_signals, work)
                await gate.everything(nursery)
        finally:  # an error of ours must not cost what was found so far
            gate.finish(interrupted=work.cancel_called)
        nursery.cancel_scope.cancel()
    return exit_code(gate.results)


async def _on_signals(work: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if work.cancel_called:
                # The guards of all children see our end and kill their groups.
                os._exit(_KILLED)
            work.cancel()


class _Gate:
    def __init__(
        self,
        order: Order,
        evidence: Evidence,
        env: dict[str, str],
        tell: Callable[[str], None],
        progress: Callable[[str], None],
    ) -> None:
        self.results: list[Result] = []
        self._order = order
        self._evidence = evidence
        self._env = env
        self._tell = tell
        self._progress = progress
        self._todo = [(model.name, check) for model, checks in order.chosen for check in checks]
        self._all = len(self._todo)
        self._starts = 0
        self._origins: dict[str, Origin] = {}
        self._done_s: dict[str, float] = {}
        state = gate_folder(env)
        self._seconds = Kept(state / "seconds.json")
        self._hashes = Kept(state / "hashes.json")
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._start_s = trio.current_time()

    # ------------------------------------------------------------------ results

    def _add(self, model: str, check: str, finding: Finding, seconds: float = 0.0) -> None:
        if (model, check) in self._todo:
            self._todo.remove((model, check))
        result = Result(model, check, finding, seconds)
        self.results.append(result)
        self._evidence.add(result)
        self._tell(result_line(result))
        if finding.status != "NOT RUN":
            self._done_s[f"{model} {check}"] = seconds

    def _begin(self, model: str, check: str) -> None:
        gone_s = trio.current_time() - self._start_s
        known = {k: float(v) for k, v in self._seconds.table.items() if not isinstance(v, str)}
        left_s = time_left_s(self._todo, known, self._done_s)
        left = f", about {clock(left_s)} left" if left_s is not None else ""
        place = self._all - len(self._todo) + 1
        self._progress(
            f"gate: {model} {check} ({place} of {self._all}, {clock(gone_s)} gone{left})"
        )

    async def _check(
        self, model: str, check: str, work: Callable[[], Awaitable[Finding]]
    ) -> ServerError | None:
        """Do one check; a server that fails in it is its failure, and returned."""
        self._begin(model, check)
        start_s = trio.current_time()
        wrong: ServerError | None = None
        try:
            finding = await work()
        except ServerError as error:
            wrong = error
            finding = failed(error.reason)
        self._add(model, check, finding, trio.current_time() - start_s)
        return wrong

    def finish(self, *, interrupted: bool) -> None:
        """Account for what did not run, write the reports and tell the summary."""
        for model, check in list(self._todo):
            reason = "interrupted" if interrupted else "left out by an earlier problem"
            self._add(model, check, not_run(reason))
        if not interrupted and not self._order.record:
            self._seconds.table.update(self._done_s)
            self._seconds.save()
        self._hashes.save()
        whole = Run(
            self._order.level,
            self._started,
            self.results,
            self._origins,
            self._order.command,
            trio.current_time() - self._start_s,
            interrupted,
        )
        self._evidence.finish(whole)
        counts = [
            f"{sum(r.status == status for r in self.results)} {word}"
            for status, word in (("PASS", "passed"), ("FAIL", "failed"), ("NOT RUN", "not run"))
        ]
        self._tell(f"gate: {', '.join(counts)}; {first_look(self.results)}")
        self._tell(f"gate: report in {self._evidence.folder}")

    # ------------------------------------------------------------------ the work

    async def everything(self, nursery: trio.Nursery) -> None:
        """Do all models."""
        for model, checks in self._order.chosen:
            self._progress(f"gate: {model.name}: reading model and binary")
            try:
                path = model_path(model)
                origin = await trio.to_thread.run_sync(
                    identify,
                    model,
                    path,
                    self._order.binary,
                    self._env,
                    self._hashes,
                    abandon_on_cancel=True,
                )
            except MissingError as error:
                for check in checks:
                    self._add(model.name, check, not_run(error.reason))
                continue
            self._origins[model.name] = origin
            self._evidence.keep(model.name, "origin", origin)
            subject = Subject(model, path, self._order.binary, self._env)
            if self._order.record:
                await self._record(nursery, subject, checks, origin)
            else:
                await self._model(nursery, subject, checks, origin)

    async def _record(
        self, nursery: trio.Nursery, subject: Subject, checks: tuple[str, ...], origin: Origin
    ) -> None:
        name = subject.model.name
        self._begin(name, checks[0])
        origin = msgspec.structs.replace(origin, recorded=self._started)
        place = self._order.references / f"{name}.json"
        log = self._evidence.path(name, "record.log")
        findings = await record(nursery, subject, checks, origin, place=place, log=log)
        for check, finding in findings.items():
            self._add(name, check, finding)

    async def _model(
        self, nursery: trio.Nursery, subject: Subject, checks: tuple[str, ...], origin: Origin
    ) -> None:
        model, name = subject.model, subject.model.name
        before = programs.read_kernel_log(model) if "ring" in checks else None
        if "ops" in checks:
            log = self._evidence.path(name, "test-backend-ops.log")
            await self._check(name, "ops", lambda: programs.check_ops(nursery, subject, log))
        if "placement" in checks:
            logs = (
                self._evidence.path(name, "placement-serve.log"),
                self._evidence.path(name, "placement.log"),
            )
            await self._check(
                name, "placement", lambda: programs.check_placement(nursery, subject, *logs)
            )
        await self._served(nursery, subject, [c for c in _SERVED if c in checks], origin)
        if "warm" in checks:
            await self._check(name, "warm", lambda: self._warm(nursery, subject))
        if before is not None:
            finding = ring.judge(before, programs.read_kernel_log(model))
            self._add(name, "ring", finding)

    async def _served(
        self, nursery: trio.Nursery, subject: Subject, checks: list[str], origin: Origin
    ) -> None:
        """Do the checks that share a server; one in which it failed is followed by a new server."""
        name = subject.model.name
        reference, lack = self._reference(name, origin)
        left = []
        for check in checks:
            if check in RECORDED and reference is None:
                self._add(name, check, not_run(lack))
            else:
                left.append(check)
        log = self._evidence.path(name, "serve.log") if left else Path()
        while left:
            started = False
            try:
                async with serving(
                    nursery,
                    subject.command(extra=self._child_log(name)),
                    subject.environment(),
                    log,
                    subject.model.limits,
                ) as client:
                    started = True
                    broken = False
                    while left and not broken:
                        check = left.pop(0)
                        work = self._request(client, subject.model, check, reference)
                        broken = await self._check(name, check, work) is not None
            except ServerError as error:
                if started:
                    raise
                self._add(name, "load", failed(error.reason))
                for check in left:
                    self._add(name, check, not_run("the server did not start"))
                return

    def _request(
        self, client: Client, model: Model, check: str, reference: Reference | None
    ) -> Callable[[], Awaitable[Finding]]:
        async def work() -> Finding:
            if check == "needle":
                finding, evidence = await requests.check_needle(client, model)
            elif check == "reuse":
                finding, evidence = await requests.check_reuse(client, model)
            elif reference is None:
                return not_run("there is no reference")
            elif check == "kat":
                finding, evidence = await requests.check_kat(client, model, reference)
            else:
                finding, evidence = await requests.check_kld(client, model, reference)
            if evidence is not None:
                self._evidence.keep(model.name, check, evidence)
            return finding

        return work

    async def _warm(self, nursery: trio.Nursery, subject: Subject) -> Finding:
        model = subject.model
        log = self._evidence.path(model.name, "warm-serve.log")
        loads: list[warm.Load] = []

        async def some() -> None:
            for _ in range(model.warm.loads):
                async with serving(
                    nursery,
                    subject.command(extra=self._child_log(model.name)),
                    subject.environment(),
                    log,
                    model.limits,
                ) as client:
                    loads.append(await requests.timed_load(client, model))

        await some()
        if loads and warm.suspicious(loads, model.warm.limits):
            self._progress(f"gate: {model.name} warm is over its limit, measuring again")
            await some()
        return warm.judge(loads, model.warm.limits)

    def _child_log(self, name: str) -> tuple[str, str]:
        """Return the options that make a llama-server keep its own log as evidence."""
        self._starts += 1
        return "--log-file", str(self._evidence.path(name, f"llama-server-{self._starts}.log"))

    def _reference(self, name: str, origin: Origin) -> tuple[Reference | None, str]:
        place = self._order.references / f"{name}.json"
        try:
            stored = decode(place.read_bytes())
        except FileNotFoundError:
            return None, f"there is no reference {place}; record one with --record"
        except OSError as error:
            return None, f"the reference {place} cannot be read: {error.strerror}"
        if isinstance(stored, str):
            return None, stored
        reason = refusal(stored.origin, origin)
        return (None, reason) if reason else (stored, "")
