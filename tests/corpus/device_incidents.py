"""Incidents of memory on the device: leaks in torch and beside it, holes, and spikes that met too little room."""

from __future__ import annotations

from dataclasses import replace

from kvdiag.model import FailedAllocation, Gap, ReservedSplit
from tests.corpus.incident import CORE, SERVER, WORKER, Incident, Shape, host_of, kv_pool, lone, server
from tests.corpus.recording import NOT_UP, Gpu, Holder, Pages, Recording, Torch, serving
from tests.corpus.tape import GIB, MIB, Tape, Track, capped, highest, running_total, scaled, total

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
        fits=stranded < 0.5,  # noqa: PLR2004 - most of it is in one piece
        unusable_ratio=stranded,
    )


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


def _starting(
    tape: Tape, shape: Shape, *, levels: tuple[tuple[float, float], ...], version: str | None = None
) -> Recording:
    """A server that never comes up: what it holds of each GPU by the minute."""
    held = tape.levels(*((minute / 60.0, gib * GIB) for minute, gib in levels))
    cards = shape.cards(tape)
    cards = tuple(replace(card, holders=(replace(card.holders[0], held=held),)) for card in cards)
    pages: Pages = [NOT_UP for _ in tape.hours]
    facts = shape.facts(pools=(), engine_version=version or shape.version, max_model_len_tokens=None)
    return Recording(tape=tape, pages=pages, gpus=cards, host=host_of(tape, grown={}, ranks=shape.gpus), facts=facts)


def _nccl_cumem(tape: Tape) -> Recording:
    shape = Shape(gpus=4, version="0.4.2")
    levels = ((0.0, 0.5), (1.0, 2.1), (2.0, 15.4), (5.0, 71.5), (7.0, 74.0), (8.0, 77.0), (9.0, 79.3), (10.0, 0.0))
    return _starting(tape, shape, levels=levels)


def _graphs(tape: Tape) -> Recording:
    shape = Shape(total_bytes=24 * GIB, weights_bytes=17 * GIB, version="0.29.1")
    levels = ((0.0, 0.4), (1.0, 17.9), (3.0, 20.2), (4.0, 23.1), (4.5, 23.25), (5.0, 23.4), (6.0, 0.0))
    return _starting(tape, shape, levels=levels)


def _no_estimate(tape: Tape) -> Recording:
    shape = Shape(version="0.27.0")
    levels = ((0.0, 0.5), (1.0, 16.0), (4.0, 77.8), (5.0, 78.6), (6.0, 79.4), (7.0, 0.0))
    return _starting(tape, shape, levels=levels)


def _symmetric(tape: Tape) -> Recording:
    shape = Shape(total_bytes=184 * GIB, weights_bytes=90 * GIB, engine_name="sglang", asked=None, version="0.5.9")
    levels = ((0.0, 0.6), (1.0, 92.0), (5.0, 181.3), (6.0, 0.0))
    return _starting(tape, shape, levels=levels)


def _crashing(
    tape: Tape, shape: Shape, *, at_hour: float, torch: tuple[Torch, ...] = (), grown: tuple[Track, ...] = ()
) -> Recording:
    """A server that serves until it dies; the page is refused from then on, and its memory is free."""
    recording = server(tape, shape, torch=torch, grown=grown)
    gone: Gap = NOT_UP
    pages: Pages = [
        gone if hour >= at_hour else page for hour, page in zip(tape.hours, recording.pages or (), strict=True)
    ]
    cards = tuple(
        replace(
            card,
            holders=tuple(
                replace(one, held=[0.0 if hour >= at_hour else size for hour, size in zip(tape.hours, one.held, strict=True)])
                for one in card.holders
            ),
        )
        for card in recording.gpus
    )  # fmt: skip
    return replace(recording, pages=pages, gpus=cards)


def _holes(tape: Tape, *, total_gib: float, live_gib: float, gap_gib: float, asked: int, free: int, served: bool = True) -> Recording:
    """Between live blocks lies what one allocation then cannot be made of; the process lives on for three minutes."""
    size = total_gib * GIB
    held = 1.0 - (free + 480.0 * MIB) / size
    shape = Shape(total_bytes=round(size), weights_bytes=round(live_gib * 0.6 * GIB), fraction=held,
                  pool=kv_pool(live_gib * 0.3, token_kib=32.0), version="0.17.0")  # fmt: skip
    gap = capped(total(tape.line(gap_gib * GIB / tape.hours[-1] * 1.3), tape.noise(0.02 * GIB * gap_gib, 3.0)), gap_gib * GIB)
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
    shape = Shape(gpus=8, total_bytes=180 * GIB, weights_bytes=118 * GIB, fraction=0.95, pool=kv_pool(22.0), version="0.28.0")
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


