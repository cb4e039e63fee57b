"""Makes a replica's devices, their processes and torch's allocators from the columns of its series. Pure.

In this order: process labels become pids (where a label has none, or two have the same one, a number that no Linux
process can have); cards are what the labels report of each GPU; devices and allocators follow for each time that one
was read. Exporters report different figures, so total and free bytes are computed from those that determine them, and
a computed total that varies by rounding is taken as constant. An impossible sample is left out and counted in a gap; a
GPU of unknown size keeps its processes.
"""

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, sub

from kvdiag.engines import is_server_title
from kvdiag.feeds.history.columns import Column, Rows, Values, by_row, readings, rows_of
from kvdiag.feeds.history.replica_columns import Columns, Fields, Key
from kvdiag.feeds.history.series_labels import UUID_LABELS, uuid_of
from kvdiag.model import Allocator, Device, FailedAllocation, Gap, Memory, Process, cuda_uuid

ROUNDING_BYTES = 4 * 2**20
"""DCGM reports used, free and reserved in whole MiB, so that their sum varies by up to three."""

FIRST_PID = 2**22
"""Of processes that are reported by name alone: no pid of Linux is as high (/proc/sys/kernel/pid_max)."""

MAX_INDEX_DIGITS = 3

PROCESS = "process "
"""Before the name of a process in the rows of a device."""

ALLOCATOR = frozenset({"allocated_bytes", "reserved_bytes"})
"""Fields without which nothing is known of an allocator."""

FAILURE = frozenset({"oom_at_seconds", "oom_asked_bytes", "oom_free_bytes"})
"""Fields of the last failed allocation; the age of the first is computed before rows are made."""

