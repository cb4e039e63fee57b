from pathlib import Path

import pytest

from kvdiag.diagnosis.growth.attribution import likely_and_other
from kvdiag.diagnosis.knowledge import KNOWLEDGE

ROOT = Path(__file__).parents[3]
TORCH, BESIDE = "leak.device_torch", "leak.device_non_torch"


@pytest.mark.parametrize("verdict", sorted(KNOWLEDGE))
def test_every_verdict_has_its_own_runbook(verdict: str) -> None:
    """The page that a finding points to is there, and is that verdict's."""
    entry = KNOWLEDGE[verdict]
    assert f"alerts/runbooks/{verdict}.md" == entry.runbook
    assert (ROOT / entry.runbook).is_file()
    assert all((entry.symptom, entry.likely_cause, entry.confirm, entry.remedy))


def test_every_runbook_of_a_verdict_has_an_entry() -> None:
    """None is written for a verdict that nobody calls by that name."""
    families = {verdict.partition(".")[0] for verdict in KNOWLEDGE}
    pages = {page.stem for page in (ROOT / "alerts" / "runbooks").glob("*.*.md")}
    assert {page for page in pages if page.partition(".")[0] in families} == set(KNOWLEDGE)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("vllm", (TORCH, BESIDE)),
        ("sglang", (TORCH, BESIDE)),
        ("llama.cpp", (BESIDE, TORCH)),
        (None, (BESIDE, TORCH)),
    ],
)
def test_growth_that_nvml_alone_sees_is_named_by_the_engine(engine: str | None, expected: tuple[str, str]) -> None:
    """Engines that allocate by torch leak by torch; of an engine that is not known that is not said."""
    assert expected == likely_and_other(engine)