def _logprobs(tape: Tape) -> Recording:
    return _crashing(tape, Shape(version="0.8.4"), at_hour=2.9)


def _gonka(tape: Tape) -> Recording:
    """Eight deaths in a day, each followed by a start of six minutes."""
    shape = Shape(gpus=4, total_bytes=round(178.35 * GIB), weights_bytes=140 * GIB, fraction=0.979, version="0.20.0",
                  pool=kv_pool(24.0))  # fmt: skip
    deaths = [1.4 + 2.9 * number + tape.random.uniform(-0.8, 0.8) for number in range(8)]
    demand = tape.traffic(0.4)
    pages: Pages = [
        NOT_UP if any(at <= hour < at + 0.1 for at in deaths) else page
        for hour, page in zip(tape.hours, serving(tape, demand, shape.pool, restarts=deaths), strict=True)
    ]
    recording = server(tape, shape, demand=demand, pages=pages)
    cards = tuple(
        replace(card, holders=(_reborn(card.holders[0], tape, deaths),)) for card in recording.gpus
    )
    return replace(recording, gpus=cards)


def _reborn(one: Holder, tape: Tape, deaths: list[float]) -> Holder:
    held = [
        next((size * min((hour - at) / 0.1, 1.0) for at in reversed(deaths) if hour >= at), size)
        for hour, size in zip(tape.hours, one.held, strict=True)
    ]
    return replace(one, held=held)


def _long_inputs(tape: Tape) -> Recording:
    shape = Shape(gpus=8, fraction=0.94, engine_name="sglang", asked=None, version="0.4.6")
    return _crashing(tape, shape, at_hour=1.9)


def _second_run(tape: Tape) -> Recording:
    shape = Shape(total_bytes=24 * GIB, weights_bytes=13 * GIB, fraction=0.93, pool=kv_pool(7.0), engine_name="sglang", asked=None, version="0.1.9")
    recording = _crashing(tape, shape, at_hour=0.96)
    demand = tape.of(lambda hour: 0.9 if hour < 0.4 or hour > 0.6 else 0.0)
    pages: Pages = [
        NOT_UP if hour >= 0.96 else page
        for hour, page in zip(tape.hours, serving(tape, demand, shape.pool), strict=True)
    ]
    return replace(recording, pages=pages)


