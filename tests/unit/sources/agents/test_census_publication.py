"""The owners of KV blocks that an agent publishes: read with hashed request ids, or a gap with the reason."""

import copy
from pathlib import Path
from typing import Any

import pytest

from kvdiag.model import BlockOwners, LastHolder, RequestBlocks
from kvdiag.sources.agents.agent_publication import read_document
from kvdiag.sources.agents.allocator_files import CENSUS, TorchAllocatorSource
from tests.unit.sources.agents.publications import CENSUS_PUBLICATION, PUBLICATION, REQUESTS_PUBLICATION, SELF, write

OWNERS = BlockOwners(
    engine="0",
    pid=SELF["pid"],
    start_ticks=SELF["start_ticks"],
    age_seconds=1.5,
    usable_blocks=1000,
    running_blocks=100,
    waiting_blocks=0,
    connector_blocks=20,
    deferred_blocks=0,
    pinned_blocks=0,
    cached_free_blocks=300,
    free_blocks=574,
    orphaned_blocks=6,
    unconfirmed_blocks=0,
    group_blocks=(120,),
    counts=40,
    closed_counts=12,
    connector="NixlConnector",
    connector_oldest_seconds=3.5,
    orphans=(7, 8, 9, 10, 11, 12),
    last_holders=(LastHolder(request="cmpl-1-0", blocks=4, prompt_tokens=30, output_tokens=5, end="aborted"),),
)


def read(census: Any, *, show: bool = True) -> tuple[BlockOwners | None, str | None]:
    """What is read of a publication with this census."""
    found = read_document({**copy.deepcopy(PUBLICATION), "kv_blocks": census}, show_request_ids=show)
    return found.block_owners, found.census_problem


def test_owners_are_read() -> None:
    """Every figure, with its age at the publication."""
    assert (OWNERS, None) == read(CENSUS_PUBLICATION)


def test_request_ids_are_hashed_unless_they_are_asked_for() -> None:
    """An id may name a user: the hash is the same for the same request."""
    owners, _ = read(CENSUS_PUBLICATION, show=False)
    again, _ = read(CENSUS_PUBLICATION, show=False)
    assert owners is not None
    assert owners == again
    assert "cmpl" not in owners.last_holders[0].request
    assert len(owners.last_holders[0].request) == 12


def changed(**changes: Any) -> dict[str, Any]:
    """The census with other parts."""
    return {**copy.deepcopy(CENSUS_PUBLICATION), **changes}


def owned(**changes: Any) -> dict[str, Any]:
    """The census with other owners."""
    return changed(owners={**CENSUS_PUBLICATION["owners"], **changes})


CULPRIT = CENSUS_PUBLICATION["culprits"][0]


@pytest.mark.parametrize(
    "census",
    [
        [],
        "blocks",
        owned(running=5000),
        owned(running=-1),
        owned(running=101),
        owned(running=True),
        owned(running="100"),
        owned(free=None),
        changed(owners=None),
        changed(usable_blocks=2**60),
        changed(closed_counts=41),
        changed(culprits=[CULPRIT] * 1_000_000),
        changed(culprits=[{**CULPRIT, "blocks": 7}]),
        changed(culprits=[{**CULPRIT, "id": 5}]),
        changed(culprits=[{**CULPRIT, "end": "exploded"}]),
        changed(culprits={"id": 5}),
        changed(orphans=[1] * 65),
        changed(orphans=["1"]),
        changed(orphans=[7, 7]),
        changed(orphans=[7, 8, 9, 10, 11, 12, 13]),
        changed(orphans=[1001]),
        owned(free=573, unconfirmed=1),
        changed(groups=[1001]),
        changed(at_monotonic_seconds=1e9),
        changed(engine=0),
        changed(engine="0" * 1000),
        changed(connector=["NixlConnector"]),
        changed(connector_oldest_seconds=-1),
        changed(at_monotonic_seconds="now"),
    ],
)
def test_hostile_census_is_a_problem_and_no_figure(census: Any) -> None:
    """Owners larger than the pool, negative counts, other types, a million requests."""
    owners, problem = read(census)
    assert owners is None
    assert problem


