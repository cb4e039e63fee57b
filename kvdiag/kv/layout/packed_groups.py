"""Groups of layers whose pages of several sizes lie side by side in each block.

Follows vLLM v1/core/kv_cache_utils.py::_get_packed_kv_cache_groups, which a block-outermost cache layout takes
(DeepSeek-V4: mla/indexer.py::DeepseekV4IndexerBackend.supported_kv_cache_layouts). Layers that need equally many blocks
make a bucket; the repeats of a layer pattern decide how many groups a bucket is split into; buckets with a state per
request are split until a state group fits into the block that the other layers need anyway.
"""

from collections.abc import Sequence

from kvdiag.kv.layout.groups import PageGroup, block_terms, group_pages
from kvdiag.kv.layout.pages import PageKind, PageSpec, ceil_div

_STATE_KINDS = frozenset({PageKind.STATE, PageKind.RING})


def packed_groups(pages: Sequence[PageSpec]) -> tuple[PageGroup, ...]:
    """Split layers into groups of one block table each, pages of different sizes together."""
    if len({page.page_bytes for page in pages}) <= 1:
        return group_pages(pages)
    buckets: dict[tuple[object, ...], list[int]] = {}
    for position, page in enumerate(pages):
        buckets.setdefault(block_terms(page), []).append(position)
    if len(buckets) <= 1:
        return tuple(_group(pages, members) for members in buckets.values())
    split = _Split([_Bucket(pages, members) for members in buckets.values()])
    return tuple(
        _group(pages, members) for bucket in split.buckets for members in bucket.parted(split.groups_of(bucket))
    )


class _Bucket:
    """Layers of one kind, by the size of their pages."""

    def __init__(self, pages: Sequence[PageSpec], members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.page = pages[members[0]]
        self.by_size: dict[int, list[int]] = {}
        for member in members:
            self.by_size.setdefault(pages[member].page_bytes, []).append(member)

    @property
    def balanced(self) -> bool:
        """Whether there are as many layers of each page size, which makes them a repeating pattern."""
        return len({len(layers) for layers in self.by_size.values()}) == 1

    @property
    def repeats(self) -> int:
        """Most layers of one page size."""
        return max(len(layers) for layers in self.by_size.values())

    def widest_bytes(self, groups: int) -> int:
        """Page bytes of the largest of `groups` groups."""
        return sum(ceil_div(len(layers), groups) * size for size, layers in self.by_size.items())

    def parted(self, groups: int) -> list[list[int]]:
        """The layers of each of `groups` groups."""
        if groups == 1:
            return [list(self.members)]
        pattern = list(zip(*self.by_size.values(), strict=False))
        return [[member for repeat in pattern[start::groups] for member in repeat] for start in range(groups)]


class _Split:
    """How many groups each bucket is split into."""

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self.buckets = tuple(buckets)
        balanced = [bucket for bucket in buckets if bucket.balanced]
        least = max((bucket.repeats for bucket in balanced if len(bucket.by_size) > 1), default=0)
        self._repeats = _padding_least([bucket.repeats for bucket in balanced], least) if least else None
        self._anchor_bytes = max(
            bucket.widest_bytes(len(bucket.members) if self._is_state(bucket) else self._by_pattern(bucket))
            for bucket in buckets
        )

    def _is_state(self, bucket: _Bucket) -> bool:
        return bucket.page.kind in _STATE_KINDS or (self._repeats is None and bucket.page.kind is PageKind.SLIDING)

    def _by_pattern(self, bucket: _Bucket) -> int:
        if bucket.balanced and self._repeats is not None:
            return ceil_div(bucket.repeats, self._repeats)
        return 1

    def groups_of(self, bucket: _Bucket) -> int:
        """The number of groups of a bucket."""
        groups = self._by_pattern(bucket)
        if self._is_state(bucket):
            fitting = max(self._anchor_bytes // bucket.page.page_bytes, 1)
            groups = max(groups, ceil_div(len(bucket.members), fitting))
        return groups


def _padding_least(counts: Sequence[int], least: int) -> int:
    """The group size from `least` on that pads the counts least, the largest of several (_approximate_gcd)."""
    sizes = range(least, max(least, *counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def _group(pages: Sequence[PageSpec], members: Sequence[int]) -> PageGroup:
    return PageGroup(layers=tuple(members), pages=tuple(pages[member] for member in members))
