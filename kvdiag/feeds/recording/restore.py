"""Restores the history of a daemon's previous run, so that a restart does not forget a slow leak.

First the newest readable header of all segments: it says which lives the server had, and a server with another address
has no history here. Then the history of thinned minutes, the newest segments first until their memory is used up. Last
the tail: segments that ended after the history did, whose samples were not thinned yet. Each part may not delay or
outgrow a start, so both have budgets. Samples dated in the future move the whole history back, and what could not be
read is a gap of the last sample, since a verdict must not take a hole for a flat line.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import structlog

from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.interning import MINUTE_SECONDS, Interning
from kvdiag.feeds.daemon.retention import MAX_LIVES, minute_of
from kvdiag.feeds.recording.budget import Budget, TooLongError
from kvdiag.feeds.recording.folder_timeline import behind, moved, of_it
from kvdiag.feeds.recording.segment_store import HISTORY, KEPT_SECONDS, files, number_of
from kvdiag.feeds.recording.trace import Header, read_header, read_trace
from kvdiag.model import Facts, Gap, GapKind, Sample, Timeline

_log = structlog.get_logger()

TAIL_SECONDS = 3600.0
"""Of the newest segments, up to the last sample, where there is no history to continue: it is damaged, or too new."""

MAX_TAILS = 64
"""Segments that are looked at for that; each start makes one."""

HISTORY_BYTES, TAIL_BYTES = 56 * 2**20, 16 * 2**20
"""Of memory, for the newest of each: a day of 8 GPUs in minutes takes 30 MiB, of which equal values take none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """An earlier run's history: `thinned` to minutes, and `tail`, as it came, after that.

    `facts` are those of the server's last life, `earlier_facts` those of the lives before it, as in a `Timeline`.
    `clock_set_seconds` is how far the clock was set since, as far as that shows: all times here are corrected by it.
    """

    facts: Facts
    earlier_facts: tuple[tuple[float, Facts], ...]
    thinned: tuple[Sample, ...]
    tail: tuple[Sample, ...]
    clock_set_seconds: float = 0.0


def reload(folder: Path, *, now_seconds: float, url: str | None) -> Before | None:
    """The recorded history of the server within the last day, `None` if there is none.

    `url` is the server's, where it is known. What cannot be read is left out, logged, and a gap of the last
    sample. Samples dated in the future show that the clock was set back: the whole history is then dated earlier.

    Raises:
        KvdiagError: the folder cannot be read.
    """
    try:
        histories, segments = files(folder / HISTORY), files(folder)
    except OSError as error:
        raise KvdiagError(f"cannot read {folder}: {error.strerror}") from error
    lost: dict[Path, Gap] = {}
    late_seconds = behind(segments[-MAX_TAILS:])
    # The newest of all says which lives there were: of a segment that is damaged the one before it does.
    for newest in sorted((*histories, *segments), key=number_of, reverse=True):
        if (known := _header(newest, lost)) is not None and known.facts.url:
            break
    else:
        return _damage_alone(lost, now_seconds)
    if url is not None and known.facts.url != url:
        _log.warning("recorder", reason=f"the recording is of another server, {known.facts.url}: it is not continued")
        return _damage_alone(lost, now_seconds)
    earlier = tuple((until + late_seconds.get(newest, 0.0), facts) for until, facts in known.earlier_facts or ())
    from_seconds = now_seconds - KEPT_SECONDS
    if len(earlier) == MAX_LIVES:
        from_seconds = max(from_seconds, earlier[0][0])
    urls = {one.url for one in (known.facts, *(facts for _, facts in earlier))} - {None}
    span = _Span(known.facts, urls, from_seconds, Budget(memory_bytes=HISTORY_BYTES), lost)
    thinned = _in_order([_samples(path, span) for path in reversed(histories)])
    if thinned:
        from_seconds = max(from_seconds, minute_of(thinned[-1]) + MINUTE_SECONDS)
    span = span._replace(from_seconds=from_seconds, budget=Budget(memory_bytes=TAIL_BYTES))
    tails = []
    for path, late in late_seconds.items():
        if samples := _samples(path, span, late):
            tails.append(samples)
            span = span._replace(from_seconds=max(span.from_seconds, samples[-1].at_seconds - TAIL_SECONDS))
    tail = _in_order(tails)
    if not thinned and not tail:
        return _damage_alone(lost, now_seconds)
    set_seconds = min(0.0, now_seconds - (tail or thinned)[-1].at_seconds)
    if set_seconds:
        _log.warning("clock", set_seconds=round(set_seconds, 1), reason="moved the recorded history by the same time")
    past = moved(Timeline(samples=tuple(thinned), earlier_facts=earlier), set_seconds)
    newer = moved(Timeline(samples=tuple(tail)), set_seconds).samples
    if thinned:
        ago_seconds = round(now_seconds - past.samples[0].at_seconds)
        _log.info("recorder", state="continues", minutes=len(thinned), since_seconds=ago_seconds)
    return Before(
        facts=known.facts,
        earlier_facts=past.earlier_facts,
        thinned=past.samples,
        tail=(*newer, *_damage(lost, now_seconds)),
        clock_set_seconds=set_seconds,
    )


