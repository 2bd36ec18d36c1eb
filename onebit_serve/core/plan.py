"""From configuration and facts to what will be run: commands, environment, warm-up, order."""

from __future__ import annotations

from typing import Literal

import msgspec

from onebit_serve.core.config import Log, Server

__all__ = ["BackendPlan", "Kind", "Plan", "Role", "WarmUp"]

Kind = Literal["llama-server", "zinc", "mlx"]
Role = Literal["chat", "embedding", "rerank"]


class WarmUp(msgspec.Struct, frozen=True):
    """The synthetic request that a backend gets between load and ready.

    Args:
        prompt_tokens: Tokens of its prompt; sized down where the context is smaller.
        decode_tokens: Tokens it generates.
        deadline_s: Seconds until a warm-up that still progresses is cancelled, its retry included.
        hang_s: Seconds without any progress after which the backend counts as hung; 0 is never.
        skip: Why there is none (`cpu`, `off`), or empty.
    """

    prompt_tokens: int = 465
    decode_tokens: int = 8
    deadline_s: float = 300.0
    hang_s: float = 120.0
    skip: str = ""


class BackendPlan(msgspec.Struct, frozen=True):
    """One backend as it will be started.

    Args:
        name: Its name in status, logs and the admin routes; unique in a plan.
        served_id: The model id that clients see.
        device: The word that log lines use (`hrx`, `vulkan`, `rocm`, `cpu`, `zinc`, `mlx`, or a
            listed name such as `CUDA0`).
        kind: What program it is, and so which protocol details hold.
        role: What the model is for.
        binary: The program, absolute.
        model: The model as the command line names it.
        arguments: Its command line without the program; `{port}` stands for the port.
        set_env: Variables added to the user's environment.
        unset_env: Variables of the user's environment that the child must not see.
        warm_up: The warm-up of spec section 5, step 1.
        upstream_model: For zinc and mlx only: the id to put into `model` on the way in ("" removes
            the key); `None` leaves bodies unchanged.
        assemble: Replies that don't stream are asked for as streams and put together here, since
            this build does not notice a client that leaves otherwise.
    """

    name: str
    served_id: str
    device: str
    kind: Kind
    role: Role
    binary: str
    model: str
    arguments: tuple[str, ...]
    set_env: dict[str, str] = {}
    unset_env: tuple[str, ...] = ()
    warm_up: WarmUp = WarmUp()
    upstream_model: str | None = None
    assemble: bool = False

    def command(self, port: int) -> list[str]:
        """Return the whole command line for one port."""
        return [self.binary, *(a.replace("{port}", str(port)) for a in self.arguments)]


class Plan(msgspec.Struct, frozen=True):
    """All that one run of `1bit serve` needs to know.

    Args:
        server: The front door's settings; port 0 takes a free one.
        log: How and where to log.
        backends: In order of start; they are stopped in reverse.
    """

    server: Server
    log: Log
    backends: tuple[BackendPlan, ...]
