"""What a daemon's earlier run has recorded, from which the next goes on: so that a restart forgets no slow leak."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import structlog

from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.interning import Interning
from kvdiag.feeds.daemon.retention import MINUTE_SECONDS
from kvdiag.feeds.recording.budget import Budget
from kvdiag.feeds.recording.folder_timeline import behind, moved, of_it
from kvdiag.feeds.recording.segment_store import HISTORY, KEPT_SECONDS, files
from kvdiag.feeds.recording.trace import CUT_OFF, is_begun, read_header, read_trace
from kvdiag.model import Facts, Gap, Sample

_log = structlog.get_logger()

TAIL_SECONDS = 3600.0
"""Of the newest segments, for what the history does not hold yet: minutes, or what a killed daemon left."""

MOST_TAILS = 64
"""Segments that are looked at for that; each start makes one."""


MEMORY_BYTES = 64 * 2**20
"""Of all of it: a day of 8 GPUs in minutes takes 30 MiB, of which equal values take none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """An earlier run's history: `thinned` to minutes, and `tail`, as it came, after that."""

    facts: Facts
    thinned: tuple[Sample, ...]
    tail: tuple[Sample, ...]


def reload(folder: Path, *, now_seconds: float, url: str | None) -> Before | None:
    """What was recorded of the server within the last day, `None` where that is nothing.

    `url` is the server's, where it is known. What cannot be read is left out, logged, and a gap of the last
    sample; what was recorded by a clock that was ahead is left out, too: nothing may be newer than now.

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
    budget = Budget(memory_bytes=MEMORY_BYTES)
    earliest_seconds = now_seconds - KEPT_SECONDS
    thinned: list[Sample] = []
    for path in histories:
        _extend(thinned, _Segment(path, facts, budget, lost), earliest_seconds, now_seconds)
    if thinned:
        _log.info(
            "recorder", state="goes on", minutes=len(thinned), since_seconds=round(now_seconds - thinned[0].at_seconds)
        )
    tail_seconds = now_seconds - TAIL_SECONDS
    if thinned:
        tail_seconds = max(tail_seconds, (thinned[-1].at_seconds // MINUTE_SECONDS + 1) * MINUTE_SECONDS)
    tail: list[Sample] = []
    for path, late_seconds in reversed(behind(segments[-MOST_TAILS:]).items()):
        _extend(tail, _Segment(path, facts, budget, lost), tail_seconds, now_seconds, late_seconds)
    if lost:
        tail.append(Sample(at_seconds=now_seconds, gaps=tuple(lost.values())))
    if not thinned and not tail:
        return None
    return Before(facts=facts, thinned=tuple(thinned), tail=tuple(tail))


def same_server(one: Facts, other: Facts) -> bool:
    """Whether these are facts of one server: its own, but for what could not be read and the ids of its processes."""
    return replace(one, gaps=(), server_pids=None) == replace(other, gaps=(), server_pids=None)


class _Segment(NamedTuple):
    """A file of the folder, whose facts it has to be of, what may still be read, and what could not be."""

    path: Path
    facts: Facts
    budget: Budget
    lost: dict[str, Gap]


def _extend(
    found: list[Sample], segment: _Segment, from_seconds: float, until_seconds: float, late_seconds: float = 0.0
) -> None:
    """Add those of a segment that are of the same server, and later than what there is."""
    path = segment.path
    own = _facts(path, segment.lost)
    if own is None or not same_server(own, segment.facts):
        return
    try:
        timeline, _ = read_trace(
            path, from_seconds=from_seconds - late_seconds, share=Interning().sample, budget=segment.budget
        )
    except KvdiagError as error:
        _leave_out(path, error, segment.lost)
        return
    timeline = moved(timeline, late_seconds)
    ahead = 0
    for sample in timeline.samples:
        if sample.at_seconds > until_seconds:
            ahead += 1
        elif not found or sample.at_seconds >= found[-1].at_seconds:
            found.append(sample)
    if ahead:
        _log.warning(
            "recorder", reason=f"{ahead} samples of {path.name} are dated in the future: left out at the start"
        )


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
        lost[path.name] = Gap(source="recorder", kind="failed", reason=f"{path.name} is left out: {of_it(error, path)}")
