"""A running `1bit serve`, and what one part of the benchmark found."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from _bench import Claim, program, say

from onebit_serve.cli.ask import Door
from onebit_serve.core.errors import OnebitError
from onebit_serve.core.report import Table
from onebit_serve.live.history import state_file

__all__ = ["FIRST_ONLY", "Part", "Served", "forget", "serving"]

START_LIMIT_S, STOP_LIMIT_S, IDLE_LIMIT_S = 900.0, 60.0, 900.0
OK = 200
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
    command = [*(start or (program("1bit"),)), "serve", "-p", "0", *flags]
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


def forget(env: Mapping[str, str]) -> None:
    """Remove the history of an earlier run."""
    file = state_file(env)
    if file is not None:
        for suffix in ("", "-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
