"""The thresholds by which the pool of a server that is never idle is judged, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLimits:
    """When the lowest load, or the share of prefix hits, shows that blocks are lost."""

    # Lowest load
    floor_seconds: float = 6.0 * 3600.0
    """Least time over which a server that is never idle is judged under load: a few hours may have one load only."""

    since_idle_seconds: float = 3600.0
    """The same since the last idle interval, to doubt what that showed."""

    floor_p: float = 0.01
    """p-value of the slope of its lowest samples, corrected for autocorrelation."""

    floor_ratio: float = 0.05
    """Detection limit, as a share of the pool, up to which a busy server is called flat."""

    floor_bins: int = 60
    """Bins of that time, each with its lowest sample: enough to test a slope, wide enough to hold a low one."""

    floor_last_ratio: float = 1.0 / 3.0
    """Share of them, the newest, of which the lowest bounds a leak: a leak of earlier would still be in it."""

    floor_errors: float = 2.0
    """Standard errors of a slope, within which it lies with 95 %."""

    # Prefix hits
    hit_pieces: int = 8
    """Pieces of equal traffic over which the share of prefix hits has to fall, one after the other."""

    hit_tokens: int = 100_000
    """Prompt tokens looked up in each of them: fewer are a handful of prompts, which differ."""

    hit_seconds: float = 7200.0
    """Least time over which this is judged: a batch of other prompts ends within an hour or two."""

    hit_noise_ratio: float = 0.03
    """By how much a piece's hit rate may be above the one before."""

    hit_first_ratio: float = 0.2
    """First hit rate below which prompts share too little for a fall to be significant."""

    hit_left_ratio: float = 0.1
    """Last hit rate over the first: changing traffic rarely lowers it to a tenth, step by step."""

    hit_full_ratio: float = 0.9
    """Usage of the pool from which kept prefixes make room for requests."""


BUSY_LIMITS = BusyLimits()
