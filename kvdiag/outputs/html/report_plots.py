"""The plots of a report: device memory, torch, the pool, requests and host memory over time, with the steps. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvdiag.model import Diagnosis, Span, Timeline, cuda_uuid
from kvdiag.outputs.html import axes, report_series, svg_plots
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.html.report_engine import pool, requests
from kvdiag.outputs.html.report_figure import (
    HEADROOM,
    MAX_LINES,
    Frame,
    both,
    change,
    extremes,
    figure,
    left_out,
    told_of,
    values_of,
)
from kvdiag.outputs.html.report_series import Gpu, Readings
from kvdiag.outputs.html.svg_plots import Band, Event, Level, Line, Marker
from kvdiag.outputs.terminal.text import readable

MAX_GPUS = 16
"""Drawn; the others are counted, and stand in the ledger."""

MAX_BANDS = 400
"""A day of soak cycles; beyond that each step is one band."""

MAX_EVENTS = 100
"""What fails all the time is told by its first times."""

MAX_READINGS = 12_000
"""Columns of all lines together, so that a page of many GPUs stays as large as one of few."""

FLAT_RATIO = 0.1
"""What moves by less of the device than this is drawn once more as a change, or a leak would be a straight line."""


def draw(diagnosis: Diagnosis, timeline: Timeline) -> list[Html]:
    """Every plot that there is something to draw for, in groups."""
    if diagnosis.end_seconds <= diagnosis.start_seconds:
        return [element("p", "There are not enough readings over time to draw.", class_="unseen")]
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
        parts.append(element("p", "Device memory was not seen: there is nothing to draw of it.", class_="unseen"))
    if shown:
        parts.append(element("div", *shown, class_="charts"))
    if len(gpus) > MAX_GPUS:
        parts.append(element("p", f"{len(gpus) - MAX_GPUS} more GPUs are not drawn; the ledger has them."))
    rest = [*pool(frame, page, facts), *requests(frame, page), *_host(frame, memory)]
    if not page.figures:
        parts.append(element("p", "The engine's page was not seen: neither pool nor requests.", class_="unseen"))
    if rest:
        parts.append(element("div", *rest, class_="charts"))
    return parts


def _bands(timeline: Timeline, diagnosis: Diagnosis) -> tuple[Band, ...]:
    """Each step's cycles, named once."""
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
    """Allocations that failed, as the agents tell, and loads of which requests failed."""
    found = [
        Event(at_seconds=at_seconds, told="an allocation failed") for at_seconds in report_series.failures(timeline)
    ]
    for span in timeline.spans():
        outcome = span.outcome
        if outcome is not None and outcome.failed and span.release_seconds is not None:
            told = f"{span.step}: {outcome.failed} of {outcome.completed + outcome.failed} requests failed"
            found.append(Event(at_seconds=span.release_seconds, told=told))
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
        yield element("p", f"{title}: could not be read.", class_="unseen")
        return
    top = gpu.total_bytes or max(extremes(lines)[1], 1.0)
    levels = () if gpu.total_bytes is None else (Level(value=top, label=f"{readable(top)}, all there is"),)
    markers = _device_markers(frame) if alone else ()
    yield figure(
        frame.plot(
            key=key,
            title=title,
            description=f"Bytes of {gpu.name} over time, from none to all of its memory.",
            scale=axes.sizes(0.0, HEADROOM * max([top, *values_of(markers)])),
            lines=tuple(lines),
            levels=levels,
            markers=markers,
        ),
        readable,
    )
    if all(high - low < FLAT_RATIO * top for low, high in (extremes([line]) for line in lines)):
        yield change(frame, f"{key}-change", title, lines)


def _device_markers(frame: Frame) -> tuple[Marker, ...]:
    """The steps' figures of the server's device, which are those of the only one there is."""
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
                told=told_of(step, expected, measured, readable),
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
