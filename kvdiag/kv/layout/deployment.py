"""How a model is served, and the cache layout that follows: Architecture x Deployment -> pages on every rank.

In this order: the parallel sizes must divide the model; layers are placed on pipeline stages; the block size is the
given one or the backend's; with recurrent states it is raised until an attention page is as large as a state; each
layer gives its pages on one rank; `groups` decides which of them share a block table. Tensor parallel divides heads and
states, pipeline parallel divides layers; MLA is on every tensor-parallel rank in full. Defaults are those of the
engine, each with the place in its source, since a default that differs looks like drift.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_DRAFT_TOKENS, MAX_RANKS, MAX_TOKENS, check_range
from kvdiag.kv.layout.capacity import CacheLayout, plan_layout
from kvdiag.kv.layout.compressed_pages import compressed_pages, compressed_rows
from kvdiag.kv.layout.dtypes import KvDtype, model_dtype_bytes
from kvdiag.kv.layout.kernel_blocks import (
    CPU_BLOCK_TOKENS,
    DEFAULT_BLOCK_TOKENS,
    INDEXED_BLOCK_TOKENS,
    Platform,
    chosen_kv_dtype,
    default_block_tokens,
    is_indexed,
)
from kvdiag.kv.layout.layers import (
    Architecture,
    AttentionLayer,
    CompressedLayer,
    LatentLayer,
    Layer,
    LayerKind,
    StateLayer,
)
from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms, StateCacheMode, ceil_div

_MAX_BLOCK_TOKENS = 1 << 20
# MLA and states: manager blocks are whole kernel blocks of 128 (platforms/interface.py::_align_hybrid_block_size).
_LATENT_STATE_ALIGNMENT_TOKENS = 128
# What `vllm serve` batches by default: on GPUs below 70 GiB, from 70 GiB on except A100, and from 160 GiB on
# (engine/arg_utils.py::EngineArgs.get_batch_defaults).
DEFAULT_BATCHED_TOKENS = 2_048
_LARGE_GPU_BYTES, _LARGE_BATCHED_TOKENS = 70 << 30, 8_192
_HUGE_GPU_BYTES, _HUGE_BATCHED_TOKENS = 160 << 30, 16_384
USUAL_BATCHED_TOKENS = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 1_024)
"""Values of max_num_batched_tokens to try where no metric reports it, likeliest first."""


# The smallest block an attention kernel takes: v1/attention/backends/flash_attn.py, cpu_attn.py::
# get_supported_kernel_block_sizes.
_KERNEL_BLOCK_TOKENS = {Platform.CUDA: 16, Platform.CPU: 32}


def default_batched_tokens(gpu_bytes: int, gpu: str) -> int:
    """The tokens that `vllm serve` batches by default on a GPU of that size and name."""
    if gpu_bytes >= _HUGE_GPU_BYTES:
        return _HUGE_BATCHED_TOKENS
    large = gpu_bytes >= _LARGE_GPU_BYTES and "a100" not in gpu.lower()
    return _LARGE_BATCHED_TOKENS if large else DEFAULT_BATCHED_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The engine's settings that decide cost and capacity. The defaults are those of `vllm serve` 0.32 on a GPU.

    `compute_capability` is the GPU's (90 for Hopper); None stands for one whose formats are Hopper's. `blocks_override`
    is --num-gpu-blocks-override: the pool has so many blocks, not as many as the memory holds.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    block_size_tokens: int | None = None
    kv_dtype: str = "auto"
    state_dtype: str | None = None
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    max_in_flight_tokens: int | None = None
    async_scheduling: bool | None = None
    prefix_caching: bool = True
    state_cache_mode: StateCacheMode | None = None
    hybrid_manager: bool | None = None
    speculative_tokens: int = 0
    draft_layers: tuple[Layer, ...] = ()
    platform: Platform = Platform.CUDA
    compute_capability: int | None = None
    blocks_override: int | None = None

    def __post_init__(self) -> None:
        for name, value, high in (
            ("tensor_parallel", self.tensor_parallel, MAX_RANKS),
            ("pipeline_parallel", self.pipeline_parallel, MAX_RANKS),
            ("decode_context_parallel", self.decode_context_parallel, MAX_RANKS),
            ("max_num_batched_tokens", self.max_num_batched_tokens, MAX_TOKENS),
            ("block_size", self.block_size_tokens, _MAX_BLOCK_TOKENS),
            ("max_in_flight_tokens", self.max_in_flight_tokens, MAX_TOKENS),
            ("num_gpu_blocks_override", self.blocks_override, MAX_TOKENS),
        ):
            check_range(name, 1 if value is None else value, 1, high)
        check_range("num_speculative_tokens", self.speculative_tokens, 0, MAX_DRAFT_TOKENS)
        ranks, shared = self.tensor_parallel, self.decode_context_parallel
        if ranks % shared:
            raise KvModelError(
                f"decode_context_parallel {shared} must divide tensor_parallel {ranks}", "decode_context_parallel"
            )

    @property
    def steps_in_flight(self) -> int:
        """Steps scheduled before the running one is done: 1 with async scheduling."""
        chosen = self.async_scheduling
        return int(self.platform is Platform.CUDA if chosen is None else chosen)

    @property
    def in_flight_tokens(self) -> int:
        """config/vllm.py::VllmConfig.max_in_flight_tokens: concurrent batches x tokens of a batch."""
        if self.max_in_flight_tokens is not None:
            return self.max_in_flight_tokens
        return (self.pipeline_parallel + self.steps_in_flight) * self.max_num_batched_tokens

    def request_terms(self, architecture: Architecture, *, encoder_tokens: int | None = None) -> RequestTerms:
        """What decides the blocks planned for a request, and with its own `encoder_tokens` those it holds."""
        # config/scheduler.py sets max_num_encoder_input_tokens to a step's tokens.
        most_encoder_tokens = self.max_num_batched_tokens
        return RequestTerms(
            max_in_flight_tokens=self.in_flight_tokens,
            encoder_tokens=most_encoder_tokens if encoder_tokens is None else encoder_tokens,
            steps_in_flight=self.steps_in_flight,
            decode_context_parallel=self.decode_context_parallel,
            state_cache_mode=self.resolved_state_cache_mode(architecture),
        )

    def resolved_kv_dtype(self, architecture: Architecture) -> KvDtype:
        """The cache's number format, as the attention backend for this GPU stores it."""
        return chosen_kv_dtype(self.kv_dtype, architecture, self.platform, self.compute_capability)

    def resolved_state_cache_mode(self, architecture: Architecture) -> StateCacheMode:
        """`--mamba-cache-mode`; by default `align` where prefix caching runs on a model with states, else `none`."""
        if self.state_cache_mode is not None:
            return self.state_cache_mode
        if architecture.is_hybrid and self.prefix_caching:
            return StateCacheMode.ALIGN
        return StateCacheMode.NONE


