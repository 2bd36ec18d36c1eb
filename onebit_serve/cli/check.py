"""`1bit check`: everything that `1bit serve` would check, and what it would do; starts nothing."""

from __future__ import annotations

import os

from onebit_serve.cli.flags import ServeCommand
from onebit_serve.cli.prepare import prepare
from onebit_serve.cli.show import describe_found, describe_plan

__all__ = ["check"]

_HELP = """Check what `1bit serve` with the same options would find and do.

Looks at the configuration, the program, its devices (asked anew), the model's header and the port,
prints what was found and the plan, and starts nothing. Exits as `1bit serve` would: 2 for what
cannot be used, 3 for a port that is taken.
"""


def _check(words: tuple[str, ...]) -> int:
    prepared = prepare(words, os.environ, anew=True)
    print(describe_found(prepared))
    print(describe_plan(prepared.plan, os.environ))
    from onebit_serve.live.listener import bind

    server = prepared.plan.server
    bind(server.host, server.port).close()
    return 0


check = ServeCommand(
    "check", callback=_check, help=_HELP, short_help="Check a configuration; start nothing."
)
