"""One load after the other of known tokens, with what is held at idle before each, under it, and at idle after it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvdiag.model import Engine, Load, Mark, Outcome, Phase, Sample, Timeline, Workload
from tests.builders.values import holding

SECONDS = 10.0
"""From the begin of a load to that of the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A load: so many requests of so many tokens, the blocks held before, under and after it, and samples under it."""

    held: int
    before: int = 0
    after: int = 0
    requests: int = 1
    tokens: int = 160
    seen: int = 2
    failed: int = 0
    notes: tuple[str, ...] = ()
    settles: bool = True
    """Whether the samples after it agree; otherwise blocks are still being freed."""
    on_the_way: int | None = None
    """Held before all of its requests were resident."""


def _page(blocks: int, running: int = 0) -> Engine:
    """A page that counts no tokens."""
    return replace(holding(blocks, running=running), prompt_tokens_total=None, generation_tokens_total=None)


def timeline(step: str, offered: Sequence[Offered]) -> Timeline:
    """The step's cycles."""
    samples: list[Sample] = []
    marks: list[Mark] = []
    for cycle, one in enumerate(offered):
        start = SECONDS * cycle
        workload = Workload(requests=one.requests, prompt_tokens=one.tokens, max_tokens=1)
        done = one.requests - one.failed
        outcome = Outcome(
            completed=done,
            failed=one.failed,
            prompt_tokens=done * one.tokens,
            generated_tokens=done,
            errors=("HTTP 500: no",) if one.failed else (),
        )
        phases: tuple[tuple[float, Phase], ...] = ((0.0, "begin"), (1.0, "offer"), (2.0, "release"), (3.0, "end"))
        for second, phase in phases:
            begins = phase == "begin"
            marks.append(
                Mark(
                    at_seconds=start + second,
                    step=step,
                    cycle=cycle,
                    phase=phase,
                    workload=workload if begins else None,
                    outcome=outcome if phase == "release" else None,
                    notes=one.notes if begins else (),
                )
            )
        load = Load(requests=one.requests, resident_tokens=(one.tokens,) * one.requests)
        samples += [Sample(at_seconds=start + second, engines=(_page(one.before),)) for second in (0.3, 0.6)]
        if one.on_the_way is not None:
            waiting = Load(requests=one.requests)
            page = _page(one.on_the_way, one.requests)
            samples.append(Sample(at_seconds=start + 1.1, engines=(page,), load=waiting, load_before=waiting))
        samples += [
            Sample(
                at_seconds=start + 1.3 + number / 10,
                engines=(_page(one.held, one.requests),),
                load=load,
                load_before=load,
            )
            for number in range(one.seen)
        ]
        last = (one.after if one.settles else one.after + 3, one.after)
        samples += [
            Sample(at_seconds=start + second, engines=(_page(blocks),))
            for second, blocks in zip((2.3, 2.6), last, strict=True)
        ]
    return Timeline(samples=tuple(samples), marks=tuple(marks))
