"""A second process on the server's GPU."""

from __future__ import annotations

from tests.integration.gpu.figures import Figure, at_least, exactly
from tests.integration.gpu.scenario import Recorded, Scenario
from tests.integration.gpu.stage import Stage

SHARE_RATIO = 0.03
"""Of the device: more than `Limits.foreign_fault_ratio` is a fault."""


async def _play(stage: Stage) -> tuple[Figure, ...]:
    await stage.cycle()
    return ()


def _told(recorded: Recorded) -> tuple[Figure, ...]:
    sizes = [one.memory.total_bytes for one in recorded.last.devices or () if one.memory is not None]
    others = [line.bytes for line in recorded.diagnosis.ledger if line.component == "other_process"]
    # CUDA's total is somewhat smaller than NVML's.
    least = 0.95 * SHARE_RATIO * max(sizes, default=0)
    return (
        exactly("other processes in the ledger", len(others), 1, "processes"),
        at_least("held by it", sum(others), least, "bytes"),
    )


SCENARIO = Scenario(
    name="neighbour",
    about="another process has taken 3 % of the GPU",
    play=_play,
    expected={"baseline.foreign_memory": ("fault",)},
    measure=_told,
    neighbour_ratio=SHARE_RATIO,
)
