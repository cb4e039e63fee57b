"""A vLLM general plugin: a server's processes sleep while they wait for each other.

vLLM's own spin for a second after each message (shm_broadcast.py: SpinCondition), which on two cores takes the time
from what they wait for, and from every other test.
"""

from __future__ import annotations

import time

PAUSE_SECONDS = 0.0005


def register() -> None:
    """Called once in every vLLM process."""
    # Here, not above: vLLM loads plugins while it is still importing itself.
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415

    shm_broadcast.sched_yield = lambda: time.sleep(PAUSE_SECONDS)
