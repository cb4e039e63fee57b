"""Blocks of one window by hand, and what is judged of them. Sizes are in MB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from kvdiag.diagnosis.bank import Bank
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.window import Blocks, Trend, judged_window

MB = 10**6
FAST, MID, _, _ = DEFAULT_LIMITS.banks
COUNT = 60
NOISE = (1.0, -1.0, -1.0, 1.0)
"""Without a trend, and without a bend."""


def noisy(values: Sequence[float], deviation: float = 1.0) -> list[float]:
    """The values in MB as bytes, with noise around them."""
    return [(1000.0 + value + deviation * NOISE[step % 4]) * MB for step, value in enumerate(values)]


def rising(*rates: float) -> list[float]:
    """Pieces of equal length, each rising by so much in a block."""
    length = COUNT // len(rates)
    return list(accumulate((rate for rate in rates for _ in range(length)), initial=0.0))[:COUNT]


def stairs(places: Sequence[int], height: float = 60.0) -> list[float]:
    """A level that changes by `height` before each of these blocks."""
    return [sum(height * (step >= abs(place)) * (1 if place > 0 else -1) for place in places) for step in range(COUNT)]


def judge(
    middles: Sequence[float],
    bank: Bank = FAST,
    *,
    lows: Sequence[float] | None = None,
    load: Sequence[float] | None = None,
    beside: bool = False,
    minutes: int = 1,
) -> Trend:
    """A window of such blocks, with the load where it is told, and beside it where it may explain the bytes."""
    blocks = Blocks(
        middles=middles,
        lows=middles if lows is None else lows,
        beside=[load, list(accumulate(load, max))] if beside and load is not None else [],
        work=None if load is None else list(accumulate(load)),
        highest=None if load is None else list(accumulate(load, max)),
        minutes=minutes,
        idle_only=not beside,
    )
    found = judged_window(blocks, bank, DEFAULT_LIMITS)
    assert found is not None
    return found


def trend(**changes: object) -> Trend:
    """Growth by a byte a second, that nothing else explains."""
    usual = Trend(
        bank=FAST,
        shape="grows",
        idle_only=True,
        bytes_per_second=1.0,
        error_bytes_per_second=0.0,
        later_bytes_per_second=1.0,
        gain_bytes=1.0,
        p_rising=0.0,
        p_drift=0.0,
        p_steady=0.5,
        wanders=9.0,
        hours=1.0,
        jumps_up=0,
        jumps_down=0,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]
