"""Every byte of the device on a line: while the server idles, and while a request runs."""

from __future__ import annotations

import asyncio

from tests.integration.gpu.figures import Figure, at_least
from tests.integration.gpu.scenario import Recorded, Scenario, ledger_figures
from tests.integration.gpu.stage import POOL_BYTES, WEIGHTS_BYTES, Stage, published_after

LOAD_SECONDS = 12.0
SEEN_SECONDS = 6.0
ACTIVATION_BYTES = 512 * 2**20


async def _idle(stage: Stage) -> tuple[Figure, ...]:
    await stage.cycle()
    return ()


async def _loaded(stage: Stage) -> tuple[Figure, ...]:
    await stage.cycle()
    stage.open_requests = 1
    working = asyncio.create_task(stage.server.tell("request", seconds=LOAD_SECONDS, activation_bytes=ACTIVATION_BYTES))
    begun_seconds = stage.clock.now_seconds()
    await stage.recorder.wait_for(lambda samples: published_after(samples, begun_seconds), SEEN_SECONDS)
    await stage.sampler.read_devices(processes=True)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return ()


def _with_the_request(recorded: Recorded) -> tuple[Figure, ...]:
    held = WEIGHTS_BYTES + POOL_BYTES + ACTIVATION_BYTES
    live = at_least("live, the request's activation among it", recorded.allocator.allocated_bytes, held, "bytes")
    return (live, *ledger_figures(recorded))


SCENARIOS = (
    Scenario(name="ledger_idle", about="nothing runs", play=_idle, measure=ledger_figures),
    Scenario(name="ledger_loaded", about="a request runs", play=_loaded, measure=_with_the_request),
)
