"""The answer of `kvdiag fit` as plain values, `schema_version` 1. Bytes are integers, unknown is null."""

from collections.abc import Sequence

from kvdiag.kv.fit.plan import Budget, Plan
from kvdiag.kv.fit.scenario import Lever, Scenario
from kvdiag.kv.layout.capacity import CacheLayout, Capacity
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.outputs.documents import Json, fields_of, plain

SCHEMA_VERSION = 1

CACHE = ("max_requests", "max_context_tokens")
CAPACITY = ("num_blocks", "blocks_per_request", "bytes_per_block", "capacity_tokens", "max_concurrency")
"""Null throughout for a model that keeps no KV cache."""


def capacity_document(
    layout: CacheLayout, capacity: Capacity, deployment: Deployment, *, origin: str, notes: Sequence[str] = ()
) -> Json:
    """What a pool of so many bytes per rank holds: the figures of the first rank, and those of every rank."""
    ranks = [
        {"stage": stage, "rank": rank} | _rank(layout, capacity, deployment, stage)
        for stage in range(layout.ranks)
        for rank in range(deployment.tensor_parallel)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": origin,
        **_rank(layout, capacity, deployment, stage=0),
        "groups": len(layout.groups),
        "padding_layers": layout.padding_layers,
        "needed_bytes": max(capacity.needed_bytes, default=0),
        "admits_one": capacity.admits_one,
        "ranks": ranks,
        "notes": list(notes),
    }


def _rank(layout: CacheLayout, capacity: Capacity, deployment: Deployment, stage: int) -> Json:
    per_token = layout.bytes_per_token(deployment.decode_context_parallel)
    return fields_of(capacity, "num_blocks", "blocks_per_request", "capacity_tokens", "max_concurrency") | {
        "block_size": layout.block_size_tokens,
        "bytes_per_block": layout.bytes_per_block[stage],
        "kv_bytes_per_token": None if per_token is None else per_token[stage],
    }


def fit_document(
    scenario: Scenario,
    plan: Plan,
    levers: Sequence[Lever],
    combinations: Sequence[Lever],
    *,
    origin: str,
    notes: Sequence[str],
    block_waste_ratio: float | None,
) -> Json:
    """The whole answer. `block_waste_ratio` is None for a model that keeps no KV cache."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": origin,
        "kinds": plain(scenario.architecture.kinds),
        "gpus": scenario.gpus,
        **_plan(plan),
        "block_waste_ratio": block_waste_ratio,
        "budgets": [_budget(budget) for budget in plan.budgets],
        "levers": [_lever(lever) for lever in levers],
        "combinations": [_lever(lever) for lever in combinations],
        "notes": list(notes),
    }


def grid_document(rows: Sequence[Sequence[Plan]]) -> list[Json]:
    """One entry per context and concurrency."""
    return [_plan(plan) for row in rows for plan in row]


def _lever(lever: Lever) -> Json:
    return fields_of(lever, "name", "change", "price", "gained_bytes", "supported") | _plan(lever.plan)


def _plan(plan: Plan) -> Json:
    kept = plan if plan.keeps_cache else None
    return (
        fields_of(plan, "outcome", "headroom_bytes", "headroom_ratio", "limiting_stage", keeps_kv_cache="keeps_cache")
        | fields_of(plan.demand, "context_tokens", "requests")
        | fields_of(kept, *CACHE)
        | fields_of(None if kept is None else kept.capacity, *CAPACITY)
    )


def _budget(budget: Budget) -> Json:
    names = ("total", "weights", "activation", "context", "graph", "overhead", "unused", "reserve", "shortfall")
    return fields_of(
        budget,
        *(f"{name}_bytes" for name in names),
        kv_pool_bytes="pool_bytes",
        kv_pool_range_bytes="pool_range_bytes",
    )
