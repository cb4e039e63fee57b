"""The pages of GLM-5-Next's sparse attention: latent rows, index keys of one row for a pool of tokens, and a ring.

As the `get_kv_cache_spec` of models/glm5next/common/attention.py (Glm5NextIndexerCache, Glm5NextTailCache) and
mla_attention.py give them, with the distance between blocks that worker/utils.py::customize_attention_spec asks for.
The ring's backend supports block-outermost layouts alone (mla/indexer.py::KpoolTailBackend), so a block holds all of
them.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd, lcm

from kvdiag.kv.layout.dtypes import KvDtype, KvPacking
from kvdiag.kv.layout.layers import LatentLayer
from kvdiag.kv.layout.pages import PageKind, PageSpec, ceil_div

_BLACKWELL, _DESKTOP_BLACKWELL = 10, 12
# utils/deep_gemm.py::get_paged_mqa_page_sizes.
_LEAST_KEY_ROWS, _MOST_KEY_ROWS = 32, 64
# mla/flashinfer_mla_sparse.py, flashinfer_mla_sparse_sm90.py: get_supported_kernel_block_sizes.
_KERNEL_ROWS, _BLACKWELL_KERNEL_ROWS = 64, 32


def pool_block_tokens(pool_tokens: int, major: int) -> tuple[int, int]:
    """The indexer's smallest block, and the smallest that the latent rows' kernels support, too."""
    least = pool_tokens * (_MOST_KEY_ROWS if major == _DESKTOP_BLACKWELL else _LEAST_KEY_ROWS)
    return least, lcm(least, _kernel_rows(major))


def pooled_pages(
    layer: LatentLayer, page: PageSpec, kv_dtype: KvDtype, *, major: int, drafts: int
) -> Iterator[PageSpec]:
    """The pages of one layer, whose page of latent rows is `page`."""
    yield replace(page, stride_bytes=_read_rows(kv_dtype, major) * page.row_bytes)
    keys = replace(
        page, row_bytes=layer.indexer_row_bytes or 0, tokens_per_row=layer.pool_tokens, variant="pooled keys"
    )
    kernel = gcd(_MOST_KEY_ROWS * layer.pool_tokens, keys.block_size_tokens)
    split = kernel != keys.block_size_tokens
    yield replace(keys, stride_bytes=kernel // layer.pool_tokens * keys.row_bytes if split else 1)
    pools = ceil_div(layer.pool_tokens + drafts, layer.pool_tokens)
    yield ring_page(layer.pool_tokens << (pools - 1).bit_length(), layer.pool_row_bytes)


def ring_page(rows: int, row_bytes: int) -> PageSpec:
    """A request's ring for the tokens of a pool that is not complete (CircularBufferSpec)."""
    return PageSpec(kind=PageKind.RING, block_size_tokens=rows, heads=1, row_bytes=row_bytes, dcp_sharded=False)


def _kernel_rows(major: int) -> int:
    return _BLACKWELL_KERNEL_ROWS if major == _BLACKWELL else _KERNEL_ROWS


def _read_rows(kv_dtype: KvDtype, major: int) -> int:
    """Rows that kernels read as one page (mla/sparse_utils.py::align_blocks_to_rows): on Hopper a single one, or 64 of
    packed rows, which FlashMLA reads.
    """
    single = major not in (_BLACKWELL, _DESKTOP_BLACKWELL) and kv_dtype.packing is not KvPacking.DS_MLA
    return 1 if single else _kernel_rows(major)
