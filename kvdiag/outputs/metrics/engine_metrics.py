"""The metrics of the engines: the KV pool in bytes and tokens, its free room, and its requests.

What vLLM exports itself (throughput, latency, prefix hits, acceptance) is not repeated: alerts/recording-rules.yaml
takes it from vLLM's own series.
"""

from dataclasses import dataclass

from kvdiag.diagnosis.blocks.expected import grows_with_every_token
from kvdiag.kv.calibration.running_server import block_bytes, pool_bytes
from kvdiag.model import Engine, Facts, KvPool, Sample, ServerState, Snapshot
from kvdiag.outputs.metrics.families import Figures, bounded, one_of, single

STATES: tuple[ServerState, ...] = ("starting", "serving", "lost")


def engine_figures(newest: Sample, facts: Facts) -> Figures:
    """The engines' KV pools and requests."""
    # A model that was unloaded has no pool any more, though the facts are read again only with the next model.
    running = {one.engine for one in newest.engines or ()}
    pools = [pool for pool in bounded(facts.pools) if pool.engine in running]
    sizes = {pool.engine: size[0] for pool in pools if (size := pool_bytes(facts, pool)) is not None}
    blocks = {pool.engine: block[0] for pool in pools if (block := block_bytes(facts, pool)) is not None}
    engines = [((one.engine,), one) for one in bounded(newest.engines)]
    owners = {one.engine: one for one in bounded(newest.block_owners)}.values()
    used, rooms = [], []
    linear = bool(newest.engines and facts.pools) and grows_with_every_token(facts)
    for labels, engine in engines:
        pool, block_size = facts.pool(engine.engine), blocks.get(engine.engine)
        rooms.append((labels, None if pool is None else room(engine, pool, linear=linear)))
        if pool is not None and block_size is not None and engine.kv_usage_ratio is not None:
            used.append((labels, pool.used_blocks(engine.kv_usage_ratio) * block_size))
    per_token = [
        ((pool.engine,), sizes[pool.engine] / pool.capacity_tokens)
        for pool in pools
        if pool.engine in sizes and pool.capacity_tokens
    ]
    return {
        "engine": engines,
        "pool": [((pool.engine,), pool) for pool in pools],
        "room": rooms,
        "kv_pool_bytes": [((engine,), size) for engine, size in sizes.items()],
        "kv_used_bytes": used,
        "kv_bytes_per_token": per_token,
        "block owners": [((one.engine,), one) for one in owners],
        "request blocks": [((one.engine,), one.held) for one in owners],
        "kv_blocks": [((one.engine, owner), blocks) for one in owners for owner, blocks in one.by_owner.items()],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The free room in one engine's pool, one field for each metric; `None` if it is not reported, or nothing runs."""

    kv_headroom_tokens: float
    kv_headroom_requests: float | None = None
    kv_waste_ratio: float | None = None
    context_mean_tokens: float | None = None
    requests_concurrency_limit: float | None = None
    requests_in_flight_ratio: float | None = None


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
        return Room(kv_headroom_tokens=headroom, requests_in_flight_ratio=in_flight)
    mean, limit = held / running, running * capacity / held
    # The last block of each request is half full on average; those before it are full.
    empty = running * (pool.block_tokens - 1) / 2.0 / (used_blocks * pool.block_tokens)
    return Room(
        kv_headroom_tokens=headroom,
        context_mean_tokens=mean,
        kv_headroom_requests=headroom / mean,
        requests_concurrency_limit=limit,
        requests_in_flight_ratio=None if waiting is None else (running + waiting) / limit,
        kv_waste_ratio=min(empty, 1.0) if linear else None,
    )


def server_figures(snapshot: Snapshot) -> Figures:
    """The monitored server, and whether it answers."""
    facts = snapshot.facts
    who = (facts.engine_name, facts.engine_version, facts.model)
    return {
        "server_info": [(tuple(each or "" for each in who), 1.0)] if any(who) else [],
        "server_state": one_of(snapshot.state, STATES),
        "server_down_since_timestamp_seconds": single(snapshot.down_since_seconds),
    }
