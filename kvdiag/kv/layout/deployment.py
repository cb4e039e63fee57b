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
from kvdiag.kv.layout.dtypes import KvDtype
from kvdiag.kv.layout.kernel_blocks import (
    CPU_BLOCK_TOKENS,
    DEFAULT_BLOCK_TOKENS,
    INDEXED_BLOCK_TOKENS,
    SELECTED_BLOCK_TOKENS,
    Platform,
    check_kv_dtype,
    chosen_kv_dtype,
    default_block_tokens,
    is_indexed,
)
from kvdiag.kv.layout.layer_pages import RankContext, coupled_block_tokens, layer_pages, shared_pages
from kvdiag.kv.layout.layers import (
    Architecture,
    AttentionLayer,
    LatentLayer,
    Layer,
    LayerKind,
    StateLayer,
)
from kvdiag.kv.layout.pages import RequestTerms, StateCacheMode

_MAX_BLOCK_TOKENS = 1 << 20
# What `vllm serve` batches by default: on GPUs below 70 GiB, from 70 GiB on except A100, and from 160 GiB on
# (engine/arg_utils.py::EngineArgs.get_batch_defaults).
DEFAULT_BATCHED_TOKENS = 2_048
_LARGE_GPU_BYTES, _LARGE_BATCHED_TOKENS = 70 << 30, 8_192
_HUGE_GPU_BYTES, _HUGE_BATCHED_TOKENS = 160 << 30, 16_384
USUAL_BATCHED_TOKENS = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 1_024)
"""Values of max_num_batched_tokens to try where no metric reports it, likeliest first."""


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
    is --num-gpu-blocks-override: the pool has so many blocks, not as many as the memory holds. `skip_layers` keep the
    model's own format (--kv-cache-dtype-skip-layers: numbers, or sliding_window). `draft_layers` are the drafter's,
    `draft_modules` where they draft one after the other (MTP). `stage_layers` are the layers of each pipeline stage
    where VLLM_PP_LAYER_PARTITION gives them.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    block_size_tokens: int | None = None
    kv_dtype: str = "auto"
    skip_layers: frozenset[str] = frozenset()
    state_dtype: str | None = None
    conv_dtype: str | None = None
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    max_in_flight_tokens: int | None = None
    async_scheduling: bool | None = None
    prefix_caching: bool = True
    state_cache_mode: StateCacheMode | None = None
    hybrid_manager: bool | None = None
    speculative_tokens: int = 0
    draft_layers: tuple[Layer, ...] = ()
    draft_modules: bool = True
    stage_layers: tuple[int, ...] | None = None
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
    context = RankContext(architecture=architecture, deployment=deployment, kv_dtype=kv_dtype, block_tokens=block)
    context = shared_pages(replace(context, block_tokens=coupled_block_tokens(context)))
    pages = [(page, stage) for layer, stage in placed for page in layer_pages(layer, context)]
    hybrid_manager = _hybrid_manager(architecture, deployment)
    if not hybrid_manager and (architecture.has_latent_windows or architecture.index_pool_tokens > 1):
        # kv_cache_utils.py::_promote_local_kv_cache_specs fails with SlidingWindowMLASpec, and with states.
        raise KvModelError(
            f"vLLM 0.32 does not start {architecture.model_type} with --disable-hybrid-kv-cache-manager: leave it out",
            "hybrid_kv_cache_manager",
        )
    return plan_layout(
        [page for page, _ in pages],
        stages=[stage for _, stage in pages],
        hybrid_manager=hybrid_manager,
        packed=architecture.is_packed,
    )


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
    if deployment.pipeline_parallel > 1 and architecture.runs_on_one_stage:
        raise KvModelError(
            f"{architecture.model_type} with several pipeline stages is not modelled: pass --pp 1",
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


def check_kernels(architecture: Architecture, deployment: Deployment) -> None:
    """Whether an attention kernel supports the requested cache format and block size (get_supported_kernel_block_sizes
    of v1/attention/backends/; on a CPU 16 is the least that cpu_attn.py::_get_attn_isa has a form for, and an indexer
    reads pages of 64, mla/indexer.py). Raises KvModelError where none does.
    """
    kv_dtype, capability = deployment.resolved_kv_dtype(architecture), deployment.compute_capability
    if deployment.platform is Platform.CUDA and not (architecture.is_compressed or architecture.has_latent_windows):
        check_kv_dtype(deployment.kv_dtype, architecture, kv_dtype, capability)
    block = deployment.block_size_tokens
    if block is None or not any(isinstance(layer, AttentionLayer | LatentLayer) for layer in architecture.layers):
        return
    indexed = is_indexed(architecture) and deployment.platform is Platform.CUDA
    unit = INDEXED_BLOCK_TOKENS if indexed else DEFAULT_BLOCK_TOKENS
    if architecture.selects_blocks:
        unit = SELECTED_BLOCK_TOKENS
    if block % unit:
        raise KvModelError(
            f"block_size is {block}: kernels for this model on {deployment.platform} need a multiple of {unit}",
            "block_size",
        )


def stage_ends(depth: int, deployment: Deployment) -> tuple[int, ...]:
    """The first layer beyond each stage (distributed/utils.py::get_pp_indices: what does not divide goes to the stages
    before the last, from the back). Raises KvModelError where `stage_layers` are not those of the model.
    """
    stages, given = deployment.pipeline_parallel, deployment.stage_layers
    if given is not None:
        if len(given) != stages or sum(given) != depth or min(given) < 0:
            raise KvModelError(
                f"VLLM_PP_LAYER_PARTITION has {len(given)} stages of {sum(given)} layers: the model's {depth} layers "
                f"are divided over {stages}",
                "pipeline_parallel",
            )
        return tuple(accumulate(given))
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
