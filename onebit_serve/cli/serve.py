"""`1bit serve`: from spawn to warm and ready, then serve."""

from __future__ import annotations

import os
import signal

from onebit_serve.cli.flags import ServeCommand
from onebit_serve.cli.prepare import prepare
from onebit_serve.core.plan import Plan

__all__ = ["serve"]

_HELP = """Start a model server, warm it up, say ready, serve it.

It is started as llama-server is: the same names work for the same things, and llama-server's other
options are passed on. /health says 200 once the model is loaded and warm, so that no client pays
one-time costs.

\b
  1bit serve -m model.gguf
  1bit serve -m model.gguf --device vulkan -c 16384 -p 8001
  1bit serve --embedded
"""


def _serve(words: tuple[str, ...]) -> int:
    # Until the event loop takes the signals over. A HUP has nothing to reload yet.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        return _start(words)
    except KeyboardInterrupt:  # the guards end what was spawned
        return 0


def _start(words: tuple[str, ...]) -> int:
    prepared = prepare(words, os.environ, starts=True)
    if prepared.request.dry_run:
        from onebit_serve.cli.show import describe_plan

        print(describe_plan(prepared.plan, os.environ))
        return 0
    from onebit_serve.live.listener import bind
    from onebit_serve.live.spawn import spawn_eager

    plan = prepared.plan
    # Bound before anything is spawned: a taken port is said at once, not after a long load.
    listener = bind(plan.server.host, plan.server.port)
    early = spawn_eager(plan)
    from onebit_serve.serve import run  # trio and the front door, while the children load

    def replan() -> Plan:
        return prepare(words, os.environ, starts=True, again=True).plan

    return run(plan, prepared.access, listener, replan, early)


serve = ServeCommand(
    "serve", callback=_serve, help=_HELP, short_help="Start a model server, warm it up, serve it."
)
