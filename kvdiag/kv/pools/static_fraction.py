"""A plan for SGLang: weights and pools share --mem-fraction-static, activations and graphs live in the rest.

That is the opposite of vLLM's fraction, with two opposite remedies: a server that cannot start has too small a fraction
for its weights, so raise it; one that runs out of memory under load has too large a one, so lower it. The default is
computed from the device and the flags (srt/arg_groups/memory_hook.py, 0.5.23). What activations and graphs will really
need is an estimate.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.pools.engine_plan import EnginePlan, EnginePool, Machine, Part, helpful
from kvdiag.kv.pools.token_cells import TokenSettings
from kvdiag.kv.pools.token_pools import GIB, TokenModel, TokenPools

MIB = 1 << 20
# Below so many MiB: chunked prefill size, decode graph batch with tp < 4, and with more.
_DEVICE_DEFAULTS = (
    (20 << 10, 2_048, 8, 8),
    (35 << 10, 4_096, 48, 160),
    (60 << 10, 4_096, 32, 160),
    (160 << 10, 8_192, 256, 512),
    (1 << 40, 16_384, 512, 512),
)
_FEW_RANKS = 4
_LARGE_DEVICE_MIB, _LARGE_RESERVE_MIB = 60 << 10, 10 << 10
_META_MIB, _ACTIVATION_MIB_PER_TOKEN, _LEAST_TOKENS = 512, 1.5, 2_048
# --max-prefill-tokens, what a step takes of a prompt that is not chunked.
_WHOLE_PROMPT_TOKENS = 16_384
_DECODE_GRAPH_MIB, _PREFILL_GRAPH_MIB, _LATENT_GRAPH_MIB = 2, 8, 1_536
_MANY_GRAPHS = 300
_MOST_LATENT_GRAPH_TOKENS = 8_192
# adjust_mem_fraction_for_vlm: what models with an encoder for images give up, by its size against ViT-L/14; and
# mm_runtime_reservation_gb: its cache, taken from the pool.
_VISION_RATIO, _VISION_STEP, _VISION_BOUNDS = 0.95, 0.1, (0.8, 1.05)
_VIT_LAYERS, _VIT_WIDTH = 24, 1_024
_VISION_CACHE_BYTES = 100 * MIB
_FRACTION_STEP = 0.001
_HIGHEST_FRACTION = 0.95
_LOWEST_FRACTION = 0.1
_LOWER_RATIOS = (0.5, 0.25, 0.1)


def vision_ratio(layers: int | None, width: int | None) -> float:
    """The default fraction with an encoder for images of that size, as a share of the one without."""
    size = (layers or _VIT_LAYERS) * (width or _VIT_WIDTH) ** 2 / (_VIT_LAYERS * _VIT_WIDTH**2)
    low, high = _VISION_BOUNDS
    return _VISION_RATIO * max(low, min(high, 1 - _VISION_STEP * (size - 1)))


def resolved(settings: TokenSettings, gpu_bytes: int, *, latent: bool) -> TokenSettings:
    """The settings with SGLang's defaults for a device of that size, its fraction included."""
    gpu_mib = gpu_bytes / MIB
    _, chunk, few, many = next(row for row in _DEVICE_DEFAULTS if gpu_mib < row[0])
    chunk = settings.chunked_prefill_size or chunk
    batch = settings.graph_batch or (few if settings.tensor_parallel < _FEW_RANKS else many)
    if settings.graph_batch is None and settings.max_running_requests is not None:
        batch = min(batch, settings.max_running_requests)
    fraction = settings.mem_fraction_static
    if fraction is None:
        fraction = round((gpu_mib - _reserve_mib(settings, gpu_mib, chunk, batch, latent=latent)) / gpu_mib, 3)
        if not 0 < fraction <= 1:
            raise KvModelError(f"SGLang's reserve exceeds a GPU of {gpu_mib:,.0f} MiB", "gpu")
        fraction *= settings.vision_ratio or 1.0
    return replace(settings, chunked_prefill_size=chunk, graph_batch=batch, mem_fraction_static=fraction)


def _reserve_mib(settings: TokenSettings, gpu_mib: float, chunk: int, batch: int, *, latent: bool) -> float:
    """What handle_gpu_memory_settings keeps outside the fraction."""
    step = chunk if chunk > 0 else _WHOLE_PROMPT_TOKENS
    reserve = _META_MIB + _ACTIVATION_MIB_PER_TOKEN * max(step, _LEAST_TOKENS)
    reserve += settings.tensor_parallel * settings.pipeline_parallel / 8 * 1024
    if settings.graphs:
        reserve += _DECODE_GRAPH_MIB * batch
        groups = settings.attention_parallel
        if groups > 1:
            reserve += batch * groups * (3 if batch <= _MANY_GRAPHS else 4.5)
        longest = min(chunk, _MOST_LATENT_GRAPH_TOKENS) if latent else chunk
        if settings.max_total_tokens is not None:
            longest = min(longest, settings.max_total_tokens)
        reserve += _LATENT_GRAPH_MIB if latent else _PREFILL_GRAPH_MIB * _prefill_graphs(longest)
    if gpu_mib > _LARGE_DEVICE_MIB:
        reserve = max(reserve, _LARGE_RESERVE_MIB)
    return reserve


