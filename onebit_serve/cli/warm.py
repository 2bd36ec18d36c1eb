"""`1bit warm`: one more warm-up of a running backend, or what its device builds once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec

from onebit_serve.cli import ask
from onebit_serve.core.climb import is_used
from onebit_serve.core.discover import Discovery, Found
from onebit_serve.core.errors import OnebitError, UsageError
from onebit_serve.core.shapes import Splitting
from onebit_serve.core.warmup import SEED_TEXT, checkpoints_shown, completion_request, prompt_ids
from onebit_serve.core.wire import EventReader
from onebit_serve.live.history import History, key_of, state_file

__all__ = ["command"]

_OK = 200
_AGAIN = 2
_CUT_FROM_TOKENS = 5  # from here on a prompt shows whether the server makes checkpoints
_FRESH_HINT = "start it anew with --no-warmup, and ask before anything else is sent to it"


@click.command("warm")
@click.argument("name", required=False)
@ask.server_options
@click.option(
    "--discover", is_flag=True, help="Find which prompt lengths share what is built once."
)
@click.option("--model", metavar="FILE", help="The model, where the server names another path.")
@click.option("--device", metavar="DEVICE", help="Its device, where --url is a llama-server.")
@click.option("--llama-server", metavar="PATH", help="Its program, where --url is a llama-server.")
@click.option(
    "--ubatch-size",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="The server's own -ub.",
)
@click.pass_context
def command(
    context: click.Context,
    name: str | None,
    url: str | None,
    config: str | None,
    api_key_file: str | None,
    discover: bool,  # noqa: FBT001
    model: str | None,
    device: str | None,
    llama_server: str | None,
    ubatch_size: int,
) -> None:
    """Send one more warm-up to the backend NAME of a running server; without NAME, to all.

    With --discover its prompt lengths are timed, the first use against the next ones, to find which
    of them share what the device builds once. What is found is kept for this program, model and
    device: later starts warm one length of each class. The backend must be fresh (started with
    --no-warmup, nothing sent yet) and the only one of its server, with the driver's caches off.
    --url may name a llama-server too.
    """
    door = ask.find(url, config, api_key_file, os.environ)
    if not discover:
        context.exit(_warm(door, name))
    target = _target(door, name, model, device, llama_server)
    found = _Probe(door, ubatch_size).run()
    _keep(found, *target)


# ------------------------------------------------------------------------------ one more warm-up


def _warm(door: ask.Door, name: str | None) -> int:
    """Warm one backend, or all; return the exit code."""
    failed = 0
    for one in [name] if name else [str(b["name"]) for b in door.status()["backends"]]:
        answer = door.post(f"/v1/backends/{quote(one, safe='')}/warm")
        if answer.status != _OK:
            raise OnebitError(answer.complaint(), hint="see `1bit status`")
        said = answer.data()
        if said.get("failure"):
            failed = 1
            print(f"{one}: the warm-up failed: {said['failure']}")
        else:
            tokens = f" of {said['prompt_tokens']} tokens" if said.get("prompt_tokens") else ""
            print(f"{one}: a warm-up{tokens} took {said['took_ms']:.0f} ms")
    return failed


def _backends(door: ask.Door) -> list[dict[str, Any]] | None:
    """Return the backends of a `1bit serve`; `None` where another server answers.

    Raises:
        UnreachableError: Nobody answers, or nobody that says JSON.
    """
    answer = door.get("/v1/status")
    said = answer.data() if answer.status == _OK else None
    return said["backends"] if isinstance(said, dict) and "backends" in said else None


# ------------------------------------------------------------------------------------- discovery


def _target(
    door: ask.Door, name: str | None, model: str | None, device: str | None, program: str | None
) -> tuple[str, str, str]:
    """Return model, device and program that the classes are kept for.

    Raises:
        OnebitError: It cannot be discovered there, or who it is cannot be told.
    """
    backends = _backends(door)
    if backends is not None:
        one = _only(backends, name)
        device, program = device or str(one.get("device")), program or str(one.get("binary"))
    elif not device or not program:
        raise UsageError(
            f"{door.url} is no 1bit serve, so it does not say what runs there",
            hint="add --device DEVICE and --llama-server PATH of the llama-server",
        )
    model = model or str(_json(door, "/props").get("model_path"))
    for what, path in (("the model", model), ("the program", program)):
        if not Path(path).is_file():
            raise UsageError(
                f"{what} of that server is not here: {path}",
                hint="run this in its folder, or name it with --model or --llama-server",
            )
    slots = _json(door, "/slots")
    if any(is_used(slot) for slot in slots):
        raise OnebitError(f"{door.url} has served prompts already", hint=_FRESH_HINT)
    return model, device, program


def _only(backends: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    named = ask.named(backends, name)
    if len(backends) > 1:
        raise UsageError(
            f"that server has {len(backends)} backends, which share a machine",
            hint="start a server with this backend alone, with --no-warmup",
        )
    if named[0].get("state") != "ready":
        raise OnebitError(f"{named[0].get('name')} is {named[0].get('state')}, not ready")
    if named[0].get("warm_up_ms") is not None:
        raise OnebitError(f"{named[0].get('name')} was warmed up already", hint=_FRESH_HINT)
    return named[0]


def _json(door: ask.Door, path: str) -> Any:
    answer = door.get(path)
    if answer.status != _OK:
        raise OnebitError(f"{path}: {answer.complaint()}")
    return answer.data()


class _Probe:
    """Times the lengths that a discovery asks for."""

    def __init__(self, door: ask.Door, ubatch_tokens: int) -> None:
        self._door = door
        self._splitting = Splitting(ubatch_tokens)
        self._knows_cuts = False
        text = {"content": SEED_TEXT, "add_special": False}
        answer = door.post("/tokenize", text)
        try:
            self._seed: list[int] = answer.data()["tokens"]
        except (KeyError, TypeError):
            raise OnebitError(f"/tokenize: {answer.complaint()}") from None

    def run(self) -> Found:
        """Time as many lengths as are needed, and return what they show."""
        discovery = Discovery(self._splitting.ubatch_tokens)
        while (tokens := discovery.next()) is not None:
            before = self._splitting
            first_s, *again_s = (self._time(tokens) for _ in range(1 + _AGAIN))
            if self._splitting != before:
                # What was sent since then came in pieces that are shorter: nothing new was used.
                seen = tuple(one for one in discovery.seen if one.tokens < _CUT_FROM_TOKENS)
                discovery = msgspec.structs.replace(discovery, seen=seen)
                continue
            discovery = discovery.observe(tokens, first_s, *again_s)
            print(f"{tokens:>5} tokens: {first_s:.3f} s, then {min(again_s):.3f} s", flush=True)
        return discovery.found()

    def _time(self, tokens: int) -> float:
        """Send a prompt with a micro-batch of so many tokens; return the seconds of its prefill."""
        length = self._splitting.prompt_for(tokens)
        body = completion_request(prompt_ids(self._seed, length), 1) | {"id_slot": 0}
        answer = self._door.post("/completion", body)
        if answer.status != _OK:
            raise OnebitError(f"a prompt of {length} tokens: {answer.complaint()}")
        events = [msgspec.json.decode(e) for e in EventReader().feed(answer.body) if e[:1] == b"{"]
        timings: dict[str, Any] = next((e["timings"] for e in events if "timings" in e), {})
        if timings.get("prompt_n") != length:
            raise OnebitError(f"a prompt of {length} tokens was not prefilled as such")
        shown = checkpoints_shown([e["prompt_progress"] for e in events if "prompt_progress" in e])
        if shown is not None and not self._knows_cuts:
            self._knows_cuts = True
            self._splitting = msgspec.structs.replace(self._splitting, checkpoints=shown)
        return float(timings["prompt_ms"]) / 1000


def _keep(found: Found, model: str, device: str, program: str) -> None:
    starts = found.classes.starts
    if not starts:
        print(
            "no length took longer the first time, and nothing is kept; a driver's cache would "
            "hide it (MESA_SHADER_CACHE_DISABLE=true, GGML_HRX_JIT_CACHE=off)"
        )
        return
    file = state_file(os.environ)
    if file is None:
        raise UsageError("there is no place to keep it", hint="set XDG_STATE_HOME or HOME")
    complaints: list[str] = []
    History(file, key_of(model, device, program), complaints.append).save_classes(found.classes)
    if complaints:
        raise OnebitError("; ".join(complaints), hint=f"check {file.parent}")
    if len(starts) == starts[-1]:
        said = f"each of 1 to {starts[-1]} tokens is a class of its own"
    else:
        said = f"{len(starts)} classes, from {', '.join(map(str, starts))} tokens on"
    print(f"{said} ({found.probes} lengths timed)")
    print(f"kept for {Path(model).name} on {device} ({Path(program).name}); later starts use it")
