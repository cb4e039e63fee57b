"""Equal cycles of a step without anything else: what was read while idle, before the first of them and after each."""

from collections.abc import Sequence
from dataclasses import replace

from kvdiag.model import Mark, Outcome, Phase, Sample, Timeline, Workload
from tests.builders.values import engine

WORKLOAD = Workload(requests=1, prompt_tokens=512, max_tokens=128)
DONE = Outcome(completed=1, failed=0, prompt_tokens=512, generated_tokens=128)


def cycles(
    readings: Sequence[Sample], *, step: str = "single_request", baseline: Sequence[Sample] = (), start: float = 100.0
) -> Timeline:
    """Samples of devices or processes, ten seconds apart: in the lead-in of the first cycle, and after each."""
    samples: list[Sample] = []
    marks: list[Mark] = []

    def idle(at_seconds: float, reading: Sample) -> None:
        first = Sample(at_seconds=at_seconds, engines=(engine(),))
        samples.extend((first, replace(reading, at_seconds=at_seconds + 1.0, engines=(engine(),))))

    def mark(at_seconds: float, cycle: int, phase: Phase, *, of: str = step) -> None:
        marks.append(
            Mark(
                at_seconds=at_seconds,
                step=of,
                cycle=cycle,
                phase=phase,
                workload=WORKLOAD if phase == "begin" else None,
                outcome=DONE if phase == "release" else None,
            )
        )

    if baseline:
        mark(10.0, 0, "begin", of="baseline")
        for number, reading in enumerate(baseline):
            idle(11.0 + 2.0 * number, reading)
        mark(12.0 + 2.0 * len(baseline), 0, "end", of="baseline")
    for number, reading in enumerate(readings):
        at_seconds = start + 10.0 * number
        if number:
            mark(at_seconds - 4.0, number - 1, "offer")
            mark(at_seconds - 2.0, number - 1, "release")
        idle(at_seconds, reading)
        if number:
            mark(at_seconds + 2.0, number - 1, "end")
        if number < len(readings) - 1:
            mark(at_seconds + 3.0 if number else at_seconds - 1.0, number, "begin")
    return Timeline(samples=tuple(samples), marks=tuple(marks))
