"""Plots over time and bars of parts as SVG, for every page that shows any. Pure; no script, no network.

An SVG is as wide as its place: positions are in per cent, lines scale inside a nested view box, and text keeps its
size. Missing samples break a line; they are never drawn as zero. Colours and line styles are classes of `page.css`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from kvdiag.outputs.html.axes import Scale, moments
from kvdiag.outputs.html.downsample import Run, thinned
from kvdiag.outputs.html.markup import Html, element, joined

COLUMNS = 480
"""Of a plot on a wide page: two pixels each."""

HEIGHT = 150
TOP = 16
"""Pixels above the plot for the names of the bands."""

COMPASS = 2000
"""The nested view box: fine enough for integer coordinates."""

MAX_LINES = 8

CHARACTER_SHARE = 1.35
"""Per cent of the width that a character of a band's name takes where two plots stand side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure over time; `style` is one or more of the classes s0..s7, dashed, dotted, stepped."""

    name: str
    runs: Sequence[Run]
    style: str = "s0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A time interval that is shaded: `strong` while load was offered.

    `label` and, if there is room up to the next label, `name` stand above its beginning.
    """

    start_seconds: float
    end_seconds: float
    strong: bool = False
    label: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A limit across the whole plot, with its label above it: the scale should extend beyond it."""

    value: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The expected value at a moment (a bar) and the measured one (a dot), either of which may be unknown."""

    at_seconds: float
    expected: float | None
    measured: float | None
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A moment at which something failed."""

    at_seconds: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines on one scale over one time interval. `key` is the plot's own within its page."""

    key: str
    title: str
    description: str
    start_seconds: float
    end_seconds: float
    scale: Scale
    lines: tuple[Line, ...]
    bands: tuple[Band, ...] = ()
    levels: tuple[Level, ...] = ()
    markers: tuple[Marker, ...] = ()
    events: tuple[Event, ...] = ()
    columns: int = COLUMNS

    def across(self, seconds: float) -> float:
        """Where a moment is, in per cent of the width."""
        whole = max(self.end_seconds - self.start_seconds, 1e-9)
        return min(max((seconds - self.start_seconds) / whole, 0.0), 1.0) * 100.0

    def down(self, value: float) -> float:
        """Where a value is, in pixels below the top."""
        return TOP + (1.0 - self.scale.share(value)) * HEIGHT


def svg(plot: Plot) -> Html:
    """The plot."""
    lines = [element("path", d=path, class_=f"line {line.style}") for line in plot.lines if (path := _path(line, plot))]
    return _picture(
        plot.key,
        plot.title,
        plot.description,
        *_bands(plot),
        *_grid(plot),
        *_levels(plot),
        element(
            "svg",
            *lines,
            y=TOP,
            width="100%",
            height=HEIGHT,
            viewBox=f"0 0 {COMPASS} {COMPASS}",
            preserveAspectRatio="none",
            class_="stretched",
        ),
        *_events(plot),
        *_markers(plot),
        class_="plot",
        height=TOP + HEIGHT + 18,
    )


def _picture(key: str, title: str, description: str, *content: Html, **attributes: str | float) -> Html:
    return element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", description, id=f"{key}-desc"),
        *content,
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        **attributes,
    )


def legend(plot: Plot) -> Html:
    """The legend of a plot's lines and markers."""
    items = [element("li", _key(line.style), line.name) for line in plot.lines]
    if plot.markers:
        items += [element("li", _key("expected"), "expected"), element("li", _key("measured"), "measured")]
    if plot.events:
        items.append(element("li", _key("event"), "failed"))
    return element("ul", *items, class_="legend")


def _key(style: str) -> Html:
    if style == "measured":
        drawn = element("circle", cx=11, cy=5, r=3.5, class_=style)
    else:
        drawn = element("path", d="M1 5H21", class_=style if style in ("expected", "event") else f"line {style}")
    return element("svg", drawn, width=22, height=10, aria_hidden="true", class_="key")


def _bands(plot: Plot) -> Iterator[Html]:
    taken = 0.0
    for band in plot.bands:
        left, right = plot.across(band.start_seconds), plot.across(band.end_seconds)
        yield element(
            "rect",
            x=f"{left:.2f}%",
            width=f"{max(right - left, 0.15):.2f}%",
            y=TOP,
            height=HEIGHT,
            class_="offered" if band.strong else "band",
        )
    named = [band for band in plot.bands if band.label]
    for band, after in zip_longest(named, named[1:]):
        end = 100.0 if after is None else plot.across(after.start_seconds)
        left = max(plot.across(band.start_seconds), taken)
        room = (end - left) / CHARACTER_SHARE
        if room < len(band.label):
            continue
        fits = len(band.label) + len(band.name) + 1 <= room
        name = element("tspan", f" {band.name}", class_="wide") if fits else ""
        yield element("text", band.label, name, x=f"{left:.2f}%", y=TOP - 5, class_="step")
        taken = left + CHARACTER_SHARE * (len(band.label) + 1)