DEVICE_INCIDENTS = (
    Incident(
        id="dev-trtllm-318",
        reported="2 to 3 GB more in nvidia-smi with each submitted batch",
        assumed="a batch each ten minutes from 20 GiB of 80 on; no torch figures, no metrics page",
        record=_batches,
        hours=3.6,
    ),
    Incident(
        id="dev-sglang-pixel",
        reported="about 20 GB free at start, below 7 GB after 30 min, then OOM; torch allocated and reserved rise; "
        "the KV pool is static",
        assumed="26,000 MiB/h on each of eight GPUs of 96 GiB, in segments; readings each 15 s up to the end",
        record=_pixels,
        hours=0.77,
        tick_seconds=15.0,
    ),
    Incident(
        id="dev-whisper-encoder",
        reported="GPU memory grows with each audio request: one encoder output, kept; KV returns to 0 at idle",
        assumed="1,500 x 1,280 half floats a request, 1,100 requests an hour at full load, segments of 20 MiB",
        record=_whisper,
        hours=3.8,
    ),
    Incident(
        id="dev-encoder-noevict",
        reported="0.25 GB more in each training step, linear; empty_cache and sleep do not help",
        assumed="a step each six minutes, idle for half of it; no torch figures",
        record=_encoder,
        hours=8.0,
    ),
    Incident(
        id="dev-llama-dspark",
        reported="10 MB more with each cycle, 29 to 30 GB of 32 used",
        assumed="110 cycles an hour at random; no metrics page, no torch",
        record=_cycles,
        hours=2.0,
    ),
    Incident(
        id="dev-nccl-cumem",
        reported="CUDA graph capture takes much more memory since NCCL 2.19; OOM",
        assumed="TP4 on 80 GiB, 71.5 GiB before the capture; readings each 15 s",
        record=_nccl_cumem,
        hours=0.2,
        tick_seconds=15.0,
        text="dev-nccl-cumem",
    ),
    Incident(
        id="frag-pt-35901",
        reported="OOM with about half of the memory unusable; an 11.6 GB block split, 499 MB live in it",
        assumed="11.6 GiB live of 23.65, holes that grow over three hours, 2.5 GiB asked for",
        record=_pinned,
        hours=3.0,
        text="frag-pt-35901",
    ),
    Incident(
        id="frag-load-57440",
        reported="memory of weight loading stays in torch's cache: max-num-seqs 256 to 32",
        assumed="24 GiB of 180 reserved and not live on each of eight GPUs from the start on, releasable",
        record=_after_load,
        hours=2.0,
    ),
    Incident(
        id="frag-skyrl-1768",
        reported="OOM at step 2 with about 20 GiB reserved but unallocated, 8 x B200",
        assumed="one of the GPUs; 2 GiB asked for; holes that grow over three hours",
        record=_wake,
        hours=3.0,
        text="frag-skyrl-1768",
    ),
    Incident(
        id="frag-tgi-655",
        reported="memory grows with each request to 39.39 GiB with 9.64 GiB allocated; 1.49 MiB asked for, 3 MiB free",
        assumed="from 12 GiB in 7 h at low traffic; cudaMallocAsync as its maintainer says; no vLLM page",
        record=_async_pool,
        hours=7.0,
        text="frag-tgi-655",
    ),
    Incident(
        id="frag-vllm-37428",
        reported="384 MiB asked for, 329.87 MiB free, 18.40 GiB allocated, 402.27 MiB unallocated, 19.53 GiB in all",
        assumed="under full load for three hours; the holes grow meanwhile",
        record=_mixed_batches,
        hours=3.0,
        text="frag-vllm-37428",
    ),
    Incident(
        id="frag-sglang-109",
        reported="the second run of 800 requests after flush_cache runs out in flashinfer's cudaMallocAsync",
        assumed="two runs of 24 minutes, flat; it dies in the second",
        record=_second_run,
        hours=1.0,
        tick_seconds=30.0,
        text="frag-sglang-109",
    ),
    Incident(
        id="act-logprobs-5907",
        reported="OOM with prompt_logprobs: 8,192 tokens x 152k words = 7.5 GiB for a moment",
        assumed="three hours of flat memory before it",
        record=_logprobs,
        hours=3.0,
        text="act-logprobs-5907",
    ),
    Incident(
        id="act-gonka",
        reported="8 deaths in 24 h; 3.82 GiB asked for, 3.22 GiB free, 175.11 of 178.35 GiB in use",
        assumed="memory flat between deaths, starts of six minutes",
        record=_gonka,
        hours=24.0,
        tick_seconds=120.0,
        text="act-gonka",
    ),
    Incident(
        id="act-6027",
        reported="long inputs run out at run time under DP attention",
        assumed="eight GPUs, two hours of flat memory before it",
        record=_long_inputs,
        hours=2.0,
        text="act-6027",
    ),
    Incident(
        id="base-srt-172",
        reported="OOM at init: 4.00 GiB asked for, 2.21 GiB free, 181.77 of 184 GiB in use",
        assumed="levels of the start; readings each 15 s",
        record=_symmetric,
        hours=0.12,
        tick_seconds=15.0,
        text="base-srt-172",
    ),
    Incident(
        id="cg-57475",
        reported="OOM in graph capture: 136 MiB asked for, 120.88 MiB free, fraction 0.98, 24 GB",
        assumed="levels of the start; readings each 15 s",
        record=_graphs,
        hours=0.12,
        tick_seconds=15.0,
        text="cg-57475",
    ),
    Incident(
        id="cg-49224",
        reported="graph memory estimated at 0 GiB; OOM in capture_model()",
        assumed="levels of the start on 80 GiB; readings each 15 s",
        record=_no_estimate,
        hours=0.13,
        tick_seconds=15.0,
        text="cg-49224",
    ),
)
