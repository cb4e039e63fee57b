"""baseline.foreign_memory and baseline.misconfigured: what was taken, or not there, before any request came."""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.headroom import OUT, foreign
from kvdiag.diagnosis.postmortem.remedies import fraction_that_fits, joined, lower_fraction, raise_fraction
from kvdiag.diagnosis.rule import unseen
from kvdiag.diagnosis.timeline_queries import readable_bytes
from kvdiag.model import Finding, Status

FOREIGN = "baseline.foreign_memory"
MISCONFIGURED = "baseline.misconfigured"


def judge_foreign(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Processes that torch's message lists, what is taken before the server takes any, memory that came free."""
    chief = case.chief
    if chief is None:
        return unseen(FOREIGN, "no failure is told")
    told = chief.shortage
    if told.kind == "profiling":
        came = None
        if told.before_bytes is not None and told.free_bytes is not None:
            came = told.free_bytes - told.before_bytes
        size = "memory" if came is None or came <= 0 else readable_bytes(came)
        summary = f"{size} of the device came free while the server measured it: another process let go of it"
        remedy = "Start again now that it is free; start one server after the other on a device, not at once."
        return (Finding(id=FOREIGN, status="fault", summary=summary, evidence=evidence(case), remedy=remedy),)
    found = foreign(case, limits)
    if found is None:
        known = told.other_bytes is not None or told.kind not in OUT
        if not known:
            return unseen(FOREIGN, "the failure does not list the device's processes (nvidia-smi on the host does)")
        return (Finding(id=FOREIGN, status="ok", summary="others hold nothing that would have been enough"),)
    size = readable_bytes(found.size_bytes)
    if told.kind == "budget":
        summary = f"{size} of the device are taken at start, more than the server's own context"
        remedy = joined(
            "end what holds it (an orphaned worker, another server: nvidia-smi on the host)", _fraction(case)
        )
    else:
        who = "other processes hold" if found.sure else "what neither torch nor a CUDA context explains holds"
        summary = f"{asked_for(case)}; {who} {size}"
        remedy = joined(
            f"end or move what holds {found.size_bytes} bytes ({size})", lower_fraction(case, told.short_bytes)
        )
    status: Status = "fault" if found.sure else "suspect"
    return (Finding(id=FOREIGN, status=status, summary=summary, evidence=evidence(case), remedy=remedy),)


def judge_misconfigured(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """The memory fraction against the device, and what is taken once at start against what there is."""
    chief = case.chief
    if chief is None:
        return unseen(MISCONFIGURED, "no failure is told")
    told = chief.shortage
    if told.kind == "budget":
        return _fault(case, _budget_summary(case), _fraction(case))
    if told.kind == "blocks":
        return _no_blocks(case)
    if told.kind == "limit":
        allowed = "" if told.allowed_bytes is None else f" of {readable_bytes(told.allowed_bytes)}"
        summary = f"{asked_for(case)}: refused by a limit{allowed} that is set below the device"
        return _fault(case, summary, "Raise or remove per_process_memory_fraction; nothing else was full.")
    if told.kind == "absurd":
        summary = "more than any device has was asked for: a size that overflowed in the caller, not a full device"
        return _fault(case, summary, "Look at the shapes of the failing call; no memory setting helps.")
    if told.kind == "library" and chief.phase != "graph_capture":
        summary = f"{asked_for(case)}: a library outside of torch found no room, so the headroom is too small for it"
        return _fault(case, summary, lower_fraction(case, told.short_bytes or limits.headroom_bytes))
    if chief.phase not in {"load", "kv_pool", "startup"} or told.kind not in OUT:
        if chief.phase is None and told.kind in OUT:
            return unseen(MISCONFIGURED, f"whether it was before the first request is not told{case.log_would}")
        return (Finding(id=MISCONFIGURED, status="ok", summary="nothing that is taken once at start failed"),)
    found = foreign(case, limits)
    if found is not None and found.sure:
        return (Finding(id=MISCONFIGURED, status="ok", summary="without what others hold there was room for it"),)
    if chief.phase == "load":
        # The pool does not exist yet, so the memory fraction takes nothing from the weights.
        remedy = joined("split the weights over more GPUs (--tensor-parallel-size)", "quantize them", _missing(case))
        return _fault(case, f"{asked_for(case)}: the weights do not fit this device", remedy)
    summary = f"{asked_for(case)}: what is taken once at start leaves too little of the device"
    return _fault(case, summary, joined(lower_fraction(case, told.short_bytes)))


def _fault(case: Case, summary: str, remedy: str) -> tuple[Finding, ...]:
    remedy = remedy if remedy.endswith(".") else f"{remedy[:1].upper()}{remedy[1:]}."
    found = Finding(id=MISCONFIGURED, status="fault", summary=summary, evidence=evidence(case), remedy=remedy)
    return (found,)


def _missing(case: Case) -> str | None:
    short = None if case.chief is None else case.chief.shortage.short_bytes
    return None if short is None else f"find {short} bytes ({readable_bytes(short)}) and what is still to load"


def _budget_summary(case: Case) -> str:
    told = case.chief.shortage if case.chief is not None else None
    if told is None or told.free_bytes is None or told.needed_bytes is None or told.total_bytes is None:
        return "less of the device is free at start than the memory fraction claims"
    where = "" if told.device is None else f" on GPU {told.device}"
    return (
        f"{readable_bytes(told.needed_bytes)} claimed{where} ({told.fraction_ratio or 0:g} of "
        f"{readable_bytes(told.total_bytes)}), {readable_bytes(told.free_bytes)} free at start"
    )


def _fraction(case: Case) -> str:
    told = case.chief.shortage if case.chief is not None else None
    if told is None or told.free_bytes is None or told.total_bytes is None:
        return "lower --gpu-memory-utilization below free / total"
    fits = fraction_that_fits(told.free_bytes, told.total_bytes)
    old = "" if told.fraction_ratio is None else f": {told.fraction_ratio:g} -> {fits:g}"
    short = "" if told.needed_bytes is None else f" by {told.needed_bytes - told.free_bytes} bytes or more"
    return f"lower --gpu-memory-utilization{short}{old or f' to {fits:g}'}"


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
    took = "" if used is None else f": weights, activations and the rest take {readable_bytes(used)}"
    budget = "" if total is None or fraction is None else f" of the {readable_bytes(fraction * total)} it was given"
    remedy = joined(
        raise_fraction(case, missing),
        "lower --max-num-batched-tokens and --max-num-seqs, by which the profile's peak is sized",
        "split or quantize the weights",
    )
    return _fault(case, f"nothing is left for the KV pool{took}{budget}", remedy)
