"""What the owners of a pool's blocks say, counted inside the engine: exact, and while requests run.

A block without an owner in several counts is leaked, however busy the server is. A pool whose blocks all have an owner,
in several counts in a row, has no leak. Blocks of finished requests belong to the KV connector until its
timeout; those that it holds for longer, or its records name for longer, may be lost in the connector.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import block_bytes
from kvdiag.formatting import format_bytes, format_count, format_duration, plural
from kvdiag.model import BlockOwners, Evidence, Facts, Finding, LastHolder, Timeline

SOURCE = "agent"
LISTED = 8
"""Requests and blocks named in the evidence."""


def owners_finding(rule_id: str, timeline: Timeline, facts: Facts, limits: Limits) -> Finding | None:
    """The verdict of the newest counts; `None` where an engine has none, or too few were complete."""
    counts = newest_owners(timeline, limits)
    if not counts or any(one.age_seconds > limits.growth.reading_age_seconds for one in counts):
        return None
    evidence = _evidence(counts, facts)
    orphaned, usable = sum(one.orphaned_blocks for one in counts), sum(one.usable_blocks for one in counts)
    if orphaned:
        return Finding(
            rule_id,
            "fault",
            f"{_amount(orphaned, usable, facts)} in use by no request; {who_held(counts)}",
            evidence,
            since_seconds=_since(timeline),
        )
    if (late := _kept_by_connector(counts, limits)) is not None:
        return Finding(rule_id, "suspect", late, evidence)
    engines = {pool.engine for pool in facts.pools}
    closed = min(one.closed_counts for one in counts)
    if closed < limits.census_counts or not engines or not engines <= {one.engine for one in counts}:
        return None
    unit = facts.capabilities.unit
    summary = f"every {unit} in use has an owner in {plural(closed, 'count')} in a row (detection limit 1 {unit})"
    return Finding(rule_id, "ok", summary, evidence)


def combined(counted: Finding, outside: Finding, timeline: Timeline, limits: Limits) -> Finding:
    """One finding of the counts inside the engine and of the blocks in use while it was idle.

    Blocks that a connector holds are in use by no request, also where all have an owner: their verdict stays.
    """
    in_doubt = ("connector", "pinned", "deferred")
    held = any(one.by_owner[owner] for one in newest_owners(timeline, limits) for owner in in_doubt)
    if counted.status == "ok" and outside.status in ("suspect", "fault") and held:
        return outside
    if counted.status != "fault" or outside.status != "fault":
        return counted
    who = counted.summary.partition("; ")[2]
    return replace(outside, summary=f"{outside.summary}; {who}", evidence=(*outside.evidence, *counted.evidence))


def newest_owners(timeline: Timeline, limits: Limits) -> tuple[BlockOwners, ...]:
    """The newest counts of every engine, none where they stopped before the timeline's end."""
    end_seconds = timeline.samples[-1].at_seconds if timeline.samples else 0.0
    recent = timeline.between(end_seconds - limits.lives.noticed_seconds, end_seconds)
    return next((sample.block_owners for sample in reversed(recent) if sample.block_owners), ())


def who_held(counts: Sequence[BlockOwners]) -> str:
    """The requests that held the orphaned blocks last, by how most of them ended; those that ended alone are known."""
    orphaned = sum(one.orphaned_blocks for one in counts)
    groups: Counter[str] = Counter()
    together = 0
    for one in counts:
        for holder in one.last_holders:
            if (holder.among or 1) > 1:
                together += 1
            else:
                groups[_ending(holder, one.connector)] += holder.blocks
    if not groups and together:
        return f"{plural(together, 'request')} that ended at once with others may have held them last"
    if not groups:
        return "the requests that held them last were not observed"
    ((ending, blocks),) = groups.most_common(1)
    known = sum(groups.values())
    of = format_count(orphaned) if known == orphaned else f"the {format_count(known)} whose request is known"
    return f"{format_count(blocks)} of {of} were last held by requests that {ending}"


def _ending(holder: LastHolder, connector: str | None) -> str:
    ending = {
        "finished": "finished",
        "aborted": "were aborted",
        "failed": "failed",
        "preempted": "were preempted",
        "running": "still run",
        None: "ended unobserved",
    }[holder.end]
    if connector is None:
        return ending
    return f"{ending} while {connector} was loading" if holder.loading else f"{ending} with {connector}"


def _kept_by_connector(counts: Sequence[BlockOwners], limits: Limits) -> str | None:
    """What a connector holds for longer than its timeout, in words; `None` if nothing."""
    for one in counts:
        for blocks, oldest_seconds, how in (
            (one.connector_blocks, one.connector_oldest_seconds, "of finished requests held"),
            (one.pinned_blocks, one.pinned_oldest_seconds, "without a request pinned"),
        ):
            if blocks and oldest_seconds is not None and oldest_seconds > limits.connector_timeout_seconds:
                oldest, timeout = format_duration(oldest_seconds), format_duration(limits.connector_timeout_seconds)
                holder = one.connector or "a KV connector"
                return f"{plural(blocks, 'block')} {how} by {holder} for up to {oldest}, longer than its {timeout}"
    return None


def _amount(orphaned: int, usable: int, facts: Facts) -> str:
    size = block_bytes(facts)
    amount = f" ({format_bytes(orphaned * size)})" if size is not None else ""
    return f"{format_count(orphaned)} of {plural(usable, f'KV {facts.capabilities.unit}')}{amount}"


def _evidence(counts: Sequence[BlockOwners], facts: Facts) -> tuple[Evidence, ...]:
    size = block_bytes(facts)
    owners: Counter[str] = Counter()
    for one in counts:
        owners.update(one.by_owner)
    orphaned, usable = owners["orphaned"], sum(one.usable_blocks for one in counts)
    rows = [
        *(Evidence(f"blocks_{owner}", blocks, "blocks", SOURCE) for owner, blocks in owners.items()),
        Evidence("census_counts", min(one.counts for one in counts), "counts", SOURCE),
        Evidence("leaked", None if size is None else orphaned * size, "bytes", SOURCE),
        Evidence("leaked_ratio", orphaned / usable if usable else None, "ratio", SOURCE),
    ]
    rows += [Evidence("connector", one.connector, "", SOURCE) for one in counts[:1] if one.connector]
    return (*rows, *named_orphans(counts))


def named_orphans(counts: Sequence[BlockOwners]) -> tuple[Evidence, ...]:
    """The newest of the orphaned blocks, and of the requests that last held them."""
    rows = []
    if orphans := [str(block) for one in counts for block in one.orphans][-LISTED:]:
        rows.append(Evidence("orphaned_block_ids", ", ".join(orphans), "", SOURCE))
    holders = [holder for one in counts for holder in one.last_holders]
    return (*rows, *(Evidence("last_holder", _described(holder), "", SOURCE) for holder in holders[-LISTED:]))


def _described(holder: LastHolder) -> str:
    lengths = holder.prompt_tokens, holder.output_tokens
    tokens = "" if None in lengths else f", {lengths[0]} + {lengths[1]} tokens"
    among = f", one of {holder.among} that ended at once" if (holder.among or 1) > 1 else ""
    return f"{holder.request}: {plural(holder.blocks, 'block')}{tokens}, {holder.end or 'end not observed'}{among}"


def _since(timeline: Timeline) -> float | None:
    """When the first orphan was counted of those that stay."""
    since = None
    for sample in reversed(timeline.samples):
        if sample.block_owners is None:
            continue
        if not any(one.orphaned_blocks for one in sample.block_owners):
            break
        since = sample.at_seconds
    return since
