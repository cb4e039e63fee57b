"""Incidents of KV blocks: held without a request, wasted, or too few."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvdiag.model import Engine, Gap, KvPool
from tests.quality.corpus.incident import Record, Shape, kv_pool, server
from tests.quality.corpus.recording import Pages, Recording, engine, serving
from tests.quality.corpus.tape import GIB, Tape, running_total, scaled

IMPOSSIBLE = Gap(source="engine", kind="failed", reason="kv_cache_usage_perc is 1.355, not within 0..1")


def _units(blocks: int, *, block_tokens: int = 16, **changes: int) -> KvPool:
    """A pool of so many blocks."""
    return replace(
        kv_pool(1.0),
        block_tokens=block_tokens,
        total_blocks=blocks + 1,
        usable_blocks=blocks,
        usage_blocks=blocks,
        capacity_tokens=changes.get("capacity_tokens", blocks * block_tokens),
    )


def _over_full(tape: Tape) -> Recording:
    shape = Shape(pool=kv_pool(40.0), engine_name="xllm", asked=None, version=None)
    demand = tape.pauses(tape.traffic(), every=1.0, lasting=0.2)
    blocks = shape.pool.usable_blocks if shape.pool is not None else 0
    kept = scaled(running_total(demand), 1.355 * blocks / sum(demand))
    pages: Pages = list(serving(tape, demand, shape.pool, held_blocks=kept))
    pages = [IMPOSSIBLE if held > blocks else page for page, held in zip(pages, kept, strict=True)]
    return server(tape, shape, pages=pages)


def _slots(tape: Tape) -> Recording:
    shape = Shape(pool=_units(454, block_tokens=4096), engine_name="sglang", asked=None, version="0.5.6")
    demand = tape.pauses(tape.traffic(), every=1.5, lasting=0.5)
    pages = serving(tape, demand, shape.pool, request_tokens=4096, held_blocks=tape.levels((2.2, 1.0)))
    return server(tape, shape, pages=pages)


def _missing_tokens(tape: Tape) -> Recording:
    shape = Shape(pool=_units(270_331, block_tokens=1), engine_name="sglang", asked=None, version="0.5.3.post3")
    demand = tape.of(lambda hour: 0.9 if hour < 1.0 else 0.0)
    pages = serving(
        tape, demand, shape.pool, most_running=256, request_tokens=900, held_blocks=tape.levels((0.8, 59.0))
    )
    return server(tape, shape, pages=pages)


def _pinned(tape: Tape) -> Recording:
    """Three mass cancels, each of which pins its blocks for the 480 s of the connector's timeout."""
    shape = Shape(pool=kv_pool(50.0), version="0.11.2")
    cancels = (1.0, 2.5, 4.0)
    demand = tape.of(lambda hour: 0.0 if any(at <= hour < at + 0.3 for at in cancels) else 0.5)
    blocks = shape.pool.usable_blocks if shape.pool is not None else 0
    kept = tape.of(lambda hour: 0.6 * blocks if any(at <= hour < at + 480.0 / 3600.0 for at in cancels) else 0.0)
    return server(tape, shape, pages=serving(tape, demand, shape.pool, held_blocks=kept))


def _aborts(tape: Tape) -> Recording:
    shape = Shape(pool=kv_pool(50.0), version="0.22.0")
    demand = tape.pauses(tape.traffic(), every=1.0, lasting=0.25)
    aborted = running_total(tape.events([12.0 if value else 0.0 for value in demand]), by=190.0)
    return server(tape, shape, pages=serving(tape, demand, shape.pool, held_blocks=aborted))


def _offload(tape: Tape) -> Recording:
    """An offload tier next to the pool: the metrics show only a falling prefix hit rate."""
    shape = Shape(pool=kv_pool(50.0), version="0.9.2", host_limit_bytes=256 * GIB)
    demand = tape.pauses(tape.traffic(), every=2.0, lasting=0.2)
    hits = 0.0
    pages: Pages = []
    before = 0
    for hour, page in zip(tape.hours, serving(tape, demand, shape.pool, request_tokens=7_000), strict=True):
        (one,) = page if isinstance(page, tuple) else ()
        queries = one.prefix_queries_total or 0
        hits += (queries - before) * max(0.6 * (1.0 - hour / 8.0), 0.0)
        before = queries
        pages.append((replace(one, prefix_hits_total=round(hits)),))
    return server(tape, shape, pages=pages, host_grown={101: tape.flat(100.0 * GIB)})


def _one_block_each(tape: Tape) -> Recording:
    """Rounds of 120, 24 and 24 requests with idle time after each."""
    shape = Shape(pool=_units(11_528), engine_name="imp", asked=None, version=None)
    rounds = ((0.1, 0.4, 120, 0.0, 212.0), (0.8, 0.9, 24, 212.0, 236.0), (1.3, 1.4, 24, 236.0, 260.0))
    pages: Pages = []
    for hour in tape.hours:
        running, done, held = 0, 0.0, 0.0
        for begin, end, requests, before, after in rounds:
            share = min(max((hour - begin) / (end - begin), 0.0), 1.0)
            done += requests * share
            held = held if hour < begin else before + (after - before) * share
            running = 4 if begin <= hour < end else running
        pages.append((replace(engine(shape.pool, running, 500, done, held=held), prefix_hits_total=0),))
    return server(tape, shape, pages=pages)


