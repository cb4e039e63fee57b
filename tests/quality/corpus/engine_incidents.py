"""Incidents of other engines than vLLM that show over time; those of a text alone are in
tests/fixtures/failures/engines.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvdiag.model import Capabilities
from tests.quality.corpus.incident import SERVER, WORKER, Record, Shape, kv_pool, lone, server
from tests.quality.corpus.recording import NOT_UP, Gpu, Holder, HostMemory, Pages, Recording, serving
from tests.quality.corpus.tape import GIB, MIB, Tape, Track, capped, highest, running_total, scaled, total

SGLANG = Capabilities(unit="token", late_seconds=31.0)
TRTLLM = Capabilities(on_completion=True)


def _named(recording: Recording, engine_name: str, **facts: Any) -> Recording:
    return replace(recording, facts={**recording.facts, "engine_name": engine_name, **facts})


def _tokens(count: int) -> Any:
    return replace(
        kv_pool(1.0), block_tokens=1, total_blocks=count + 1, usable_blocks=count, usage_blocks=count,
        capacity_tokens=count,
    )  # fmt: skip


def _front_end(tape: Tape) -> Recording:
    """The router's process grows with the load; no GPU."""
    demand = tape.traffic(0.6, swing=0.2)
    grown = running_total(scaled(demand, 1.6 * GIB * tape.tick_seconds / 3600.0 / 0.6))
    host = HostMemory(pid=SERVER, name="dynamo.frontend", anonymous=scaled(grown, 1.0, 615.0 * MIB))
    facts = {"engine_name": "dynamo", "host_limit_bytes": 32 * GIB}
    return Recording(tape=tape, host=(host,), facts=facts)


def _second_worker(tape: Tape) -> Recording:
    """The first worker has 90 % of what was free; the second, judged here, ends with its first request."""
    size = 81_559 * MIB
    own = tape.levels((0.0, 0.5 * GIB), (0.02, 4.2 * GIB), (0.06, 7.4 * GIB), (0.09, 0.0))
    holders = (
        Holder(pid=900, name="trtllm-worker", held=tape.flat(0.88 * size), own=False),
        Holder(pid=WORKER, name="trtllm-worker", held=own),
    )
    pages: Pages = [NOT_UP for _ in tape.hours]
    facts = {"engine_name": "trtllm", "weights_bytes": round(3.5 * GIB), "host_limit_bytes": 256 * GIB}
    return Recording(tape=tape, pages=pages, gpus=(Gpu(total_bytes=size, holders=holders),), facts=facts)


def _llama(tape: Tape, *, host: Track, gpu: Track, total_gib: float, limit_gib: float | None = 64.0) -> Recording:
    one = lone(tape, name="llama-server", host=host, gpu=gpu, total_gib=total_gib, host_limit_gib=limit_gib)
    return _named(one, "llamacpp")


def _rpc(tape: Tape) -> Recording:
    """One graph for each graph that is sent, on unified memory: full in two and a half minutes."""
    gpu = capped(total(tape.line(40.0 * GIB * 24.0, start=16.0 * GIB), tape.noise(80.0 * MIB)), 119.0 * GIB)
    one = lone(tape, name="rpc-server", host=tape.flat(2.0 * GIB), gpu=gpu, total_gib=119.6, host_limit_gib=None)
    return _named(one, "llamacpp")


def _turns(tape: Tape) -> Recording:
    """Each turn of a conversation keeps its graphs."""
    grown = running_total(tape.events(60.0), by=8.0 * MIB)
    return _llama(
        tape, host=tape.flat(5.0 * GIB), gpu=capped(scaled(grown, 1.0, 11.0 * GIB), 15.8 * GIB), total_gib=16.0
    )


def _jetson(tape: Tape) -> Recording:
    """3 MB with each request, on a host that has the GPU's memory, too."""
    demand = tape.pauses(tape.traffic(0.6, swing=0.1), every=2.0, lasting=0.3)
    grown = running_total(tape.events([180.0 * value for value in demand]), by=3.0e6)
    return _llama(
        tape,
        host=capped(scaled(grown, 1.0, 1.2 * GIB), 6.9 * GIB),
        gpu=tape.flat(2.2 * GIB),
        total_gib=7.4,
        limit_gib=7.4,
    )


def _sequences(tape: Tape) -> Recording:
    """KV memory is taken sequence by sequence; each of four ranks creeps up to its limit and dies."""
    shape = Shape(gpus=4, total_bytes=40 * GIB, weights_bytes=35 * GIB, engine_name="lmdeploy", asked=None, pool=None,
                  version="0.0.10", fraction=0.9)  # fmt: skip
    grown = [highest(total(tape.line(0.4 * GIB), tape.noise(10.0 * MIB, 2.0))) for _ in range(4)]
    recording = server(tape, shape, grown=grown, demand=tape.traffic(0.7, swing=0.0))
    return replace(recording, pages=None)


