"""Reserved bytes that are not live: holes that strand memory, and what only looks like it."""

from collections.abc import Callable

from kvdiag.diagnosis.reserved_memory import confirmed
from tests.integration.gpu.figures import Figure, at_least, at_most, exactly
from tests.integration.gpu.scenario import Recorded, Scenario
from tests.integration.gpu.stage import Stage

MIB, GIB = 2**20, 2**30
TEETH = 48
HOLE_BYTES, TOOTH_BYTES = 64 * MIB, 2 * MIB
LEFT_BYTES = 200 * MIB
REQUEST_BYTES = 512 * MIB
GAP_BYTES = 3 * GIB
SLACK_RATIO = 0.9
"""Of what was freed on purpose has to be found: torch rounds segments up and cuts a little off."""


async def _comb(stage: Stage) -> tuple[Figure, ...]:
    await stage.cycle()
    await stage.server.tell("comb", teeth=TEETH, hole_bytes=HOLE_BYTES, tooth_bytes=TOOTH_BYTES)
    await stage.server.tell("fill", leave_bytes=LEFT_BYTES)
    await stage.server.tell("open")
    await stage.split()
    # The proof that nothing else can give: torch itself finds no room, or finds it.
    await stage.cycle(("ask", {"size_bytes": REQUEST_BYTES}))
    return ()


def _stranded(recorded: Recorded) -> tuple[Figure, ...]:
    return (
        at_least("stranded", _split(recorded, "stranded_bytes"), SLACK_RATIO * TEETH * HOLE_BYTES, "bytes"),
        at_least("requests that failed", _failed(recorded), 1, "requests"),
        exactly("confirmed by the black box", str(_confirmed(recorded)), "True"),
    )


def _confirmed(recorded: Recorded) -> bool:
    failure = recorded.allocator.failure
    return failure is not None and confirmed(failure)


def _served(recorded: Recorded) -> tuple[Figure, ...]:
    pages = TEETH * (HOLE_BYTES // (20 * MIB) - 1) * 20 * MIB
    return (
        at_least("releasable before the request", _most(recorded, "releasable_bytes"), SLACK_RATIO * pages, "bytes"),
        exactly("requests that failed", _failed(recorded), 0, "requests"),
    )


async def _cache(stage: Stage) -> tuple[Figure, ...]:
    await stage.cycle()
    await stage.server.tell("cache", size_bytes=GAP_BYTES, pieces=12)
    await stage.split()
    return ()


async def _graph(stage: Stage) -> tuple[Figure, ...]:
    await stage.cycle()
    await stage.server.tell("graph", size_bytes=GAP_BYTES)
    await stage.split()
    return ()


def _all_of_it(part: str) -> Callable[[Recorded], tuple[Figure, ...]]:
    """The gap is as large as it was made, this part has all of it, and none is stranded."""

    def measure(recorded: Recorded) -> tuple[Figure, ...]:
        return (
            at_least("gap", _gap(recorded), SLACK_RATIO * GAP_BYTES, "bytes"),
            at_least(part, _split(recorded, f"{part}_bytes"), SLACK_RATIO * GAP_BYTES, "bytes"),
            at_most("stranded", _split(recorded, "stranded_bytes"), (1 - SLACK_RATIO) * GAP_BYTES, "bytes"),
        )

    return measure


def _gap(recorded: Recorded) -> int:
    return recorded.allocator.reserved_bytes - recorded.allocator.allocated_bytes


def _split(recorded: Recorded, name: str) -> int:
    split = recorded.allocator.split
    return getattr(split, name) if split is not None else -1


def _most(recorded: Recorded, name: str) -> int:
    """The most that any split of the run had: a request that finds room uses it up."""
    splits = [each.split for sample in recorded.timeline.samples for each in sample.allocators or ()]
    return max((getattr(split, name) for split in splits if split is not None), default=-1)


def _failed(recorded: Recorded) -> int:
    spans = recorded.timeline.spans()
    return sum(span.outcome.failed for span in spans if span.outcome is not None)


SCENARIOS = (
    Scenario(
        name="comb",
        about="3 GiB free in holes of 64 MiB, 512 MiB asked for, 200 MiB free on the device",
        play=_comb,
        expected={"fragmentation.allocator": ("fault",)},
        measure=_stranded,
    ),
    Scenario(
        name="comb_expandable",
        about="the same with expandable segments, whose whole pages can go back",
        play=_comb,
        expected={"fragmentation.allocator": ("ok",)},
        measure=_served,
        torch_settings="expandable_segments:True",
    ),
    Scenario(
        name="releasable_cache",
        about="3 GiB freed in whole segments: cache, not fragmentation",
        play=_cache,
        expected={"fragmentation.allocator": ("ok",), "leak.device_torch": ("unknown", "ok")},
        measure=_all_of_it("releasable"),
    ),
    Scenario(
        name="graph_pool",
        about="3 GiB free in the pool of a CUDA graph",
        play=_graph,
        expected={"fragmentation.allocator": ("ok",)},
        measure=_all_of_it("private"),
    ),
)
