"""One window of blocks beside a load: what the load explains, and what grows with the work that is done."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.window import HOUR_SECONDS, certain
from tests.unit.diagnosis.windows import COUNT, MB, judge, noisy, rising


def test_what_the_load_explains_is_no_growth() -> None:
    """Bytes that follow the load step by step are level beside it, and rise without it."""
    # GIVEN a load that rises, with steps of its own
    load = [step / 60.0 + 0.2 * ((step * 7) % 5) for step in range(COUNT)]
    values = noisy([600.0 * each for each in load])

    # THEN
    alone, beside = judge(values), judge(values, load=load, beside=True)
    assert ("flat", False) == (beside.shape, beside.idle_only)
    assert abs(beside.bytes_per_second) < 1.0 * MB / 60.0
    assert pytest.approx(10.0 * MB / 60.0, rel=0.2) == alone.bytes_per_second


def test_end_that_the_highest_load_explains_is_an_end() -> None:
    """What levels off as the highest load so far does has ended, though beside that load it looks straight."""
    # GIVEN a load that rises ever more slowly to its height, 400 MB with it, and 6 MB a block besides
    load = [10.0 * (1.0 - math.exp(-step / 12.0)) for step in range(COUNT)]
    values = noisy([40.0 * each + 6.0 * step for step, each in enumerate(load)], 0.2)

    # THEN
    assert "ended" == judge(values, load=load, beside=True).shape


def test_growth_beside_a_load_is_called() -> None:
    """Beside 200 MB that come and go with the load 10 MB a block are growth."""
    # GIVEN
    load = [0.2 * ((step * 7) % 5) for step in range(COUNT)]
    values = noisy([200.0 * each + 10.0 * step for step, each in enumerate(load)])

    # WHEN
    actual = judge(values, load=load, beside=True)

    # THEN
    assert "grows" == actual.shape
    assert pytest.approx(10.0 * MB / 60.0, rel=0.03) == actual.bytes_per_second


def test_growth_with_the_work_done_is_a_line_by_that_clock() -> None:
    """Two bursts of work, and memory that grows with nothing else: unsteady by the time, growth by the work."""
    # GIVEN 400 requests a block in blocks 10 to 19 and 40 to 49, 20 otherwise
    load = [20.0 if step % 30 < 10 or step % 30 >= 20 else 400.0 for step in range(COUNT)]
    values = noisy([0.05 * each for each in accumulate(load)])

    # WHEN
    by_time, by_work = judge(values), judge(values, load=load)

    # THEN all of it is 440 MB in an hour
    assert "grows" != by_time.shape
    assert "grows" == by_work.shape
    assert pytest.approx(440.0 * MB / HOUR_SECONDS, rel=0.05) == by_work.bytes_per_second
    assert certain(by_work, DEFAULT_LIMITS)


def test_growth_that_ended_has_ended_by_any_clock() -> None:
    """What comes to its end with the work is called by its end, and not by the work."""
    # GIVEN 12 MB a block for 30 blocks and 5 for 30, a request for each
    values = rising(12.0, 5.0)
    assert "ended" == judge(noisy(values)).shape
    assert "ended" == judge(noisy(values), load=[12.0] * 30 + [5.0] * 30).shape
