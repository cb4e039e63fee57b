"""Splits a timeline into the lives of its server: from one start of its process to the next. Judges nothing.

A restart leaves nothing behind that the new process could be judged by, and nothing of the new process says what the
old one did. A new process shows in counters that begin at 0 again, in host processes that are all others, in the start
that the server reports, or in facts that changed. A life ends with its last answer. What follows belongs to it for
`LifeLimits.freed_seconds`, in which the memory of an exited process is freed, and the first sample after it in any
case; the rest of an outage belongs to no life.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.server_exits import server_exits
from kvdiag.formatting import format_bytes
from kvdiag.model import Facts, Life, LifeEnd, Sample, Timeline


class Lifetime(NamedTuple):
    """What was observed of one life, the facts it is judged by, and the life itself, which is not judged yet."""

    timeline: Timeline
    facts: Facts
    life: Life


def lifetimes(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[Lifetime, ...]:
    """The lives in a timeline, in order; the whole timeline is one where no restart was observed."""
    return timeline.once(("lifetimes", facts, limits), lambda: tuple(_split(timeline, facts, limits)))


def restarts(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[int, ...]:
    """The places of the samples with the first answer of each new process."""
    key = ("restarts", facts.started_seconds, limits.lives.noticed_seconds)
    return timeline.once(key, lambda: _restarts(timeline, facts, limits))


def _restarts(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[int, ...]:
    started = () if facts.started_seconds is None else (facts.started_seconds,)
    known = sorted((*started, *(until for until, _ in timeline.earlier_facts)), reverse=True)
    found: list[int] = []
    counts: dict[str, int] = {}
    pids: set[int] = set()
    replaced = silent = False
    answered: float | None = None
    back = 0  # the first answer after the newest outage
    for place, sample in enumerate(timeline.samples):
        if sample.host and sample.host[0].pid not in pids:
            now = {process.pid for process in sample.host}
            replaced = replaced or (bool(pids) and not now & pids)
            pids = now
        if sample.engines is None:
            silent = silent or any(gap.source == "engine" for gap in sample.gaps)
            continue
        if silent:
            back, silent = place, False
        before, answered = answered, sample.at_seconds
        fell = False
        while known and known[-1] <= answered:
            replaced = known.pop() > (answered if before is None else before) or replaced
        for engine in sample.engines:
            if (count := engine.prompt_tokens_total) is not None:
                fell = fell or count < counts.get(engine.engine, 0)
                counts[engine.engine] = count
        if fell or replaced:
            # SGLang has no counters until its first request: an earlier process's must not count then.
            counts = {one.engine: one.prompt_tokens_total or 0 for one in sample.engines}
        if before is None:
            replaced = False  # it was starting
        elif fell or replaced:
            last, recent_seconds = (found or [0])[-1], answered - limits.lives.noticed_seconds
            if not fell and back > last and timeline.samples[back].at_seconds >= recent_seconds:
                found.append(back)
            # Processes and facts of a start that the counters have shown already are no other one.
            elif fell or not found or timeline.samples[last].at_seconds < recent_seconds:
                found.append(place)
            replaced, pids = False, set()
    return tuple(found)


def _split(timeline: Timeline, facts: Facts, limits: Limits) -> Iterator[Lifetime]:
    samples = timeline.samples
    for begin, end in pairwise((0, *restarts(timeline, facts, limits), len(samples))):
        part, is_last = samples[begin:end], end == len(samples)
        answer = next((place for place in range(len(part) - 1, -1, -1) if part[place].answered), len(part) - 1)
        life = Life(start_seconds=part[0].at_seconds if part else 0.0, worst="unknown")
        own = facts if is_last else _facts_at(timeline, facts, part[answer].at_seconds)
        life = replace(life, engine=own.engine_name)
        if begin:
            own = replace(own, started_seconds=max(own.started_seconds or 0.0, life.start_seconds))
        is_over = not is_last or _is_down(part, limits)
        after = part[answer + 1 :]
        if is_over:
            life = replace(life, end_seconds=part[answer].at_seconds)
            # The first sample of the outage shows what was freed, however rarely samples are taken.
            until = max([part[answer].at_seconds + limits.lives.freed_seconds, *(one.at_seconds for one in after[:1])])
            part = tuple(one for one in part if one.at_seconds <= until)
        seen = timeline
        if len(part) < len(samples):
            # The marks of a run that continues after its last sample are the last life's.
            last = math.inf if is_last else part[-1].at_seconds
            marks = tuple(mark for mark in timeline.marks if life.start_seconds <= mark.at_seconds <= last)
            seen = Timeline(samples=part, marks=marks)
        if is_over:
            kind, detail = _end(seen, after, own, limits)
            life = replace(life, end=kind, end_detail=detail)
        yield Lifetime(seen, own, life)


def _facts_at(timeline: Timeline, facts: Facts, seconds: float) -> Facts:
    """The facts of an earlier life; the start of the process that is reported is the last one's."""
    found = next((earlier for until, earlier in timeline.earlier_facts if seconds < until), facts)
    return replace(found, started_seconds=None)


def _is_down(samples: tuple[Sample, ...], limits: Limits) -> bool:
    """Whether a server that answered gave no answer to as many samples in a row, up to the end, as count as lost."""
    silent = 0
    for sample in reversed(samples):
        if sample.answered:
            return silent >= limits.lost_readings
        silent += any(gap.source == "engine" for gap in sample.gaps)
    return False


def _end(ended: Timeline, after: tuple[Sample, ...], facts: Facts, limits: Limits) -> tuple[LifeEnd, str | None]:
    """How a life ended, as far as it was observed, and in words."""
    reason = next((gap.reason for sample in after for gap in sample.gaps if gap.source == "engine"), None)
    if reason is None:
        return "restarted", None
    exits = server_exits(ended, facts, limits)
    if not exits:
        return "unreachable", reason
    free, gpu = format_bytes(exits[-1].free_before_bytes), exits[-1].gpu
    return "exited", f"{reason}; {free} of GPU {gpu} were free at its minimum before"
