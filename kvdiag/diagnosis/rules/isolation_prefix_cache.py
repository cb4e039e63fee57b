"""isolation.prefix_cache: one tenant's prefix cache answers another tenant's request.

Nothing but a probe can tell: the engine's counters do not say whose prompt a hit was, so without one it is unknown.
"""

from __future__ import annotations

from kvdiag.diagnosis.cache_isolation import Arm, probed
from kvdiag.diagnosis.isolation_verdict import verdict
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import number, unseen
from kvdiag.model import Evidence, Facts, Finding, Timeline
from kvdiag.stats.rank_tests import rank_sum_tail

ID = "isolation.prefix_cache"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Compare what two tenants' requests got from the cache, by the engine's counters and by time to first token."""
    found = probed(timeline, facts)
    if found is None:
        return unseen(ID, "no two tenants' requests were compared (kvdiag run --isolation)")
    status, summary = verdict(found, limits)
    chance = rank_sum_tail(found.new.seconds, found.own.seconds) if found.own.seconds else None
    evidence: tuple[Evidence, ...] = (
        number("requests_judged", sum(one.problem is None for one in found.answers), "requests", "kvdiag"),
        number("new_prompts_hit", found.new.hit_ratio, "ratio", "engine"),
        number("own_prompts_hit", found.own.hit_ratio, "ratio", "engine"),
        number("other_salt_hit", found.salted.hit_ratio, "ratio", "engine"),
        number("other_unsalted_hit", found.unsalted.hit_ratio, "ratio", "engine"),
        number("keys", 2 if found.other_key else 1, "keys", "kvdiag"),
        number("first_token_new", _milliseconds(found.new), "ms", "kvdiag"),
        number("first_token_own", _milliseconds(found.own), "ms", "kvdiag"),
        number("first_token_other_salt", _milliseconds(found.salted), "ms", "kvdiag"),
        number("first_token_other_unsalted", _milliseconds(found.unsalted), "ms", "kvdiag"),
        number("chance_that_times_are_alike", chance, "ratio", "kvdiag"),
    )
    return (Finding(id=ID, status=status, summary=summary, evidence=evidence),)


def _milliseconds(arm: Arm) -> float | None:
    return None if arm.median_seconds is None else round(1000.0 * arm.median_seconds, 2)
