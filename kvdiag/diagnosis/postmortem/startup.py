"""baseline.foreign_memory and baseline.misconfigured: memory that was taken or missing before any request came.

Foreign memory: another process released memory while the server measured it (fault), processes that torch's message
lists and whose memory would have been enough (fault), or bytes that neither torch nor a CUDA context explains
(suspect).
Misconfigured: refusals to start, limits below the device, impossible sizes, and allocations that are made once at
start, unless other processes had their memory.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.headroom import OUT, foreign
from kvdiag.diagnosis.postmortem.remedies import fraction_that_fits, joined, lower_fraction, raise_fraction
from kvdiag.diagnosis.rule import unknown
from kvdiag.formatting import format_bytes
from kvdiag.model import Finding, Status

FOREIGN = "baseline.foreign_memory"
MISCONFIGURED = "baseline.misconfigured"


def judge_foreign(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Look at processes that torch's message lists, memory taken before the start, and memory released during it."""
    chief = case.chief
    if chief is None:
        return unknown(FOREIGN, "no failure is reported; pass a log, a black box or torch's message")
    told = chief.shortage
    if told.kind == "profiling":
        came = None
        if told.before_bytes is not None and told.free_bytes is not None:
            came = told.free_bytes - told.before_bytes
        size = "memory" if came is None or came <= 0 else format_bytes(came)
        summary = f"another process released {size} while the server measured free memory"
        remedy = "Start the server again. Start several servers on one device one after the other."
        return (Finding(FOREIGN, "fault", summary, evidence(case), remedy=remedy),)
    found = foreign(case, limits)
    if found is None:
        known = told.other_bytes is not None or told.kind not in OUT
        if not known:
            return unknown(FOREIGN, "the message does not list the device's processes; run nvidia-smi on the host")
        return (Finding(FOREIGN, "ok", "other processes use too little to explain the failure"),)
    size = format_bytes(found.size_bytes)
    if told.kind == "budget":
        summary = f"{size} of the device are in use at start, more than the server's own CUDA context"
        remedy = joined(
            "stop the process that uses it (an orphaned worker or another server; see nvidia-smi on the host)",
            _fraction(case),
        )
    else:
        who = "used by other processes" if found.sure else "in use by neither torch nor a CUDA context"
        summary = f"{asked_for(case)}; {size} {who}"
        remedy = joined(
            f"stop or move the processes that use {size}",
            lower_fraction(case, told.short_bytes),
        )
    status: Status = "fault" if found.sure else "suspect"
    return (Finding(FOREIGN, status, summary, evidence(case), remedy=remedy),)


def judge_misconfigured(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Compare the memory fraction with the device, and allocations made once at start with what was free."""
    chief = case.chief
    if chief is None:
        return unknown(MISCONFIGURED, "no failure is reported; pass a log, a black box or torch's message")
    told = chief.shortage
    if told.kind == "budget":
        return _fault(case, _budget_summary(case), _fraction(case))
    if told.kind == "blocks":
        return _no_blocks(case)
    if told.kind == "limit":
        allowed = "" if told.allowed_bytes is None else f" of {format_bytes(told.allowed_bytes)}"
        summary = f"{asked_for(case)}: refused by a limit{allowed} below the device's memory"
        return _fault(case, summary, "Raise or remove per_process_memory_fraction; the device had room.")
    if told.kind == "absurd":
        summary = "more was requested than any device has: a size overflowed in the caller; the device was not full"
        return _fault(case, summary, "Check the tensor shapes of the failing call; no memory setting helps.")
    if told.kind == "library" and chief.phase != "graph_capture":
        summary = f"{asked_for(case)}: a library outside torch could not allocate, so the headroom is too small"
        return _fault(case, summary, lower_fraction(case, told.short_bytes or limits.headroom_bytes))
    if chief.phase not in {"load", "kv_pool", "startup"} or told.kind not in OUT:
        if chief.phase is None and told.kind in OUT:
            return unknown(MISCONFIGURED, f"not known whether it failed before the first request{case.log_would}")
        return (Finding(MISCONFIGURED, "ok", "no one-time allocation at start failed"),)
    found = foreign(case, limits)
    if found is not None and found.sure:
        return (Finding(MISCONFIGURED, "ok", "it would have fit without other processes' memory"),)
    if chief.phase == "load":
        # The pool does not exist yet, so the memory fraction takes nothing from the weights.
        remedy = joined("split the weights over more GPUs (--tensor-parallel-size)", "quantize them", _missing(case))
        return _fault(case, f"{asked_for(case)}: the weights do not fit on this device", remedy)
    summary = f"{asked_for(case)}: the allocations at start leave too little free memory"
    return _fault(case, summary, joined(lower_fraction(case, told.short_bytes)))


def _fault(case: Case, summary: str, remedy: str) -> tuple[Finding, ...]:
    remedy = remedy if remedy.endswith(".") else f"{remedy[:1].upper()}{remedy[1:]}."
    found = Finding(MISCONFIGURED, "fault", summary, evidence(case), remedy=remedy)
    return (found,)


def _missing(case: Case) -> str | None:
    short = None if case.chief is None else case.chief.shortage.short_bytes
    return None if short is None else f"free {format_bytes(short)}, plus what is still to load"


def _budget_summary(case: Case) -> str:
    told = case.chief.shortage if case.chief is not None else None
    if told is None or told.free_bytes is None or told.needed_bytes is None or told.total_bytes is None:
        return "less memory is free at start than the memory fraction claims"
    where = "" if told.device is None else f" on GPU {told.device}"
    return (
        f"the memory fraction claims {format_bytes(told.needed_bytes)}{where} ({told.fraction_ratio or 0:g} of "
        f"{format_bytes(told.total_bytes)}), but only {format_bytes(told.free_bytes)} are free at start"
    )


def _fraction(case: Case) -> str:
    told = case.chief.shortage if case.chief is not None else None
    if told is None or told.free_bytes is None or told.total_bytes is None:
        return "lower --gpu-memory-utilization below free / total"
    fits = fraction_that_fits(told.free_bytes, told.total_bytes)
    old = "" if told.fraction_ratio is None else f": {told.fraction_ratio:g} -> {fits:g}"
    short = "" if told.needed_bytes is None else f" ({format_bytes(told.needed_bytes - told.free_bytes)} are missing)"
    return f"lower --gpu-memory-utilization{old or f' to {fits:g}'}{short}"


def _no_blocks(case: Case) -> tuple[Finding, ...]:
    rank, total, fraction = case.rank, case.total_bytes, case.fraction_ratio
    used = None
    if rank is not None:
        parts = [rank.consumed or rank.weights, rank.activation, None if rank.consumed else rank.non_torch]
        told = [part.nominal_bytes for part in parts if part is not None]
        used = sum(told) if told else None
    missing = case.failed_pool_bytes
    if missing is None and used is not None and total is not None and fraction is not None:
        missing = max(used - round(fraction * total), 0) or None
    took = "" if used is None else f": weights, activations and other memory use {format_bytes(used)}"
    budget = "" if total is None or fraction is None else f" of the {format_bytes(fraction * total)} budget"
    remedy = joined(
        raise_fraction(case, missing),
        "lower --max-num-batched-tokens and --max-num-seqs, which size the profiled peak",
        "split or quantize the weights",
    )
    return _fault(case, f"no memory is left for the KV pool{took}{budget}", remedy)
