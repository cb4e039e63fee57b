"""The KV pool that `kvdiag fit` estimates against the one that published startup logs print, with the logs' weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import text_fields
from kvdiag.kv.families.base import WIDTH_NAMES
from kvdiag.kv.fit.gpu_catalogue import gpu_bytes
from kvdiag.kv.fit.overheads import vllm_overheads
from kvdiag.kv.fit.plan import DEFAULT_MEMORY_FRACTION, Budget
from kvdiag.kv.layout.deployment import default_batched_tokens
from tests.unit.kv.dataset import GIB, config_of, rows

# Before vLLM 0.8 a step held a whole prompt, unless the context was longer than this (engine/arg_utils.py).
_CHUNKED_FROM_TOKENS, _CHUNK_TOKENS = 32_768, 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolError:
    """A log's pool, what the estimate makes of it, and the band of the estimate, in bytes."""

    row: str
    printed: float
    estimated: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """The estimate as a share of the truth."""
        return self.estimated / self.printed

    @property
    def inside(self) -> bool:
        """Whether the truth is in the band."""
        return self.low <= self.printed <= self.high


def pool_errors() -> list[PoolError]:
    """Every log that prints its weights and its pool, on a GPU whose memory is known."""
    return list(_errors())


def _errors() -> Iterator[PoolError]:
    for row in rows():
        if row["engine"] != "vllm" or row["cfg"] is None or not row["weights_gib"] or not row["available_kv_gib"]:
            continue
        total = _total_bytes(row)
        try:
            text = text_fields(config_of(row["cfg"]))
            hidden = text.integer(*WIDTH_NAMES)
        except KvModelError:
            continue
        if total is None or row["available_kv_gib"] <= 0:
            continue  # such a start fails
        overheads = vllm_overheads(
            hidden_size=hidden,
            feed_forward_size=text.integer("intermediate_size", "moe_intermediate_size", default=4 * hidden),
            vocabulary=text.integer("vocab_size", default=128_000),
            tensor_parallel=row["tp"] or 1,
            batched_tokens=_batched_tokens(row, total),
            graphs=_counts_graphs(row),
        )
        budget = Budget(
            total_bytes=total,
            memory_fraction_ratio=row["gpu_memory_utilization"] or DEFAULT_MEMORY_FRACTION,
            weights_bytes=int(row["weights_gib"] * GIB),
            context_bytes=overheads.context_bytes,
            activation_bytes=overheads.activation_bytes,
            graph_bytes=overheads.graph_bytes,
            less_bytes=overheads.less_bytes,
            more_bytes=overheads.more_bytes,
        )
        low, high = budget.pool_range_bytes
        printed = row["available_kv_gib"] * GIB
        yield PoolError(row=row["id"], printed=printed, estimated=budget.pool_bytes, low=low, high=high)


def _total_bytes(row: dict[str, Any]) -> int | None:
    if row.get("gpu_total_gib"):
        return int(row["gpu_total_gib"] * GIB)
    try:
        return gpu_bytes(row["gpu"] or "")
    except KvModelError:
        return None


def _batched_tokens(row: dict[str, Any], total_bytes: int) -> int:
    if row["max_num_batched_tokens"]:
        return int(row["max_num_batched_tokens"])
    if "V0" not in (row["engine_version"] or ""):
        return default_batched_tokens(total_bytes, row["gpu"] or "")
    length = row["max_model_len"] or _CHUNK_TOKENS
    return _CHUNK_TOKENS if length > _CHUNKED_FROM_TOKENS else max(length, _CHUNK_TOKENS)


def _counts_graphs(row: dict[str, Any]) -> bool:
    """From 0.21 on the engine keeps room for its graphs in the fraction."""
    version = (row["engine_version"] or "").partition(" ")[0].split("-")[0].strip("+")
    numbers = [int(part) for part in version.split(".") if part.isdigit()]
    return numbers[:2] >= [0, 20]


def pool_error_summary(found: list[PoolError]) -> str:
    """The median of the ratios, the range of nine in ten of them, and how many truths are in the band."""
    ratios = [one.ratio for one in found]
    twentieths = quantiles(ratios, n=20, method="inclusive")
    inside = sum(one.inside for one in found)
    return (
        f"median {median(ratios):.2f} of the truth, 90 % from {twentieths[0]:.2f} to {twentieths[-1]:.2f}; "
        f"{inside} / {len(found)} in the band"
    )
