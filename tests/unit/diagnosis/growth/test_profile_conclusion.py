"""What a profile shows: growth that lines of code hold, and growth that none of them holds."""

import pytest

from kvdiag.diagnosis.growth.profile_conclusion import conclude
from kvdiag.model import ProfileAnswer
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
def test_answer_follows_from_both_growths(process: int | None, traced: int, answer: ProfileAnswer) -> None:
    """By the share of the process's growth that traced memory explains; memory that is used again grows nothing."""
    assert answer == conclude(profile(process=process, traced=traced)).answer


def test_traces_are_no_growth_of_the_process() -> None:
    """What the traces take is subtracted, or a quiet process would seem to grow natively."""
    found = conclude(profile(process=8 * MIB, traced=0, tracing=8 * MIB))
    assert ("flat", 0) == (found.answer, found.process_growth_bytes)


def test_share_that_is_explained_is_at_most_all() -> None:
    """Traced memory may grow by more than the process, in memory that was free."""
    assert 1.0 == conclude(profile(process=10 * MIB, traced=40 * MIB)).explained_ratio
