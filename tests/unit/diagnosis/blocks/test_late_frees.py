from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.blocks.hit_collapse import Collapse, hit_collapse
from kvdiag.diagnosis.blocks.late_frees import late_frees
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Engine, Facts, Load, Sample, Timeline
from tests.builders.values import engine, holding, pool

SMALL = pool(usable_blocks=1000)
FACTS = Facts(pools=(SMALL,))

Reading = tuple[float, int]
"""A time, and the blocks that are held while nothing runs."""


def held(*readings: Reading) -> tuple[Sample, ...]:
    """Samples of an idle server with a pool of 1,000 blocks."""
    return tuple(Sample(at_seconds=at, engines=(holding(blocks, of=SMALL),)) for at, blocks in readings)


def found(*samples: Sample) -> list[tuple[float, int]]:
    """Seconds and fewest blocks of each hold."""
    holds = late_frees(Timeline(samples=samples), FACTS, DEFAULT_LIMITS)
    return [(round(hold.seconds, 6), hold.blocks) for hold in holds]


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        (((0.0, 30), (30.0, 20), (60.0, 25), (61.0, 0)), [(60.0, 20)]),
        (((0.0, 30), (30.0, 20), (60.0, 25)), [(60.0, 20)]),  # to the last sample
        (((0.0, 30), (59.9, 30), (60.0, 0)), []),  # shorter than a minute
        (((0.0, 19), (60.0, 30)), []),  # less than a fiftieth of the pool
        (((0.0, 30), (300.0, 30)), [(300.0, 30)]),  # the largest gap between samples that is allowed
        (((0.0, 30), (300.1, 30)), []),
        (((0.0, 30), (300.1, 30), (360.1, 40), (400.0, 0)), [(60.0, 30)]),  # what was unseen is left out
        (((0.0, 30), (60.0, 30), (70.0, 0), (80.0, 50), (150.0, 40)), [(60.0, 30), (70.0, 40)]),
        (((0.0, 0), (60.0, 0)), []),
    ],
)
def test_blocks_that_stay_after_the_work_are_held(
    readings: Sequence[Reading], expected: list[tuple[float, int]]
) -> None:
    """For a minute at least, and a fiftieth of the pool; the fewest of them were held all the time."""
    assert expected == found(*held(*readings))


@pytest.mark.parametrize(
    ("between", "holds"),
    [
        (Sample(at_seconds=30.0), 1),  # not read on this tick
        (Sample(at_seconds=30.0, engines=(holding(30, of=SMALL, running=1),)), 0),
        (Sample(at_seconds=30.0, engines=(holding(30, of=SMALL, waiting=1),)), 0),
        (Sample(at_seconds=30.0, engines=(engine(usage=None),)), 0),
        (Sample(at_seconds=30.0, engines=(replace(holding(30, of=SMALL), open_sessions=1),)), 0),
        (Sample(at_seconds=30.0, engines=(replace(holding(30, of=SMALL), requests_running=None),)), 0),
        (Sample(at_seconds=30.0, engines=(holding(30, of=SMALL),), load=Load(requests=1)), 0),
        (Sample(at_seconds=30.0, engines=(holding(30, of=SMALL),), load=Load(requests=0)), 1),
    ],
    ids=["no page", "running", "waiting", "no usage", "a session open", "not told", "our own request", "none of ours"],
)
def test_only_an_idle_server_holds_what_should_have_come_back(between: Sample, holds: int) -> None:
    """A sample of a busy server, or of one that does not report usage or requests, ends the interval."""
    first, last = held((0.0, 30), (60.0, 30))
    assert holds == len(found(first, between, last))


def test_two_engines_hold_together() -> None:
    """Their blocks are added up, against both pools; both have to be idle."""
    # 20 and 20 of 2,000 blocks, then 20 and 19, and 40 of one alone
    both = Facts(pools=(SMALL, replace(SMALL, engine="1")))
    pages = [
        tuple(replace(holding(blocks, of=SMALL), engine=label) for label, blocks in (("0", one), ("1", other)))
        for one, other in ((20, 20), (20, 19), (40, 0))
    ]

    enough, less, of_one = (
        late_frees(
            Timeline(samples=tuple(Sample(at_seconds=at, engines=page) for at in (0.0, 60.0))), both, DEFAULT_LIMITS
        )
        for page in pages
    )

    assert ([40], [], [40]) == tuple([hold.blocks for hold in each] for each in (enough, less, of_one))


