"""The judging half of the release gate: what was measured goes in, a verdict comes out.

    config      hw-gate.toml -> what to run
    verdict     PASS | FAIL | NOT RUN, and the exit code of a whole run
    reference   what `--record` stores, and when a stored one may be used
    tokens      kat: known answers token by token
    kld         next-token distributions against stored ones
    placement   the scheduler's debug output of a llama-server
    needle      prompts with a fact inside, and what counts as having found it
    ops         the output of test-backend-ops
    ring        amdgpu ring timeouts and resets in a kernel log
    reuse       a warmed prefix against the same prompt evaluated anew
    warm        request 1 against the best of the requests after it
    report      JSON, Markdown and JUnit

Nothing here opens a file, a socket or a process.
"""

from __future__ import annotations

__all__: list[str] = []
