"""The pages that each layer takes on one rank, and the block size that layers of several kinds share.

Attention pages hold K and V of the rank's heads, latent pages one row for all heads, state pages a whole state. With
recurrent states the block is raised until an attention page is as large as a state; with layers of two number formats,
until a page of the smaller format holds one of the larger.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.compressed_pages import compressed_pages, compressed_rows
from kvdiag.kv.layout.dtypes import KvDtype, model_dtype_bytes, resolve_kv_dtype
from kvdiag.kv.layout.kernel_blocks import INDEXED_BLOCK_TOKENS, Platform, major_of
from kvdiag.kv.layout.layers import (
    Architecture,
    AttentionLayer,
    CompressedLayer,
    ConvWindowLayer,
    LatentLayer,
    LatentWindowLayer,
    Layer,
    LayerKind,
    StateLayer,
)
from kvdiag.kv.layout.pages import PageKind, PageSpec, ceil_div
from kvdiag.kv.layout.pooled_pages import pool_block_tokens, pooled_pages, ring_page

if TYPE_CHECKING:
    from kvdiag.kv.layout.deployment import Deployment

# MLA and states: manager blocks are whole kernel blocks of 128 (platforms/interface.py::_align_hybrid_block_size).
_LATENT_STATE_ALIGNMENT_TOKENS = 128
_HOPPER, _SIXTEEN_BITS = 9, 16
# The smallest block an attention kernel takes: v1/attention/backends/flash_attn.py, cpu_attn.py::
# get_supported_kernel_block_sizes.
_KERNEL_BLOCK_TOKENS = {Platform.CUDA: 16, Platform.CPU: 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What the pages of one rank depend on besides the layer."""

    architecture: Architecture
    deployment: "Deployment"
    kv_dtype: KvDtype
    block_tokens: int
    shared_page_bytes: int | None = None
    """The page that sliding-window layers are padded to, where layers of two formats share the pool."""

    def dtype_of(self, layer: AttentionLayer | LatentLayer) -> KvDtype:
        """The format of a layer: the model's own where --kv-cache-dtype-skip-layers names it
        (attention.py::Attention, mla_attention.py::MLAAttention).
        """
        skipped = self.deployment.skip_layers
        window = layer.kind is LayerKind.SLIDING and "sliding_window" in skipped
        return self.own_dtype if window or str(layer.index) in skipped else self.kv_dtype

    @property
    def major(self) -> int:
        """The GPU's generation."""
        return major_of(self.deployment.compute_capability)

    @property
    def own_dtype(self) -> KvDtype:
        """The model's own format."""
        return resolve_kv_dtype("auto", model_dtype=self.architecture.dtype)


def coupled_block_tokens(context: RankContext) -> int:
    """The block size once attention pages are as large as state pages
    (platforms/interface.py::_align_hybrid_block_size). State pages are padded up to it by the grouping, or where blocks
    hold pages of several sizes by `_state_page`.
    """
    block = context.block_tokens
    states = [layer for layer in context.architecture.layers if isinstance(layer, StateLayer)]
    attention = [layer for layer in context.architecture.layers if isinstance(layer, AttentionLayer | LatentLayer)]
    if not states or not attention:
        return block
    kernel = unit = _KERNEL_BLOCK_TOKENS[context.deployment.platform]
    if isinstance(attention[0], LatentLayer) and attention[0].pool_tokens > 1:
        kernel, unit = pool_block_tokens(attention[0].pool_tokens, context.major)
    row_bytes = _coupled_row_bytes(attention[0], context)
    align = max(kernel, block)
    if context.architecture.uses_mla:
        align = max(align, _LATENT_STATE_ALIGNMENT_TOKENS)
    state_bytes = max(_state_page(layer, context).content_bytes for layer in states)
    coupled = ceil_div(ceil_div(state_bytes, align * row_bytes) * align, unit) * unit
    return max(block, coupled)


