"""The plots of the engine's metrics: blocks in use with the steps' expectations, requests, preemptions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvdiag.formatting import format_bytes, format_count, format_ratio, plural
from kvdiag.kv.calibration.running_server import block_bytes
from kvdiag.model import Facts, Span
from kvdiag.outputs.html import axes
from kvdiag.outputs.html.markup import Html
from kvdiag.outputs.html.report_figure import (
    HEADROOM,
    MAX_LINES,
    Frame,
    both,
    extremes,
    left_out,
    marker_title,
    values_of,
)
from kvdiag.outputs.html.report_series import HELD, Readings
from kvdiag.outputs.html.svg_plots import Level, Line, Marker

NEAR_RATIO = 0.5
"""A limit that would press the samples below this share of the plot is named and not drawn."""


def pool(frame: Frame, page: Readings, facts: Facts) -> Iterator[Html]:
    """Blocks in use with the steps' expectations, for all engines together and for each.

    Of a pool whose size is not reported only the usage ratio is drawn.
    """
    held = frame.runs(page, HELD) if HELD in page.figures else ()
    if not held:
        lines, more = _by_engine(frame, page, "usage")
        description = "Usage of the KV pool over time, by engine; its size is not reported."
        if lines:
            title = f"KV pool usage{more}"
            yield frame.figure("usage", title, axes.shares(), lines, format_ratio, description=description)
        return
    line = Line(name="blocks in use", runs=held, style="s0 stepped")
    usable = sum(pool.usable_blocks for pool in facts.pools)
    markers = _block_markers(frame, page)
    top = HEADROOM * max([extremes([line])[1], *values_of(markers), 1.0])
    near = top > NEAR_RATIO * usable
    size = block_bytes(facts, facts.pools[0]) if len(facts.pools) == 1 else None
    capacity = plural(usable, "block") + ("" if size is None else f", {format_bytes(usable * size[0])} a rank")
    yield frame.figure(
        "pool",
        f"KV pool in use, of {capacity}",
        axes.counts(0.0, HEADROOM * usable if near else top),
        [line],
        format_count,
        description="Blocks of the KV pool in use over time, all engines together.",
        levels=(Level(value=usable, label=f"{plural(usable, 'block')}, the whole pool"),) if near else (),
        markers=markers,
    )
    lines, more = _by_engine(frame, page, HELD)
    if len(lines) > 1:
        title, description = f"KV pool in use, by engine{more}", "Blocks in use over time, by engine."
        scale = axes.counts(0.0, max(extremes(lines)[1], 1.0) * HEADROOM)
        yield frame.figure("pools", title, scale, lines, format_count, description=description)


def _by_engine(frame: Frame, page: Readings, figure: str) -> tuple[list[Line], str]:
    """A line of a figure for each engine that has it, and how many of them are drawn if not all are."""
    prefix = f"{figure} "
    names = [name for name in page.figures if name.startswith(prefix) and frame.runs(page, name)]
    lines = [
        Line(name=f"engine {name.removeprefix(prefix)}", runs=frame.runs(page, name), style=f"s{place} stepped")
        for place, name in enumerate(names[:MAX_LINES])
    ]
    return lines, left_out(len(names))


def _block_markers(frame: Frame, page: Readings) -> tuple[Marker, ...]:
    """Each step's blocks on top of those in use before it, at the sample that was judged."""
    found = []
    for step in frame.diagnosis.steps:
        expected, measured = both(step, "blocks")
        spans = frame.timeline.spans(step.id)
        if not spans or measured is None:
            continue
        at_seconds, floor = _where(spans, page, measured, frame.diagnosis.end_seconds)
        found.append(
            Marker(
                at_seconds=at_seconds,
                expected=None if expected is None else floor + expected,
                measured=floor + measured,
                title=marker_title(step, expected, measured, lambda value: f"{format_count(value)} blocks"),
            )
        )
    return tuple(found)


def _where(spans: Sequence[Span], page: Readings, measured: float, end_seconds: float) -> tuple[float, float]:
    """The sample of a step that shows what it measured, and the blocks in use before that cycle."""
    readings = [
        (time, value)
        for time, value in zip(page.times, page.figures[HELD], strict=True)
        if value is not None and spans[0].begin_seconds <= time <= (spans[-1].end_seconds or end_seconds)
    ]
    for span in reversed(spans):
        offered = span.begin_seconds if span.offer_seconds is None else span.offer_seconds
        before = [value for time, value in readings if span.begin_seconds <= time <= offered]
        floor = before[-1] if before else 0.0
        last = end_seconds if span.end_seconds is None else span.end_seconds
        shown = [time for time, value in readings if offered <= time <= last and value - floor == measured]
        if shown:
            return shown[len(shown) // 2], floor
    last = end_seconds if spans[-1].end_seconds is None else spans[-1].end_seconds
    return (spans[-1].begin_seconds + last) / 2, 0.0


def requests(frame: Frame, page: Readings) -> Iterator[Html]:
    """Running and waiting requests, and preemptions if there were any."""
    lines = _lines(frame, page, ("running", "running", "s0 stepped"), ("waiting", "waiting", "s1 stepped dashed"))
    if lines:
        description = "Running and waiting requests over time, all engines together."
        scale = axes.counts(0.0, max(extremes(lines)[1] * HEADROOM, 4.0))
        yield frame.figure("requests", "Requests", scale, lines, format_count, description=description)
    lines = _lines(frame, page, ("preempted", "preemptions since the server's start", "s6"))
    low, high = extremes(lines)
    if high > low:
        description = "Requests that lost their blocks and are computed again, since the server's start."
        scale = axes.counts(0.0, high * HEADROOM)
        yield frame.figure("preempted", "Preemptions", scale, lines, format_count, description=description)


def _lines(frame: Frame, page: Readings, *wanted: tuple[str, str, str]) -> list[Line]:
    """The lines of figures, given with their titles and styles; those without a sample are left out."""
    found = [
        Line(name=title, runs=frame.runs(page, name), style=style)
        for name, title, style in wanted
        if name in page.figures
    ]
    return [line for line in found if line.runs]
