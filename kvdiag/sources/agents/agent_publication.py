"""One agent's file as values. Pure. Nothing in it is trusted.

`kvdiag/agent/document.py` writes it. Its figures are arranged as the fields of `Allocator` and read by the one codec,
leniently: unknown fields are skipped, types and ranges are checked by the classes. A device with impossible figures
becomes a problem, and the other devices stay.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from kvdiag.formatting import one_line
from kvdiag.model import INSIDE, MAX_COUNT, Allocator, BlockOwners, Device, Process
from kvdiag.model.codec import from_plain
from kvdiag.model.validation import Checked
from kvdiag.sources.agents.census_publication import read_census, read_requests
from kvdiag.sources.bounded_json import decode_object
from kvdiag.sources.host import program

FORMAT = 1
MAX_DEVICES = 128
MAX_PERIOD_SECONDS = 3600
MAX_ERRORS = 8
MAX_REASON_CHARACTERS = 160
MAX_TEXT_CHARACTERS = 64

_CURRENT = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication(Checked):
    """One file's content: the process, its publishing period, its memory on each device, and what it could not read."""

    pid: int
    start_ticks: int
    pid_namespace: int | None = None
    namespace_pids: tuple[int, ...] = ()
    title: str
    sequence: int
    period_seconds: float
    monotonic_seconds: float
    allocators: tuple[Allocator, ...] = ()
    block_owners: BlockOwners | None = None
    problems: tuple[str, ...] = ()
    census_problem: str | None = None
    requests_problem: str | None = None

    MOST: ClassVar[Mapping[str, int]] = {"pid": 2**22, "period_seconds": MAX_PERIOD_SECONDS}

    def _problem(self) -> str | None:
        return None if self.pid else "pid is 0"


def parse(text: str | bytes, *, show_request_ids: bool = False) -> Publication:
    """The publication in one file's text, with hashes of request ids unless they are asked for.

    Raises:
        ValueError: it is no publication that this version understands.
    """
    return read_document(decode_object(text), show_request_ids=show_request_ids)


def read_document(reported: Mapping[str, Any], *, show_request_ids: bool = False) -> Publication:
    """The publication that a decoded file holds; `parse` says how.

    Raises:
        ValueError: as `parse`.
    """
    check_format(reported, "kvdiag_agent", FORMAT)
    process = _part(reported, "process")
    publication = from_plain(
        Publication,
        {
            **process,
            **{name: reported.get(name) for name in ("sequence", "period_seconds", "monotonic_seconds")},
            "title": program(_text(process, "title") or "") or "process",
            "namespace_pids": process.get("namespace_pids") or [],
            "allocators": [],
            "problems": [],
            "block_owners": None,
            "census_problem": None,
            "requests_problem": None,
        },
        lenient=True,
    )
    devices = reported.get("devices", [])
    if not isinstance(devices, list):
        raise ValueError("devices is not a list")  # noqa: TRY004 - one kind of error for one kind of mistake
    errors = dict(_part(reported, "errors"))
    uncounted, unread = errors.pop("kv_blocks", None), errors.pop("kv_requests", None)
    problems = [f"{name}: {reason}" for name, reason in islice(errors.items(), MAX_ERRORS)]
    allocators: dict[str, Allocator] = {}
    for device in devices[:MAX_DEVICES]:
        try:
            allocator = _allocator(device, reported, publication)
        except ValueError as problem:
            problems.append(str(problem))
            continue
        if allocators.setdefault(allocator.device_uuid.lower(), allocator) is not allocator:
            problems.append(f"GPU {allocator.device_uuid} is reported twice, and counted once")
    owners, census = None, reported.get("kv_blocks")
    try:
        if census is not None:
            owners = read_census(
                census,
                process=(publication.pid, publication.start_ticks),
                now_seconds=publication.monotonic_seconds,
                show_request_ids=show_request_ids,
            )
    except ValueError as problem:
        uncounted = problem
    try:
        if owners is not None and (requests := reported.get("kv_requests")) is not None:
            held = read_requests(requests, now_seconds=publication.monotonic_seconds)
            owners = replace(owners, held=held)
    except ValueError as problem:
        unread = problem
    return replace(
        publication,
        allocators=tuple(allocators.values()),
        block_owners=owners,
        problems=tuple(map(plain, problems)),
        census_problem=None if uncounted is None else plain(str(uncounted)),
        requests_problem=None if unread is None else plain(str(unread)),
    )


