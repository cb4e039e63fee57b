"""Incidents of KV blocks: held without a request, wasted, or too few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvdiag.model import Engine, Gap, KvPool
from tests.quality.corpus.incident import Incident, Shape, kv_pool, server
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
    """A tier beside the pool: only that prompts hit less and less shows on the page."""
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


KV_INCIDENTS = (
    Incident(
        id="kv-xllm-828",
        reported="usage 1.35506 with nothing running and nothing waiting; the server refuses all requests",
        assumed="it grew there over 8 h of traffic with an idle fifth of each hour; beyond 1.0 the gauge is refused",
        record=_over_full,
        hours=8.0,
    ),
    Incident(
        id="kv-sglang-mamba",
        reported="315 + 138 = 453 of 454 state slots when idle; the attention pool adds up",
        assumed="the gauge shows the fuller pool, the slots; one is lost 2.2 h after the start",
        record=_slots,
        hours=4.0,
        onset_hours=2.2,
    ),
    Incident(
        id="kv-sglang-11970",
        reported="270,331 tokens: 644 available, 269,628 evictable, 0 protected, 59 missing, after 256 in parallel",
        assumed="an hour of load, then idle for half an hour; the gauge is exact to the token",
        record=_missing_tokens,
        hours=1.5,
        onset_hours=0.8,
    ),
    Incident(
        id="kv-abort-final-step",
        reported="usage stays high after a mass cancel and falls at the connector's timeout",
        assumed="three cancels, each pinning 60 % of the pool for 480 s while nothing runs; readings each 30 s",
        record=_pinned,
        hours=4.2,
        tick_seconds=30.0,
        onset_hours=1.0,
    ),
    Incident(
        id="kv-nixlpush-abort",
        reported="blocks of requests aborted while they wait for remote KV are never freed; the idle floor ratchets up",
        assumed="12 such aborts an hour of 190 blocks each; an idle quarter of each hour",
        record=_aborts,
        hours=6.0,
    ),
    Incident(
        id="kv-lmcache-987",
        reported="hit tokens of 7,000-token prompts decay to 0; a CPU buffer of 100 GB; host memory flat",
        assumed="the hit share falls from 0.6 to 0 over 8 h; the pool's own gauge is normal",
        record=_offload,
        hours=10.0,
    ),
    Incident(
        id="kv-imp-1115",
        reported="blocks used: 0 idle, 212 after 120 requests, 236 after 24 more, 260 after 24 more; 11,528 in all",
        assumed="twenty minutes of idle time between rounds",
        record=_one_block_each,
        hours=1.8,
        onset_hours=0.1,
    ),
    Incident(
        id="kv-vllm-27073",
        reported="usage 75.8 % and rising, near 100 % for 6 h; 39 to 40 running, 0 waiting, 820 to 834 tokens/s",
        assumed="usage rises from 30 % in 4.6 h; five prompt tokens for each generated one",
        record=_undecided,
        hours=10.0,
    ),
    Incident(
        id="waste-page-54458",
        reported="a pool of 457,880 tokens in pages of 7,808; 23 pages a request; a prompt of 12 tokens takes 32.9 %; "
        "2 to 3 running, then a queue; 8 to 30 tokens/s of 6 agents",
        assumed="a pool of 70 pages; prompts of 1,500 tokens; one agent in the first half hour",
        record=_padded_pages,
        hours=3.0,
    ),
    Incident(
        id="waste-dsv4-42948",
        reported="13,440 blocks for a prompt of 32K tokens, a pool of about 41,000, no prefix hits, 98 % wasted",
        assumed="blocks told as 256 tokens; four requests at a time, two or three of them running",
        record=_shared_slots,
        hours=2.0,
    ),
    Incident(
        id="cap-5578",
        reported="34 running, 137 swapped, 151 preemptions, KV 99.2 %",
        assumed="reached over 1.5 h; the swapped are counted as waiting",
        record=_swapped,
        hours=3.0,
    ),
    Incident(
        id="cap-23444",
        reported="usage near 100 %, waiting spikes, throughput collapses",
        assumed="for an hour and a half; 40 to 140 waiting, a fifth of the throughput",
        record=_collapse,
        hours=4.0,
        onset_hours=1.0,
    ),
    Incident(
        id="cap-2163",
        reported="usage reaches 100 %, GPU utilisation 0, the server hangs",
        assumed="a pool of 6,720 tokens and a context of 16,384; one sequence runs without a token, others queue",
        record=_hung,
        hours=2.0,
        onset_hours=1.0,
        text="cap-2163",
    ),
)
