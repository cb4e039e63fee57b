"""The plots of the engine's metrics: blocks in use with the steps' expectations, requests, preemptions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

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
    figure,
    left_out,
    marker_title,
    values_of,
)
from kvdiag.outputs.html.report_series import HELD, Readings
from kvdiag.outputs.html.svg_plots import Level, Line, Marker

NEAR_RATIO = 0.5
"""A limit that would press the samples below this share of the plot is named and not drawn."""


def pool(frame: Frame, page: Readings, facts: Facts) -> Iterator[Html]:
    """Blocks in use with the steps' expectations, for all engines together and for each."""
    held = frame.runs(page, HELD) if HELD in page.figures else ()
    if not held:
        if page.figures:
            yield from _usage(frame, page)
        return
    lines = [Line(name="blocks in use", runs=held, style="s0 stepped")]
    usable = sum(pool.usable_blocks for pool in facts.pools)
    markers = _block_markers(frame, page)
    top = HEADROOM * max([extremes(lines)[1], *values_of(markers), 1.0])
    near = top > NEAR_RATIO * usable
    size = block_bytes(facts, facts.pools[0]) if len(facts.pools) == 1 else None
    capacity = plural(usable, "block") + ("" if size is None else f", {format_bytes(usable * size[0])} a rank")
    yield figure(
        frame.plot(
            key="pool",
            title=f"KV pool in use, of {capacity}",
            description="Blocks of the KV pool in use over time, all engines together.",
            scale=axes.counts(0.0, HEADROOM * usable if near else top),
            lines=tuple(lines),
            levels=(Level(value=usable, label=f"{plural(usable, 'block')}, the whole pool"),) if near else (),
            markers=markers,
        ),
        format_count,
    )
    engines = [name for name in page.figures if name.startswith(f"{HELD} ")]
    if len(engines) > 1:
        several = [
            Line(
                name=f"engine {name.removeprefix(HELD).strip()}", runs=frame.runs(page, name), style=f"s{place} stepped"
            )
            for place, name in enumerate(islice(engines, MAX_LINES))
        ]
        yield figure(
            frame.plot(
                key="pools",
                title="KV pool in use, by engine" + left_out(len(engines)),
                description="Blocks in use over time, by engine.",
                scale=axes.counts(0.0, max(extremes(several)[1], 1.0) * HEADROOM),
                lines=tuple(several),
            ),
            format_count,
        )


def _usage(frame: Frame, page: Readings) -> Iterator[Html]:
    """The usage ratio of a pool whose size is not reported."""
    names = [name for name in page.figures if name.startswith("usage ") and frame.runs(page, name)]
    lines = [
        Line(name=f"engine {name.removeprefix('usage ')}", runs=frame.runs(page, name), style=f"s{place} stepped")
        for place, name in enumerate(islice(names, MAX_LINES))
    ]
    if lines:
        yield figure(
            frame.plot(
                key="usage",
                title="KV pool usage" + left_out(len(names)),
                description="Usage of the KV pool over time, by engine; its size is not reported.",
                scale=axes.shares(),
                lines=tuple(lines),
            ),
            format_ratio,
        )


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
    lines = [
        Line(name=name, runs=frame.runs(page, name), style=style)
        for name, style in (("running", "s0 stepped"), ("waiting", "s1 stepped dashed"))
        if name in page.figures
    ]
    lines = [line for line in lines if line.runs]
    if lines:
        yield figure(
            frame.plot(
                key="requests",
                title="Requests",
                description="Running and waiting requests over time, all engines together.",
                scale=axes.counts(0.0, max(extremes(lines)[1] * HEADROOM, 4.0)),
                lines=tuple(lines),
            ),
            format_count,
        )
    preempted = (
        [Line(name="preemptions since the server's start", runs=frame.runs(page, "preempted"), style="s6")]
        if "preempted" in page.figures
        else []
    )
    preempted = [line for line in preempted if line.runs and extremes([line])[1] > extremes([line])[0]]
    if preempted:
        yield figure(
            frame.plot(
                key="preempted",
                title="Preemptions",
                description="Requests that lost their blocks and are computed again, since the server's start.",
                scale=axes.counts(0.0, extremes(preempted)[1] * HEADROOM),
                lines=tuple(preempted),
            ),
            format_count,
        )
