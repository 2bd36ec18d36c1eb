"""`/metrics`: our own figures, and what each backend says of itself, in Prometheus' text format.

Our names begin with `onebit_` and stand in `FAMILIES`; `docs/metrics.md` explains each. They count
what clients asked for: synthetic requests (warm-up, warm prompts) are left out. A backend's own
figures keep their names, get the label `backend`, and count synthetic requests too, since the
backend cannot tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from onebit_serve.core import warm_prompts
from onebit_serve.core.laya import Tally
from onebit_serve.core.life import State
from onebit_serve.core.view import BackendView

__all__ = ["CONTENT_TYPE", "FAMILIES", "OUTCOMES", "Counters", "DoorCounters", "Outcome", "render"]

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

Outcome = Literal["answered", "cut", "client_gone", "failed", "refused"]
# How a request ends. answered: its whole reply went out, whatever its status; cut: the backend was
# lost within the reply; client_gone: the client left first; failed: 502; refused: 429 or 503.
OUTCOMES: tuple[Outcome, ...] = ("answered", "cut", "client_gone", "failed", "refused")

# Name -> type and help. The text is ours; the docs have the same names.
FAMILIES: dict[str, tuple[str, str]] = {
    "onebit_build_info": ("gauge", "1; the label has the version."),
    "onebit_ready": ("gauge", "Whether every needed backend is loaded and warm."),
    "onebit_uptime_seconds": ("gauge", "Seconds since the front door opened."),
    "onebit_connections": ("gauge", "Client connections that are open."),
    "onebit_connections_refused_total": ("counter", "Connections closed for being too many."),
    "onebit_refusals_total": ("counter", "Requests refused before a backend was chosen."),
    "onebit_log_lines_dropped_total": ("counter", "Log lines lost since nobody read them."),
    "onebit_backend_info": ("gauge", "1; the labels say what the backend is."),
    "onebit_backend_ready": ("gauge", "Whether it is loaded and warm."),
    "onebit_backend_degraded": ("gauge", "Whether it serves although its warm-up failed."),
    "onebit_backend_state": ("gauge", "1 for the state it is in, else 0."),
    "onebit_backend_state_seconds": ("gauge", "Seconds it has been in its state."),
    "onebit_backend_restarts_total": ("counter", "Starts after the first."),
    "onebit_backend_load_seconds": ("gauge", "From spawn to healthy, of the last start."),
    "onebit_backend_warm_up_seconds": ("gauge", "Time of the last warm-up."),
    "onebit_requests_total": ("counter", "Client requests that ended, by outcome."),
    "onebit_requests_replayed_total": ("counter", "Requests sent again after a backend's death."),
    "onebit_requests_in_flight": ("gauge", "Client requests that the backend works on."),
    "onebit_requests_queued": ("gauge", "Client requests that wait for the backend."),
    "onebit_request_body_bytes_total": ("counter", "Bytes of request bodies sent to it."),
    "onebit_response_body_bytes_total": ("counter", "Bytes of its replies' bodies passed on."),
    "onebit_warm_prompts_entry_count": ("gauge", "Warm prompts that are proven to be cached."),
    "onebit_warm_prompts_tokens": ("gauge", "Tokens in them."),
    "onebit_warm_prompts_hits_total": ("counter", "Client requests that reused one."),
    "onebit_warm_prompts_tokens_saved_total": ("counter", "Tokens that clients did not wait for."),
    "onebit_laya_questions_total": ("counter", "Requests that Laya was asked about."),
    "onebit_laya_failures_total": ("counter", "Questions without a usable answer, by reason."),
    "onebit_route_decisions_total": ("counter", "Requests routed, by class and device."),
    "onebit_route_decision_seconds_total": ("counter", "Time that deciding took."),
    "onebit_route_replies_total": ("counter", "Whole replies to routed requests."),
    "onebit_route_first_byte_seconds_total": ("counter", "Time from request to first byte."),
    "onebit_route_reply_seconds_total": ("counter", "Time from request to last byte."),
}

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_META = re.compile(rf"#\s+(HELP|TYPE)\s+({_NAME})(?:\s+(.*))?")
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    rf"({_NAME})\s*(?:\{{\s*((?:{_LABEL})(?:\s*,\s*{_LABEL})*)?\s*,?\s*\}})?\s+(\S+(?:\s+-?\d+)?)"
)
_BACKEND_LABEL = re.compile(r"(^|,\s*)backend(\s*=)")
_PARTS = ("_bucket", "_sum", "_count", "_created", "_total")
_TYPES = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})


class Counters(msgspec.Struct):
    """What the live layer counts for one backend; it lives as long as the process.

    Args:
        ended: Requests that ended, by outcome.
        replayed: Requests that were sent again after the backend died.
        request_bytes: Bytes of request bodies sent to it.
        response_bytes: Bytes of its replies' bodies passed on.
    """

    ended: dict[Outcome, int] = msgspec.field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    replayed: int = 0
    request_bytes: int = 0
    response_bytes: int = 0

    def end(self, outcome: Outcome) -> None:
        """Count a request that ended."""
        self.ended[outcome] += 1


class DoorCounters(msgspec.Struct):
    """What the live layer counts for the front door.

    Args:
        connections: Client connections that are open.
        connections_refused: Connections closed for being too many.
        refusals: Requests refused before a backend was chosen, by the refusal's code.
        log_lines_dropped: Log lines lost.
    """

    connections: int = 0
    connections_refused: int = 0
    refusals: dict[str, int] = {}
    log_lines_dropped: int = 0

    def refuse(self, code: str) -> None:
        """Count a refusal."""
        self.refusals[code] = self.refusals.get(code, 0) + 1


def render(
    views: Sequence[BackendView],
    counters: Mapping[str, Counters],
    door: DoorCounters,
    *,
    version: str,
    uptime_s: float,
    own: Mapping[str, str] | None = None,
    tally: Tally | None = None,
) -> bytes:
    """Return the page.

    Args:
        views: The backends, in order.
        counters: What was counted, by backend's name.
        door: What was counted at the front door.
        version: Ours.
        uptime_s: Seconds since the front door opened.
        own: What backends answered on their own `/metrics`, by name; those that did not answer in
            time are missing.
        tally: What was counted of routed requests, where requests are routed.
    """
    page = _Families()
    needed = [view for view in views if view.needed]
    ready = all(view.state is State.READY for view in needed)
    page.add("onebit_build_info", 1, version=version)
    page.add("onebit_ready", ready)
    page.add("onebit_uptime_seconds", uptime_s)
    page.add("onebit_connections", door.connections)
    page.add("onebit_connections_refused_total", door.connections_refused)
    for code, count in sorted(door.refusals.items()):
        page.add("onebit_refusals_total", count, code=code)
    page.add("onebit_log_lines_dropped_total", door.log_lines_dropped)
    for view in views:
        _add_backend(page, view, counters.get(view.name) or Counters())
    for family, labels, value in tally.samples() if tally else ():
        page.add(f"onebit_{family}", value, **labels)
    for name, text in (own or {}).items():
        page.add_own(name, text)
    return page.text()


def _add_backend(page: _Families, view: BackendView, counted: Counters) -> None:
    name = view.name
    page.add(
        "onebit_backend_info",
        1,
        backend=name,
        model=view.served_id,
        device=view.device,
        role=view.role,
    )
    page.add("onebit_backend_ready", view.state is State.READY, backend=name)
    page.add("onebit_backend_degraded", bool(view.degraded), backend=name)
    for state in State:
        page.add("onebit_backend_state", view.state is state, backend=name, state=state.value)
    page.add("onebit_backend_state_seconds", view.since_s, backend=name)
    page.add("onebit_backend_restarts_total", view.restarts, backend=name)
    if view.load_ms is not None:
        page.add("onebit_backend_load_seconds", view.load_ms / 1000, backend=name)
    if view.warm_up_ms is not None:
        page.add("onebit_backend_warm_up_seconds", view.warm_up_ms / 1000, backend=name)
    for outcome in OUTCOMES:
        page.add("onebit_requests_total", counted.ended[outcome], backend=name, outcome=outcome)
    page.add("onebit_requests_replayed_total", counted.replayed, backend=name)
    page.add("onebit_requests_in_flight", view.in_flight, backend=name)
    page.add("onebit_requests_queued", view.waiting, backend=name)
    page.add("onebit_request_body_bytes_total", counted.request_bytes, backend=name)
    page.add("onebit_response_body_bytes_total", counted.response_bytes, backend=name)
    if view.warm_prompts:
        for family, labels, value in warm_prompts.samples(view.warm_prompts):
            page.add(f"onebit_{family}", value, backend=name, **labels)


class _Families:
    """Samples by family, so that each family is one block with one HELP and one TYPE."""

    def __init__(self) -> None:
        self._samples: dict[str, list[str]] = {}
        self._types: dict[str, str] = {}
        self._helps: dict[str, str] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add one of our own samples."""
        self._types[name], self._helps[name] = FAMILIES[name]
        shown = ",".join(f'{key}="{_escaped(said)}"' for key, said in labels.items())
        line = f"{name}{{{shown}}} " if shown else f"{name} "
        self._samples.setdefault(name, []).append(line + _number(value))

    def add_own(self, backend: str, text: str) -> None:
        """Add what a backend says of itself; lines that are not in the format are left out."""
        family = ""
        label = f'backend="{_escaped(backend)}"'
        for line in text.splitlines():
            if meta := _META.fullmatch(line.strip()):
                kind, family, said = meta[1], meta[2], meta[3] or ""
                if kind == "HELP":
                    self._helps.setdefault(family, said)
                elif said in _TYPES:
                    self._types.setdefault(family, said)
                continue
            sample = _SAMPLE.fullmatch(line.strip())
            if sample is None or not _is_number(sample[3].split()[0]):
                continue
            name, labels = sample[1], sample[2] or ""
            if name.startswith("onebit_"):
                continue  # ours alone
            if name != family and name not in {family + part for part in _PARTS}:
                family = name
            kept = _BACKEND_LABEL.sub(r"\1exported_backend\2", labels)
            shown = f"{name}{{{label}{',' if kept else ''}{kept}}} {sample[3]}"
            self._samples.setdefault(family, []).append(shown)

    def text(self) -> bytes:
        """Return all of it."""
        return "".join(self._lines()).encode()

    def _lines(self) -> Iterable[str]:
        for family, samples in self._samples.items():
            if family in self._helps:
                yield f"# HELP {family} {self._helps[family]}\n"
            if family in self._types:
                yield f"# TYPE {family} {self._types[family]}\n"
            yield from (f"{sample}\n" for sample in samples)


def _escaped(value: str) -> str:
    # Prometheus' text format 0.0.4: these three, and a line has to stay one line.
    value = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return value.replace("\r", " ")


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))
    return f"{value:.12g}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
