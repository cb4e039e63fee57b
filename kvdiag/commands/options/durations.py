"""Durations on the command line: 90s, 12m, 2h."""

from __future__ import annotations

import re
from typing import Any

import click

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """Seconds between two bounds, given as a number and its unit."""

    name = "duration"

    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        """Keep the bounds."""
        self._least, self._most = least_seconds, most_seconds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds of a text such as 12m."""
        found = re.fullmatch(r"(\d{1,6})(s|m|h)", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no duration: give a whole number and its unit, such as 90s, 12m or 1h", param, ctx)
        seconds = int(found[1]) * UNITS[found[2]]
        if not self._least <= seconds <= self._most:
            self.fail(f"{value} is outside {_told(self._least)} to {_told(self._most)}", param, ctx)
        return seconds


def _told(seconds: float) -> str:
    unit = next(unit for unit, size in reversed(UNITS.items()) if seconds >= size)
    return f"{seconds / UNITS[unit]:g}{unit}"
