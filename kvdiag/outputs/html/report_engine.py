"""The plots of what the engine tells: blocks held against what the steps' tokens need, requests, preemptions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from kvdiag.kv.calibration.running_server import block_bytes
from kvdiag.model import Facts, Span
from kvdiag.outputs.html import axes
from kvdiag.outputs.html.markup import Html
from kvdiag.outputs.html.report_figure import (
    HEADROOM,
    MAX_LINES,
    Frame,
    both,
    count,
    extremes,
    figure,
    left_out,
    told_of,
    values_of,
)
from kvdiag.outputs.html.report_series import HELD, Readings
from kvdiag.outputs.html.svg_plots import Level, Line, Marker
from kvdiag.outputs.terminal.text import readable

NEAR_RATIO = 0.5
"""A bound further above the readings than this would press them to the floor: it is only named."""


def pool(frame: Frame, page: Readings, facts: Facts) -> Iterator[Html]:
    """The blocks that requests hold, with the steps' needs, all engines together and one by one."""
    held = frame.runs(page, HELD) if HELD in page.figures else ()
    if not held:
        if page.figures:
            yield from _usage(frame, page)
        return
    lines = [Line(name="blocks held by requests", runs=held, style="s0 stepped")]
    usable = sum(pool.usable_blocks for pool in facts.pools)
    markers = _block_markers(frame, page)
    top = HEADROOM * max([extremes(lines)[1], *values_of(markers), 1.0])
    near = top > NEAR_RATIO * usable
    size = block_bytes(facts, facts.pools[0]) if len(facts.pools) == 1 else None
    capacity = f"{usable:,} blocks" + ("" if size is None else f", {readable(usable * size[0])} a rank")
    yield figure(
        frame.plot(
            key="pool",
            title=f"KV pool in use, of {capacity}",
            description="Blocks of the KV pool that requests hold, over time, in all engines together.",
            scale=axes.counts(0.0, HEADROOM * usable if near else top),
            lines=tuple(lines),
            levels=(Level(value=usable, label=f"{usable:,} blocks, the whole pool"),) if near else (),
            markers=markers,
        ),
        count,
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
                description="Blocks that requests hold, engine by engine.",
                scale=axes.counts(0.0, max(extremes(several)[1], 1.0) * HEADROOM),
                lines=tuple(several),
            ),
            count,
        )


def _usage(frame: Frame, page: Readings) -> Iterator[Html]:
    """The pool's used share, where its size is not told."""
    names = [name for name in page.figures if name.startswith("usage ") and frame.runs(page, name)]
    lines = [
        Line(name=f"engine {name.removeprefix('usage ')}", runs=frame.runs(page, name), style=f"s{place} stepped")
        for place, name in enumerate(islice(names, MAX_LINES))
    ]
    if lines:
        yield figure(
            frame.plot(
                key="usage",
                title="KV pool in use, share" + left_out(len(names)),
                description="Share of the KV pool that requests hold, engine by engine; its size is not told.",
                scale=axes.shares(),
                lines=tuple(lines),
            ),
            lambda value: f"{value:.1%}",
        )


def _block_markers(frame: Frame, page: Readings) -> tuple[Marker, ...]:
    """Each step's blocks above what was held before it, at the reading that was judged."""
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
                told=told_of(step, expected, measured, lambda value: f"{value:,.0f} blocks"),
            )
        )
    return tuple(found)


def _where(spans: Sequence[Span], page: Readings, measured: float, end_seconds: float) -> tuple[float, float]:
    """The first reading of a step that shows what it measured, and what was held before that cycle."""
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
    """What runs and waits, and what was preempted where anything was."""
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
                description="Requests that run and that wait, over time, in all engines together.",
                scale=axes.counts(0.0, max(extremes(lines)[1] * HEADROOM, 4.0)),
                lines=tuple(lines),
            ),
            count,
        )
    preempted = (
        [Line(name="preempted since its start", runs=frame.runs(page, "preempted"), style="s6")]
        if "preempted" in page.figures
        else []
    )
    preempted = [line for line in preempted if line.runs and extremes([line])[1] > extremes([line])[0]]
    if preempted:
        yield figure(
            frame.plot(
                key="preempted",
                title="Preempted requests",
                description="Requests that lost their blocks and were computed again, since the server's start.",
                scale=axes.counts(0.0, extremes(preempted)[1] * HEADROOM),
                lines=tuple(preempted),
            ),
            count,
        )
