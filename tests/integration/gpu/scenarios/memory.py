"""Memory on a device: explained byte by byte, kept by each request, taken by others, and not enough."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from kvdiag.feeds.live.profiling import profile_processes
from kvdiag.model import Sample
from kvdiag.sources.agents.agent_profiles import ProfileFolder
from tests.integration.gpu.figures import Figure, at_least, at_most, exactly
from tests.integration.gpu.scenario import Recorded, Scenario, ledger_figures
from tests.integration.gpu.stage import POOL_BYTES, WEIGHTS_BYTES, Stage, StageError, published_after

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


CYCLES = 7
LEAK_BYTES = 48 * 2**20


def _leaking(command: str | None) -> Callable[[Stage], Awaitable[tuple[Figure, ...]]]:
    async def play(stage: Stage) -> tuple[Figure, ...]:
        faults: list[tuple[str, dict[str, object]]] = [] if command is None else [(command, {"size_bytes": LEAK_BYTES})]
        for _ in range(CYCLES):
            await stage.cycle(*faults)
        return ()

    return play


PROFILE_SECONDS = 12.0


async def _profiled(stage: Stage) -> tuple[Figure, ...]:
    """Requests that keep tensors, while torch records who allocates; the profile becomes a sample of the trace."""
    await stage.cycle()
    folder = ProfileFolder(stage.published)
    try:
        making = asyncio.create_task(profile_processes(folder, folder.processes(), "device", PROFILE_SECONDS))
        while not making.done():
            await stage.cycle(("keep", {"size_bytes": LEAK_BYTES}))
        made = await making
    finally:
        folder.close()
    if made[0].profile is None:
        raise StageError(made[0].problem or "no profile")
    stage.recorder.add(Sample(at_seconds=stage.clock.now_seconds(), profiles=(made[0].profile,)))
    return ()


def _named(recorded: Recorded) -> tuple[Figure, ...]:
    (found,) = recorded.diagnosis.profiles
    largest = found.profile.stacks[0]
    functions = {frame.function for frame in largest.frames}
    return (
        exactly("what the profile answers", found.answer, "named"),
        exactly("the keeping function in the largest stack", int("keep" in functions), 1, "stacks"),
        at_least("of the growth, in that stack", largest.bytes / max(found.traced_growth_bytes, 1), 0.9, "ratio"),
    )


SHARE_RATIO = 0.03
"""Of the device: more than `Limits.foreign_fault_ratio` is a fault."""


def _neighbours(recorded: Recorded) -> tuple[Figure, ...]:
    sizes = [one.memory.total_bytes for one in recorded.last.devices or () if one.memory is not None]
    others = [line.bytes for line in recorded.diagnosis.ledger if line.component == "other_process"]
    # CUDA's total is somewhat smaller than NVML's.
    least = 0.95 * SHARE_RATIO * max(sizes, default=0)
    return (
        exactly("other processes in the ledger", len(others), 1, "processes"),
        at_least("held by it", sum(others), least, "bytes"),
    )


GIB = 2**30
LEFT_BYTES = 2 * GIB
ASKED_BYTES = 4 * GIB
ROUNDING_BYTES = 20 * 2**20
CACHE_BYTES = 256 * 2**20
"""Torch gives its cache back before it gives up: the activation of the request before."""


async def _exhaust(stage: Stage) -> tuple[Figure, ...]:
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


def _recorded_failure(recorded: Recorded) -> tuple[Figure, ...]:
    failure = recorded.allocator.failure
    asked_bytes = 0 if failure is None else failure.asked_bytes
    return (
        at_most("asked, as the trace has it, beyond what was", abs(asked_bytes - ASKED_BYTES), ROUNDING_BYTES, "bytes"),
    )


SCENARIOS = (
    Scenario(name="ledger_idle", about="nothing runs", play=_idle, measure=ledger_figures),
    Scenario(name="ledger_loaded", about="a request runs", play=_loaded, measure=_with_the_request),
    Scenario(
        name="no_leak",
        about="equal requests, nothing kept",
        play=_leaking(None),
        expected={"leak.device_torch": ("ok",), "leak.device_non_torch": ("ok",), "fragmentation.allocator": ("ok",)},
    ),
    Scenario(
        name="tensor_leak",
        about="a tensor of each request is kept",
        play=_leaking("keep"),
        expected={"leak.device_torch": ("fault",), "leak.device_non_torch": ("ok",)},
    ),
    Scenario(
        name="tensor_profile",
        about="a tensor of each request is kept, and profiled",
        play=_profiled,
        measure=_named,
    ),
    Scenario(
        name="raw_leak",
        about="each request takes memory of the driver, past torch",
        play=_leaking("raw"),
        expected={"leak.device_torch": ("ok",), "leak.device_non_torch": ("fault",)},
    ),
)

BY_OTHERS = (
    Scenario(
        name="neighbour",
        about="another process has taken 3 % of the GPU",
        play=_idle,
        expected={"baseline.foreign_memory": ("fault",)},
        measure=_neighbours,
        neighbour_ratio=SHARE_RATIO,
    ),
    Scenario(
        name="out_of_memory",
        about="4 GiB asked for where 2 GiB are free",
        play=_exhaust,
        expected={"fragmentation.allocator": ("ok",)},
        measure=_recorded_failure,
    ),
)
