"""What is measured, and how each of it is started, pinned, watched and stopped."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
from figures import Memory, memory_kib, schedstat_ns

__all__ = [
    "BUILD",
    "TARGETS",
    "NotMeasuredError",
    "Settings",
    "Target",
    "build",
    "cpu_ns",
    "memory",
    "start",
    "start_upstream",
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "bench-relay"
ROUTER_VENV = ROOT / "build" / "bench-venv"
ROUTER = "vllm-router==0.1.17"
TARGETS = ["direct", "nginx", "vllm-router", "1bit"]
START_S, STOP_S = 30.0, 10.0

NGINX_CONF = """\
worker_processes 1;
daemon off;
pid {build}/nginx.pid;
error_log {build}/nginx.log warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  keepalive_requests 1000000;
  client_body_temp_path {build}/nginx-body;
  proxy_temp_path {build}/nginx-proxy;
  fastcgi_temp_path {build}/nginx-fastcgi;
  uwsgi_temp_path {build}/nginx-uwsgi;
  scgi_temp_path {build}/nginx-scgi;
  # llama-server closes after 100 requests and after 5 s: be gone just before
  upstream backend {{
    server 127.0.0.1:{upstream};
    keepalive 64;
    keepalive_requests 99;
    keepalive_timeout 4s;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://backend;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_request_buffering off;
    }}
  }}
}}
"""


class NotMeasuredError(Exception):
    """Why a target could not be measured."""


class Settings(msgspec.Struct, frozen=True):
    """How targets are started.

    Args:
        feed_core: The core of load generator and fake upstream.
        proxy_core: The core of the proxies.
        onebit: The `1bit` program.
        install: Install vllm-router where it is missing.
    """

    feed_core: int
    proxy_core: int
    onebit: str
    install: bool


class Target(msgspec.Struct, frozen=True):
    """One thing that can be asked.

    Args:
        name: Its name in the tables.
        port: Where it listens.
        process: Its first process; `None` for the fake upstream itself.
        upstream: The process of the fake upstream behind it.
    """

    name: str
    port: int
    process: psutil.Process | None
    upstream: psutil.Process

    def processes(self) -> list[psutil.Process]:
        """Return the processes that are the proxy: its tree without the fake upstream."""
        if self.process is None:
            return []
        return [p for p in tree(self.process) if not is_upstream(p)]


def tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    return [process, *process.children(recursive=True)]


def is_upstream(process: psutil.Process) -> bool:
    """Say whether a process runs our fake upstream."""
    try:
        return Path(process.exe()) == BUILD / "upstream"
    except (psutil.Error, OSError):
        return False


def cpu_ns(processes: list[psutil.Process]) -> int:
    """Return the CPU time of all threads that live, in nanoseconds."""
    total = 0
    for process in processes:
        for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has just ended
                total += schedstat_ns(path.read_text())
    return total


def memory(processes: list[psutil.Process]) -> Memory:
    """Return the resident memory of processes, shared pages counted whole (RSS) or split (PSS)."""
    rss = pss = 0
    for process in processes:
        with contextlib.suppress(OSError):
            rss += memory_kib(Path(f"/proc/{process.pid}/status").read_text(), "VmRSS")
            pss += memory_kib(Path(f"/proc/{process.pid}/smaps_rollup").read_text(), "Pss")
    return Memory(rss_kib=rss, pss_kib=pss)


def pin(process: psutil.Process, core: int) -> None:
    """Put every thread of a process on one core."""
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), {core})


@contextlib.contextmanager
def running(command: list[str], core: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program on one core in a session of its own; leave nothing of it behind."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(),
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all its descendants: asked first, killed `STOP_S` later."""
    try:
        whole = tree(psutil.Process(process.pid))
    except psutil.NoSuchProcess:
        whole = []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for left in psutil.wait_procs(whole, timeout=1)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def environment() -> dict[str, str]:
    """Return the environment for what we start: state under build/, no proxy for loopback."""
    places = {f"XDG_{k}_HOME": str(BUILD / k.lower()) for k in ("STATE", "CACHE", "CONFIG")}
    return {**os.environ, **places, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until /health answers 200.

    Raises:
        NotMeasuredError: The program ended, or did not get there within `START_S`.
    """
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise NotMeasuredError(f"ended with code {process.returncode}: {last_line(log)}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                connection.close()
                return
        time.sleep(0.05)
    raise NotMeasuredError(f"not ready within {START_S:.0f} s: {last_line(log)}")


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
    return lines[-1] if lines else "it said nothing"


def build() -> None:
    """Compile both programs and write the model that stands for one."""
    BUILD.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("bench-relay: no C compiler\nhint: apt-get install gcc libc6-dev")
    for name in ("load", "upstream"):
        source, program = HERE / f"{name}.c", BUILD / name
        newest = max(source.stat().st_mtime, (HERE / "wire.h").stat().st_mtime)
        if not program.exists() or program.stat().st_mtime < newest:
            subprocess.run([compiler, "-O2", "-Wall", "-o", program, source], check=True)
    (BUILD / "bench.gguf").write_bytes(tiny_gguf())


def tiny_gguf() -> bytes:
    """Return a GGUF file with a true header and one tensor of zeros; only a fake loads it."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    string, uint32, f32, alignment = 8, 4, 0, 32
    fields = [
        text("general.architecture") + struct.pack("<I", string) + text("llama"),
        text("general.name") + struct.pack("<I", string) + text("bench"),
        text("general.file_type") + struct.pack("<II", uint32, f32),
        text("llama.context_length") + struct.pack("<II", uint32, 4096),
        text("llama.block_count") + struct.pack("<II", uint32, 1),
    ]
    tensor = text("token_embd.weight") + struct.pack("<IQIQ", 1, 32, f32, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields)) + b"".join(fields) + tensor
    return head + bytes(-len(head) % alignment) + bytes(32 * 4)


