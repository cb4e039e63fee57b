"""One agent's file → values, pure: nothing in it is trusted, and every figure is checked for its type and range.

What the agent writes stands in kvdiag/agent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from kvdiag.model import INSIDE, MAX_BYTES, MAX_COUNT, Allocator, Device, Memory, Process, ReservedSplit
from kvdiag.sources.host import program

FORMAT = 1
MAX_DEVICES = 128
MAX_PERIOD_SECONDS = 3600.0
MAX_ERRORS = 8
MAX_REASON_CHARACTERS = 160


class Publication(NamedTuple):
    """One file's content: who published, how often, what it holds of each device, and what the agent could not read."""

    pid: int
    start_ticks: int
    pid_namespace: int | None
    title: str
    sequence: int
    period_seconds: float
    allocators: tuple[Allocator, ...]
    problems: tuple[str, ...]


def parse(text: str | bytes) -> Publication:
    """One file's text as values. A device with impossible figures becomes a problem; the others stay.

    Raises:
        ValueError: it is no publication that this version understands.

    """
    try:
        reported = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(reported, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error for one kind of mistake
    version = _whole(reported, "kvdiag_agent", least=1)
    if version > FORMAT:
        raise ValueError(f"written in format {version}, this kvdiag reads {FORMAT}: use a newer kvdiag")
    who = _part(reported, "process")
    title = program(_text(who, "title")) or "process"
    problems = [f"{name}: {reason}" for name, reason in islice(_part(reported, "errors").items(), MAX_ERRORS)]
    allocators: list[Allocator] = []
    for device in _list(reported, "devices")[:MAX_DEVICES]:
        try:
            allocator = _allocator(device, reported, who, title)
        except ValueError as problem:
            problems.append(str(problem))
            continue
        if any(each.device_uuid.lower() == allocator.device_uuid.lower() for each in allocators):
            problems.append(f"GPU {allocator.device_uuid} is reported twice, and counted once")
        else:
            allocators.append(allocator)
    return Publication(
        pid=_whole(who, "pid", least=1, most=2**22),
        start_ticks=_whole(who, "start_ticks"),
        pid_namespace=_maybe(who, "pid_namespace"),
        title=title,
        sequence=_whole(reported, "sequence"),
        period_seconds=_seconds(reported, "period_seconds", MAX_PERIOD_SECONDS),
        allocators=tuple(allocators),
        problems=tuple(plain(problem) for problem in problems),
    )


def devices_inside(allocators: tuple[Allocator, ...] | None) -> tuple[Device, ...] | None:
    """The GPUs as NVML shows them inside the server's processes, where it always may; `None` where none tells.

    For a kvdiag that has no NVML of its own. `index` counts the GPUs that are told, and only the processes that publish
    are listed.
    """
    known = [each for each in allocators or () if each.memory is not None]
    uuids = sorted({each.device_uuid for each in known})
    devices = []
    for index, uuid in enumerate(uuids):
        here = [each for each in known if each.device_uuid == uuid]
        freshest = min(here, key=lambda each: each.age_seconds)
        processes = [Process(pid=each.pid, used_bytes=each.process_bytes, name=each.title) for each in here]
        devices.append(
            Device(
                uuid=f"GPU-{uuid}",
                index=index,
                name=INSIDE,
                memory=freshest.memory,
                processes=tuple(sorted(processes, key=lambda process: process.pid)),
            )
        )
    return tuple(devices) or None


def _allocator(device: Any, reported: Mapping[str, Any], who: Mapping[str, Any], title: str) -> Allocator:
    if not isinstance(device, dict):
        raise ValueError("a device is not an object")  # noqa: TRY004 - as above
    if device.get("uuid") is None:
        raise ValueError("torch does not report which GPU it uses (torch before 2.4 cannot)")
    torch, ranks, statistics = _part(reported, "torch"), _part(reported, "ranks"), _part(device, "statistics")
    settings, pools = _part(torch, "settings"), _part(statistics, "private_pools")
    expandable = settings.get("expandable_segments")
    memory, used = _driver(_part(device, "driver"), [_maybe(who, "pid"), *_list(who, "namespace_pids")])
    return Allocator(
        device_uuid=_text(device, "uuid"),
        pid=_whole(who, "pid", least=1, most=2**22),
        pid_seen=False,
        start_ticks=_whole(who, "start_ticks"),
        age_seconds=0.0,
        allocated_bytes=_whole(_part(statistics, "allocated_bytes"), "current", most=MAX_BYTES),
        reserved_bytes=_whole(_part(statistics, "reserved_bytes"), "current", most=MAX_BYTES),
        active_bytes=_maybe(_part(statistics, "active_bytes"), "current"),
        requested_bytes=_maybe(_part(statistics, "requested_bytes"), "current"),
        inactive_split_bytes=_maybe(_part(statistics, "inactive_split_bytes"), "current"),
        private_pools_bytes=_maybe(pools, "reserved_bytes"),
        alloc_retries_total=_maybe(statistics, "num_alloc_retries"),
        ooms_total=_maybe(statistics, "num_ooms"),
        backend=_text(torch, "backend") or None,
        expandable_segments=expandable if isinstance(expandable, bool) else None,
        process_bytes=used,
        memory=memory,
        split=_split(device.get("fragmentation"), _seconds(reported, "monotonic_seconds")),
        title=title,
        tensor_rank=_maybe(ranks, "tensor"),
        pipeline_rank=_maybe(ranks, "pipeline"),
        data_rank=_maybe(ranks, "data"),
    )


def _split(reported: Any, now_seconds: float) -> ReservedSplit | None:
    if reported is None:
        return None
    if not isinstance(reported, dict):
        raise ValueError("fragmentation is not an object")  # noqa: TRY004 - as above
    fits, ratio = reported.get("fits"), reported.get("unusable_ratio")
    names = ("reserved", "live", "pending", "private", "releasable", "stranded", "largest_free_block", "pinned_free")
    return ReservedSplit(
        age_seconds=max(now_seconds - _seconds(reported, "at_monotonic_seconds"), 0.0),
        pinned_segments=_whole(reported, "pinned_segments"),
        request_bytes=_whole(reported, "request_bytes", most=MAX_BYTES),
        fits=fits if isinstance(fits, bool) else None,
        unusable_ratio=None if ratio is None else _seconds(reported, "unusable_ratio"),
        **{f"{name}_bytes": _whole(reported, f"{name}_bytes", most=MAX_BYTES) for name in names},
    )


def _driver(reported: Mapping[str, Any], own_pids: list[Any]) -> tuple[Memory | None, int | None]:
    """The device's memory, and the bytes of the process that published, found among those that NVML lists."""
    memory = None
    if "total_bytes" in reported:
        memory = Memory(
            total_bytes=_whole(reported, "total_bytes", most=MAX_BYTES),
            free_bytes=_whole(reported, "free_bytes", most=MAX_BYTES),
            driver_reserved_bytes=_maybe(reported, "driver_reserved_bytes"),
        )
    used: dict[int, Any] = {}
    for entry in _list(reported, "processes"):
        if not (isinstance(entry, list) and len(entry) == len(("pid", "bytes")) and type(entry[0]) is int):
            raise ValueError("the process list is not a list of process id and bytes")
        used[entry[0]] = entry[1]
    # A container is often told the host's process ids: a lone process is then taken to be this one.
    lone = next(iter(used)) if len(used) == 1 else None
    own = next((pid for pid in own_pids if type(pid) is int and pid in used), lone)
    if own is None or used[own] is None:
        return memory, None
    return memory, _whole({"bytes": used[own]}, "bytes", most=MAX_BYTES)


def _part(reported: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside another; an empty one where it is left out."""
    part = reported.get(name)
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise ValueError(f"{name} is not an object")  # noqa: TRY004 - one kind of error for one kind of mistake
    return part


def _list(reported: Mapping[str, Any], name: str) -> list[Any]:
    part = reported.get(name)
    if part is None:
        return []
    if not isinstance(part, list):
        raise ValueError(f"{name} is not a list")  # noqa: TRY004 - as above
    return part


def _whole(reported: Mapping[str, Any], name: str, *, least: int = 0, most: int = MAX_COUNT) -> int:
    value = reported.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, not a number within {least}..{most}")
    return value


def _maybe(reported: Mapping[str, Any], name: str) -> int | None:
    return None if reported.get(name) is None else _whole(reported, name)


def _seconds(reported: Mapping[str, Any], name: str, most: float = float(MAX_COUNT)) -> float:
    value = reported.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, not a number within 0..{most:g}")
    return float(value)


def _text(reported: Mapping[str, Any], name: str) -> str:
    value = reported.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text")  # noqa: TRY004 - as above
    return plain(value)[:64]


def plain(text: str) -> str:
    """Text from outside as it may stand in a sentence."""
    return "".join(character if character.isprintable() else " " for character in text)[:MAX_REASON_CHARACTERS]


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
