"""The measuring instrument: `1bit bench-serve`, its `compare` and its `ab`.

    client         sockets and httptools: one streamed request and when its text came
    surroundings   what is known of the server and this machine; memory and processor time
    run            cells and waves of requests against one server
    arms           fresh servers per arm and load, interleaved
    plot           the picture of a comparison (matplotlib, an extra)

What is computed from the numbers is in `core`: score, results, cells, report, prompts.
"""

from __future__ import annotations
