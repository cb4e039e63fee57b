"""Layers -> groups: which layers share a block table, and what one block then costs.

Follows vLLM v1/core/kv_cache_utils.py::get_kv_cache_groups with a layer-outermost cache layout, its default. In this
order: without the hybrid manager windowed layers cost their full length; layers that need equally many blocks are one
group; else all pages are brought to one size (more tokens in a block, or padding) and split into groups of equal size;
where an MLA page cannot be padded, windowed layers are allocated in full, or the model is refused as vLLM does.
A block costs the same whichever group takes it, which is why a hybrid's cost is counted in blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvdiag.errors import KvModelError
from kvdiag.kv.layout.pages import TOKEN_GROWING, PageKind, PageSpec, RequestTerms, ceil_div

# "1.5 is a heuristic to avoid too many padding layers" (_get_kv_cache_groups_uniform_page_size).
_SPREAD_NUMERATOR, _SPREAD_DENOMINATOR = 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGroup:
    """Layers that share one block table. `layers` are positions in the list that was grouped."""

    layers: tuple[int, ...]
    pages: tuple[PageSpec, ...]

    @property
    def page(self) -> PageSpec:
        """The page that represents the group; where pages differ in size, their block counts agree."""
        return self.pages[0]

    def admission_blocks(self, tokens: int, terms: RequestTerms) -> int:
        """Blocks of this group that the engine plans for one request (UniformTypeKVCacheSpecs takes the largest)."""
        return max(page.admission_blocks(tokens, terms) for page in set(self.pages))

    def bytes_per_block(self, layers: frozenset[int] | None = None) -> int:
        """Bytes that one block of this group takes, of all its layers or of those in `layers`."""
        return sum(
            page.page_bytes
            for layer, page in zip(self.layers, self.pages, strict=True)
            if layers is None or layer in layers
        )


def group_pages(pages: Sequence[PageSpec], *, hybrid_manager: bool = True) -> tuple[PageGroup, ...]:
    """Split layers into groups (get_kv_cache_groups). No layers give no groups: the model keeps no cache.

    `pages` are as large as what they hold: grouping alone pads.
    """
    specs = list(pages)
    if not specs:
        return ()
    if not hybrid_manager:
        specs = _promote_by_sharding(specs)
    everything = tuple(range(len(specs)))
    if _same_type(specs):
        return (PageGroup(layers=everything, pages=tuple(specs)),)
    unified = _unify_page_sizes(specs)
    if unified is None:
        promoted = _fallback(specs)
        return (PageGroup(layers=everything, pages=tuple(promoted)),)
    return _uniform_page_groups(unified)


def _merges(specs: set[PageSpec]) -> bool:
    """Whether different specs can be described by one: full attention's can, of one shape and with at most one window
    or chunk (is_kv_cache_spec_uniform, FullAttentionSpec.merge).
    """
    if any(spec.kind is not PageKind.FULL for spec in specs):
        return False
    if len({replace(spec, window_tokens=None, chunk_tokens=None) for spec in specs}) > 1:
        return False
    windows = {spec.window_tokens for spec in specs} - {None}
    chunks = {spec.chunk_tokens for spec in specs} - {None}
    return len(windows) + len(chunks) <= 1


def _same_type(specs: Sequence[PageSpec]) -> bool:
    """Whether all layers need the same number of blocks (UniformTypeKVCacheSpecs.is_uniform_type)."""
    return len({block_terms(spec) for spec in specs}) == 1


def block_terms(spec: PageSpec) -> tuple[object, ...]:
    """What must be equal for layers to need the same number of blocks."""
    kind = PageKind.FULL if spec.kind in TOKEN_GROWING else spec.kind
    terms = {
        PageKind.SLIDING: (spec.window_tokens,),
        PageKind.CHUNKED: (spec.chunk_tokens,),
        PageKind.STATE: (spec.speculative_blocks, spec.checkpoint_blocks, spec.page_bytes, spec.replicated),
    }
    return (kind, spec.block_size_tokens, spec.dcp_sharded, *terms.get(kind, ()))


def _promote_by_sharding(specs: Sequence[PageSpec]) -> list[PageSpec]:
    """Hybrid manager off: local layers cost their full length (unify_hybrid_kv_cache_specs)."""
    promoted = list(specs)
    by_sharding: dict[bool, list[int]] = {}
    for position, spec in enumerate(specs):
        by_sharding.setdefault(spec.kind is PageKind.STATE or spec.dcp_sharded, []).append(position)
    for positions in by_sharding.values():
        changed = _promote([specs[position] for position in positions])
        for position, spec in zip(positions, changed, strict=True):
            promoted[position] = spec
    return promoted


def _promote(specs: Sequence[PageSpec]) -> list[PageSpec]:
    """Treat sliding and chunked layers as full attention (_promote_local_kv_cache_specs)."""
    if _same_type(specs):
        return list(specs)
    promoted = list(specs)
    if any(spec.kind in TOKEN_GROWING for spec in specs):
        promoted = _with_local_as_full(specs)
    if not _same_type(promoted):
        raise KvModelError(
            "the hybrid KV-cache manager can only be off where all layers are attention of one type",
            "hybrid_kv_cache_manager",
        )
    return promoted


def _with_local_as_full(specs: Sequence[PageSpec]) -> list[PageSpec]:
    """Sliding and chunked layers as full attention, in blocks of the full layers' size where those have one."""
    blocks = {spec.block_size_tokens for spec in specs if spec.kind in TOKEN_GROWING}
    block = blocks.pop() if len(blocks) == 1 else None
    return [
        replace(spec, kind=PageKind.FULL, retained_tokens=0, block_size_tokens=block or spec.block_size_tokens)
        if spec.kind in (PageKind.SLIDING, PageKind.CHUNKED)
        else spec
        for spec in specs
    ]


