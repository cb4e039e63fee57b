"""A real OutOfMemoryError: caught by the black box, and none the less thrown as it is."""

from __future__ import annotations

import json

from tests.integration.gpu.figures import Figure, at_most, exactly
from tests.integration.gpu.scenario import Recorded, Scenario
from tests.integration.gpu.stage import Stage, StageError

GIB = 2**30
LEFT_BYTES = 2 * GIB
ASKED_BYTES = 4 * GIB
ROUNDING_BYTES = 20 * 2**20
CACHE_BYTES = 256 * 2**20
"""Torch gives its cache back before it gives up: the activation of the request before."""


async def _play(stage: Stage) -> tuple[Figure, ...]:
    await stage.cycle()
    await stage.server.tell("fill", leave_bytes=LEFT_BYTES)
    # The black box is attached by the first publication after CUDA was initialised: it is there by now.
    answer = await stage.server.tell("ask", size_bytes=ASKED_BYTES)
    after = await stage.server.tell("ask", size_bytes=GIB)
    boxes = [json.loads(path.read_text()) for path in sorted(stage.published.glob("oom-*.json"))]
    await stage.cycle(("ask", {"size_bytes": ASKED_BYTES}))
    if not boxes:
        raise StageError("no black box was written")
    told = boxes[0]
    return (
        exactly("what the server was thrown", answer["kind"], "OutOfMemoryError"),
        exactly("the server goes on", after["error"] or "served", "served"),
        exactly("black boxes", len(boxes), 1, "files"),
        at_most("asked, beyond what was", abs(told["asked_bytes"] - ASKED_BYTES), ROUNDING_BYTES, "bytes"),
        at_most("free, by the black box", told["free_bytes"], LEFT_BYTES + CACHE_BYTES, "bytes"),
        exactly("devices in the black box", len(told["document"]["devices"]), 1, "devices"),
    )


def _told(recorded: Recorded) -> tuple[Figure, ...]:
    failure = recorded.allocator.failure
    asked_bytes = 0 if failure is None else failure.asked_bytes
    return (
        at_most("asked, as the trace has it, beyond what was", abs(asked_bytes - ASKED_BYTES), ROUNDING_BYTES, "bytes"),
    )


SCENARIO = Scenario(
    name="out_of_memory",
    about="4 GiB asked for where 2 GiB are free",
    play=_play,
    expected={"fragmentation.allocator": ("ok",)},
    measure=_told,
)