_PID = re.compile(r"(?:^|[\s:=(-])(\d{1,7})\)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Process ids for the process labels, and which of them are the server's (`None` if unknown)."""

    pids: Mapping[str, int]
    server_pids: tuple[int, ...] | None


def names_of(columns: Columns) -> Names:
    """The processes that the series name. kvdiag reads the host memory of the server's own processes only."""
    own = {key[0] for key in columns.of("host") if key[0]}
    labels = sorted(own.union(key[1] for part in (columns.of("process"), columns.of("torch")) for key in part))
    reported = {label: int(found[1]) for label in labels if (found := _PID.search(label))}
    shared = Counter(reported.values())
    pids = {
        label: reported[label] if shared[reported.get(label, -1)] == 1 else FIRST_PID + number
        for number, label in enumerate(labels)
    }
    server = {pids[label] for label in labels if label in own or is_server_title(label)}
    return Names(pids=pids, server_pids=tuple(sorted(server)) or None)


def devices_of(
    columns: Columns, cards: Mapping[str, Device], names: Names
) -> tuple[dict[float, tuple[Device, ...]], list[Gap]]:
    """The devices at each time that one of them was read."""
    parts = {key[0]: dict(fields) for key, fields in columns.of("device").items()}
    for (uuid, label), fields in columns.of("process").items():
        if "used_bytes" in fields:
            parts.setdefault(uuid, {})[PROCESS + label] = fields["used_bytes"]
    times, rows = rows_of(parts)
    problems: dict[str, Counter[str]] = defaultdict(Counter)

    def made(uuid: str, figures: Mapping[str, float]) -> Device | None:
        card, sizes = cards[uuid], {name: round(value) for name, value in figures.items()}
        memory = None
        if {"total_bytes", "free_bytes"} <= sizes.keys():
            try:
                memory = Memory(
                    total_bytes=sizes["total_bytes"],
                    free_bytes=sizes["free_bytes"],
                    driver_reserved_bytes=sizes.get("driver_reserved_bytes"),
                )
            except ValueError as error:
                problems[uuid][str(error)] += 1
        processes = tuple(
            Process(pid=(pid := names.pids[label]), used_bytes=size, name=label.removesuffix(f" {pid}") or None)
            for name, size in sizes.items()
            if (label := name.removeprefix(PROCESS)) != name
        )
        if memory is None and not processes:
            return None
        return replace(card, memory=memory, processes=processes or None)

    order = sorted(rows, key=lambda uuid: (cards[uuid].index, uuid))
    found = readings(times, {uuid: _with_memory(rows[uuid], len(times)) for uuid in order}, by_row(made))
    sized = {device.uuid for devices in found.values() for device in devices if device.memory is not None}
    gaps = []
    for uuid in order:
        card = cards[uuid]
        if problems[uuid]:
            text = problems[uuid].most_common(1)[0][0]
            reason = f"GPU {card.index}: {problems[uuid].total()} impossible samples ({text}); check its exporter"
            gaps.append(Gap("nvml", "failed", reason))
        elif card.uuid not in sized:
            reason = f"GPU {card.index}: size unknown; export used and free bytes, or a total"
            gaps.append(Gap("nvml", "absent", reason))
    return found, gaps


def _with_memory(rows: Rows, count: int) -> Rows:
    """The rows of a device with its total, free and driver-reserved bytes, from whichever figures are reported."""
    nothing: Values = [None] * count
    total, free = rows.get("total_bytes"), rows.get("free_bytes")
    used, taken = rows.get("used_bytes"), rows.get("taken_bytes")
    reserved = rows.get("driver_reserved_bytes", nothing)
    if total is None and free is not None and used is not None:
        total = _by_row(add, free, used)
    elif total is None and free is not None and taken is not None:
        total = _by_row(add, free, taken)
        total = _steady(total if reserved is nothing else _by_row(add, total, reserved))
    if free is None and total is not None and used is not None:
        free = _by_row(sub, total, used)
    elif free is None and total is not None and taken is not None:
        kept = [size or 0.0 for size in reserved]
        free = _by_row(lambda *sizes: max(sizes[0] - sizes[1] - sizes[2], 0.0), total, taken, kept)
    sizes = {"total_bytes": total or nothing, "free_bytes": free or nothing, "driver_reserved_bytes": reserved}
    return sizes | {name: values for name, values in rows.items() if name.startswith(PROCESS)}


def _by_row(make: Callable[..., float], *columns: Values) -> Values:
    """What `make` returns for each row of the columns; `None` where one of them has no value."""
    try:
        return list(map(make, *columns))
    except TypeError:
        return [None if None in row else make(*row) for row in zip(*columns, strict=True)]


def _steady(totals: Sequence[float | None]) -> Values:
    """A device's most frequent size, for samples that differ by rounding alone."""
    known = Counter(total for total in totals if total is not None)
    if len(known) <= 1:
        return totals
    usual, _ = known.most_common(1)[0]
    return [usual if total is not None and abs(total - usual) <= ROUNDING_BYTES else total for total in totals]


def allocators_of(
    columns: Columns, cards: Mapping[str, Device], names: Names, born_ticks: int
) -> tuple[dict[float, tuple[Allocator, ...]], list[Gap]]:
    """The allocators at each time that one of them was read."""
    torch = {key: _aged(fields) for key, fields in sorted(columns.of("torch").items()) if fields.keys() >= ALLOCATOR}
    outside = _process_of(torch, columns)
    parts = {
        key: {**fields, **({"process_bytes": outside[key]} if key in outside else {})} for key, fields in torch.items()
    }
    problems: Counter[str] = Counter()

    def made(key: Key, figures: Mapping[str, float]) -> Allocator | None:
        if not figures.keys() >= ALLOCATOR:
            return None
        pid = names.pids[key[1]]
        counts = {name: round(value) for name, value in figures.items() if name not in FAILURE}
        try:
            return Allocator(
                device_uuid=cuda_uuid(cards[key[0]].uuid),
                pid=pid,
                pid_seen=False,
                start_ticks=born_ticks,
                age_seconds=0.0,
                title=key[1].removesuffix(f" {pid}") or None,
                failure=_failure(figures),
                **counts,  # type: ignore[arg-type]
            )
        except ValueError as error:
            problems[str(error)] += 1
            return None

    found = readings(*rows_of(parts), by_row(made))
    return found, [
        Gap("torch_allocator", "failed", f"{count} impossible samples ({text}); check its exporter")
        for text, count in problems.most_common(1)
    ]


def _aged(fields: Fields) -> Fields:
    """The fields of an allocator with the age of its last failed allocation in place of its time."""
    if (failed := fields.get("oom_at_seconds")) is None:
        return fields
    ages = array("d", (max(at - then, 0.0) for at, then in zip(failed.times, failed.values, strict=True)))
    return {**fields, "oom_at_seconds": replace(failed, values=ages)}


def _failure(figures: Mapping[str, float]) -> FailedAllocation | None:
    """The last allocation that failed, by kvdiag's own metrics; `None` where none did, or a figure is lost."""
    if not figures.keys() >= FAILURE:
        return None
    age, asked, free = (figures[name] for name in ("oom_at_seconds", "oom_asked_bytes", "oom_free_bytes"))
    return FailedAllocation(age_seconds=age, asked_bytes=round(asked), free_bytes=round(free))


def _process_of(torch: Mapping[tuple[str, ...], Fields], columns: Columns) -> dict[tuple[str, ...], Column]:
    """The device memory of each allocator's process: by its name, or if each of the two is the only one."""
    held: dict[str, dict[str, Column]] = defaultdict(dict)
    for (uuid, who), fields in columns.of("process").items():
        if "used_bytes" in fields:
            held[uuid][who] = fields["used_bytes"]
    alone = Counter(uuid for uuid, _ in torch)
    found: dict[tuple[str, ...], Column] = {}
    for key in torch:
        uuid, who = key
        if who in held[uuid]:
            found[key] = held[uuid][who]
        elif alone[uuid] == 1 and len(held[uuid]) == 1:
            found[key] = next(iter(held[uuid].values()))
    return found


def cards_of(series: Iterable[Mapping[str, str]], keys: Iterable[str]) -> dict[str, Device]:
    """The GPUs that any series is about, by the key of their columns."""
    found: dict[str, Device] = {}
    for labels in series:
        key = uuid_of(labels) or f"gpu{labels.get('gpu', '')}"
        known = found.get(key)
        uuid = next((labels[label] for label in UUID_LABELS if labels.get(label)), key)
        slice_id = labels.get("GPU_I_ID")
        number = labels.get("gpu", "") or labels.get("device", "").removeprefix("nvidia")
        index = int(number) if number.isdecimal() and len(number) <= MAX_INDEX_DIGITS else None
        name = labels.get("modelName") or labels.get("name") or ""
        if known is None or (not known.name and name):
            found[key] = Device(
                uuid=f"{uuid}/{slice_id}" if slice_id else uuid,
                index=min(index if index is not None else (known.index if known else 0), 1024),
                name=name,
                memory=None,
                mig_parent_uuid=uuid if slice_id else None,
            )
    for key in keys:
        found.setdefault(key, Device(uuid=key, index=0, name="", memory=None))
    return found
