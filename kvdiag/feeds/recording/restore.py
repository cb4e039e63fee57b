"""Restores the history of a daemon's previous run, so that a restart does not forget a slow leak."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import structlog

from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.interning import MINUTE_SECONDS, Interning
from kvdiag.feeds.recording.budget import Budget, TooLongError
from kvdiag.feeds.recording.folder_timeline import behind, moved, of_it
from kvdiag.feeds.recording.segment_store import HISTORY, KEPT_SECONDS, files
from kvdiag.feeds.recording.trace import CUT_OFF, is_begun, read_header, read_trace
from kvdiag.model import Facts, Gap, GapKind, Sample

_log = structlog.get_logger()

TAIL_SECONDS = 3600.0
"""Of the newest segments, for what the history does not hold yet: minutes, or what a killed daemon left."""

MAX_TAILS = 64
"""Segments that are looked at for that; each start makes one."""

HISTORY_BYTES, TAIL_BYTES = 56 * 2**20, 16 * 2**20
"""Of memory, for the newest of each: a day of 8 GPUs in minutes takes 30 MiB, of which equal values take none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """An earlier run's history: `thinned` to minutes, and `tail`, as it came, after that."""

    facts: Facts
    thinned: tuple[Sample, ...]
    tail: tuple[Sample, ...]


def reload(folder: Path, *, now_seconds: float, url: str | None) -> Before | None:
    """The recorded history of the server within the last day, `None` if there is none.

    `url` is the server's, where it is known. What cannot be read is left out, logged, and a gap of the last
    sample; samples dated in the future (their clock was ahead) are left out, too.

    Raises:
        KvdiagError: the folder cannot be read.
    """
    try:
        histories, segments = files(folder / HISTORY), files(folder)
    except OSError as error:
        raise KvdiagError(f"cannot read {folder}: {error.strerror}") from error
    lost: dict[str, Gap] = {}
    facts = next(
        (known for path in reversed(segments) if (known := _facts(path, lost)) is not None and known.url), None
    )
    if facts is None or (url is not None and facts.url != url):
        return None
    span = _Span(facts, now_seconds - KEPT_SECONDS, now_seconds, Budget(memory_bytes=HISTORY_BYTES), lost)
    thinned = _in_order([_samples(path, span) for path in reversed(histories)])
    if thinned:
        _log.info(
            "recorder", state="goes on", minutes=len(thinned), since_seconds=round(now_seconds - thinned[0].at_seconds)
        )
    tail_seconds = now_seconds - TAIL_SECONDS
    if thinned:
        tail_seconds = max(tail_seconds, (thinned[-1].at_seconds // MINUTE_SECONDS + 1) * MINUTE_SECONDS)
    span = _Span(facts, tail_seconds, now_seconds, Budget(memory_bytes=TAIL_BYTES), lost)
    tail = _in_order([_samples(path, span, late) for path, late in behind(segments[-MAX_TAILS:]).items()])
    if lost:
        tail.append(Sample(at_seconds=now_seconds, gaps=tuple(lost.values())))
    if not thinned and not tail:
        return None
    return Before(facts=facts, thinned=tuple(thinned), tail=tuple(tail))


def same_server(one: Facts, other: Facts) -> bool:
    """Whether these are facts of one server: its own, but for what could not be read and the ids of its processes."""
    return replace(one, gaps=(), server_pids=None) == replace(other, gaps=(), server_pids=None)


class _Span(NamedTuple):
    """What is read of each segment: samples of one server in a time, within a budget; and what could not be."""

    facts: Facts
    from_seconds: float
    until_seconds: float
    budget: Budget
    lost: dict[str, Gap]


def _samples(path: Path, span: _Span, late_seconds: float = 0.0) -> tuple[Sample, ...]:
    own = _facts(path, span.lost)
    if own is None or not same_server(own, span.facts):
        return ()
    try:
        timeline, _ = read_trace(
            path, from_seconds=span.from_seconds - late_seconds, share=Interning().sample, budget=span.budget
        )
    except KvdiagError as error:
        _leave_out(path, error, span.lost)
        return ()
    samples = moved(timeline, late_seconds).samples
    known = tuple(sample for sample in samples if sample.at_seconds <= span.until_seconds)
    if ahead := len(samples) - len(known):
        _log.warning("recorder", reason=f"{ahead} samples of {path.name} are dated in the future: ignored")
    return known


def _in_order(newest_first: list[tuple[Sample, ...]]) -> list[Sample]:
    """The samples of several segments in ascending time; samples before the end of an earlier segment are left out."""
    found: list[Sample] = []
    for samples in reversed(newest_first):
        last_seconds = found[-1].at_seconds if found else 0.0
        found += [sample for sample in samples if sample.at_seconds >= last_seconds]
    return found


def _facts(path: Path, lost: dict[str, Gap]) -> Facts | None:
    """Facts of a segment that was begun, as they were when nothing had cut it off."""
    try:
        if is_begun(path):
            facts, _ = read_header(path)
            return replace(facts, gaps=tuple(gap for gap in facts.gaps if gap != CUT_OFF))
    except KvdiagError as error:
        _leave_out(path, error, lost)
    return None


def _leave_out(path: Path, error: KvdiagError, lost: dict[str, Gap]) -> None:
    if path.name not in lost:
        _log.warning("recorder", reason=f"left out at the start: {error}")
        kind: GapKind = "absent" if isinstance(error, TooLongError) else "failed"
        lost[path.name] = Gap("recorder", kind, f"{path.name} is left out: {of_it(error, path)}")
