"""What `--dry-run` and `1bit check` print: the command, the environment that matters, the plan."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping

from onebit_serve.cli.prepare import Prepared
from onebit_serve.core.plan import BackendPlan, Found, Plan

__all__ = ["describe_found", "describe_plan"]

# Variables of the user's that change what a backend does, by the runtimes that read them.
_MATTERS = (
    "CUDA_",
    "GGML_",
    "GPU_",
    "HIP_",
    "HSA_",
    "IREE_",
    "LLAMA_",
    "MESA_",
    "ONEBIT_PREFILL_",
    "RADV_",
    "ROCR_",
    "VK_",
)


def describe_plan(plan: Plan, environment: Mapping[str, str]) -> str:
    """Return the command, environment and plan of one run, as text to print."""
    return "\n".join(line for part in _plan_lines(plan, environment) for line in part)


def describe_found(prepared: Prepared) -> str:
    """Return what was found: the program, its devices, the model."""
    return "\n".join(line for found in prepared.found for line in _found_lines(found))


def _found_lines(found: Found) -> list[str]:
    binary, model = found.binary, found.model
    lines = [f"program      {binary.path}", f"version      {binary.version or 'unknown'}"]
    for device in binary.devices:
        memory = f", {device.total_mib} MiB" if device.total_mib is not None else ""
        lines.append(f"device       {device.name}: {device.description}{memory}")
    if not binary.devices:
        lines.append("device       none listed")
    if model is None:
        lines.append(f"model        {found.backend.model}")
    else:
        lines.append(f"model        {model.path} ({model.size_bytes / 2**20:.0f} MiB)")
        facts = {
            "architecture": model.architecture,
            "name": model.name,
            "trained for": f"{model.context_length} tokens" if model.context_length else None,
        }
        said = ", ".join(f"{what} {value}" for what, value in facts.items() if value)
        lines.append(f"             {said or 'its header says no more'}")
    return lines


def _plan_lines(plan: Plan, environment: Mapping[str, str]) -> Iterator[list[str]]:
    for backend in plan.backends:
        yield [
            "command (PORT is a free loopback port, taken at the start):",
            "  " + _command(backend),
            "environment:",
            *(f"  {line}" for line in _environment(backend, environment)),
        ]
    host = f"[{plan.server.host}]" if ":" in plan.server.host else plan.server.host
    port = plan.server.port or "a free port"
    yield ["plan:", f"  front door   http://{host}:{port}"]
    for backend in plan.backends:
        yield [
            f"  backend      {backend.name}: {_title(backend)}, {backend.role}",
            f"  warm-up      {_warm_up(backend)}",
            *(["  start        when a request first needs it"] if backend.lazy else []),
            *([f"  prompts      {_prompts(backend)}"] if backend.prompts.entries else []),
            *(["  replies      assembled from streams"] if backend.assemble else []),
        ]
    if plan.routing is not None:
        from onebit_serve.cli.routing import describe

        yield [f"  routing      {line}" for line in describe(plan.routing)]
    yield [f"  stop         at most {plan.server.stop_s:g} s"]


def _title(backend: BackendPlan) -> str:
    return f"{backend.served_id} on {backend.device} ({backend.binary.rpartition('/')[2]})"


def _command(backend: BackendPlan) -> str:
    words = [backend.binary, *(a.replace("{port}", "PORT") for a in backend.arguments)]
    return shlex.join(words)


def _environment(backend: BackendPlan, environment: Mapping[str, str]) -> list[str]:
    lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(backend.set_env.items())]
    removed = [name for name in backend.unset_env if name in environment]
    kept = sorted(
        name
        for name in environment
        if name.startswith(_MATTERS) and name not in removed and name not in backend.set_env
    )
    lines += [f"{name}={_quoted(name, environment[name])} (yours)" for name in kept]
    lines += [f"without {name}" for name in removed]
    return lines or ["yours, unchanged"]


def _quoted(name: str, value: str) -> str:
    # Output is pasted into bug reports.
    return "..." if name.endswith(("_KEY", "_TOKEN")) else shlex.quote(value)


def _prompts(backend: BackendPlan) -> str:
    kept = ", saved to disk" if backend.prompts.save_to else ""
    return f"{len(backend.prompts.entries)} put into the prompt cache before ready{kept}"


def _warm_up(backend: BackendPlan) -> str:
    warm_up = backend.warm_up
    if warm_up.skip:
        return f"skipped ({warm_up.skip})"
    limit = "" if math.isinf(warm_up.deadline_s) else f", at most {warm_up.deadline_s:g} s"
    if backend.role != "chat":
        return f"one {backend.role} request{limit}"
    first = f"{warm_up.prompt_tokens} prompt tokens, {warm_up.decode_tokens} decode steps{limit}"
    budget = f"for {warm_up.budget_s:g} s" if warm_up.budget_s else ""
    more = " and ".join(part for part in (budget, "while idle" if warm_up.idle else "") if part)
    shapes = more and backend.kind == "llama-server" and backend.device != "cpu"
    return f"{first}; further shapes {more}" if shapes else first
