"""The GPUs of a live view: where each one's memory is, as a bar of cells, one character for each kind of it.

The characters alone tell the kinds apart, so that a terminal without colour shows as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rich.text import Text

from kvdiag.model import Device, LedgerLine, Sample, without_mig_parents
from kvdiag.outputs.terminal.cells import Kind, marked, sides
from kvdiag.outputs.terminal.text import plain, readable

NAME_CHARACTERS = 48
SLICE_CHARACTERS = 8


_TORCH = Kind(title="torch", mark="~", ascii_mark="~", style="magenta")
_WEIGHTS = Kind(title="weights", mark="█", ascii_mark="W", style="blue")
_OTHERS = Kind(title="other processes", mark="X", ascii_mark="X", style="red")
FREE = Kind(title="free", mark="·", ascii_mark=".", style="dim")

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "weights": _WEIGHTS,
        "kv_held": Kind(title="KV used", mark="▓", ascii_mark="#", style="bright_cyan"),
        "kv_free": Kind(title="KV free", mark="░", ascii_mark=":", style="cyan"),
        "kv_pool": Kind(title="KV pool", mark="▒", ascii_mark="%", style="cyan"),
        "torch_other": _TORCH,
        "torch_pending": _TORCH,
        "torch_private": _TORCH,
        "torch_releasable": _TORCH,
        "torch_stranded": _TORCH,
        "torch_unused": _TORCH,
        "outside_torch": Kind(title="context", mark="+", ascii_mark="+", style="magenta"),
        "server_other": Kind(title="context, rest", mark="+", ascii_mark="+", style="magenta"),
        "process": Kind(title="processes", mark="x", ascii_mark="x", style="yellow"),
        "other_process": _OTHERS,
        "driver_reserved": Kind(title="driver", mark="=", ascii_mark="=", style="white"),
        "unaccounted": Kind(title="unaccounted", mark="?", ascii_mark="?", style="bold yellow"),
    }
)
"""By the ledger's component, in the order of the bar."""

ELSE = Kind(title="else", mark="*", ascii_mark="*", style="white")
"""A component that only a newer daemon knows."""


def parts(lines: Sequence[LedgerLine], free_bytes: int | None) -> list[tuple[Kind, int]]:
    """Kinds with their bytes in the order of the bar; what is negative is left in, as the residual that it is."""
    sizes: dict[str, tuple[Kind, int]] = {}
    order = list(KINDS)
    known = sorted(lines, key=lambda line: order.index(line.component) if line.component in KINDS else len(order))
    for line in known:
        kind = KINDS.get(line.component, ELSE)
        sizes[kind.title] = (kind, sizes.get(kind.title, (kind, 0))[1] + line.bytes)
    if free_bytes is not None:
        sizes[FREE.title] = (FREE, free_bytes)
    return [one for one in sizes.values() if one[1]]


def bar(told: Sequence[tuple[Kind, int]], width: int, *, ascii_only: bool) -> Text:
    """The parts side by side over `width` cells: by largest remainder, and none that is there with less than one."""
    positive = [(kind, size) for kind, size in told if size > 0]
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
    # A sliver that is there shall be seen: the largest has a cell to give.
    for place, given in enumerate(cells):
        largest = max(range(len(cells)), key=cells.__getitem__)
        if given == 0 and cells[largest] > 1:
            cells[place], cells[largest] = 1, cells[largest] - 1
    return cells


