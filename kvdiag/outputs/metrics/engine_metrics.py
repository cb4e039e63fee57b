"""The metrics of the engines: the KV pool in bytes and tokens, its free room, and its requests.

What vLLM exports itself (throughput, latency, prefix hits, acceptance) is not repeated: alerts/recording-rules.yaml
takes it from vLLM's own series.
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
    """The engines' KV pools and requests."""
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
    yield gauge("kvdiag_kv_used_bytes", "Bytes of the KV pool in use, on one rank.", LABELS, used)
    for name, field, text in (
        ("kv_usage_ratio", "kv_usage_ratio", "Usage of the KV pool, as the engine reports it."),
        ("requests_running", "requests_running", "Running requests."),
        ("requests_waiting", "requests_waiting", "Waiting requests."),
    ):
        rows = [((one.engine,), float(value)) for one in engines if (value := getattr(one, field)) is not None]
        yield gauge(f"kvdiag_{name}", text, LABELS, rows)
    for name, field, text in (
        ("kv_capacity_tokens", "capacity_tokens", "Capacity of the KV pool in tokens, as the engine reports it."),
        (
            "requests_max_concurrency",
            "max_concurrency",
            "Requests of full context length that fit into the pool at once.",
        ),
    ):
        rows = [((pool.engine,), float(value)) for pool in pools if (value := getattr(pool, field)) is not None]
        yield gauge(f"kvdiag_{name}", text, LABELS, rows)
    per_token = []
    for pool in pools:
        size = sizes[pool.engine]
        if size is not None and pool.capacity_tokens:
            per_token.append(((pool.engine,), size[0] / pool.capacity_tokens))
    text = "Bytes of the KV pool per token of its capacity, on one rank."
    yield gauge("kvdiag_kv_bytes_per_token", text, LABELS, per_token)
    yield from _room_families(newest, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The free room in one engine's pool; `None` if the engine does not report it, or nothing runs."""

    headroom_tokens: float
    context_mean_tokens: float | None = None
    headroom_requests: float | None = None
    concurrency_limit: float | None = None
    in_flight_ratio: float | None = None
    waste_ratio: float | None = None


def room(engine: Engine, pool: KvPool, *, linear: bool) -> Room | None:
    """The room in a pool; `linear` if every layer keeps every token. `None` if its tokens are unknown.

    Requests in flight are running or waiting. The limit is for requests of the current mean length: the engine's own
    figure is for the longest possible ones, which an ordinary load does not contain.
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
    # The last block of each request is half full on average; those before it are full.
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
        ("kv_headroom_tokens", "headroom_tokens", "Tokens that fit into the free blocks of the pool."),
        (
            "kv_headroom_requests",
            "headroom_requests",
            "Further requests of the current mean length that fit into the free blocks.",
        ),
        (
            "kv_waste_ratio",
            "waste_ratio",
            "Estimated share of the used blocks that holds no token: half a block per running request.",
        ),
        (
            "context_mean_tokens",
            "context_mean_tokens",
            "Mean tokens in the pool per running request, including generated ones.",
        ),
        (
            "requests_concurrency_limit",
            "concurrency_limit",
            "Requests of the current mean length that fit into the pool at once.",
        ),
        (
            "requests_in_flight_ratio",
            "in_flight_ratio",
            "Running and waiting requests over those that fit into the pool at their current length; can exceed 1.",
        ),
    ):
        rows = [((engine,), value) for engine, one in rooms.items() if (value := getattr(one, field)) is not None]
        yield gauge(f"kvdiag_{name}", text, LABELS, rows)


def server_families(snapshot: Snapshot) -> Iterator[Metric]:
    """The monitored server, and whether it answers."""
    facts = snapshot.facts
    who = (facts.engine_name, facts.engine_version, facts.model)
    rows = [] if who == (None, None, None) else [(tuple(each or "" for each in who), 1.0)]
    text = "The monitored server and its model; always 1."
    yield gauge("kvdiag_server_info", text, ("name", "version", "model_name"), rows)
    text = "1 for the server's current state, 0 for the others; starting until its first answer."
    states = [((state,), float(state == snapshot.state)) for state in STATES]
    yield gauge("kvdiag_server_state", text, ("state",), states)