def _vision_spike(tape: Tape) -> Recording:
    shape = Shape(engine_name="lmdeploy", asked=None, version="0.4.0", fraction=77.0 / 80.0)
    recording = server(tape, shape)
    pages: Pages = [
        NOT_UP if hour > 0.05 else page for hour, page in zip(tape.hours, recording.pages or (), strict=True)
    ]
    held = tape.levels((0.0, 77.0 * GIB), (0.01, 79.0 * GIB), (0.05, 0.0))
    card = replace(recording.gpus[0], holders=(replace(recording.gpus[0].holders[0], held=held),))
    return replace(recording, pages=pages, gpus=(card,))


def _vision_twice(tape: Tape) -> Recording:
    """The vision-language model whole on both ranks: 17 GB on each where half of it was due."""
    holders = [tape.levels((0.0, 0.5 * GIB), (0.05, 8.4 * GIB), (0.1, 17.4 * GIB)) for _ in range(2)]
    cards = tuple(
        Gpu(total_bytes=24 * GIB, holders=(Holder(pid=WORKER + rank, name="lmdeploy", held=held),))
        for rank, held in enumerate(holders)
    )
    facts = {
        "engine_name": "lmdeploy",
        "weights_bytes": 17 * 10**9,
        "tensor_parallel": 2,
        "host_limit_bytes": 256 * GIB,
    }
    return Recording(tape=tape, gpus=cards, facts=facts)


MODEL_MIB = (48_928.09, 70_752.48, 71_680.09, 52_215.3, 45_108.64, 46_036.25, 28_426.68, 2_204.0)


def _layers(tape: Tape) -> Recording:
    """Layers placed by an estimate: one process on eight GPUs, which dies when the KV cache is added."""
    cards = tuple(
        Gpu(
            total_bytes=80 * GIB,
            holders=(
                Holder(pid=SERVER, name="ollama_llama_server", held=tape.levels((0.0, 0.4 * GIB), (0.05, mib * MIB))),
            ),
        )
        for mib in MODEL_MIB
    )
    return Recording(tape=tape, gpus=cards, facts={"engine_name": "ollama", "host_limit_bytes": 512 * GIB})


def _rank_zero(tape: Tape) -> Recording:
    shape = Shape(gpus=8, total_bytes=96 * GIB, weights_bytes=28 * GIB, engine_name="sglang", asked=None,
                  version="0.5.6", fraction=0.72)  # fmt: skip
    recording = server(tape, shape, capabilities=SGLANG)
    cards = list(recording.gpus)
    extra = Holder(pid=WORKER + 20, name="sglang::scheduler_TP0", held=tape.levels((0.1, 20.0 * GIB)))
    cards[0] = replace(cards[0], holders=(*cards[0].holders, extra))
    return replace(recording, gpus=tuple(cards))


def _seven_tokens(tape: Tape) -> Recording:
    shape = Shape(pool=_tokens(961_593), engine_name="sglang", asked=None, version="0.4.6")
    demand = tape.pauses(tape.traffic(), every=1.0, lasting=0.3)
    pages = serving(tape, demand, shape.pool, request_tokens=900, held_blocks=tape.levels((0.4, 7.0)))
    return server(tape, shape, demand=demand, pages=pages, capabilities=SGLANG)


def _untracked(tape: Tape) -> Recording:
    """Blocks that stay allocated under a ramp of load; the gauges hold the last step between requests."""
    shape = Shape(pool=kv_pool(50.0, block_tokens=32), engine_name="trtllm", asked=None, version="1.3")
    demand = tape.pauses(tape.traffic(), every=1.0, lasting=0.25)
    kept = running_total(tape.events([30.0 if value else 0.0 for value in demand]), by=60.0)
    pages = serving(tape, demand, shape.pool, held_blocks=kept)
    return server(tape, shape, demand=demand, pages=pages, capabilities=TRTLLM)


ENGINE_INCIDENTS: Mapping[str, Record] = {
    "host-dynamo-11933": _front_end,
    "base-dynamo-5250": _second_worker,
    "dev-llama-20315": _rpc,
    "dev-llama-25835": _turns,
    "host-llama-27725": _jetson,
    "dev-lmdeploy-684": _sequences,
    "act-lmdeploy-1524": _vision_spike,
    "base-lmdeploy-1758": _vision_twice,
    "shard-ollama-9782": _layers,
    "shard-sglang-15871": _rank_zero,
    "kv-sglang-semipd": _seven_tokens,
    "kv-trtllm-15018": _untracked,
}
