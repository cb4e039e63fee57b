"""The plots of a report: device memory, torch, the pool, requests and host memory over time, with the steps. Pure.

They follow the order of an investigation: each GPU with torch's part, the KV pool, requests, host memory. A part that
was not observed is named and never left out silently. Flat device memory is drawn a second time as its change, because
a leak of some MiB would not show on the device's scale; a pool's size is drawn only if the samples come near to it.
Limits on GPUs, bands, events and columns bound the page's size for a timeline of any length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvdiag.formatting import format_bytes, format_count, format_ratio, plural, signed
from kvdiag.kv.calibration.running_server import block_bytes
from kvdiag.model import Device, Diagnosis, Facts, Span, StepFigures, StepResult, Timeline, cuda_uuid
from kvdiag.outputs.html import axes, report_series, svg_plots
from kvdiag.outputs.html.axes import Scale
from kvdiag.outputs.html.downsample import thinned
from kvdiag.outputs.html.kit import row, table, unobserved
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.html.report_series import HELD, IDLE, Readings
from kvdiag.outputs.html.svg_plots import Band, Event, Level, Line, Marker, Plot, extremes, numbered

Unit = Callable[[float], str]
"""How a value of a plot is written."""

MAX_GPUS = 16
"""The number of GPUs that are drawn; the others are counted, and are in the ledger."""

MAX_BANDS = 400
"""A day of soak cycles; beyond that each step is one band."""

MAX_EVENTS = 100
"""The first failures are marked; a server that fails all the time needs no more."""

MAX_READINGS = 12_000
"""Columns of all lines together, which bounds the size of a page of many GPUs."""

NEAR_RATIO = 0.5
"""A limit that would press the samples below this share of the plot is named and not drawn."""

MIN_CHANGE_BYTES = 16 * 2**20
"""Least height of the axis of a change, so that noise does not look like growth."""

HEADROOM = 1.12
"""How far a scale extends beyond the highest value, for the label of a limit."""

FLAT_RATIO = 0.1
"""Lines that vary by less of the device than this are also drawn as a change: a leak would look flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The data, the time range and the marks that all plots of a report share."""

    timeline: Timeline
    diagnosis: Diagnosis
    bands: tuple[Band, ...]
    events: tuple[Event, ...]
    columns: int

    def lines(self, readings: Readings, *wanted: tuple[str, str, str]) -> list[Line]:
        """The lines of figures, given with their titles and styles; those without a sample are left out.

        They are thinned for drawing; the extremes and the first and last sample are kept.
        """
        start_seconds, end_seconds = self.diagnosis.start_seconds, self.diagnosis.end_seconds
        lines = [
            Line(name=title, runs=thinned(readings.runs(name), start_seconds, end_seconds, self.columns), style=style)
            for name, title, style in wanted
            if name in readings.figures
        ]
        return [line for line in lines if line.runs]

    def end_of(self, span: Span) -> float:
        """When a span ended; the end of the run if it did not."""
        return self.diagnosis.end_seconds if span.end_seconds is None else span.end_seconds

    def figure(self, key: str, title: str, scale: Scale, lines: Sequence[Line], unit: Unit, **more: Any) -> Html:
        """A plot over the whole time, with the steps, the failures, and the same data as a table.

        `unit` formats a value; `more` are further fields of the plot, its description at least.
        """
        plot = Plot(
            key=key,
            title=title,
            scale=scale,
            lines=tuple(lines),
            start_seconds=self.diagnosis.start_seconds,
            end_seconds=self.diagnosis.end_seconds,
            bands=self.bands,
            events=self.events,
            columns=self.columns,
            **more,
        )
        return svg_plots.figure(plot, _as_table(plot, unit))


def draw(diagnosis: Diagnosis, timeline: Timeline) -> list[Html]:
    """Every plot that has data, in groups."""
    if diagnosis.end_seconds <= diagnosis.start_seconds:
        return [unobserved("Not enough samples over time to draw.")]
    facts = diagnosis.facts
    gpus, used = report_series.devices(timeline)
    torch = report_series.allocators(timeline, facts)
    page, memory = report_series.engines(timeline, facts), report_series.host(timeline)
    lines = 2 * len(gpus[:MAX_GPUS]) * (3 if torch.figures else 1) + len(page.figures) + len(memory.figures)
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
        for one in _gpu(frame, f"gpu-{place}", gpu, used, torch, alone=len(gpus) == 1)
    ]
    parts: list[Html] = []
    if not gpus:
        parts.append(unobserved("Device memory not observed."))
    if shown:
        parts.append(element("div", *shown, class_="charts"))
    if len(gpus) > MAX_GPUS:
        parts.append(element("p", f"{plural(len(gpus) - MAX_GPUS, 'more GPU')} not drawn; the ledger lists them all."))
    rest = [*_pool(frame, page, facts), *_requests(frame, page), *_host(frame, memory)]
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


def _gpu(frame: Frame, key: str, gpu: Device, used: Readings, torch: Readings, *, alone: bool) -> Iterator[Html]:
    uuid = cuda_uuid(gpu.uuid)
    lines = frame.lines(used, (gpu.uuid, "used", "s0"))
    wanted = ((f"reserved {uuid}", "torch reserved", "s1"), (f"allocated {uuid}", "torch allocated", "s2 dashed"))
    lines += frame.lines(torch, *wanted)
    title = f"{gpu.who} memory"
    if not lines:
        yield unobserved(f"{title}: could not be read.")
        return
    top = gpu.memory.total_bytes if gpu.memory is not None else max(extremes(lines)[1], 1.0)
    levels = () if gpu.memory is None else (Level(value=top, label=f"{format_bytes(top)}, total memory"),)
    markers = _markers(frame, lambda step: step.device_used_bytes, format_bytes) if alone else ()
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


def _markers(
    frame: Frame, figure: Callable[[StepFigures], float | None], unit: Unit, pool: Readings | None = None
) -> tuple[Marker, ...]:
    """The steps' expectations of a figure; blocks stand on top of those in use in the `pool` before the step."""
    found = []
    for step in frame.diagnosis.steps:
        expected, measured = figure(step.expected), figure(step.measured)
        spans = frame.timeline.spans(step.id)
        if not spans or (measured is None and (expected is None or pool is not None)):
            continue
        at_seconds, floor = frame.end_of(spans[-1]), 0.0
        if pool is not None and measured is not None:
            at_seconds, floor = _where(frame, spans, pool, measured)
        found.append(
            Marker(
                at_seconds=at_seconds,
                expected=None if expected is None else floor + expected,
                measured=None if measured is None else floor + measured,
                title=marker_title(step, expected, measured, unit),
            )
        )
    return tuple(found)


