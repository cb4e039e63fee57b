"""Colours, units and settings of a board's panels, as Grafana has them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
Points = list[tuple[float, float]]
Marks = Sequence[tuple[float, str]]

NAMED = {
    "green": "#73bf69", "dark-green": "#37872d", "orange": "#ff9830", "light-orange": "#ffb357", "red": "#f2495c",
    "dark-red": "#c4162a", "blue": "#5794f2", "semi-dark-blue": "#3274d9", "yellow": "#fade2a", "purple": "#b877d9",
    "light-purple": "#ca95e5", "super-light-purple": "#deb6f2", "semi-dark-purple": "#a352cc", "text": "#ccccdc",
}  # fmt: skip
"""Grafana's named colours, those that the boards use."""

PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0", "#508642", "#cca300")
"""Its `palette-classic`."""

SECONDS = ((86400 * 7, "weeks"), (86400, "days"), (3600, "hours"), (60, "mins"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
SCALES = {
    "bytes": (1024, ("B", "KiB", "MiB", "GiB", "TiB")),
    "short": (1000, ("", "K", "Mil", "Bil")),
    "cps": (1000, ("c/s", "K c/s", "M c/s")),
    "ops": (1000, ("ops/s", "K ops/s", "M ops/s")),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a graph: its name as in the legend, its points, and the settings that hold for it."""

    name: str
    points: Points
    settings: Json
    color: str


def settings_of(panel: Json, name: str) -> dict[str, Any]:
    """The panel's field settings with the overrides for one name, nested ones as `custom.x`."""
    defaults = panel["fieldConfig"]["defaults"]
    flat = {**defaults, **{f"custom.{key}": value for key, value in defaults.get("custom", {}).items()}}
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == name:
            flat |= {one["id"]: one["value"] for one in override["properties"]}
    return flat


def written(value: float | None, settings: Json) -> tuple[str, str]:
    """A value as its unit and mappings have it, and its colour."""
    for mapping in settings.get("mappings", ()):
        options = mapping["options"]
        found = options.get("result") if mapping["type"] == "special" and value is None else options.get(_plain(value))
        if found:
            return found["text"], color_of(found["color"])
    if value is None:
        return settings["noValue"], NAMED["text"]
    return measured(value, settings.get("unit", "none")), threshold_color(value, settings)


def color_of(name: str) -> str:
    """A colour by Grafana's name of it, or as it is written."""
    return NAMED.get(name, name)


def threshold_color(value: float, settings: Json) -> str:
    """The colour of the last threshold that the value reaches."""
    steps = settings.get("thresholds", {"steps": [{"color": "text", "value": None}]})["steps"]
    return color_of([one["color"] for one in steps if one["value"] is None or value >= one["value"]][-1])


def measured(value: float, unit: str) -> str:
    """A number in a unit of Grafana's, to three digits as Grafana rounds it."""
    if unit == "percentunit":
        return f"{_plain(value * 100)}%"
    if unit == "s":
        size, name = next((one for one in SECONDS if abs(value) >= one[0]), (1, "s"))
        number = _plain(value / size)
        return f"{number} {name.removesuffix('s') if number == '1' and size >= SECONDS[3][0] else name}"
    base, names = SCALES.get(unit, (1000, ("",)))
    power = min(int(math.log(abs(value), base) + 1e-9) if abs(value) >= base else 0, len(names) - 1)
    return f"{_plain(value / base**power)} {names[power]}".strip()


def _plain(value: float | None) -> str:
    if value is None:
        return ""
    rounded = float(f"{value:.9g}")
    whole = rounded == int(rounded)
    return str(int(rounded)) if whole else f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
