"""The answer of `kvdiag fit` as plain values, `schema_version` 1. Bytes are integers, unknown is null."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdiag.kv.fit.plan import Budget, Plan
from kvdiag.kv.fit.scenario import Lever, Scenario
from kvdiag.kv.layout.capacity import CacheLayout, Capacity
from kvdiag.kv.layout.deployment import Deployment

SCHEMA_VERSION = 1

Json = dict[str, Any]


def capacity_document(
    layout: CacheLayout, capacity: Capacity, deployment: Deployment, *, origin: str, notes: Sequence[str] = ()
) -> Json:
    """What a pool of so many bytes per rank holds: the figures of the first rank, and those of every rank."""
    ranks = [
        _rank(layout, capacity, deployment, stage=stage, rank=rank)
        for stage in range(layout.ranks)
        for rank in range(deployment.tensor_parallel)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": origin,
        **{name: value for name, value in ranks[0].items() if name not in ("stage", "rank")},
        "groups": len(layout.groups),
        "padding_layers": layout.padding_layers,
        "needed_bytes": max(capacity.needed_bytes, default=0),
        "admits_one": capacity.admits_one,
        "ranks": ranks,
        "notes": list(notes),
    }


def _rank(layout: CacheLayout, capacity: Capacity, deployment: Deployment, *, stage: int, rank: int) -> Json:
    per_token = layout.bytes_per_token(deployment.decode_context_parallel)
    return {
        "stage": stage,
        "rank": rank,
        "num_blocks": capacity.num_blocks,
        "block_size": layout.block_size_tokens,
        "bytes_per_block": layout.bytes_per_block[stage],
        "kv_bytes_per_token": None if per_token is None else per_token[stage],
        "blocks_per_request": capacity.blocks_per_request,
        "capacity_tokens": capacity.capacity_tokens,
        "max_concurrency": capacity.max_concurrency,
    }


def fit_document(
    scenario: Scenario,
    plan: Plan,
    levers: Sequence[Lever],
    *,
    origin: str,
    notes: Sequence[str],
    block_waste_ratio: float | None,
) -> Json:
    """The whole answer. `block_waste_ratio` is None for a model that keeps no KV cache."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": origin,
        "kinds": {str(kind): count for kind, count in scenario.architecture.kinds.items()},
        "gpus": scenario.gpus,
        **_plan(plan),
        "block_waste_ratio": block_waste_ratio,
        "budgets": [_budget(budget) for budget in plan.budgets],
        "levers": [
            {
                "name": lever.name,
                "change": lever.change,
                "price": lever.price,
                "gained_bytes": lever.gained_bytes,
                **_plan(lever.plan),
            }
            for lever in levers
        ],
        "notes": list(notes),
    }


def grid_document(rows: Sequence[Sequence[Plan]]) -> list[Json]:
    """One entry per context and concurrency."""
    return [_plan(plan) for row in rows for plan in row]


def _plan(plan: Plan) -> Json:
    return {
        "outcome": plan.outcome,
        "context_tokens": plan.demand.context_tokens,
        "requests": plan.demand.requests,
        "headroom_bytes": plan.headroom_bytes,
        "headroom_ratio": plan.headroom_ratio,
        "limiting_stage": plan.limiting_stage,
        "keeps_kv_cache": plan.keeps_cache,
        **_cache(plan),
    }


def _cache(plan: Plan) -> Json:
    """What the pool holds; null throughout for a model that keeps no KV cache."""
    figures: Json = {
        "max_requests": plan.max_requests,
        "max_context_tokens": plan.max_context_tokens,
        "num_blocks": plan.capacity.num_blocks,
        "blocks_per_request": plan.capacity.blocks_per_request,
        "bytes_per_block": list(plan.capacity.bytes_per_block),
        "capacity_tokens": plan.capacity.capacity_tokens,
        "max_concurrency": plan.capacity.max_concurrency,
    }
    return figures if plan.keeps_cache else dict.fromkeys(figures)


def _budget(budget: Budget) -> Json:
    return {
        "total_bytes": budget.total_bytes,
        "weights_bytes": budget.weights_bytes,
        "kv_pool_bytes": budget.pool_bytes,
        "activation_bytes": budget.activation_bytes,
        "context_bytes": budget.context_bytes,
        "graph_bytes": budget.graph_bytes,
        "overhead_bytes": budget.overhead_bytes,
        "reserve_bytes": budget.reserve_bytes,
        "shortfall_bytes": budget.shortfall_bytes,
    }
