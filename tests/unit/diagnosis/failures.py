"""A process whose allocations torch refused, as the first and the last sample show it."""

from dataclasses import replace

from kvdiag.model import Facts, FailedAllocation
from tests.builders.values import GIB, MIB, allocator, split

SERVER = Facts(server_pids=(100, 101, 102))
FAILED = FailedAllocation(
    age_seconds=20.0,
    asked_bytes=3 * GIB,
    free_bytes=512 * MIB,
    split=split(
        live_bytes=7 * GIB, releasable_bytes=640 * MIB, stranded_bytes=384 * MIB, largest_free_block_bytes=128 * MIB
    ),
)
"""3 GiB asked of 512 MiB free, 640 releasable and 384 stranded: 1.5 GiB, so that 1.5 are short."""

FIRST = allocator(ooms_total=2, allocated_bytes=5 * GIB, title="VLLM::Worker_TP0")
REFUSED = replace(FIRST, ooms_total=5, allocated_bytes=6 * GIB, failure=FAILED)
