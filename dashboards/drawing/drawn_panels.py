"""The kinds of panel that the boards use, each drawn as Grafana lays it out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from dashboards.drawing.drawn_values import (
    Json,
    Line,
    Marks,
    Points,
    color_of,
    measured,
    settings_of,
    written,
)

LEGEND_ROW, LEGEND_WIDTH = 19, 300
LETTER = 6.9
"""Width of a letter on an axis."""

TIME_STEPS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600)

Span = tuple[float, float]


def stat(panel: Json, result: Sequence[Any], width: float) -> str:
    """One number, as large as fits."""
    settings = settings_of(panel, "")
    text, color = written(float(result[0]["value"][1]) if result else None, settings)
    size = min(40, 1.45 * (width - 16) / max(len(text), 1))
    kind, look = ("value full", "background") if panel["options"]["colorMode"] == "background" else ("value", "color")
    return f'<div class="{kind}" style="font-size:{size:.0f}px;{look}:{color}">{escape(text)}</div>'


def table(panel: Json, answers: Sequence[Sequence[Any]], now_seconds: float) -> str:
    """Rows merged by the labels that all queries keep, columns ordered and renamed."""
    organize = next(one["options"] for one in panel["transformations"] if one["id"] == "organize")
    frames = [
        [{**one["metric"], f"Value #{target['refId']}": float(one["value"][1])} for one in result]
        for target, result in zip(panel["targets"], answers, strict=True)
        if result
    ]
    rows = _merged(frames)
    order: dict[str, int] = organize["indexByName"]
    fields = [name for name in order if not organize["excludeByName"].get(name) and any(name in row for row in rows)]
    renamed = organize["renameByName"]
    by = panel["options"]["sortBy"][0]
    key = next(name for name in order if renamed[name] == by["displayName"])
    rows.sort(key=lambda row: (key in row, row.get(key, 0)), reverse=by["desc"])
    head = "".join(_cell("th", renamed[name], name) for name in fields)
    body = "".join(
        f"<tr>{''.join(_shown(panel, renamed[name], name, row.get(name), now_seconds) for name in fields)}</tr>"
        for row in rows
    )
    return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'


def _merged(frames: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row of all the rows whose common labels agree, as far as no field has two values."""
    shared = set.intersection(*({*row} for frame in frames for row in frame)) if frames else set()
    rows: list[dict[str, Any]] = []
    for one in (row for frame in frames for row in frame):
        # Beyond the shared labels, a field that is missing on one side agrees with any value.
        agree = (
            known for known in rows if all(name not in known or known[name] == one[name] for name in {*shared, *one})
        )
        if (known := next(agree, None)) is None:
            rows.append(dict(one))
        else:
            known.update(one)
    return rows


def _shown(panel: Json, heading: str, name: str, value: str | float | None, now_seconds: float) -> str:
    settings = settings_of(panel, heading)
    look = ""
    if isinstance(value, str):
        mapped = next((one["options"].get(value) for one in settings.get("mappings", ())), None)
        text, color = (mapped["text"], color_of(mapped["color"])) if mapped else (value, color_of("text"))
    elif value is not None and settings["unit"] == "dateTimeFromNow":
        minutes = round((now_seconds - value / 1000) / 60)
        text, color = f"{minutes} minutes ago" if minutes > 1 else "a minute ago", color_of("text")
    else:
        text, color = written(value, settings)
    if settings["custom.cellOptions"]["type"] == "color-text":
        look = f' style="color:{color}"'
    return _cell("td", text, name, look)


def _cell(tag: str, text: str, name: str, look: str = "") -> str:
    side = ' class="number"' if name.startswith("Value #") else ""
    return f"<{tag}{side}{look}>{escape(text)}</{tag}>"


