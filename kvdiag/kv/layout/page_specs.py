"""Layer specs in vLLM's own terms -> pages, for pools that are known by their specs instead of a config.

The entries are what v1/kv_cache_interface.py calls a KVCacheSpec, one per kind of layer with a `count`; test vectors
are written so, and an engine's specs can be dumped so.
"""

from collections.abc import Mapping

from kvdiag.errors import KvModelError
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.layout.pages import PageKind, PageSpec

_KINDS = {
    "FullAttentionSpec": PageKind.FULL,
    "MLAAttentionSpec": PageKind.MLA,
    "SlidingWindowSpec": PageKind.SLIDING,
    "ChunkedLocalAttentionSpec": PageKind.CHUNKED,
    "MambaSpec": PageKind.STATE,
    "CrossAttentionSpec": PageKind.CROSS,
}
_MAX_LAYERS = 4096
_MAX_BYTES = 1 << 40


def is_spec_document(document: Mapping[str, object]) -> bool:
    """Whether a JSON object holds layer specs rather than a model config."""
    layers = document.get("layers")
    return (
        isinstance(layers, list) and bool(layers) and all(isinstance(item, dict) and "spec" in item for item in layers)
    )


def parse_page_specs(document: Mapping[str, object]) -> tuple[PageSpec, ...]:
    """The pages of a document's `layers`, each as often as its `count` says."""
    pages: list[PageSpec] = []
    for entry in Fields(document).children("layers") or ():
        count = entry.integer("count", default=1, high=_MAX_LAYERS)
        if len(pages) + count > _MAX_LAYERS:
            raise KvModelError(f"layers: at most {_MAX_LAYERS:,} layers are read", "layers")
        pages.extend([_page(entry)] * count)
    if not pages:
        raise KvModelError("layers has no layer spec", "layers")
    return tuple(pages)


def _page(entry: Fields) -> PageSpec:
    name = entry.text("spec")
    if name not in _KINDS:
        raise entry.error("spec", f"{name!a} is unknown: it must be one of {', '.join(_KINDS)}")
    kind = _KINDS[name]
    block = entry.integer("block_size", high=1 << 30)
    page = entry.integer("page_bytes", high=_MAX_BYTES)
    if kind is PageKind.STATE:
        return PageSpec(
            kind=kind,
            block_size_tokens=block,
            heads=1,
            row_bytes=page,
            variant=f"{entry.raw('shapes')} {entry.raw('dtypes')}",
            speculative_blocks=entry.integer("num_speculative_blocks", default=0, low=0, high=1 << 10),
            checkpoint_blocks=entry.integer("num_prefill_checkpoint_blocks", default=0, low=0, high=1 << 10),
            dcp_sharded=entry.flag("dcp_sharded", default=False),
        )
    heads = entry.integer("num_kv_heads", default=1, high=1 << 16)
    if page % (heads * block):
        raise entry.error("page_bytes", f"{page} is not a multiple of {heads} heads x {block} tokens")
    return PageSpec(
        kind=kind,
        block_size_tokens=block,
        heads=heads,
        row_bytes=page // heads // block,
        variant=f"{entry.raw('head_size')} {entry.raw('head_size_v')} {entry.raw('dtype')}",
        window_tokens=entry.maybe_integer("sliding_window", high=1 << 30),
        chunk_tokens=entry.maybe_integer("attention_chunk_size", high=1 << 30),
        dcp_sharded=entry.flag("dcp_sharded", default=True),
    )
