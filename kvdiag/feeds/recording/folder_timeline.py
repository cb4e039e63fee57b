"""A recorder's folder → one Timeline: segments of a trace, rotated by size or time, put together by their time.

Each segment is a trace of its own (`kvdiag.feeds.recording.trace`). A recorder that was killed leaves a segment
without its end, whose last line may be torn: what stood before it counts. One that is damaged is left out, and so are
the oldest if there are more than can be read; what is left out is reported as a gap.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from heapq import merge
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.budget import THINNED, Budget, TooLongError
from kvdiag.feeds.recording.segment_store import NAME
from kvdiag.feeds.recording.trace import CUT_OFF, read_header, read_trace
from kvdiag.formatting import format_duration
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
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long, a folder above that may not be searched
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    return read_segments(path) if is_folder else read_trace(path)


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
    late_seconds = behind(paths)
    budget = Budget() if budget is None else budget
    ahead_seconds = 0.0
    for older, path in reversed([*enumerate(paths)]):
        try:
            if read_header(path) is None:
                gaps.append(_gap(f"{path.name} is empty: its recorder was killed as it started"))
                continue
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
        timeline = moved(timeline, late_seconds[path] - ahead_seconds)
        if CUT_OFF in facts.gaps:
            gaps.append(_gap(f"{path.name} is incomplete: its recorder was killed, or is still writing"))
        if THINNED in facts.gaps:
            gaps.append(_gap(f"{path.name}: {THINNED.reason}"))
        if not (times := _ends(timeline)):
            continue
        if (overlap_seconds := _overlap_seconds(path.name, max(times), segments[-1:])) > OVERLAP_SECONDS:
            ahead_seconds += overlap_seconds
            timeline = moved(timeline, -overlap_seconds)
            times = _ends(timeline)
            why = f"the clock was set back by at least {format_duration(overlap_seconds)}, which no header records"
            gaps.append(_gap(f"{path.name} and all before it are dated earlier: {why}"))
        own = replace(facts, gaps=tuple(gap for gap in facts.gaps if gap not in (CUT_OFF, THINNED)))
        segments.append(_Segment(path.name, timeline, own, min(times), max(times)))
    gaps.reverse()
    if removed := sum(not path.exists() for path in listed):
        gaps.append(
            _gap(f"{removed} of {len(listed)} segments were removed while they were read: the recorder needed space")
        )
    if not segments and problems:
        raise problems[0]
    if not segments:
        raise KvdiagError(f"the segments in {folder} hold no sample: did the recorder read anything?")
    return _together(folder, sorted(segments, key=lambda one: (one.first_seconds, one.name)), gaps)


def _ends(timeline: Timeline) -> list[float]:
    """The times of the first and last sample and mark."""
    parts = (timeline.samples[:1], timeline.samples[-1:], timeline.marks[:1], timeline.marks[-1:])
    return [entry.at_seconds for part in parts for entry in part]


def _overlap_seconds(name: str, last_seconds: float, after: list[_Segment]) -> float:
    """By how much a recorder's segment ends after its next one began; other names are in no order.

    The clock was set back while no recorder ran, or the header that records it is damaged.
    """
    known = after and NAME.fullmatch(name) and NAME.fullmatch(after[0].name)
    return last_seconds - after[0].first_seconds if known else 0.0


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
            header = read_header(path)
            seconds += 0.0 if header is None else header.clock_set_seconds
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
        earlier_facts=tuple((until + seconds, facts) for until, facts in timeline.earlier_facts),
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
    # By the newest pools the usage of others cannot be read.
    runs = [list(run) for _, run in groupby(segments, key=lambda one: one.facts.pools)]
    timeline = Timeline(
        samples=tuple(merge(*(one.timeline.samples for one in segments), key=lambda sample: sample.at_seconds)),
        marks=tuple(merge(*(one.timeline.marks for one in segments), key=lambda mark: mark.at_seconds)),
        earlier_facts=tuple(
            (after[0].first_seconds, _facts_of(run)) for run, after in pairwise(runs) if run[0].facts.pools
        ),
    )
    return timeline, replace(_facts_of(runs[-1]), gaps=(*newest.gaps, *gaps))


def _facts_of(run: list[_Segment]) -> Facts:
    """The newest facts of some segments, with the processes of all of them."""
    pids = sorted({pid for one in run for pid in one.facts.server_pids or ()})
    return replace(run[-1].facts, server_pids=tuple(pids) or None)


def _gap(reason: str, kind: GapKind = "absent") -> Gap:
    return Gap("recorder", kind, reason)
