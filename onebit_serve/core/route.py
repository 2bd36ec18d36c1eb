"""Where a request goes: to an answer of ours, to a backend, or nowhere.

The routes of llama-server are an allow list, so that no unknown route of a build is open by
accident (`/cors-proxy` of some builds fetches any address for anybody who asks).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from onebit_serve.core.plan import BackendPlan, Role
from onebit_serve.core.wire import Refusal

__all__ = ["MODEL_PREFIX", "Order", "Page", "Relayed", "Verb", "choose", "named", "pick"]

Page = Literal["health", "livez", "metrics", "model", "models", "status"]
Relayed = Literal["relayed"]
Verb = Literal["start", "stop", "restart", "warm", "logs", "reload", "clear", "route"]


class Order(msgspec.Struct, frozen=True):
    """What a person asks of us rather than of a model.

    Args:
        verb: What to do.
        backend: To which backend; empty for `reload`, `clear` and `route`.
        full: Clear what only a restart clears, too.
    """

    verb: Verb
    backend: str = ""
    full: bool = False


_PAGES: dict[str, Page] = {
    "/health": "health",
    "/v1/health": "health",
    "/readyz": "health",
    "/livez": "livez",
    "/metrics": "metrics",
    "/v1/models": "models",
    "/models": "models",
    "/v1/status": "status",
}

_RELAYED_POST = frozenset(
    {
        "/apply-template",
        "/chat/completions",
        "/completion",
        "/completions",
        "/detokenize",
        "/embedding",
        "/embeddings",
        "/infill",
        "/lora-adapters",
        "/props",
        "/rerank",
        "/reranking",
        "/tokenize",
        "/v1/audio/transcriptions",
        "/v1/chat/completions",
        "/v1/chat/completions/input_tokens",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/reranking",
        "/v1/responses",
        "/v1/responses/input_tokens",
    }
)
_RELAYED_GET = frozenset(
    {
        "/",
        "/bundle.css",
        "/bundle.js",
        "/favicon.ico",
        "/index.html",
        "/loading.html",
        "/lora-adapters",
        "/props",
        "/slots",
        "/sw.js",
    }
)
MODEL_PREFIX = "/v1/models/"
_BACKEND = re.compile(r"/v1/backends/([^/]+)/(start|stop|restart|warm|logs)")
_SLOT = re.compile(r"/slots/\d{1,9}")
_ASSET = re.compile(
    r"/(?:_app|assets)/[\w\-./]+|/[\w\-.]+\.(?:png|svg|ico|webmanifest|json|js|css)"
)


def choose(method: str, path: str) -> Page | Relayed | Order | Refusal:
    """Say who answers a request.

    Args:
        method: The HTTP method.
        path: The target without its query.

    Returns:
        The name of a page of ours, `relayed`, an order, or the refusal to send.
    """
    if method == "POST" and path in _RELAYED_POST:
        return "relayed"
    page = "model" if path.startswith(MODEL_PREFIX) else _PAGES.get(path)
    if page:
        if method in ("GET", "HEAD", "OPTIONS"):
            return page
        return Refusal(405, f"{path} is read with GET", "method_not_allowed")
    if path.startswith(("/v1/backends/", "/v1/reload")):
        return _order(method, path)
    if path == "/v1/route":
        if method == "POST":
            return Order("route")
        return Refusal(405, f"{path} is asked with POST", "method_not_allowed")
    if path == "/v1/cache/prefix":
        if method == "DELETE":
            return Order("clear")
        return Refusal(405, f"{path} is cleared with DELETE", "method_not_allowed")
    answers_post = path in _RELAYED_POST or _SLOT.fullmatch(path) is not None
    answers_get = path in _RELAYED_GET or (_ASSET.fullmatch(path) is not None and ".." not in path)
    if answers_post and method in ("POST", "OPTIONS"):
        return "relayed"
    if answers_get and method in ("GET", "HEAD", "OPTIONS"):
        return "relayed"
    if answers_post or answers_get:
        wanted = "POST" if answers_post else "GET"
        return Refusal(405, f"{path} is asked with {wanted}", "method_not_allowed")
    return Refusal(404, f"there is no route {path} here", "not_found")


def _order(method: str, path: str) -> Order | Refusal:
    match = _BACKEND.fullmatch(path)
    if path != "/v1/reload" and not match:
        return Refusal(404, f"there is no route {path} here", "not_found")
    verb = match[2] if match else "reload"
    wanted = "GET" if verb == "logs" else "POST"
    if method != wanted:
        return Refusal(405, f"{path} is asked with {wanted}", "method_not_allowed")
    return Order(msgspec.convert(verb, Verb), match[1] if match else "")


_ROLES: dict[str, Role] = {
    "/embedding": "embedding",
    "/embeddings": "embedding",
    "/rerank": "rerank",
    "/reranking": "rerank",
    "/v1/embeddings": "embedding",
    "/v1/rerank": "rerank",
    "/v1/reranking": "rerank",
}


def pick(backends: Sequence[BackendPlan], path: str, model: str) -> str | Refusal:
    """Choose among several backends.

    A backend is asked for by its served id, or by its name. Otherwise the route decides: where only
    one backend has the role that it needs, that one is meant.

    Args:
        backends: All of them.
        path: The route.
        model: The request's `model`; empty without one.

    Returns:
        The backend's name, or the refusal to send.
    """
    for backend in backends:
        if model and model in (backend.served_id, backend.name):
            return backend.name
    role = _ROLES.get(path, "chat")
    able = [backend for backend in backends if backend.role == role]
    if len(able) == 1:
        return able[0].name
    ids = ", ".join(backend.served_id for backend in able or backends)
    if not model:
        return Refusal(400, f"name a model: there are {ids}", "model_missing")
    return Refusal(404, f"there is no model {model} here; there are {ids}", "model_not_found")


_ANY_MODEL = ("", "auto")  # what a client sends as `model` to have one picked


def named(backends: Sequence[BackendPlan], model: str) -> str | Refusal | None:
    """Say which backend a request names itself, where requests are routed.

    A backend's name means that backend, and so does a served id that only one of several has.

    Args:
        backends: All of them.
        model: The request's `model`; empty without one.

    Returns:
        The backend's name, `None` where it names none, or the refusal of an unknown model.
    """
    chats = {backend.served_id for backend in backends if backend.role == "chat"}
    owners = [backend for backend in backends if model == backend.served_id]
    by_name = [backend.name for backend in backends if model == backend.name]
    if by_name and not len(owners) > 1:
        return by_name[0]
    if len(owners) == 1 and not (owners[0].role == "chat" and len(chats) == 1):
        return owners[0].name
    if owners or model in _ANY_MODEL or len(chats) == 1:
        return None
    ids = ", ".join(dict.fromkeys(backend.served_id for backend in backends))
    message = f"there is no model {model} here; there are {ids}, and auto picks one"
    return Refusal(404, message, "model_not_found")
