"""Devices, their processes and torch's allocators from columns. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvdiag.engines import is_server_title
from kvdiag.feeds.history.columns import Column, side_by_side
from kvdiag.feeds.history.replica_columns import Columns, Fields
from kvdiag.feeds.history.series_labels import UUID_LABELS, uuid_of
from kvdiag.model import Allocator, Device, Gap, Memory, Process, cuda_uuid

ROUNDING_BYTES = 4 * 2**20
"""DCGM tells whole MiB of used, free and reserved, so that their sum moves by up to three."""

FIRST_PID = 2**22
"""Of processes that are told by a name alone: no pid of Linux is as high (/proc/sys/kernel/pid_max)."""

MAX_INDEX_DIGITS = 3

_PID = re.compile(r"(?:^|[\s:=(-])(\d{1,7})\)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Process ids for the process labels, and which of them are the server's (`None` where that cannot be told)."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What is known of one GPU beside its figures."""

    uuid: str
    index: int
    name: str
    mig_parent_uuid: str | None = None


def devices_of(
    columns: Columns, cards: Mapping[str, Card], names: Names, tolerance_seconds: float
) -> tuple[Sequence[float], list[tuple[Device, ...] | None], list[Gap]]:
    """The devices at each moment that one of them was read."""
    flat = {(key[0], name): column for key, fields in columns.of("device").items() for name, column in fields.items()}
    held = {
        (key[0], f"process {key[1]}"): fields["used_bytes"]
        for key, fields in columns.of("process").items()
        if "used_bytes" in fields
    }
    times, rows = side_by_side({**flat, **held}, tolerance_seconds)
    uuids = sorted({uuid for uuid, _ in (*flat, *held)}, key=lambda uuid: (cards[uuid].index, uuid))
    gaps: list[Gap] = []
    every: list[Sequence[Device | None]] = []
    for uuid in uuids:
        own = {name: values for (whose, name), values in rows.items() if whose == uuid}
        every.append(_device(cards[uuid], own, len(times), names, gaps))
    seen = [tuple(one for one in row if one is not None) for row in zip(*every, strict=True)]
    return times, [row or None for row in seen], gaps


def _device(
    card: Card, rows: Mapping[str, Sequence[float | None]], count: int, names: Names, gaps: list[Gap]
) -> list[Device | None]:
    totals, free, reserved = _memory_columns(rows, count)
    listed = {name.removeprefix("process "): values for name, values in rows.items() if name.startswith("process ")}
    titles = [(names.pids[label], label.removesuffix(f" {names.pids[label]}") or None) for label in listed]
    problems: Counter[str] = Counter()

    def at(total: float | None, left: float | None, kept: float | None, *sizes: float | None) -> Device | None:
        memory = None
        if total is not None and left is not None:
            try:
                memory = Memory(
                    total_bytes=round(total),
                    free_bytes=round(left),
                    driver_reserved_bytes=None if kept is None else round(kept),
                )
            except ValueError as error:
                problems[str(error)] += 1
        processes = tuple(
            Process(pid=pid, used_bytes=round(size), name=title)
            for (pid, title), size in zip(titles, sizes, strict=True)
            if size is not None
        )
        if memory is None and not processes:
            return None
        return Device(
            uuid=card.uuid,
            index=card.index,
            name=card.name,
            memory=memory,
            processes=processes or None,
            mig_parent_uuid=card.mig_parent_uuid,
        )

    # A device behind a pool that was taken at start says the same for hours.
    known: dict[tuple[float | None, ...], Device | None] = {}
    found = []
    for row in zip(totals, free, reserved, *listed.values(), strict=True):
        if row not in known:
            known[row] = at(*row)
        found.append(known[row])
    if problems:
        text, _ = problems.most_common(1)[0]
        reason = f"GPU {card.index}: {problems.total()} impossible samples ({text})"
        gaps.append(Gap("nvml", "failed", reason))
    elif not any(one is not None and one.memory is not None for one in found):
        reason = f"GPU {card.index}: size unknown; it needs used and free bytes, or a total"
        gaps.append(Gap("nvml", "absent", reason))
    return found


Values = Sequence[float | None]