def check_format(reported: Mapping[str, Any], name: str, newest: int) -> None:
    """Raise ValueError for a file in a format that this version does not read."""
    version = reported.get(name)
    if type(version) is not int or version < 1:
        raise ValueError(f"{name} is {str(version)[:40]}, not the number of a format")
    if version > newest:
        raise ValueError(f"written in format {version}, but this kvdiag reads format {newest}: use a newer kvdiag")


def devices_inside(allocators: tuple[Allocator, ...] | None) -> tuple[Device, ...] | None:
    """The GPUs as NVML reports them inside the server's processes, where it always may; `None` if none reports.

    For a kvdiag that has no NVML of its own. `index` counts the GPUs reported, and only the processes that publish
    are listed.
    """
    known = [each for each in allocators or () if each.memory is not None]
    devices = []
    for index, uuid in enumerate(sorted({each.device_uuid for each in known})):
        here = [each for each in known if each.device_uuid == uuid]
        processes = [Process(pid=each.pid, used_bytes=each.process_bytes, name=each.title) for each in here]
        devices.append(
            Device(
                uuid=f"GPU-{uuid}",
                index=index,
                name=INSIDE,
                memory=min(here, key=lambda each: each.age_seconds).memory,
                processes=tuple(sorted(processes, key=lambda process: process.pid)),
            )
        )
    return tuple(devices) or None


def _allocator(device: Any, reported: Mapping[str, Any], publication: Publication) -> Allocator:
    if not isinstance(device, dict):
        raise ValueError("a device is not an object")  # noqa: TRY004 - as above
    if device.get("uuid") is None:
        raise ValueError("torch does not report which GPU it uses (torch before 2.4 cannot)")
    torch, ranks, statistics = _part(reported, "torch"), _part(reported, "ranks"), _part(device, "statistics")
    driver, split = _part(device, "driver"), _part(device, "fragmentation")
    expandable = _part(torch, "settings").get("expandable_segments")
    made_seconds: Any = split.get("at_monotonic_seconds")
    if type(made_seconds) in (int, float) and 0 <= made_seconds <= MAX_COUNT:
        split = {**split, "age_seconds": max(publication.monotonic_seconds - made_seconds, 0.0)}
    figures = {
        "device_uuid": _text(device, "uuid"),
        "pid": publication.pid,
        "pid_seen": False,
        "start_ticks": publication.start_ticks,
        "age_seconds": 0.0,
        **{name: _part(statistics, name).get("current") for name in _CURRENT},
        "private_pools_bytes": _part(statistics, "private_pools").get("reserved_bytes"),
        "alloc_retries_total": statistics.get("num_alloc_retries"),
        "ooms_total": statistics.get("num_ooms"),
        "backend": _text(torch, "backend"),
        "expandable_segments": expandable if isinstance(expandable, bool) else None,
        "process_bytes": _process_bytes(driver, publication),
        "memory": driver if "total_bytes" in driver else None,
        "split": split or None,
        "title": publication.title,
        **{f"{name}_rank": ranks.get(name) for name in ("tensor", "pipeline", "data")},
    }
    return from_plain(Allocator, figures, lenient=True)


def _process_bytes(driver: Mapping[str, Any], publication: Publication) -> Any:
    """The bytes of the process that published, among those that NVML lists."""
    listed = driver.get("processes") or []
    if not isinstance(listed, list) or not all(
        isinstance(entry, list) and len(entry) == len(("pid", "bytes")) and type(entry[0]) is int for entry in listed
    ):
        raise ValueError("the process list is not a list of process id and bytes")
    used = dict(listed)
    # A container often sees the host's process ids: a single process is then taken for this one.
    only = next(iter(used)) if len(used) == 1 else None
    return used.get(next((pid for pid in (publication.pid, *publication.namespace_pids) if pid in used), only))


def _part(reported: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside another; an empty one where it is left out."""
    part = reported.get(name)
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise ValueError(f"{name} is not an object")  # noqa: TRY004 - as above
    return part


def _text(reported: Mapping[str, Any], name: str) -> str | None:
    value = reported.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is not a text")
    return plain(value)[:MAX_TEXT_CHARACTERS] if value else None


def plain(text: str) -> str:
    """Text from outside as it may stand in a gap's reason."""
    return one_line(text)[:MAX_REASON_CHARACTERS]
