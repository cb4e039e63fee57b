"""The kinds of panel that the boards use: a number, lines, states over time, a table. None that Grafana deprecates."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dashboards.grafana import Json, Panel, Target

NEEDS_AGENT = "No data: needs the agent in the server"


def thresholds(*steps: tuple[float | None, str]) -> Json:
    """Colours from a value on, ascending; the first from `None`, which is everything below."""
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for value, color in steps]}


def by_name(name: str, **properties: Any) -> Json:
    """Other settings for the series or column of one name; `custom_x` stands for `custom.x`."""
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": key.replace("custom_", "custom."), "value": value} for key, value in properties.items()],
    }


def fixed(color: str) -> Json:
    """One colour, whatever the value."""
    return {"mode": "fixed", "fixedColor": color}


def stat(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str,
    steps: Json,
    width: int,
    no_value: str,
    mappings: Sequence[Json] = (),
    background: bool = False,
    no_value_color: str = "purple",
) -> Panel:
    """One number as it is now. `no_value` is what stands there when nothing is known.

    That needs a colour of its own: Grafana gives a missing value the lowest threshold's, which often is green.
    """
    missing = {"color": no_value_color, "index": len(mappings), "text": no_value}
    return Panel(
        kind="stat",
        title=title,
        description=description,
        targets=(Target(expr=expr, instant=True),),
        width=width,
        height=4,
        defaults={
            "color": {"mode": "thresholds"},
            "mappings": [*mappings, {"type": "special", "options": {"match": "null+nan", "result": missing}}],
            "noValue": no_value,
            "thresholds": steps,
            "unit": unit,
        },
        options={
            "colorMode": "background" if background else "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "value",
        },
    )


def graph(
    title: str,
    description: str,
    *targets: Target,
    unit: str,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    least: float | None = 0,
    most: float | None = None,
    steps: Json | None = None,
    span_seconds: int = 0,
    legend_right: bool = False,
    no_value: str = "No data",
    overrides: Sequence[Json] = (),
) -> Panel:
    """Lines over time, or areas on one another; `steps` are drawn as lines across.

    A line goes on over gaps up to `span_seconds`. Without `least` the axis begins at 0, or below negative values.
    """
    custom: Json = {"fillOpacity": 60 if stacked else 8, "lineWidth": 1, "showPoints": "never"}
    custom["spanNulls"] = span_seconds * 1000 or False
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    if steps is not None:
        custom["thresholdsStyle"] = {"mode": "dashed"}
    defaults: Json = {"color": {"mode": "palette-classic"}, "custom": custom, "noValue": no_value, "unit": unit}
    if steps is not None:
        defaults["thresholds"] = steps
    if least is not None:
        defaults["min"] = least
    else:
        custom["axisSoftMin"] = 0
    if most is not None:
        defaults["max"] = most
    return Panel(
        kind="timeseries",
        title=title,
        description=description,
        targets=targets,
        width=width,
        height=height,
        defaults=defaults,
        options={
            "legend": {
                "calcs": ["lastNotNull", "max"],
                "displayMode": "table",
                "placement": "right" if legend_right else "bottom",
                "showLegend": True,
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        overrides=overrides,
    )


def timeline(
    title: str,
    description: str,
    target: Target,
    *,
    mappings: Sequence[Json],
    steps: Json,
    width: int,
    height: int,
) -> Panel:
    """A band of states over time for each series: what was so, and since when. What was not seen is a hole."""
    return Panel(
        kind="state-timeline",
        title=title,
        description=description,
        targets=(target,),
        width=width,
        height=height,
        defaults={
            "color": {"mode": "thresholds"},
            "custom": {"fillOpacity": 75, "lineWidth": 0, "spanNulls": False},
            "mappings": list(mappings),
            "noValue": "No data",
            "thresholds": steps,
            "unit": "none",
        },
        options={
            "alignValue": "left",
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "mergeValues": True,
            "rowHeight": 0.85,
            "showValue": "never",
            "tooltip": {"mode": "single", "sort": "none"},
        },
    )


def table(
    title: str,
    description: str,
    *,
    columns: Mapping[str, str],
    keys: Mapping[str, str],
    width: int,
    height: int,
    sort_by: str,
    descending: bool = True,
    hidden: Collection[str] = (),
    overrides: Sequence[Json] = (),
) -> Panel:
    """A row for each combination of the labels `keys` (to their headings), a column for each query of `columns`.

    All queries must keep the same labels, or fewer of them: rows whose common labels agree become one. Columns that
    are `hidden` are asked for the sake of their labels.
    """
    letters = {heading: chr(ord("A") + place) for place, heading in enumerate(columns)}
    renamed = {**keys, **{f"Value #{letter}": heading for heading, letter in letters.items()}}
    return Panel(
        kind="table",
        title=title,
        description=description,
        targets=tuple(Target(expr=expr, instant=True, table=True) for expr in columns.values()),
        width=width,
        height=height,
        defaults={
            "custom": {"align": "auto", "cellOptions": {"type": "auto"}},
            "noValue": "-",
            "unit": "none",
        },
        options={
            "cellHeight": "sm",
            "footer": {"show": False},
            "showHeader": True,
            "sortBy": [{"desc": descending, "displayName": sort_by}],
        },
        overrides=overrides,
        transformations=(
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True, **{f"Value #{letters[heading]}": True for heading in hidden}},
                    "indexByName": {name: place for place, name in enumerate(renamed)},
                    "renameByName": renamed,
                },
            },
        ),
    )
