"""What is planned and refused by this version: one table of flags and keys."""

from __future__ import annotations

import msgspec

__all__ = ["NOT_YET", "Later"]


class Later(msgspec.Struct, frozen=True):
    """Something that is planned; this version refuses it with exit code 2.

    Args:
        keys: `table.key` each; refused where the value is not the default.
        flags: Flags and the values each takes.
        instead: What to do until then.
    """

    keys: tuple[str, ...] = ()
    flags: dict[str, int] = {}
    instead: str = ""


# Delete a row when its feature is there; flags, keys and variables work from then on.
NOT_YET: tuple[Later, ...] = (
    Later(flags={"--lean": 0}),
    Later(flags={"--adaptive": 0, "--adaptive-at": 1}),
    Later(flags={"--embed": 1}, instead="serve the model alone: 1bit serve -m M.gguf --embedding"),
    Later(flags={"--rerank": 1}, instead="serve the model alone: 1bit serve -m M.gguf --reranking"),
)
