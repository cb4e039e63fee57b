"""Compares this machine's clock with that of Prometheus."""

from kvdiag.formatting import format_duration
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_api import PrometheusSource

MAX_CLOCK_SECONDS = 120.0
"""Between the clocks of this machine and of Prometheus."""


async def wrong_clock(source: PrometheusSource, now_seconds: float) -> str | None:
    """What is wrong with the clock; with one that is ahead every replica would seem to have ended."""
    try:
        theirs = await source.number("time()")
    except Unreadable:
        # Why it does not answer, the survey reports.
        return None
    ahead = 0.0 if theirs is None else now_seconds - theirs
    if abs(ahead) <= MAX_CLOCK_SECONDS:
        return None
    side = "ahead of" if ahead > 0.0 else "behind"
    return f"this machine's clock is {format_duration(abs(ahead))} {side} Prometheus': synchronise them"
