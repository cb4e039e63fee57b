"""The run's own timeline while it is recorded: adds marks of test steps, and reads idle state and other traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvdiag.feeds.live.sampling import Clock, TimelineBuilder
from kvdiag.model import Mark, Phase, Sample

CROWDED_SAMPLES = 3
"""Samples under load that must all show waiting requests before a longer load is skipped."""


@dataclass(kw_only=True)
class MarkedRun:
    """A run whose steps are marked in the timeline that `recorder` makes, dated by `clock`."""

    recorder: TimelineBuilder
    clock: Clock

    def _mark(self, step: str, cycle: int, phase: Phase, **more: Any) -> None:
        """Mark that a cycle of a step has reached this phase; `more` are the mark's other fields."""
        self.recorder.add(Mark(at_seconds=self.clock.now_seconds(), step=step, cycle=cycle, phase=phase, **more))


def crowded(samples: list[Sample]) -> bool:
    """Whether some of our requests waited as long as the load lasted; under a longer load they would wait longer."""
    loaded = [sample for sample in engine_samples(samples) if sample.open_requests]
    waiting = [sample for sample in loaded if any(engine.requests_waiting for engine in sample.engines or ())]
    return len(loaded) >= CROWDED_SAMPLES and len(waiting) == len(loaded)


def is_engine_reading(sample: Sample) -> bool:
    """Whether a sample is of the engines, successful or failed."""
    return sample.engines is not None or any(gap.source == "engine" for gap in sample.gaps)


def engine_samples(samples: list[Sample]) -> list[Sample]:
    """The samples in which the engines answered."""
    return [sample for sample in samples if sample.engines is not None]


def idle_streak(samples: list[Sample]) -> int:
    """The number of newest engine samples in a row with idle engines and no request of ours."""
    streak = 0
    for sample in reversed(samples):
        if not is_engine_reading(sample):
            continue
        if not sample.engines_idle or (sample.load is not None and sample.load.requests):
            break
        streak += 1
    return streak


def tokens_counted(sample: Sample) -> int:
    """Prompt and generated tokens since the engines started, as far as they are reported."""
    return sum(
        (engine.prompt_tokens_total or 0) + (engine.generation_tokens_total or 0) for engine in sample.engines or ()
    )