def _prefill_graphs(longest: int) -> int:
    """How many lengths are captured (cuda_graph_hook.py::generate_prefill_cuda_graph_batch_sizes)."""
    steps = (
        (4, 33, 4),
        (48, 257, 16),
        (288, 513, 32),
        (576, 1_025, 64),
        (1_280, 4_097, 256),
        (4_608, longest + 1, 512),
    )
    return sum(size <= longest for start, stop, step in steps for size in range(start, stop, step))


def plan_tokens(
    model: TokenModel, demand: Demand, *, machine: Machine | None = None, pool_bytes: int | None = None
) -> EnginePlan:
    """What SGLang makes of its flags: on GPUs, of a pool of so many bytes per rank, or of --max-total-tokens alone.

    Raises:
        KvModelError: the flags are impossible, or nothing says how large the pool is.
    """
    if machine is None:
        pools = model.pools_of(None if pool_bytes is None else pool_bytes / GIB)
        return _judged(model, pools, demand)
    plan = _plan(model, demand, machine)
    return (
        plan
        if plan.outcome is Outcome.FITS
        else replace(plan, levers=tuple(helpful(plan, _changes(model, plan, machine))))
    )


def _plan(model: TokenModel, demand: Demand, machine: Machine) -> EnginePlan:
    settings = resolved(model.settings, machine.gpu_bytes, latent=model.latent)
    model = model.with_settings(settings)
    fraction = settings.mem_fraction_static or 1.0
    chunk = settings.chunked_prefill_size or _LEAST_TOKENS
    overheads = machine.overheads(settings.tensor_parallel, chunk if chunk > 0 else _WHOLE_PROMPT_TOKENS)
    weights = max(machine.weights(settings.tensor_parallel, settings.pipeline_parallel, settings.ranks))
    free = machine.gpu_bytes - overheads.context_bytes
    reserve = round(free * (1 - fraction))
    budget = free - weights - reserve - (0 if settings.vision_ratio is None else _VISION_CACHE_BYTES)
    base = [Part("weights", weights), Part("CUDA context", overheads.context_bytes, estimated=True)]
    try:
        pools = model.pools_of(budget / GIB)
    except KvModelError as error:
        needed = _spread(demand, settings) * demand.context_tokens * max(cell.full_bytes for cell in model.cells)
        return EnginePlan(
            engine="sglang",
            demand=demand,
            pools=(),
            capacity_tokens=0,
            longest_request_tokens=0,
            max_requests=0,
            headroom_bytes=min(-1, budget) - needed,
            shortfall_bytes=max(1, -budget),
            gpus=settings.gpus,
            groups=settings.groups,
            gpu_bytes=machine.gpu_bytes,
            parts=(*base, Part("outside the fraction", reserve)),
            settings=_shown(model, settings),
            notes=("SGLang does not start: the weights do not fit on the GPU",) if weights >= free else (str(error),),
        )
    plan = _judged(model, pools, demand)
    needed = overheads.activation_bytes + overheads.graph_bytes + pools.request_table_bytes
    left = machine.gpu_bytes - sum(part.bytes for part in base) - plan.pool_bytes
    uses = (
        Part("activation", overheads.activation_bytes, estimated=True),
        Part("graphs", overheads.graph_bytes if settings.graphs else 0, estimated=True),
        Part("request table", pools.request_table_bytes),
    )
    return replace(
        plan,
        parts=(
            *base,
            *(Part(f"{pool.name} pool", pool.bytes) for pool in plan.pools),
            *uses,
            Part("free", left - needed),
        ),
        reserve_shortfall_bytes=max(0, needed - left),
        gpu_bytes=machine.gpu_bytes,
    )


def _shown(model: TokenModel, settings: TokenSettings) -> dict[str, object]:
    return {
        "mem_fraction_static": None if settings.mem_fraction_static is None else round(settings.mem_fraction_static, 4),
        "page_size": model.page,
        "chunked_prefill_size": settings.chunked_prefill_size,
        "cuda_graph_max_bs": settings.graph_batch,
        "max_total_tokens": settings.max_total_tokens,
        "swa_full_tokens_ratio": settings.window_ratio if model.windowed else None,
        "dp_size": settings.groups if settings.groups > 1 else None,
    }


