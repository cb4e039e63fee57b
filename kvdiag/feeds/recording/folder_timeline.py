"""A recorder's folder → one Timeline: segments of a trace, rotated by size or time, put together by their time.

Each segment is a trace of its own (`kvdiag.feeds.recording.trace`). A recorder that was killed leaves a segment
without its end, whose last line may be torn: what stood before it counts. One that is damaged is left out, and so are
the oldest if there are more than can be read; what is left out is reported as a gap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from heapq import merge
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.budget import THINNED, Budget, TooLongError
from kvdiag.feeds.recording.trace import CUT_OFF, is_begun, read_header, read_trace
from kvdiag.model import Facts, Gap, GapKind, Timeline

ENDINGS = (".jsonl", ".jsonl.gz")

OVERLAP_SECONDS = 60.0
"""A recorder's next segment begins where the one before ends, but for a clock that was put right in between."""

MAX_SEGMENTS = 1024
"""A month of segments of an hour."""

MAX_NAMES = 65_536
"""Of a folder that is looked through; a recorder's own holds no others."""


class _Segment(NamedTuple):
    name: str
    timeline: Timeline
    facts: Facts
    first_seconds: float
    last_seconds: float


def read_recorded(path: Path) -> tuple[Timeline, Facts]:
    """The timeline and facts of a recording: a trace, or a folder of its segments.

    Raises:
        KvdiagError: as `read_trace` and `read_segments`.
    """
    return read_segments(path) if path.is_dir() else read_trace(path)


def read_segments(folder: Path, *, budget: Budget | None = None) -> tuple[Timeline, Facts]:
    """The timeline of a recorder's folder, and the facts of its newest segment.

    Raises:
        KvdiagError: it cannot be read, holds no segment or too many, a bad one, or segments of several servers.
    """
    segments: list[_Segment] = []
    gaps: list[Gap] = []
    problems: list[KvdiagError] = []
    listed = _paths(folder)
    paths = [path for path in listed if path.exists()]
    begun = {path for path in paths if is_begun(path)}
    late_seconds = behind(path for path in paths if path in begun)
    budget = Budget() if budget is None else budget
    for older, path in reversed([*enumerate(paths)]):
        if path not in begun:
            gaps.append(_gap(f"{path.name} is empty: its recorder was killed as it started"))
            continue
        try:
            timeline, facts = read_trace(path, budget=budget)
        except TooLongError as error:
            problems.append(error)
            gaps.append(_gap(f"{path.name} and {older} segments before it are left out: {of_it(error, path)}"))
            break
        except KvdiagError as error:
            if path.exists():
                problems.append(error)
                gaps.append(_gap(f"{path.name} is left out: {of_it(error, path)}", "failed"))
            continue
        timeline = moved(timeline, late_seconds[path])
        if CUT_OFF in facts.gaps:
            gaps.append(_gap(f"{path.name} is incomplete: its recorder was killed, or is still writing"))
        if THINNED in facts.gaps:
            gaps.append(_gap(f"{path.name}: {THINNED.reason}"))
        times = [sample.at_seconds for sample in (*timeline.samples[:1], *timeline.samples[-1:])]
        times += [mark.at_seconds for mark in (*timeline.marks[:1], *timeline.marks[-1:])]
        if times:
            own = replace(facts, gaps=tuple(gap for gap in facts.gaps if gap not in (CUT_OFF, THINNED)))
            segments.append(_Segment(path.name, timeline, own, min(times), max(times)))
    gaps.reverse()
    if gone := sum(not path.exists() for path in listed):
        gaps.append(
            _gap(f"{gone} of {len(listed)} segments were removed while they were read: the recorder needed space")
        )
    if not segments and problems:
        raise problems[0]
    if not segments:
        raise KvdiagError(f"the segments in {folder} hold no sample: did the recorder read anything?")
    return _together(folder, sorted(segments, key=lambda one: (one.first_seconds, one.name)), gaps)


def behind(paths: Iterable[Path]) -> dict[Path, float]:
    """By how much the clock of each segment was behind that of the last one, by the headers between them.

    `paths` are in the order in which they were begun, which is that of a recorder's names. A header that cannot be read
    counts as no change of the clock.
    """
    found: dict[Path, float] = {}
    seconds = 0.0
    for path in reversed(list(paths)):
        found[path] = seconds
        with contextlib.suppress(KvdiagError):
            seconds += read_header(path)[1]
    return found


def of_it(error: KvdiagError, path: Path) -> str:
    """The message of an error whose segment is already named."""
    return str(error).replace(str(path), "it")


def moved(timeline: Timeline, seconds: float) -> Timeline:
    """The timeline so much later."""
    if not seconds:
        return timeline
    return Timeline(
        samples=tuple(replace(one, at_seconds=max(one.at_seconds + seconds, 0.0)) for one in timeline.samples),
        marks=tuple(replace(one, at_seconds=max(one.at_seconds + seconds, 0.0)) for one in timeline.marks),
    )


def _paths(folder: Path) -> list[Path]:
    try:
        names = sorted(entry.name for entry in islice(folder.iterdir(), MAX_NAMES))
        # Opening a pipe would block.
        paths = [folder / name for name in names if name.endswith(ENDINGS) and not (folder / name).is_fifo()]
    except OSError as error:
        raise KvdiagError(f"cannot read {folder}: {error.strerror}") from error
    if not paths:
        raise KvdiagError(f"{folder} holds no segment of a recorder (*.jsonl or *.jsonl.gz)")
    if len(paths) > MAX_SEGMENTS:
        raise KvdiagError(
            f"{folder} holds {len(paths)} segments, more than {MAX_SEGMENTS}: "
            "put the newest ones into a folder of their own"
        )
    return paths


def _together(folder: Path, segments: list[_Segment], gaps: list[Gap]) -> tuple[Timeline, Facts]:
    newest = segments[-1].facts
    urls = sorted({one.facts.url for one in segments if one.facts.url is not None})
    if len(urls) > 1:
        raise KvdiagError(
            f"{folder} holds segments of several servers ({', '.join(urls)[:160]}): diagnose each separately"
        )
    for before, after in pairwise(segments):
        if after.first_seconds < before.last_seconds - OVERLAP_SECONDS:
            raise KvdiagError(
                f"{before.name} and {after.name} in {folder} cover the same time, so they are of several servers: "
                "give the files instead of the folder, and each is diagnosed separately"
            )
    # The usage ratio of a pool of another size cannot be read by the newest pools.
    first = next(
        place for place in range(len(segments)) if all(one.facts.pools == newest.pools for one in segments[place:])
    )
    if first:
        gaps.append(_gap(f"the KV pool changed its size at {segments[first].name}: earlier samples are not diagnosed"))
    kept = segments[first:]
    timeline = Timeline(
        samples=tuple(merge(*(one.timeline.samples for one in kept), key=lambda sample: sample.at_seconds)),
        marks=tuple(merge(*(one.timeline.marks for one in kept), key=lambda mark: mark.at_seconds)),
    )
    pids = sorted({pid for one in kept for pid in one.facts.server_pids or ()})
    return timeline, replace(newest, server_pids=tuple(pids) or None, gaps=(*newest.gaps, *gaps))


def _gap(reason: str, kind: GapKind = "absent") -> Gap:
    return Gap("recorder", kind, reason)
