"""The memory of a live view: where each GPU's memory is, how full the KV pools are, and how fast each is filling.

A bar has one character for each kind of memory, so that a terminal without colour shows as much. How much is drawn
depends on `detail`: 3 is everything, 0 a line for the two fullest GPUs and the fullest pool.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.text import Text

from kvdiag.formatting import format_bytes, format_count, format_duration, format_number, format_ratio, plural, signed
from kvdiag.kv.calibration.running_server import pool_bytes
from kvdiag.model import BlockOwners, Device, Engine, Facts, LedgerLine, Sample, without_mig_parents
from kvdiag.outputs.presentation import NOT_REPORTED, spaced
from kvdiag.outputs.terminal.cells import MEMORY, Kind, marked, plain, sides, wrapped
from kvdiag.outputs.terminal.sparkline_history import LIMITS, Trend
from kvdiag.pressure import UNKNOWN

NARROW_COLUMNS, WIDE_COLUMNS = 60, 100
NAME_CHARACTERS = 48
SLICE_CHARACTERS = 8
SPARK = "▁▂▃▄▅▆▇█"
ASCII_SPARK = "_.-~=+*#"
UNREADABLE = "memory cannot be read"

ALL, MOST, FEW = 3, 2, 0
"""Of the details: whole GPUs with legends; a row for each with one legend; only what is fullest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Cells of the frame; `rows` is `None` where a page is printed, which may be of any length."""

    columns: int
    rows: int | None = None
    ascii_only: bool = False


FREE = Kind("free", "·", ".", style="dim")

KINDS: Mapping[str, Kind] = {component: Kind(*parts) for component, parts in MEMORY["ledger"].items()}
"""By the ledger's component, in the order of the bar."""

ELSE = Kind("other", "*", "*", style="white")
"""A component that only a newer daemon knows."""


def parts(lines: Sequence[LedgerLine], free_bytes: int | None) -> list[tuple[Kind, int]]:
    """Kinds with their bytes in the order of the bar; a negative residual stays in."""
    sizes: dict[str, tuple[Kind, int]] = {}
    order = list(KINDS)
    known = sorted(lines, key=lambda line: order.index(line.component) if line.component in KINDS else len(order))
    has_pool = any("kv_" in line.component for line in lines)
    for line in known:
        is_whole = line.component == "server_other" and not has_pool
        kind = KINDS.get("server_with_kv_pool" if is_whole else line.component, ELSE)
        sizes[kind.title] = (kind, sizes.get(kind.title, (kind, 0))[1] + line.bytes)
    if free_bytes is not None:
        sizes[FREE.title] = (FREE, free_bytes)
    return [one for one in sizes.values() if one[1]]


def bar(sizes: Sequence[tuple[Kind, int]], width: int, *, ascii_only: bool) -> Text:
    """The parts side by side over `width` cells, by largest remainder; no part that exists has less than one cell."""
    positive = [(kind, size) for kind, size in sizes if size > 0]
    found = Text()
    for (kind, _), cells in zip(positive, _cells([size for _, size in positive], width), strict=True):
        found.append(marked(kind, ascii_only=ascii_only) * cells, style=kind.style)
    return found


def _cells(sizes: Sequence[int], width: int) -> list[int]:
    whole = sum(sizes)
    if not whole or width <= 0:
        return [0] * len(sizes)
    exact = [size * width / whole for size in sizes]
    cells = [int(each) for each in exact]
    by_rest = sorted(range(len(sizes)), key=lambda place: cells[place] - exact[place])
    for place in by_rest[: width - sum(cells)]:
        cells[place] += 1
    # A small part stays visible: the largest gives it a cell.
    for place, given in enumerate(cells):
        largest = max(range(len(cells)), key=cells.__getitem__)
        if given == 0 and cells[largest] > 1:
            cells[place], cells[largest] = 1, cells[largest] - 1
    return cells


