"""The run's own timeline while it is recorded: adds marks of test steps, and reads idle state and other traffic."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kvdiag.diagnosis.blocks.stall import moved, same_work, shows_steps
from kvdiag.diagnosis.timeline_queries import is_idle
from kvdiag.feeds.active.load_generator import TIMED_OUT, Requests
from kvdiag.feeds.live.sampling import Sampler, TimelineBuilder
from kvdiag.formatting import format_duration, format_ratio, plural
from kvdiag.model import Facts, Mark, Phase, Sample
from kvdiag.sources.http import NO_ANSWER

CROWDED_SAMPLES = 3
"""Samples under load that must all show waiting requests before a longer load is skipped."""


@dataclass(kw_only=True)
class MarkedRun:
    """A run whose `requests` are marked in the timeline that `recorder` makes, dated by the clock of its `sampler`."""

    recorder: TimelineBuilder
    sampler: Sampler
    requests: Requests

    def _mark(self, step: str, cycle: int, phase: Phase, **more: Any) -> None:
        """Mark that a cycle of a step has reached this phase; `more` are the mark's other fields."""
        now_seconds = self.sampler.clock.now_seconds()
        self.recorder.add(Mark(at_seconds=now_seconds, step=step, cycle=cycle, phase=phase, **more))


def crowded(samples: list[Sample]) -> bool:
    """Whether some of our requests waited as long as the load lasted; under a longer load they would wait longer."""
    loaded = [sample for sample in engine_samples(samples) if sample.open_requests]
    waiting = [sample for sample in loaded if any(engine.requests_waiting for engine in sample.engines or ())]
    return len(loaded) >= CROWDED_SAMPLES and len(waiting) == len(loaded)


STILL_SECONDS = 10.0
"""Time without any progress, of a load that failed, after which no queue explains it."""

ROOMY_RATIO = 0.5
"""Usage of the pool below which no request waits for room in it: SGLang reserves a request's output, too."""


def unfinished(error: str, samples: Sequence[Sample], facts: Facts) -> str:
    """Why requests had no answer in time: they were queued, the engine did nothing, or it was still computing them."""
    if not (error == NO_ANSWER or error.startswith(TIMED_OUT)):
        return error
    queued = [one for one in samples if one.total("requests_waiting")]
    opened = queued or [one for one in samples if one.total("requests_running")]
    if not opened:
        return error
    newest = opened[-1]
    waiting = newest.total("requests_waiting") or 0
    seconds = newest.at_seconds - opened[0].at_seconds
    count = f"{plural(waiting or newest.open_requests, 'request')} still {'queued' if queued else 'running'}"
    if shows_steps(facts) and seconds >= STILL_SECONDS and same_work(opened[0], newest):
        still = f"no token was processed for {format_duration(seconds)}: the engine hangs or is paused"
        return f"{count}, and {still}"
    if not queued:
        lately = [one for one in opened if one.at_seconds <= newest.at_seconds - STILL_SECONDS]
        slow = f"{count} after {format_duration(seconds)}, and progressing: the server is too slow for this prompt"
        return slow if lately and shows_steps(facts) and moved(lately[-1], newest) else error
    usages = [one.kv_usage_ratio for one in newest.engines or ()]
    if all(usage is not None and usage < ROOMY_RATIO for usage in usages):
        used = format_ratio(max(usage or 0.0 for usage in usages))
        limit = f"only {used} of the KV pool is in use, so the server limits how many requests run at a time"
        return f"{count}: {limit}"
    unit = facts.capabilities.unit
    return f"{count} for KV {unit}s: the KV pool is too small for this load, or its {unit}s are not released"


def is_engine_reading(sample: Sample) -> bool:
    """Whether a sample is of the engines, successful or failed."""
    return sample.engines is not None or any(gap.source == "engine" for gap in sample.gaps)


def engine_samples(samples: list[Sample]) -> list[Sample]:
    """The samples in which the engines answered."""
    return [sample for sample in samples if sample.engines is not None]


def idle_streak(samples: list[Sample]) -> int:
    """The number of newest engine samples in a row with idle engines and no request of ours."""
    return len([*takewhile(is_idle, filter(is_engine_reading, reversed(samples)))])