def deployed_layout(architecture: Architecture, deployment: Deployment) -> CacheLayout:
    """The pages of every layer on every pipeline stage, grouped as the engine groups them."""
    _check_division(architecture, deployment)
    bounds = stage_ends(architecture.depth, deployment)
    placed: list[tuple[Layer, int]] = [
        (layer, next(number for number, end in enumerate(bounds) if layer.index < end)) for layer in architecture.layers
    ]
    placed.extend((layer, deployment.pipeline_parallel - 1) for layer in deployment.draft_layers)
    kv_dtype, block = deployment.resolved_kv_dtype(architecture), deployment.block_size_tokens
    if block is None:
        block = default_block_tokens(architecture, kv_dtype, deployment.platform, deployment.compute_capability)
    context = _RankContext(architecture=architecture, deployment=deployment, kv_dtype=kv_dtype, block_tokens=block)
    context = replace(context, block_tokens=_coupled_block_tokens(context))
    pages = [(page, stage) for layer, stage in placed for page in _layer_pages(layer, context)]
    return plan_layout(
        [page for page, _ in pages],
        stages=[stage for _, stage in pages],
        hybrid_manager=_hybrid_manager(architecture, deployment),
        packed=architecture.is_compressed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankContext:
    """What the pages of one rank depend on besides the layer."""

    architecture: Architecture
    deployment: Deployment
    kv_dtype: KvDtype
    block_tokens: int


def _hybrid_manager(architecture: Architecture, deployment: Deployment) -> bool:
    """Whether local layers free old blocks: on unless configured otherwise, off for chunked attention with a drafter
    (config/vllm.py::VllmConfig; before VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE became the default, off for
    every chunked model).
    """
    if deployment.hybrid_manager is not None:
        return deployment.hybrid_manager
    return not (LayerKind.CHUNKED in architecture.kinds and deployment.draft_layers)


def check_heads(architecture: Architecture, ranks: int) -> None:
    """Refuse a number of tensor-parallel ranks that does not divide the query heads, as every engine does that splits
    heads: vLLM, SGLang, TensorRT-LLM, TGI, LMDeploy.
    """
    heads = architecture.attention_heads
    if heads and heads % ranks:
        raise KvModelError(f"tensor_parallel {ranks} must divide num_attention_heads {heads}", "tensor_parallel")


def _check_division(architecture: Architecture, deployment: Deployment) -> None:
    """config/model.py::ModelConfig.verify_with_parallel_config."""
    check_heads(architecture, deployment.tensor_parallel)
    _check_context_parallel(architecture, deployment)
    if deployment.pipeline_parallel > architecture.depth:
        raise KvModelError(
            f"pipeline_parallel {deployment.pipeline_parallel} exceeds num_hidden_layers {architecture.depth}",
            "pipeline_parallel",
        )


def _check_context_parallel(architecture: Architecture, deployment: Deployment) -> None:
    """Decode context parallel splits what would be copies of KV heads (the same function; MLA has one row for all)."""
    ranks, shared = deployment.tensor_parallel, deployment.decode_context_parallel
    kv_heads = max((layer.kv_heads for layer in architecture.layers if isinstance(layer, AttentionLayer)), default=0)
    if shared == 1 or architecture.uses_mla or not kv_heads:
        return
    most = ranks // kv_heads
    queries = architecture.attention_heads // kv_heads
    if shared > most or queries % shared:
        raise KvModelError(
            f"decode_context_parallel {shared} is not possible with {kv_heads} KV heads of {queries} query heads: it "
            f"needs tensor_parallel of at least {shared * kv_heads} (now {ranks}), and must divide {queries}",
            "decode_context_parallel",
        )


def check_block_size(architecture: Architecture, deployment: Deployment) -> None:
    """Whether an attention kernel supports the requested block size (get_supported_kernel_block_sizes of
    v1/attention/backends/; on a CPU 16 is the least that cpu_attn.py::_get_attn_isa has a form for, and an indexer
    reads pages of 64, mla/indexer.py). Raises KvModelError where none does.
    """
    block = deployment.block_size_tokens
    if block is None or not any(isinstance(layer, AttentionLayer | LatentLayer) for layer in architecture.layers):
        return
    indexed = is_indexed(architecture) and deployment.platform is Platform.CUDA
    unit = INDEXED_BLOCK_TOKENS if indexed else DEFAULT_BLOCK_TOKENS
    if block % unit:
        raise KvModelError(
            f"block_size is {block}: kernels for this model on {deployment.platform} need a multiple of {unit}",
            "block_size",
        )


def stage_ends(depth: int, deployment: Deployment) -> tuple[int, ...]:
    """The first layer beyond each stage (distributed/utils.py::get_pp_indices: what does not divide goes to the stages
    before the last, from the back).
    """
    stages = deployment.pipeline_parallel
    sizes = [depth // stages] * stages
    for place in range(2, depth % stages + 2):
        sizes[-place] += 1
    return tuple(accumulate(sizes))


def processor_note(architecture: Architecture, deployment: Deployment) -> str:
    """A caution where a default depends on the CPU's own instructions; empty elsewhere.

    Without AMX, vLLM 0.32 uses blocks of 16 for latent attention on a CPU, with any --block-size; without AVX-512 BF16
    it keeps recurrent states in the model's own format (platforms/cpu.py::check_and_update_config).
    """
    if deployment.platform is not Platform.CPU:
        return ""
    if architecture.uses_mla and not deployment.block_size_tokens:
        return f"assumes a CPU with AMX (blocks of {CPU_BLOCK_TOKENS} tokens); for other CPUs pass --block-size 16"
    recurrent = [
        layer.state for layer in architecture.layers if isinstance(layer, StateLayer) and layer.state.recurrent_heads
    ]
    own = {state.recurrent_dtype or architecture.state_dtype or architecture.dtype for state in recurrent} - {"float32"}
    if deployment.state_dtype is not None or not own:
        return ""
    return f"assumes a CPU with AVX-512 BF16 (float32 states); for others pass --mamba-ssm-cache-dtype {min(own)}"


def formats_note(architecture: Architecture, deployment: Deployment) -> str:
    """A caution where latent attention gets Hopper's formats because the GPU's generation is not known; else empty."""
    if deployment.platform is not Platform.CUDA or deployment.compute_capability is not None:
        return ""
    block_depends = architecture.uses_mla and deployment.block_size_tokens is None
    if not (block_depends or is_indexed(architecture) or architecture.is_compressed):
        return ""
    return "formats of Hopper assumed: the GPU's compute capability is not known"


def _coupled_block_tokens(context: _RankContext) -> int:
    """The block size once attention pages are as large as state pages
    (platforms/interface.py::_align_hybrid_block_size). State pages are padded up to it by the grouping.
    """
    block = context.block_tokens
    states = [layer for layer in context.architecture.layers if isinstance(layer, StateLayer)]
    attention = [layer for layer in context.architecture.layers if isinstance(layer, AttentionLayer | LatentLayer)]
    if not states or not attention:
        return block
    row_bytes = _layer_pages(attention[0], replace(context, block_tokens=1))[0].page_bytes
    kernel = _KERNEL_BLOCK_TOKENS[context.deployment.platform]
    align = max(kernel, block)
    if context.architecture.uses_mla:
        align = max(align, _LATENT_STATE_ALIGNMENT_TOKENS)
    state_bytes = max(_state_page(layer, context).page_bytes for layer in states)
    coupled = ceil_div(ceil_div(state_bytes, align * row_bytes) * align, kernel) * kernel
    return max(block, coupled)


def _layer_pages(layer: Layer, context: _RankContext) -> tuple[PageSpec, ...]:
    match layer:
        case AttentionLayer():
            return (_attention_page(layer, context),)
        case LatentLayer():
            return _latent_pages(layer, context)
        case StateLayer():
            return (_state_page(layer, context),)
        case CompressedLayer():
            return _compressed_pages(layer, context)
        case _:
            return ()


def _attention_page(layer: AttentionLayer, context: _RankContext) -> PageSpec:
    kv_dtype = context.kv_dtype
    ranks = context.deployment.tensor_parallel
    if layer.kv_heads % ranks and ranks % layer.kv_heads:
        raise KvModelError(
            f"tensor_parallel {ranks} must divide the {layer.kv_heads} KV heads or be a multiple of them",
            "tensor_parallel",
        )
    retained = _retained_tokens(context) if layer.kind is LayerKind.SLIDING else 0
    return PageSpec(
        kind=PageKind(layer.kind),
        block_size_tokens=context.block_tokens,
        # config/model.py::ModelConfig.get_num_kv_heads: fewer KV heads than ranks are replicated.
        heads=max(1, layer.kv_heads // ranks),
        row_bytes=kv_dtype.head_bytes(head_size=layer.head_size, head_size_v=layer.head_size_v),
        variant=f"{kv_dtype.name} {layer.head_size} {layer.head_size_v}",
        window_tokens=layer.window_tokens,
        chunk_tokens=layer.chunk_tokens,
        retained_tokens=retained,
    )


def _retained_tokens(context: _RankContext) -> int:
    """Tokens below a window that several draft modules read again
    (config/vllm.py::VllmConfig.num_prefill_lookahead_tokens, SlidingWindowSpec.extra_retained_tokens).
    """
    drafts = context.deployment.speculative_tokens
    return drafts - 1 if min(len(context.deployment.draft_layers), drafts) > 1 else 0


def _compressed_pages(layer: CompressedLayer, context: _RankContext) -> tuple[PageSpec, ...]:
    deployment = context.deployment
    rows = compressed_rows(deployment.kv_dtype, ring=layer.ring, compute_capability=deployment.compute_capability)
    return tuple(
        compressed_pages(
            layer,
            rows,
            block_tokens=context.block_tokens,
            drafts=deployment.speculative_tokens,
            retained_tokens=_retained_tokens(context),
        )
    )


def _latent_pages(layer: LatentLayer, context: _RankContext) -> tuple[PageSpec, ...]:
    kv_dtype = context.kv_dtype
    page = PageSpec(
        kind=PageKind.MLA,
        block_size_tokens=context.block_tokens,
        heads=1,
        row_bytes=kv_dtype.latent_bytes(latent_size=layer.latent_size),
        variant=f"{kv_dtype.name} {layer.latent_size} {bool(layer.indexer_row_bytes)}",
    )
    if layer.indexer_row_bytes is None:
        return (page,)
    indexer = replace(page, row_bytes=layer.indexer_row_bytes, variant="indexer")
    return (page, indexer)


def _state_page(layer: StateLayer, context: _RankContext) -> PageSpec:
    architecture, deployment = context.architecture, context.deployment
    element = model_dtype_bytes(architecture.dtype)
    recurrent = deployment.state_dtype or layer.state.recurrent_dtype or architecture.state_dtype
    if deployment.state_dtype is None and deployment.platform is Platform.CPU:
        # platforms/cpu.py::CpuPlatform.check_and_update_config, on every CPU that has AVX512-BF16.
        recurrent = "float32"
    size = layer.state.rank_bytes(
        tensor_parallel=deployment.tensor_parallel,
        speculative_tokens=deployment.speculative_tokens,
        conv_element_bytes=element,
        recurrent_element_bytes=element if recurrent is None else model_dtype_bytes(recurrent),
    )
    return PageSpec(
        kind=PageKind.STATE,
        block_size_tokens=context.block_tokens,
        heads=1,
        row_bytes=size,
        variant=f"{layer.kind}",
        speculative_blocks=deployment.speculative_tokens,
        checkpoint_blocks=layer.state.prefill_checkpoints,
        dcp_sharded=False,
    )
