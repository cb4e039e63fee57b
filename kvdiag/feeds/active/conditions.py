"""What a run's own readings show while it is under way: idle stretches, other traffic, a load that waits. Pure."""

from __future__ import annotations

from kvdiag.model import Sample

CROWDED_SAMPLES = 3
"""Readings under load of which each has to show somebody waiting before a longer one is not tried."""


def crowded(samples: list[Sample]) -> bool:
    """Whether some of our requests waited as long as the load lasted: held longer they would wait longer."""
    loaded = [sample for sample in engine_samples(samples) if sample.open_requests]
    waiting = [sample for sample in loaded if any(engine.requests_waiting for engine in sample.engines or ())]
    return len(loaded) >= CROWDED_SAMPLES and len(waiting) == len(loaded)


def is_engine_reading(sample: Sample) -> bool:
    """Whether a sample is of the engines, a failed one too."""
    return sample.engines is not None or any(gap.source == "engine" for gap in sample.gaps)


def engine_samples(samples: list[Sample]) -> list[Sample]:
    """Those in which the engines answered."""
    return [sample for sample in samples if sample.engines is not None]


def idle_streak(samples: list[Sample]) -> int:
    """How many of the newest engine readings in a row show idle engines and no request of ours."""
    streak = 0
    for sample in reversed(samples):
        if not is_engine_reading(sample):
            continue
        if not sample.engines_idle or (sample.load is not None and sample.load.requests):
            break
        streak += 1
    return streak


def tokens_counted(sample: Sample) -> int:
    """Prompt and generated tokens since the engines began, as far as they count."""
    return sum(
        (engine.prompt_tokens_total or 0) + (engine.generation_tokens_total or 0) for engine in sample.engines or ()
    )
