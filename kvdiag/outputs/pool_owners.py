"""The blocks of a KV pool by owner, in words: what the agent counted inside the engine, for every output. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.formatting import format_bytes, format_count, format_duration, format_ratio, plural
from kvdiag.kv.calibration.running_server import block_bytes
from kvdiag.model import BlockOwners, Facts

TITLE = "KV pool by owner"

WORDS: Mapping[str, str] = {
    "running": "running requests",
    "waiting": "waiting requests",
    "session": "sessions between requests",
    "connector": "finished requests, held by the connector",
    "deferred": "freed after the step in flight",
    "pinned": "pinned by copies or the connector",
    "cached_protected": "shared prefixes in use",
    "cached_free": "cached prefixes, free",
    "free": "free",
    "orphaned": "orphaned: no owner",
    "unconfirmed": "no owner in the last count only",
}
"""What each owner is."""

MAX_AGE_SECONDS = DEFAULT_LIMITS.requests_age_seconds
OLD_SECONDS = 10.0
"""Age from which a count says how old it is: a pool with many blocks in use is counted over a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRow:
    """What one owner has of an engine's pool; `size` is empty where the bytes of a block are unknown."""

    owner: str
    name: str
    blocks: str
    size: str
    share: str


def owners_title(owners: Sequence[BlockOwners]) -> str:
    """The heading, with the age of the oldest count where it is not new."""
    age_seconds = max((one.age_seconds for one in owners), default=0.0)
    return TITLE + (f", counted {format_duration(age_seconds)} ago" if age_seconds >= OLD_SECONDS else "")


def owner_rows(owners: Sequence[BlockOwners], facts: Facts) -> Iterator[OwnerRow]:
    """Every owner that has blocks, engine by engine; the counts of an engine add up to its usable blocks."""
    for one in owners:
        pool = facts.pool(one.engine)
        size = None if pool is None else block_bytes(facts, pool)
        engine = f"engine {one.engine[:8]}, " if len(owners) > 1 else ""
        for owner, blocks in one.by_owner.items():
            if blocks:
                yield OwnerRow(
                    owner=owner,
                    name=f"{engine}{WORDS[owner]}",
                    blocks=format_count(blocks),
                    size="" if size is None else format_bytes(blocks * size[0]),
                    share=format_ratio(blocks / one.usable_blocks),
                )


def request_notes(owners: Sequence[BlockOwners], facts: Facts) -> Iterator[str]:
    """How the requests of each engine use the blocks that they hold, in sentences."""
    unit = facts.capabilities.unit
    for one in owners:
        held = one.held
        if held is None or not held.requests or not one.usable_blocks or held.age_seconds > MAX_AGE_SECONDS:
            continue
        engine = f"engine {one.engine[:8]}: " if len(owners) > 1 else ""
        longest = f"{plural(held.longest_blocks, unit)} ({format_ratio(held.longest_blocks / one.usable_blocks)})"
        who = f"the {held.longest_requests} longest of {plural(held.requests, 'request')}"
        yield f"{engine}{who if held.requests > held.longest_requests else 'the requests'} hold {longest}"
        if held.tail_tokens is not None:
            most = format_count(held.tail_largest_tokens or 0)
            tails = f"{plural(held.tail_tokens, 'token')}, at most {most} in one"
            yield f"{engine}unused slots in blocks of running requests: {tails}"
        if held.stalled_requests:
            since = format_duration(held.stalled_oldest_seconds or 0.0)
            stalled = f"{plural(held.stalled_requests, 'request')} without progress for up to {since}"
            yield f"{engine}{stalled}: {plural(held.stalled_blocks, unit)}"
