"""A plan for TensorRT-LLM, TGI or LMDeploy: what its share of a GPU holds, whether that is enough, what to change."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.formatting import plural
from kvdiag.kv.bounds import MAX_TOKENS
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.pools.engine_plan import EnginePlan, Machine, Part, helpful
from kvdiag.kv.pools.share_pools import ShareModel, SizedPool

_HIGHER_SHARE = 0.95
_OTHER_MANAGER = (
    "these are the pools of KVCacheManager: if the server's log has 'KV cache manager v2', they differ; start it with "
    "use_kv_cache_manager_v2: false"
)


def plan_share(
    model: ShareModel, demand: Demand, *, machine: Machine | None = None, pool_bytes: int | None = None
) -> EnginePlan:
    """What the engine makes of its flags: on GPUs, or of a pool of so many bytes per rank.

    Raises:
        KvModelError: nothing says how large the pool is.
    """
    if machine is None:
        if pool_bytes is None:
            if model.settings.max_tokens is None:
                raise KvModelError("the memory for the pool is unknown: pass --gpu or --kv-pool-bytes", "gpu")
            pool_bytes = model.bytes_of(model.settings.max_tokens)
        return _judged(model, demand, pool_bytes)
    plan = _plan(model, demand, machine)
    return (
        plan
        if plan.outcome is Outcome.FITS
        else replace(plan, levers=tuple(helpful(plan, _changes(model, plan, machine))))
    )


def _plan(model: ShareModel, demand: Demand, machine: Machine) -> EnginePlan:
    settings = model.settings
    overheads = machine.overheads(settings.tensor_parallel, settings.tokens_in_step)
    weights = max(machine.weights(settings.tensor_parallel, settings.pipeline_parallel, settings.tensor_parallel))
    available = settings.kind.pool_bytes(settings, machine.gpu_bytes, weights + model.apart_bytes, overheads)
    shortfall = max(0, model.fixed_bytes - available)
    plan = _judged(model, demand, max(0, available))
    used = [
        Part("weights", weights),
        Part("CUDA context", overheads.context_bytes, estimated=True),
        Part("activation", overheads.activation_bytes, estimated=True),
        *(Part(f"{pool.name} pool", pool.bytes) for pool in plan.pools),
        Part("graphs", overheads.graph_bytes, estimated=True),
    ]
    free = machine.gpu_bytes - sum(part.bytes for part in used)
    return replace(
        plan,
        gpu_bytes=machine.gpu_bytes,
        parts=(*used, Part("free", free)),
        shortfall_bytes=shortfall,
        reserve_shortfall_bytes=0 if shortfall else max(0, -free),
    )


def _judged(model: ShareModel, demand: Demand, pool_bytes: int) -> EnginePlan:
    settings, states = model.settings, model.states
    sized = model.pools(pool_bytes)
    needed = [(one, one.needed(demand.context_tokens)) for one in sized]
    held = min(one.units // blocks for one, blocks in needed)
    return EnginePlan(
        engine=settings.engine,
        demand=demand,
        pools=(*(one.pool for one in sized), *(() if states is None else (states,))),
        capacity_tokens=sum(one.blocks for one in sized) * settings.block,
        longest_request_tokens=_longest_request(model, sized),
        max_requests=min(settings.running, held),
        max_running_requests=settings.running,
        kv_bytes_per_token=max(model.token_bytes) if len(sized) == 1 else None,
        headroom_bytes=min((one.units - blocks * demand.requests) * one.block_bytes for one, blocks in needed),
        gpus=settings.tensor_parallel * settings.pipeline_parallel,
        settings={
            settings.kind.share_flag.lstrip("-"): settings.share_ratio,
            **({} if settings.kind.block_flag is None else {settings.kind.block_flag: settings.block}),
            "max_attention_window": None if settings.windows is None else list(settings.windows),
        },
        notes=tuple(_notes(model, sized)),
    )


def _longest_request(model: ShareModel, sized: Sequence[SizedPool]) -> int:
    """The most tokens of a request: what the last pool holds, and more than the windows where each is as it was asked.

    TensorRT-LLM lowers max_seq_len to the largest window only where it cuts one
    (resource_manager.py::_validate_and_adjust_attention_windows).
    """
    asked = {min(model.longest, window) for window in model.settings.windows or ()}
    if model.longest < MAX_TOKENS and all(one.units and one.window in asked for one in sized):
        return model.longest
    held = sized[-1].units * model.settings.block
    return min(model.longest, held, sized[-1].window or held)


def _notes(model: ShareModel, sized: Sequence[SizedPool]) -> Iterator[str]:
    settings = model.settings
    if settings.kind.requests_by_gpu and not (settings.gpu_name or settings.max_requests):
        yield "--max-batch-size goes by the name of the GPU: pass --gpu NAME"
    if model.windows and settings.windows is None:
        yield "sliding-window layers keep every token" + (
            " unless max_attention_window is set" if settings.engine == "trtllm" else ""
        )
    if model.states is not None:
        where = "outside the KV pool, as until 1.2" if model.apart_bytes else "in the KV pool, as since 1.3"
        yield f"the states of --max_batch_size requests are {where}"
    if settings.uses_manager_v2:
        yield "KVCacheManagerV2 takes memory in granules: it may have a block or two fewer"
    elif settings.manager_v2 == "auto" and settings.engine == "trtllm" and (model.states is not None or len(sized) > 1):
        yield _OTHER_MANAGER
    if not all(one.units for one in sized):
        yield "the engine does not start: no memory for its KV cache"
    elif settings.kind.kept_blocks:
        kept = plural(settings.kind.kept_blocks * settings.block, "token")
        yield f"{kept} of the reported capacity can never be used: the engine keeps the first block"


def _changes(model: ShareModel, plan: EnginePlan, machine: Machine) -> Iterator[tuple[str, str, EnginePlan]]:
    """Changed flags that may help."""
    settings, kind = model.settings, model.settings.kind
    wider = settings.tensor_parallel * 2
    changes: list[tuple[str, str, dict[str, Any]]] = []
    if not plan.reserve_shortfall_bytes and settings.share_ratio < _HIGHER_SHARE:
        changes.append(
            (f"{kind.share_flag} {_HIGHER_SHARE}", "leaves less room for spikes and graphs", {"share": _HIGHER_SHARE})
        )
    if plan.reserve_shortfall_bytes:
        lower = math.floor(settings.share_ratio * 90) / 100
        changes.append((f"{kind.share_flag} {lower:g}", "less KV cache, more room for graphs", {"share": lower}))
    step = settings.tokens_in_step // 2
    changes += [
        (f"{kind.step_flag} {step}", "longer prompts take more steps", {"step_tokens": step}),
        (
            kind.dtype_flag,
            "half the bytes per token, slight accuracy loss",
            {"kv_dtype": kind.dtype_flag.split()[-1]},
        ),
        (f"{kind.parallel_flag} {wider}", f"{plan.gpus * 2} GPUs instead of {plan.gpus}", {"tensor_parallel": wider}),
    ]
    if model.states is not None:
        fewer = min(plan.demand.requests, settings.running)
        changes.append((f"--max_batch_size {fewer}", "fewer requests at once", {"max_requests": fewer}))
    if settings.engine == "trtllm" and model.windows and settings.windows is None:
        windows = model.own_windows
        sizes = ", ".join(str(window) for window in sorted(set(windows)))
        price = "a pool for each window size, all with the same bytes"
        changes.append((f"max_attention_window of {sizes}, in the order of the layers", price, {"windows": windows}))
    for change, price, changed in changes:
        with suppress(KvModelError):
            yield change, price, _plan(model.with_settings(replace(settings, **changed)), plan.demand, machine)
