"""leak.host: anonymous memory of one of the server's processes keeps growing on the host.

The most common real leak, and in any of the processes: the API server, the engine core, a worker. Anonymous bytes and
not resident ones, since page cache and mapped weights come and go as the kernel likes; where a process tells those
alone, as the API server's page does, they count after hours. A run of minutes cannot see it.
"""

from __future__ import annotations

from dataclasses import replace

from kvdiag.diagnosis.caps import is_container, untold_bytes
from kvdiag.diagnosis.filling import under_its_bound
from kvdiag.diagnosis.history import History, Part, history
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.passive import Found, decisive, finding, too_short
from kvdiag.diagnosis.rule import unseen
from kvdiag.diagnosis.soak_components import soaked
from kvdiag.diagnosis.soak_verdicts import finding as of_soak
from kvdiag.diagnosis.timeline_queries import gap_reason
from kvdiag.diagnosis.window import LEAKS
from kvdiag.model import Facts, Finding, Timeline

ID = "leak.host"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """A soak's cycles; else watch each process over an hour, six hours and a day, as far as the readings reach."""
    soak = soaked(timeline, facts, limits)
    found = None if soak is None else of_soak(ID, soak.of("host"), limits)
    return _watched(timeline, facts, limits) if found is None else (found,)


def _watched(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """The anonymous bytes of each process, then of all together; then the resident ones of those that tell no more."""
    seen = history(timeline, facts, limits)
    room = _room_bytes(timeline, facts)
    resident = _resident(seen, room, facts, limits)
    if not seen.anonymous:
        if resident is not None:
            return (resident,)
        reason = gap_reason(timeline, facts, "host")
        return unseen(ID, reason or "the host memory of the server's processes was not read")
    watched = seen.watched("anonymous", limits)
    found = decisive(watched, limits, lambda _: room)
    part: Part = "anonymous"
    if found is not None and found[1].shape not in LEAKS:
        # What no process shows alone, all of them may: workers that take turns, each too noisy.
        together = decisive(seen.watched("together", limits), limits, lambda _: room)
        if together is not None and together[1].shape in LEAKS:
            found, part = together, "together"
        elif resident is not None and resident.status != "unknown":
            return (resident,)
    if found is None:
        return unseen(ID, too_short(watched.values(), "host memory", limits))
    judged = _finding(seen, part, found, room, facts, limits)
    return (judged if found[1].shape not in LEAKS else under_its_bound(judged, found[0], seen, part, facts, limits),)


def _finding(seen: History, part: Part, found: Found, room: int | None, facts: Facts, limits: Limits) -> Finding:
    """Growth of a part, less certain while it may be a cache of which nothing is told."""
    what = "resident bytes" if part == "resident" else "anonymous bytes"
    untold = untold_bytes(found[0].who, facts, limits.cache_bytes)
    grown = seen.grown_bytes(part, found[0])
    return finding(ID, found, what, room, "host", limits, cache_bytes=untold, grown_bytes=grown)


def _resident(seen: History, room: int | None, facts: Facts, limits: Limits) -> Finding | None:
    """Resident bytes of processes that tell no others, such as the API server's own page; `None` where there are none.

    Mapped files and page cache are among them: they may be what grows for some hours, and end at the size of the files.
    That such a process stands still says nothing of the engine's others.
    """
    if not seen.resident:
        return None
    watched = seen.watched("resident", limits)
    found = decisive(watched, limits, lambda _: room)
    if found is None:
        (missing,) = unseen(ID, too_short(watched.values(), "resident host memory", limits))
        return missing
    judged = _finding(seen, "resident", found, room, facts, limits)
    doubt = "anonymous memory is not told apart from mapped files; /proc/PID/smaps_rollup would"
    if found[1].shape not in LEAKS:
        kind = f"{judged.summary}; {doubt}" if judged.status == "ok" else judged.summary.removeprefix("cannot tell: ")
        # Nothing was found in the little that is seen: no evidence that leaves the whole undecided.
        return replace(judged, status="unknown", summary=f"cannot tell: {kind}", evidence=())
    judged = under_its_bound(judged, found[0], seen, "resident", facts, limits)
    lasting = found[1].hours >= limits.resident_hours and not is_container(found[0].who)
    if judged.status != "fault" or lasting:
        return judged
    return replace(judged, status="suspect", summary=f"{judged.summary}; {doubt}")


def _room_bytes(timeline: Timeline, facts: Facts) -> int | None:
    """What the server's processes may still take of their limit; `None` where that is not known."""
    newest = next((sample.host for sample in reversed(timeline.samples) if sample.host), ())
    if facts.host_limit_bytes is None:
        return None
    taken = sum(process.anonymous_bytes or 0 for process in newest)
    return max(facts.host_limit_bytes - taken, 0)