def _grid(plot: Plot) -> Iterator[Html]:
    for value, label in plot.scale.ticks:
        height = f"{plot.down(value):.1f}"
        yield element("line", x1="0%", x2="100%", y1=height, y2=height, class_="zero" if value == 0 else "grid")
        yield element("text", label, x=-7, y=height, dy="0.32em", text_anchor="end")
    foot = TOP + HEIGHT
    for number, (moment, label) in enumerate(moments(plot.start_seconds, plot.end_seconds)):
        left = plot.across(moment)
        anchor = "start" if left < 4 else "end" if left > 96 else "middle"  # noqa: PLR2004 - the plot's own edges
        odd = " wide" if number % 2 else ""  # on a narrow page there is room for every second one
        yield element("line", x1=f"{left:.2f}%", x2=f"{left:.2f}%", y1=foot, y2=foot + 4, class_="tick")
        yield element("text", label, x=f"{left:.2f}%", y=foot + 15, text_anchor=anchor, class_=f"time{odd}")


def _levels(plot: Plot) -> Iterator[Html]:
    for level in plot.levels:
        height = plot.down(level.value)
        yield element("line", x1="0%", x2="100%", y1=f"{height:.1f}", y2=f"{height:.1f}", class_="level")
        yield element("text", level.label, x="0.5%", y=f"{height - 4:.1f}", class_="halo")


def _events(plot: Plot) -> Iterator[Html]:
    for event in plot.events:
        left = f"{plot.across(event.at_seconds):.2f}%"
        line = element("line", x1=left, x2=left, y1=TOP, y2=TOP + HEIGHT, class_="event")
        yield element("g", element("title", event.title), line)


def _markers(plot: Plot) -> Iterator[Html]:
    for marker in plot.markers:
        left = f"{plot.across(marker.at_seconds):.2f}%"
        drawn = []
        if marker.expected is not None:
            foot = f"{plot.down(marker.expected):.1f}"
            drawn.append(element("svg", element("path", d="M-10 0H10", class_="expected"), x=left, y=foot))
        if marker.measured is not None:
            drawn.append(element("circle", cx=left, cy=f"{plot.down(marker.measured):.1f}", r=3.5, class_="measured"))
        yield element("g", element("title", marker.title), *drawn, class_="marker")


def _path(line: Line, plot: Plot) -> str:
    """The line as SVG's path, in steps relative to the last point; a lone sample is a dot."""
    parts: list[str] = []
    scale = COMPASS / max(plot.end_seconds - plot.start_seconds, 1e-9)
    for times, values in thinned(line.runs, plot.start_seconds, plot.end_seconds, plot.columns):
        before: tuple[int, int] | None = None
        held = 0  # a level interval is one step, however many samples it has
        for time, value in zip(times, values, strict=True):
            here = (round((time - plot.start_seconds) * scale), round((1.0 - plot.scale.share(value)) * COMPASS))
            if before is None:
                parts.append(f"M{here[0]} {here[1]}h0")
            else:
                across, down = here[0] - before[0], here[1] - before[1]
                if "stepped" in line.style and down:
                    held, across = held + across, 0
                if down == 0:
                    held += across
                else:
                    parts.append(f"h{held}" if held else "")
                    parts.append(f"l{across} {down}" if across else f"v{down}")
                    held = 0
            before = here
        parts.append(f"h{held}" if held else "")
    return "".join(parts)


def bar(key: str, title: str, parts: Sequence[tuple[str, float, str]], whole: float) -> Html:
    """Parts (class, size, title) next to one another to the scale of the whole. Negative sizes are not drawn."""
    drawn_parts = [part for part in parts if part[1] > 0]
    whole = max(whole, sum(size for _, size, _ in drawn_parts), 1e-9)
    left = 0.0
    drawn = []
    for style, size, name in drawn_parts:
        share = size / whole * 100.0
        place = {"x": f"{left:.3f}%", "width": f"{share:.3f}%"}
        drawn.append(element("rect", element("title", name), **place, height="100%", class_=f"part {style}"))
        left += share
    return _picture(key, title, ", ".join(name for _, _, name in parts), *drawn, class_="bar")


def figure(plot: Plot, *more: str) -> Html:
    """A plot with its title and its legend, and what else belongs to it."""
    return element("figure", element("figcaption", plot.title), legend(plot), svg(plot), joined(*more), class_="chart")


def extremes(lines: Sequence[Line]) -> tuple[float, float]:
    """The lowest and the highest value of all lines."""
    values = [values for line in lines for _, values in line.runs]
    return min(map(min, values), default=0.0), max(map(max, values), default=0.0)


def numbered(lines: Sequence[Line], style: str = "") -> tuple[list[Line], str]:
    """The first lines in the colours of their places, and how many they are if not all are drawn."""
    shown = [replace(line, style=f"s{place}{style}") for place, line in enumerate(lines[:MAX_LINES])]
    return shown, f" ({MAX_LINES} of {len(lines)})" if len(lines) > MAX_LINES else ""