def _coupled_row_bytes(layer: AttentionLayer | LatentLayer, context: RankContext) -> int:
    """Bytes of one token in an attention layer, as the block size is derived from them: of a packed row its elements
    alone.
    """
    if isinstance(layer, LatentLayer) and layer.pool_tokens > 1:
        return layer.latent_size * context.kv_dtype.element_bits // 8
    if isinstance(layer, AttentionLayer):
        return _attention_page(layer, replace(context, block_tokens=1)).page_bytes
    return layer_pages(layer, replace(context, block_tokens=1))[0].page_bytes


def layer_pages(layer: Layer, context: RankContext) -> tuple[PageSpec, ...]:
    """The pages of one layer: none without a cache, several where it keeps caches of several kinds."""
    match layer:
        case AttentionLayer():
            return _attention_pages(layer, context)
        case LatentLayer():
            return _latent_pages(layer, context)
        case LatentWindowLayer():
            return (_latent_window_page(layer, context),)
        case StateLayer():
            return (_state_page(layer, context),)
        case ConvWindowLayer():
            return (_conv_window_page(layer, context),)
        case CompressedLayer():
            return _compressed_pages(layer, context)
        case _:
            return ()


def shared_pages(context: RankContext) -> RankContext:
    """The context with --kv-cache-dtype-skip-layers: blocks so large that a page of the quantized format holds one of
    the model's own (platforms/interface.py::_align_heterogeneous_kv_block_size; platforms/cpu.py has no such step).
    """
    attention = [layer for layer in context.architecture.layers if isinstance(layer, AttentionLayer | LatentLayer)]
    deployment = context.deployment
    if not deployment.skip_layers or not attention or deployment.platform is Platform.CPU:
        return context
    if context.architecture.index_pool_tokens > 1:
        raise KvModelError(
            f"the layers of {context.architecture.model_type} in two formats are not modelled: name no layers",
            "kv_cache_dtype_skip_layers",
        )
    # The engine compares the formats by the model's one head size.
    one_token = replace(context, block_tokens=1)
    pages = [
        replace(one_token, kv_dtype=dtype, deployment=replace(deployment, skip_layers=frozenset()))
        for dtype in (context.kv_dtype, context.own_dtype)
    ]
    quantized, own = (layer_pages(attention[0], page)[0].page_bytes for page in pages)
    if own == quantized:
        return context
    kernel = _KERNEL_BLOCK_TOKENS[deployment.platform]
    align = max(kernel, context.block_tokens)
    needed = own * kernel
    states = [layer for layer in context.architecture.layers if isinstance(layer, StateLayer)]
    if states:
        needed = max(needed, context.block_tokens * quantized)
    kinds = {layer.kind for layer in attention}
    full = any(context.dtype_of(layer) is not context.kv_dtype for layer in attention if not _is_window(layer))
    if LayerKind.SLIDING in kinds and full:
        raise KvModelError(
            "vLLM 0.32 does not start with full-attention layers in --kv-cache-dtype-skip-layers of a model with "
            "sliding windows: name sliding-window layers alone",
            "kv_cache_dtype_skip_layers",
        )
    block = max(context.block_tokens, align * ceil_div(needed, align * quantized))
    return replace(context, block_tokens=block, shared_page_bytes=block * quantized)


def _attention_pages(layer: AttentionLayer, context: RankContext) -> tuple[PageSpec, ...]:
    page = _attention_page(layer, context)
    if layer.index_row_bytes is None:
        return (page,)
    # minimax_m3/common/indexer.py::MiniMaxM3IndexerCache, qwen4_exp/common/qsa_cache.py::QSACompressedKeyCache
    keys = replace(page, kind=PageKind.MLA, heads=1, row_bytes=layer.index_row_bytes, variant="index keys")
    if layer.pool_tokens == 1:
        return (page, keys)
    drafts = context.deployment.speculative_tokens
    # QSAKeyStateCache: whole pools.
    rows = ceil_div(layer.pool_tokens + drafts, layer.pool_tokens) * layer.pool_tokens
    if context.block_tokens % rows:
        raise KvModelError(
            f"block_size is {context.block_tokens}: with {drafts} drafts this model needs a multiple of {rows}",
            "block_size",
        )
    return (page, replace(keys, tokens_per_row=layer.pool_tokens), ring_page(rows, layer.pool_row_bytes))


