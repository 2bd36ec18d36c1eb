"""Plans of backends that no test starts."""

from __future__ import annotations

from typing import Any

from onebit_serve.core.plan import BackendPlan

__all__ = ["backend_plan"]


def backend_plan(**fields: Any) -> BackendPlan:
    """Return the plan of a llama-server called `b`, with other fields where they are given."""
    typical = {
        "name": "b",
        "served_id": "b",
        "device": "cpu",
        "kind": "llama-server",
        "role": "chat",
        "binary": "b",
        "model": "m",
        "arguments": (),
    }
    return BackendPlan(**typical | fields)
