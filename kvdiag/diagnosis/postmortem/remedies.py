"""Which setting to change and to what, computed from the figures of the failure. Pure.

Settings are given as one would type them: a memory fraction in two decimals, changed by 0.01 at least and lowered with
headroom to spare; sizes are rounded. Where a figure is missing the setting is named without one.
"""

import math

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.postmortem.case import Case
from kvdiag.diagnosis.prescriptions.typed_flags import typed
from kvdiag.formatting import format_bytes, format_count, format_number
from kvdiag.model import Change, Prescription

STEP_TOKENS = 64

_POOL_STEP_BYTES = 64 * 2**20
"""The pool's size is set in steps of it."""


def lower_fraction(case: Case, short_bytes: int | None) -> str:
    """How to lower what sizes the pool so that `short_bytes` and headroom stay free, and what that costs in tokens.

    Where the pool is smaller than that, lowering it cannot help: then how much has to be freed otherwise.
    """
    fraction = case.flag("memory_fraction")
    if case.flags and "memory_fraction" not in case.flags:  # the pool is sized by tokens, not by a share of the device
        free = "" if short_bytes is None else f" (to free {format_bytes(short_bytes + DEFAULT_LIMITS.headroom_bytes)})"
        if case.flag("blocks_override") == case.flag("max_model_len"):
            return f"lower {case.flag('max_model_len')}, which sizes the KV pool{free}"
        return f"lower {case.flag('max_model_len')} or {case.flag('max_num_seqs')}, which size the KV pool{free}"
    if short_bytes is None:
        return f"lower {fraction} by 0.02 at a time"
    headroom, needed = DEFAULT_LIMITS.headroom_bytes, short_bytes + DEFAULT_LIMITS.headroom_bytes
    short = f"to free {format_bytes(short_bytes)} and a margin of {format_bytes(headroom)}"
    pool, taken = case.pool_bytes, _pool_bytes(case)
    total, old = case.total_bytes, case.fraction_ratio
    if _is_too_small(case, needed):
        held = "the engine's budget" if taken is None else f"the KV pool of {format_bytes(taken)}"
        return f"free {format_bytes(needed)} on the device: {held} is too small to be reduced by that much"
    if pool is not None:
        left = _left_bytes(pool, needed)
        return f"lower {case.flag('pool_bytes')} ({short}): {pool} -> {left}" + _cost(case, pool - left)
    if total is None:
        return f"lower {fraction} by ({format_bytes(needed)} / total GPU memory)"
    by = _ceil(needed / total)
    lower = f"lower {fraction} by {format_fraction(by)} ({short})"
    if old is None:
        return lower
    new = _floor(old - by)
    return f"{lower}: {format_fraction(old)} -> {format_fraction(new)}" + _cost(case, round((old - new) * total))


def smaller_pool(case: Case, short_bytes: int | None) -> Prescription:
    """The value of `lower_fraction` as it is typed; where one cannot be computed, the figure that is missing."""
    name, total, old = case.engine_name or case.facts.engine_name, case.total_bytes, case.fraction_ratio
    if case.flags and "memory_fraction" not in case.flags:
        return Prescription(missing=("a smaller pool: what its tokens take is not in the log; see `kvdiag fit`",))
    if short_bytes is None:
        missing = f"a smaller pool: how much was missing is not reported{case.missing_log}"
        return Prescription(missing=(missing,))
    needed = short_bytes + DEFAULT_LIMITS.headroom_bytes
    if _is_too_small(case, needed):
        return Prescription(missing=(f"a smaller pool: it is too small to free {format_bytes(needed)}",))
    pool = case.pool_bytes
    if pool is not None:
        left = _left_bytes(pool, needed)
        change, lost = typed(name, "pool_bytes", left), pool - left
    elif total is None:
        return Prescription(missing=(f"a smaller pool: the device's size is not reported{case.missing_log}",))
    elif old is None:
        by = _ceil(needed / total)
        change, lost = f"lower {case.flag('memory_fraction')} by {format_fraction(by)}", round(by * total)
    else:
        new = _floor(old - _ceil(needed / total))
        change, lost = typed(name, "memory_fraction", format_fraction(new)), round((old - new) * total)
    if change is None:
        return Prescription()
    gain = f"{format_bytes(short_bytes)} more on the device, and {format_bytes(DEFAULT_LIMITS.headroom_bytes)} to spare"
    cost = _cost(case, lost).removeprefix(", which costs ") or f"{format_bytes(lost)} of KV pool"
    return Prescription(changes=(Change(change=change, gain=gain, cost=cost),))


