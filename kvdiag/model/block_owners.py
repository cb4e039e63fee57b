"""Who holds the blocks of an engine's KV pool, as the agent in its process counts them."""

from dataclasses import dataclass
from typing import Literal

from kvdiag.model.validation import MAX_COUNT, Checked

End = Literal["finished", "aborted", "failed", "preempted", "running"]
"""How a request ended, or what it did last as far as it was observed."""

OWNERS = (
    *("running", "waiting", "session", "connector", "deferred", "pinned"),
    *("cached_protected", "cached_free", "free", "orphaned", "unconfirmed"),
)
"""The owners of a pool's blocks; their counts add up to the pool. `BlockOwners` says what each is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastHolder(Checked):
    """A request that held orphaned blocks last: how many, its lengths, and how it ended.

    `request` is its id, or a hash of the id. `loading`: a KV connector was loading for it when it was last observed.
    `among`: it is one of so many that ended at once, and the blocks are those that one or several of them held.
    """

    request: str
    blocks: int
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    end: End | None = None
    loading: bool | None = None
    among: int | None = None

    def _problem(self) -> str | None:
        return "among is 0" if self.among == 0 else None

    @property
    def share_blocks(self) -> float:
        """The blocks, divided among the requests that ended at once."""
        return self.blocks / (self.among or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBlocks(Checked):
    """How the requests of one engine use the blocks that they hold, `age_seconds` before the sample.

    `tail_tokens`: token slots that running requests have allocated beyond the tokens computed, added up over all KV
    groups of attention layers, and that of the request with most; `None` where the engine's blocks are no rows of
    tokens. `longest_blocks`: distinct blocks of the `longest_requests` with most tokens (ten at most). `stalled_*`:
    requests whose computed tokens have not changed for a minute, their distinct blocks, and for how long the first.
    """

    age_seconds: float
    requests: int
    tail_tokens: int | None = None
    tail_largest_tokens: int | None = None
    longest_requests: int
    longest_blocks: int
    stalled_requests: int
    stalled_blocks: int
    stalled_oldest_seconds: float | None = None

    def _problem(self) -> str | None:
        return (
            self._above("tail_largest_tokens", MAX_COUNT if self.tail_tokens is None else self.tail_tokens)
            or self._above("longest_requests", self.requests)
            or self._above("stalled_requests", self.requests)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOwners(Checked):
    """The usable blocks of one engine's pool by owner, `age_seconds` before the sample; they add up exactly.

    Blocks of requests that are `running`, or `waiting` (preempted, loading, or between two inputs of a session);
    `session`: of a streaming session, which keeps them for its next request; `cached_protected`: of a prefix in the
    cache that running requests share, where the engine counts these apart;
    `connector`: of finished requests whose KV connector has not released them; `deferred`: freed after the step in
    flight; `pinned`: in a copy in flight, or named by the connector's own records; `cached_free`: free, with a prefix
    that can be hit; `free`; `orphaned`: with a reference and no owner, in several counts; `unconfirmed`: the same in
    too few of them. `group_blocks` counts those with an owner by KV-cache group. `counts` is how
    often all were counted, each time after a step of the engine, `closed_counts` how often in a row there was no
    unconfirmed block. `held` is how requests use their blocks.
    """

    engine: str
    pid: int
    start_ticks: int
    age_seconds: float
    usable_blocks: int
    running_blocks: int
    waiting_blocks: int
    session_blocks: int = 0
    connector_blocks: int
    deferred_blocks: int
    pinned_blocks: int
    cached_protected_blocks: int = 0
    cached_free_blocks: int
    free_blocks: int
    orphaned_blocks: int
    unconfirmed_blocks: int
    group_blocks: tuple[int, ...] = ()
    counts: int
    closed_counts: int
    connector: str | None = None
    connector_oldest_seconds: float | None = None
    pinned_oldest_seconds: float | None = None
    orphans: tuple[int, ...] = ()
    last_holders: tuple[LastHolder, ...] = ()
    unverified: bool | None = None
    held: RequestBlocks | None = None

    def _problem(self) -> str | None:
        if (total := sum(self.by_owner.values())) != self.usable_blocks:
            return f"owners have {total} of {self.usable_blocks} blocks"
        if (held_last := round(sum(one.share_blocks for one in self.last_holders))) > self.orphaned_blocks:
            return f"requests last held {held_last} of {self.orphaned_blocks} orphaned blocks"
        if len(self.orphans) > min(len(set(self.orphans)), self.orphaned_blocks):
            return f"lists {len(self.orphans)} orphans, some twice or more than its {self.orphaned_blocks}"
        # The null block is not usable, and has an id.
        if (last := max(self.orphans, default=0)) > self.usable_blocks:
            return f"lists orphan {last}, of {self.usable_blocks} blocks"
        if self.closed_counts and self.unconfirmed_blocks:
            return f"has {self.unconfirmed_blocks} unconfirmed blocks in {self.closed_counts} counts without any"
        if (largest := max(self.group_blocks, default=0)) > self.usable_blocks:
            return f"a group has {largest} of {self.usable_blocks} blocks"
        if (held := self.held) and (most := max(held.longest_blocks, held.stalled_blocks)) > self.usable_blocks:
            return f"some requests hold {most} of {self.usable_blocks} blocks"
        return self._above("closed_counts", self.counts)

    @property
    def by_owner(self) -> dict[str, int]:
        """The blocks of each owner."""
        return {owner: getattr(self, f"{owner}_blocks") for owner in OWNERS}
