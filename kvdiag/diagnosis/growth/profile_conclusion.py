"""What a profile of a process's allocations shows: which lines hold its growth, or that none of Python's do.

The growth of the whole process is compared with that of the memory that was traced. Where the process grew and the
traced memory did not, the growth is native: allocated below Python, or outside torch. Where the traced memory grew and
the process did not, freed memory was used again, and the lines are named all the same. Pure.
"""

from kvdiag.model import ConcludedProfile, MemoryProfile, ProfileAnswer

LEAST_BYTES = 2**20
"""Growth below this comes and goes with the allocator's pages and the requests in progress."""

NAMED_RATIO, NATIVE_RATIO = 0.8, 0.2
"""Shares of the process's growth from which traced memory explains it, and up to which it does not."""


def conclude(profile: MemoryProfile) -> ConcludedProfile:
    """Judge one profile."""
    process, named = profile.process_growth_bytes, profile.traced_growth_bytes
    grown = max(process or 0, named)
    ratio = None if process is None or process < LEAST_BYTES else min(max(named / process, 0.0), 1.0)
    answer: ProfileAnswer
    if grown < LEAST_BYTES:
        answer = "flat"
    elif ratio is None or ratio >= NAMED_RATIO:
        answer = "named"
    else:
        answer = "native" if ratio <= NATIVE_RATIO else "partly"
    return ConcludedProfile(
        profile=profile,
        answer=answer,
        process_growth_bytes=process,
        traced_growth_bytes=named,
        explained_ratio=ratio,
    )
