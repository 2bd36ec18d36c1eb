"""A stand-in for llama-server: it answers as llama-server does, and misbehaves on demand.

It stands alone (nothing of the rest of this package, nothing outside the standard library), loads
no model and starts in a few hundredths of a second. `docs/fake-backend.md` is its manual.

    knobs     what `FAKE_LLAMA` and `--fake-KEY` ask for
    options   llama-server's command line and help
    text      tokens, template and replies
    costs     what a shape costs the first time and later
    slots     slots, host cache, what is reused
    world     log, record, death, signals, grandchild
    engine    one request for text, step by step
    wire      HTTP on a socket
    replies   the shapes of the answers
    prompts   from bodies to token ids
    routes    the routes that do no work
    server    connections, work and its faults

It is a package, not one module, since all of that is about two thousand lines.
"""

from __future__ import annotations

from .main import main

__all__ = ["main"]