def _host(frame: Frame, memory: Readings) -> Iterator[Html]:
    lines = frame.lines(memory, *((name, name, "") for name in memory.figures))
    styled, more = numbered(sorted(lines, key=lambda line: -extremes([line])[1]))
    if styled:
        yield change(frame, "host", f"Host memory of the server's processes{more}", styled)


def _pool(frame: Frame, page: Readings, facts: Facts) -> Iterator[Html]:
    """Blocks in use with the steps' expectations, for all engines together and for each.

    Of a pool whose size is not reported only the usage ratio is drawn.
    """
    held = frame.lines(
        page, (HELD, "blocks in use", "s0 stepped"), (IDLE, "blocks in use when last idle", "s1 stepped")
    )
    if not held:
        lines, more = _by_engine(frame, page, "usage")
        description = "Usage of the KV pool over time, by engine; its size is not reported."
        if lines:
            title = f"KV pool usage{more}"
            yield frame.figure(
                "usage", title, axes.shares(*extremes(lines)), lines, format_ratio, description=description
            )
        return
    usable = sum(pool.usable_blocks for pool in facts.pools)
    unit = facts.capabilities.unit
    markers = _markers(frame, lambda step: step.blocks, lambda value: f"{format_count(value)} {unit}s", page)
    top = HEADROOM * max([extremes(held)[1], *values_of(markers), 1.0])
    near = top > NEAR_RATIO * usable
    size = block_bytes(facts, facts.pools[0]) if len(facts.pools) == 1 else None
    capacity = plural(usable, unit) + ("" if size is None else f", {format_bytes(usable * size[0])} a rank")
    yield frame.figure(
        "pool",
        f"KV pool in use, of {capacity}",
        axes.counts(0.0, HEADROOM * usable if near else top),
        held,
        format_count,
        description=f"{unit.capitalize()}s of the KV pool in use over time, all engines together.",
        levels=(Level(value=usable, label=f"{plural(usable, unit)}, the whole pool"),) if near else (),
        markers=markers,
    )
    lines, more = _by_engine(frame, page, HELD)
    if len(lines) > 1:
        title, description = f"KV pool in use, by engine{more}", "Blocks in use over time, by engine."
        scale = axes.counts(0.0, max(extremes(lines)[1], 1.0) * HEADROOM)
        yield frame.figure("pools", title, scale, lines, format_count, description=description)


