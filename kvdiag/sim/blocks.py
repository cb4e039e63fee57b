"""A paged pool of KV-cache blocks as in vLLM 0.32 (vllm/v1/core/block_pool.py): references, LRU, prefix caching.

Only block ids and hashes; no bytes, no clock. Every block except the null block is either in the free queue (no
references) or held (one or more); `tests/unit/sim/test_blocks.py` checks that as a property.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK = 0
"""The block that pads block tables; it is never handed out (block_pool.py: BlockPool.__init__)."""


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens; the last one may be partly empty."""
    return -(-tokens // block_tokens)


def block_hash(parent: bytes, tokens: Sequence[int], salt: str | None = None) -> bytes:
    """Identity of a full block: its tokens and, by `parent`, all before them; only a first block has a `salt`."""
    digest = hashlib.sha256(parent)
    digest.update(array("q", tokens).tobytes())
    if salt is not None:
        digest.update(b"cache_salt:" + salt.encode())
    return digest.digest()


@dataclass(slots=True)
class _Block:
    references: int = 0
    hash: bytes | None = None


class BlockPool:
    """One engine's blocks. A freed block that is cached can be found by its hash until it is handed out again."""

    def __init__(self, total_blocks: int, *, prefix_caching: bool = True) -> None:
        """Start with every block free; block 0 is the null block."""
        if total_blocks < 2:  # noqa: PLR2004 - the null block and one that can be used
            raise ValueError(f"a pool needs the null block and one more, not {total_blocks} blocks")
        self.total_blocks = total_blocks
        self.prefix_caching = prefix_caching
        self._blocks = [_Block() for _ in range(total_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, total_blocks))
        self._cached: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that could be handed out now, including cached ones."""
        return len(self._free)

    @property
    def held_blocks(self) -> int:
        """Blocks that a request refers to."""
        return self.total_blocks - 1 - len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Free blocks that can be found by their hash."""
        return sum(block in self._free for block in self._cached.values())

    @property
    def usage_ratio(self) -> float:
        """Share of the usable blocks that is held, 0..1 (block_pool.py: get_usage)."""
        return 1.0 - len(self._free) / (self.total_blocks - 1)

    def take(self, count: int) -> list[int]:
        """Hand out the `count` least recently used blocks; their cached content is evicted."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            if (known_as := self._blocks[block].hash) is not None:
                del self._cached[known_as]
                self._blocks[block].hash = None
            self._blocks[block].references = 1
        return taken

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix of a chain of hashes; does not hold them."""
        found: list[int] = []
        for wanted in hashes:
            block = self._cached.get(wanted)
            if block is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in the free queue: holding them makes that many fewer free."""
        return sum(block in self._free for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that `find` returned."""
        for block in blocks:
            if self._blocks[block].references == 0:
                del self._free[block]
            self._blocks[block].references += 1

    def publish(self, block: int, known_as: bytes) -> None:
        """Cache a full block by its hash; a second block with the same content stays private."""
        if self.prefix_caching and known_as not in self._cached and self._blocks[block].hash is None:
            self._blocks[block].hash = known_as
            self._cached[known_as] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a request's table, given in the table's order.

        The table's tail is reused before its head, blocks without a hash before all others
        (block_pool.py: free_blocks, kv_cache_manager.py: free).
        """
        for block in reversed(blocks):
            state = self._blocks[block]
            if state.references <= 0 or block == NULL_BLOCK:
                raise ValueError(f"block {block} is not held")
            state.references -= 1
            if state.references == 0:
                self._free[block] = None
                if state.hash is None:
                    self._free.move_to_end(block, last=False)
