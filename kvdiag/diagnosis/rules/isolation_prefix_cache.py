"""isolation.prefix_cache: one tenant's prefix cache answers another tenant's request.

Only a probe can show it, because the engine's counters do not say whose prompt a hit was: without one it is unknown.
Each request of the probe is one answer: hits counted for it, and its time to first token. A hit belongs to a request
only where the engines counted that request's prompt and nothing else meanwhile. Judged in this order:

1. Hits decide by themselves: on new prompts they are other traffic (unknown), with another salt or key a fault.
2. That there is no hit means something only where a tenant's own repeat is one, and enough requests can be judged.
3. Where the engine counts no hits, times to first token decide, if they separate repeats from new prompts at all; they
   only raise a suspicion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import unknown
from kvdiag.formatting import format_duration, format_number, format_p_value, plural
from kvdiag.model import Evidence, Facts, Finding, Probe, ProbeKind, Sample, Span, Status, Timeline
from kvdiag.stats.rank_tests import rank_sum_tail

ID = "isolation.prefix_cache"
ISOLATION = "isolation"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare what two tenants' requests got from the cache, by the engine's counters and by time to first token."""
    found = probed(timeline, facts)
    if found is None:
        return unknown(ID, "two tenants' requests were not compared; run `kvdiag run --isolation`")
    status, summary = verdict(found, limits)
    p = rank_sum_tail(found.new.seconds, found.own.seconds) if found.own.seconds else None
    evidence = (
        Evidence("requests_judged", sum(one.problem is None for one in found.answers), "requests", "kvdiag"),
        Evidence("new_hit_ratio", found.new.hit_ratio, "ratio", "engine"),
        Evidence("own_hit_ratio", found.own.hit_ratio, "ratio", "engine"),
        Evidence("other_salt_hit_ratio", found.salted.hit_ratio, "ratio", "engine"),
        Evidence("unsalted_hit_ratio", found.unsalted.hit_ratio, "ratio", "engine"),
        Evidence("keys", 2 if found.other_key else 1, "keys", "kvdiag"),
        Evidence("first_token_new", _milliseconds(found.new), "ms", "kvdiag"),
        Evidence("first_token_own", _milliseconds(found.own), "ms", "kvdiag"),
        Evidence("first_token_other_salt", _milliseconds(found.salted), "ms", "kvdiag"),
        Evidence("first_token_other_unsalted", _milliseconds(found.unsalted), "ms", "kvdiag"),
        Evidence("p_same_timing", p, "p-value", "kvdiag"),
    )
    return (Finding(ID, status, summary, evidence),)


def _milliseconds(arm: Arm) -> float | None:
    return round(1000.0 * median(arm.seconds), 2) if arm.seconds else None


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
    def summary(self) -> str:
        """Hits of queries, and in how many requests, in words."""
        return f"{self.hits:,} of {self.queries:,} prompt tokens, in {self.hit} of {self.requests} requests"


