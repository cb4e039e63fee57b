"""Timelines that no feed makes, as a trace from anywhere may hold them: judged and shown without an exception."""

import io
import json
from pathlib import Path
from typing import Any, get_args

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from rich.console import Console

import kvdiag.outputs.documents
from kvdiag.diagnosis import diagnose
from kvdiag.model import (
    MAX_BYTES,
    MAX_COUNT,
    Device,
    Engine,
    Facts,
    Gap,
    KvPool,
    Load,
    Mark,
    Memory,
    Outcome,
    Probe,
    ProbeKind,
    Process,
    Sample,
    Timeline,
    Workload,
)
from kvdiag.outputs.documents.diagnosis_document import document
from kvdiag.outputs.terminal.text import render
from tests.builders.values import OOM, OOM_WITH_ROOM

VALIDATOR = Draft202012Validator(
    json.loads((Path(kvdiag.outputs.documents.__path__[0]) / "diagnosis.schema.json").read_text(encoding="utf-8"))
)

few = st.integers(0, 5)
counts = few | st.integers(0, MAX_COUNT)
sizes = st.integers(0, MAX_BYTES)
words = st.text(max_size=4)


def some(one: st.SearchStrategy[Any], most: int = 2) -> st.SearchStrategy[Any]:
    """A tuple of up to `most` of these."""
    return st.lists(one, max_size=most).map(tuple)


engines = st.builds(
    Engine,
    engine=st.sampled_from("012"),
    kv_usage_ratio=st.none() | st.floats(0, 1),
    requests_running=st.none() | counts,
    requests_waiting=st.none() | counts,
    preemptions_total=st.none() | counts,
    prompt_tokens_total=st.none() | counts,
    prefix_queries_total=st.none() | counts,
    prefix_hits_total=st.none() | counts,
)
gaps = st.builds(
    Gap, source=st.sampled_from(["engine", "nvml", "host"]), kind=st.sampled_from(["absent", "failed"]), reason=words
)
processes = st.builds(Process, pid=few, used_bytes=st.none() | sizes, name=st.none() | words)
outcomes = st.builds(
    Outcome,
    completed=few,
    failed=few,
    prompt_tokens=counts,
    generated_tokens=counts,
    errors=some(st.sampled_from([OOM, OOM_WITH_ROOM, "CUDA out of memory", "HTTP 500"])),
    first_token_seconds=st.none() | st.floats(0, 1e9),
)
probes = st.builds(Probe, kind=st.sampled_from(get_args(ProbeKind)), other_key=st.booleans())
workloads = st.builds(Workload, requests=few, prompt_tokens=counts, max_tokens=counts, probe=st.none() | probes)
STEP_IDS = ("baseline", "single_request", "concurrent", "long_context", "warmup", "odd")


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    """Any memory."""
    total = draw(st.integers(1, MAX_BYTES - 1))
    part = st.integers(0, total)
    return Memory(total_bytes=total, free_bytes=draw(part), driver_reserved_bytes=draw(st.none() | part))


@st.composite
def devices(draw: st.DrawFn) -> Device:
    """Any device, the same UUID more than once among them."""
    index, parent = draw(few), draw(st.none() | st.sampled_from(["GPU-0", "GPU-1"]))
    return Device(
        uuid=f"GPU-{index}{'' if parent is None else '-slice'}",
        index=index,
        name="any",
        memory=draw(st.none() | memories()),
        processes=draw(st.none() | some(processes, 3)),
        mig_parent_uuid=parent,
    )


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Any load."""
    resident = draw(some(counts, 4))
    return Load(requests=len(resident) + draw(few), resident_tokens=resident)


@st.composite
def pools(draw: st.DrawFn) -> KvPool:
    """Any pool."""
    total = draw(st.integers(2, 20) | st.integers(2, MAX_COUNT))
    usable = draw(st.integers(1, total))
    return KvPool(
        engine=draw(st.sampled_from("012")),
        block_tokens=draw(st.integers(1, 32) | st.integers(1, MAX_COUNT)),
        total_blocks=total,
        usable_blocks=usable,
        usage_blocks=draw(st.integers(usable, total)),
        capacity_tokens=draw(st.none() | counts),
        max_concurrency=draw(st.none() | st.just(0.0) | st.floats(1e-15, MAX_COUNT)),
        pool_bytes=draw(st.none() | sizes),
        sliding_window_tokens=draw(st.none() | st.integers(1, 100)),
        memory_fraction_ratio=draw(st.none() | st.floats(0.01, 1)),
    )


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    """Any server."""
    return Facts(
        url=draw(st.none() | words),
        model=draw(st.none() | words),
        max_model_len_tokens=draw(st.none() | counts),
        pools=draw(some(pools())),
        server_pids=draw(st.none() | some(few)),
        weights_bytes=draw(st.none() | sizes),
        model_config=draw(st.none() | st.sampled_from(["", "{}", '{"model_type": "llama", "hidden_size": 1}'])),
        gaps=draw(some(gaps, 1)),
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Samples and marks in any mixture, many of them at once."""
    times = st.lists(st.integers(0, 40).map(float), max_size=25).map(sorted)
    samples = [
        Sample(
            at_seconds=at_seconds,
            engines=draw(st.none() | some(engines)),
            devices=draw(st.none() | some(devices())),
            load=draw(st.none() | loads()),
            gaps=draw(some(gaps, 1)),
        )
        for at_seconds in draw(times)
    ]
    # The isolation probe runs alone: where it is marked the steps are not judged.
    steps = draw(st.sampled_from([STEP_IDS, STEP_IDS, ("isolation", "warmup")]))
    marks = [
        Mark(
            at_seconds=at_seconds,
            step=draw(st.sampled_from(steps)),
            cycle=draw(few),
            phase=draw(st.sampled_from(["begin", "offer", "release", "end"])),
            workload=draw(st.none() | workloads),
            outcome=draw(st.none() | outcomes),
            notes=draw(some(words, 1)),
        )
        for at_seconds in draw(times)
    ]
    return Timeline(samples=tuple(samples), marks=tuple(marks))


@settings(
    max_examples=50,
    deadline=None,
    # Shrinking values as large as these takes minutes; the printed example is readable as it is.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(timelines(), any_facts())
def test_whatever_a_trace_holds_is_judged(timeline: Timeline, facts: Facts) -> None:
    """No sequence of possible values raises, and each gives a document that meets the schema and a text."""
    diagnosis = diagnose(timeline, facts)
    VALIDATOR.validate(json.loads(json.dumps(document(diagnosis), allow_nan=False)))
    Console(file=io.StringIO(), width=80).print(render(diagnosis))
