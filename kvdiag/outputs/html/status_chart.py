"""The status page's lines over time: shares from 0 to 1, with a hole where nothing was seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvdiag.outputs.html import svg_plots
from kvdiag.outputs.html.axes import shares
from kvdiag.outputs.html.downsample import pauses, runs
from kvdiag.outputs.html.markup import Html, element, joined
from kvdiag.outputs.html.svg_plots import Line, Plot

MAX_LINES = 8

Points = Sequence[tuple[float, float | None]]
"""Moments in ascending time, and what was seen; `None` where it was looked for and not seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time that is shown."""

    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_seconds - self.start_seconds


def chart(title: str, lines: Mapping[str, Points], window: Window) -> Html:
    """The lines with their scale, and below them what each is, its newest and its highest value."""
    within = {
        name: [point for point in points if window.start_seconds <= point[0] <= window.end_seconds]
        for name, points in islice(lines.items(), MAX_LINES)
    }
    if not any(value is not None for points in within.values() for _, value in points):
        return element("p", "Not seen in this time.", class_="unknown")
    plot = Plot(
        key=title.lower().replace(" ", "-"),
        title=title,
        description="Shares over time; a break is time in which nothing was read.",
        start_seconds=window.start_seconds,
        end_seconds=window.end_seconds,
        scale=shares(),
        lines=tuple(_line(number, name, points) for number, (name, points) in enumerate(within.items())),
    )
    legend = [_legend(number, name, points) for number, (name, points) in enumerate(within.items())]
    if len(lines) > MAX_LINES:
        legend.append(element("li", f"and {len(lines) - MAX_LINES} more"))
    return joined(svg_plots.svg(plot), element("ul", *legend, class_="legend"))


def _line(number: int, name: str, points: Points) -> Line:
    times = [moment for moment, _ in points]
    return Line(name=name, runs=runs(times, [value for _, value in points], pauses(times)), style=f"s{number}")


def _legend(number: int, name: str, points: Points) -> Html:
    seen = [value for _, value in points if value is not None]
    newest = points[-1][1] if points else None
    told = "not seen now" if newest is None else f"{newest:.1%}"
    most = f", at most {max(seen):.1%}" if seen else ""
    return element("li", element("i", class_=f"swatch s{number}"), f"{name}: {told}{most}")