def legend(kinds: Sequence[tuple[Kind, int]], room: Room, *, sizes: bool) -> list[Text]:
    """What the characters mean, with sizes if they are of one GPU, over as many lines as it takes."""
    rows: list[Text] = []
    for kind, size in kinds:
        item = Text.assemble((marked(kind, ascii_only=room.ascii_only), kind.style), f" {kind.title}")
        if sizes:
            item.append(f" {format_bytes(size)}", style="bold")
        if not rows or rows[-1].cell_len + 2 + item.cell_len > room.columns:
            rows.append(item)
        else:
            rows[-1].append("  ").append(item)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device of the view, and its lines. `label` is its index; slices of one GPU are numbered after a point."""

    label: str
    device: Device
    lines: tuple[LedgerLine, ...]
    pressure_ratio: float | None
    pressure_unknown: bool

    @property
    def parts(self) -> list[tuple[Kind, int]]:
        """Kinds with their bytes, free memory among them."""
        return parts(self.lines, None if self.device.memory is None else self.device.memory.free_bytes)


def gpus(newest: Sample, lines: Sequence[LedgerLine], pressures: Mapping[str | None, float | None]) -> list[Gpu]:
    """The devices whose bytes may be added up, by index."""
    known = {line.uuid for line in lines}
    engines = newest.engines or ()
    # With several engines it is unknown which of them is on which GPU.
    usage_ratio = engines[0].kv_usage_ratio if len(engines) == 1 else None
    # A GPU that is cut into slices has no lines and is left out; an unreadable one has none either, and is shown.
    listed = [one for one in without_mig_parents(newest.devices or ()) if one.memory is None or one.uuid in known]
    listed.sort(key=lambda one: one.index)
    indices = [one.index for one in listed]
    found: list[Gpu] = []
    for place, device in enumerate(listed):
        several = indices.count(device.index) > 1
        number = indices[: place + 1].count(device.index)
        found.append(
            Gpu(
                label=f"{device.index}.{number}" if several else str(device.index),
                device=device,
                lines=tuple(part for line in lines if line.uuid == device.uuid for part in _apart(line, usage_ratio)),
                pressure_ratio=pressures.get(device.uuid),
                pressure_unknown=device.uuid in pressures and pressures[device.uuid] is None,
            )
        )
    return found


def _apart(line: LedgerLine, usage_ratio: float | None) -> tuple[LedgerLine, ...]:
    """A pool's line divided into used and free blocks, if the usage is known."""
    if line.component != "kv_pool" or usage_ratio is None:
        return (line,)
    held = round(line.bytes * usage_ratio)
    return replace(line, component="kv_held", bytes=held), replace(line, component="kv_free", bytes=line.bytes - held)


def whole_gpu(gpu: Gpu, room: Room) -> list[Text]:
    """A GPU with its name, its bar over the whole width, and the size of every part."""
    name = plain(gpu.device.name[:NAME_CHARACTERS])
    title = Text.assemble((f"GPU {gpu.label}", "bold"), "  ", name)
    if "." in gpu.label:
        title.append("  ").append(plain(gpu.device.uuid[:SLICE_CHARACTERS], "dim"))
    if gpu.device.memory is None:
        return [title.append(f"  {UNREADABLE}", style="magenta")]
    memory = gpu.device.memory
    share = format_ratio(memory.occupied_ratio)
    used = Text(f"{format_bytes(memory.used_bytes)} of {format_bytes(memory.total_bytes)} used, {share}")
    if gpu.pressure_ratio is not None:
        used.append(f", pressure {format_ratio(gpu.pressure_ratio)}", "bold")
    return [
        sides(title, used, room.columns),
        bar(gpu.parts, room.columns, ascii_only=room.ascii_only),
        *legend(gpu.parts, room, sizes=True),
        *(wrapped(Text(f"pressure {UNKNOWN}", "magenta"), room.columns, 3) if gpu.pressure_unknown else ()),
    ]


