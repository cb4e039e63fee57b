from __future__ import annotations

from kvdiag.diagnosis.request_failures import memory_failures
from kvdiag.model import Mark, Outcome, Timeline
from tests.builders.values import GIB, OOM


def timeline(*outcomes: Outcome | None) -> Timeline:
    """A step of one cycle for each outcome."""
    return Timeline(
        samples=(),
        marks=tuple(
            Mark(at_seconds=float(place), step="concurrent", cycle=place, phase="release", outcome=outcome)
            for place, outcome in enumerate(outcomes)
        ),
    )


def outcome(failed: int, *errors: str) -> Outcome:
    """What became of a cycle's requests."""
    return Outcome(completed=0, failed=failed, prompt_tokens=0, generated_tokens=0, errors=errors)


def test_cycles_that_ran_out_are_told_with_their_largest_request() -> None:
    """In order, each with how many failed; other errors, and cycles without an outcome, are none."""
    larger = OOM.replace("3.00 GiB", "4.00 GiB")

    found = memory_failures(
        timeline(None, outcome(2, "HTTP 500"), outcome(5, OOM, larger, "HTTP 500"), outcome(0), outcome(1, OOM))
    )

    assert [(2, 5, 4 * GIB), (4, 1, 3 * GIB)] == [(one.span.cycle, one.failed, one.oom.asked_bytes) for one in found]
