"""What befalls the daemon itself: it is killed, a segment of its folder is damaged, the wall clock is set.

Each happens at any moment while sources are broken, and returns what was not as promised. What the daemon recorded is
readable after each, but for what was damaged, which is named.
"""

import gzip
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.folder_timeline import read_segments
from kvdiag.feeds.recording.segment_store import files
from kvdiag.feeds.recording.trace import read_trace
from kvdiag.model.facts import Facts
from kvdiag.model.timeline import Timeline
from tests.quality.faults.cells import SHOWN, Cell, comes, errors, is_well, ticks
from tests.quality.faults.daemon_stage import Stage

MIN_JUMP_SECONDS, MAX_JUMP_SECONDS = 120, 6 * 3600
NEGATIVE_AGE = re.compile(r"(?<!\w)-[\d.,]+ (?:ms|s|min|h|d)\b")
Ended = tuple[float, str, str, tuple[tuple[str, str], ...]]
SLACK_SECONDS = 2.0
"""Between a look at the daemon and one at the clock."""


def all_well(stage: Stage) -> bool:
    """Whether every source becomes well."""
    return comes(lambda: all(is_well(stage, source) for source in SHOWN))


def kill(
    stage: Stage, cells: Sequence[Cell], drawn: random.Random, counted: Counter[str], *, damages: bool, seconds: int
) -> str:
    """Kill the daemon, damage a segment and set the clock before the next one, which finds everything else again."""
    problems: list[str] = []
    listed: list[Ended] = []

    def happens() -> None:
        # What the daemon could not record its successor cannot list.
        if not stage.lost_records:
            listed.extend(_ended(stage))
        stage.kill_daemon()
        counted["kills"] += 1
        if damages and (closed := [path for path in files(stage.records) if _is_closed(path)]):
            problems.append(_damage(drawn.choice(closed), drawn))
            stage.has_damage = True
            counted["damaged segments"] += 1
        if seconds:
            stage.clock.jump(seconds)
            counted["jumps while it was down"] += 1
        stage.start_daemon()

    problems += [_amid(stage, cells, drawn, happens)]
    if not comes(lambda: not _unreadable(stage)):
        problems.append(_unreadable(stage))
    # A life may be in what is damaged or was taken away, and one of yesterday is forgotten.
    if not (damages or stage.lost_records or seconds > 0) and not comes(lambda: _lists(stage, listed)):
        problems.append(f"listed lives {listed} before, {_ended(stage)} after")
    return next(filter(None, problems), "")


def jump(stage: Stage, cells: Sequence[Cell], drawn: random.Random, counted: Counter[str], seconds: int) -> str:
    """Set the wall clock, and check that every source continues, with timestamps of the new time."""
    noticed, lost, length_seconds = errors(stage, "clock"), errors(stage, "recorder"), _length_seconds(stage)
    begun_seconds = time.monotonic()
    problem = _amid(stage, cells, drawn, lambda: stage.clock.jump(seconds))
    counted["jumps of the clock"] += 1
    if problem:
        return problem
    if not comes(lambda: errors(stage, "clock") > noticed):
        return "is not noticed"
    before = ticks(stage)
    if not comes(lambda: all(count > before[source] + 2 for source, count in ticks(stage).items())):
        return f"holds up: {before} then {ticks(stage)}"
    if not comes(lambda: not _misdated(stage)):
        return f"is misdated: {_misdated(stage)}"
    if not comes(lambda: _length_seconds(stage) <= length_seconds + time.monotonic() - begun_seconds + SLACK_SECONDS):
        return f"made {length_seconds} s of history {_length_seconds(stage)} s"
    if errors(stage, "recorder") > lost:
        return "loses what is to be recorded"
    # Of a history with damage nothing is ok for a day.
    allowed = {("ok",), ("unknown",)} if stage.has_damage else {("ok",)}
    if not comes(lambda: any(stage.serving.series("kvdiag_diagnosis_status").get(one) == 1.0 for one in allowed)):
        return f"does not come to a verdict: {stage.serving.series('kvdiag_diagnosis_status')}"
    return "" if comes(lambda: not _unreadable(stage)) else _unreadable(stage)


def drawn_jump(drawn: random.Random) -> int:
    """Minutes to hours, forward or back."""
    return drawn.choice((-1, 1)) * drawn.randint(MIN_JUMP_SECONDS, MAX_JUMP_SECONDS)


