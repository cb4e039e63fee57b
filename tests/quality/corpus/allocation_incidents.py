"""Incidents of torch's allocator, and those that ended in a crash."""

from collections.abc import Mapping
from dataclasses import replace

from kvdiag.model import FailedAllocation, Gap, ReservedSplit
from tests.quality.corpus.incident import CORE, SERVER, WORKER, Record, Shape, host_of, kv_pool, lone, server
from tests.quality.corpus.recording import NOT_UP, Holder, Pages, Recording, Torch, serving
from tests.quality.corpus.tape import GIB, MIB, Tape, Track, capped, highest, running_total, scaled, total

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
                replace(one, held=_until(one.held, tape, at_hour))
                for one in card.holders
            ),
        )
        for card in recording.gpus
    )  # fmt: skip
    return replace(recording, pages=pages, gpus=cards)


def _until(track: Track, tape: Tape, at_hour: float) -> Track:
    return [0.0 if hour >= at_hour else value for hour, value in zip(tape.hours, track, strict=True)]


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
    cards = tuple(replace(card, holders=(_reborn(card.holders[0], tape, deaths),)) for card in recording.gpus)
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
    shape = Shape(
        total_bytes=24 * GIB,
        weights_bytes=13 * GIB,
        fraction=0.93,
        pool=kv_pool(7.0),
        engine_name="sglang",
        asked=None,
        version="0.1.9",
    )
    recording = _crashing(tape, shape, at_hour=0.96)
    demand = tape.of(lambda hour: 0.9 if hour < 0.4 or hour > 0.6 else 0.0)
    pages: Pages = [
        NOT_UP if hour >= 0.96 else page
        for hour, page in zip(tape.hours, serving(tape, demand, shape.pool), strict=True)
    ]
    return replace(recording, pages=pages)


CRASH_INCIDENTS: Mapping[str, Record] = {
    "dev-nccl-cumem": _nccl_cumem,
    "frag-sglang-109": _second_run,
    "act-logprobs-5907": _logprobs,
    "act-gonka": _gonka,
    "act-6027": _long_inputs,
    "base-srt-172": _symmetric,
    "cg-57475": _graphs,
    "cg-49224": _no_estimate,
}
