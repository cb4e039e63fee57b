"""The thresholds of a soak, each with its reason; `Limits` holds them."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 2**10
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakLimits:
    """What is still normal over load cycles and idle ones in turns."""

    cycles: int = 12
    """Load cycles of new content without which a soak does not decide: with 6 no test reaches 1 %."""

    idle_cycles: int = 4
    """Idle cycles beside nine load cycles (twelve less the first touch) without which the two cannot be told apart."""

    warmup_ratio: float = 0.25
    warmup_cycles: int = 3
    """Load cycles left out as first touch: this share, at least so many. With them an allocator's ratchet is called a
    leak every time, without them in 2 of 1,000."""

    significance: float = 0.01
    """Chance of as many rises between load cycles without a trend (Mann-Kendall)."""

    load_significance: float = 0.01
    """Chance that load cycles rise above the idle ones between them by luck (Mann-Whitney): of a neighbour that grows
    the trend alone accuses the server in 93 of 100 soaks, at 5 % this does in 7 of 100, at 1 % in 1."""

    device_bytes: int = MIB
    """Least growth per load cycle that counts where the driver's 2-MiB pages are read: a page every other cycle."""

    host_bytes: int = 256 * KIB
    """The same for host memory, which moves by malloc's own 128-KiB steps and pages of page tables."""

    host_deviations: float = 3.0
    """For host memory also: so many deviations of the idle cycles' noise, over the number of cycles."""

    steady_ratio: float = 0.5
    """The later half's slope over the earlier's, and the last third's gain over its share of the slope: below it growth
    comes to an end."""

    ended_ratio: float = 0.25
    """The same ratio below which growth has come to an end; between the two it cannot be told."""

    dose_significance: float = 0.05
    """Chance that the largest dose leaves more than the smallest by luck: evidence beside the verdict, no gate."""

    block_cycles: int = 6
    """Readings in a block of which the lowest must rise, for host memory: garbage is collected in between, and of heaps
    that are collected now and then the trend alone accuses a third."""

    most_blocks: int = 6
    """Blocks of a long soak: longer ones hold a longer period of a collector, their lowest reading is less noise."""

    background_ratio: float = 0.7
    """Growth of the idle cycles over that of the load cycles from which it is not the requests'."""

    certain_blocks: int = 5
    """Blocks of readings from which a rising host memory is a fault, up to there a suspect: fewer may all lie within
    one period of a collector."""

    content_ratio: float = 0.25
    """Growth per request of repeated content over that of new content below which contents are kept, not requests."""

    visible_deviations: float = 2.0
    """Deviations of the idle cycles' steps that make the smallest leak per cycle that would have shown; at least twice
    what counts, since half of the leaks of just that size measure smaller."""


SOAK_LIMITS = SoakLimits()
