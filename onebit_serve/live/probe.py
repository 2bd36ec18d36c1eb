"""The supervisor's own requests to a child: is it healthy, what is it, make it warm."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
import trio

from onebit_serve.core import warmup, wire
from onebit_serve.core.plan import BackendPlan
from onebit_serve.core.warmup import WarmUpResult
from onebit_serve.live.upstream import GoneError, exchange, open_stream

__all__ = ["busy_slots", "is_healthy", "listens_beyond", "owns_port", "warm_up"]

_OK = 200
_ANSWER_LIMIT_S = 30.0


class _WarmUpFailedError(Exception):
    """One try of the warm-up failed."""


async def is_healthy(port: int) -> bool | None:
    """Ask `/health` once.

    Returns:
        True for 200, False for another answer, `None` without one.
    """
    try:
        reply = await exchange(port, "GET", "/health")
    except GoneError:
        return None
    return reply.status == _OK


def owns_port(pid: int, port: int) -> bool:
    """Tell whether a process, or one it started, listens on a loopback port.

    Where the system does not let us see, it is taken to: a wrong no would stop a good backend.
    """
    listening = _listening(pid)
    return listening is None or any(number == port for _, number in listening)


def listens_beyond(pid: int) -> str:
    """Return the address beyond loopback that a process, or one it started, listens on, if any."""
    for host, port in _listening(pid) or ():
        if not ipaddress.ip_address(host).is_loopback:
            return f"{host}:{port}"
    return ""


def _listening(pid: int) -> list[tuple[str, int]] | None:
    """Return where a process and those it started listen; `None` where we may not see."""
    import psutil

    found: list[tuple[str, int]] = []
    try:
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            found += [
                (connection.laddr.ip, connection.laddr.port)
                for connection in member.net_connections(kind="tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
    except psutil.NoSuchProcess:
        return found
    except (psutil.AccessDenied, OSError):
        return None
    return found


async def busy_slots(port: int, key: str) -> int | None:
    """Return how many slots the backend says are processing, or `None` where it does not say."""
    try:
        with trio.fail_after(_ANSWER_LIMIT_S):
            reply = await exchange(port, "GET", "/slots", key=key)
        if reply.status != _OK:
            return None
        slots = msgspec.json.decode(reply.body)
        return sum(bool(slot["is_processing"]) for slot in slots)
    except (GoneError, trio.TooSlowError, msgspec.DecodeError, KeyError, TypeError):
        return None


async def warm_up(
    plan: BackendPlan, port: int, key: str, on_progress: Callable[[], None]
) -> WarmUpResult:
    """Send a backend its warm-up, and once more if that fails.

    Args:
        plan: The backend.
        port: Its port.
        key: Its API key, or empty.
        on_progress: Called whenever the backend shows that it works.

    Returns:
        What it came to; `failure` is set when both tries failed.
    """
    result = await _try(plan, port, key, on_progress)
    first = result.failure
    if not first:
        return result
    result = await _try(plan, port, key, on_progress)
    failure = result.failure
    if failure and failure != first:
        failure = f"{first}; then {failure}"
    return msgspec.structs.replace(result, failure=failure, retried=first)


async def _try(
    plan: BackendPlan, port: int, key: str, on_progress: Callable[[], None]
) -> WarmUpResult:
    began_s = trio.current_time()
    try:
        target, request = await _request(plan, port, key)
        began_s = trio.current_time()
        progress: list[dict[str, int]] = []
        last = await _send(port, key, target, request, on_progress, progress)
    except (GoneError, _WarmUpFailedError) as error:
        return WarmUpResult((trio.current_time() - began_s) * 1000, str(error) or repr(error))
    timings = last.get("timings") or {}
    return WarmUpResult(
        (trio.current_time() - began_s) * 1000,
        prompt_tokens=timings.get("prompt_n"),
        decode_tokens=timings.get("predicted_n"),
        checkpoints=warmup.checkpoints_shown(progress),
        prompt_ms=timings.get("prompt_ms") or 0.0,
        step_ms=warmup.step_ms(timings.get("predicted_n") or 0, timings.get("predicted_ms") or 0.0),
    )


async def _request(plan: BackendPlan, port: int, key: str) -> tuple[str, dict[str, Any]]:
    """Return route and body of the warm-up for this kind of backend."""
    wanted = plan.warm_up
    if plan.kind != "llama-server":
        return "/v1/chat/completions", warmup.chat_request(plan)
    context = await _context_tokens(port, key)
    decode = min(wanted.decode_tokens, max(1, (context or 1 << 30) // 4))
    tokens = warmup.prompt_tokens_that_fit(wanted.prompt_tokens, decode, context)
    text = {"content": warmup.SEED_TEXT, "add_special": False}
    seed = await _json(port, key, "POST", "/tokenize", text)
    try:
        ids = warmup.prompt_ids(seed["tokens"], tokens)
    except (KeyError, TypeError, ValueError) as error:
        raise _WarmUpFailedError(f"/tokenize gave no token ids ({error})") from None
    if plan.role == "rerank":
        words = warmup.rerank_words_that_fit(tokens, len(seed["tokens"]))
        return "/v1/rerank", warmup.rerank_request(words)
    if plan.role == "embedding":
        return "/v1/embeddings", warmup.embedding_request(ids)
    return "/completion", warmup.completion_request(ids, decode)


async def _context_tokens(port: int, key: str) -> int | None:
    """Return the context of one slot in tokens, or `None` where `/props` does not say."""
    with contextlib.suppress(_WarmUpFailedError, AttributeError, TypeError, ValueError):
        props = await _json(port, key, "GET", "/props")
        return int(props["default_generation_settings"]["n_ctx"])
    return None


async def _json(
    port: int, key: str, method: str, target: str, body: dict[str, Any] | None = None
) -> Any:
    data = msgspec.json.encode(body) if body is not None else b""
    reply = await exchange(port, method, target, data, key)
    if reply.status != _OK:
        raise _WarmUpFailedError(_said(target, reply.status, reply.body))
    try:
        return msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        raise _WarmUpFailedError(f"{target} answered no JSON") from None


async def _send(
    port: int,
    key: str,
    target: str,
    request: dict[str, Any],
    on_progress: Callable[[], None],
    progress: list[dict[str, int]],
) -> dict[str, Any]:
    """Send the warm-up and read its reply to the end; return its last JSON value.

    What it says of the prompt's progress goes to `progress`.
    """
    body = msgspec.json.encode(request)
    last: dict[str, Any] = {}
    async with open_stream(port, "POST", target, body, key) as stream:
        on_progress()
        if stream.status != _OK or not request.get("stream"):
            whole = await stream.read()
            if stream.status != _OK and not warmup.is_refused_output(whole):
                raise _WarmUpFailedError(_said(target, stream.status, whole))
            return last
        events = wire.EventReader()
        async with aclosing(stream.pieces()) as pieces:
            async for piece in pieces:
                on_progress()
                for event in events.feed(piece):
                    if warmup.is_refused_output(event):
                        return last
                    last = _event(target, event, last)
                    if "prompt_progress" in last:
                        progress.append(last["prompt_progress"])
    return last


def _event(target: str, event: bytes, before: dict[str, Any]) -> dict[str, Any]:
    if event == b"[DONE]":
        return before
    try:
        value = msgspec.json.decode(event)
    except msgspec.DecodeError:
        raise _WarmUpFailedError(f"{target} sent an event that is no JSON") from None
    if not isinstance(value, dict):
        raise _WarmUpFailedError(f"{target} sent an event that is no object")
    if "error" in value:
        raise _WarmUpFailedError(_said(target, _OK, event))
    return value


def _said(target: str, status: int, body: bytes) -> str:
    text = body[:300].decode(errors="replace").strip()
    return f"HTTP {status} from {target}: {text}" if text else f"HTTP {status} from {target}"
