"""One frame of the live view: what a snapshot knows, within the columns and rows of a terminal.

What does not fit is left out from the bottom of its importance: the verdict and its reason always stay, then the worst
findings, then the memory. Names and texts come from outside: `plain` is how they get in.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from rich.text import Text

from kvdiag.formatting import format_duration, format_time, plural
from kvdiag.model import Diagnosis, Finding, LedgerLine, Snapshot, Status
from kvdiag.outputs.current_verdict import CurrentVerdict, as_of_now, current_verdict
from kvdiag.outputs.presentation import (
    ORDER,
    WORDS,
    engine_of,
    problems_of,
    problems_shown,
    time_span,
    unknown_by_reason,
    unknown_of,
)
from kvdiag.outputs.terminal.cells import plain, sides, wrapped
from kvdiag.outputs.terminal.sparkline_history import Trend
from kvdiag.outputs.terminal.text import STYLES
from kvdiag.outputs.terminal.top_memory import (
    ALL,
    FEW,
    MOST,
    NARROW_COLUMNS,
    WIDE_COLUMNS,
    Room,
    gpu_lines,
    gpus,
    pool_lines,
    trend_lines,
)
from kvdiag.pressure import pressures

AGED_SECONDS = 15.0
"""Age from which a diagnosis says how old it is: they come every 5 or 10 s unless the machine is busy."""

MIN_COLUMNS, MIN_ROWS = 20, 4
FEW_ROWS = 10
"""Up to here one row of sources is one too many."""

MIN_FINDING_ROWS = 3
KEYS = "q quits"

DETAILS = (4, 3, 2, 1, 0)
"""Forms of the findings, the longest first; see `_findings`."""

WITH_REMEDIES, WITH_ALL, WITH_SENTENCES = (4, 3), (4, 2), 1
MAX_ROWS = 8
"""Of one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is shown: a snapshot with its ledger, and where it comes from.

    `problem` is why nothing newer can be read; `note` is something else worth knowing about the origin.
    """

    snapshot: Snapshot
    lines: tuple[LedgerLine, ...]
    origin: str
    problem: str | None = None
    note: str | None = None
    trends: tuple[Trend, ...] = ()


def verdict(view: View) -> CurrentVerdict:
    """The status now, and why it differs from the diagnosis, or what has changed since.

    "Now" is the moment of the newest sample: the clock of a daemon elsewhere is not ours.
    """
    if view.problem is not None:
        return CurrentVerdict(status="unknown", sentence=view.problem, reason=view.problem, holds=False)
    return current_verdict(view.snapshot, view.snapshot.newest.at_seconds)


def _current(view: View) -> Diagnosis | None:
    """The diagnosis as far as it holds: what was healthy before says nothing about now."""
    diagnosis = as_of_now(view.snapshot)
    if diagnosis is None or (diagnosis is view.snapshot.diagnosis and verdict(view).status == diagnosis.worst):
        return diagnosis
    return replace(diagnosis, findings=tuple(one for one in diagnosis.findings if one.status in ("fault", "suspect")))


def frame(view: View, room: Room) -> Text:
    """The frame, each of its lines within the columns, and no more of them than there are rows."""
    if room.columns < MIN_COLUMNS or (room.rows is not None and room.rows < MIN_ROWS):
        now = verdict(view)
        shown = [Text(now.word, style=f"bold {STYLES[now.status]}")]
    else:
        shown = _lines(view, room)
    for line in shown:
        line.truncate(max(room.columns, 1), overflow="crop" if room.ascii_only else "ellipsis")
    kept = shown if room.rows is None else shown[: max(room.rows, 1)]
    whole = Text("\n", no_wrap=True, overflow="crop").join(kept)
    whole.no_wrap, whole.overflow = True, "crop"
    return whole


def _lines(view: View, room: Room) -> list[Text]:
    head = [_title(view, room), *_verdict_lines(view, room)]
    foot = _sources(view, room)
    if room.rows is not None and room.rows <= FEW_ROWS:
        foot = []
    if room.rows is None:
        found = _findings(_current(view), room.columns, detail=DETAILS[0])
        return _joined([head, *_memory(view, room, detail=ALL), found, foot], gaps=True)
    left = room.rows - len(head) - len(foot)
    wanted = min(MIN_FINDING_ROWS, len(_findings(_current(view), room.columns, detail=WITH_SENTENCES)))
    blocks: list[list[Text]] = []
    gaps = False
    for detail, spaced in ((ALL, True), (MOST, True), (MOST, False), (1, False), (FEW, False)):
        blocks, gaps = [block for block in _memory(view, room, detail=detail) if block], spaced
        if sum(map(len, blocks)) + wanted + (len(blocks) + 2 if gaps else 0) <= left:
            break
    memory = _joined(blocks, gaps=gaps)[: max(left - wanted, 0)]
    if gaps:
        memory = [Text(), *memory, Text()]
    forms = [_findings(_current(view), room.columns, detail=detail) for detail in DETAILS]
    found = _fitting(forms, left - len(memory) - (1 if gaps else 0))
    body = [*head, *memory, *found]
    return [*body, *(Text() for _ in range(room.rows - len(body) - len(foot))), *foot]


def _joined(blocks: Iterable[Sequence[Text]], *, gaps: bool) -> list[Text]:
    found: list[Text] = []
    for block in blocks:
        if found and block and gaps:
            found.append(Text())
        found += block
    return found


def _fitting(forms: Sequence[list[Text]], rows: int) -> list[Text]:
    """The first form that fits, else the last one, cut, with the number of missing lines."""
    for form in forms:
        if len(form) <= rows:
            return form
    shortest = forms[-1]
    if rows <= 0:
        return []
    more = len(shortest) - rows + 1
    return [*shortest[: rows - 1], Text(f" +{more} more: enlarge the window", style="dim")]


def _title(view: View, room: Room) -> Text:
    facts, newest = view.snapshot.facts, view.snapshot.newest
    title = Text("kvdiag top", style="bold")
    # A path begins with the same folders for every model.
    model = PurePath(facts.model).name if facts.model and facts.model.startswith("/") else facts.model
    for part in (facts.url, engine_of(facts), model):
        if part:
            title.append("  ").append(plain(part))
    shows_time = newest.at_seconds and room.columns >= NARROW_COLUMNS
    moment = format_time(newest.at_seconds) if shows_time else ""
    origin = plain(view.origin, "dim") if room.columns >= WIDE_COLUMNS else Text()
    return sides(title, Text("  ").join([one for one in (origin, Text(moment)) if one.plain]), room.columns)


def _verdict_lines(view: View, room: Room) -> list[Text]:
    now = verdict(view)
    status, why = now.status, now.reason
    head = Text(now.word, style=f"bold {STYLES[status]}")
    diagnosis = as_of_now(view.snapshot)
    if now.down or (diagnosis is not None and status == diagnosis.worst and diagnosis.worst_past_life):
        head.append("  ", style="not bold").append(plain(now.sentence))
    elif why and status == "unknown":
        head.append("  ", style="not bold").append(plain(why))
    elif diagnosis is not None:
        age_seconds = view.snapshot.newest.at_seconds - (view.snapshot.diagnosed_seconds or 0.0)
        age = f", diagnosed {format_duration(age_seconds)} ago" if age_seconds >= AGED_SECONDS else ""
        head.append(Text(f"  {_counted(diagnosis)}{age}")).append(plain(f"; {why}" if why else ""))
    most = 1 if room.rows is not None and room.rows <= FEW_ROWS else 3
    found = wrapped(head, room.columns, most)
    if view.note is not None:
        found += wrapped(plain(view.note, "yellow"), room.columns, 1)
    return found


def _counted(diagnosis: Diagnosis) -> str:
    """How many checks have each status, and for how long the server was observed."""
    statuses = [one.status for one in diagnosis.findings]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in ORDER if status in statuses)
    checks = f"{plural(len(statuses), 'check')}: {counts}" if statuses else "no checks"
    began_seconds = diagnosis.lives[-1].start_seconds if diagnosis.lives else diagnosis.start_seconds
    seconds = math.ceil(diagnosis.end_seconds - began_seconds)
    blind = diagnosis.ledger and all(line.gpu is None for line in diagnosis.ledger)
    return f"{checks}; judged over {format_duration(seconds)}" + ("; no device memory" if blind else "")


def _memory(view: View, room: Room, *, detail: int) -> list[list[Text]]:
    """GPUs, then pools with their requests, then how fast each is filling."""
    newest, facts = view.snapshot.newest, view.snapshot.facts
    listed = gpus(newest, view.lines, pressures(newest, facts, view.lines))
    trends = trend_lines(view.trends, listed, room, detail=detail)
    return [
        gpu_lines(newest, listed, room, detail=detail),
        pool_lines(newest, facts, room, detail=detail),
        [*trends, *_exhaustion(view.snapshot.diagnosis)],
    ]


def _sources(view: View, room: Room) -> list[Text]:
    """The state of each source, and how to quit; a source that is down with its reason, unless that is shown above."""
    newest, shown_above = view.snapshot.newest, verdict(view).reason
    reasons = {gap.source: gap.reason for gap in newest.gaps if gap.reason not in shown_above}
    if newest.devices is None:
        reasons.pop("nvml", None)
    shown = Text("sources", style="bold")
    down: list[Text] = []
    for one in view.snapshot.sources:
        state = ("up", "green") if one.up else ("DOWN", "red")
        shown.append("  ").append(plain(f"{one.source} ", "not bold")).append(state[0], style=state[1])
        if one.up and one.duration_seconds is not None and room.columns >= WIDE_COLUMNS:
            shown.append(f" {format_duration(one.duration_seconds)}", style="not bold dim")
        if one.errors_total:
            words = ("failed read",) if room.columns >= NARROW_COLUMNS else ("failed", "failed")
            shown.append(f" ({plural(one.errors_total, *words)})", style="not bold yellow")
        if not one.up and one.source in reasons:
            down += wrapped(plain(f"{one.source}: {reasons[one.source]}", "dim"), room.columns, 1)
    if not view.snapshot.sources:
        shown.append("  none read yet", style="not bold dim")
    if room.rows is None:
        return [shown, *down]
    return [*down, sides(shown, Text(KEYS, style="dim"), room.columns)]


def _findings(diagnosis: Diagnosis | None, columns: int, *, detail: int) -> list[Text]:
    """Findings, the worst first.

    0: one line for each problem. 1: whole sentences of the problems. 2: also what is unknown or was not found.
    3: problems with their remedies. 4: all of it.
    """
    if diagnosis is None:
        return []
    most = MAX_ROWS if detail >= WITH_SENTENCES else 1
    rows: list[Text] = []
    for one in problems_shown(diagnosis):
        when = time_span(one, diagnosis) if detail >= WITH_SENTENCES else ""
        rows += wrapped(_sentence(one).append(f" ({when})" if when else "", "dim"), columns, most, indent=2)
        fix = None if one.prescription is None else one.prescription.first
        if detail in WITH_REMEDIES and fix is not None:
            change = Text.assemble(("  fix: ", "bold"), plain(f"{fix.change}: {fix.gain}; cost: {fix.cost}"))
            rows += wrapped(change, columns, most, indent=4)
        elif detail in WITH_REMEDIES and one.remedy:
            rows += wrapped(Text.assemble(("  remedy: ", "bold"), plain(one.remedy)), columns, most, indent=4)
        issue = one.prescription.known_issue if one.prescription is not None and one.prescription.is_known else None
        if detail in WITH_REMEDIES and issue:
            rows += wrapped(Text.assemble(("  known issue: ", "bold"), plain(issue)), columns, most, indent=4)
    unknown = unknown_of(diagnosis.findings)
    if diagnosis.worst == "unknown" and unknown:
        rows += _unknown(unknown, columns, most)
    elif unknown and detail in WITH_ALL:
        rows += wrapped(_names("unknown", unknown, "unknown"), columns, most, indent=2)
    healthy = [one for one in diagnosis.findings if one.status == "ok"]
    if healthy and detail in WITH_ALL:
        rows += wrapped(_names("checked, not found", healthy, "ok"), columns, most, indent=2)
    return rows


def _unknown(unknown: Iterable[Finding], columns: int, most: int) -> list[Text]:
    """Why there is no verdict; verdicts with one reason stand together, in the order of the rules, leaks first."""
    rows: list[Text] = []
    for reason, ids in unknown_by_reason(unknown).items():
        named = plain(", ".join(ids), STYLES["unknown"])
        rows += wrapped(Text.assemble(named, ": ", plain(reason)), columns, most, indent=2)
    return rows


def _sentence(finding: Finding) -> Text:
    return Text.assemble(
        (f"{WORDS[finding.status]} ", f"bold {STYLES[finding.status]}"),
        plain(f"{finding.title}: ", "bold"),
        plain(finding.summary),
    )


def _names(what: str, named: Iterable[Finding], status: Status) -> Text:
    return Text.assemble((f"{what}: ", STYLES[status]), plain(", ".join(one.id for one in named), "dim"))


def _exhaustion(diagnosis: Diagnosis | None) -> list[Text]:
    """The time until memory is exhausted, by finding, from the whole history."""
    found = []
    for finding in problems_of(diagnosis.findings if diagnosis is not None else ()):
        growth = finding.growth
        if growth is not None and growth.exhaustion_seconds is not None:
            bounds = (growth.exhaustion_low_seconds, growth.exhaustion_high_seconds)
            between = " to ".join("never" if one is None else format_duration(one) for one in bounds)
            left = f"  full in {format_duration(growth.exhaustion_seconds)}"
            found.append(Text.assemble(plain(finding.title, "bold"), (left, "bold"), (f" ({between})", "dim")))
    return found
