"""One frame of the live view: what a snapshot knows, in so many columns and rows and not one more.

What does not fit is left out from the bottom of its importance: the verdict and its reason are always there, then the
worst findings, then where the memory is. Names and texts come from outside: `plain` is how they get in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise

from rich.text import Text

from kvdiag.kv.calibration.running_server import pool_bytes
from kvdiag.model import Diagnosis, Engine, Facts, LedgerLine, Snapshot, Status
from kvdiag.outputs.terminal.cells import Kind, duration, sides, wrapped
from kvdiag.outputs.terminal.sparkline_history import LEAST_SECONDS, Trend
from kvdiag.outputs.terminal.text import ORDER, STYLES, WORDS, plain, readable
from kvdiag.outputs.terminal.top_findings import DETAILS, WITH_SENTENCES, exhaustion, findings
from kvdiag.outputs.terminal.top_gpus import Gpu, bar, gpu_row, gpus, legend, parts, whole_gpu
from kvdiag.pressure import pressures

DIAGNOSIS_SHOWN_SECONDS = 600.0
"""Age up to which "ok" is said of now: a diagnosis that takes 3 s is made every 300 s, and may be given up once."""

AGED_SECONDS = 15.0
"""Age from which on it is told how old a diagnosis is: they come every 5 or 10 s unless the machine is busy."""

LEAST_COLUMNS, LEAST_ROWS = 20, 4
FEW_ROWS = 10
"""Up to here one row of sources is one too many."""

LEAST_FINDING_ROWS = 3
NARROW_COLUMNS, WIDE_COLUMNS = 60, 100
SPARK = "▁▂▃▄▅▆▇█"
ASCII_SPARK = "_.-~=+*#"
KEYS = "q quits"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is shown: a snapshot with its ledger, and where it comes from.

    `problem` is why there is nothing newer to be had; `note` is something else worth knowing of the origin.
    """

    snapshot: Snapshot
    lines: tuple[LedgerLine, ...]
    origin: str
    problem: str | None = None
    note: str | None = None
    trends: tuple[Trend, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Cells of the frame; `rows` is `None` where a page is printed, which may be as long as it is."""

    columns: int
    rows: int | None = None
    ascii_only: bool = False


def verdict(view: View) -> tuple[Status, str]:
    """The status that holds now, and why it is not the diagnosis's own where it is not."""
    snapshot, diagnosis = view.snapshot, view.snapshot.diagnosis
    if view.problem is not None:
        return "unknown", view.problem
    silent = next(
        (gap.reason for gap in reversed(snapshot.newest.gaps) if gap.source == "engine"), "no server has answered yet"
    )
    if snapshot.state == "starting":
        return "unknown", silent if silent.startswith("starting") else f"starting: {silent}"
    if diagnosis is None:
        return "unknown", "no diagnosis yet: the first one takes some seconds"
    if diagnosis.worst in ("fault", "suspect"):
        return diagnosis.worst, "" if snapshot.state == "serving" else f"; now the server does not answer: {silent}"
    if snapshot.state == "lost":
        return "unknown", f"the server does not answer: {silent}"
    age_seconds = snapshot.newest.at_seconds - (snapshot.diagnosed_seconds or 0.0)
    if age_seconds > DIAGNOSIS_SHOWN_SECONDS:
        return "unknown", f"the newest diagnosis is {duration(age_seconds)} old"
    return diagnosis.worst, ""


def _holding(view: View) -> Diagnosis | None:
    """The diagnosis as far as it holds: what was not found before says nothing of now."""
    diagnosis = view.snapshot.diagnosis
    if diagnosis is None or verdict(view)[0] == diagnosis.worst:
        return diagnosis
    return replace(diagnosis, findings=tuple(one for one in diagnosis.findings if one.status in ("fault", "suspect")))


def frame(view: View, room: Room) -> Text:
    """The frame, each of its lines within the columns, and no more of them than there are rows."""
    if room.columns < LEAST_COLUMNS or (room.rows is not None and room.rows < LEAST_ROWS):
        status, _ = verdict(view)
        shown = [Text(WORDS[status], style=f"bold {STYLES[status]}")]
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
        return _joined(
            [
                head,
                *_memory(view, room, detail=3),
                findings(_holding(view), room.columns, detail=DETAILS[0]),
                foot,
            ],
            gaps=True,
        )
    left = room.rows - len(head) - len(foot)
    wanted = min(LEAST_FINDING_ROWS, len(findings(_holding(view), room.columns, detail=WITH_SENTENCES)))
    blocks: list[list[Text]] = []
    gaps = False
    for detail, spaced in ((3, True), (2, True), (2, False), (1, False), (0, False)):
        blocks, gaps = [block for block in _memory(view, room, detail=detail) if block], spaced
        if sum(map(len, blocks)) + wanted + (len(blocks) + 2 if gaps else 0) <= left:
            break
    memory = _joined(blocks, gaps=gaps)[: max(left - wanted, 0)]
    if gaps:
        memory = [Text(), *memory, Text()]
    forms = [findings(_holding(view), room.columns, detail=detail) for detail in DETAILS]
    found = _fitting(forms, left - len(memory) - (1 if gaps else 0))
    middle = [*head, *memory, *found]
    return [*middle, *(Text() for _ in range(room.rows - len(middle) - len(foot))), *foot]


def _joined(blocks: Iterable[Sequence[Text]], *, gaps: bool) -> list[Text]:
    found: list[Text] = []
    for block in blocks:
        if found and block and gaps:
            found.append(Text())
        found += block
    return found


def _fitting(forms: Sequence[list[Text]], rows: int) -> list[Text]:
    """The first form that fits, else the last one cut, with how much is missing."""
    for form in forms:
        if len(form) <= rows:
            return form
    shortest = forms[-1]
    if rows <= 0:
        return []
    more = len(shortest) - rows + 1
    return [*shortest[: rows - 1], Text(f" +{more} more: make the window larger", style="dim")]


def _title(view: View, room: Room) -> Text:
    facts, newest = view.snapshot.facts, view.snapshot.newest
    engine = " ".join(part for part in (facts.engine_name, facts.engine_version) if part)
    told = Text("kvdiag top", style="bold")
    for part in (facts.url, engine, facts.model):
        if part:
            told.append("  ").append(plain(part))
    moment = _clock(newest.at_seconds) if newest.at_seconds and room.columns >= NARROW_COLUMNS else ""
    origin = plain(view.origin, "dim") if room.columns >= WIDE_COLUMNS else Text()
    return sides(told, Text("  ").join([one for one in (origin, Text(moment)) if one.plain]), room.columns)


def _clock(at_seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(at_seconds, UTC):%H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return ""


def _verdict_lines(view: View, room: Room) -> list[Text]:
    status, why = verdict(view)
    head = Text(WORDS[status], style=f"bold {STYLES[status]}")
    diagnosis = view.snapshot.diagnosis
    if why and status == "unknown":
        head.append("  ", style="not bold").append(plain(why))
    elif diagnosis is not None:
        age_seconds = view.snapshot.newest.at_seconds - (view.snapshot.diagnosed_seconds or 0.0)
        age = f", judged {duration(age_seconds)} ago" if age_seconds >= AGED_SECONDS else ""
        head.append(Text(f"  {_counted(diagnosis)}{age}")).append(plain(why))
    most = 1 if room.rows is not None and room.rows <= FEW_ROWS else 3
    found = wrapped(head, room.columns, most)
    if view.note is not None:
        found += wrapped(plain(view.note, "yellow"), room.columns, 1)
    return found


def _counted(diagnosis: Diagnosis) -> str:
    """How many of each status there are, and how old the readings go back."""
    statuses = [one.status for one in diagnosis.findings]
    counts = [(statuses.count(status), status) for status in ORDER]
    told = ", ".join(f"{count} {_NAMES[status]}" for count, status in counts if count)
    seconds = diagnosis.end_seconds - diagnosis.start_seconds
    blind = all(line.gpu is None for line in diagnosis.ledger) and diagnosis.ledger
    return f"{told or 'nothing judged'}; {duration(seconds)} of readings" + ("; no device memory" if blind else "")


_NAMES: dict[Status, str] = {"fault": "at fault", "suspect": "suspect", "unknown": "cannot be told", "ok": "ok"}


def _memory(view: View, room: Room, *, detail: int) -> list[list[Text]]:
    """Where the memory is: GPUs, then pools with their requests, then where it is going."""
    newest, facts = view.snapshot.newest, view.snapshot.facts
    seen = gpus(newest, view.lines, pressures(newest, facts, view.lines))
    return [
        _gpu_lines(view, seen, room, detail=detail),
        _pool_lines(newest.engines or (), facts, room, detail=detail),
        _trend_lines(view, seen, room, detail=detail),
    ]


def _gpu_lines(view: View, seen: Sequence[Gpu], room: Room, *, detail: int) -> list[Text]:
    if not seen:
        return _without_gpu(view, room)
    if detail == 3 and (len(seen) == 1 or room.rows is None or room.columns >= WIDE_COLUMNS):  # noqa: PLR2004
        return [line for gpu in seen for line in whole_gpu(gpu, room.columns, ascii_only=room.ascii_only)]
    label_width = max(len(gpu.label) for gpu in seen) + 4
    most = len(seen) if detail else 2
    fullest = sorted(seen, key=lambda gpu: -(gpu.device.memory.occupied_ratio if gpu.device.memory else 2.0))[:most]
    rows = [
        Text.assemble(("GPU ", "bold"), gpu_row(gpu, label_width - 4, room.columns - 4, ascii_only=room.ascii_only))
        for gpu in seen
        if gpu in fullest
    ]
    if len(seen) > len(rows):
        rows[-1:] = [*rows[-1:], Text(f"and {len(seen) - len(rows)} GPUs that are less full", style="dim")]
    if detail >= 2:  # noqa: PLR2004
        rows += legend(_kinds(seen), room.columns, sizes=len(seen) == 1, ascii_only=room.ascii_only)
    return rows


def _kinds(seen: Sequence[Gpu]) -> list[tuple[Kind, int]]:
    """The kinds of all GPUs, each with its size there."""
    whole = [line for gpu in seen for line in gpu.lines]
    free = [gpu.device.memory.free_bytes for gpu in seen if gpu.device.memory is not None]
    return parts(whole, sum(free) if free else None)


def _without_gpu(view: View, room: Room) -> list[Text]:
    if not view.snapshot.newest.at_seconds:
        return []
    reason = next((gap.reason for gap in view.snapshot.newest.gaps if gap.source == "nvml"), "it has not been read yet")
    return wrapped(Text.assemble(("no GPU is seen: ", "magenta"), plain(reason)), room.columns, 2)


def _pool_lines(engines: Sequence[Engine], facts: Facts, room: Room, *, detail: int) -> list[Text]:
    """A bar and the requests of each engine; in little room the fullest alone."""
    most = len(engines) if detail >= 2 else 1  # noqa: PLR2004
    fullest = sorted(engines, key=lambda one: -(one.kv_usage_ratio or 0.0))[:most]
    found = [line for one in engines if one in fullest for line in _pool(one, facts, room, several=len(engines) > 1)]
    if len(engines) > most:
        found.append(Text(f"and {len(engines) - most} engines whose pools are less full", style="dim"))
    return found


def _pool(engine: Engine, facts: Facts, room: Room, *, several: bool) -> list[Text]:
    name = plain(f"KV pool {engine.engine[:8]}" if several else "KV pool", "bold")
    usage, pool = engine.kv_usage_ratio, facts.pool(engine.engine)
    told = Text("usage not told", style="magenta")
    filled = Text()
    if usage is not None:
        told = Text(f"{usage:.1%} used", style="bold")
        if pool is not None:
            size = pool_bytes(facts, pool)
            whole = "" if size is None else f" of {readable(size[0])}"
            tokens = (
                ""
                if pool.capacity_tokens is None or room.columns < NARROW_COLUMNS
                else f", {pool.capacity_tokens:,} tokens"
            )
            told.append(Text(f"{whole}{tokens}"))
        cells = max(min(room.columns // 3, room.columns - name.cell_len - told.cell_len - 4), 0)
        used = 0 if not usage else max(round(usage * cells), 1)
        filled = bar(
            parts([_share("kv_held", used), _share("kv_free", cells - used)], None), cells, ascii_only=room.ascii_only
        )
    requests = Text("requests  ", style="bold")
    for count, what, style in (
        (engine.requests_running, "running", "not bold"),
        (engine.requests_waiting, "waiting", "yellow" if engine.requests_waiting else "not bold"),
        (engine.requests_waiting_for_capacity or None, "of them for room", "red"),
    ):
        if count is not None:
            requests.append(f"{count:,} {what}  ", style=style)
    if engine.requests_running is None and engine.requests_waiting is None:
        requests.append("not told", style="not bold magenta")
    elif pool is not None and pool.max_concurrency and room.columns >= NARROW_COLUMNS:
        requests.append(f"room for {pool.max_concurrency:.1f} of the longest", style="not bold dim")
    return [Text.assemble(name, "  ", filled, "  " if filled.plain else "", told), requests]


def _share(component: str, cells: int) -> LedgerLine:
    return LedgerLine(gpu=None, component=component, bytes=cells, source="computed")


def _trend_lines(view: View, seen: Sequence[Gpu], room: Room, *, detail: int) -> list[Text]:
    """How pools and devices went while they were watched, and how long the room lasts where they clearly fill."""
    names = {gpu.device.uuid: f"GPU {gpu.label}" for gpu in seen}
    totals = {gpu.device.uuid: gpu.device.memory.total_bytes for gpu in seen if gpu.device.memory is not None}
    several = sum(trend.is_pool for trend in view.trends) > 1
    rows: list[Text] = []
    order = sorted(
        view.trends, key=lambda one: one.full_in_seconds if one.full_in_seconds is not None else float("inf")
    )
    kept = order if detail == 3 else [*_first(order, is_pool=True), *_first(order, is_pool=False)]  # noqa: PLR2004
    for trend in (one for one in kept if one.watched_seconds and (one.is_pool or one.of in names)):
        name = (f"KV pool {trend.of[:8]}" if several else "KV pool") if trend.is_pool else names[trend.of]
        row = Text.assemble(plain(name.ljust(8), "bold"), " ", _spark(trend, room), " ")
        rows.append(row.append(_rate(trend, totals.get(trend.of))))
    if detail == 0:
        rows = [row for row in rows if "full in" in row.plain]
    return [*rows, *exhaustion(view.snapshot.diagnosis)]


def _first(trends: Iterable[Trend], *, is_pool: bool) -> list[Trend]:
    return [one for one in trends if one.is_pool == is_pool][:1]


def _spark(trend: Trend, room: Room) -> Text:
    """The recent shares as a line of bars, of the whole for a pool, between its own bounds for a device."""
    marks = ASCII_SPARK if room.ascii_only else SPARK
    cells = 24 if room.columns >= WIDE_COLUMNS else 16
    count = min(len(trend.recent), cells)
    if count == 0:
        return Text()
    edges = [round(place * len(trend.recent) / count) for place in range(count + 1)]
    values = [max(trend.recent[start:end]) for start, end in pairwise(edges)]
    low, high = (0.0, 1.0) if trend.is_pool else (min(values), max(values))
    heights = [0.0 if high <= low else (value - low) / (high - low) for value in values]
    line = "".join(marks[min(int(height * len(marks)), len(marks) - 1)] for height in heights)
    return Text(line.rjust(cells), style="cyan")


def _rate(trend: Trend, total_bytes: int | None) -> Text:
    """What of the whole was gained or lost; the rate and how long the room lasts where that goes on clearly."""

    def told(ratio: float) -> str:
        return f"{ratio:+.1%}" if total_bytes is None else _signed(ratio * total_bytes)

    change = trend.recent[-1] - trend.recent[0]
    watched = f" in {duration(trend.watched_seconds)}"
    gained = Text.assemble(told(change) if change else "unchanged", (watched, "dim"))
    if trend.watched_seconds < LEAST_SECONDS:
        return gained
    if trend.per_minute_ratio is None:
        return gained.append(", not steadily" if change else "", style="dim")
    gained.append(f", {told(trend.per_minute_ratio)}/min", style="yellow")
    if trend.full_in_seconds is not None:
        gained.append(f", full in {duration(trend.full_in_seconds)} so", style="bold")
    return gained


def _signed(size: float) -> str:
    return f"{'+' if size >= 0 else ''}{readable(size)}"


def _sources(view: View, room: Room) -> list[Text]:
    """How each source does, and how to leave; a source that is down with its reason, where that is not told above."""
    newest, (_, told_above) = view.snapshot.newest, verdict(view)
    reasons = {gap.source: gap.reason for gap in newest.gaps if gap.reason not in told_above}
    if newest.devices is None:
        reasons.pop("nvml", None)
    told = Text("sources", style="bold")
    down: list[Text] = []
    for one in view.snapshot.sources:
        state = ("up", "green") if one.up else ("DOWN", "red")
        told.append("  ").append(plain(f"{one.source} ", "not bold")).append(state[0], style=state[1])
        if one.up and one.duration_seconds is not None and room.columns >= WIDE_COLUMNS:
            told.append(f" {one.duration_seconds * 1000:.1f} ms", style="not bold dim")
        if one.errors_total:
            told.append(f" {one.errors_total} errors", style="not bold yellow")
        if not one.up and one.source in reasons:
            down += wrapped(plain(f"{one.source}: {reasons[one.source]}", "dim"), room.columns, 1)
    if not view.snapshot.sources:
        told.append("  none has been read yet", style="not bold dim")
    if room.rows is None:
        return [told, *down]
    return [*down, sides(told, Text(KEYS, style="dim"), room.columns)]
