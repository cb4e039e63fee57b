"""Golden traces of the verdicts that no recorded run and no reported incident shows twice: made here, judged from disk.

python -m tests.golden.record    writes them again, for a change of the trace's format alone
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Facts, Mark, Sample, Timeline
from tests.builders.isolation_timeline import SALTLESS, Server, facts_of, probe
from tests.builders.runs import run
from tests.builders.series import timeline, torch_part
from tests.builders.values import GIB, MIB, OOM, pool
from tests.builders.worlds import TRAINING, World, facts

FOLDER = Path(__file__).parent / "traces" / "verdicts"
SUFFIX = ".jsonl.gz"

RUNS: Mapping[str, World] = MappingProxyType(
    {
        "torch-keeps-6-mib-a-request": World(agents=True, device_growth_bytes=6 * MIB, torch_growth_bytes=6 * MIB),
        "beside-torch-6-mib-a-request": World(agents=True, device_growth_bytes=6 * MIB),
        "training-on-the-same-gpu": World(foreign={0: (TRAINING,)}, device_bytes=48 * GIB),
        "held-by-no-process": World(zombie_bytes=2 * GIB),
        "weights-twice": World(overhead_bytes=7 * GIB, device_bytes=32 * GIB),
        "weights-twice-on-two-gpus": World(
            gpus=2, weights_bytes=20 * GIB, overhead_bytes=12 * GIB, device_bytes=64 * GIB
        ),
        "pool-for-half-a-context": World(pools=(pool(capacity_tokens=16_000),)),
        "pool-of-a-tenth": World(pools=(pool(usable_blocks=1024),)),
        "long-request-runs-out-of-memory": World(failing={"long_context": OOM}),
        "context-longer-than-the-pool": World(pools=(pool(capacity_tokens=20_000),)),
        "hundred-blocks-too-many": World(extra_blocks_per_request=100),
        "sixty-blocks-too-many-on-two-engines": World(
            pools=(pool("0"), pool("1")), gpus=2, extra_blocks_per_request=60
        ),
        "one-rank-2-gib-fuller": World(gpus=2, rank_extra_bytes={1: 2 * GIB}),
        "one-rank-of-four-fuller": World(gpus=4, rank_extra_bytes={0: 3 * GIB}),
        "first-touch-of-360-mib": World(first_touch_bytes=(180 * MIB, 120 * MIB, 60 * MIB)),
        "first-touch-of-two-requests": World(first_touch_bytes=(900 * MIB, 24 * MIB)),
    }
)
"""Active runs."""

PROBES: Mapping[str, Server] = MappingProxyType(
    {"salts-dropped-by-a-gateway": Server(hits=SALTLESS), "two-keys-share-a-cache": Server(other_key=True)}
)
"""Isolation probes."""


def cases() -> dict[str, tuple[Timeline, Facts]]:
    """Every trace's content by its name."""
    found = {name: (run(world), facts(world)) for name, world in RUNS.items()}
    watched = timeline("fast noise", hours=6.5, tick_seconds=60.0, leak_mb_per_hour=400.0, part=torch_part(live=True))
    probes = {name: (probe(server), facts_of(server)) for name, server in PROBES.items()}
    return {**found, **probes, "torch-grows-for-hours": (watched, facts(World()))}


def write() -> None:
    """Write every trace."""
    FOLDER.mkdir(exist_ok=True)
    for name, (seen, known) in cases().items():
        entries: list[Sample | Mark] = sorted([*seen.samples, *seen.marks], key=lambda entry: entry.at_seconds)
        with TraceWriter(FOLDER / f"{name}{SUFFIX}", known) as trace:
            for entry in entries:
                trace.add(entry)


if __name__ == "__main__":
    write()
