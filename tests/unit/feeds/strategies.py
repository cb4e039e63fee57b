"""Hypothesis strategies for all that a trace can hold: every field of every value, within its limits.

A field's strategy follows from its type and, for a number, from the unit in its name; `RELATED` puts right what the
fields of a value have to do with one another.
"""

import dataclasses
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from kvdiag.model import (
    MAX_BYTES,
    MAX_COUNT,
    OWNERS,
    Allocator,
    BlockOwners,
    Device,
    Facts,
    HostProcess,
    KvPool,
    LastHolder,
    Load,
    Mark,
    Memory,
    MemoryProfile,
    RequestBlocks,
    ReservedSplit,
    Sample,
    Timeline,
)

T = TypeVar("T")
Fields = dict[str, Any]

TEXTS = st.text(max_size=12) | st.sampled_from(["", "\n", "\u2028", "\ud800", '"}', "é" * 50, "NaN", "null"])
LARGEST = {"bytes": MAX_BYTES - 1, "pid": 2**32, "pids": 2**32, "index": 1024, "parallel": 4096}
FLOATS = {"ratio": st.floats(0.01, 1.0), "seconds": st.floats(0.0, 2.0**40), "concurrency": st.floats(1.0, 1e9)}
PARTS = ("live_bytes", "pending_bytes", "private_bytes", "releasable_bytes", "stranded_bytes")


def ascending(fields: Fields, *names: str, least: int = 0) -> Fields:
    """The same values, those of these names in ascending order where they are known."""
    known = [name for name in names if fields[name] is not None]
    return {**fields, **dict(zip(known, sorted(max(fields[name], least) for name in known), strict=True))}


def _owned(fields: Fields) -> Fields:
    """Owners that add up to the pool, and no more orphans held last than there are."""
    blocks = {f"{owner}_blocks": fields[f"{owner}_blocks"] // 16 for owner in OWNERS}
    held = tuple(dataclasses.replace(one, blocks=0) for one in fields["last_holders"])
    fields = {**ascending(fields, "closed_counts", "counts"), **blocks, "last_holders": held}
    usable = sum(blocks.values())
    groups = tuple(min(one, usable) for one in fields["group_blocks"])
    orphans = tuple(sorted({one for one in fields["orphans"] if one <= usable}))[: blocks["orphaned_blocks"]]
    closed = 0 if blocks["unconfirmed_blocks"] else fields["closed_counts"]
    requests = fields["held"] and dataclasses.replace(
        fields["held"],
        longest_blocks=min(fields["held"].longest_blocks, usable),
        stalled_blocks=min(fields["held"].stalled_blocks, usable),
    )
    figures = {"usable_blocks": usable, "group_blocks": groups, "orphans": orphans, "closed_counts": closed}
    return {**fields, **figures, "held": requests}


def _profiled(fields: Fields) -> Fields:
    """Moments in order, and stacks that add up to what was traced."""
    first, last = (
        one and dataclasses.replace(one, traced_bytes=one.traced_bytes // 8)
        for one in (fields["first"], fields["last"])
    )
    began, *moments, ended = sorted((*(one.at_monotonic_seconds for one in (first, last) if one), 0.0, 2.0**40))
    if first:
        first = dataclasses.replace(first, at_monotonic_seconds=moments[0])
    last = dataclasses.replace(last, at_monotonic_seconds=moments[-1])
    stacks = tuple(dataclasses.replace(one, bytes=one.bytes // 8) for one in fields["stacks"])
    growth = last.traced_bytes - (first.traced_bytes if first else 0)
    return {
        **fields,
        "first": first,
        "last": last,
        "stacks": stacks,
        "began_monotonic_seconds": began,
        "ended_monotonic_seconds": ended,
        "tracing_full": fields["tracing_full"] or first is None,
        "other_stacks": max(fields["other_stacks"], 1),
        "other_bytes": growth - sum(one.bytes for one in stacks),
    }


RELATED: dict[type[Any], Callable[[Fields], Fields]] = {
    Memory: lambda one: {
        **one,
        "total_bytes": max(one["total_bytes"], one["free_bytes"], one["driver_reserved_bytes"] or 0, 1),
    },
    HostProcess: lambda one: ascending(one, "anonymous_bytes", "resident_bytes"),
    ReservedSplit: lambda one: {
        **one,
        **{part: one[part] // 8 for part in PARTS},
        "reserved_bytes": sum(one[part] // 8 for part in PARTS),
    },
    Allocator: lambda one: {
        **ascending(one, "allocated_bytes", "active_bytes", "reserved_bytes"),
        "device_uuid": one["device_uuid"] or "GPU",
    },
    BlockOwners: _owned,
    LastHolder: lambda one: {**one, "among": one["among"] or None},
    RequestBlocks: lambda one: {
        **ascending(one, "tail_largest_tokens", "tail_tokens"),
        "requests": max(one["requests"], one["longest_requests"], one["stalled_requests"]),
    },
    MemoryProfile: _profiled,
    Device: lambda one: {**one, "uuid": one["uuid"] or "GPU"},
    Load: lambda one: {**one, "requests": max(one["requests"], len(one["resident_tokens"]))},
    KvPool: lambda one: {
        **ascending(one, "usable_blocks", "usage_blocks", "total_blocks", least=2),
        "block_tokens": one["block_tokens"] or 1,
        "sliding_window_tokens": one["sliding_window_tokens"] or None,
    },
    Facts: lambda one: {
        **one,
        "tensor_parallel": one["tensor_parallel"] or None,
        "pipeline_parallel": one["pipeline_parallel"] or None,
    },
}


def _of(name: str, hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments, unit = get_origin(hint), get_args(hint), name.rpartition("_")[2]
    if origin in (types.UnionType, Union):
        return st.one_of(*(st.none() if part is type(None) else _of(name, part) for part in arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(_of(name, arguments[0]), max_size=2).map(tuple)
    if dataclasses.is_dataclass(hint):
        return values(hint)  # type: ignore[arg-type]  # a class, not an instance
    return {
        int: st.integers(0, LARGEST.get(unit, MAX_COUNT)),
        float: FLOATS.get(unit, st.nothing()),
        bool: st.booleans(),
        str: TEXTS,
    }[hint]


@cache
def values(kind: type[T]) -> st.SearchStrategy[T]:
    """Any possible value of a class of the model."""
    hints, related = get_type_hints(kind), RELATED.get(kind, dict)
    fields = {one.name: _of(one.name, hints[one.name]) for one in dataclasses.fields(kind) if one.init}  # type: ignore[arg-type]
    return st.fixed_dictionaries(fields).map(lambda drawn: kind(**related(drawn)))


SAMPLES, MARKS, FACTS = values(Sample), values(Mark), values(Facts)


def _in_time(some: Sequence[T]) -> tuple[T, ...]:
    return tuple(sorted(some, key=lambda value: value.at_seconds))  # type: ignore[attr-defined]


TIMELINES = st.builds(
    Timeline, samples=st.lists(SAMPLES, max_size=4).map(_in_time), marks=st.lists(MARKS, max_size=3).map(_in_time)
)
