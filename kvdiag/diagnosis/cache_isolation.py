"""What a timeline shows of the isolation probe: what each kind of request got from the cache, and how long it took.

A hit belongs to a request only where the engines counted that request's prompt and nothing else meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import counted
from kvdiag.model import Facts, Probe, ProbeKind, Sample, Span, Timeline
from kvdiag.stats.rank_tests import rank_sum_tail

ISOLATION = "isolation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request of the probe, and why it cannot be judged (`None` where it can).

    `queries` and `hits` are in the engine's unit, tokens from 0.9 on, blocks before; `None` where it counts none.
    """

    kind: ProbeKind
    other_key: bool
    problem: str | None
    queries: int | None = None
    hits: int | None = None
    first_token_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """All requests of one kind that can be judged."""

    requests: int
    hit: int
    queries: int
    hits: int
    seconds: tuple[float, ...]

    @property
    def hit_ratio(self) -> float | None:
        """The share of what was looked up that came from the cache; `None` where nothing was counted."""
        return round(self.hits / self.queries, 4) if self.queries else None

    @property
    def median_seconds(self) -> float | None:
        """The middle time to first token; `None` where none was measured."""
        return median(self.seconds) if self.seconds else None

    @property
    def told(self) -> str:
        """Hits of lookups, and in how many requests, in words."""
        return f"{self.hits:,} of {self.queries:,} in {self.hit} of {self.requests} requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The probe: its requests, and what a cache, and a clock, give another tenant."""

    answers: tuple[Answer, ...]
    caching: bool | None
    """Whether prefix caching is on by the engine's own word."""

    @property
    def other_key(self) -> bool:
        """Whether the other tenant had a key of its own."""
        return any(one.other_key for one in self.answers)

    @property
    def counted(self) -> bool:
        """Whether the engine counts prefix hits."""
        clean = [one for one in self.answers if one.problem is None]
        return bool(clean) and all(one.hits is not None for one in clean)

    def arm(self, *kinds: ProbeKind) -> Arm:
        """The requests of these kinds."""
        clean = [one for one in self.answers if one.problem is None and one.kind in kinds]
        return Arm(
            requests=len(clean),
            hit=sum(bool(one.hits) for one in clean),
            queries=sum(one.queries or 0 for one in clean),
            hits=sum(one.hits or 0 for one in clean),
            seconds=tuple(one.first_token_seconds for one in clean if one.first_token_seconds is not None),
        )

    @property
    def new(self) -> Arm:
        """Prompts that nobody had sent before."""
        return self.arm("first", "first_unsalted")

    @property
    def own(self) -> Arm:
        """A tenant's own prompts again: what has to come from a cache where there is one."""
        return self.arm("same_salt")

    @property
    def salted(self) -> Arm:
        """The same prompts with another tenant's salt: what must not."""
        return self.arm("other_salt")

    @property
    def unsalted(self) -> Arm:
        """Prompts that another tenant had sent, both without a salt."""
        return self.arm("other_unsalted")

    def shortage(self, limits: Limits) -> str | None:
        """Why too few requests can be judged, in a clause; `None` where enough can."""
        least = min((self.new, self.own, self.salted), key=lambda arm: arm.requests)
        if least.requests >= limits.isolation_rounds:
            return None
        reasons = Counter(one.problem for one in self.answers if one.problem is not None).most_common(1)
        why = f": {reasons[0][0]} (in {reasons[0][1]} of {len(self.answers)} requests)" if reasons else ""
        few = counted(least.requests, "request", "requests")
        return f"{few} of a kind can be judged, {limits.isolation_rounds} are needed{why}"

    def hits_show(self, limits: Limits) -> bool:
        """Whether time to first token tells a tenant's own hits from new prompts."""
        return rank_sum_tail(self.new.seconds, self.own.seconds) < limits.isolation_significance

    def as_fast_as_hits(self, arm: Arm, limits: Limits) -> bool | None:
        """Whether requests were as fast as hits, rather than as slow as new prompts; `None` where noise decides."""
        new, own = self.new.seconds, self.own.seconds
        if not (arm.seconds and self.hits_show(limits)):
            return None
        faster = rank_sum_tail(new, arm.seconds) < limits.isolation_significance
        slower = rank_sum_tail(arm.seconds, own) < limits.isolation_significance
        nearer = median(arm.seconds) < (median(new) + median(own)) / 2.0
        if faster and nearer:
            return True
        return False if slower and not nearer else None


def probed(timeline: Timeline, facts: Facts) -> Isolation | None:
    """What the probe's requests got; `None` where it did not run."""
    asked = [
        (span, span.workload.probe)
        for span in timeline.spans(ISOLATION)
        if span.workload is not None and span.workload.probe is not None
    ]
    if not asked:
        return None
    said = {pool.prefix_caching for pool in facts.pools}
    return Isolation(
        answers=tuple(_answer(timeline, span, probe) for span, probe in asked),
        caching=None if not said or None in said else any(said),
    )


def _answer(timeline: Timeline, span: Span, probe: Probe) -> Answer:
    outcome = span.outcome
    if span.end_seconds is None or span.release_seconds is None or span.offer_seconds is None or outcome is None:
        return Answer(kind=probe.kind, other_key=probe.other_key, problem="it was cut short")
    if outcome.failed:
        error = outcome.errors[0] if outcome.errors else "no reason given"
        return Answer(kind=probe.kind, other_key=probe.other_key, problem=f"it failed: {error}")
    before = timeline.between(span.begin_seconds, span.offer_seconds)
    after = timeline.between(span.release_seconds, span.end_seconds)
    prompts, queries, hits = (
        _counted(before, after, name) for name in ("prompt_tokens_total", "prefix_queries_total", "prefix_hits_total")
    )
    meanwhile = timeline.between(span.begin_seconds, span.end_seconds)
    return Answer(
        kind=probe.kind,
        other_key=probe.other_key,
        problem=_company(meanwhile, outcome.prompt_tokens, prompts, queries, hits),
        queries=queries if prompts is not None else None,
        hits=hits if prompts is not None and queries is not None else None,
        first_token_seconds=outcome.first_token_seconds,
    )


def _company(
    meanwhile: Iterable[Sample], ours: int, prompts: int | None, queries: int | None, hits: int | None
) -> str | None:
    """Why the counters are not of one request alone, in a clause; `None` where they are, or there are none."""
    if min(prompts or 0, queries or 0, hits or 0) < 0 or (hits or 0) > (ours if queries is None else queries):
        return "the server's counters began anew"
    most = max((sample.open_requests for sample in meanwhile), default=0)
    if most > 1 or (prompts is not None and prompts > ours) or (queries is not None and queries > ours):
        return "other traffic"
    return "the server did not count it in time" if prompts is not None and prompts < ours else None


def _counted(before: Sequence[Sample], after: Sequence[Sample], name: str) -> int | None:
    """What all engines counted from one side of a request to the other; `None` where one does not tell.

    A page that was asked for earlier may arrive later: the highest reading of each side is its newest.
    """
    ends = [_highest(samples, name) for samples in (before, after)]
    if ends[0] is None or ends[1] is None or ends[0].keys() != ends[1].keys():
        return None
    return sum(ends[1].values()) - sum(ends[0].values())


def _highest(samples: Sequence[Sample], name: str) -> dict[str, int] | None:
    found: dict[str, int] = {}
    for sample in samples:
        for engine in sample.engines or ():
            count = getattr(engine, name)
            if count is None:
                return None
            found[engine.engine] = max(found.get(engine.engine, 0), count)
    return found or None
