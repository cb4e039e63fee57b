"""What a profile of a process's allocations shows: which lines hold its growth, or that none of Python's do.

The growth of the whole process is compared with that of the memory that was traced. Where the process grew and the
traced memory did not, the growth is native: allocated below Python, or outside torch. Where the traced memory grew and
the process did not, freed memory was used again, and the lines are named all the same. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kvdiag.model import MemoryProfile, ProfiledLoad

Answer = Literal["named", "partly", "native", "flat"]
"""named: stacks explain it. partly: the rest is native. native: none does. flat: too little grew."""

LEAST_BYTES = 2**20
"""Growth below this comes and goes with the allocator's pages and the requests in progress."""

NAMED_RATIO, NATIVE_RATIO = 0.8, 0.2
"""Shares of the process's growth from which traced memory explains it, and up to which it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The answer, the process's growth and the part of it that is traced, and the requests meanwhile."""

    answer: Answer
    process_growth_bytes: int | None
    traced_growth_bytes: int
    explained_ratio: float | None
    load: ProfiledLoad

    def per_request(self, size: int) -> float | None:
        """Bytes for each request that ended meanwhile; `None` where none did, or none were counted."""
        return size / self.load.requests if self.load.requests else None


def conclude(profile: MemoryProfile, counts: Sequence[tuple[float, int]] = ()) -> Conclusion:
    """Judge a profile; `counts` are moments (monotonic seconds) and the requests that had finished by then."""
    process, named = profile.process_growth_bytes, profile.traced_growth_bytes
    grown = max(process or 0, named)
    ratio = None if process is None or process < LEAST_BYTES else min(max(named / process, 0.0), 1.0)
    answer: Answer
    if grown < LEAST_BYTES:
        answer = "flat"
    elif ratio is None or ratio >= NAMED_RATIO:
        answer = "named"
    else:
        answer = "native" if ratio <= NATIVE_RATIO else "partly"
    return Conclusion(
        answer=answer,
        process_growth_bytes=process,
        traced_growth_bytes=named,
        explained_ratio=ratio,
        load=_load(profile, counts),
    )


def _load(profile: MemoryProfile, counts: Sequence[tuple[float, int]]) -> ProfiledLoad:
    began, ended = profile.began_monotonic_seconds, profile.ended_monotonic_seconds
    last = profile.last.at_monotonic_seconds
    first = _finished(counts, last - profile.seconds)
    both = _finished(counts, last)
    return ProfiledLoad(
        requests=None if first is None or both is None else both - first,
        before_per_second=_rate([one for one in counts if one[0] <= began]),
        during_per_second=_rate([one for one in counts if began <= one[0] <= ended]),
        after_per_second=_rate([one for one in counts if one[0] >= ended]),
    )


def _finished(counts: Sequence[tuple[float, int]], at_seconds: float) -> float | None:
    """Requests finished at a moment, between the counts around it; `None` outside of them, or after a restart."""
    for (before, low), (after, high) in pairwise(counts):
        if before <= at_seconds <= after and low <= high:
            return low + (high - low) * ((at_seconds - before) / (after - before) if after > before else 0.0)
    return None


def _rate(counts: Sequence[tuple[float, int]]) -> float | None:
    if len(counts) < 2 or counts[-1][0] <= counts[0][0] or counts[-1][1] < counts[0][1]:  # noqa: PLR2004 - two ends
        return None
    return (counts[-1][1] - counts[0][1]) / (counts[-1][0] - counts[0][0])
