"""Incidents in which device memory grew without end, in torch and beside it."""

from __future__ import annotations

from collections.abc import Mapping

from tests.quality.corpus.incident import CORE, WORKER, Record, Shape, kv_pool, lone, server
from tests.quality.corpus.recording import Recording, Torch, serving
from tests.quality.corpus.tape import GIB, MIB, Tape, capped, highest, running_total, scaled, total

SEGMENT_BYTES = 20 * MIB


def _batches(tape: Tape) -> Recording:
    grown = running_total([tape.random.uniform(2.0, 3.0) * GIB * (place % 10 == 9) for place in range(len(tape.hours))])
    gpu = capped(scaled(grown, 1.0, 20.0 * GIB), 79.4 * GIB)
    return lone(tape, name="python3", host=tape.flat(9.0 * GIB), gpu=gpu, total_gib=80.0)


def _pixels(tape: Tape) -> Recording:
    shape = Shape(gpus=8, total_bytes=96 * GIB, weights_bytes=18 * GIB, fraction=0.79, pool=kv_pool(50.0),
                  engine_name="sglang", asked=None, version="0.4.9.post6")  # fmt: skip
    grown = [total(tape.line(26_000.0 * MIB), tape.noise(150.0 * MIB, 1.0)) for _ in range(8)]
    grown = [[max(value, 0.0) for value in highest(track)] for track in grown]
    torch = tuple(
        Torch(
            pid=WORKER + rank,
            gpu=rank,
            allocated=scaled(track, 0.97, 72.0 * GIB),
            reserved=scaled(track, 1.0, 73.5 * GIB),
            title=f"sglang::scheduler_TP{rank}",
        )
        for rank, track in enumerate(grown)
    )
    return server(tape, shape, demand=tape.traffic(0.7, swing=0.0), grown=grown, torch=torch)


def _whisper(tape: Tape) -> Recording:
    shape = Shape(total_bytes=24 * GIB, weights_bytes=3 * GIB, fraction=0.6, pool=kv_pool(9.0), version="0.13.0")
    demand = tape.pauses(tape.traffic(0.5, swing=0.2), every=1.0, lasting=0.15)
    outputs = running_total(tape.events([1_100.0 * value for value in demand]), by=1500.0 * 1280.0 * 2.0)
    segments = [round(value / SEGMENT_BYTES + 0.5) * float(SEGMENT_BYTES) for value in outputs]
    live = 12.6 * GIB
    torch = Torch(
        pid=CORE,
        gpu=0,
        allocated=total(scaled(outputs, 1.0, live), scaled(demand, 40.0 * MIB)),
        reserved=scaled(segments, 1.0, live + 700.0 * MIB),
        title="VLLM::EngineCore",
    )
    pages = serving(tape, demand, shape.pool, most_running=8, request_tokens=600, requests_per_hour=1_100.0)
    return server(tape, shape, demand=demand, pages=pages, grown=(segments,), torch=(torch,))


def _encoder(tape: Tape) -> Recording:
    """One generate() a training step of six minutes, the weights of training beside it in turn."""
    shape = Shape(gpus=2, weights_bytes=16 * GIB, fraction=0.6, pool=kv_pool(28.0), version="0.11.0")
    demand = tape.pauses(tape.flat(0.8), every=0.1, lasting=0.05)
    steps = tape.of(lambda hour: int(hour * 10.0) * 0.25 * GIB)
    return server(tape, shape, demand=demand, grown=(steps, steps))


def _cycles(tape: Tape) -> Recording:
    gpu = running_total(tape.events(110.0), by=10.0 * MIB, start=29.0 * GIB)
    return lone(tape, name="llama-server", host=tape.flat(6.0 * GIB), gpu=capped(gpu, 31.3 * GIB), total_gib=32.0)


DEVICE_LEAKS: Mapping[str, Record] = {
    "dev-trtllm-318": _batches,
    "dev-sglang-pixel": _pixels,
    "dev-whisper-encoder": _whisper,
    "dev-encoder-noevict": _encoder,
    "dev-llama-dspark": _cycles,
}