def _undecided(tape: Tape) -> Recording:
    shape = Shape(version="0.10.2")
    blocks = shape.pool.usable_blocks if shape.pool is not None else 0
    usage = tape.of(lambda hour: min(0.30 + 0.15 * hour, 0.99) if hour < 4.6 else 0.985)
    wobble = tape.noise(0.004, 5.0)
    tokens = running_total(tape.flat(827.0 * tape.tick_seconds))
    pages: Pages = [
        (
            Engine(
                engine="0",
                kv_usage_ratio=min(round((level + shake) * blocks) / blocks, 1.0),
                requests_running=tape.random.choice((39, 40)),
                requests_waiting=0,
                preemptions_total=0,
                prompt_tokens_total=round(5.0 * made),
                generation_tokens_total=round(made),
            ),
        )
        for level, shake, made in zip(usage, wobble, tokens, strict=True)
    ]
    return server(tape, shape, pages=pages)


def _padded_pages(tape: Tape) -> Recording:
    """Every request pins about 23 pages, however short it is; two or three fit."""
    pool = _units(70, block_tokens=7_808, capacity_tokens=457_880)
    shape = Shape(gpus=2, total_bytes=96 * GIB, pool=pool, version="0.29.0", max_model_len_tokens=131_072)
    pages: Pages = []
    done = generated = 0.0
    for hour in tape.hours:
        agents = 1 if hour < 0.5 else 6
        running = min(agents, tape.random.choice((2, 3, 3)))
        done += running * tape.tick_seconds / 90.0
        generated += tape.random.uniform(8.0, 30.0) * tape.tick_seconds
        one = engine(pool, 0, 1, 0.0, held=23.0 * running, waiting=max(agents - running, 0))
        pages.append((replace(one, requests_running=running, **_tokens(1_500.0 * done, generated)),))
    return server(tape, shape, pages=pages)


def _shared_slots(tape: Tape) -> Recording:
    """13,440 blocks for a request of 32K tokens; three of them fill the pool."""
    pool = _units(41_000, block_tokens=256)
    shape = Shape(gpus=8, total_bytes=141 * GIB, weights_bytes=40 * GIB, pool=pool, version="0.20.0")
    pages: Pages = []
    done = 0.0
    for _ in tape.hours:
        running = tape.random.choice((2, 3, 3))
        done += running * tape.tick_seconds / 120.0
        one = engine(pool, 0, 1, 0.0, held=13_440.0 * running, waiting=4 - running)
        pages.append(
            (replace(one, requests_running=running, prefix_hits_total=0, **_tokens(32_000.0 * done, 500.0 * done)),)
        )
    return server(tape, shape, pages=pages)


def _tokens(prompt: float, generated: float) -> dict[str, Any]:
    return {
        "prompt_tokens_total": round(prompt),
        "generation_tokens_total": round(generated),
        "prefix_queries_total": round(prompt),
    }


def _swapped(tape: Tape) -> Recording:
    pages: Pages = []
    shape = Shape(version="0.5.0", max_model_len_tokens=8_192)
    done = 0.0
    for hour in tape.hours:
        share = min(hour / 1.5, 1.0)
        running = round(34 if share == 1.0 else 20 + 14 * share)
        done += 400.0 * tape.tick_seconds / 3600.0
        one = engine(
            shape.pool,
            running,
            100,
            done,
            waiting=round(137 * share),
            preemptions=round(151 * max(hour - 1.0, 0.0) / 2.0),
        )
        pages.append((replace(one, kv_usage_ratio=round(min(0.6 + 0.392 * share, 0.992), 4)),))
    return server(tape, shape, pages=pages)


def _collapse(tape: Tape) -> Recording:
    pages: Pages = []
    shape = Shape(version="0.10.1.1")
    done = 0.0
    demand = tape.noise(0.01, 5.0)
    for hour, shake in zip(tape.hours, demand, strict=True):
        full = 1.0 <= hour < 2.5
        running, waiting = (60, round(40 + 100 * min(hour - 1.0, 1.0))) if full else (35, 0)
        done += (300.0 if full else 1_500.0) * tape.tick_seconds / 3600.0
        one = engine(shape.pool, running, 3_000, done, waiting=waiting)
        usage = 0.997 + min(shake, 0.003) / 10.0 if full else 0.58 + shake
        pages.append((replace(one, kv_usage_ratio=round(min(max(usage, 0.0), 1.0), 4)),))
    return server(tape, shape, pages=pages)


def _hung(tape: Tape) -> Recording:
    """A sequence longer than the pool: it runs, nothing is generated, everything behind it waits."""
    shape = Shape(total_bytes=24 * GIB, weights_bytes=13 * GIB, pool=_units(420, block_tokens=16), version="0.2.6",
                  max_model_len_tokens=16_384, engine_name="vllm")  # fmt: skip
    pages: Pages = []
    done = 0.0
    for hour in tape.hours:
        hung = hour >= 1.0
        done += 0.0 if hung else 600.0 * tape.tick_seconds / 3600.0
        one = engine(shape.pool, 1 if hung else 3, 1_000, done, waiting=round(30 * (hour - 1.0)) if hung else 0)
        pages.append((replace(one, kv_usage_ratio=1.0) if hung else one,))
    return server(tape, shape, pages=pages)


KV_INCIDENTS: Mapping[str, Record] = {
    "kv-xllm-828": _over_full,
    "kv-sglang-mamba": _slots,
    "kv-sglang-11970": _missing_tokens,
    "kv-abort-final-step": _pinned,
    "kv-nixlpush-abort": _aborts,
    "kv-lmcache-987": _offload,
    "kv-imp-1115": _one_block_each,
    "kv-vllm-27073": _undecided,
    "waste-page-54458": _padded_pages,
    "waste-dsv4-42948": _shared_slots,
    "cap-5578": _swapped,
    "cap-23444": _collapse,
    "cap-2163": _hung,
}
