"""Owners of blocks, counted inside the engine: what decides leak.kv_blocks while requests run, and what does not."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules import leak_kv_blocks
from kvdiag.model import BlockOwners, Engine, Facts, Finding, LastHolder, Sample, Timeline
from tests.builders.answers import evidence
from tests.builders.values import holding, owners, pool

SERVED = Facts(pools=(pool(usable_blocks=1000),))
ENOUGH = DEFAULT_LIMITS.census_counts
LATE_SECONDS = DEFAULT_LIMITS.connector_timeout_seconds + 1
BUSY = holding(100, of=SERVED.pools[0], running=4)


def busy(*counts: BlockOwners | None, engines: tuple[Engine, ...] = (BUSY,), seconds: float = 1.0) -> Timeline:
    """A server that is never idle, with a count in each sample."""
    return Timeline(
        samples=tuple(
            Sample(at_seconds=seconds * at, engines=engines, block_owners=None if one is None else (one,))
            for at, one in enumerate(counts)
        )
    )


def judged(timeline: Timeline, facts: Facts = SERVED) -> Finding:
    """The finding of leak.kv_blocks."""
    (found,) = leak_kv_blocks.judge(timeline, facts, DEFAULT_LIMITS)
    return found


ABORTED = LastHolder(request="one", blocks=12, prompt_tokens=30, output_tokens=5, end="aborted", loading=True)
LEAKS = owners(
    orphaned_blocks=14,
    connector="NixlConnector",
    orphans=(3, 4),
    last_holders=(ABORTED, LastHolder(request="two", blocks=2, end="finished")),
)


def test_orphan_is_a_fault_under_load() -> None:
    """From the first that stays, with its count, its bytes' share and its holders."""
    found = judged(busy(owners(), owners(), LEAKS, LEAKS))
    assert ("fault", 2.0) == (found.status, found.since_seconds)
    assert evidence(found)["blocks_orphaned"] == 14
    assert evidence(found)["leaked_ratio"] == 0.014
    assert evidence(found)["connector"] == "NixlConnector"
    assert "12 of 14" in found.summary
    assert "NixlConnector" in found.summary


def test_closed_count_is_ok_under_load() -> None:
    """A pool that is never idle is decided."""
    found = judged(busy(owners(), owners(), owners()))
    assert "ok" == found.status
    assert evidence(found)["blocks_running"] == 100


@pytest.mark.parametrize(
    "last",
    [owners(closed_counts=ENOUGH - 1), owners(unconfirmed_blocks=2, closed_counts=0), None],
    ids=["too few", "unconfirmed", "none"],
)
def test_open_count_changes_nothing(last: BlockOwners | None) -> None:
    """Too few counts, blocks that are not confirmed yet, or no count at all: the verdict from outside stands."""
    without = judged(busy(None, None))
    assert without.status == "unknown"
    assert without == judged(busy(last, last))


def test_released_orphans_are_no_fault() -> None:
    """The newest count decides."""
    assert "ok" == judged(busy(LEAKS, LEAKS, owners())).status


def test_counts_that_stopped_decide_nothing() -> None:
    """An agent that has published nothing for minutes says nothing of the present."""
    assert "unknown" == judged(busy(LEAKS, None, None, seconds=100.0)).status


def test_every_engine_must_be_counted() -> None:
    """Of two data-parallel engines one count closes none; an orphan in one is a fault of the server."""
    two = Facts(pools=(pool("0", usable_blocks=1000), pool("1", usable_blocks=1000)))
    engines = (BUSY, replace(BUSY, engine="1"))
    assert "unknown" == judged(busy(owners(), owners(), engines=engines), two).status
    assert "fault" == judged(busy(LEAKS, LEAKS, engines=engines), two).status


@pytest.mark.parametrize(
    "kept",
    [
        owners(connector_blocks=9, connector="NixlConnector", connector_oldest_seconds=LATE_SECONDS),
        owners(pinned_blocks=9, connector="NixlConnector", pinned_oldest_seconds=LATE_SECONDS),
    ],
    ids=["finished requests", "pinned"],
)
def test_blocks_beyond_the_connectors_timeout_are_suspect(kept: BlockOwners) -> None:
    """With the connector's name; within its timeout they are its own."""
    found = judged(busy(kept, kept))
    assert "suspect" == found.status
    assert "NixlConnector" in found.summary
    within = replace(
        kept,
        connector_oldest_seconds=kept.connector_oldest_seconds and 1.0,
        pinned_oldest_seconds=kept.pinned_oldest_seconds and 1.0,
    )
    assert "ok" == judged(busy(within, within)).status


def test_idle_fault_keeps_its_evidence_and_gains_the_holders() -> None:
    """Blocks in use while idle, and who held them last, are one finding."""
    idle = holding(14, of=SERVED.pools[0])
    found = judged(busy(LEAKS, LEAKS, LEAKS, engines=(idle,)))
    assert "fault" == found.status
    assert evidence(found)["blocks_at_last_idle"] == 14
    assert evidence(found)["blocks_orphaned"] == 14
    assert "12 of 14" in found.summary


def test_unverified_count_is_at_most_suspect() -> None:
    """The process is not visible from here: anybody could have written the file."""
    doubted = replace(LEAKS, unverified=True)
    findings = diagnose(busy(doubted, doubted), SERVED).findings
    assert ["suspect"] == [one.status for one in findings if one.id == "leak.kv_blocks"]
