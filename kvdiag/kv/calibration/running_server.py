"""Bytes of a running server's blocks and pools: as the engine reports them, else by its model's config.

The arithmetic behind `served` is imported for a server whose config is readable: families and layouts of models take
1.6 MiB, which no other server's daemon needs.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from kvdiag.model import Facts, KvPool, Provenance

if TYPE_CHECKING:
    from kvdiag.kv.calibration.served_layout import Served


def served(facts: Facts, pool: KvPool) -> "Served | str":
    """The model of the engine that has this pool; or why there is none, as a clause."""
    if facts.model_config is None:
        return "the model's files are not readable from here; run kvdiag where they are"
    if facts.max_model_len_tokens is None:
        return "the server does not report max_model_len; check its /v1/models"
    from kvdiag.kv.calibration.served_layout import served_layout  # noqa: PLC0415 - see above

    # What is not looked at must not divide the cache.
    return served_layout(
        Facts(
            model_config=facts.model_config,
            engine_name=facts.engine_name,
            engine_version=facts.engine_version,
            max_model_len_tokens=facts.max_model_len_tokens,
            tensor_parallel=facts.tensor_parallel,
            pipeline_parallel=facts.pipeline_parallel,
            pools=(replace(pool, engine="", memory_fraction_ratio=None),),
        )
    )


def reported_blocks(pool: KvPool) -> int | None:
    """Blocks that the engine itself plans for a request of max_model_len tokens; `None` before vLLM 0.24."""
    return round(pool.total_blocks / pool.max_concurrency) if pool.max_concurrency else None


def block_bytes(facts: Facts, pool: KvPool) -> tuple[int, Provenance] | None:
    """Bytes of one block on one rank: as the engine reports its pool, else as its model's config gives them."""
    if pool.block_bytes is not None:
        return pool.block_bytes, "computed" if pool.bytes_computed else "reported"
    model = served(facts, pool)
    if isinstance(model, str) or model.block_bytes is None or model.drift() is not None:
        return None
    return model.block_bytes, "computed"


def pool_bytes(facts: Facts, pool: KvPool) -> tuple[int, Provenance] | None:
    """Bytes of the whole pool on one rank, and whether the engine reports them or they follow from its config."""
    if pool.pool_bytes is not None:
        return pool.pool_bytes, "computed" if pool.bytes_computed else "reported"
    size = block_bytes(facts, pool)
    return None if size is None else (size[0] * pool.total_blocks, size[1])


def all_pools_bytes(facts: Facts) -> tuple[int, Provenance] | None:
    """Bytes of the pools of all engines, one rank of each; `None` where there is none or one is not known."""
    sizes = [pool_bytes(facts, pool) for pool in facts.pools]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        return None
    return sum(size for size, _ in known), known[0][1]


def bytes_problem(facts: Facts) -> str | None:
    """Why the bytes of a block cannot be computed, in a clause; `None` where they can."""
    for pool in facts.pools:
        model = served(facts, pool)
        if isinstance(model, str):
            return model
        if (drift := model.drift()) is not None:
            return f"the model's config predicts a different {drift.figure} than the engine reports; see `kvdiag audit`"
        if model.block_bytes is None and len(set(model.layout.bytes_per_block)) > 1:
            return "block sizes differ between pipeline stages; see `kvdiag audit`"
        given = "start the engine with its pool's size in --kv-cache-memory-bytes"
        if model.generation_open:
            return f"the GPU's generation, which decides the format of a block, is not reported; {given}"
        if model.block_bytes is None:
            how = given if facts.server_pids else "run kvdiag in the server's PID namespace"
            return f"the tensor-parallel size is not reported by the server's processes; {how}"
    return None