def _arm(answers: Sequence[Answer], *kinds: ProbeKind) -> Arm:
    clean = [one for one in answers if one.problem is None and one.kind in kinds]
    return Arm(
        requests=len(clean),
        hit=sum(bool(one.hits) for one in clean),
        queries=sum(one.queries or 0 for one in clean),
        hits=sum(one.hits or 0 for one in clean),
        seconds=tuple(one.first_token_seconds for one in clean if one.first_token_seconds is not None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The answers to the probe's requests, in four arms, and whether the engine reports prefix caching as on.

    `new` are prompts that no client had sent before; `own` a tenant's own prompts repeated, which must hit where there
    is a cache; `salted` the same prompts with another tenant's salt, which must not; `unsalted` prompts that another
    tenant had sent, both without a salt. `other_key`: the other tenant had an API key of its own. `counted`: the engine
    counts prefix hits.
    """

    answers: tuple[Answer, ...]
    caching: bool | None
    other_key: bool
    counted: bool
    new: Arm
    own: Arm
    salted: Arm
    unsalted: Arm

    def shortage(self, limits: Limits) -> str | None:
        """Why too few requests can be judged, in a clause; `None` where enough can."""
        least = min((self.new, self.own, self.salted), key=lambda arm: arm.requests)
        if least.requests >= limits.isolation_rounds:
            return None
        reasons = Counter(one.problem for one in self.answers if one.problem is not None).most_common(1)
        why = f": {reasons[0][0]} (in {reasons[0][1]} of {len(self.answers)} requests)" if reasons else ""
        few = plural(least.requests, "request")
        return f"only {few} of a kind can be judged{why}; {limits.isolation_rounds} are needed, so repeat the run"

    def hits_show(self, limits: Limits) -> bool:
        """Whether time to first token separates a tenant's own hits from new prompts."""
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
    """The answers of the probe in a timeline; `None` where it did not run."""
    answers = tuple(
        _answer(timeline, span, span.workload.probe)
        for span in timeline.spans(ISOLATION)
        if span.workload is not None and span.workload.probe is not None
    )
    if not answers:
        return None
    reported = {pool.prefix_caching for pool in facts.pools}
    return isolation_of(answers, None if not reported or None in reported else any(reported))


def isolation_of(answers: tuple[Answer, ...], caching: bool | None) -> Isolation:
    """The answers, by arm."""
    clean = [one for one in answers if one.problem is None]
    return Isolation(
        answers=answers,
        caching=caching,
        other_key=any(one.other_key for one in answers),
        counted=bool(clean) and all(one.hits is not None for one in clean),
        new=_arm(answers, "first", "first_unsalted"),
        own=_arm(answers, "same_salt"),
        salted=_arm(answers, "other_salt"),
        unsalted=_arm(answers, "other_unsalted"),
    )


def _answer(timeline: Timeline, span: Span, probe: Probe) -> Answer:
    answer, outcome = partial(Answer, kind=probe.kind, other_key=probe.other_key), span.outcome
    if span.end_seconds is None or span.release_seconds is None or span.offer_seconds is None or outcome is None:
        return answer(problem="cut short")
    if outcome.failed:
        return answer(problem=f"failed: {next(iter(outcome.errors), 'no reason reported')}")
    before = timeline.between(span.begin_seconds, span.offer_seconds)
    after = timeline.between(span.release_seconds, span.end_seconds)
    prompts, queries, hits = (
        _counted(before, after, name) for name in ("prompt_tokens_total", "prefix_queries_total", "prefix_hits_total")
    )
    meanwhile = timeline.between(span.begin_seconds, span.end_seconds)
    return answer(
        problem=_mixed(meanwhile, outcome.prompt_tokens, prompts, queries, hits),
        queries=queries if prompts is not None else None,
        hits=hits if prompts is not None and queries is not None else None,
        first_token_seconds=outcome.first_token_seconds,
    )


def _mixed(
    meanwhile: Iterable[Sample], ours: int, prompts: int | None, queries: int | None, hits: int | None
) -> str | None:
    """Why the counters are not of this request alone; `None` where they are, or there are none."""
    if min(prompts or 0, queries or 0, hits or 0) < 0 or (hits or 0) > (ours if queries is None else queries):
        return "the server's counters restarted"
    most = max((sample.open_requests for sample in meanwhile), default=0)
    if most > 1 or (prompts is not None and prompts > ours) or (queries is not None and queries > ours):
        return "other traffic"
    return "the server counted it too late" if prompts is not None and prompts < ours else None


def _counted(before: Sequence[Sample], after: Sequence[Sample], name: str) -> int | None:
    """What all engines counted from before a request to after it; `None` where one does not report it.

    Responses may arrive out of order: the highest value of each side is its newest.
    """
    first, last = (_highest(samples, name) for samples in (before, after))
    if first is None or last is None or first.keys() != last.keys():
        return None
    return sum(last.values()) - sum(first.values())


def _highest(samples: Sequence[Sample], name: str) -> dict[str, int] | None:
    found: dict[str, int] = {}
    for sample in samples:
        for engine in sample.engines or ():
            count = getattr(engine, name)
            if count is None:
                return None
            found[engine.engine] = max(found.get(engine.engine, 0), count)
    return found or None


OFF = "prefix caching is off, so no request can be answered from another tenant's"


def verdict(found: Isolation, limits: Limits) -> tuple[Status, str]:
    """Status and sentence of the probe, shared by the step and the finding; the module's docstring has the order."""
    if found.counted and found.new.hit:
        same = f"other clients send the same prompts (new prompts hit {found.new.summary})"
        return "unknown", f"{same}; pause their traffic"
    if found.counted and found.salted.hit:
        return "fault", (f"cache_salt is ignored: another tenant's cache answered {found.salted.summary}")
    if found.counted and found.unsalted.hit and found.other_key:
        return "fault", (
            "without cache_salt, tenants with different API keys share a cache: the first tenant's cache answered "
            f"{found.unsalted.summary}"
        )
    if (shortage := found.shortage(limits)) is not None:
        return "unknown", shortage
    if not found.counted:
        return _by_time(found, limits)
    if not found.own.hit:
        if found.hits_show(limits):
            return _by_time(found, limits)
        if found.caching is False:
            return "ok", OFF
        return "unknown", (
            f"a tenant's own repeated prompt did not hit either ({found.own.summary}): prefix caching is off, requests "
            "reached other replicas, or the prompt is shorter than a block; probe one replica with caching on"
        )
    if found.as_fast_as_hits(found.salted, limits):
        return "suspect", (
            "the engine counted no hit with another tenant's cache_salt, but the first token came as fast as for a "
            "hit: another cache, in a router or a KV connector, may have answered"
        )
    if found.unsalted.hit:
        return "suspect", (
            "cache_salt isolates tenants, but requests without one share the cache, by design of the engine "
            f"({found.unsalted.summary}); set cache_salt on every request"
        )
    others = f"0 of {found.salted.queries:,} with another salt, 0 of {found.unsalted.queries:,} without"
    return "ok", f"no prompt token came from another tenant's cache ({others}); own repeats {found.own.summary}"


def _by_time(found: Isolation, limits: Limits) -> tuple[Status, str]:
    """The same from times to first token alone, which can only raise a suspicion."""
    why = "the engine does not report prefix hits" if not found.counted else "the engine counted no hit"
    if not found.hits_show(limits):
        return ("ok", OFF) if found.caching is False else ("unknown", f"{why}, and {_noise(found)}; use longer prompts")
    salted, unsalted = (found.as_fast_as_hits(arm, limits) for arm in (found.salted, found.unsalted))
    if salted:
        return "suspect", f"{why}; by time to first token another tenant's cache_salt is ignored: {_times(found)}"
    if unsalted:
        return "suspect", f"{why}; by time to first token requests without cache_salt share a cache: {_times(found)}"
    if salted is None or unsalted is None:
        return "unknown", f"{why}, and the other tenant's times lie between hits and misses; use longer prompts"
    return "ok", f"{why}; by time to first token no request was answered from another tenant's cache: {_times(found)}"


def timing(found: Isolation, limits: Limits) -> str | None:
    """What time to first token reveals about cached prompts, as a note; `None` where nothing could be compared."""
    if not found.new.seconds or not found.own.seconds or (found.counted and not found.own.hit):
        return None
    if not found.hits_show(limits):
        return _noise(found)
    ratio = median(found.new.seconds) / max(median(found.own.seconds), 1e-6)
    return (
        f"time to first token: {_times(found)}. Own repeats come {format_number(ratio)} times as fast as new prompts "
        f"(p-value {_p_value(found)}): where tenants share a cache, timing reveals which prompts others have sent"
    )


def _noise(found: Isolation) -> str:
    repeats, new = len(found.own.seconds), len(found.new.seconds)
    return f"time to first token is alike for {repeats} repeats and {new} new prompts (p-value {_p_value(found)})"


def _p_value(found: Isolation) -> str:
    return format_p_value(rank_sum_tail(found.new.seconds, found.own.seconds))


def _times(found: Isolation) -> str:
    names = ("new prompt", "own repeat", "other tenant with other salt", "other tenant unsalted")
    arms = zip(names, (found.new, found.own, found.salted, found.unsalted), strict=True)
    return ", ".join(f"{name} {format_duration(median(arm.seconds))}" for name, arm in arms if arm.seconds)