def test_names_in_a_census_may_be_shown() -> None:
    """Line ends and control characters of an id or a connector do not reach a terminal."""
    hostile = "a\x1b[31m\nb"
    culprit = {**CULPRIT, "id": hostile}
    owners, _ = read(changed(engine=hostile, connector=hostile, culprits=[culprit]))
    assert owners is not None
    for text in (owners.engine, owners.connector, owners.last_holders[0].request):
        assert text is not None
        assert text.isprintable()


def test_hostile_census_is_a_gap_and_the_rest_is_read(tmp_path: Path) -> None:
    """Of its own source: the allocators of the same file stay."""
    write(tmp_path, {**PUBLICATION, "kv_blocks": owned(running=-1)})
    allocators, gaps, owners = TorchAllocatorSource(tmp_path).read()
    assert allocators
    assert owners is None
    assert [CENSUS] == [gap.source for gap in gaps]


def test_reason_for_no_count_is_a_gap(tmp_path: Path) -> None:
    """Another version of vLLM has moved an attribute: the agent says which."""
    write(tmp_path, {**PUBLICATION, "errors": {"kv_blocks": "AttributeError: no attribute 'requests'"}})
    _, gaps, owners = TorchAllocatorSource(tmp_path).read()
    assert owners is None
    assert [(CENSUS, True)] == [(gap.source, "requests" in gap.reason) for gap in gaps]


def test_owners_come_with_their_age(tmp_path: Path) -> None:
    """Their age at the publication, and that of the file."""
    write(tmp_path, {**PUBLICATION, "kv_blocks": CENSUS_PUBLICATION})
    _, gaps, owners = TorchAllocatorSource(tmp_path, show_request_ids=True).read()
    assert () == gaps
    assert owners is not None
    assert owners[0].age_seconds >= OWNERS.age_seconds
    assert owners[0].last_holders == OWNERS.last_holders


def test_requests_are_read_with_the_owners(tmp_path: Path) -> None:
    """How they use their blocks, with the age of the figures and of the file."""
    write(tmp_path, {**PUBLICATION, "kv_blocks": CENSUS_PUBLICATION, "kv_requests": REQUESTS_PUBLICATION})
    _, gaps, owners = TorchAllocatorSource(tmp_path).read()
    assert () == gaps
    assert owners is not None
    held = owners[0].held
    assert held is not None
    assert held.age_seconds >= 2.5
    figures = {name: value for name, value in REQUESTS_PUBLICATION.items() if name != "at_monotonic_seconds"}
    assert RequestBlocks(age_seconds=held.age_seconds, **figures) == held


@pytest.mark.parametrize(
    "requests",
    [
        [],
        {},
        *(
            {**REQUESTS_PUBLICATION, **change}
            for change in (
                {"tail_tokens": -1},
                {"tail_largest_tokens": 91},
                {"requests": "12"},
                {"requests": 2**60},
                {"longest_requests": 13},
                {"longest_blocks": 1001},
                {"stalled_requests": 13},
                {"stalled_blocks": 2000},
                {"stalled_oldest_seconds": -1.0},
                {"at_monotonic_seconds": None},
            )
        ),
    ],
)
def test_hostile_requests_are_a_problem_and_the_owners_are_read(requests: Any) -> None:
    """More blocks than the pool has, negative counts, other types."""
    reported = {**copy.deepcopy(PUBLICATION), "kv_blocks": CENSUS_PUBLICATION, "kv_requests": requests}
    found = read_document(reported, show_request_ids=True)
    assert OWNERS == found.block_owners
    assert found.requests_problem
    assert found.census_problem is None


def test_reason_for_no_requests_is_a_gap(tmp_path: Path) -> None:
    """Another version of vLLM: the owners are read all the same."""
    errors = {"kv_requests": "AttributeError: no attribute 'num_computed_tokens'"}
    write(tmp_path, {**PUBLICATION, "kv_blocks": CENSUS_PUBLICATION, "errors": errors})
    _, gaps, owners = TorchAllocatorSource(tmp_path).read()
    assert owners is not None
    assert [(CENSUS, "absent", True)] == [(gap.source, gap.kind, "num_computed_tokens" in gap.reason) for gap in gaps]
