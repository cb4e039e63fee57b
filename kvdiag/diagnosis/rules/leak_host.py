"""leak.host: anonymous memory of one of the server's processes keeps growing on the host.

The most common real leak, and in any of the processes: the API server, the engine core, a worker. Decided in this
order: a soak; each process's anonymous bytes over hours; all processes together, where none shows it alone; resident
bytes where no others are reported, as by the API server's metrics endpoint. Anonymous bytes come first, because page
cache and mapped weights come and go as the kernel likes. Growth is then compared with the size limits of the process's
caches (`host_caches`). A run of minutes without a soak cannot detect it.
"""

from dataclasses import replace

from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.growth_verdicts import Decisive, decisive, finding, too_short
from kvdiag.diagnosis.growth.host_caches import is_container, unreported_bytes, within_its_limit
from kvdiag.diagnosis.growth.memory_series import MemorySeries, memory_series
from kvdiag.diagnosis.growth.soak_memory import finding as of_soak
from kvdiag.diagnosis.growth.soak_memory import soaked
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import unknown
from kvdiag.diagnosis.timeline_queries import gap_reason
from kvdiag.model import Facts, Finding, Timeline

ID = "leak.host"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """Judge a soak's cycles; without one, each process over as many hours as there are samples."""
    by_soak = of_soak(ID, soaked(timeline, facts, limits).of(Part.HOST_ANONYMOUS), limits)
    if by_soak is not None:
        return (by_soak,)
    # The anonymous bytes of each process, then of all together; then resident ones where no others are reported.
    series = memory_series(timeline, facts, limits)
    room = _room_bytes(timeline, facts)
    resident = _resident(series, room, facts, limits)
    if not series.points[Part.HOST_ANONYMOUS]:
        if resident is not None:
            return (resident,)
        reason = gap_reason(timeline, facts, "host")
        return unknown(ID, reason or "the server's host memory was not read; run kvdiag in its PID namespace")
    assessed = series.assessed(Part.HOST_ANONYMOUS)
    found = decisive(assessed, limits.growth, lambda _: room)
    part = Part.HOST_ANONYMOUS
    if found is not None and not found[1].grows:
        # What no process shows alone, all of them may: workers that take turns, each too noisy.
        together = decisive(series.assessed(Part.HOST_TOGETHER), limits.growth, lambda _: room)
        if together is not None and together[1].grows:
            found, part = together, Part.HOST_TOGETHER
        elif resident is not None and resident.status != "unknown":
            return (resident,)
    if found is None:
        return unknown(ID, too_short(assessed.values(), "host memory", limits.growth))
    judged = _finding(series, part, found, room, facts, limits)
    return (judged if not found[1].grows else within_its_limit(judged, found[0], series, part, facts, limits),)


def _finding(
    series: MemorySeries, part: Part, found: Decisive, room: int | None, facts: Facts, limits: Limits
) -> Finding:
    """Growth of a component, less certain while it may be a cache of which nothing is reported."""
    cache = unreported_bytes(found[0].who, facts, limits.growth.cache_bytes, series.engines.media)
    grown = series.grown_bytes(part, found[0])
    return finding(ID, found, part, room, limits.growth, cache_bytes=cache, grown_bytes=grown)


def _resident(series: MemorySeries, room: int | None, facts: Facts, limits: Limits) -> Finding | None:
    """Resident bytes of processes that report no others, such as the API server's metrics; `None` without any.

    Mapped files and page cache are among them: they may be what grows for some hours, and end at the size of the files.
    That such a process stands still says nothing of the engine's others.
    """
    part = Part.HOST_RESIDENT
    if not series.points[part]:
        return None
    assessed = series.assessed(part)
    found = decisive(assessed, limits.growth, lambda _: room)
    if found is None:
        (missing,) = unknown(ID, too_short(assessed.values(), "resident host memory", limits.growth))
        return missing
    judged = _finding(series, part, found, room, facts, limits)
    if found[1].grows:
        judged = within_its_limit(judged, found[0], series, part, facts, limits)
    doubt = "resident memory includes mapped files; read /proc/PID/smaps_rollup for anonymous memory"
    doubted = replace(judged, summary=f"{judged.summary}; {doubt}")
    if not found[1].grows:
        # Nothing was found in what is observed: no evidence that leaves the whole undecided.
        known = replace(doubted, status="unknown") if judged.status == "ok" else judged
        return replace(known, evidence=(), growth=None)
    lasting = assessed[found[0]].lasts(limits.growth.resident_hours) and not is_container(found[0].who)
    return judged if judged.status != "fault" or lasting else replace(doubted, status="suspect")


def _room_bytes(timeline: Timeline, facts: Facts) -> int | None:
    """What the server's processes may still take of their limit; `None` where that is not known."""
    newest = next((sample.host for sample in reversed(timeline.samples) if sample.host), ())
    if facts.host_limit_bytes is None:
        return None
    taken = sum(process.anonymous_bytes or 0 for process in newest)
    return max(facts.host_limit_bytes - taken, 0)
