"""Device memory over hours without test steps, on the same banks as everything: torch's, and what is beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from kvdiag.diagnosis.banks import Watched
from kvdiag.diagnosis.by_nvml import NON_TORCH, TORCH, UNDECIDED, likely_and_other
from kvdiag.diagnosis.history import Holder, history
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.passive import Found, decisive, excluded, finding, too_short
from kvdiag.diagnosis.reserved_memory import releasable_bytes, stranded_bytes
from kvdiag.diagnosis.rule import number
from kvdiag.diagnosis.timeline_queries import readable_bytes
from kvdiag.diagnosis.window import LEAKS
from kvdiag.model import Allocator, Facts, Finding, Timeline, cuda_uuid

MANY = 2

SERVER, UNSEEN = "the server's process", "whoever holds it"


def watched_torch(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """What the agents publish, over hours; empty where they do not, or not for long enough."""
    seen, room = history(timeline, facts, limits), partial(_room_bytes, timeline)
    live, reserved = seen.watched("live", limits), seen.watched("reserved", limits)
    found, cache = decisive(live, limits, room), decisive(reserved, limits, room)
    if found is None or cache is None:
        return ()
    outside = seen.watched("outside", limits)
    rest = decisive(outside, limits, room)
    return (
        _among_ranks(
            finding(
                TORCH,
                found,
                "torch's live bytes",
                room(found[0]),
                "torch",
                limits,
                extra=(excluded("reserved_growth_per_hour", reserved.get(found[0]), "torch"),),
            ),
            found,
            live,
        ),
        _beside_by_device(cache, timeline, facts, limits)
        if rest is None or set(outside) < set(live)
        else finding(
            NON_TORCH,
            rest,
            "bytes beside torch",
            room(rest[0]),
            "torch",
            limits,
            extra=(excluded("reserved_growth_per_hour", reserved.get(rest[0]), "torch"),),
        ),
    )


def _among_ranks(judged: Finding, found: Found, watched: Mapping[Holder, Watched]) -> Finding:
    """The finding of growth with how many of the ranks beside it grow as well: one alone is a leak of what it does."""
    if found[1].shape not in LEAKS or len(watched) == 1:
        return judged
    told = [one.decides for holder, one in watched.items() if holder != found[0] and one.decides is not None]
    growing = sum(trend.shape in LEAKS for trend in told)
    others = (
        number("other_ranks", len(told), "ranks", "kvdiag"),
        number("other_ranks_that_grow", growing, "ranks", "kvdiag"),
    )
    alone = f"; of the {len(told)} others {growing or 'none'} {'grows' if growing < MANY else 'grow'}" if told else ""
    return replace(judged, summary=f"{judged.summary}{alone}", evidence=(*judged.evidence, *others))


def watched_cache(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """What torch has reserved and does not use, where that keeps growing over hours; `None` where it does not.

    What lies between live blocks stays there: holes that nothing fits in again. What is releasable is a cache, which
    torch gives back before an allocation fails.
    """
    seen, room = history(timeline, facts, limits), partial(_room_bytes, timeline)
    least = min(bank.least_growth_bytes for bank in limits.banks)
    found = decisive(seen.watched("unused", limits), limits, room) if seen.grew("unused", least) else None
    if found is None or found[1].shape not in LEAKS:
        return None
    last = _newest(timeline, found[0])
    stranded = None if last is None else stranded_bytes(last)
    releasable = None if last is None else releasable_bytes(last)
    gap = None if last is None else last.reserved_bytes - last.allocated_bytes
    if releasable is not None and stranded is not None and releasable >= stranded:
        return None
    live = seen.watched("live", limits).get(found[0])
    growing = finding(
        verdict,
        found,
        "torch's reserved and unused bytes",
        room(found[0]),
        "torch",
        limits,
        extra=(
            excluded("live_growth_per_hour", live, "torch"),
            number("reserved_but_unallocated", gap, "bytes", "torch"),
            number("stranded", stranded, "bytes", "torch"),
            number("releasable", releasable, "bytes", "torch"),
        ),
    )
    parts = "which part is between live blocks is not told"
    if stranded is not None and releasable is not None:
        parts = f"{readable_bytes(stranded)} lie between live blocks, {readable_bytes(releasable)} are releasable"
    # Holes are no cache: nothing gives them back. Whether they are holes only the blocks tell.
    status = growing.status if stranded is not None and releasable is not None else "suspect"
    summary = f"{growing.summary}, while what lives in them does not grow; {parts}"
    return replace(growing, status=status, summary=summary)


def watched_devices(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Finding, ...]:
    """What NVML tells of the server's processes, else of its devices, over hours; empty where not for long enough."""
    watched, whose = _device_series(timeline, facts, limits)
    room = partial(_room_bytes, timeline)
    found = decisive(watched, limits, room)
    if found is None:
        return ()
    one = _among_ranks(_of_device(NON_TORCH, found, whose, timeline, facts, limits), found, watched)
    if found[1].shape not in LEAKS:
        return replace(one, id=TORCH), one
    # Growth of a device whose holder is not seen may be a neighbour's; beside an engine that took its pool at its
    # start there is seldom room for one.
    status = "suspect" if whose == UNSEEN and not (facts.pools or facts.device_uuids) else one.status
    likely, other = likely_and_other(facts.engine_name)
    told = replace(one, id=likely, status=status, summary=f"{one.summary}; {UNDECIDED}")
    untold = Finding(id=other, status="unknown", summary=f"cannot tell: {UNDECIDED}")
    return (told, untold) if likely == TORCH else (untold, told)