def gpu_row(gpu: Gpu, label_width: int, room: Room) -> Text:
    """A GPU in one line."""
    label = Text(f"GPU {gpu.label.ljust(label_width)} ", style="bold")
    memory = gpu.device.memory
    if memory is None:
        return label.append(UNREADABLE, style="not bold magenta")
    total = f" of {format_bytes(memory.total_bytes)}" if room.columns - len("GPU ") >= NARROW_COLUMNS else ""
    used = f" {format_bytes(memory.used_bytes).rjust(9)}{total} {format_ratio(memory.occupied_ratio).rjust(5)}"
    cells = max(room.columns - label.cell_len - len(used), 0)
    return Text.assemble(label, bar(gpu.parts, cells, ascii_only=room.ascii_only), used)


def gpu_lines(newest: Sample, listed: Sequence[Gpu], room: Room, *, detail: int) -> list[Text]:
    """The GPUs, each with its bar."""
    if not listed:
        return _without_gpu(newest, room)
    if detail == ALL and (len(listed) == 1 or room.rows is None or room.columns >= WIDE_COLUMNS):
        return [line for gpu in listed for line in whole_gpu(gpu, room)]
    label_width = max(len(gpu.label) for gpu in listed)
    most = len(listed) if detail else 2
    fullest = sorted(listed, key=lambda gpu: -(gpu.device.memory.occupied_ratio if gpu.device.memory else 2.0))[:most]
    rows = [gpu_row(gpu, label_width, room) for gpu in listed if gpu in fullest]
    if len(listed) > len(rows):
        rows.append(Text(f"and {plural(len(listed) - len(rows), 'more GPU')}", style="dim"))
    if detail >= MOST:
        free = [gpu.device.memory.free_bytes for gpu in listed if gpu.device.memory is not None]
        kinds = parts([line for gpu in listed for line in gpu.lines], sum(free) if free else None)
        rows += legend(kinds, room, sizes=len(listed) == 1)
    return rows


def _without_gpu(newest: Sample, room: Room) -> list[Text]:
    if not newest.at_seconds:
        return []
    reason = next((gap.reason for gap in newest.gaps if gap.source == "nvml"), "not read yet")
    return wrapped(Text.assemble(("no GPU observed: ", "magenta"), plain(reason)), room.columns, 2)


def pool_lines(newest: Sample, facts: Facts, room: Room, *, detail: int) -> list[Text]:
    """The KV pool, its owners and the requests of each engine; in little room only the fullest, without owners."""
    engines = newest.engines or ()
    most = len(engines) if detail >= MOST else 1
    fullest = sorted(engines, key=lambda one: -(one.kv_usage_ratio or 0.0))[:most]
    owners = {one.engine: one for one in newest.block_owners or () if detail >= MOST}
    found: list[Text] = []
    for one in engines:
        if one in fullest:
            found += _pool(one, facts, room, several=len(engines) > 1)
            found += _owners(owners[one.engine]) if one.engine in owners else ()
    if len(engines) > most:
        found.append(Text(f"and {plural(len(engines) - most, 'more KV pool')}", style="dim"))
    return found