def _is_window(layer: Layer) -> bool:
    return layer.kind is LayerKind.SLIDING


def _attention_page(layer: AttentionLayer, context: RankContext) -> PageSpec:
    kv_dtype = context.dtype_of(layer)
    ranks = context.deployment.tensor_parallel
    if layer.kv_heads % ranks and ranks % layer.kv_heads:
        raise KvModelError(
            f"tensor_parallel {ranks} must divide the {layer.kv_heads} KV heads or be a multiple of them",
            "tensor_parallel",
        )
    if layer.sink_tokens:
        _check_sinks(layer, context)
    retained = _retained_tokens(context) if layer.kind is LayerKind.SLIDING else 0
    page = PageSpec(
        kind=PageKind(layer.kind),
        block_size_tokens=context.block_tokens,
        # config/model.py::ModelConfig.get_num_kv_heads: fewer KV heads than ranks are replicated.
        heads=max(1, layer.kv_heads // ranks),
        row_bytes=kv_dtype.head_bytes(head_size=layer.head_size, head_size_v=layer.head_size_v)
        * layer.positions_per_token,
        variant=f"{kv_dtype.name} {layer.head_size} {layer.head_size_v}",
        window_tokens=layer.window_tokens,
        chunk_tokens=layer.chunk_tokens,
        retained_tokens=retained,
    )
    shared = context.shared_page_bytes
    if shared is None or layer.kind is not LayerKind.SLIDING:
        return page
    # attention.py::Attention.get_kv_cache_spec: the largest kernel block that the shared page holds.
    kernel = _KERNEL_BLOCK_TOKENS[context.deployment.platform]
    block = max(kernel, shared // (page.heads * page.row_bytes) // kernel * kernel)
    return replace(page, block_size_tokens=block, padded_page_bytes=shared)


def _check_sinks(layer: AttentionLayer, context: RankContext) -> None:
    """openpangu.py::OpenPanguSinkAttention, single_type_kv_cache_manager.py::SinkFullAttentionManager."""
    if layer.kv_heads < context.deployment.tensor_parallel:
        raise KvModelError(
            f"tensor_parallel {context.deployment.tensor_parallel} exceeds the {layer.kv_heads} KV heads, which vLLM "
            "does not copy for this model",
            "tensor_parallel",
        )
    kv_dtype = context.dtype_of(layer)
    if kv_dtype.element_bits != _SIXTEEN_BITS and not (
        context.major == _HOPPER and kv_dtype.name in ("fp8", "fp8_e4m3")
    ):
        raise KvModelError(
            "vLLM runs this model with FlashAttention, for 16 bits and on Hopper fp8: pass --kv-dtype bfloat16",
            "kv_dtype",
        )
    if layer.sink_tokens % context.block_tokens:
        raise KvModelError(
            f"block_size is {context.block_tokens}: it must divide param_sink_number {layer.sink_tokens}", "block_size"
        )


def _retained_tokens(context: RankContext) -> int:
    """Tokens below a window that several draft modules read again
    (config/vllm.py::VllmConfig.num_prefill_lookahead_tokens, SlidingWindowSpec.extra_retained_tokens).
    """
    deployment = context.deployment
    drafts = deployment.speculative_tokens
    modules = sum(not isinstance(layer, ConvWindowLayer) for layer in deployment.draft_layers)
    return drafts - 1 if deployment.draft_modules and min(modules, drafts) > 1 else 0


def _compressed_pages(layer: CompressedLayer, context: RankContext) -> tuple[PageSpec, ...]:
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


def _latent_pages(layer: LatentLayer, context: RankContext) -> tuple[PageSpec, ...]:
    kv_dtype = context.dtype_of(layer)
    page = PageSpec(
        kind=PageKind.MLA,
        block_size_tokens=context.block_tokens,
        heads=1,
        row_bytes=kv_dtype.latent_bytes(latent_size=layer.latent_size),
        variant=f"{kv_dtype.name} {layer.latent_size} {bool(layer.indexer_row_bytes)}",
    )
    packed = context.architecture.has_latent_windows
    if packed:
        # mla/sparse_utils.py::align_blocks_to_rows
        page = replace(page, stride_bytes=page.row_bytes)
    if layer.indexer_row_bytes is None:
        return (page,)
    if layer.pool_tokens > 1:
        drafts = context.deployment.speculative_tokens
        return tuple(pooled_pages(layer, page, kv_dtype, major=context.major, drafts=drafts))
    indexer = replace(page, row_bytes=layer.indexer_row_bytes, variant="indexer", stride_bytes=1)
    if packed and context.block_tokens != INDEXED_BLOCK_TOKENS:
        # worker/utils.py::customize_attention_spec: what the indexer's kernel reads at once stays whole.
        indexer = replace(indexer, stride_bytes=INDEXED_BLOCK_TOKENS * indexer.row_bytes)
    return (page, indexer)


def _conv_window_page(layer: ConvWindowLayer, context: RankContext) -> PageSpec:
    """models/inkling/nvidia/sconv_swa_attn.py::InklingConvState."""
    ranks = context.deployment.tensor_parallel
    if layer.kv_heads % ranks:
        raise KvModelError(
            f"tensor_parallel {ranks} must divide the {layer.kv_heads} KV heads, which vLLM does not copy for this "
            "model",
            "tensor_parallel",
        )
    if context.own_dtype.name != "bfloat16":
        raise KvModelError(f"vLLM serves this model in bfloat16, not {context.own_dtype.name}", "dtype")
    return PageSpec(
        kind=PageKind.SLIDING,
        block_size_tokens=layer.window_tokens,
        heads=layer.kv_heads // ranks,
        row_bytes=layer.row_elements * context.own_dtype.element_bits // 8,
        variant="convolution",
        window_tokens=layer.window_tokens,
        retained_tokens=_retained_tokens(context),
    )


def _latent_window_page(layer: LatentWindowLayer, context: RankContext) -> PageSpec:
    """mla_attention.py::MLAAttention.get_kv_cache_spec with a window."""
    return PageSpec(
        kind=PageKind.SLIDING,
        block_size_tokens=context.block_tokens,
        heads=1,
        row_bytes=context.kv_dtype.latent_bytes(latent_size=layer.latent_size),
        variant=f"{context.kv_dtype.name} {layer.latent_size}",
        window_tokens=layer.window_tokens,
        retained_tokens=_retained_tokens(context),
    )


def _state_page(layer: StateLayer, context: RankContext) -> PageSpec:
    architecture, deployment = context.architecture, context.deployment
    element = model_dtype_bytes(deployment.conv_dtype or architecture.dtype)
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
        padded_page_bytes=_padded_state_bytes(context),
        variant=f"{layer.kind}",
        speculative_blocks=deployment.speculative_tokens,
        checkpoint_blocks=layer.state.prefill_checkpoints,
        dcp_sharded=False,
        replicated=layer.state.replicated,
    )


def _padded_state_bytes(context: RankContext) -> int | None:
    """The page to which a state is padded where the grouping does not pad (mamba_page_size_padded)."""
    first = next((one for one in context.architecture.layers if isinstance(one, AttentionLayer | LatentLayer)), None)
    if first is None or not context.architecture.is_packed:
        return None
    return context.block_tokens * _coupled_row_bytes(first, context)
