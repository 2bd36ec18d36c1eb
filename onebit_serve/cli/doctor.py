"""`1bit doctor`: what of this machine keeps a backend from running well, and the remedy."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import click
import msgspec

from onebit_serve.core.errors import OnebitError
from onebit_serve.core.folders import cache_folder, state_folder
from onebit_serve.live import leftovers, machine

__all__ = ["Finding", "command", "device_files", "folders", "program"]

Mark = Literal["ok", "note", "bad"]

_DEVICE_FILES = ("/dev/kfd", "/dev/dri/renderD*", "/dev/nvidia[0-9]*")
_FEW_FILES = 1024  # the usual soft limit; each client takes two
_LITTLE_DISK_BYTES = 1 << 30  # saved slots and logs may take 4 GiB
_BAD = 1


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Args:
        mark: `ok`; `note` for what works, but could work better; `bad` for what does not work.
        what: What was looked at.
        said: What was found.
        hint: What to do about it.
    """

    mark: Mark
    what: str
    said: str
    hint: str = ""


@click.command("doctor")
@click.option("--llama-server", metavar="PATH", help="The program to look at; else as in serve.")
@click.pass_context
def command(context: click.Context, llama_server: str | None) -> None:
    """Look at this machine: program, devices, folders, limits, leftovers. Starts no backend.

    Exits with 1 where something would keep a backend from running. To check a configuration, use
    `1bit check`.
    """
    worst = 0
    for finding in _all(os.environ, llama_server):
        click.echo(f"{finding.mark:<5} {finding.what:<13} {finding.said}")
        if finding.hint:
            click.echo(f"      {'':<13} hint: {finding.hint}")
        worst = max(worst, _BAD if finding.mark == "bad" else 0)
    context.exit(worst)


def _all(env: Mapping[str, str], named: str | None) -> Iterator[Finding]:
    yield from program(env, named)
    yield from device_files()
    yield from folders(env)
    yield _guard()
    yield _open_files()
    yield _memory()
    yield from _leftovers()


def program(env: Mapping[str, str], named: str | None) -> Iterator[Finding]:
    """Look at the llama-server that would be run, and ask it for its devices.

    Args:
        env: The environment.
        named: A program that the user names.
    """
    try:
        path = machine.find_llama_server(named, None, env)
        facts = machine.binary_facts(path, env, anew=True)
    except OnebitError as error:
        yield Finding("bad", "llama-server", error.message, error.hint)
        return
    yield Finding("ok", "llama-server", f"{path}, {facts.version or 'version unknown'}")
    for device in facts.devices:
        size = f", {device.total_mib} MiB" if device.total_mib is not None else ""
        yield Finding("ok", "device", f"{device.name}: {device.description}{size}")
    if not facts.devices:
        hint = "for a GPU, install its driver, and a llama-server that was built for it"
        yield Finding("note", "device", "none listed: --device auto takes the CPU", hint)


def device_files(patterns: tuple[str, ...] = _DEVICE_FILES) -> Iterator[Finding]:
    """Look whether this user may use the device files of GPUs.

    Args:
        patterns: Absolute patterns of them.
    """
    for pattern in patterns:
        for file in sorted(Path("/").glob(pattern.lstrip("/"))):
            if os.access(file, os.R_OK | os.W_OK):
                yield Finding("ok", "device file", str(file))
            else:
                hint = f"join its group: sudo usermod -aG {_group(file)} $USER, and log in again"
                yield Finding("bad", "device file", f"{file} may not be used by you", hint)


def _group(file: Path) -> str:
    try:
        return file.group()
    except (KeyError, OSError):
        return "render"


def folders(env: Mapping[str, str]) -> Iterator[Finding]:
    """Look whether the folders of ours can be written, and have room.

    Args:
        env: The environment.
    """
    for what, folder, variable, lost in (
        ("state", state_folder(env), "XDG_STATE_HOME", "past traffic and saved slots"),
        ("cache", cache_folder(env), "XDG_CACHE_HOME", "what drivers compiled"),
    ):
        if not folder:
            hint = f"set HOME or {variable}"
            yield Finding("note", what, f"no place for it: {lost} are kept by nobody", hint)
            continue
        there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
        free_bytes = shutil.disk_usage(there).free
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            hint = f"make it yours, or set {variable}"
            yield Finding("note", what, f"{there} cannot be written: {lost} are lost", hint)
        elif free_bytes < _LITTLE_DISK_BYTES:
            said = f"{folder}: {free_bytes >> 20} MiB are free on its disk"
            yield Finding("note", what, said, f"make room, or set {variable}")
        else:
            yield Finding("ok", what, f"{folder}, {free_bytes >> 30} GiB free")


def _guard() -> Finding:
    path = shutil.which("setpriv")
    if path:
        return Finding("ok", "setpriv", path)
    said = "not found: a backend outlives a 1bit serve that is killed with -9"
    return Finding("note", "setpriv", said, "install util-linux")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= _FEW_FILES < hard:
        hint = "ulimit -n 65536, or LimitNOFILE=65536 in the unit"
        said = f"{soft} at most, for about {soft // 2} clients at once"
        return Finding("note", "open files", said, hint)
    return Finding("ok", "open files", f"{soft} at most")


def _memory() -> Finding:
    from onebit_serve.live.free_memory import machine_memory

    total, free = machine_memory()
    return Finding("ok", "memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")


def _leftovers() -> Iterator[Finding]:
    for one in leftovers.find():
        text, _, hint = str(one).partition("; ")
        yield Finding("bad", "leftover", text, hint)
