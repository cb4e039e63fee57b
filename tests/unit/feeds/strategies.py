"""Hypothesis strategies for whatever a trace can hold: every field of every value, within what it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, get_args

from hypothesis import strategies as st

from kvdiag.model import (
    MAX_BYTES,
    MAX_COUNT,
    Allocator,
    Device,
    Engine,
    Facts,
    FailedAllocation,
    Gap,
    HostCache,
    HostProcess,
    KvPool,
    Load,
    Mark,
    Memory,
    Outcome,
    Probe,
    ProbeKind,
    Process,
    ReservedSplit,
    Sample,
    Timeline,
    Workload,
)

T = TypeVar("T")

TEXTS = st.text(max_size=12) | st.sampled_from(["", "\n", "\u2028", "\ud800", '"}', "é" * 50, "NaN", "null"])
COUNTS = st.integers(0, MAX_COUNT)
BYTES = st.integers(0, MAX_BYTES)
PIDS = st.integers(0, 2**32)
RATIOS = st.floats(0.0, 1.0)
SECONDS = st.floats(0.0, 2.0**40)


def maybe(values: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    """A value, or that it is not known."""
    return st.none() | values


def tuples(values: st.SearchStrategy[T], most: int = 2) -> st.SearchStrategy[tuple[T, ...]]:
    """Up to `most` of them."""
    return st.lists(values, max_size=most).map(tuple)


GAPS = st.builds(Gap, source=TEXTS, kind=st.sampled_from(["absent", "failed"]), reason=TEXTS)


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    """Memory of which not more is free or reserved than there is."""
    total = draw(st.integers(1, MAX_BYTES - 1))
    return Memory(
        total_bytes=total,
        free_bytes=draw(st.integers(0, total)),
        driver_reserved_bytes=draw(maybe(st.integers(0, total))),
    )


PROCESSES = st.builds(Process, pid=PIDS, used_bytes=maybe(BYTES), name=maybe(TEXTS))
DEVICES = st.builds(
    Device,
    uuid=TEXTS.filter(bool),
    index=st.integers(0, 1024),
    name=TEXTS,
    memory=maybe(memories()),
    processes=maybe(tuples(PROCESSES)),
    mig_parent_uuid=maybe(TEXTS),
)
ENGINES = st.builds(
    Engine,
    engine=TEXTS,
    kv_usage_ratio=maybe(RATIOS),
    requests_running=maybe(COUNTS),
    requests_waiting=maybe(COUNTS),
    requests_waiting_for_capacity=maybe(COUNTS),
    preemptions_total=maybe(COUNTS),
    prompt_tokens_total=maybe(COUNTS),
    generation_tokens_total=maybe(COUNTS),
    prefix_queries_total=maybe(COUNTS),
    prefix_hits_total=maybe(COUNTS),
    asleep=maybe(st.booleans()),
)
HOST_PROCESSES = BYTES.flatmap(
    lambda resident: st.builds(
        HostProcess,
        pid=PIDS,
        name=TEXTS,
        resident_bytes=st.just(resident),
        anonymous_bytes=maybe(st.integers(0, resident)),
    )
)


@st.composite
def splits(draw: st.DrawFn) -> ReservedSplit:
    """Five parts and their sum."""
    parts = draw(st.tuples(*[st.integers(0, MAX_BYTES // 8)] * 5))
    names = ("live_bytes", "pending_bytes", "private_bytes", "releasable_bytes", "stranded_bytes")
    return ReservedSplit(
        age_seconds=draw(SECONDS),
        reserved_bytes=sum(parts),
        largest_free_block_bytes=draw(BYTES),
        pinned_segments=draw(COUNTS),
        pinned_free_bytes=draw(BYTES),
        request_bytes=draw(BYTES),
        fits=draw(maybe(st.booleans())),
        unusable_ratio=draw(maybe(RATIOS)),
        **dict(zip(names, parts, strict=True)),
    )


FAILURES = st.builds(FailedAllocation, age_seconds=SECONDS, asked_bytes=BYTES, free_bytes=BYTES, split=maybe(splits()))


@st.composite
def allocators(draw: st.DrawFn) -> Allocator:
    """No more allocated than active, nor more active than reserved."""
    allocated, active, reserved = sorted(draw(st.tuples(*[BYTES] * 3)))
    return Allocator(
        device_uuid=draw(TEXTS.filter(bool)),
        pid=draw(PIDS),
        pid_seen=draw(st.booleans()),
        start_ticks=draw(COUNTS),
        age_seconds=draw(SECONDS),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        active_bytes=draw(st.sampled_from([None, active])),
        alloc_retries_total=draw(maybe(COUNTS)),
        ooms_total=draw(maybe(COUNTS)),
        releasable_bytes=draw(maybe(BYTES)),
        stranded_bytes=draw(maybe(BYTES)),
        backend=draw(maybe(TEXTS)),
        expandable_segments=draw(maybe(st.booleans())),
        process_bytes=draw(maybe(BYTES)),
        memory=draw(maybe(memories())),
        split=draw(maybe(splits())),
        failure=draw(maybe(FAILURES)),
        tensor_rank=draw(maybe(COUNTS)),
    )


LOADS = tuples(COUNTS, 3).flatmap(
    lambda tokens: st.builds(Load, requests=st.integers(len(tokens), MAX_COUNT), resident_tokens=st.just(tokens))
)
SAMPLES = st.builds(
    Sample,
    at_seconds=SECONDS,
    engines=maybe(tuples(ENGINES)),
    devices=maybe(tuples(DEVICES)),
    allocators=maybe(tuples(allocators())),
    host=maybe(tuples(HOST_PROCESSES)),
    load=maybe(LOADS),
    load_before=maybe(LOADS),
    gaps=tuples(GAPS),
)
PROBES = st.builds(Probe, kind=st.sampled_from(get_args(ProbeKind)), other_key=st.booleans())
WORKLOADS = st.builds(
    Workload,
    requests=COUNTS,
    prompt_tokens=COUNTS,
    max_tokens=COUNTS,
    hold_seconds=SECONDS,
    repeated=st.booleans(),
    probe=maybe(PROBES),
)
OUTCOMES = st.builds(
    Outcome,
    completed=COUNTS,
    failed=COUNTS,
    prompt_tokens=COUNTS,
    generated_tokens=COUNTS,
    errors=tuples(TEXTS),
    first_token_seconds=maybe(SECONDS),
)
MARKS = st.builds(
    Mark,
    at_seconds=SECONDS,
    step=TEXTS,
    cycle=COUNTS,
    phase=st.sampled_from(["begin", "offer", "release", "end"]),
    workload=maybe(WORKLOADS),
    outcome=maybe(OUTCOMES),
    notes=tuples(TEXTS),
)


@st.composite
def pools(draw: st.DrawFn) -> KvPool:
    """A pool whose usable blocks are among those of its gauge, and those among all."""
    usable, usage, total = sorted(draw(st.tuples(*[st.integers(1, MAX_COUNT)] * 3)))
    return KvPool(
        engine=draw(TEXTS),
        block_tokens=draw(st.integers(1, MAX_COUNT)),
        total_blocks=max(total, 2),
        usable_blocks=usable,
        usage_blocks=usage,
        capacity_tokens=draw(maybe(COUNTS)),
        max_concurrency=draw(maybe(st.floats(1.0, 1e9))),
        pool_bytes=draw(maybe(BYTES)),
        cache_dtype=draw(maybe(TEXTS)),
        sliding_window_tokens=draw(maybe(st.integers(1, MAX_COUNT))),
        memory_fraction_ratio=draw(maybe(st.floats(0.01, 1.0))),
        prefix_caching=draw(maybe(st.booleans())),
    )


FACTS = st.builds(
    Facts,
    url=maybe(TEXTS),
    engine_name=maybe(TEXTS),
    engine_version=maybe(TEXTS),
    model=maybe(TEXTS),
    max_model_len_tokens=maybe(st.integers(1, MAX_COUNT)),
    pools=tuples(pools()),
    server_pids=maybe(tuples(PIDS)),
    weights_bytes=maybe(BYTES),
    host_limit_bytes=maybe(BYTES),
    model_config=maybe(TEXTS),
    host_caches=maybe(tuples(st.builds(HostCache, name=TEXTS, flag=TEXTS, limit_bytes=BYTES))),
    forced=st.booleans(),
    started_seconds=maybe(SECONDS),
    device_uuids=maybe(tuples(TEXTS)),
    gaps=tuples(GAPS),
)


def _in_time(values: Sequence[T]) -> tuple[T, ...]:
    return tuple(sorted(values, key=lambda value: value.at_seconds))  # type: ignore[attr-defined]


TIMELINES = st.builds(
    Timeline,
    samples=st.lists(SAMPLES, max_size=4).map(_in_time),
    marks=st.lists(MARKS, max_size=3).map(_in_time),
)


def at(sample: Sample, seconds: float) -> Sample:
    """The same sample at another time."""
    return replace(sample, at_seconds=seconds)