def _unify_page_sizes(specs: Sequence[PageSpec]) -> list[PageSpec] | None:
    """Bring all pages to the largest size (unify_kv_cache_spec_page_size); None where that cannot be done.

    Smaller pages get more tokens per block where the sizes divide; state pages, and attention pages that do not
    divide, are padded. A latent page that does not divide cannot be padded.
    """
    largest = max(spec.page_bytes for spec in specs)
    unified: list[PageSpec] = []
    for spec in specs:
        if spec.page_bytes == largest:
            unified.append(spec)
        elif spec.kind is PageKind.STATE:
            unified.append(replace(spec, padded_page_bytes=largest))
        elif largest % spec.page_bytes == 0:
            ratio = largest // spec.page_bytes
            unified.append(replace(spec, block_size_tokens=spec.block_size_tokens * ratio))
        elif spec.kind is not PageKind.MLA:
            unified.append(replace(spec, padded_page_bytes=largest))
        else:
            return None
    return unified


def _fallback(specs: Sequence[PageSpec]) -> list[PageSpec]:
    """Latent pages together with sliding ones of another size: sliding layers are allocated in full
    (_try_get_full_allocation_fallback_groups).
    """
    kinds = {spec.kind for spec in specs}
    promoted: list[PageSpec] = []
    if PageKind.SLIDING in kinds and PageKind.CHUNKED not in kinds:
        promoted = _with_local_as_full(specs)
    if not _same_type(promoted):
        raise KvModelError(
            "vLLM cannot make the page sizes of these layers equal: an MLA page does not divide the largest page",
            "kv_lora_rank",
        )
    return promoted


def _uniform_page_groups(specs: Sequence[PageSpec]) -> tuple[PageGroup, ...]:
    """Groups of equal size from layers of equal page size (_get_kv_cache_groups_uniform_page_size)."""
    buckets: list[list[int]] = []
    by_spec: dict[PageSpec, list[int]] = {}
    for position, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(position)
    for spec, positions in by_spec.items():
        for bucket in buckets:
            if _merges({spec, *(specs[member] for member in bucket)}):
                bucket.extend(positions)
                break
        else:
            buckets.append(positions)
    fewest = min(len(bucket) for bucket in buckets)
    most = max(len(bucket) for bucket in buckets)
    close = most * _SPREAD_DENOMINATOR < fewest * _SPREAD_NUMERATOR
    size = most if close else fewest
    groups: list[PageGroup] = []
    for bucket in buckets:
        count = ceil_div(len(bucket), size)
        for start in range(count):
            members = tuple(bucket[start::count])
            groups.append(PageGroup(layers=members, pages=tuple(specs[member] for member in members)))
    return tuple(groups)
