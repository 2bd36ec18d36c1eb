"""Checks that look at a program or the machine: placement, operators, the kernel log."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path

import trio

from onebit_serve.core.gate import ops, placement
from onebit_serve.core.gate.config import Model
from onebit_serve.core.gate.ring import KernelLog
from onebit_serve.core.gate.verdict import Finding, failed, not_run
from onebit_serve.gate.identify import scheduler_device
from onebit_serve.gate.serving import Client, Recorder, ServerError, Subject, serving
from onebit_serve.live.child import Child, Exit

__all__ = ["check_ops", "check_placement", "read_kernel_log"]

# A prefill of more than one token and a few decodes, with letters only so that a build that refuses
# meaningless text does not refuse these.
_PROBE_TOKENS = 48
_PROBE_DECODES = 4
_LETTERS = "root ::= [a-z]*"
_PROBE_TEXT = "The ferry was late because of the wind from the west. " * 8

_KMSG = Path("/dev/kmsg")
_KMSG_RECORD_BYTES = 8192
_KMSG_LINE = re.compile(r"^\d+,(\d+),\d+,[^;]*;(.*)")
_JOURNAL_LINE = re.compile(r"^\[\s*(\d+\.\d+)\]\s(.*)")
_STOP_S = 10.0


async def check_placement(
    nursery: trio.Nursery, subject: Subject, log: Path, scheduler_log: Path
) -> Finding:
    """Serve the model once in a process of its own that prints where every node goes.

    Args:
        nursery: Watches the child.
        subject: What is served.
        log: Takes what the server prints.
        scheduler_log: Takes the llama-server's own log, about 1,000 lines a request.

    Raises:
        ServerError: It did not start or did not answer.
    """
    model = subject.model
    extra = ["-lv", "5", "--no-log-prefix", "--no-log-timestamps", "--log-file", str(scheduler_log)]
    command = subject.command(warm_up=False, extra=extra)
    environment = subject.environment(GGML_SCHED_DEBUG="2")
    async with serving(nursery, command, environment, log, model.limits) as client:
        loaded_bytes = len(_bytes(scheduler_log))
        await _probe(client)
    data = _bytes(scheduler_log)
    if not data:
        return not_run("the llama-server wrote no log file (--log-file)")
    graphs = placement.parse(data.decode(errors="replace"))
    served = len(placement.parse(data[loaded_bytes:].decode(errors="replace")))
    return placement.judge(
        graphs,
        model.placement.device or scheduler_device(model.device),
        model.placement.allowed,
        served=served,
        min_served=model.placement.min_graphs,
    )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


async def _probe(client: Client) -> None:
    prompt = (await client.tokenize(_PROBE_TEXT))[:_PROBE_TOKENS]
    answer = await client.complete(
        prompt, _PROBE_DECODES, cache=False, grammar=_LETTERS, ignore_eos=True
    )
    if isinstance(answer, str):
        raise ServerError(answer)


def _tests(subject: Subject) -> str:
    named = subject.model.ops.program
    return named or str(Path(subject.binary).resolve().parent / "test-backend-ops")


async def check_ops(nursery: trio.Nursery, subject: Subject, log: Path) -> Finding:
    """Run the build's operator tests on the model's device.

    Args:
        nursery: Watches the child.
        subject: Whose build and device.
        log: Takes what they print.
    """
    model = subject.model
    program = _tests(subject)
    device = model.ops.device or scheduler_device(model.device)
    recorder = Recorder(log)
    try:
        child = Child.spawn([program, "test", "-b", device], subject.environment())
    except OSError as error:
        recorder.close()
        return not_run(
            f"{program} cannot be started ({error.strerror}); build llama.cpp's test-backend-ops"
        )
    child.tail = recorder
    gone = trio.Event()
    ended: list[Exit] = []

    async def watch() -> None:
        ended.append(await child.run())
        gone.set()

    nursery.start_soon(watch)
    try:
        with trio.move_on_after(model.ops.deadline_s):
            await gone.wait()
    finally:
        with trio.CancelScope(shield=True):
            await child.stop(_STOP_S)
        recorder.close()
    if not ended:
        return failed(f"test-backend-ops was not done within {model.ops.deadline_s:g} s")
    status = ended[0].code if ended[0].signal is None else -ended[0].signal
    text = _bytes(log).decode(errors="replace")
    return ops.judge(text, device, status, max_failed=model.ops.max_failed)


def read_kernel_log(model: Model) -> KernelLog:
    """Read the kernel log as far as it reaches back.

    /dev/kmsg, which numbers its records so that lost ones are noticed; else `journalctl -k`, which
    members of the group systemd-journal may read.

    Args:
        model: Its configuration, which may name a file instead.
    """
    if model.ring.log:
        return _read_file(Path(model.ring.log))
    if not Path("/sys/module/amdgpu").exists():
        return KernelLog(problem="this machine has no amdgpu driver")
    try:
        return KernelLog("/dev/kmsg", tuple(_read_kmsg()))
    except OSError as error:
        kmsg_problem = f"/dev/kmsg: {error.strerror}"
    try:
        done = subprocess.run(
            ["journalctl", "-k", "-b", "--no-pager", "-q", "-o", "short-monotonic"],
            capture_output=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return KernelLog(problem=f"the kernel log cannot be read ({kmsg_problem}; {error})")
    lines = [
        (float(match[1]), match[2])
        for line in done.stdout.decode(errors="replace").splitlines()
        if (match := _JOURNAL_LINE.match(line))
    ]
    if not lines:
        return KernelLog(
            problem=f"the kernel log cannot be read ({kmsg_problem}; journalctl shows no lines)"
        )
    return KernelLog("journalctl", tuple(lines))


def _read_file(path: Path) -> KernelLog:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return KernelLog(problem=f"the kernel log {path} cannot be read: {error.strerror}")
    return KernelLog(str(path), tuple((float(n), line) for n, line in enumerate(lines)))


def _read_kmsg() -> list[tuple[float, str]]:
    lines: list[tuple[float, str]] = []
    fd = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(fd, _KMSG_RECORD_BYTES)
            except BlockingIOError:
                return lines
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while we read; the next one is there
                    continue
                raise
            if match := _KMSG_LINE.match(record.decode(errors="replace")):
                lines.append((float(match[1]), match[2]))
    finally:
        os.close(fd)
