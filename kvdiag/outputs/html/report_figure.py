"""What the plots of a report share: their frame, their limits, and the same data as a table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvdiag.formatting import format_bytes, signed
from kvdiag.model import Diagnosis, Span, StepResult, Timeline
from kvdiag.outputs.html import axes, svg_plots
from kvdiag.outputs.html.axes import Scale
from kvdiag.outputs.html.downsample import thinned
from kvdiag.outputs.html.kit import row, table
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.html.report_series import Readings
from kvdiag.outputs.html.svg_plots import Band, Event, Line, Marker, Plot

MAX_LINES = 8

Unit = Callable[[float], str]
"""How a value of a plot is written."""

MIN_CHANGE_BYTES = 16 * 2**20
"""Least height of the axis of a change, so that noise does not look like growth."""

HEADROOM = 1.12
"""How far a scale extends beyond the highest value, for the label of a limit."""


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


def extremes(lines: Sequence[Line]) -> tuple[float, float]:
    """The lowest and the highest value of all lines."""
    values = [values for line in lines for _, values in line.runs]
    return min(map(min, values), default=0.0), max(map(max, values), default=0.0)


def values_of(markers: Sequence[Marker]) -> list[float]:
    """The expected and measured values of all markers."""
    return [value for marker in markers for value in (marker.expected, marker.measured) if value is not None]


def marker_title(step: StepResult, expected: float | None, measured: float | None, unit: Unit) -> str:
    """A marker in words."""
    parts = [
        f"{name} {unit(value)}" for name, value in (("expected", expected), ("measured", measured)) if value is not None
    ]
    return f"{step.id}: {', '.join(parts)}"


def numbered(lines: Sequence[Line], style: str = "") -> tuple[list[Line], str]:
    """The first lines in the colours of their places, and how many they are if not all are drawn."""
    shown = [replace(line, style=f"s{place}{style}") for place, line in enumerate(lines[:MAX_LINES])]
    return shown, f" ({MAX_LINES} of {len(lines)})" if len(lines) > MAX_LINES else ""
