"""Incidents of memory that was there in pieces, or kept by an allocator that did not need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvdiag.model import FailedAllocation, ReservedSplit
from tests.quality.corpus.incident import CORE, SERVER, WORKER, Record, Shape, kv_pool, lone, server
from tests.quality.corpus.recording import Recording, Torch
from tests.quality.corpus.tape import GIB, MIB, Tape, capped, highest, running_total, scaled, total

SEGMENT_BYTES = 20 * MIB


def split_of(live: int, reserved: int, *, stranded: float, asked: int, largest: int = 64 * MIB) -> ReservedSplit:
    """A gap of which a share lies between live blocks and the rest could go back to the driver."""
    gap = reserved - live
    between = round(gap * stranded)
    return ReservedSplit(
        age_seconds=20.0,
        reserved_bytes=reserved,
        live_bytes=live,
        pending_bytes=0,
        private_bytes=0,
        releasable_bytes=gap - between,
        stranded_bytes=between,
        largest_free_block_bytes=min(largest if stranded else gap, gap),
        pinned_segments=round(between / SEGMENT_BYTES),
        pinned_free_bytes=between,
        request_bytes=asked,
        fits=stranded < 0.5,
        unusable_ratio=stranded,
    )


def _holes(
    tape: Tape, *, total_gib: float, live_gib: float, gap_gib: float, asked: int, free: int, served: bool = True
) -> Recording:
    """Between live blocks lies what one allocation then cannot be made of; the process lives on for three minutes."""
    size = total_gib * GIB
    held = 1.0 - (free + 480.0 * MIB) / size
    shape = Shape(total_bytes=round(size), weights_bytes=round(live_gib * 0.6 * GIB), fraction=held,
                  pool=kv_pool(live_gib * 0.3, token_kib=32.0), version="0.17.0")  # fmt: skip
    gap = capped(
        total(tape.line(gap_gib * GIB / tape.hours[-1] * 1.3), tape.noise(0.02 * GIB * gap_gib, 3.0)), gap_gib * GIB
    )
    gap = [max(value, 0.0) for value in highest(gap)]
    fails = tape.hours[-4]
    found = split_of(round(live_gib * GIB), round((live_gib + gap_gib) * GIB), stranded=0.95, asked=asked)
    torch = Torch(
        pid=CORE,
        gpu=0,
        allocated=total(tape.flat(live_gib * GIB - 60.0 * MIB), capped(tape.noise(20.0 * MIB, 1.0), 60.0 * MIB)),
        reserved=scaled(gap, 1.0, live_gib * GIB),
        split=lambda live, reserved: split_of(live, reserved, stranded=0.95, asked=asked),
        fails_at_hour=fails,
        failure=FailedAllocation(age_seconds=0.0, asked_bytes=asked, free_bytes=free, split=found),
        retries=tape.of(lambda hour: 6.0 * max(hour - fails + 0.2, 0.0) * 10.0),
        title="VLLM::EngineCore",
    )
    if not served:
        one = lone(tape, name="python3", host=tape.flat(9.0 * GIB), gpu=tape.flat(held * size), total_gib=total_gib)
        return replace(one, torch=(replace(torch, pid=SERVER, title="python3"),))
    return server(tape, shape, torch=(torch,))


def _mixed_batches(tape: Tape) -> Recording:
    asked, free = 384 * MIB, 330 * MIB
    return _holes(tape, total_gib=19.53, live_gib=18.0, gap_gib=402.0 / 1024.0, asked=asked, free=free)


def _wake(tape: Tape) -> Recording:
    return _holes(tape, total_gib=178.35, live_gib=152.0, gap_gib=20.0, asked=2 * GIB, free=1126 * MIB)


def _pinned(tape: Tape) -> Recording:
    return _holes(tape, total_gib=23.65, live_gib=11.6, gap_gib=11.1, asked=2560 * MIB, free=120 * MIB, served=False)


def _async_pool(tape: Tape) -> Recording:
    demand = tape.traffic(0.15, swing=0.1)
    pool = total(running_total(scaled(demand, 26.8 * GIB / sum(demand))), tape.noise(30.0 * MIB))
    gpu = capped(scaled(highest(pool), 1.0, 12.0 * GIB), 38.9 * GIB)
    torch = Torch(
        pid=SERVER,
        gpu=0,
        allocated=tape.flat(9.64 * GIB),
        reserved=tape.flat(9.64 * GIB),
        backend="cudaMallocAsync",
        title="text-generation-server",
    )
    one = lone(tape, name="text-generation-server", host=tape.flat(14.0 * GIB), gpu=gpu, total_gib=39.39)
    return replace(one, torch=(torch,))


def _after_load(tape: Tape) -> Recording:
    shape = Shape(
        gpus=8, total_bytes=180 * GIB, weights_bytes=118 * GIB, fraction=0.95, pool=kv_pool(22.0), version="0.28.0"
    )
    torch = tuple(
        Torch(
            pid=WORKER + rank,
            gpu=rank,
            allocated=tape.flat(143.0 * GIB),
            reserved=tape.flat(167.0 * GIB),
            split=lambda live, reserved: split_of(live, reserved, stranded=0.05, asked=GIB),
            title=f"VLLM::Worker_TP{rank}",
        )
        for rank in range(8)
    )
    demand = tape.pauses(tape.traffic(), every=1.0, lasting=0.4)
    return server(tape, shape, demand=demand, torch=torch)


ALLOCATOR_INCIDENTS: Mapping[str, Record] = {
    "frag-pt-35901": _pinned,
    "frag-load-57440": _after_load,
    "frag-skyrl-1768": _wake,
    "frag-tgi-655": _async_pool,
    "frag-vllm-37428": _mixed_batches,
}
