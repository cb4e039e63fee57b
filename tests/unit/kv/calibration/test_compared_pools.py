"""Predicted beside reported: the pool, printed or asked for, and the weights, by rank and by stage."""

from __future__ import annotations

from typing import Any

import pytest

from kvdiag.kv.calibration.engine_report import EngineSettings, PrintedSize, RankReport
from kvdiag.kv.calibration.predicted_vs_reported import Expected, Figure, capacity_comparisons, compare
from kvdiag.kv.layout.deployment import Deployment
from tests.unit.kv.reckoned import MODEL, PAGE, STAGED, STAGES, rank, report


@pytest.mark.parametrize(
    ("told_bytes", "expected"),
    [
        (70 * PAGE + 5, (70, 70, 70)),
        (70 * PAGE - 5, (69, 69, 69)),
        (70 * PAGE + 6, (70, 69, 70)),
        (70 * PAGE - 6, (70, 69, 70)),
        (None, (70, 69, 70)),
    ],
)
def test_a_pool_that_was_asked_for_is_known_to_the_byte(told_bytes: int | None, expected: tuple[int, int, int]) -> None:
    """--kv-cache-memory-bytes, where what is printed agrees with it: 70 pages give or take 5 bytes."""
    printed = PrintedSize(nominal_bytes=70 * PAGE, slack_bytes=5)
    of = report(
        RankReport(name="", pool=printed),
        num_blocks=70,
        settings=EngineSettings(version="0.32.0", pool_bytes=told_bytes),
    )

    (one,) = capacity_comparisons(MODEL, Deployment(), of)

    assert expected == (one.predicted.nominal, one.predicted.low, one.predicted.high)


@pytest.mark.parametrize(
    ("printed", "slack", "low", "high"), [(10.0, 0.0, 10.0, 10.0), (10.0, 0.5, 9.5, 10.5), (0.25, 0.5, 0.0, 0.75)]
)
def test_a_printed_concurrency_lies_between_two(printed: float, slack: float, low: float, high: float) -> None:
    """By half of its last digit, and never below 0."""
    of = report(rank(pool=70 * PAGE), version="0.32.0", concurrency=printed, concurrency_slack=slack)

    (one,) = capacity_comparisons(MODEL, Deployment(), of)

    assert (printed, low, high) == (one.reported.nominal, one.reported.low, one.reported.high)


@pytest.mark.parametrize(
    ("ranks", "figures", "expected"),
    [
        ((rank("w0", pool=700),), {"num_blocks": 5}, (700, 700, 700, "w0")),
        ((), {"num_blocks": 5}, (5 * PAGE, 5 * PAGE, 6 * PAGE - 1, "from the blocks")),
        ((rank("w0"),), {"num_blocks": 5}, (5 * PAGE, 5 * PAGE, 6 * PAGE - 1, "from the blocks")),
        ((rank("w0"),), {}, None),
        ((), {}, None),
    ],
)
def test_the_pool_that_a_plan_leaves(
    ranks: tuple[RankReport, ...], figures: dict[str, Any], expected: tuple[object, ...] | None
) -> None:
    """Beside the bytes that a rank tells, or those of its blocks, which may lie just below a block more."""
    found = compare(MODEL, Deployment(), report(*ranks, **figures), Expected(pool_bytes=(800,))).comparisons
    pools = [one for one in found if one.figure is Figure.POOL]

    assert ([] if expected is None else [expected]) == [
        (one.reported.nominal, one.reported.low, one.reported.high, one.where) for one in pools
    ]
    assert [800] * len(pools) == [one.predicted.nominal for one in pools]


@pytest.mark.parametrize(
    ("planned", "stage"), [((20 * PAGE, 9 * PAGE), 1), ((20 * PAGE, 11 * PAGE), 0), ((18 * PAGE, 11 * PAGE), 0)]
)
def test_the_pool_is_compared_on_the_stage_with_the_least_blocks(planned: tuple[int, int], stage: int) -> None:
    """128 KiB a block on the first, 64 KiB on the second."""
    of = report(rank("w0", stage=0, pool=2000), rank("w1", stage=1, pool=1000))

    (one,) = compare(STAGED, STAGES, of, Expected(pool_bytes=planned)).comparisons

    assert (planned[stage], (2000, 1000)[stage]) == (one.predicted.nominal, one.reported.nominal)


def test_a_stage_that_tells_no_pool_is_compared_by_the_blocks() -> None:
    """The first stage tells its own, and the plan has the least on the second."""
    of = report(rank("w0", stage=0, pool=2000), num_blocks=7)

    found = compare(STAGED, STAGES, of, Expected(pool_bytes=(20 * PAGE, 9 * PAGE))).comparisons[0]

    assert (Figure.POOL, 7 * PAGE, "from the blocks") == (found.figure, found.reported.nominal, found.where)


@pytest.mark.parametrize(
    ("ranks", "deployment", "expected"),
    [
        ((rank("w0", weights=100), rank("w1", weights=100)), Deployment(), [(90, 100, "2 ranks")]),
        ((rank("w0", weights=100), rank("w1", weights=101)), Deployment(), [(90, 100, "w0"), (90, 101, "w1")]),
        ((rank("w0", stage=5, weights=100),), Deployment(), [(90, 100, "w0")]),
        ((rank("w0", stage=1, weights=100),), STAGES, [(95, 100, "w0")]),
        ((rank("w0", stage=2, weights=100),), STAGES, []),
        ((rank("w0", stage=None, weights=100),), STAGES, []),
        ((rank("w0"),), Deployment(), []),
    ],
    ids=["alike", "unlike", "any stage of one", "the second", "a third of two", "of unknown stage", "untold"],
)
def test_weights_are_compared_by_rank(
    ranks: tuple[RankReport, ...], deployment: Deployment, expected: list[tuple[int, int, str]]
) -> None:
    """A plan of 90 bytes on the first stage and 95 on the second; ranks that say the same are one line."""
    found = compare(STAGED, deployment, report(*ranks), Expected(weights_bytes=(90, 95))).comparisons

    assert expected == [(one.predicted.nominal, one.reported.nominal, one.where) for one in found]
    assert not compare(STAGED, deployment, report(*ranks), Expected()).comparisons