def shorter_requests(case: Case, fitting_tokens: int | None) -> Prescription:
    """The longest request that the pool holds, as the limit is typed; or that the engine did not report it."""
    name = case.engine_name or case.facts.engine_name
    change = None if fitting_tokens is None else typed(name, "max_model_len", fitting_tokens)
    if change is None:
        missing = f"{case.flag('max_model_len')}: what the pool holds is not reported{case.missing_log}"
        return Prescription(missing=(missing,))
    cost = f"requests of more than {fitting_tokens:,} tokens are refused"
    fix = Change(change=change, gain="the server starts", cost=cost, context_tokens=fitting_tokens)
    return Prescription(changes=(fix,))


def _pool_bytes(case: Case) -> int | None:
    rank = case.report.deciding_rank
    printed = None if rank is None or rank.pool is None else rank.pool.nominal_bytes
    return case.pool_bytes or printed or None


def _is_too_small(case: Case, needed_bytes: int) -> bool:
    """Whether pool or budget do not have the bytes that are missing."""
    total = case.total_bytes
    budget = None if total is None else round((case.fraction_ratio or 1.0) * total)
    return any(most is not None and needed_bytes >= most for most in (_pool_bytes(case), budget))


def _left_bytes(pool_bytes: int, needed_bytes: int) -> int:
    return (pool_bytes - needed_bytes) // _POOL_STEP_BYTES * _POOL_STEP_BYTES


def raise_fraction(case: Case, missing_bytes: int | None) -> str | None:
    """How to raise the setting that sizes the pool by `missing_bytes`; `None` where the device has no such room."""
    total, old = case.total_bytes, case.fraction_ratio
    fraction = case.flag("memory_fraction")
    if case.flags and "memory_fraction" not in case.flags:
        return None if missing_bytes is None else f"free {format_bytes(missing_bytes)} on the device"
    if missing_bytes is None:
        return f"raise {fraction} if the rest of the device is free"
    size = format_bytes(missing_bytes)
    if total is None:
        return f"raise {fraction} by ({size} / total GPU memory), if that much is free"
    by = _ceil(missing_bytes / total)
    more = f"raise {fraction} by {format_fraction(by)} ({size} is missing)"
    if old is None:
        return f"{more}, if that much is free"
    new = _ceil(old + missing_bytes / total)
    if new > DEFAULT_LIMITS.max_fraction_ratio:
        return None
    return f"{more}: {format_fraction(old)} -> {format_fraction(new)}"


def format_fraction(ratio: float) -> str:
    """A memory fraction in two decimals: `0.90`; with more where more are set: `0.925`."""
    return f"{ratio:.2f}" if math.isclose(ratio, round(ratio, 2)) else format_number(ratio)


def fraction_that_fits(free_bytes: int, total_bytes: int) -> float:
    """The largest fraction of two decimals whose budget is free."""
    return max(_floor(free_bytes / total_bytes), 0.0)


def scaled(setting: str, old: int | None, case: Case, *, step: int = 1, used: int | None = None) -> str | None:
    """How to lower a setting that the failed allocation scales with; `used` is what the failed step used of it."""
    shortage, option = case.failure.shortage, case.flag(setting)
    if shortage.asked_bytes is None or shortage.free_bytes is None or not old:
        return None
    new = int((used or old) * shortage.free_bytes / shortage.asked_bytes) // step * step
    if new <= 0:
        return f"lower {option} (now {old}): almost nothing was free, so halve it until it runs"
    step_used = "" if used is None or used == old else f"; the failed step had {format_count(used)}"
    return f"lower {option}: {old} -> {min(new, old - 1)} at most (the failed allocation scales with it{step_used})"


def joined(*parts: str | None) -> str:
    """Alternatives in one sentence, the first one first."""
    text = "; or ".join(part for part in parts if part)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _floor(ratio: float) -> float:
    return math.floor(ratio * 100 + 1e-9) / 100


def _ceil(ratio: float) -> float:
    return math.ceil(ratio * 100 - 1e-9) / 100


def _cost(case: Case, pool_bytes: int) -> str:
    """The tokens that these bytes of the pool hold, where the log has both."""
    report, rank = case.report, case.report.deciding_rank
    if rank is None or rank.pool is None or not report.tokens or not rank.pool.nominal_bytes:
        return ""
    tokens = min(pool_bytes * report.tokens // rank.pool.nominal_bytes, report.tokens)
    return f", which costs {format_count(tokens)} of the pool's {format_count(report.tokens)} tokens"