def nginx_command(port: int, upstream: int) -> list[str]:
    """Return how nginx is started: one worker, nothing buffered."""
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        raise NotMeasuredError("nginx is not installed (apt-get install nginx-light)")
    conf = BUILD / "nginx.conf"
    conf.write_text(NGINX_CONF.format(build=BUILD, port=port, upstream=upstream))
    return [program, "-p", str(BUILD), "-c", str(conf), "-e", str(BUILD / "nginx.log")]


def router_command(port: int, upstream: int, *, install: bool) -> list[str]:
    """Return how vllm-router is started: at its quietest, its protections off."""
    program = ROUTER_VENV / "bin" / "vllm-router"
    if not program.exists() and install:
        print(f"bench-relay: installing {ROUTER} into {ROUTER_VENV}", file=sys.stderr)
        pip = [str(ROUTER_VENV / "bin" / "python"), "-m", "pip", "install", "-q", ROUTER]
        for command in ([sys.executable, "-m", "venv", str(ROUTER_VENV)], pip):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise NotMeasuredError(f"{ROUTER} could not be installed: {why}")
    if not program.exists():
        raise NotMeasuredError(f"{ROUTER} is not in {ROUTER_VENV}")
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    quiet = ["--log-level", "error", "--disable-retries", "--disable-circuit-breaker"]
    worker = ["--worker-urls", f"http://127.0.0.1:{upstream}", "--policy", "round_robin"]
    return [str(program), *where, *worker, *quiet]


def onebit_command(port: int, program: str) -> list[str]:
    """Return how `1bit serve` is started over a fake upstream of its own."""
    found = shutil.which(program)
    if found is None:
        raise NotMeasuredError(f"{program} is not installed (make serve does it)")
    backend = ["--llama-server", str(BUILD / "upstream"), "--device", "cpu", "--no-warmup"]
    model = ["-m", str(BUILD / "bench.gguf"), "--alias", "bench"]
    return [found, "serve", *model, "-p", str(port), *backend]


def command_of(name: str, port: int, upstream: int, settings: Settings) -> list[str]:
    """Return the command line of a target.

    Raises:
        NotMeasuredError: It is missing here.
    """
    if name == "nginx":
        return nginx_command(port, upstream)
    if name == "vllm-router":
        return router_command(port, upstream, install=settings.install)
    return onebit_command(port, settings.onebit)


def start_upstream(settings: Settings, stack: contextlib.ExitStack) -> Target:
    """Start the fake upstream, which is also the target `direct`."""
    port, log = free_port(), BUILD / "direct.log"
    command = [str(BUILD / "upstream"), "--port", str(port)]
    popen = stack.enter_context(running(command, settings.feed_core, log))
    wait_ready(port, popen, log)
    return Target("direct", port, None, psutil.Process(popen.pid))


def start(name: str, direct: Target, settings: Settings, stack: contextlib.ExitStack) -> Target:
    """Start a proxy and wait until it serves.

    Raises:
        NotMeasuredError: It is missing, or does not come up.
    """
    port, log = free_port(), BUILD / f"{name}.log"
    command = command_of(name, port, direct.port, settings)
    popen = stack.enter_context(running(command, settings.proxy_core, log))
    wait_ready(port, popen, log)
    process = psutil.Process(popen.pid)
    if name != "1bit":
        return Target(name, port, process, direct.upstream)
    backends = [p for p in tree(process) if is_upstream(p)]
    if len(backends) != 1:
        raise NotMeasuredError(f"{len(backends)} backends below it, not one")
    pin(backends[0], settings.feed_core)  # it was born on the proxy's core
    return Target(name, port, process, backends[0])
