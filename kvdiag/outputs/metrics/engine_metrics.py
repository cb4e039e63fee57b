"""The page's families of the engines: the KV pool in bytes and tokens, what is left of it, and the requests in it.

What vLLM tells by itself (throughput, latency, prefix hits, acceptance) is not repeated: alerts/recording-rules.yaml
has it from vLLM's own series.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from kvdiag.diagnosis.blocks.expected import grows_with_every_token
from kvdiag.kv.calibration.running_server import block_bytes, pool_bytes
from kvdiag.model import Engine, Facts, KvPool, Sample, ServerState, Snapshot
from kvdiag.outputs.metrics.families import bounded, gauge

LABELS = ("engine",)
STATES: tuple[ServerState, ...] = ("starting", "serving", "lost")


def engine_families(newest: Sample, facts: Facts) -> Iterator[Metric]:
    """What the engines tell of their pools and requests."""
    pools = bounded(facts.pools) if newest.engines else []
    sizes = {pool.engine: pool_bytes(facts, pool) for pool in pools}
    blocks = {pool.engine: block_bytes(facts, pool) for pool in pools}
    yield gauge(
        "kvdiag_kv_pool_bytes",
        "Bytes of the engine's KV pool on one rank.",
        LABELS,
        [((engine,), float(size[0])) for engine, size in sizes.items() if size is not None],
    )
    engines = bounded(newest.engines)
    used = []
    for engine in engines:
        pool, size = facts.pool(engine.engine), blocks.get(engine.engine)
        if pool is not None and size is not None and engine.kv_usage_ratio is not None:
            used.append(((engine.engine,), float(pool.used_blocks(engine.kv_usage_ratio) * size[0])))
    yield gauge("kvdiag_kv_used_bytes", "Bytes of the pool that requests hold, on one rank.", LABELS, used)
    for name, field, text in (
        ("kv_usage_ratio", "kv_usage_ratio", "Share of the pool that requests hold, as the engine tells it."),
        ("requests_running", "requests_running", "Requests that run."),
        ("requests_waiting", "requests_waiting", "Requests that wait."),
    ):
        rows = [((one.engine,), float(value)) for one in engines if (value := getattr(one, field)) is not None]
        yield gauge(f"kvdiag_{name}", text, LABELS, rows)
    for name, field, text in (
        ("kv_capacity_tokens", "capacity_tokens", "Tokens that the pool holds, as the engine tells it."),
        ("requests_max_concurrency", "max_concurrency", "Requests of the longest context that the pool holds at once."),
    ):
        rows = [((pool.engine,), float(value)) for pool in pools if (value := getattr(pool, field)) is not None]
        yield gauge(f"kvdiag_{name}", text, LABELS, rows)
    per_token = []
    for pool in pools:
        size = sizes[pool.engine]
        if size is not None and pool.capacity_tokens:
            per_token.append(((pool.engine,), size[0] / pool.capacity_tokens))
    text = "Bytes of the pool for each token of its capacity, on one rank."
    yield gauge("kvdiag_kv_bytes_per_token", text, LABELS, per_token)
    yield from _room_families(newest, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is left of one engine's pool, and for whom; `None` where it is not told, or nothing runs to tell it."""

    headroom_tokens: float
    context_mean_tokens: float | None = None
    headroom_requests: float | None = None
    concurrency_limit: float | None = None
    in_flight_ratio: float | None = None
    waste_ratio: float | None = None


def room(engine: Engine, pool: KvPool, *, linear: bool) -> Room | None:
    """The room in a pool; `linear` says that every layer keeps every token. `None` where tokens cannot be told.

    In flight are requests that run or wait. The limit is for requests of the length that those which run have now:
    the engine's own figure is for the longest ones, of which an ordinary load has none.
    """
    capacity = pool.capacity_tokens
    if capacity is None and linear:
        capacity = pool.usable_blocks * pool.block_tokens
    if not capacity or engine.kv_usage_ratio is None:
        return None
    used_blocks = min(pool.used_blocks(engine.kv_usage_ratio), pool.usable_blocks)
    held = capacity * used_blocks / pool.usable_blocks
    headroom, running, waiting = capacity - held, engine.requests_running, engine.requests_waiting
    if not running or not held:
        in_flight = None if running is None or waiting is None or running + waiting else 0.0
        return Room(headroom_tokens=headroom, in_flight_ratio=in_flight)
    mean, limit = held / running, running * capacity / held
    # The last block of each request is filled to the half by the mean of many; those before it are full.
    empty = running * (pool.block_tokens - 1) / 2.0 / (used_blocks * pool.block_tokens)
    return Room(
        headroom_tokens=headroom,
        context_mean_tokens=mean,
        headroom_requests=headroom / mean,
        concurrency_limit=limit,
        in_flight_ratio=None if waiting is None else (running + waiting) / limit,
        waste_ratio=min(empty, 1.0) if linear else None,
    )


def _room_families(newest: Sample, facts: Facts) -> Iterator[Metric]:
    linear = bool(newest.engines and facts.pools) and grows_with_every_token(facts)
    rooms: dict[str, Room] = {}
    for engine in bounded(newest.engines):
        pool = facts.pool(engine.engine)
        found = None if pool is None else room(engine, pool, linear=linear)
        if found is not None:
            rooms[engine.engine] = found
    for name, field, text in (
        ("kv_headroom_tokens", "headroom_tokens", "Tokens that the free blocks of the pool hold."),
        (
            "kv_headroom_requests",
            "headroom_requests",
            "Further requests, as long as those that run are now, that the free blocks hold.",
        ),
        (
            "kv_waste_ratio",
            "waste_ratio",
            "Share of the blocks that requests hold which no token fills: half a block for each that runs.",
        ),
        (
            "context_mean_tokens",
            "context_mean_tokens",
            "Tokens in the pool for each request that runs, those generated so far among them.",
        ),
        (
            "requests_concurrency_limit",
            "concurrency_limit",
            "Requests, as long as those that run are now, that the pool holds at once.",
        ),
        (
            "requests_in_flight_ratio",
            "in_flight_ratio",
            "Requests that run or wait, over those that the pool holds at once at their present length; may pass 1.",
        ),
    ):
        rows = [((engine,), value) for engine, one in rooms.items() if (value := getattr(one, field)) is not None]
        yield gauge(f"kvdiag_{name}", text, LABELS, rows)


def server_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Which server this is, and whether it answers."""
    facts = snapshot.facts
    who = (facts.engine_name, facts.engine_version, facts.model)
    rows = [] if who == (None, None, None) else [(tuple(each or "" for each in who), 1.0)]
    text = "The server that is watched, and its model; always 1."
    yield gauge("kvdiag_server_info", text, ("name", "version", "model_name"), rows)
    text = "1 for the state that the server is in, 0 for the others; starting until it first answers."
    states = [((state,), float(state == snapshot.state)) for state in STATES]
    yield gauge("kvdiag_server_state", text, ("state",), states)
