"""Reports of memory that only looked wrong: pools, caches with a bound, high-water marks, arenas."""

from collections.abc import Mapping
from dataclasses import replace
from math import exp

from tests.quality.corpus.allocation_incidents import split_of
from tests.quality.corpus.incident import SERVER, Record, Shape, kv_pool, lone, server
from tests.quality.corpus.recording import Holder, Recording, Torch
from tests.quality.corpus.tape import GIB, MIB, Tape, capped, highest, running_total, scaled, total

LLAMA = "llama-server"
CAP = 8_192.0 * MIB


def _shapes(tape: Tape) -> Recording:
    grown = tape.line(5_600.0 * MIB, end=0.75)
    host = total(scaled(grown, 1.0, 3.0 * GIB), tape.noise(8.0 * MIB, 4.0))
    return lone(tape, name="python3", host=host, gpu=tape.flat(12.0 * GIB), total_gib=24.0)


def _rerank(tape: Tape) -> Recording:
    """Identical calls for an hour, then distinct ones of 150 MB each up to the size limit."""
    first = capped(running_total(tape.events(60.0, end=1.0), by=6.8 * MIB), 68.0 * MIB)
    distinct = running_total(tape.events(60.0, begin=1.0), by=151.0 * MIB)
    host = total(capped(distinct, CAP + 620.0 * MIB), first, tape.noise(6.0 * MIB, 4.0))
    return lone(tape, name=LLAMA, host=scaled(host, 1.0, 1.4 * GIB), gpu=tape.flat(5.0 * GIB), total_gib=119.0)


def _spark(tape: Tape) -> Recording:
    shape = Shape(
        total_bytes=119 * GIB, weights_bytes=17 * GIB, pool=kv_pool(38.0), fraction=60_993.0 / 121_856.0, asked=0.8
    )
    grown = tape.of(lambda hour: (83_521.0 - 60_993.0) * MIB * (1.0 - exp(-hour / 1.0)))
    return server(tape, shape, grown=(grown,))


def _images(tape: Tape) -> Recording:
    """The tokenizer's process keeps the scratch of its largest image so far; nothing lives in it."""
    shape = Shape(
        weights_bytes=52 * GIB, pool=kv_pool(14.0), engine_name="sglang", asked=None, version="0.5.9", fraction=0.85
    )
    demand = tape.traffic(0.5)
    scratch = [value * tape.random.betavariate(1.3, 8.0) * 9.0 * GIB for value in demand]
    kept = highest(scratch)
    recording = server(tape, shape, demand=demand)
    held = scaled(kept, 1.0, 500.0 * MIB)
    card = replace(
        recording.gpus[0],
        holders=(*recording.gpus[0].holders, Holder(pid=SERVER, name="vllm", held=held)),
    )
    torch = Torch(
        pid=SERVER,
        gpu=0,
        allocated=tape.flat(0.0),
        reserved=kept,
        split=lambda live, reserved: split_of(live, reserved, stranded=0.0, asked=256 * MIB),
        title="vllm",
    )
    return replace(recording, gpus=(card,), torch=(torch,))


def _ollama(tape: Tape) -> Recording:
    """27 prompts of 273 MiB on average fill the cache within its first hours."""
    filled = capped(running_total(tape.events(9.0), by=273.0 * MIB), 7_378.0 * MIB)
    host = total(scaled(filled, 1.0, 0.9 * GIB), tape.noise(5.0 * MIB, 4.0))
    recording = lone(tape, name=LLAMA, host=host, gpu=tape.flat(9.6 * GIB), total_gib=16.0)
    return replace(recording, host=(replace(recording.host[0], file_bytes=1_100 * MIB),))


def _arenas(tape: Tape) -> Recording:
    """Requests of drawn sizes; the heap keeps its records, and model loads leave their arenas."""
    demand = tape.traffic(0.5)
    records = highest([1.5 * GIB * value * tape.random.betavariate(2.0, 5.0) for value in demand])
    loads = capped(running_total(tape.events(0.5), by=180.0 * MIB), 720.0 * MIB)
    host = total(records, loads, tape.noise(25.0 * MIB, 6.0))
    return lone(tape, name="tritonserver", host=scaled(host, 1.0, 4.0 * GIB), gpu=tape.flat(14.0 * GIB), total_gib=24.0)


