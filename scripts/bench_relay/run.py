#!/usr/bin/env python3
"""Measure what a relay costs: nothing between, nginx, vllm-router and `1bit serve`, side by side.

    python scripts/bench_relay/run.py                          # everything, a few minutes
    python scripts/bench_relay/run.py --rounds 1 --seconds 0.5  # a look
    python scripts/bench_relay/run.py --targets direct,1bit --scenarios paced:8,64

Load generator and fake upstream (both C, built here) share one core, the proxy has another alone. In each
round the targets take turns in random order. Times come from the load generator; CPU time is what the
kernel charged to the proxy's processes (for `1bit serve` without its backend, which is the fake upstream).
Writes build/bench-relay/result.json and result.md, and prints the latter.

Exit code 1: an answer was wrong or a target broke off. With --check also: a limit was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import os
import platform
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from figures import SCENARIOS, Limit, Memory, Run, limits, memory_kib, report, schedstat_ns

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "bench-relay"
ROUTER_VENV = ROOT / "build" / "bench-venv"
ROUTER = "vllm-router==0.1.17"
TARGETS = ["direct", "nginx", "vllm-router", "1bit"]
START_S, STOP_S, WARM_S = 30.0, 10.0, 0.2

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
  upstream backend {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 99; keepalive_timeout 4s; }}
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


class Target:
    """One thing that can be asked.

    Args:
        name: Its name in the tables.
        port: Where it listens.
        process: Its first process; `None` for the upstream itself.
        upstream: Finds the process of the fake upstream behind it.
    """

    def __init__(
        self,
        name: str,
        port: int,
        process: psutil.Process | None,
        upstream: Callable[[], psutil.Process],
    ) -> None:
        self.name = name
        self.port = port
        self.process = process
        self.upstream = upstream

    def processes(self) -> list[psutil.Process]:
        """Return the processes that are the proxy: its tree without the fake upstream."""
        if self.process is None:
            return []
        return [p for p in tree(self.process) if not is_upstream(p)]


# ------------------------------------------------------------------ processes


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
    """Return the resident memory of processes, shared pages counted in each (RSS) or split (PSS)."""
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
    """Return the environment for what we start: state and caches under build/, loopback unproxied."""
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


# ------------------------------------------------------------------ what is measured


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


def start(
    name: str, options: argparse.Namespace, stack: contextlib.ExitStack, direct: Target | None
) -> Target:
    """Start a target and wait until it serves.

    Raises:
        NotMeasuredError: It is missing, or does not come up.
    """
    feed_core, proxy_core = options.cores
    port = free_port()
    if name == "direct":
        command, core = [str(BUILD / "upstream"), "--port", str(port)], feed_core
    elif name == "nginx":
        command, core = nginx_command(port, direct.port), proxy_core
    elif name == "vllm-router":
        command = router_command(port, direct.port, install=options.install)
        core = proxy_core
    else:
        command, core = onebit_command(port, options.onebit), proxy_core
    log = BUILD / f"{name}.log"
    popen = stack.enter_context(running(command, core, log))
    wait_ready(port, popen, log)
    process = psutil.Process(popen.pid)
    if name == "direct":
        return Target(name, port, None, lambda: process)
    if name != "1bit":
        return Target(name, port, process, direct.upstream)
    backends = [p for p in tree(process) if is_upstream(p)]
    if len(backends) != 1:
        raise NotMeasuredError(f"{len(backends)} backends below it, not one")
    pin(backends[0], feed_core)
    return Target(name, port, process, lambda: backends[0])


# ------------------------------------------------------------------ measuring


def ask(target: Target, point: tuple[str, int], seconds: float, core: int) -> dict[str, Any]:
    """Run the load generator once and return what it printed.

    Raises:
        NotMeasuredError: It gave up.
    """
    scenario, concurrency = SCENARIOS[point[0]], point[1]
    command = ["taskset", "-c", str(core), str(BUILD / "load"), "--port", str(target.port)]
    command += ["--concurrency", str(concurrency)]
    command += ["--seconds", str(seconds), "--warm", str(WARM_S)]
    if scenario.chunks:
        command += ["--chunks", str(scenario.chunks), "--interval-us", str(scenario.interval_us)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=seconds + 30
    )
    if done.returncode:
        raise NotMeasuredError(f"the load generator gave up: {done.stderr.strip()}")
    return msgspec.json.decode(done.stdout)


def measure(
    target: Target, point: tuple[str, int], number: int, seconds: float, core: int
) -> Run:
    """Measure a target once at a point."""
    proxy, upstream = target.processes(), [target.upstream()]
    before, fed_before = cpu_ns(proxy), cpu_ns(upstream)
    load = ask(target, point, seconds, core)
    used, fed = cpu_ns(proxy) - before, cpu_ns(upstream) - fed_before
    median = {k: (load[f"{k}_us"] or {}).get("p50") for k in ("latency", "ttft", "chunk_delay")}
    return Run(
        round=number,
        scenario=point[0],
        concurrency=point[1],
        target=target.name,
        requests=load["requests"],
        events=load["events"],
        failed=load["failed"],
        first_failure=load["first_failure"],
        retried=load["retried"],
        requests_per_s=load["requests_per_s"],
        latency_us=median["latency"],
        ttft_us=median["ttft"],
        chunk_delay_us=median["chunk_delay"],
        chunk_delay_p99_us=(load["chunk_delay_us"] or {}).get("p99"),
        cpu_ns=used if proxy else None,
        load_share=load["cpu_share"],
        feed_share=load["cpu_share"] + fed / 1e9 / load["wall_s"],
    )


def say(text: str) -> None:
    """Show progress where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def measure_all(
    targets: dict[str, Target], missing: dict[str, str], options: argparse.Namespace
) -> list[Run]:
    """Run every round; a target that breaks off is left out from there on."""
    runs: list[Run] = []
    random.seed(options.seed)
    for target in list(targets.values()):  # code paths and connections of the first use
        with breaking(target, targets, missing):
            for point in options.points:
                ask(target, point, 0.1, options.cores[0])
    for number in range(options.rounds):
        for point in options.points:
            for target in random.sample(list(targets.values()), len(targets)):
                say(f"round {number + 1}/{options.rounds} {point[0]} {point[1]} {target.name}")
                with breaking(target, targets, missing):
                    runs.append(measure(target, point, number, options.seconds, options.cores[0]))
    say("")
    return runs