def _pool(engine: Engine, facts: Facts, room: Room, *, several: bool) -> list[Text]:
    name = plain(f"KV pool {engine.engine[:8]}" if several else "KV pool", "bold")
    usage, pool = engine.kv_usage_ratio, facts.pool(engine.engine)
    shown = Text(f"usage {NOT_REPORTED}", style="magenta")
    filled = Text()
    if usage is not None:
        size = None if pool is None else pool_bytes(facts, pool)
        shown = Text.assemble((format_ratio(usage), "bold"), "" if size is None else f" of {format_bytes(size[0])}")
        if pool is not None and room.columns >= NARROW_COLUMNS:
            shown.append(f" ({plural(pool.usable_blocks, facts.capabilities.unit)})")
        shown.append(" used")
        cells = max(min(room.columns // 3, room.columns - name.cell_len - shown.cell_len - 4), 0)
        used = 0 if not usage else max(round(usage * cells), 1)
        shares = ((KINDS["kv_held"], used), (KINDS["kv_free"], cells - used))
        filled = bar(shares, cells, ascii_only=room.ascii_only)
    requests = Text("requests  ", style="bold")
    for count, what, style in (
        (engine.requests_running, "running", "not bold"),
        (engine.requests_waiting, "waiting", "yellow" if engine.requests_waiting else "not bold"),
        (engine.requests_waiting_for_capacity or None, "of them for free blocks", "red"),
    ):
        if count is not None:
            requests.append(f"{format_count(count)} {what}  ", style=style)
    if engine.requests_running is None and engine.requests_waiting is None:
        requests.append(NOT_REPORTED, style="not bold magenta")
    elif pool is not None and pool.max_concurrency and room.columns >= NARROW_COLUMNS:
        held = format_number(pool.max_concurrency)
        requests.append(f"pool holds {held} full-length request{'' if held == '1' else 's'}", style="not bold dim")
    return [Text.assemble(name, "  ", filled, "  " if filled.plain else "", shown), requests]


def _owners(owners: BlockOwners) -> list[Text]:
    line = Text("blocks    ", style="bold")
    for owner, blocks in owners.by_owner.items():
        if blocks:
            style = "not bold red" if owner == "orphaned" else "not bold"
            line.append(f"{format_count(blocks)} {spaced(owner)}  ", style=style)
    return [line]


def trend_lines(trends: Sequence[Trend], listed: Sequence[Gpu], room: Room, *, detail: int) -> list[Text]:
    """How pools and devices changed while they were watched, and when those that clearly fill will be full."""
    names = {gpu.device.uuid: f"GPU {gpu.label}" for gpu in listed}
    totals = {gpu.device.uuid: gpu.device.memory.total_bytes for gpu in listed if gpu.device.memory is not None}
    several = sum(trend.is_pool for trend in trends) > 1
    order = sorted(trends, key=lambda one: one.full_in_seconds if one.full_in_seconds is not None else float("inf"))
    if detail != ALL:
        order = [one for kind in (True, False) for one in [each for each in order if each.is_pool == kind][:1]]
    rows: list[Text] = []
    for trend in order:
        if not trend.watched_seconds or not (trend.is_pool or trend.of in names):
            continue
        if detail == FEW and trend.full_in_seconds is None:
            continue
        name = (f"KV pool {trend.of[:8]}" if several else "KV pool") if trend.is_pool else names[trend.of]
        row = Text.assemble(plain(name.ljust(8), "bold"), " ", _spark(trend, room), " ")
        rows.append(row.append(_rate(trend, totals.get(trend.of))))
    return rows


def _spark(trend: Trend, room: Room) -> Text:
    """The recent shares as a line of bars: of the whole for a pool, between its lowest and highest for a device."""
    marks = ASCII_SPARK if room.ascii_only else SPARK
    cells = 24 if room.columns >= WIDE_COLUMNS else 16
    count = min(len(trend.recent), cells)
    edges = [round(place * len(trend.recent) / count) for place in range(count + 1)]
    values = [max(trend.recent[start:end]) for start, end in pairwise(edges)]
    low, high = (0.0, 1.0) if trend.is_pool else (min(values), max(values))
    heights = [0.0 if high <= low else (value - low) / (high - low) for value in values]
    line = "".join(marks[min(int(height * len(marks)), len(marks) - 1)] for height in heights)
    return Text(line.rjust(cells), style="cyan")


def _rate(trend: Trend, total_bytes: int | None) -> Text:
    """The change since the view was opened; its rate and the time until full if it is steady."""

    def shown(ratio: float) -> str:
        if total_bytes is None:
            return signed(f"{format_number(100.0 * ratio)} points")
        return signed(format_bytes(ratio * total_bytes))

    change = trend.recent[-1] - trend.recent[0]
    stayed = "unchanged" if len(set(trend.recent)) == 1 else "no net change"
    gained = Text.assemble(
        shown(change) if change else stayed, (f" in {format_duration(trend.watched_seconds)}", "dim")
    )
    if trend.watched_seconds < LIMITS.recent_min_seconds:
        return gained
    if trend.per_minute_ratio is None:
        return gained.append(", not steadily" if change else "", style="dim")
    gained.append(f", {shown(trend.per_minute_ratio)}/min", style="yellow")
    if trend.full_in_seconds is not None:
        gained.append(f", full in {format_duration(trend.full_in_seconds)}", style="bold")
    return gained
