"""The block sizes and cache formats that vLLM 0.32 chooses for a model on a GPU, where the user leaves them open.

platforms/cuda.py::_get_backend_priorities ranks the attention backends for a compute capability; the first that takes
the model and the cache's format is used. Its kernels decide the block (get_supported_kernel_block_sizes, and
platforms/interface.py::_preferred_block_size_for_backends for several backends) and, for sparse latent attention, the
form of an 8-bit row (mla_attention.py::_canonicalize_sparse_mla_kv_cache_dtype).
"""

from dataclasses import replace
from enum import StrEnum

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.compressed_pages import BLOCK_TOKENS as COMPRESSED_BLOCK_TOKENS
from kvdiag.kv.layout.dtypes import KvDtype, KvPacking, resolve_kv_dtype
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LatentLayer, LayerKind
from kvdiag.kv.layout.pooled_pages import pool_block_tokens

# config/cache.py::CacheConfig.DEFAULT_BLOCK_SIZE; platforms/cpu.py::CpuPlatform.check_and_update_config.
DEFAULT_BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128
INDEXED_BLOCK_TOKENS = 64
"""The indexer's kernels read pages of 64 tokens (mla/indexer.py)."""

SELECTED_BLOCK_TOKENS = 128
"""Block-sparse attention selects pages (minimax_m3/common/sparse_attention.py)."""

_FLASH_MLA_BLOCK_TOKENS = 64
_FLASHINFER_MLA_BLOCK_TOKENS = 32
_AMPERE, _HOPPER, _BLACKWELL, _DESKTOP_BLACKWELL = 8, 9, 10, 12
_FP8 = frozenset({"fp8", "fp8_e4m3"})
_PACKED_FP8 = "fp8_ds_mla"
_EIGHT_BITS = 8
# supported_kv_cache_dtypes of v1/attention/backends/mla/, as the backends of each generation store them.
_LATENT_FORMATS = frozenset({"float16", "bfloat16", *_FP8})
_INDEXED_FORMATS = {
    _HOPPER: frozenset({"float16", "bfloat16", _PACKED_FP8}),
    _BLACKWELL: frozenset({"float16", "bfloat16", *_FP8, _PACKED_FP8, "nvfp4_ds_mla"}),
    _DESKTOP_BLACKWELL: frozenset({_PACKED_FP8}),
}
# Formats of other accelerators and engines.
_FOREIGN_FORMATS = frozenset({"fp8_inc", "int8"})
# flashinfer.py::get_supported_head_sizes, which alone reads NVFP4.
_NVFP4_HEADS = frozenset({64, 128, 256, 512})


class Platform(StrEnum):
    """Which backend's block sizes and scheduling hold."""

    CUDA = "cuda"
    CPU = "cpu"


def is_indexed(architecture: Architecture) -> bool:
    """Whether latent attention is sparse: an indexer selects the tokens."""
    return LayerKind.MLA_DSA in architecture.kinds


def chosen_kv_dtype(
    name: str, architecture: Architecture, platform: Platform, compute_capability: int | None
) -> KvDtype:
    """The cache's format of `--kv-cache-dtype NAME`, as the chosen backend stores it.

    Raises:
        KvModelError: it is unknown, or the GPU has no kernels for sparse latent attention.
    """
    # A checkpoint's fp8 is fp8_e4m3 by its full name (utils/torch_utils.py: MODELOPT_TO_VLLM_KV_CACHE_DTYPE_MAP).
    declared = "fp8_e4m3" if architecture.declared_kv_dtype == "fp8" else architecture.declared_kv_dtype
    asked = declared or name if name == "auto" else name
    if architecture.has_latent_windows:
        return _latent_window_format(asked, architecture, platform, compute_capability)
    if platform is Platform.CPU:
        if architecture.runs_on_gpus_alone:
            raise KvModelError(
                f"vLLM 0.32 serves {architecture.model_type} on GPUs alone: leave out --platform cpu", "platform"
            )
        plain = resolve_kv_dtype(name, model_dtype=architecture.dtype, declared=architecture.declared_kv_dtype)
        if plain.packing in (KvPacking.PER_TOKEN_HEAD, KvPacking.NVFP4):
            # cpu_attn.py has no customize_spec: one byte an element, scales apart.
            return replace(plain, packing=KvPacking.PLAIN, element_bits=_EIGHT_BITS)
        return plain
    if is_indexed(architecture):
        asked = _indexed_format(asked, architecture, major_of(compute_capability))
    return resolve_kv_dtype(asked, model_dtype=architecture.dtype)


def _latent_window_format(
    asked: str, architecture: Architecture, platform: Platform, compute_capability: int | None
) -> KvDtype:
    """The kernels are Hopper's and take 16 bits alone (models/dots3_note/nvidia/attention.py)."""
    if platform is Platform.CPU or major_of(compute_capability) != _HOPPER:
        raise KvModelError(
            "vLLM has kernels for windows of latent rows on Hopper alone: plan a Hopper GPU", "compute_capability"
        )
    kv_dtype = resolve_kv_dtype(asked, model_dtype=architecture.dtype)
    if kv_dtype.element_bits != 2 * _EIGHT_BITS:
        raise KvModelError(
            f"kv_dtype {asked} is not supported with windows of latent rows: pass --kv-dtype bfloat16", "kv_dtype"
        )
    return kv_dtype


