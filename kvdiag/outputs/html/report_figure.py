"""What the plots of a report have in common: their frame, their limits, and the same in figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvdiag.model import Diagnosis, StepResult, Timeline
from kvdiag.outputs.html import axes, svg_plots
from kvdiag.outputs.html.downsample import Run, thinned
from kvdiag.outputs.html.markup import Html, element
from kvdiag.outputs.html.report_series import Readings
from kvdiag.outputs.html.svg_plots import Band, Event, Line, Marker, Plot
from kvdiag.outputs.terminal.text import readable

MAX_LINES = 8

LEAST_CHANGE_BYTES = 16 * 2**20
"""Of the change's axis, so that a page of noise does not look like a mountain."""

HEADROOM = 1.12
"""Of a scale above what is highest, for the label of a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What all plots of a report share."""

    timeline: Timeline
    diagnosis: Diagnosis
    bands: tuple[Band, ...]
    events: tuple[Event, ...]
    columns: int

    def runs(self, readings: Readings, name: str) -> Sequence[Run]:
        """A figure, made few enough to draw: with its extremes, its first and its last reading."""
        diagnosis = self.diagnosis
        return thinned(readings.runs(name), diagnosis.start_seconds, diagnosis.end_seconds, self.columns)

    def plot(self, **what: object) -> Plot:
        """A plot over the whole time, with the steps and what failed."""
        return Plot(
            start_seconds=self.diagnosis.start_seconds,
            end_seconds=self.diagnosis.end_seconds,
            bands=self.bands,
            events=self.events,
            columns=self.columns,
            **what,  # type: ignore[arg-type]
        )


def figure(plot: Plot, unit: Callable[[float], str]) -> Html:
    """A plot with the same in figures, for those who do not see it."""
    head = element("tr", *(element("th", name, scope="col") for name in ("", "first", "lowest", "highest", "last")))
    rows = []
    for line in plot.lines:
        low, high = extremes([line])
        first, last = line.runs[0][1][0], line.runs[-1][1][-1]
        told = [element("td", unit(value)) for value in (first, low, high, last)]
        rows.append(element("tr", element("th", line.name, scope="row"), *told))
    marked = [element("li", one.told) for one in plot.markers]
    marked += [element("li", one.told) for one in plot.events]
    table = element("div", element("table", head, *rows), class_="scroll")
    more = [element("ul", *marked)] if marked else []
    return svg_plots.page_part(plot, element("details", element("summary", "In figures"), table, *more))


def change(frame: Frame, key: str, title: str, lines: Sequence[Line]) -> Html:
    """The same lines against their first readings."""
    changes = []
    for line in lines:
        first = line.runs[0][1][0]
        moved = tuple((times, [value - first for value in values]) for times, values in line.runs)
        changes.append(replace(line, runs=moved))
    low, high = extremes(changes)
    room = max(LEAST_CHANGE_BYTES - (high - low), 0.0)
    spare = 0.08 * max(high - low, LEAST_CHANGE_BYTES)
    return figure(
        frame.plot(
            key=key,
            title=f"{title}: change since the first reading",
            description="The same figures, each less its own first reading, so that small growth can be seen.",
            scale=axes.sizes(low - (spare if low < 0 else 0.0), high + spare + room, signed=True),
            lines=tuple(changes),
        ),
        _signed,
    )


def _signed(value: float) -> str:
    return f"+{readable(value)}" if value > 0 else readable(value)


def extremes(lines: Sequence[Line]) -> tuple[float, float]:
    """The lowest and the highest value of all lines."""
    values = [values for line in lines for _, values in line.runs]
    return min(map(min, values), default=0.0), max(map(max, values), default=0.0)


def values_of(markers: Sequence[Marker]) -> list[float]:
    """All that is marked."""
    return [value for marker in markers for value in (marker.expected, marker.measured) if value is not None]


def both(step: StepResult, name: str) -> tuple[float | None, float | None]:
    """What a step expected of a quantity, and what it measured."""
    expected, measured = (
        next((one.value for one in told if one.name == name), None) for told in (step.expected, step.measured)
    )
    return (
        expected if isinstance(expected, int | float) else None,
        measured if isinstance(measured, int | float) else None,
    )


def told_of(step: StepResult, expected: float | None, measured: float | None, unit: Callable[[float], str]) -> str:
    """A marker in words."""
    parts = [
        f"{name} {unit(value)}" for name, value in (("expected", expected), ("measured", measured)) if value is not None
    ]
    return f"{step.id}: {', '.join(parts)}"


def count(value: float) -> str:
    """Whole things."""
    return f"{value:,.0f}"


def left_out(lines: int) -> str:
    """How many lines of how many are drawn, where not all are."""
    return f" ({MAX_LINES} of {lines})" if lines > MAX_LINES else ""
