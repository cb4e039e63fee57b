"""What a profile shows: growth that lines of code hold, growth that none of them holds, and what tracing cost."""

import pytest

from kvdiag.diagnosis.growth.profile_conclusion import Answer, conclude
from tests.builders.allocation_profiles import profile
from tests.builders.values import MIB


@pytest.mark.parametrize(
    ("process", "traced", "answer"),
    [
        (310 * MIB, 300 * MIB, "named"),
        (310 * MIB, 150 * MIB, "partly"),
        (310 * MIB, 2 * MIB, "native"),
        (310 * MIB, -2 * MIB, "native"),
        (100_000, 50_000, "flat"),
        (-5 * MIB, 0, "flat"),
        (0, 4 * MIB, "named"),
        (None, 4 * MIB, "named"),
        (None, 0, "flat"),
    ],
)
def test_answer_follows_from_both_growths(process: int | None, traced: int, answer: Answer) -> None:
    """By the share of the process's growth that traced memory explains; memory that is used again grows nothing."""
    assert answer == conclude(profile(process=process, traced=traced)).answer


def test_traces_are_no_growth_of_the_process() -> None:
    """What the traces take is subtracted, or a quiet process would seem to grow natively."""
    found = conclude(profile(process=8 * MIB, traced=0, tracing=8 * MIB))
    assert ("flat", 0) == (found.answer, found.process_growth_bytes)


def test_share_that_is_explained_is_at_most_all() -> None:
    """Traced memory may grow by more than the process, in memory that was free."""
    assert 1.0 == conclude(profile(process=10 * MIB, traced=40 * MIB)).explained_ratio


def test_requests_are_counted_between_the_snapshots() -> None:
    """From 115 s to 160 s, between the counts around each; the turns without tracing are not part of it."""
    counts = [(90.0, 0), (100.0, 100), (110.0, 150), (120.0, 200), (160.0, 400), (170.0, 500)]
    load = conclude(profile(process=45 * MIB, traced=45 * MIB), counts).load
    assert (225.0, 10.0, 5.0, 10.0) == (
        load.requests,
        load.before_per_second,
        load.during_per_second,
        load.after_per_second,
    )


@pytest.mark.parametrize("counts", [[], [(120.0, 5)], [(100.0, 50), (130.0, 60), (160.0, 3)]], ids=str)
def test_requests_that_were_not_counted_are_unknown(counts: list[tuple[float, int]]) -> None:
    """Without counts around both snapshots, and where the server restarted, there is no growth per request."""
    found = conclude(profile(process=45 * MIB, traced=45 * MIB), counts)
    assert (None, None) == (found.load.requests, found.per_request(45 * MIB))