def _indexed_format(asked: str, architecture: Architecture, major: int) -> str:
    """Hopper's FlashMLA and desktop Blackwell's kernels pack 8-bit rows with their scales, data-centre Blackwell's
    FlashInfer does not; GLM's default there is 8 bits (models/config.py::GlmMoeDsaForCausalLM). On Hopper FlashInfer
    has GLM-5-Next's rows, too (platforms/cuda.py::_get_backend_priorities: head_size 512), and those of fp8_e4m3, which
    FlashMLA does not list (mla/flashmla_sparse.py).
    """
    if major not in (_HOPPER, _BLACKWELL, _DESKTOP_BLACKWELL):
        raise KvModelError(
            f"vLLM has no kernels for sparse latent attention on compute capability {major}.x: plan a Hopper or "
            "Blackwell GPU",
            "compute_capability",
        )
    pooled = architecture.index_pool_tokens > 1
    if pooled and asked == _PACKED_FP8 and major == _BLACKWELL:
        raise KvModelError(f"kv_dtype {asked} has no kernel for this model on this GPU: pass fp8", "kv_dtype")
    if pooled and major == _HOPPER:
        return asked
    if major == _HOPPER and asked == "fp8_e4m3":
        return asked
    if major == _BLACKWELL:
        return "fp8_e4m3" if asked == "auto" and architecture.model_type == "glm_moe_dsa" else asked
    if asked in _FP8 or (asked == "auto" and major == _DESKTOP_BLACKWELL):
        return _PACKED_FP8
    return asked


def check_kv_dtype(name: str, architecture: Architecture, kv_dtype: KvDtype, compute_capability: int | None) -> None:
    """Refuse a cache format that no kernel of such a GPU takes (AttentionBackend.validate_configuration).

    Raises:
        KvModelError: no kernel takes it.
    """
    if _has_kernel(architecture, kv_dtype.name, compute_capability):
        return
    on = "" if compute_capability is None else f" on compute capability {compute_capability / 10:.1f}"
    instead = "--dtype bfloat16" if kv_dtype.name == "float32" else "--kv-dtype fp8, or leave it out"
    if architecture.has_conv_windows:
        instead = "--kv-dtype bfloat16"
    raise KvModelError(f"vLLM 0.32 has no kernel for kv_dtype {name} with this model{on}: pass {instead}", "kv_dtype")


def _has_kernel(architecture: Architecture, stored: str, compute_capability: int | None) -> bool:
    major = major_of(compute_capability)
    if is_indexed(architecture):
        # flashinfer_mla_sparse_sm90.py reads plain 8-bit rows of these sizes.
        sizes = {layer.latent_size for layer in architecture.layers if isinstance(layer, LatentLayer)}
        plain = major == _HOPPER and stored in _FP8 and sizes <= {512, 576}
        return plain or stored in _INDEXED_FORMATS.get(major, ())
    if architecture.uses_mla:
        # AMD's kernels take one format more, and AMD GPUs have no compute capability.
        return stored in _LATENT_FORMATS or (stored == "fp8_e5m2" and compute_capability is None)
    if architecture.has_conv_windows or architecture.index_pool_tokens > 1:
        # inkling/nvidia/ops/qkvr_prep.py stores without scales; qwen4_exp/nvidia/qsa.py lists its formats.
        return stored == "bfloat16" or (stored in _FP8 and not architecture.has_conv_windows)
    return stored not in _FOREIGN_FORMATS and (
        not stored.startswith("nvfp4") or _reads_nvfp4(architecture, stored, major)
    )


def _reads_nvfp4(architecture: Architecture, stored: str, major: int) -> bool:
    """Whether FlashInfer reads NVFP4 with heads of these sizes (flashinfer.py: supports_kv_cache_dtype,
    supports_combination), which cannot denoise (models/config.py::DiffusionGemmaModelForBlockDiffusionConfig).
    """
    sizes = {layer.head_size for layer in architecture.layers if isinstance(layer, AttentionLayer)}
    taken = _NVFP4_HEADS if major == _BLACKWELL else _NVFP4_HEADS - {64}
    known = stored == "nvfp4" or major == _BLACKWELL
    return sizes <= taken and known and major >= _AMPERE and not architecture.denoises


def default_block_tokens(
    architecture: Architecture, kv_dtype: KvDtype, platform: Platform, compute_capability: int | None
) -> int:
    """The block size without --block-size, before it is raised for states."""
    if architecture.is_compressed:
        return COMPRESSED_BLOCK_TOKENS
    if platform is Platform.CPU:
        return CPU_BLOCK_TOKENS
    if architecture.selects_blocks:
        return SELECTED_BLOCK_TOKENS
    if not architecture.uses_mla:
        return DEFAULT_BLOCK_TOKENS
    if architecture.index_pool_tokens > 1:
        return pool_block_tokens(architecture.index_pool_tokens, major_of(compute_capability))[1]
    if is_indexed(architecture):
        return INDEXED_BLOCK_TOKENS
    match major_of(compute_capability):
        case 10:
            return _FLASHINFER_MLA_BLOCK_TOKENS
        case 9 if kv_dtype.element_bits <= _EIGHT_BITS:
            # FlashAttention's MLA reads 16 bits alone; FlashMLA is next.
            return _FLASH_MLA_BLOCK_TOKENS
        case _:
            return DEFAULT_BLOCK_TOKENS


def major_of(compute_capability: int | None) -> int:
    """The generation; an unknown GPU is taken for Hopper."""
    return _HOPPER if compute_capability is None else compute_capability // 10