def watched_others(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """What is on the server's devices and not the server's, where it keeps growing; `None` where it does not."""
    seen, room = history(timeline, facts, limits), partial(_room_bytes, timeline)
    least = min(bank.least_growth_bytes for bank in limits.banks)
    found = decisive(seen.watched("others", limits), limits, room) if seen.grew("others", least) else None
    if found is None or found[1].shape not in LEAKS:
        return None
    server = seen.watched("server", limits).get(found[0])
    return finding(
        verdict,
        found,
        "bytes that are not the server's",
        room(found[0]),
        "nvml",
        limits,
        extra=(excluded("server_growth_per_hour", server, "nvml"),),
    )


def _beside_by_device(cache: Found, timeline: Timeline, facts: Facts, limits: Limits) -> Finding:
    """Where no process's bytes are told inside it: the server's on the device, as long as torch's stand still."""
    watched, whose = _device_series(timeline, facts, limits)
    room = partial(_room_bytes, timeline)
    found = decisive(watched, limits, room)
    if found is None:
        missing = too_short(watched.values(), "what the processes hold of the device", limits)
        return Finding(id=NON_TORCH, status="unknown", summary=f"cannot tell: {missing}")
    if found[1].shape in LEAKS and cache[1].shape in LEAKS:
        grows = "torch's reserved bytes grow, and so does the device"
        summary = f"cannot tell: {grows}; NVML inside the process would tell what is beside torch"
        return Finding(id=NON_TORCH, status="unknown", summary=summary)
    return _of_device(NON_TORCH, found, whose, timeline, facts, limits)


def _device_series(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Mapping[Holder, Watched], str]:
    """The server's own bytes on its devices, else the devices'; and whose they are."""
    seen = history(timeline, facts, limits)
    return seen.watched("server" if seen.server else "whole", limits), SERVER if seen.server else UNSEEN


def _of_device(verdict: str, found: Found, whose: str, timeline: Timeline, facts: Facts, limits: Limits) -> Finding:
    seen = history(timeline, facts, limits)
    others = seen.watched("others", limits).get(found[0]) if found[1].shape in LEAKS else None
    holder = replace(found[0], who=f"{found[0].who}, {whose}")
    extra = (excluded("growth_of_others_per_hour", others, "nvml"),) if found[1].shape in LEAKS else ()
    return finding(
        verdict,
        (holder, found[1]),
        "device bytes",
        _room_bytes(timeline, found[0]),
        "nvml",
        limits,
        extra=extra,
    )


def _newest(timeline: Timeline, holder: Holder) -> Allocator | None:
    """The newest publication of a process, which may be on several devices."""
    for sample in reversed(timeline.samples):
        for each in sample.allocators or ():
            if each.device_uuid.lower() == holder.device_uuid and each.who == holder.who:
                return each
    return None


def _room_bytes(timeline: Timeline, holder: Holder) -> int | None:
    """What is free on a holder's device, as newest read by NVML here or inside a process."""
    for sample in reversed(timeline.samples):
        told = [device.memory for device in sample.devices or () if cuda_uuid(device.uuid) == holder.device_uuid]
        told += [each.memory for each in sample.allocators or () if each.device_uuid.lower() == holder.device_uuid]
        free = [memory.free_bytes for memory in told if memory is not None]
        if free:
            return min(free)
    return None
