"""How often findings were right: the counts that are shipped, and the word that follows from them."""

import pytest

from kvdiag.diagnosis.confidence import confidence_of, low_ratio, with_confidence
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.model import Finding


@pytest.mark.parametrize(("right", "cases", "low"), [(55, 55, 0.953), (10, 10, 0.787), (25, 40, 0.494), (0, 12, 0.0)])
def test_the_bound_follows_from_the_number_of_cases(right: int, cases: int, low: float) -> None:
    """Wilson's lower bound at 95 %."""
    assert low == pytest.approx(low_ratio(right, cases), abs=0.001)


def test_findings_say_how_often_they_were_right() -> None:
    """Faults of growth are certain, suspects less; what is healthy, or was compared rarely, says nothing."""
    fault, suspect = confidence_of("leak.host", "fault"), confidence_of("leak.host", "suspect")
    assert fault is not None
    assert suspect is not None
    assert ("certain", "possible") == (fault.word, suspect.word)
    assert fault.low_ratio < fault.ratio <= 1.0
    assert suspect.low_ratio < suspect.ratio < fault.ratio
    assert confidence_of("leak.host", "ok") is None
    assert confidence_of("fragmentation.kv_waste", "fault") is None


def test_a_finding_without_a_culprit_has_no_confidence() -> None:
    """The counts are of findings that name one."""
    named = Finding("leak.device_torch", "fault", "it grows")
    either = Finding("leak.device_torch", "fault", "it grows", or_id="leak.device_non_torch")
    assert [True, False] == [with_confidence(one).confidence is not None for one in (named, either)]


def test_no_count_is_impossible() -> None:
    """Of each id there are at most as many right ones as cases; the rest of the ids says nothing."""
    for verdict in KNOWLEDGE:
        for status in ("suspect", "fault"):
            known = confidence_of(verdict, status)
            assert known is None or 0.0 <= known.low_ratio <= known.ratio <= 1.0
