"""What the agent costs its server: a publication, the interpreter's lock meanwhile, and steps of a decode-like loop."""

from __future__ import annotations

from tests.integration.gpu.figures import Figure, at_most
from tests.integration.gpu.scenario import Measurement, Run
from tests.integration.gpu.stage import POOL_BYTES, WEIGHTS_BYTES, subject
from tests.quality.bench.steps import Steps, compared

PUBLICATIONS = 300
WINDOWS = 24
WINDOW_SECONDS = 3.0
BRIEF = {"publications": 20, "windows": 4, "window_seconds": 0.1}

PUBLISH_SECONDS = 100e-6
GIL_SECONDS = 50e-6
LOOP_RATIO = 0.001


async def _measure(run: Run) -> tuple[Figure, ...]:
    usual = {"publications": PUBLICATIONS, "windows": WINDOWS, "window_seconds": WINDOW_SECONDS}
    # No folder: the one agent is that which is measured.
    async with subject(run.python, run.work, "cost", published=None, env={}) as process:
        await process.tell("start", weights_bytes=WEIGHTS_BYTES, pool_bytes=POOL_BYTES)
        told = await process.tell("cost", folder=str(run.work / "cost"), **(BRIEF if run.brief else usual))
    steps = compared(
        Steps(tuple(told["steps_nanoseconds"]["with"])), Steps(tuple(told["steps_nanoseconds"]["without"]))
    )
    return (
        at_most("publication", told["wall_seconds"] * 1e6, PUBLISH_SECONDS * 1e6, "us"),
        Figure(name="publication, processor time", value=told["busy_seconds"] * 1e6, unit="us"),
        at_most("interpreter held", told["gil_seconds"] * 1e6, GIL_SECONDS * 1e6, "us"),
        at_most("loop slowdown", steps.slower_ratio, LOOP_RATIO, "ratio"),
        at_most("steps delayed by the agent", steps.held_up_ratio, LOOP_RATIO, "ratio"),
        Figure(name="steps delayed without it", value=steps.held_up_anyway_ratio, unit="ratio"),
        Figure(name="step without the agent", value=steps.usual_seconds * 1e6, unit="us"),
        Figure(name="steps", value=steps.count, unit="steps"),
    )


SCENARIO = Measurement(name="cost", about="a publication a second beside a loop of small kernels", measure=_measure)