def legend(told: Sequence[tuple[Kind, int]], width: int, *, sizes: bool, ascii_only: bool) -> list[Text]:
    """What the characters mean, with sizes where these are of one GPU, over as many lines as it takes."""
    rows: list[Text] = []
    for kind, size in told:
        item = Text.assemble((marked(kind, ascii_only=ascii_only), kind.style), f" {kind.title}")
        if sizes:
            item.append(f" {readable(size)}", style="bold")
        if not rows or rows[-1].cell_len + 2 + item.cell_len > width:
            rows.append(item)
        else:
            rows[-1].append("  ").append(item)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device of the view, and its lines. `label` is its index; slices of one GPU are counted after a point."""

    label: str
    device: Device
    lines: tuple[LedgerLine, ...]
    pressure_ratio: float | None

    @property
    def parts(self) -> list[tuple[Kind, int]]:
        """Kinds with their bytes, free memory among them."""
        return parts(self.lines, None if self.device.memory is None else self.device.memory.free_bytes)


def gpus(newest: Sample, lines: Sequence[LedgerLine], pressures: Mapping[str | None, float]) -> list[Gpu]:
    """The devices whose bytes may be added up, in their order."""
    told = {line.uuid for line in lines}
    engines = newest.engines or ()
    # With several engines nobody tells on which GPU which of them is.
    usage_ratio = engines[0].kv_usage_ratio if len(engines) == 1 else None
    # A GPU that is cut into slices has no lines; one whose memory cannot be read has none either, and is shown.
    seen = [one for one in without_mig_parents(newest.devices or ()) if one.memory is None or one.uuid in told]
    seen.sort(key=lambda one: one.index)
    indices = [one.index for one in seen]
    found: list[Gpu] = []
    for place, device in enumerate(seen):
        several = indices.count(device.index) > 1
        number = indices[: place + 1].count(device.index)
        found.append(
            Gpu(
                label=f"{device.index}.{number}" if several else str(device.index),
                device=device,
                lines=tuple(part for line in lines if line.uuid == device.uuid for part in _apart(line, usage_ratio)),
                pressure_ratio=pressures.get(device.uuid),
            )
        )
    return found


def _apart(line: LedgerLine, usage_ratio: float | None) -> tuple[LedgerLine, ...]:
    """A pool's line by what requests hold of it, where that is known."""
    if line.component != "kv_pool" or usage_ratio is None:
        return (line,)
    held = round(line.bytes * usage_ratio)
    return replace(line, component="kv_held", bytes=held), replace(line, component="kv_free", bytes=line.bytes - held)


def whole_gpu(gpu: Gpu, width: int, *, ascii_only: bool) -> list[Text]:
    """A GPU with its name, its bar over the whole width, and the size of every part."""
    name = plain(gpu.device.name[:NAME_CHARACTERS])
    title = Text.assemble((f"GPU {gpu.label}", "bold"), "  ", name)
    if "." in gpu.label:
        title.append("  ").append(plain(gpu.device.uuid[:SLICE_CHARACTERS], "dim"))
    if gpu.device.memory is None:
        return [title.append("  memory cannot be read", style="magenta")]
    return [
        sides(title, _used(gpu, long=True), width),
        bar(gpu.parts, width, ascii_only=ascii_only),
        *legend(gpu.parts, width, sizes=True, ascii_only=ascii_only),
    ]


def gpu_row(gpu: Gpu, label_width: int, width: int, *, ascii_only: bool) -> Text:
    """A GPU in one line."""
    label = Text(gpu.label.ljust(label_width + 1), style="bold")
    if gpu.device.memory is None:
        return label.append("memory cannot be read", style="magenta")
    used = _used(gpu, long=False)
    room = width - label.cell_len - used.cell_len - 1
    return Text.assemble(label, bar(gpu.parts, max(room, 0), ascii_only=ascii_only), " ", used)


def _used(gpu: Gpu, *, long: bool) -> Text:
    memory = gpu.device.memory
    if memory is None:
        return Text("memory cannot be read", style="magenta")
    share = f"{memory.occupied_ratio:.0%}"
    if long:
        told = Text(f"{readable(memory.used_bytes)} of {readable(memory.total_bytes)} taken, {share}")
        return told if gpu.pressure_ratio is None else told.append(f", pressure {gpu.pressure_ratio:.0%}", "bold")
    return Text(f"{memory.used_bytes / 2**30:5.1f}/{memory.total_bytes / 2**30:.1f} GiB {share.rjust(4)}")