def _damage(path: Path, drawn: random.Random) -> str:
    """Flip a bit of a closed segment, or cut it; all others are read, and it is named unless it reads as before.

    Deflate pads each flushed line to whole bytes: half a percent of all bits carry nothing, nor does a lost trailer
    take anything from lines whose end is there.
    """
    data = bytearray(path.read_bytes())
    # A gzip file's first ten bytes hold what is of no account, such as a time.
    place = drawn.randrange(10, len(data))
    try:
        before = read_trace(path)
        kept = len(read_segments(path.parent)[0].samples) - len(before[0].samples)
        if drawn.random() < 0.5:
            data[place] ^= 1 << drawn.randrange(8)
        else:
            del data[place:]
        path.write_bytes(data)
        timeline, facts = read_segments(path.parent)
    except KvdiagError as error:
        return f"nothing is read beside the damaged {path.name}: {error}"
    if len(timeline.samples) < kept:
        return f"of {kept} samples beside the damaged {path.name} {len(timeline.samples)} are read"
    named = any(gap.source == "recorder" and gap.reason.startswith(f"{path.name} ") for gap in facts.gaps)
    return "" if named or _reads_as(path, before) else f"the damaged {path.name} is not named: {facts.gaps}"


def _reads_as(path: Path, before: tuple[Timeline, Facts]) -> bool:
    """Whether a segment still reads as before."""
    try:
        return read_trace(path) == before
    except KvdiagError:
        return False


def _amid(stage: Stage, cells: Sequence[Cell], drawn: random.Random, happens: Callable[[], None]) -> str:
    """Break sources, have something happen at any moment of that, and mend them."""
    cells = [cell for cell in cells if cell.source != "recorder"]
    for cell in cells:
        stage.set(cell.source, cell.condition)
    time.sleep(drawn.uniform(0.0, 1.0))
    happens()
    for cell in cells:
        stage.set(cell.source, "well")
    return "" if all_well(stage) else f"amid {[(cell.source, cell.condition) for cell in cells]}: not all is well"


def _ended(stage: Stage) -> list[Ended]:
    """Length, cause, verdict and findings of each life that is over."""
    found = stage.serving.get("/api/v1/diagnosis") or {"lives": []}
    return [
        (
            round(one["end_seconds"] - one["start_seconds"], 2),
            one["end"],
            one["worst"],
            tuple((each["id"], each["status"]) for each in one["findings"]),
        )
        for one in found["lives"]
        if one["end_seconds"] is not None
    ]


def _lists(stage: Stage, before: list[Ended]) -> bool:
    """Whether all lives are listed that were, in order, but the oldest: it may be a day old, or one too many now."""
    found, newest = _ended(stage), before[1:]
    return newest in (found[place : place + len(newest)] for place in range(len(found) + 1))


def _unreadable(stage: Stage) -> str:
    """Why the recorded segments cannot be read, or how they are misdated."""
    try:
        samples = read_segments(stage.records)[0].samples
    except KvdiagError as error:
        return str(error)
    if not samples:
        return "nothing is recorded"
    ahead_seconds = samples[-1].at_seconds - stage.clock.now_seconds()
    return f"recorded {ahead_seconds} s in the future" if ahead_seconds > SLACK_SECONDS else ""


def _is_closed(path: Path) -> bool:
    """Whether its recorder ended a segment: a kill leaves it cut off, where no checksum covers its last bytes."""
    try:
        gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error):
        return False
    return True


def _length_seconds(stage: Stage) -> float:
    """The length of the history that the newest diagnosis is of: for a moment after a server's start there is none."""
    found: list[Any] = []

    def arrives() -> bool:
        found.append(stage.serving.get("/api/v1/diagnosis"))
        return found[-1] is not None

    comes(arrives)
    return float(found[-1]["window"]["end"] - found[-1]["window"]["start"])


def _misdated(stage: Stage) -> list[tuple[str, float]]:
    """Times in the future, negative ages, and a newest sample that is old."""
    snapshot, history = (stage.serving.get(f"/api/v1/{name}") for name in ("snapshot", "history"))
    metrics = text_string_to_metric_families(stage.serving.client.get("/metrics")[1])
    now_seconds = stage.clock.now_seconds()
    shown = [*_seconds(snapshot), *_seconds(history)]
    shown += [(sample.name, sample.value) for each in metrics for sample in each.samples if "_seconds" in sample.name]
    wrong = [(name, value) for name, value in shown if not 0.0 <= value <= now_seconds + SLACK_SECONDS]
    wrong += [(age, -1.0) for age in NEGATIVE_AGE.findall(stage.serving.client.get("/")[1])]
    newest_seconds = snapshot["snapshot"]["newest"]["at_seconds"]
    return wrong if newest_seconds > now_seconds - SLACK_SECONDS else [*wrong, ("newest", newest_seconds)]


def _seconds(document: Any) -> Iterator[tuple[str, float]]:
    """Every time and duration of a document."""
    if isinstance(document, list):
        for one in document:
            yield from _seconds(one)
    elif isinstance(document, dict):
        for name, value in document.items():
            if name.endswith("_seconds") and isinstance(value, int | float):
                yield name, value
            yield from _seconds(value)
