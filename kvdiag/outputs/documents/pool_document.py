"""The plan for an engine other than vLLM as plain values, `schema_version` 1; its schema is engine_fit.schema.json.

Bytes are integers and of one GPU; unknown is null.
"""

from collections.abc import Sequence

from kvdiag.kv.pools.engine_plan import EnginePlan
from kvdiag.outputs.documents import Json, fields_of, plain

SCHEMA_VERSION = 1


def grid_document(rows: Sequence[Sequence[EnginePlan]]) -> list[Json]:
    """One entry per context and concurrency."""
    names = "outcome", "max_requests", "headroom_bytes"
    return [
        fields_of(plan.demand, "context_tokens", "requests") | fields_of(plan, *names) for row in rows for plan in row
    ]


def pool_document(plan: EnginePlan, *, origin: str) -> Json:
    """The whole answer."""
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": plan.engine,
        "model": origin,
        "outcome": plan.outcome,
        **fields_of(plan.demand, "context_tokens", "requests"),
        **fields_of(
            plan,
            "gpus",
            "gpu_bytes",
            "capacity_tokens",
            "longest_request_tokens",
            "max_requests",
            "max_running_requests",
            "kv_bytes_per_token",
            "headroom_bytes",
            "shortfall_bytes",
            "reserve_shortfall_bytes",
            kv_pool_bytes="pool_bytes",
        ),
        **{name: plain(getattr(plan, name)) for name in ("pools", "parts", "settings", "levers")},
        "notes": list(plan.notes),
    }