def timeline(panel: Json, lines: Sequence[Line], span: Span, step: float, size: Span) -> str:
    """A band for each series, its states in their colours; a gap where there is no value."""
    width, height = size
    states = [one for mapping in panel["fieldConfig"]["defaults"]["mappings"] for one in mapping["options"].values()]
    left = max(len(line.name) for line in lines) * LETTER + 18
    across = _Scale(span, (left, width - 14))
    each = (height - 30 - LEGEND_ROW) / len(lines)
    parts = []
    for number, line in enumerate(lines):
        y = number * each
        parts.append(
            f'<text x="{left - 8:.0f}" y="{y + each / 2 + 4:.1f}" text-anchor="end">{escape(line.name)}</text>'
        )
        for start, end, value in _states(line.points, step):
            x, until = across(start), min(across(end), width - 14)
            color = written(value, line.settings)[1]
            opacity = line.settings["custom.fillOpacity"] / 100
            parts.append(
                f'<rect x="{x:.1f}" y="{y + each * 0.1:.1f}" width="{until - x:.1f}" height="{each * 0.8:.1f}" '
                f'fill="{color}" fill-opacity="{opacity}"/>'
            )
    legend = "".join(
        f'<span><i style="background:{color_of(one["color"])}"></i>{escape(one["text"])}</span>' for one in states
    )
    drawn = _svg(width, height - LEGEND_ROW, [*parts, *_times(across, height - 26 - LEGEND_ROW, grid=False)])
    return f'{drawn}<div class="legend" style="left:9px;bottom:4px">{legend}</div>'


def _states(points: Points, step: float) -> Iterator[tuple[float, float, float]]:
    """From when until when each value held."""
    begun = 0
    for place, (at, value) in enumerate(points):
        last = place + 1 == len(points)
        if last or points[place + 1][1] != value:
            if not math.isnan(value):
                yield points[begun][0], at + step, value
            begun = place + 1


def graph(panel: Json, lines: Sequence[Line], marks: Marks, span: Span, size: Span) -> str:
    """Lines or stacked areas over time, thresholds across, marks of alerts and restarts, and the legend as a table."""
    width, height = size
    defaults = settings_of(panel, "")
    unit = defaults["unit"]
    if panel["options"]["legend"]["placement"] == "right":
        width -= LEGEND_WIDTH
        shown, legend, place = len(lines), 0, f"left:{width:.0f}px;top:34px"
    else:  # at the bottom it has a third of the panel; Grafana scrolls the rest
        shown = min(len(lines), max(1, int(0.35 * (height + 30) / LEGEND_ROW) - 1))
        legend, place = LEGEND_ROW * (shown + 1) + 6, "left:9px;bottom:4px"
    stacked = list(_stacked(lines))
    values = [value for _, low, high in stacked for value in (*low, *high) if not math.isnan(value)]
    least, most, ticks = _range(values, defaults)
    labels = [re.sub(r"(\.\d*?)0+(?=\D|$)", lambda found: found[1].rstrip("."), measured(one, unit)) for one in ticks]
    left = max(map(len, labels)) * LETTER + 16
    bottom = height - legend - 24
    across, up = _Scale(span, (left, width - 14)), _Scale((least, most), (bottom, 6))
    parts = [
        f'<path d="M{left:.0f} {up(tick):.1f}H{width - 14:.0f}" stroke="#2a2c31"/>'
        f'<text x="{left - 7:.0f}" y="{up(tick) + 4:.1f}" text-anchor="end">{label}</text>'
        for tick, label in zip(ticks, labels, strict=True)
    ]
    parts += _times(across, bottom, grid=True)
    parts += [part for line, low, high in stacked for part in _area(line, low, high, across, up)]
    if "custom.thresholdsStyle" in defaults:
        parts += [
            f'<path d="M{left:.0f} {up(one["value"]):.1f}H{width - 14:.0f}" stroke="{color_of(one["color"])}" '
            'stroke-dasharray="8 8" stroke-opacity="0.8"/>'
            for one in defaults["thresholds"]["steps"]
            if one["value"] is not None and least <= one["value"] <= most
        ]
    for at, color in marks:
        x = across(at)
        parts.append(f'<path d="M{x:.1f} 6V{bottom:.1f}" stroke="{color}" stroke-dasharray="4 4"/>')
        parts.append(f'<path d="M{x - 5:.1f} {bottom + 5:.1f}h10l-5 -6z" fill="{color}"/>')
    return _svg(width, height - legend, parts) + _legend(lines[:shown], unit, place)


