"""The time scales on which growth is watched: thresholds that come as a set for each; `Limits` holds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bank:
    """One time scale on which growth is looked for: a window of equal blocks, tried again each `evaluate_minutes`.

    Readings of `least_minutes` are enough to begin with.

    Growth counts from `least_bytes_per_hour` and `least_growth_bytes` on, when `persistence` evaluations in a row
    found it, and may be certain when `certain_persistence` did. Rates and sizes are those at which synthetic server
    memory of nine kinds (stationary and slow noise, load, allocator ratchets, warm-up, garbage collection, level steps,
    ramps, a random walk) stayed quiet for 36 hours.
    """

    name: str
    window_minutes: int
    least_minutes: int
    block_minutes: int
    evaluate_minutes: int
    least_bytes_per_hour: float
    least_growth_bytes: int
    persistence: int
    certain_persistence: int

    @property
    def title(self) -> str:
        """The window in words."""
        return f"{self.window_minutes // 60} h"


BANKS = (
    Bank(
        name="fast",
        window_minutes=60,
        least_minutes=60,
        block_minutes=1,
        evaluate_minutes=10,
        least_bytes_per_hour=300 * 10**6,
        least_growth_bytes=150 * 10**6,
        persistence=2,
        certain_persistence=3,
    ),
    Bank(
        name="mid",
        window_minutes=360,
        least_minutes=180,
        block_minutes=6,
        evaluate_minutes=30,
        least_bytes_per_hour=20 * 10**6,
        least_growth_bytes=150 * 10**6,
        persistence=3,
        certain_persistence=3,
    ),
    Bank(
        name="half",
        window_minutes=720,
        least_minutes=480,
        block_minutes=12,
        evaluate_minutes=30,
        least_bytes_per_hour=20 * 10**6,
        least_growth_bytes=150 * 10**6,
        persistence=2,
        certain_persistence=3,
    ),
    Bank(
        name="slow",
        window_minutes=1440,
        least_minutes=1440,
        block_minutes=24,
        evaluate_minutes=120,
        least_bytes_per_hour=5 * 10**6,
        least_growth_bytes=100 * 10**6,
        persistence=2,
        certain_persistence=3,
    ),
)


BURST = Bank(
    name="burst",
    window_minutes=20,
    least_minutes=20,
    block_minutes=1,
    evaluate_minutes=2,
    least_bytes_per_hour=4 * 10**9,
    least_growth_bytes=10**9,
    persistence=3,
    certain_persistence=3,
)