def _by_engine(frame: Frame, page: Readings, figure: str) -> tuple[list[Line], str]:
    """A line of a figure for each engine that has it, and how many of them are drawn if not all are."""
    names = [name for name in page.figures if name.startswith(f"{figure} ")]
    return numbered(
        frame.lines(page, *((name, f"engine{name.removeprefix(figure)}", "") for name in names)), " stepped"
    )


def _where(frame: Frame, spans: Sequence[Span], page: Readings, measured: float) -> tuple[float, float]:
    """The sample of a step that shows what it measured, and the blocks in use before that cycle."""
    readings = [
        (time, value)
        for time, value in zip(page.times, page.figures[HELD], strict=True)
        if value is not None and spans[0].begin_seconds <= time <= frame.end_of(spans[-1])
    ]
    for span in reversed(spans):
        offered = span.begin_seconds if span.offer_seconds is None else span.offer_seconds
        before = [value for time, value in readings if span.begin_seconds <= time <= offered]
        floor = before[-1] if before else 0.0
        last = frame.end_of(span)
        shown = [time for time, value in readings if offered <= time <= last and value - floor == measured]
        if shown:
            return shown[len(shown) // 2], floor
    return (spans[-1].begin_seconds + frame.end_of(spans[-1])) / 2, 0.0


def _requests(frame: Frame, page: Readings) -> Iterator[Html]:
    lines = frame.lines(page, ("running", "running", "s0 stepped"), ("waiting", "waiting", "s1 stepped dashed"))
    if lines:
        description = "Running and waiting requests over time, all engines together."
        scale = axes.counts(0.0, max(extremes(lines)[1] * HEADROOM, 4.0))
        yield frame.figure("requests", "Requests", scale, lines, format_count, description=description)
    lines = frame.lines(page, ("preempted", "preemptions since the server's start", "s6"))
    low, high = extremes(lines)
    if high > low:
        description = "Requests that lost their blocks and are computed again, since the server's start."
        scale = axes.counts(0.0, high * HEADROOM)
        yield frame.figure("preempted", "Preemptions", scale, lines, format_count, description=description)


def _as_table(plot: Plot, unit: Unit) -> Html:
    """The data of a plot, for readers who cannot see it."""
    head = [(name, "") for name in ("", "first", "lowest", "highest", "last")]
    rows = []
    for line in plot.lines:
        low, high = extremes([line])
        first, last = line.runs[0][1][0], line.runs[-1][1][-1]
        rows.append(row(line.name, *map(unit, (first, low, high, last))))
    titles = [*(one.title for one in plot.markers), *(one.title for one in plot.events)]
    more = [element("ul", *(element("li", title) for title in titles))] if titles else []
    return element("details", element("summary", "As a table"), table(head, rows), *more)


def change(frame: Frame, key: str, title: str, lines: Sequence[Line]) -> Html:
    """The same lines relative to their first samples."""
    changes = []
    for line in lines:
        first = line.runs[0][1][0]
        moved = tuple((times, [value - first for value in values]) for times, values in line.runs)
        changes.append(replace(line, runs=moved))
    low, high = extremes(changes)
    room = max(MIN_CHANGE_BYTES - (high - low), 0.0)
    spare = 0.08 * max(high - low, MIN_CHANGE_BYTES)
    return frame.figure(
        key,
        f"{title}: change since the first sample",
        axes.sizes(low - (spare if low < 0 else 0.0), high + spare + room, signed=True),
        changes,
        _change,
        description="The same figures minus their first sample, which makes small growth visible.",
    )


def _change(value: float) -> str:
    return signed(format_bytes(value)) if value else format_bytes(value)


def values_of(markers: Sequence[Marker]) -> list[float]:
    """The expected and measured values of all markers."""
    return [value for marker in markers for value in (marker.expected, marker.measured) if value is not None]


def marker_title(step: StepResult, expected: float | None, measured: float | None, unit: Unit) -> str:
    """A marker in words."""
    parts = [
        f"{name} {unit(value)}" for name, value in (("expected", expected), ("measured", measured)) if value is not None
    ]
    return f"{step.id}: {', '.join(parts)}"
