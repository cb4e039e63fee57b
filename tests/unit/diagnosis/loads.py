"""A load of two requests of ours of 512 tokens, as marks and samples."""

from collections.abc import Sequence
from dataclasses import replace

from kvdiag.model import Facts, Load, Mark, Outcome, Sample, Span, Timeline, Workload
from tests.builders.values import holding, pool

KNOWN = Facts(pools=(pool(),))
WORKLOAD = Workload(requests=2, prompt_tokens=512, max_tokens=65)
OUTCOME = Outcome(completed=2, failed=0, prompt_tokens=1024, generated_tokens=130)
SPAN = Span(
    step="load",
    cycle=0,
    begin_seconds=10.0,
    offer_seconds=20.0,
    release_seconds=30.0,
    end_seconds=40.0,
    workload=WORKLOAD,
    outcome=OUTCOME,
)


def under_load(
    at_seconds: float,
    blocks: int,
    resident: Sequence[int] = (512, 512),
    *,
    before: Sequence[int] | None = None,
    running: int | None = 2,
    waiting: int = 0,
    counted: int | None = None,
    usage: bool = True,
) -> Sample:
    """A sample of two requests of ours, which hold so many blocks."""
    engine = replace(
        holding(blocks),
        requests_running=running,
        requests_waiting=waiting,
        prompt_tokens_total=counted,
        generation_tokens_total=None if counted is None else 0,
    )
    engine = engine if usage else replace(engine, kv_usage_ratio=None)
    first = Load(requests=len(before), resident_tokens=tuple(before)) if before is not None else None
    return Sample(
        at_seconds=at_seconds,
        engines=(engine,),
        load=Load(requests=len(resident), resident_tokens=tuple(resident)),
        load_before=first,
    )


def idle(at_seconds: float, blocks: int = 0, *, counted: int | None = None) -> Sample:
    """A sample of an engine without requests that still holds so many blocks."""
    engine = replace(
        holding(blocks),
        prompt_tokens_total=counted,
        generation_tokens_total=None if counted is None else 0,
    )
    return Sample(at_seconds=at_seconds, engines=(engine,))


def marks(span: Span = SPAN, cycle: int = 0) -> tuple[Mark, ...]:
    """The marks of a span."""
    times = {
        "begin": span.begin_seconds,
        "offer": span.offer_seconds,
        "release": span.release_seconds,
        "end": span.end_seconds,
    }
    return tuple(
        Mark(
            at_seconds=at,
            step=span.step,
            cycle=cycle,
            phase=phase,  # type: ignore[arg-type]
            workload=span.workload if phase == "offer" else None,
            outcome=span.outcome if phase == "release" else None,
            notes=span.notes if phase == "begin" else (),
        )
        for phase, at in times.items()
        if at is not None
    )


# 64 blocks of 16 tokens for each of 2 x 512 tokens; two idle samples on each side.
WHOLE = (idle(10.0, 3), idle(15.0, 3), under_load(21.0, 67), under_load(22.0, 67), idle(31.0, 5), idle(35.0, 5))


def seen(*samples: Sample) -> Timeline:
    """A timeline of the span and these samples."""
    return Timeline(samples=samples, marks=marks())
