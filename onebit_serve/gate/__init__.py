"""The living half of the release gate; `core.gate` judges what is measured here.

evidence    the report directory, hashes, durations of earlier runs
serving     `1bit serve` as a child, and requests to it
identify    model, binary, device and driver, as a reference names them
requests    kat, kld, needle, reuse and warm, over HTTP
programs    placement (a probe process), ops (test-backend-ops), ring (the kernel log)
run         all models one after another, interrupts, the lock
"""

from __future__ import annotations

__all__: list[str] = []
