"""Incidents in which memory grew without limit: host memory, and device memory in torch or outside it."""

from collections.abc import Mapping

from tests.quality.corpus.incident import CORE, SERVER, WORKER, Record, Shape, kv_pool, lone, server
from tests.quality.corpus.recording import HostMemory, Recording, Torch, serving
from tests.quality.corpus.tape import GIB, MIB, Tape, capped, highest, running_total, scaled, total

LLAMA = "llama-server"


def _ucx(tape: Tape) -> Recording:
    demand = tape.traffic(0.6)
    mean = sum(demand) / len(demand)
    per_tick = 400.0 * MIB * tape.tick_seconds / 60.0
    grown = running_total(scaled(demand, per_tick / mean))
    return server(tape, demand=demand, host_grown={CORE: grown}, host_limit_bytes=128 * GIB)


def _nccl(tape: Tape) -> Recording:
    grown = total(tape.line(640.0 * 160.0 * 3600.0), tape.noise(8.0 * MIB, 4.0))
    return lone(tape, name="python", host=scaled(grown, 1.0, 6.0 * GIB), gpu=tape.flat(18.0 * GIB), total_gib=24.0)


def _tgi(tape: Tape) -> Recording:
    demand = tape.traffic(0.6)
    grown = running_total(scaled(demand, 3.8 * GIB * tape.tick_seconds / 3600.0 / 0.6))
    host = total(scaled(grown, 1.0, 14.0 * GIB), tape.noise(60.0 * MIB, 3.0), scaled(demand, 400.0 * MIB))
    return lone(
        tape,
        name="text-generation-server",
        host=capped(host, 63.5 * GIB),
        gpu=tape.flat(45.6 * GIB),
        total_gib=48.0,
        host_limit_gib=64.0,
    )


def _per_request(tape: Tape, *, kib: float, per_hour: float, shape: Shape, pid: int) -> Recording:
    """A leak of so many KiB with each request, under traffic."""
    demand = tape.traffic(0.6, swing=0.2)
    done = running_total(tape.events(scaled(demand, per_hour / 0.6)))
    pages = serving(tape, demand, shape.pool, requests_per_hour=per_hour)
    return server(tape, shape, demand=demand, pages=pages, host_grown={pid: scaled(done, kib * 1024.0)})


def _n_gt_1(tape: Tape) -> Recording:
    return _per_request(tape, kib=48.0, per_hour=14_400.0, shape=Shape(version="0.7.2"), pid=SERVER)


def _embed(tape: Tape) -> Recording:
    shape = Shape(engine_name="sglang", asked=None, version="0.4.6", host_limit_bytes=64 * GIB)
    return _per_request(tape, kib=130.0, per_hour=36_000.0, shape=shape, pid=CORE)


def _pipeline(tape: Tape) -> Recording:
    shape = Shape(gpus=2, total_bytes=24 * GIB, weights_bytes=12 * GIB, version="0.21.1.dev")
    demand = tape.pauses(tape.flat(0.2), every=1.0, lasting=0.25)
    requests = tape.events([40.0 if value else 0.0 for value in demand])
    per_request = [count * tape.random.uniform(23.0, 40.0) * MIB for count in requests]
    pages = serving(tape, demand, shape.pool, most_running=5, requests_per_hour=200.0)
    return server(tape, shape, demand=demand, pages=pages, host_grown={WORKER: running_total(per_request)})


def _graph_nccl(tape: Tape) -> Recording:
    shape = Shape(gpus=8, weights_bytes=11 * GIB, version="0.2.7", host_limit_bytes=512 * GIB)
    demand = tape.traffic(0.9, swing=0.0, bursts=0.05)
    grown = {WORKER + rank: total(tape.line(6.8 * GIB), tape.noise(30.0 * MIB, 5.0)) for rank in range(8)}
    pages = serving(tape, demand, shape.pool, most_running=192, request_tokens=900, requests_per_hour=2_500.0)
    return server(tape, shape, demand=demand, pages=pages, host_grown=grown)


def _cache_ram(tape: Tape) -> Recording:
    states = running_total(tape.events(45_000.0 / 354.0), by=354.0 * MIB)
    host = total(scaled(states, 1.0, 3.0 * GIB), tape.noise(20.0 * MIB, 4.0))
    return lone(tape, name=LLAMA, host=host, gpu=tape.flat(88.0 * GIB), total_gib=96.0, host_limit_gib=768.0)


def _one_token(tape: Tape) -> Recording:
    demand = tape.flat(0.5)
    done = running_total(tape.events(180_000.0))
    shape = Shape(version="0.6.6")
    pages = serving(tape, demand, shape.pool, request_tokens=400, requests_per_hour=360_000.0)
    return server(tape, shape, demand=demand, pages=pages, host_grown={CORE: scaled(done, 4_000.0)})


def _block_ids(tape: Tape) -> Recording:
    shape = Shape(weights_bytes=2 * GIB, version="0.22.0")
    demand = tape.flat(0.25)
    pages = serving(tape, demand, shape.pool, request_tokens=300, requests_per_hour=2_000_000.0)
    done = running_total(tape.events(500_000.0))
    grown = scaled(done, 570.0 * 1.024 * MIB / 6_000_000.0)
    recording = server(tape, shape, demand=demand, pages=pages)
    host = tuple(
        one if one.pid != CORE else HostMemory(pid=CORE, name=one.name, anonymous=_from_six(tape, grown))
        for one in recording.host
    )
    return Recording(tape=tape, pages=recording.pages, gpus=recording.gpus, host=host, facts=recording.facts)


def _from_six(tape: Tape, grown: list[float]) -> list[float]:
    return total(scaled(grown, 1.0, 6.0 * GIB), tape.noise(6.0 * MIB, 4.0))


def _schemas(tape: Tape) -> Recording:
    jumps = [tape.random.uniform(0.9, 1.5) * GIB * count for count in tape.events(20.0)]
    return server(tape, host_grown={CORE: capped(running_total(jumps), 118.0 * GIB)}, host_limit_bytes=128 * GIB)


HOST_LEAKS: Mapping[str, Record] = {
    "host-ucx-nixl": _ucx,
    "host-nccl-ws1": _nccl,
    "host-tgi-974": _tgi,
    "host-n-gt-1": _n_gt_1,
    "host-sglang-embed": _embed,
    "host-llm-scaler-pp": _pipeline,
    "host-cudagraph-nccl": _graph_nccl,
    "host-ik-cacheram": _cache_ram,
    "host-max-tokens-1": _one_token,
    "host-new-block-ids": _block_ids,
    "host-outlines-fsm": _schemas,
}


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
    """One generate() per training step of six minutes, alternating with the training weights on the same GPUs."""
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
