"""The pages of a DeepSeek-V4 layer on one rank, the same on every tensor-parallel rank.

As the `get_kv_cache_spec` of models/deepseek_v4/attention.py (DeepseekV4Attention, DeepseekV4IndexerCache),
models/deepseek_v4/compressor.py (CompressorStateCache), their counterparts in models/deepseek_v41, and
v1/attention/backends/mla/sparse_swa.py (DeepseekV4SWACache) give them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.layers import CompressedLayer
from kvdiag.kv.layout.pages import PageKind, PageSpec, ceil_div

BLOCK_TOKENS = 256
"""mla/indexer.py::DeepseekV4IndexerBackend.get_supported_kernel_block_sizes: uncompressed tokens."""
_WINDOW_BLOCK_TOKENS, _RING_WINDOW_BLOCK_TOKENS = 64, 32
# 448 fp8 + 128 bf16 rope + 8 scales, in pages of whole 576 bytes; V4.1's record for data-centre Blackwell, of 512.
_ROW_BYTES, _ALIGNMENT_BYTES = 584, 576
_MXFP8_ROW_BYTES, _MXFP8_ALIGNMENT_BYTES = 528, 512
_NVFP4_ROW_BYTES = 288
_BLACKWELL = 100
_OVERLAPPING_RATIO = 4
# compressor.py::CompressorStateCache, by ratio.
_STATE_BLOCK_TOKENS = {4: 4, 128: 8}
_STATE_ELEMENT_BYTES = 4
_LEAST_RING_ROWS = 8
_SCALED_ELEMENTS, _SCALE_BYTES = 128, 4
_PACKED = frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedRows:
    """Row bytes and page alignment that a cache format and a GPU give."""

    window_bytes: int
    compressed_bytes: int
    alignment_bytes: int
    window_block_tokens: int

    def padded(self, page: PageSpec) -> int:
        """Page bytes rounded up to the alignment (_apply_alignment_padding)."""
        return ceil_div(page.content_bytes, self.alignment_bytes) * self.alignment_bytes


def compressed_rows(kv_dtype: str, *, ring: bool, compute_capability: int | None) -> CompressedRows:
    """The rows of a format (_resolve_dsv4_kv_cache_dtype). Raises KvModelError for one the kernels do not take."""
    blackwell = ring and compute_capability is not None and compute_capability // 10 * 10 == _BLACKWELL
    nvfp4 = kv_dtype == "nvfp4_ds_mla" and blackwell
    if kv_dtype not in _PACKED and not nvfp4:
        raise KvModelError(f"kv_dtype {kv_dtype} is not supported for DeepSeek-V4: pass --kv-dtype fp8", "kv_dtype")
    row = _MXFP8_ROW_BYTES if blackwell else _ROW_BYTES
    return CompressedRows(
        window_bytes=row,
        compressed_bytes=_NVFP4_ROW_BYTES if nvfp4 else row,
        alignment_bytes=_MXFP8_ALIGNMENT_BYTES if blackwell else _ALIGNMENT_BYTES,
        window_block_tokens=_RING_WINDOW_BLOCK_TOKENS if ring else _WINDOW_BLOCK_TOKENS,
    )


def compressed_pages(
    layer: CompressedLayer, rows: CompressedRows, *, block_tokens: int, drafts: int, retained_tokens: int = 0
) -> Iterator[PageSpec]:
    """The pages of one layer: its window and, where it compresses, its rows, its indexer's and the states of both."""

    def page(kind: PageKind, block: int, row_bytes: int, window: int | None = None, per_row: int = 1) -> PageSpec:
        bare = PageSpec(
            kind=kind,
            block_size_tokens=block,
            heads=1,
            row_bytes=row_bytes,
            window_tokens=window,
            retained_tokens=retained_tokens if kind is PageKind.SLIDING else 0,
            tokens_per_row=per_row,
        )
        padded = bare.content_bytes if kind is PageKind.RING else rows.padded(bare)
        return bare if padded == bare.content_bytes else replace(bare, padded_page_bytes=padded)

    yield page(PageKind.SLIDING, rows.window_block_tokens, rows.window_bytes, layer.window_tokens)
    if not layer.ratio:
        return
    index_bytes = None
    if layer.indexer_size is not None:
        index_bytes = layer.indexer_size + layer.indexer_size // _SCALED_ELEMENTS * _SCALE_BYTES
    yield page(PageKind.MLA, block_tokens, rows.compressed_bytes, per_row=layer.ratio)
    if index_bytes is not None:
        yield page(PageKind.MLA, block_tokens, index_bytes, per_row=layer.ratio)
    if layer.ring:
        if layer.ratio > 1:
            ring_rows = max(_LEAST_RING_ROWS, 1 << (drafts + 1).bit_length())
            yield page(PageKind.RING, ring_rows, 2 * layer.head_size * _STATE_ELEMENT_BYTES)
        return
    overlap = 2 if layer.ratio == _OVERLAPPING_RATIO else 1
    for size in (layer.head_size, layer.indexer_size):
        if size is not None:
            state_bytes = 2 * overlap * size * _STATE_ELEMENT_BYTES
            yield page(PageKind.SLIDING, _STATE_BLOCK_TOKENS[layer.ratio], state_bytes, overlap * layer.ratio)