def _damage(lost: dict[Path, Gap], now_seconds: float) -> tuple[Sample, ...]:
    """A sample with the gaps of what could not be read, unless it was written before the last day."""
    from_seconds = now_seconds - KEPT_SECONDS
    gaps = tuple(gap for path, gap in lost.items() if path.stat().st_mtime >= from_seconds)
    return (Sample(at_seconds=now_seconds, gaps=gaps),) if gaps else ()


def _damage_alone(lost: dict[Path, Gap], now_seconds: float) -> Before | None:
    tail = _damage(lost, now_seconds)
    return Before(facts=Facts(), earlier_facts=(), thinned=(), tail=tail) if tail else None


def same_server(one: Facts, other: Facts) -> bool:
    """Whether these are facts of one server: its own, but for what could not be read and the ids of its processes."""
    return replace(one, gaps=(), server_pids=None) == replace(other, gaps=(), server_pids=None)


class _Span(NamedTuple):
    """What is read of each segment: samples of one server since a time, within a budget; and what could not be.

    `urls` are those of the server in all of its lives.
    """

    facts: Facts
    urls: set[str | None]
    from_seconds: float
    budget: Budget
    lost: dict[Path, Gap]


def _samples(path: Path, span: _Span, late_seconds: float = 0.0) -> tuple[Sample, ...]:
    own = _header(path, span.lost)
    if own is None or own.facts.url not in span.urls:
        return ()
    # Its writer knew of no other life.
    if own.earlier_facts is None and not same_server(own.facts, span.facts):
        return ()
    try:
        timeline, _ = read_trace(
            path, from_seconds=span.from_seconds - late_seconds, share=Interning().sample, budget=span.budget
        )
    except KvdiagError as error:
        _leave_out(path, error, span.lost)
        return ()
    return moved(timeline, late_seconds).samples


def _in_order(newest_first: list[tuple[Sample, ...]]) -> list[Sample]:
    """The samples of several segments in ascending time; samples before the end of an earlier segment are left out."""
    found: list[Sample] = []
    for samples in reversed(newest_first):
        last_seconds = found[-1].at_seconds if found else 0.0
        found += [sample for sample in samples if sample.at_seconds >= last_seconds]
    return found


def _header(path: Path, lost: dict[Path, Gap]) -> Header | None:
    """The header of a segment that was begun."""
    try:
        return read_header(path)
    except KvdiagError as error:
        _leave_out(path, error, lost)
    return None


def _leave_out(path: Path, error: KvdiagError, lost: dict[Path, Gap]) -> None:
    if path not in lost:
        _log.warning("recorder", reason=f"left out at the start: {error}")
        kind: GapKind = "absent" if isinstance(error, TooLongError) else "failed"
        lost[path] = Gap("recorder", kind, f"{path.name} is left out: {of_it(error, path)}")
