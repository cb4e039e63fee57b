"""leak.host: anonymous memory of one of the server's processes keeps growing on the host.

The most common real leak, and in any of the processes: the API server, the engine core, a worker. Anonymous bytes and
not resident ones, since page cache and mapped weights come and go as the kernel likes. A run of minutes cannot see it.
"""

from __future__ import annotations

from kvdiag.diagnosis.filling import under_its_bound
from kvdiag.diagnosis.history import history
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.observe import gap_reason
from kvdiag.diagnosis.passive import decisive, finding, too_short
from kvdiag.diagnosis.rule import unseen
from kvdiag.diagnosis.soak_components import soaked
from kvdiag.diagnosis.soak_verdicts import finding as of_soak
from kvdiag.diagnosis.window import LEAKS
from kvdiag.model import Facts, Finding, Timeline

ID = "leak.host"


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """A soak's cycles; else watch each process over an hour, six hours and a day, as far as the readings reach."""
    soak = soaked(timeline, facts, limits)
    found = None if soak is None else of_soak(ID, soak.of("host"), limits)
    return _watched(timeline, facts, limits) if found is None else (found,)


def _watched(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """The anonymous bytes of each process, then of all together."""
    seen = history(timeline, facts, limits)
    if not seen.anonymous:
        if any(sample.host for sample in timeline.samples):
            return unseen(ID, "anonymous memory is not told apart from mapped files; /proc/PID/smaps_rollup would")
        reason = gap_reason(timeline, facts, "host")
        return unseen(ID, reason or "the host memory of the server's processes was not read")
    watched = seen.watched("anonymous", limits)
    room = _room_bytes(timeline, facts)
    found = decisive(watched, limits, lambda _: room)
    if found is not None and found[1].shape not in LEAKS:
        # What no process shows alone, all of them may: workers that take turns, each too noisy.
        together = decisive(seen.watched("together", limits), limits, lambda _: room)
        found = together if together is not None and together[1].shape in LEAKS else found
    if found is None:
        return unseen(ID, too_short(watched.values(), "host memory", limits))
    judged = finding(ID, found, "anonymous bytes", room, "host", limits)
    return (judged if found[1].shape not in LEAKS else under_its_bound(judged, found[0], seen, facts, limits),)


def _room_bytes(timeline: Timeline, facts: Facts) -> int | None:
    """What the server's processes may still take of their limit; `None` where that is not known."""
    newest = next((sample.host for sample in reversed(timeline.samples) if sample.host), ())
    if facts.host_limit_bytes is None:
        return None
    taken = sum(process.anonymous_bytes or 0 for process in newest)
    return max(facts.host_limit_bytes - taken, 0)
