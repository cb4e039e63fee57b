"""isolation.prefix_cache: one tenant's prefix cache answers another tenant's request.

Only a probe can show it, because the engine's counters do not say whose prompt a hit was: without one it is unknown.
The verdict itself stands in kvdiag/diagnosis/cache_isolation.py, which the test step shares.
"""

from __future__ import annotations

from statistics import median

from kvdiag.diagnosis.cache_isolation import Arm, probed, verdict
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import unknown
from kvdiag.model import Evidence, Facts, Finding, Timeline
from kvdiag.stats.rank_tests import rank_sum_tail

ID = "isolation.prefix_cache"


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
        Evidence("p_same_timing", p, "ratio", "kvdiag"),
    )
    return (Finding(ID, status, summary, evidence),)


def _milliseconds(arm: Arm) -> float | None:
    return round(1000.0 * median(arm.seconds), 2) if arm.seconds else None
