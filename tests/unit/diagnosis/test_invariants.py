"""What must not matter to a diagnosis: when it happened, in which order things are listed, what they are numbered."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.feeds.recording.trace import TraceWriter, read_trace
from kvdiag.model import Allocator, Device, Diagnosis, Facts, HostProcess, LedgerLine, Mark, Sample, Timeline
from tests.builders.answers import later
from tests.builders.runs import run
from tests.builders.series import device_part, hidden_device_part, host_part, timeline, torch_part
from tests.builders.worlds import WORLDS, facts

Case = tuple[Timeline, Facts]

STEPS_PER_SECOND = 128.0
"""Times are multiples of a power of two, so that a sum with whole seconds is exact, as it is not in general."""

WATCHED = {
    "process leaks": (device_part, 200.0),
    "device leaks": (hidden_device_part, 200.0),
    "torch leaks": (torch_part(live=True), 200.0),
    "host leaks": (host_part, 200.0),
    "watched and healthy": (device_part, 0.0),
}

few = settings(
    max_examples=25,
    deadline=None,
    # Shrinking judges hundreds of histories, and a name alone says which one fails.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
names = st.sampled_from(sorted([*WORLDS, *WATCHED]))


@cache
def case(name: str) -> Case:
    """An active run against a world, or seven hours that were watched."""
    if name in WATCHED:
        part, leak = WATCHED[name]
        seen = timeline("fast noise", hours=6.5, tick_seconds=120.0, leak_mb_per_hour=leak, part=part)
        known = facts(WORLDS["healthy"])
    else:
        seen, known = run(WORLDS[name]), facts(WORLDS[name])
    return _at(seen, lambda seconds: round(seconds * STEPS_PER_SECOND) / STEPS_PER_SECOND), known


@cache
def judged(name: str) -> Diagnosis:
    """The diagnosis of a case."""
    return diagnose(*case(name))


def _at(seen: Timeline, moved: Callable[[float], float]) -> Timeline:
    samples = tuple(replace(sample, at_seconds=moved(sample.at_seconds)) for sample in seen.samples)
    return Timeline(
        samples=samples, marks=tuple(replace(mark, at_seconds=moved(mark.at_seconds)) for mark in seen.marks)
    )


def _each(
    seen: Timeline,
    device: Callable[[Device], Device] = lambda one: one,
    allocator: Callable[[Allocator], Allocator] = lambda one: one,
    host: Callable[[HostProcess], HostProcess] = lambda one: one,
    *,
    backwards: bool = False,
) -> Timeline:
    """A timeline in which each of the parts of each sample is another; in the opposite order if `backwards`."""
    step = -1 if backwards else 1
    samples = tuple(
        replace(
            sample,
            devices=None if sample.devices is None else tuple(map(device, sample.devices))[::step],
            allocators=None if sample.allocators is None else tuple(map(allocator, sample.allocators))[::step],
            host=None if sample.host is None else tuple(map(host, sample.host))[::step],
            engines=None if sample.engines is None else sample.engines[::step],
        )
        for sample in seen.samples
    )
    return replace(seen, samples=samples)


def _said(diagnosis: Diagnosis, rename: Callable[[str], str] = lambda text: text) -> object:
    """All that a diagnosis says, but for the numbers of GPUs and the order of lines that are equal otherwise."""

    def plain(text: str) -> str:
        return re.sub(r"\b(GPU |gpu_)\d+", r"\1", rename(text))

    def line(one: LedgerLine) -> tuple[object, ...]:
        return (one.uuid or "", one.component, one.bytes, one.provenance, plain(one.detail))

    return (
        diagnosis.worst,
        [replace(step, summary=plain(step.summary)) for step in diagnosis.steps],
        [
            (
                finding.id,
                finding.status,
                plain(finding.summary),
                sorted(
                    (plain(one.name), plain(str(one.value)), one.unit, one.source)
                    for one in finding.evidence
                    if one.name != "gpu"
                ),
            )
            for finding in diagnosis.findings
        ],
        sorted(map(line, diagnosis.ledger)),
        diagnosis.gaps,
    )


@few
@given(names)
def test_same_timeline_has_the_same_diagnosis(name: str) -> None:
    """Judged twice, a timeline has one diagnosis."""
    assert judged(name) == diagnose(*case(name))


@few
@given(names, st.integers(0, 2**31))
def test_when_it_happened_does_not_matter(name: str, shift: int) -> None:
    """The same history later has the same diagnosis, but for its window."""
    seen, known = case(name)
    actual = diagnose(_at(seen, lambda seconds: seconds + shift), known)
    before = judged(name)
    assert later(before, shift) == actual


@few
@given(names, st.integers(1, 900), st.booleans())
def test_numbers_of_gpus_do_not_matter(name: str, first: int, backwards: bool) -> None:
    """GPUs that are counted from another number or backwards, and listed so, are the same GPUs."""
    seen, known = case(name)
    sign = -1 if backwards else 1
    other = _each(seen, device=lambda one: replace(one, index=first + 100 + sign * one.index), backwards=backwards)
    actual = diagnose(other, known)
    assert _said(judged(name)) == _said(actual)


@few
@given(names, st.integers(1, 4_000_000))
def test_numbers_of_processes_do_not_matter(name: str, most: int) -> None:
    """Processes that have other numbers, in the opposite order, are the same processes."""
    seen, known = case(name)

    def other(pid: int) -> int:
        return most + 10_000 - pid

    def renamed(text: str) -> str:
        return re.sub(
            r"(VLLM::\w+|process|vllm|pid|python3|train.py) (\d+)",
            lambda found: f"{found[1]} {other(int(found[2]))}",
            text,
        )

    changed = _each(
        seen,
        device=lambda one: replace(
            one,
            processes=None
            if one.processes is None
            else tuple(replace(each, pid=other(each.pid)) for each in one.processes),
        ),
        allocator=lambda one: replace(one, pid=other(one.pid)),
        host=lambda one: replace(one, pid=other(one.pid)),
    )
    pids = None if known.server_pids is None else tuple(other(pid) for pid in known.server_pids)
    actual = diagnose(changed, replace(known, server_pids=pids))

    assert _said(judged(name), renamed) == _said(actual)


@few
@given(names)
def test_recorded_and_read_again_it_is_the_same(tmp_path: Path, name: str) -> None:
    """A trace of a history has the diagnosis of the history itself, to the last figure."""
    seen, known = case(name)
    path = tmp_path / "trace.jsonl"
    entries: list[Sample | Mark] = sorted([*seen.samples, *seen.marks], key=lambda entry: entry.at_seconds)
    with TraceWriter(path, known) as trace:
        for entry in entries:
            trace.add(entry)

    assert judged(name) == diagnose(*read_trace(path))
    path.unlink()


@pytest.mark.parametrize("name", ["process leaks", "torch leaks", "device memory leaks", "blocks leak"])
def test_what_is_held_to_be_the_same_is_a_fault(name: str) -> None:
    """The histories above have something to lose: faults among them."""
    assert "fault" == judged(name).worst