def _memory_columns(rows: Mapping[str, Values], count: int) -> tuple[Values, Values, Values]:
    """Total, free and driver-reserved bytes of every row, from whichever of the figures are told."""
    nothing: Values = [None] * count
    total, free = rows.get("total_bytes"), rows.get("free_bytes")
    used, taken = rows.get("used_bytes"), rows.get("taken_bytes")
    reserved = rows.get("driver_reserved_bytes", nothing)
    if total is None and free is not None and used is not None:
        total = [_sum(row) for row in zip(free, used, strict=True)]
    elif total is None and free is not None and taken is not None:
        parts = (free, taken) if reserved is nothing else (free, taken, reserved)
        total = _steady([_sum(row) for row in zip(*parts, strict=True)])
    if free is None and total is not None and used is not None:
        free = [None if size is None or held is None else size - held for size, held in zip(total, used, strict=True)]
    elif free is None and total is not None and taken is not None:
        free = [
            None if size is None or held is None else max(size - held - (kept or 0.0), 0.0)
            for size, held, kept in zip(total, taken, reserved, strict=True)
        ]
    return total or nothing, free or nothing, reserved


def _sum(parts: Iterable[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(tuple(parts)) else None


def _steady(totals: Sequence[float | None]) -> Values:
    """A device's size as it is told most often, where rounding alone moves it."""
    known = Counter(total for total in totals if total is not None)
    if not known:
        return totals
    usual, _ = known.most_common(1)[0]
    return [usual if total is not None and abs(total - usual) <= ROUNDING_BYTES else total for total in totals]


def allocators_of(
    columns: Columns, cards: Mapping[str, Card], names: Names, born_ticks: int, tolerance_seconds: float
) -> tuple[Sequence[float], list[tuple[Allocator, ...] | None], list[Gap]]:
    """The allocators at each moment that one of them was read."""
    torch = {
        key: fields
        for key, fields in columns.of("torch").items()
        if {"allocated_bytes", "reserved_bytes"} <= fields.keys()
    }
    outside = _process_of(torch, columns)
    flat: dict[tuple[tuple[str, ...], str], Column] = {
        (key, name): column for key, fields in torch.items() for name, column in fields.items()
    }
    flat |= {(key, "process_bytes"): column for key, column in outside.items()}
    times, rows = side_by_side(flat, tolerance_seconds)
    seen: list[list[Allocator]] = [[] for _ in times]
    problems: Counter[str] = Counter()
    for key in sorted(torch):
        own = [(name, values) for (whose, name), values in rows.items() if whose == key]
        for place, row in enumerate(seen):
            figures = {name: round(value) for name, values in own if (value := values[place]) is not None}
            if not {"allocated_bytes", "reserved_bytes"} <= figures.keys():
                continue
            try:
                row.append(
                    Allocator(
                        device_uuid=cuda_uuid(cards[key[0]].uuid),
                        pid=names.pids[key[1]],
                        pid_seen=False,
                        start_ticks=born_ticks,
                        age_seconds=0.0,
                        title=key[1].removesuffix(f" {names.pids[key[1]]}") or None,
                        **figures,  # type: ignore[arg-type]
                    )
                )
            except ValueError as error:
                problems[str(error)] += 1
    gaps = [
        Gap("torch_allocator", "failed", f"{count} impossible samples ({text})")
        for text, count in problems.most_common(1)
    ]
    return times, [tuple(row) or None for row in seen], gaps


def _process_of(torch: Mapping[tuple[str, ...], Fields], columns: Columns) -> dict[tuple[str, ...], Column]:
    """What each allocator's process holds of its device: by its name, or where each of the two is the only one."""
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


def cards_of(series: Iterable[Mapping[str, str]], keys: Iterable[str]) -> dict[str, Card]:
    """The GPUs that any series is about, by the key of their columns."""
    found: dict[str, Card] = {}
    for said in series:
        key = uuid_of(said) or f"gpu{said.get('gpu', '')}"
        known = found.get(key)
        uuid = next((said[label] for label in UUID_LABELS if said.get(label)), key)
        slice_id = said.get("GPU_I_ID")
        number = said.get("gpu", "") or said.get("device", "").removeprefix("nvidia")
        index = int(number) if number.isdecimal() and len(number) <= MAX_INDEX_DIGITS else None
        name = said.get("modelName") or said.get("name") or ""
        if known is None or (not known.name and name):
            found[key] = Card(
                uuid=f"{uuid}/{slice_id}" if slice_id else uuid,
                index=min(index if index is not None else (known.index if known else 0), 1024),
                name=name,
                mig_parent_uuid=uuid if slice_id else None,
            )
    for key in keys:
        found.setdefault(key, Card(uuid=key, index=0, name=""))
    return found
