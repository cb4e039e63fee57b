"""leak.host: anonymous memory of one of the server's processes keeps growing on the host.

The most common real leak, and in any of the processes: the API server, the engine core, a worker. Anonymous bytes and
not resident ones, since page cache and mapped weights come and go as the kernel likes. A run of minutes cannot see it.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import gap_reason
from kvdiag.diagnosis.passive import Readings, company, decisive, evidence, judged, keep, too_short, watch_all
from kvdiag.diagnosis.rule import unseen
from kvdiag.diagnosis.soak_components import soaked
from kvdiag.diagnosis.soak_verdicts import finding
from kvdiag.model import Facts, Finding, Timeline

ID = "leak.host"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """A soak's cycles; else watch each process over an hour, six hours and a day, as far as the readings reach."""
    soak = soaked(timeline, facts, limits)
    found = None if soak is None else finding(ID, soak.of("host"), limits)
    return _watched(timeline, facts, limits) if found is None else (found,)


def _watched(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    readings: Readings[tuple[int, str]] = {}
    told = False
    for sample in timeline.samples:
        for process in sample.host or ():
            told = True
            if process.anonymous_bytes is not None:
                keep(readings, (process.pid, process.name), sample.at_seconds, process.anonymous_bytes, limits)
    if not readings:
        if told:
            return unseen(ID, "anonymous memory is not told apart from mapped files; /proc/PID/smaps_rollup would")
        reason = gap_reason(timeline, facts, "host")
        return unseen(ID, reason or "the host memory of the server's processes was not read")
    watched = watch_all(readings, company(timeline), limits)
    found = decisive(watched)
    if found is None:
        return unseen(ID, too_short(watched.values(), "host memory", limits))
    (pid, name), trend = found
    who = f"{name or 'process'} {pid}"
    room = _room_bytes(timeline, facts)
    status, summary = judged(trend, f"{who}: anonymous bytes", room, limits)
    return (Finding(id=ID, status=status, summary=summary, evidence=evidence(trend, who, room, "host", limits)),)


def _room_bytes(timeline: Timeline, facts: Facts) -> int | None:
    """What the server's processes may still take of their limit; `None` where that is not known."""
    newest = next((sample.host for sample in reversed(timeline.samples) if sample.host), ())
    if facts.host_limit_bytes is None:
        return None
    taken = sum(process.anonymous_bytes or 0 for process in newest)
    return max(facts.host_limit_bytes - taken, 0)
