"""The plots of a report: device memory, torch, the pool, requests and host memory over time, with the steps. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvdiag.formatting import format_bytes, plural
from kvdiag.model import Diagnosis, Span, Timeline, cuda_uuid
from kvdiag.outputs.html import axes, report_series, svg_plots
from kvdiag.outputs.html.kit import unobserved
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.html.report_engine import pool, requests
from kvdiag.outputs.html.report_figure import (
    HEADROOM,
    MAX_LINES,
    Frame,
    both,
    change,
    extremes,
    left_out,
    marker_title,
    values_of,
)
from kvdiag.outputs.html.report_series import Gpu, Readings
from kvdiag.outputs.html.svg_plots import Band, Event, Level, Line, Marker

MAX_GPUS = 16
"""The number of GPUs that are drawn; the others are counted, and are in the ledger."""

MAX_BANDS = 400
"""A day of soak cycles; beyond that each step is one band."""

MAX_EVENTS = 100
"""The first failures are marked; a server that fails all the time needs no more."""

MAX_READINGS = 12_000
"""Columns of all lines together, which bounds the size of a page of many GPUs."""

FLAT_RATIO = 0.1
"""Lines that vary by less of the device than this are also drawn as a change: a leak would look flat."""


def draw(diagnosis: Diagnosis, timeline: Timeline) -> list[Html]:
    """Every plot that has data, in groups."""
    if diagnosis.end_seconds <= diagnosis.start_seconds:
        return [unobserved("Not enough samples over time to draw.")]
    facts = diagnosis.facts
    gpus, used = report_series.devices(timeline)
    reserved, allocated = report_series.allocators(timeline, facts)
    page, memory = report_series.engines(timeline, facts), report_series.host(timeline)
    lines = 2 * len(gpus[:MAX_GPUS]) * (3 if allocated.figures else 1) + len(page.figures) + len(memory.figures)
    frame = Frame(
        timeline=timeline,
        diagnosis=diagnosis,
        bands=_bands(timeline, diagnosis),
        events=_events(timeline, diagnosis),
        columns=max(min(svg_plots.COLUMNS, MAX_READINGS // max(lines, 1)), 100),
    )
    shown = [
        one
        for place, gpu in enumerate(gpus[:MAX_GPUS])
        for one in _gpu(frame, f"gpu-{place}", gpu, used, reserved, allocated, alone=len(gpus) == 1)
    ]
    parts: list[Html] = []
    if not gpus:
        parts.append(unobserved("Device memory not observed."))
    if shown:
        parts.append(element("div", *shown, class_="charts"))
    if len(gpus) > MAX_GPUS:
        parts.append(element("p", f"{plural(len(gpus) - MAX_GPUS, 'more GPU')} not drawn; the ledger lists them all."))
    rest = [*pool(frame, page, facts), *requests(frame, page), *_host(frame, memory)]
    if not page.figures:
        parts.append(unobserved("The engine's metrics were not observed: no pool, no requests."))
    if rest:
        parts.append(element("div", *rest, class_="charts"))
    return parts


def _bands(timeline: Timeline, diagnosis: Diagnosis) -> tuple[Band, ...]:
    """Each step's cycles, labelled once."""
    numbers = {step.id: number for number, step in enumerate(diagnosis.steps, start=1)}
    spans = timeline.spans()
    end_seconds = diagnosis.end_seconds
    if len(spans) > MAX_BANDS:
        whole: dict[str, Span] = {}
        for span in spans:
            first = whole.setdefault(span.step, span)
            whole[span.step] = replace(first, end_seconds=span.end_seconds, offer_seconds=None)
        spans = tuple(whole.values())
    found: list[Band] = []
    named: set[str] = set()
    for span in spans:
        if span.step not in numbers:
            continue
        label = "" if span.step in named else str(numbers[span.step])
        named.add(span.step)
        last = end_seconds if span.end_seconds is None else span.end_seconds
        name = span.step.replace("_", " ")
        found.append(Band(start_seconds=span.begin_seconds, end_seconds=last, label=label, name=name))
        if span.offer_seconds is not None and span.workload is not None and span.workload.requests:
            released = last if span.release_seconds is None else span.release_seconds
            found.append(Band(start_seconds=span.offer_seconds, end_seconds=released, strong=True))
    return tuple(found)


def _events(timeline: Timeline, diagnosis: Diagnosis) -> tuple[Event, ...]:
    """Allocations that failed, as the agents report them, and loads with failed requests."""
    found = [
        Event(at_seconds=at_seconds, title="an allocation failed") for at_seconds in report_series.failures(timeline)
    ]
    for span in timeline.spans():
        outcome = span.outcome
        if outcome is not None and outcome.failed and span.release_seconds is not None:
            title = f"{span.step}: {outcome.failed} of {outcome.completed + outcome.failed} requests failed"
            found.append(Event(at_seconds=span.release_seconds, title=title))
    within = [one for one in found if diagnosis.start_seconds <= one.at_seconds <= diagnosis.end_seconds]
    return tuple(sorted(within, key=lambda one: one.at_seconds)[:MAX_EVENTS])


def _gpu(
    frame: Frame, key: str, gpu: Gpu, used: Readings, reserved: Readings, allocated: Readings, *, alone: bool
) -> Iterator[Html]:
    uuid = cuda_uuid(gpu.uuid)
    lines = [Line(name="used", runs=frame.runs(used, gpu.uuid), style="s0")]
    if uuid in reserved.figures:
        lines.append(Line(name="torch reserved", runs=frame.runs(reserved, uuid), style="s1"))
        lines.append(Line(name="torch allocated", runs=frame.runs(allocated, uuid), style="s2 dashed"))
    lines = [line for line in lines if line.runs]
    title = f"GPU {gpu.index} memory"
    if not lines:
        yield unobserved(f"{title}: could not be read.")
        return
    top = gpu.total_bytes or max(extremes(lines)[1], 1.0)
    levels = () if gpu.total_bytes is None else (Level(value=top, label=f"{format_bytes(top)}, total memory"),)
    markers = _device_markers(frame) if alone else ()
    yield frame.figure(
        key,
        title,
        axes.sizes(0.0, HEADROOM * max([top, *values_of(markers)])),
        lines,
        format_bytes,
        description=f"Memory of {gpu.name} in use over time.",
        levels=levels,
        markers=markers,
    )
    if all(high - low < FLAT_RATIO * top for low, high in (extremes([line]) for line in lines)):
        yield change(frame, f"{key}-change", title, lines)


def _device_markers(frame: Frame) -> tuple[Marker, ...]:
    """The steps' expectations for the only device there is."""
    found = []
    for step in frame.diagnosis.steps:
        expected, measured = both(step, "device_used_bytes")
        spans = frame.timeline.spans(step.id)
        if not spans or (expected is None and measured is None):
            continue
        end = spans[-1].end_seconds
        found.append(
            Marker(
                at_seconds=frame.diagnosis.end_seconds if end is None else end,
                expected=expected,
                measured=measured,
                title=marker_title(step, expected, measured, format_bytes),
            )
        )
    return tuple(found)


def _host(frame: Frame, memory: Readings) -> Iterator[Html]:
    lines = [Line(name=name, runs=frame.runs(memory, name)) for name in memory.figures]
    lines = sorted((line for line in lines if line.runs), key=lambda line: -extremes([line])[1])
    styled = tuple(replace(line, style=f"s{place}") for place, line in enumerate(lines[:MAX_LINES]))
    if styled:
        title = "Host memory of the server's processes" + left_out(len(lines))
        yield change(frame, "host", title, styled)
