"""Operations that move memory in ways of their own."""

import pytest

from tests.quality.corpus.scenarios import SCENARIOS
from tests.quality.corpus.score import HEALTHY, answer, answers


@pytest.mark.parametrize("name", [name for name, (_, expected) in SCENARIOS.items() if expected.accept == (HEALTHY,)])
def test_healthy_operation_is_no_fault(name: str) -> None:
    """Sleep, restarts, adapters, page cache and a launch are neither suspects nor faults, in every variant."""
    incident, _ = SCENARIOS[name]
    actual = answers(incident, {}, *incident.recording().play())
    assert {"recorded": {}, "series": {}} == {variant: dict(answer(made).called) for variant, made in actual.items()}