def _legend(lines: Sequence[Line], unit: str, place: str) -> str:
    head = '<th>Name</th><th class="number">Last *</th><th class="number">Max</th>'
    body = "".join(
        f'<tr><td><i style="background:{line.color}"></i>{escape(line.name)}</td>'
        + "".join(f'<td class="number">{measured(value, unit)}</td>' for value in (known[-1], max(known)))
        + "</tr>"
        for line in lines
        if (known := [value for _, value in line.points if not math.isnan(value)])
    )
    return f'<div class="legend" style="{place}"><table><tr>{head}</tr>{body}</table></div>'


def _stacked(lines: Sequence[Line]) -> Iterator[tuple[Line, list[float], list[float]]]:
    """Each line with its lower and upper edge: on one another where they are stacked, else from 0."""
    below: dict[float, float] = {}
    for line in lines:
        low = [0.0] * len(line.points)
        if line.settings.get("custom.stacking", {"mode": "none"})["mode"] == "normal":
            low = [below.get(at, 0.0) for at, _ in line.points]
            below |= {
                at: base + value for (at, value), base in zip(line.points, low, strict=True) if not math.isnan(value)
            }
        yield line, low, [base + value for (_, value), base in zip(line.points, low, strict=True)]


def _area(line: Line, low: Sequence[float], high: Sequence[float], across: _Scale, up: _Scale) -> Iterator[str]:
    opacity = line.settings["custom.fillOpacity"] / 100
    dash = line.settings.get("custom.lineStyle", {}).get("dash")
    pieces: list[list[tuple[float, float, float]]] = [[]]
    for (at, _), base, top in zip(line.points, low, high, strict=True):
        if math.isnan(top):
            pieces.append([])
        else:
            pieces[-1].append((across(at), up(base), up(top)))
    for piece in filter(None, pieces):
        edge = "L".join(f"{x:.1f} {top:.1f}" for x, _, top in piece)
        floor = "L".join(f"{x:.1f} {base:.1f}" for x, base, _ in reversed(piece))
        yield f'<path d="M{edge}L{floor}Z" fill="{line.color}" fill-opacity="{opacity}"/>'
        dashes = f' stroke-dasharray="{" ".join(map(str, dash))}"' if dash else ""
        wide = line.settings["custom.lineWidth"]
        yield f'<path d="M{edge}" fill="none" stroke="{line.color}" stroke-width="{wide}"{dashes}/>'


def _range(values: Sequence[float], settings: Mapping[str, Any]) -> tuple[float, float, list[float]]:
    """The ends of the axis and the values at its lines: round ones, of 1024 where the unit is bytes."""
    low = settings.get("min", min(0.0, *values))
    high = settings.get("max", max(values))
    if high <= low:
        high = low + 1
    if "max" not in settings:
        high += 0.08 * (high - low)
    if low < 0:
        low -= 0.08 * (high - low)
    rough = (high - low) / 5
    if settings["unit"] == "bytes":
        step = 2.0 ** math.ceil(math.log2(rough))
    else:
        base = next((one for one in (86400, 3600, 60) if rough >= one), 1) if settings["unit"] == "s" else 1
        power = base * 10 ** math.floor(math.log10(rough / base))
        step = power * next(one for one in (1, 2, 2.5, 5, 10) if one * power >= rough)
    first = math.ceil(low / step)
    return low, high, [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _times(across: _Scale, y: float, *, grid: bool) -> list[str]:
    start, end = across.values
    step = next(one for one in TIME_STEPS if (end - start) / one <= (across.pixels[1] - across.pixels[0]) / 70)
    parts = []
    at = math.ceil(start / step) * step
    while at <= end:
        x = across(at)
        if grid:
            parts.append(f'<path d="M{x:.1f} 6V{y:.1f}" stroke="#2a2c31"/>')
        if x < across.pixels[1] - 10:
            text = datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S" if step % 60 else "%H:%M")
            parts.append(f'<text x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle">{text}</text>')
        at += step
    return parts


class _Scale:
    """Values to pixels."""

    def __init__(self, values: Span, pixels: Span) -> None:
        self.values, self.pixels = values, pixels

    def __call__(self, value: float) -> float:
        (low, high), (first, last) = self.values, self.pixels
        return first + (value - low) / (high - low) * (last - first)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return f'<svg width="{width:.0f}" height="{height:.0f}">{"".join(parts)}</svg>'