def _trimmed(tape: Tape) -> Recording:
    """A burst of 960 aborts each ten minutes, 66 MiB each; malloc_trim(0) after 4.7 h."""
    bursts = tape.of(lambda hour: 66.0 * MIB * int(hour * 6.0) if hour < 4.7 else 0.0)
    level = tape.of(lambda hour: 1_240.0 * MIB if hour < 4.7 else 1_077.0 * MIB)
    host = total(bursts, level, tape.noise(4.0 * MIB, 4.0))
    return lone(tape, name="vllm-omni", host=host, gpu=tape.flat(19.0 * GIB), total_gib=23.0, host_limit_gib=16.0)


def _workspace(tape: Tape) -> Recording:
    live = tape.levels((0.0, 2.0 * MIB), (0.05, 2.0 * MIB + 8_519_680.0))
    reserved = tape.levels((0.0, 2.0 * MIB), (0.05, 22.0 * MIB))
    held = scaled(reserved, 1.0, 420.0 * MIB)
    one = lone(tape, name="python3", host=tape.flat(2.4 * GIB), gpu=held, total_gib=24.0)
    return replace(one, torch=(Torch(pid=SERVER, gpu=0, allocated=live, reserved=reserved, title="python3"),))


def _trtllm(tape: Tape) -> Recording:
    shape = Shape(total_bytes=40 * GIB, weights_bytes=10 * GIB, engine_name="tensorrt-llm", asked=None, version="0.7.1")
    cards = shape.cards(tape)
    held = tape.flat(28.0 * GIB)
    card = replace(cards[0], holders=(replace(cards[0].holders[0], name="tritonserver", held=held),))
    pool = kv_pool(16.0, pool_bytes=16 * GIB, memory_fraction_ratio=None)
    recording = server(tape, shape, pools=(pool,))
    return replace(recording, gpus=(card,))


def _per_token(tape: Tape) -> Recording:
    """17,068 KiB with each finished request, a request a minute, up to the size limit of 8,192 MiB."""
    cached = capped(running_total(tape.events(60.0), by=17_068.0 * 1024.0), CAP)
    host = total(scaled(cached, 1.0, 1.1 * GIB), tape.noise(4.0 * MIB, 4.0))
    return lone(tape, name=LLAMA, host=host, gpu=tape.flat(9.0 * GIB), total_gib=24.0)


def _vicuna(tape: Tape) -> Recording:
    shape = Shape(total_bytes=24 * GIB, weights_bytes=round(12.6 * GIB), version="0.1.0",
                  pool=kv_pool(7.6, token_kib=512.0), fraction=23_000.0 / 24_576.0,
                  asked=0.9, max_model_len_tokens=2_048)  # fmt: skip
    return server(tape, shape)


def _excess(tape: Tape) -> Recording:
    return server(tape, Shape(version="0.6.4", fraction=0.9 + 600.0 / 81_920.0, asked=0.9))


def _context(tape: Tape) -> Recording:
    live = tape.levels((0.0, 40.0 * MIB), (0.2, 0.0))
    reserved = tape.levels((0.0, 62.0 * MIB), (0.2, 0.0))
    held = tape.levels((0.0, 1_167.0 * MIB), (0.2, 1_105.0 * MIB))
    one = lone(tape, name="python3", host=tape.flat(2.4 * GIB), gpu=held, total_gib=11.0)
    return replace(one, torch=(Torch(pid=SERVER, gpu=0, allocated=live, reserved=reserved, title="python3"),))


def _opt(tape: Tape) -> Recording:
    shape = Shape(total_bytes=24 * GIB, weights_bytes=250 * MIB, pool=kv_pool(18.6, token_kib=36.0), version="0.4.2",
                  fraction=20.4 / 24.0, asked=0.9, max_model_len_tokens=2_048)  # fmt: skip
    return server(tape, shape)


BENIGN_INCIDENTS: Mapping[str, Record] = {
    "fa-triton-shapes": _shapes,
    "fa-rerank-ab": _rerank,
    "fa-spark-43": _spark,
    "frag-tok-36295": _images,
    "fa-ollama-cacheram": _ollama,
    "fa-triton-malloc": _arenas,
    "fa-glibc-arena": _trimmed,
    "fa-pt-95668": _workspace,
    "fa-trtllm-732": _trtllm,
    "fa-llamacpp-cacheram": _per_token,
    "fa-235": _vicuna,
    "fa-vllm-10637": _excess,
    "fa-pt-60150": _context,
    "fa-4723": _opt,
}
