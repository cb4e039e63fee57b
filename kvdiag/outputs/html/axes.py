"""The ticks of a plot's axes and their labels. Pure.

The labels of one axis share a unit and a number of decimals, which `kvdiag.formatting` does not know of.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from kvdiag.formatting import LAST_SECONDS, UNITS, format_count

MAX_TICKS = 5
MAX_MOMENTS = 6

MIN_SHARE = 0.02
"""Least height of an axis of ratios, so that noise does not look like growth."""

NEAR_RATIO = 0.9
"""From here on an axis of ratios ends at 1, the limit."""

DAY_SECONDS = 86_400
MINUTE_SECONDS = 60
STEPS_SECONDS = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10_800, 21_600, 43_200),
    *(DAY_SECONDS, 2 * DAY_SECONDS, 7 * DAY_SECONDS, 30 * DAY_SECONDS, 365 * DAY_SECONDS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A vertical axis: its lowest and highest value, and its ticks with their labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """The place of a value between the lowest (0) and the highest (1)."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def counts(low: float, high: float) -> Scale:
    """An axis of whole things: blocks, requests."""
    high = max(high, low + 1.0)
    step = _decimal(max((high - low) / MAX_TICKS, 1.0))
    return Scale(low=low, high=high, ticks=tuple((value, format_count(value)) for value in _multiples(low, high, step)))


def sizes(low: float, high: float, *, signed: bool = False) -> Scale:
    """An axis of bytes, in powers of two; `signed` for a change, with a plus for growth."""
    high = max(high, low + 1.0)
    step = 2.0 ** math.ceil(math.log2((high - low) / MAX_TICKS))
    values = list(_multiples(low, high, step))
    most = max(map(abs, values), default=0.0)
    unit, size = next((one for one in UNITS if most >= one[1]), ("B", 1))
    digits = max(math.ceil(-math.log2(step / size)), 0)  # as many binary places take as many decimal ones
    return Scale(
        low=low,
        high=high,
        ticks=tuple((value, _size(value / size, unit, digits, signed=signed)) for value in values),
    )


def shares(low: float, high: float) -> Scale:
    """An axis for ratios within these bounds: from 0 unless they are far above it, to 1 where they come near."""
    high = max(high, low + MIN_SHARE)
    spare = (high - low) / 8
    low = max(low - spare, 0.0) if low > high / 2 else 0.0
    high = 1.0 if high + spare >= NEAR_RATIO else high + spare
    step = _decimal((high - low) / MAX_TICKS)
    digits = max(-math.floor(math.log10(step * 100.0) + 1e-9), 0)
    return Scale(
        low=low, high=high, ticks=tuple((at, f"{100 * at:.{digits}f} %") for at in _multiples(low, high, step))
    )


def _decimal(least: float) -> float:
    """The least step of 1, 2 or 5, or these times a power of ten."""
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= least)


def _multiples(low: float, high: float, step: float) -> Iterator[float]:
    first = math.ceil(low / step)
    for number in range(first, first + 2 * MAX_TICKS):
        if number * step > high:
            return
        yield number * step


def _size(value: float, unit: str, digits: int, *, signed: bool) -> str:
    if value == 0:
        return "0"
    return f"{value:{'+' if signed else ''},.{digits}f} {unit}"


def moments(start_seconds: float, end_seconds: float) -> tuple[tuple[float, str], ...]:
    """The ticks of a time axis, at whole seconds, minutes, hours or days of UTC."""
    span = max(end_seconds - start_seconds, 1.0)
    step = next((one for one in STEPS_SECONDS if span / one <= MAX_MOMENTS), STEPS_SECONDS[-1])
    found = islice(_multiples(start_seconds, end_seconds, step), MAX_MOMENTS + 1)
    return tuple((float(at), _moment(round(at), step)) for at in found)


def _moment(seconds: int, step: int) -> str:
    at = datetime.fromtimestamp(min(seconds, LAST_SECONDS), UTC)
    if step < MINUTE_SECONDS:
        return at.strftime("%H:%M:%S")
    return at.strftime("%b %d" if step >= DAY_SECONDS or seconds % DAY_SECONDS == 0 else "%H:%M")