HOUR = 3600.0


def cached(
    shares: Sequence[float],
    *,
    each: int = 100_000,
    seconds: float = 2 * HOUR,
    usage: float | None = 0.5,
) -> Timeline:
    """A sample after every `each` looked-up tokens, of which these shares were found in the cache."""
    samples, queries, hits = [], 0, 0
    for place, share in enumerate((0.0, *shares)):
        page = replace(engine(usage=usage), prefix_queries_total=queries, prefix_hits_total=hits)
        if place:
            queries, hits = queries + each, hits + round(share * each)
            page = replace(page, prefix_queries_total=queries, prefix_hits_total=hits)
        samples.append(Sample(at_seconds=1000.0 + seconds * place / len(shares), engines=(page,)))
    return Timeline(samples=tuple(samples))


FALLING = (0.5, 0.4, 0.3, 0.2, 0.1, 0.06, 0.05, 0.04)


def test_share_of_hits_that_falls_to_nothing_is_reported_with_its_figures() -> None:
    """The first and the last eighth of what was looked up, all of it, and how long it took."""
    actual = hit_collapse(cached(FALLING), DEFAULT_LIMITS)
    assert Collapse(first_ratio=0.5, last_ratio=0.04, queried_tokens=800_000, hours=2.0) == actual


@pytest.mark.parametrize(
    ("seen", "collapsed"),
    [
        (cached((0.2, *[0.02] * 7)), True),
        (cached((0.199, *[0.01] * 7)), False),  # too little at first
        (cached((0.5, *[0.05] * 7)), True),  # a tenth is left
        (cached((0.5, *[0.051] * 7)), False),
        (cached((0.5, 0.53, 0.3, 0.2, 0.1, 0.06, 0.05, 0.04)), True),  # three in a hundred are noise
        (cached((0.5, 0.54, 0.3, 0.2, 0.1, 0.06, 0.05, 0.04)), False),
        (cached((0.5, 0.02, 0.02, 0.5, 0.1, 0.06, 0.05, 0.04)), False),  # it recovered
        (cached(FALLING, each=99_999), False),
        (cached(FALLING, seconds=2 * HOUR - 1.0), False),
        (cached(FALLING, usage=0.89), True),
        (cached(FALLING, usage=0.9), False),  # a full pool drops what it keeps
        (cached(FALLING, usage=None), True),
        (Timeline(samples=()), False),
        (cached((0.5,), each=800_000), False),  # one reading is no course
    ],
)
def test_hits_collapse_from_piece_to_piece(seen: Timeline, collapsed: bool) -> None:
    """From a fifth to a tenth of it, over two hours and eight pieces, in a pool that has room."""
    assert collapsed == (hit_collapse(seen, DEFAULT_LIMITS) is not None)


def test_engines_are_counted_together() -> None:
    """Two that look up half each are one cache of a server."""
    halves = cached(FALLING, each=50_000)
    both = Timeline(
        samples=tuple(
            replace(one, engines=(*(one.engines or ()), *(replace(page, engine="1") for page in one.engines or ())))
            for one in halves.samples
        )
    )

    assert (None, hit_collapse(cached(FALLING), DEFAULT_LIMITS)) == (
        hit_collapse(halves, DEFAULT_LIMITS),
        hit_collapse(both, DEFAULT_LIMITS),
    )


def _page(sample: Sample) -> Engine:
    (page,) = sample.engines or ()
    return page


def _minus(sample: Sample, other: Sample) -> Sample:
    """A sample as it would be had the counters begun at another."""
    page, base = _page(sample), _page(other)
    queries = (page.prefix_queries_total or 0) - (base.prefix_queries_total or 0)
    hits = (page.prefix_hits_total or 0) - (base.prefix_hits_total or 0)
    return replace(sample, engines=(replace(page, prefix_queries_total=queries, prefix_hits_total=hits),))


def _zero(sample: Sample) -> Sample:
    """The first page after a restart, a second later."""
    return replace(_minus(sample, sample), at_seconds=sample.at_seconds + 1.0)
