"""What the isolation probe means: status and sentence, which the step and the finding share."""

from __future__ import annotations

from statistics import median

from kvdiag.diagnosis.cache_isolation import Arm, Isolation
from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Status
from kvdiag.stats.rank_tests import rank_sum_tail

TWO_KEYS = "another tenant's request without a salt, with a key of its own, was answered from the cache"
ONE_KEY = (
    "salts keep tenants apart, but requests without a salt share the cache, as vLLM does by design: "
    "whoever sends no cache_salt shares"
)
OFF = "prefix caching is off: no request can be answered from another's"


def verdict(found: Isolation, limits: Limits) -> tuple[Status, str]:
    """Whether one tenant's cache answers another's request.

    A hit that the engine counted for a request decides by itself; that there is none says something only where a
    tenant's own repeat is a hit.
    """
    if found.counted and found.new.hit:
        return "unknown", f"cannot tell: new prompts were counted as hits ({found.new.told}): somebody else's"
    if found.counted and found.salted.hit:
        told = f"another tenant's salt is not honoured: prompt tokens from the cache {found.salted.told}"
        return "fault", told
    if found.counted and found.unsalted.hit and found.other_key:
        return "fault", f"{TWO_KEYS}: prompt tokens from it {found.unsalted.told}"
    if (shortage := found.shortage(limits)) is not None:
        return "unknown", f"cannot tell: {shortage}"
    if not found.counted:
        return _by_time(found, limits)
    if not found.own.hit:
        if found.hits_show(limits):
            return _by_time(found, limits)
        if found.caching is False:
            return "ok", OFF
        return "unknown", (
            f"cannot tell: a tenant's own prompt sent again was no hit either ({found.own.told}): prefix caching is "
            "off, the requests came to other replicas, or the prompt is shorter than what is cached as a whole"
        )
    if found.as_fast_as_hits(found.salted, limits):
        return "suspect", (
            "the engine counted no hit with another tenant's salt, but its first token came as fast as with one: "
            "another cache, in a router or a KV connector, may have answered"
        )
    if found.unsalted.hit:
        return "suspect", f"{ONE_KEY} ({found.unsalted.told})"
    return "ok", f"no prompt token came from another tenant's cache ({_together(found)}); own ones {found.own.told}"


def _by_time(found: Isolation, limits: Limits) -> tuple[Status, str]:
    """The same where the engine counts no hits: by times to first token alone, which suspect at most."""
    why = "the engine counts no prefix hits" if not found.counted else "the engine counted no hit"
    if not found.hits_show(limits):
        if found.caching is False:
            return "ok", OFF
        return "unknown", f"cannot tell: {why}, and {_noise(found)}"
    salted, unsalted = (found.as_fast_as_hits(arm, limits) for arm in (found.salted, found.unsalted))
    if salted:
        return "suspect", f"{why}; by time to first token another tenant's salt is not honoured: {_times(found)}"
    if unsalted:
        return "suspect", f"{why}; by time to first token requests without a salt share a cache: {_times(found)}"
    if salted is None or unsalted is None:
        return "unknown", f"cannot tell: {why}, and another tenant's times lie between hits and misses"
    return "ok", f"{why}; by time to first token no request was answered from another tenant's cache: {_times(found)}"


def timing(found: Isolation, limits: Limits) -> str | None:
    """What a clock alone tells a tenant of what others asked, as a note; `None` where there was nothing to tell."""
    if not found.new.seconds or not found.own.seconds or (found.counted and not found.own.hit):
        return None
    if not found.hits_show(limits):
        return _noise(found)
    ratio = median(found.new.seconds) / max(median(found.own.seconds), 1e-6)
    told = f"a hit is {ratio:.1f} times as fast to its first token ({_times(found)}; chance {_chance(found)})"
    return f"{told}: where tenants share a cache a clock tells what others have asked"


def _noise(found: Isolation) -> str:
    repeats, new = len(found.own.seconds), len(found.new.seconds)
    return f"times to first token do not tell {repeats} repeats from {new} new prompts (chance {_chance(found)})"


def _chance(found: Isolation) -> str:
    chance = rank_sum_tail(found.new.seconds, found.own.seconds)
    return "< 0.1%" if chance < 0.001 else f"{chance:.1%}"  # noqa: PLR2004 - as many digits as are shown


def _times(found: Isolation) -> str:
    arms = (("new", found.new), ("own", found.own), ("other salt", found.salted), ("no salt", found.unsalted))
    return ", ".join(f"{name} {1000.0 * median(arm.seconds):,.0f} ms" for name, arm in arms if arm.seconds)


def _together(found: Isolation) -> str:
    return f"{_of(found.salted)} with another salt, {_of(found.unsalted)} without"


def _of(arm: Arm) -> str:
    return f"0 of {arm.queries:,}"
