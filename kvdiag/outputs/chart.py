"""Lines over time as SVG: shares from 0 to 1, with a hole where nothing was seen. Pure; no script, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from kvdiag.outputs.markup import Html, element, joined

WIDTH, HEIGHT = 720, 220
LEFT, TOP, BOTTOM = 70, 12, 34
BUCKETS = 240
"""Points of a line at most: each is the highest of what it stands for."""

MAX_LINES = 8
HOLE_SECONDS = 180.0
"""Older minutes are kept as one reading each: two that are further apart have something missing between them."""

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
    shown = dict(islice(lines.items(), MAX_LINES))
    drawn = [
        element("path", d=path, class_=f"line s{number}")
        for number, points in enumerate(shown.values())
        if (path := _path(points, window))
    ]
    picture = element(
        "svg",
        element("title", title),
        *_scale(window),
        *drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=title,
    )
    legend = [_legend(number, name, points) for number, (name, points) in enumerate(shown.items())]
    if len(lines) > MAX_LINES:
        legend.append(element("li", f"and {len(lines) - MAX_LINES} more"))
    if not any(value is not None for points in shown.values() for _, value in points):
        return element("p", "Not seen in this time.", class_="unknown")
    return joined(picture, element("ul", *legend, class_="legend"))


def _scale(window: Window) -> Iterator[Html]:
    for share in (0.0, 0.5, 1.0):
        height = _y(share)
        yield element("line", x1=LEFT, x2=WIDTH, y1=height, y2=height, class_="grid")
        yield element("text", f"{share:.0%}", x=LEFT - 6, y=height + 5, text_anchor="end")
    middle = (window.start_seconds + window.end_seconds) / 2
    for moment, left, anchor in (
        (window.start_seconds, LEFT, "start"),
        (middle, (LEFT + WIDTH) / 2, "middle"),
        (window.end_seconds, WIDTH, "end"),
    ):
        yield element("text", clock(moment), x=left, y=HEIGHT - 8, text_anchor=anchor)


def clock(seconds: float) -> str:
    """A moment as hours and minutes of UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M")


def _legend(number: int, name: str, points: Points) -> Html:
    seen = [value for _, value in points if value is not None]
    newest = points[-1][1] if points else None
    told = "not seen now" if newest is None else f"{newest:.1%}"
    most = f", at most {max(seen):.1%}" if seen else ""
    return element("li", element("i", class_=f"swatch s{number}"), f"{name}: {told}{most}")


def _path(points: Points, window: Window) -> str:
    """SVG's path through the highest of each bucket; it begins anew after a hole."""
    path: list[str] = []
    before: float | None = None
    for moment, value in _thinned(points, window):
        if value is None:
            before = None
            continue
        left = LEFT + (moment - window.start_seconds) / window.seconds * (WIDTH - LEFT)
        whole = before is not None and moment - before <= max(HOLE_SECONDS, 2 * window.seconds / BUCKETS)
        # A lone reading is a dot, not nothing: the line's round ends show a path of no length.
        path.append(f"{'L' if whole else 'M'}{left:.1f} {_y(value):.1f}" + ("" if whole else "h0"))
        before = moment
    return "".join(path)


def _thinned(points: Points, window: Window) -> Iterator[tuple[float, float | None]]:
    kept: tuple[float, float | None] | None = None
    bucket = -1
    for moment, value in points:
        if not window.start_seconds <= moment <= window.end_seconds:
            continue
        here = int((moment - window.start_seconds) / window.seconds * BUCKETS)
        if here != bucket and kept is not None:
            yield kept
        higher = kept is None or kept[1] is None or (value is not None and value >= kept[1])
        if here != bucket or higher:
            kept = (moment, value)
        bucket = here
    if kept is not None:
        yield kept


def _y(share: float) -> float:
    return TOP + (1.0 - min(max(share, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM)