@contextlib.contextmanager
def breaking(
    target: Target, targets: dict[str, Target], missing: dict[str, str]
) -> Iterator[None]:
    """Note a target that breaks off in the middle, and go on without it."""
    try:
        yield
    except (NotMeasuredError, subprocess.TimeoutExpired, psutil.Error) as error:
        missing[target.name] = f"broke off: {error}; see {BUILD / (target.name + '.log')}"
        targets.pop(target.name, None)


def read_points(text: str) -> list[tuple[str, int]]:
    """Read `small,paced:8:64` into points; a bare name stands for its usual concurrencies."""
    points = []
    for item in text.split(","):
        name, *numbers = item.split(":")
        if name not in SCENARIOS or not all(n.isdigit() and int(n) for n in numbers):
            raise argparse.ArgumentTypeError(f"{item}: not one of {', '.join(SCENARIOS)}, as in paced:8")
        points += [(name, int(n)) for n in numbers or SCENARIOS[name].concurrencies]
    return points


def read_targets(text: str) -> list[str]:
    """Read the names of targets; direct is always there, since the others are held against it."""
    names = text.split(",")
    for name in names:
        if name not in TARGETS:
            raise argparse.ArgumentTypeError(f"{name}: not one of {', '.join(TARGETS)}")
    return [t for t in TARGETS if t in {"direct", *names}]


def read_cores(text: str) -> list[int]:
    """Read two numbers of cores."""
    cores = [int(n) for n in text.split(",")]
    if len(set(cores)) != 2:  # noqa: PLR2004
        raise argparse.ArgumentTypeError("two different cores are needed, as in 0,1")
    return cores


def read_options() -> argparse.Namespace:
    """Read the command line."""
    usable = sorted(os.sched_getaffinity(0))
    beside = Path(sys.executable).with_name("1bit")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="rounds (default 5)")
    add("--seconds", type=float, default=3.0, help="seconds of one run (default 3)")
    add("--targets", type=read_targets, default=TARGETS, help=f"of {','.join(TARGETS)}")
    add(
        "--scenarios",
        type=read_points,
        dest="points",
        default=read_points(",".join(SCENARIOS)),
        help="scenarios, with other concurrencies where wanted: small,paced:8:64,fast",
    )
    add("--cores", type=read_cores, default=usable[:2], help="core of load and upstream, of proxies")
    add("--onebit", default=str(beside) if beside.exists() else "1bit", help="the 1bit program")
    add("--no-install", dest="install", action="store_false", help="don't install vllm-router")
    add("--out", type=Path, default=BUILD, help="folder for result.json and result.md")
    add("--seed", type=int, default=None, help="of the order of the targets")
    add("--check", action="store_true", help="exit 1 when a limit is missed or not measured")
    options = parser.parse_args()
    if len(options.cores) < 2:  # noqa: PLR2004
        parser.error("two cores are needed, one for the load and one for the proxy")
    return options


def about(options: argparse.Namespace) -> list[str]:
    """Return what a reader must know of the machine and the settings."""
    model = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
        platform.machine(),
    )
    when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return [
        f"{when}, {model}, Linux {platform.release()}, Python {platform.python_version()}.",
        f"{options.rounds} rounds of {options.seconds:g} s a run; load and upstream on core "
        f"{options.cores[0]}, the proxy on core {options.cores[1]}; load average before "
        f"{os.getloadavg()[0]:.1f}.",
        "nginx: 1 worker, buffering off. vllm-router: round robin, logs, retries and circuit breaker off.",
    ]


def main() -> int:
    """Measure and report; return the exit code."""
    options = read_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    build()
    lines = about(options)
    once = len(options.targets) * len(options.points)
    guess_s = once * (options.rounds * (options.seconds + WARM_S + 0.4) + 0.6)
    print(f"bench-relay: about {guess_s / 60:.1f} minutes", file=sys.stderr)
    targets: dict[str, Target] = {}
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name in options.targets:
            try:
                targets[name] = start(name, options, stack, targets.get("direct"))
            except NotMeasuredError as error:
                missing[name] = str(error)
                if name == "direct":
                    sys.exit(f"bench-relay: the fake upstream does not start: {error}")
        runs = measure_all(targets, missing, options)
        sizes = {t.name: memory(t.processes()) for t in targets.values() if t.process}
    text = report(runs, sizes, missing, options.targets, lines)
    checks: list[Limit] = limits(runs, sizes)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.md").write_text(text)
    result = {"about": lines, "missing": missing, "memory": sizes, "runs": runs}
    result["limits"] = [{**msgspec.structs.asdict(x), "verdict": x.verdict} for x in checks]
    (options.out / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    print(text)
    failures = {f"{r.target}: {r.first_failure}" for r in runs if r.failed}
    for failure in sorted(failures):
        print(f"bench-relay: {failure}", file=sys.stderr)
    broke = any(why.startswith("broke off") for why in missing.values())
    missed = options.check and any(x.verdict != "pass" for x in checks)
    return 1 if failures or broke or missed else 0


if __name__ == "__main__":
    sys.exit(main())