def _judged(model: TokenModel, pools: TokenPools, demand: Demand) -> EnginePlan:
    """Pools and demand, without what else the GPU holds; requests are spread over the data-parallel groups."""
    settings = model.settings
    page, cell = pools.page, max(pools.cells, key=lambda one: one.full_bytes + one.window_bytes)
    request = -(-demand.context_tokens // page) * page
    sized = [_pool("KV", pools.tokens, page, cell.full_bytes, cell.full_layers, needed=request)]
    if cell.draft_bytes:
        sized.append(
            _pool("draft KV", pools.tokens, page, cell.draft_bytes, model.settings.draft_layers, needed=request)
        )
    if pools.window_tokens is not None:
        window = min(request, -(-(model.window_tokens + page) // page) * page)
        sized.append(
            _pool("window KV", pools.window_tokens, page, cell.window_bytes, cell.window_layers, needed=window)
        )
    sized = [one for one in sized if one[0].layers]
    if pools.state_slots is not None:
        states = EnginePool(
            name="state",
            unit="slot",
            units=pools.state_slots,
            bytes=(pools.state_slots + 1) * cell.state_bytes,
            layers=cell.state_layers,
        )
        sized.append((states, model.slots_per_request))
    held = min((pool.units * pool.unit_tokens // needed for pool, needed in sized), default=0)
    headroom = min(
        (
            (pool.units * pool.unit_tokens - needed * _spread(demand, settings))
            * pool.bytes
            // (pool.units * pool.unit_tokens)
            for pool, needed in sized
        ),
        default=0,
    )
    rows = [pool for pool, _ in sized if pool.unit != "slot"]
    return EnginePlan(
        engine="sglang",
        demand=demand,
        pools=tuple(pool for pool, _ in sized),
        capacity_tokens=pools.tokens * settings.groups,
        # A request holds its prompt and all of its output but the last token (managers/tp_worker.py).
        longest_request_tokens=min(pools.context_tokens, pools.tokens) if rows else pools.context_tokens,
        max_requests=min(held, pools.max_running_requests) * settings.groups,
        max_running_requests=pools.max_running_requests * settings.groups,
        kv_bytes_per_token=None if pools.window_tokens is not None else cell.full_bytes + cell.draft_bytes,
        headroom_bytes=headroom,
        gpus=settings.gpus,
        groups=settings.groups,
        settings=_shown(model, settings),
        notes=(f"the longest prompt is {pools.longest_input_tokens:,} tokens",),
    )


def _spread(demand: Demand, settings: TokenSettings) -> int:
    """Requests of the fullest data-parallel group."""
    return -(-demand.requests // settings.groups)


def _pool(name: str, tokens: int, page: int, token_bytes: int, layers: int, *, needed: int) -> tuple[EnginePool, int]:
    """A pool of pages, one more than requests can hold, and the tokens of it that a request needs."""
    pool = EnginePool(
        name=name,
        unit="page" if page > 1 else "token",
        units=tokens // page,
        unit_tokens=page,
        bytes=(tokens + page) * token_bytes,
        layers=layers,
    )
    return pool, needed


def _changes(model: TokenModel, plan: EnginePlan, machine: Machine) -> Iterator[tuple[str, str, EnginePlan | None]]:
    """Changed flags that may help, those of the fraction first."""
    settings = resolved(model.settings, machine.gpu_bytes, latent=model.latent)
    fraction = settings.mem_fraction_static or 1.0

    def tried(**changes: Any) -> EnginePlan | None:
        try:
            return _plan(model.with_settings(replace(model.settings, **changes)), plan.demand, machine)
        except KvModelError:
            return None

    steps = round((_HIGHEST_FRACTION - _LOWEST_FRACTION) / _FRACTION_STEP) + 1
    grid = [round(_LOWEST_FRACTION + step * _FRACTION_STEP, 3) for step in range(steps)]
    others, price = list[float](), ""
    if not plan.admits_demand:
        others = [one for one in grid if one > fraction]
        price = "raise it: weights and KV get more, activations and graphs less"
    elif plan.reserve_shortfall_bytes:
        others = [one for one in reversed(grid) if one < fraction]
        price = "lower it against out-of-memory errors under load: activations and graphs get more, KV less"
    if others:

        def helps(one: float) -> bool:
            found = tried(mem_fraction_static=one)
            return found is not None and (
                not found.reserve_shortfall_bytes if plan.admits_demand else found.admits_demand
            )

        # Where none is enough, the last one gives the most.
        chosen = others[min(bisect_left(others, True, key=helps), len(others) - 1)]
        yield f"--mem-fraction-static {chosen:g}", price, tried(mem_fraction_static=chosen)
    chunk = settings.chunked_prefill_size or 0
    changes: list[tuple[str, str, dict[str, Any]]] = [
        (
            f"--tp-size {settings.tensor_parallel * 2}",
            f"{plan.gpus * 2} GPUs instead of {plan.gpus}",
            {"tensor_parallel": settings.tensor_parallel * 2},
        ),
        ("--kv-cache-dtype fp8_e4m3", "half the bytes per token, slight accuracy loss", {"kv_dtype": "fp8_e4m3"}),
    ]
    if plan.reserve_shortfall_bytes and chunk > _LEAST_TOKENS:
        half = chunk // 2
        changes.append(
            (f"--chunked-prefill-size {half}", "longer prompts take more steps", {"chunked_prefill_size": half})
        )
    if model.windowed:
        changes += [
            (f"--swa-full-tokens-ratio {ratio:g}", "fewer window tokens, more full ones", {"window_ratio": ratio})
            for ratio in _LOWER_RATIOS
            if ratio < settings.window_ratio
        ]
    for change, price, changed in changes:
        yield change, price, tried(**changed)
