"""Say exactly what is tested: model, binary, device and driver."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from onebit_serve.core.errors import OnebitError
from onebit_serve.core.gate.config import Model
from onebit_serve.core.gate.reference import Origin
from onebit_serve.core.presets import preset
from onebit_serve.gate.evidence import Kept, sha256
from onebit_serve.live import machine

__all__ = ["MissingError", "identify", "model_path", "scheduler_device"]

_PART = re.compile(r"-00001-of-(\d{5})\.gguf$")


class MissingError(Exception):
    """What is to be tested is not there, or not what it should be.

    Args:
        reason: What and why, for a report.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def model_path(model: Model) -> str:
    """Return the file of a model.

    Raises:
        MissingError: It is not there.
    """
    if model.model == "embedded":
        try:
            return machine.embedded()[1]
        except OnebitError as error:
            raise MissingError(error.message) from None
    if "${" in model.model:
        raise MissingError(f"the model file {model.model} names a variable that is not set")
    path = str(Path(model.model).expanduser())
    if not Path(path).is_file():
        raise MissingError(f"the model file {path} is missing")
    return path


def scheduler_device(device: str) -> str:
    """Return what the scheduler calls a device word: `HRX0` for `hrx`, `CPU` for `cpu`."""
    return "CPU" if device == "cpu" else preset(device).listed or device


def _parts(path: str) -> list[Path]:
    """Return all files of a model, which may be split into parts."""
    match = _PART.search(path)
    if not match:
        return [Path(path)]
    count = int(match[1])
    stem = path[: match.start()]
    return [Path(f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]


def _program(binary: str) -> list[Path]:
    """Return a program and the libraries beside it, which hold most of a llama.cpp build."""
    folder = Path(binary).resolve().parent
    libraries = sorted(p for p in folder.glob("lib*.so*") if p.is_file() and not p.is_symlink())
    return [Path(binary), *libraries]


def _driver() -> str:
    said = [f"Linux {platform.release()}"] if os.name == "posix" else []
    version = Path("/sys/module/amdgpu/version")
    if version.is_file():
        said.append(f"amdgpu {version.read_text(encoding='ascii', errors='replace').strip()}")
    return ", ".join(said)


def _cpu_name() -> str:
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*: (.+)$", said, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def identify(model: Model, path: str, binary: str, env: Mapping[str, str], kept: Kept) -> Origin:
    """Return what a result of this model, binary and machine is a result of.

    Args:
        model: Its configuration.
        path: Its file.
        binary: The llama-server.
        env: The environment it runs in.
        kept: Remembers hashes.

    Raises:
        MissingError: Model or binary cannot be read, or the binary has no such device.
    """
    try:
        facts = machine.model_facts(path)
        program = machine.binary_facts(binary, {**env, **model.env})
        model_hash = sha256(_parts(path), kept)
        binary_hash = sha256(_program(binary), kept)
    except OnebitError as error:
        raise MissingError(error.message) from None
    except OSError as error:
        raise MissingError(f"{error.filename}: {error.strerror}") from None
    name = scheduler_device(model.device)
    listed = {device.name: device.description for device in program.devices}
    if model.device != "cpu" and program.devices and name not in listed:
        raise MissingError(
            f"the binary lists no device {name} (it lists {', '.join(listed) or 'none'})"
        )
    set_env = [f"{key}={value}" for key, value in sorted(model.env.items())]
    return Origin(
        model=model.name,
        model_file=Path(path).name,
        model_sha256=model_hash,
        model_bytes=facts.size_bytes,
        architecture=facts.architecture,
        file_type=facts.file_type,
        binary=Path(binary).name,
        binary_sha256=binary_hash,
        version=program.version,
        device=model.device,
        device_name=_cpu_name() if model.device == "cpu" else listed.get(name, ""),
        driver=_driver(),
        flags=("-c", str(model.ctx_size), *model.args, *set_env),
    )
