"""Which setting to change and by how much, computed from the figures of the failure. Pure.

A memory fraction is lowered by shortage / total and rounded down, so that the memory is free in any case. Where a
figure is missing the setting is named without one.
"""

from __future__ import annotations

import math

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.postmortem.case import Case
from kvdiag.formatting import format_bytes

STEP_TOKENS = 64
_STEP = 0.01
"""Fractions are set to two decimals."""


def lower_fraction(case: Case, short_bytes: int | None) -> str:
    """How to lower what sizes the pool so that `short_bytes` more stay free, and what that costs in tokens."""
    if short_bytes is None:
        return "lower --gpu-memory-utilization by 0.02 at a time"
    pool = case.report.settings.pool_bytes if case.report is not None else None
    size = format_bytes(short_bytes)
    if pool is not None:
        return (
            f"lower --kv-cache-memory-bytes by {short_bytes} bytes ({size}): {pool} -> {max(pool - short_bytes, 0)}"
            + _cost(case, short_bytes)
        )
    total, old = case.total_bytes, case.fraction_ratio
    if total is None:
        return f"lower --gpu-memory-utilization by {size} / the device's total"
    ratio = short_bytes / total
    missing = f"({size} of {format_bytes(total)} are missing)"
    if old is None:
        return f"lower --gpu-memory-utilization by {math.ceil(ratio * 100 - 1e-9) / 100:.2f} {missing}"
    new = max(_floor(old - ratio), _STEP)
    return f"lower --gpu-memory-utilization: {old:g} -> {new:g} {missing}{_cost(case, round((old - new) * total))}"


def raise_fraction(case: Case, missing_bytes: int | None) -> str | None:
    """How to raise the setting that sizes the pool by `missing_bytes`; `None` where the device has no such room."""
    total, old = case.total_bytes, case.fraction_ratio
    if missing_bytes is None:
        return "raise --gpu-memory-utilization if the rest of the device is free"
    size = format_bytes(missing_bytes)
    if total is None:
        return f"raise --gpu-memory-utilization by {size} / the device's total, if that much is free"
    ratio = missing_bytes / total
    if old is None:
        by = math.ceil(ratio * 100 - 1e-9) / 100
        return f"raise --gpu-memory-utilization by {by:.2f} ({size} are missing), if that much is free"
    new = math.ceil((old + ratio) * 100 - 1e-9) / 100
    if new > DEFAULT_LIMITS.max_fraction_ratio:
        return None
    return f"raise --gpu-memory-utilization: {old:g} -> {new:g} ({size} are missing)"


def fraction_that_fits(free_bytes: int, total_bytes: int) -> float:
    """The largest fraction of two decimals whose budget is free."""
    return max(_floor(free_bytes / total_bytes), 0.0)


def scaled(option: str, old: int | None, case: Case, *, step: int = 1) -> str | None:
    """How to lower a setting that the failed allocation scales with, to what would have fit."""
    chief = case.chief
    if chief is None or chief.shortage.asked_bytes is None or chief.shortage.free_bytes is None or not old:
        return None
    new = int(old * chief.shortage.free_bytes / chief.shortage.asked_bytes) // step * step
    if new <= 0:
        return f"lower {option} (now {old}): almost nothing was free, so halve it until it runs"
    return f"lower {option}: {old} -> {min(new, old - 1)} (the failed allocation scales with it)"


def joined(*parts: str | None) -> str:
    """Alternatives in one sentence, the first one first."""
    told = [part for part in parts if part]
    return "; or ".join(told)[:1].upper() + "; or ".join(told)[1:] + "." if told else ""


def _floor(ratio: float) -> float:
    return math.floor(ratio * 100 + 1e-9) / 100


def _cost(case: Case, pool_bytes: int) -> str:
    """The tokens that these bytes of the pool hold, where the log has both."""
    report = case.report
    rank = None if report is None else report.deciding_rank
    if rank is None or rank.pool is None or report is None or not report.tokens or not rank.pool.nominal_bytes:
        return ""
    tokens = min(pool_bytes * report.tokens // rank.pool.nominal_bytes, report.tokens)
    return f", which costs {tokens:,} of the pool's {report.tokens:,} tokens"
