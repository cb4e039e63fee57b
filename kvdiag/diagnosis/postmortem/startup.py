"""baseline.foreign_memory, baseline.misconfigured and capacity.long_context: taken, missing or refused at start.

Foreign memory: another process released memory while the server measured it (fault), memory that was in use before the
server's own, processes that torch's message lists and whose memory would have been enough (faults), or bytes that
neither torch nor a CUDA context explains (suspect).
Long context: the engine refused to start because its KV pool is smaller than one longest request. A cache that grows
in torch, where no pool is taken, runs out in the same way while it serves.
Misconfigured: refusals to start, limits below the device, impossible sizes, and allocations that are made once at
start, unless other processes had their memory.
"""

import math
import re
from dataclasses import dataclass

from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.diagnosis.postmortem.case import OUT, Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.pool_exhaustion import alone
from kvdiag.diagnosis.postmortem.remedies import (
    format_fraction,
    fraction_that_fits,
    joined,
    lower_fraction,
    raise_fraction,
    shorter_requests,
)
from kvdiag.formatting import format_bytes, format_count
from kvdiag.model import Finding
from kvdiag.oom.message import Shortage

_ON_THE_HOST = re.compile(r"(?i)cpu_buffer_type|CPU(?:_\w{1,20})? buffer")
FOREIGN, MISCONFIGURED, CONTEXT = "baseline.foreign_memory", "baseline.misconfigured", "capacity.long_context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Device memory of other processes; `sure` where those are listed."""

    size_bytes: int
    sure: bool


def foreign(case: Case, limits: Limits) -> Foreign | None:
    """Other processes' memory when it failed, where that would have been enough; `None` where nothing shows it."""
    shortage = case.failure.shortage
    total = shortage.total_bytes
    if shortage.kind == "budget" and total is not None and shortage.free_bytes is not None:
        # Taken after the process's own context and NCCL buffers (v1/worker/gpu_worker.py::init_device).
        taken = total - shortage.free_bytes
        return Foreign(size_bytes=taken, sure=True) if taken > limits.context_bytes else None
    if shortage.kind == "component" and total is not None and shortage.created:
        taken = total - shortage.created[0][1]
        enough = taken > max(2 * limits.context_bytes, round(limits.foreign_fault_ratio * total))
        return Foreign(size_bytes=taken, sure=True) if enough else None
    others = shortage.other_bytes
    if others is not None:
        least = max(limits.foreign_suspect_bytes, limits.foreign_fault_ratio * (total or 0), shortage.short_bytes or 0)
        return Foreign(size_bytes=others, sure=True) if others >= least else None
    reserved, free = shortage.reserved_bytes, shortage.free_bytes
    # Under WSL torch lists processes with impossible sizes, which are left out: the rest may be the server's own.
    listed = shortage.process_bytes is not None or "memory in use" in shortage.message
    if total is None or free is None or reserved is None or listed:
        return None
    rest = total - free - reserved - limits.context_bytes
    enough = rest > max(limits.unlisted_bytes, limits.unlisted_ratio * total)
    return Foreign(size_bytes=rest, sure=False) if enough else None


def _on_the_host(shortage: Shortage) -> bool:
    return shortage.kind == "buffer" and _ON_THE_HOST.search(shortage.message) is not None


def judge_foreign(case: Case, limits: Limits) -> Finding:
    """Look at processes that torch's message lists, memory taken before the start, and memory released during it."""
    shortage = case.failure.shortage
    if shortage.kind == "profiling":
        before, free = shortage.before_bytes, shortage.free_bytes
        size = "memory" if before is None or free is None or free <= before else format_bytes(free - before)
        summary = f"another process released {size} while the server measured free memory"
        remedy = "Start the server again. Servers that share a device have to be started one at a time."
        return Finding(FOREIGN, "fault", summary, evidence(case), remedy=remedy)
    found = foreign(case, limits)
    if found is None:
        if shortage.other_bytes is None and shortage.kind in OUT:
            if outside_torch(case, limits) is not None:
                return Finding(FOREIGN, "ok", "the failed process itself uses the device")
            if _on_the_host(shortage):
                return Finding(FOREIGN, "ok", "host memory ran out, not device memory")
            missing = "the message does not list the device's processes; run nvidia-smi on the host"
            hidden = f"{asked_for(case)}; " if shortage.kind == "masked" else ""  # it leads where nothing else is known
            return Finding(FOREIGN, "unknown", hidden + missing)
        if shortage.kind == "component" and not shortage.created:
            missing = "the log does not list what was free before the first part; run nvidia-smi on the host"
            return Finding(FOREIGN, "unknown", missing)
        seen = shortage.other_bytes is not None or shortage.kind in {"budget", "component"}
        reason = "other processes use too little to explain the failure" if seen else "device memory did not run out"
        return Finding(FOREIGN, "ok", reason)
    size = format_bytes(found.size_bytes)
    if shortage.kind in {"budget", "component"}:
        summary = f"{size} of the device is in use at start, more than the server's own CUDA context"
        stop = "stop the process that uses it (an orphaned worker or another server; see nvidia-smi on the host)"
        remedy = joined(stop, _fitting_fraction(case))
    else:
        who = "used by other processes" if found.sure else "in use by neither torch nor a CUDA context"
        summary = f"{asked_for(case)}; {size} {who}"
        stop = f"stop or move the processes that use {size}"
        remedy = joined(stop, lower_fraction(case, shortage.short_bytes))
    return Finding(FOREIGN, "fault" if found.sure else "suspect", summary, evidence(case), remedy=remedy)


def judge_context(case: Case, limits: Limits) -> Finding:
    """Read the refusal of a context length, or the failed growth of a cache in torch."""
    shortage = case.failure.shortage
    if case.failure.phase == "kv_growth" and shortage.kind in {"torch", "driver", "masked"}:
        remedy = joined("shorten contexts or the batch", lower_fraction(case, shortage.short_bytes))
        summary = f"{asked_for(case)}: the KV cache of the running requests does not fit"
        return Finding(CONTEXT, "fault", summary, evidence(case), remedy=remedy)
    if shortage.kind == "long_request" or alone(case, limits):
        return _long_request(case)
    if shortage.kind != "context":
        return Finding(CONTEXT, "ok", "the engine did not reject the context length")
    needed, available, fitting = shortage.needed_bytes, shortage.available_bytes, shortage.fitting_tokens
    missing = None if needed is None or available is None else needed - available
    tokens = shortage.asked_tokens
    if fitting is None and case.facts.pools:
        fitting = case.facts.pools[0].capacity_tokens
    length = "" if tokens is None else f", {format_count(tokens)} tokens,"
    needs = "does not fit:" if needed is None else f"needs {format_bytes(needed)} of KV cache, but"
    size = "" if available is None else f"has {format_bytes(available)}"
    if needed is not None and available is not None and format_bytes(needed) == format_bytes(available):
        size = "has slightly less"
    fits = "" if fitting is None and size and needed is not None else "holds fewer tokens"
    fits = fits if fitting is None else f"holds {format_count(fitting)} tokens"
    twice = tokens is None or fitting is None or 2 * fitting >= tokens
    remedy = joined(
        f"lower {case.flag('max_model_len')}" + _change(case.facts.max_model_len_tokens or tokens, fitting),
        raise_fraction(case, missing) if missing else None,
        f"set {case.flag('kv_fp8')}, which holds twice the tokens" if twice else None,
        f"split the model over more GPUs: {format_bytes(missing)} is missing" if missing else None,
    )
    holds = " and ".join(part for part in (size, fits) if part)
    summary = f"the engine did not start: a request of the allowed length{length} {needs} the pool {holds}"
    confirm = "The engine's startup log states the allowed length, and what fits in its KV cache."
    fix = shorter_requests(case, fitting)
    return Finding(CONTEXT, "fault", summary, evidence(case), confirm=confirm, remedy=remedy, prescription=fix)


def _long_request(case: Case) -> Finding:
    """One request that the engine refused and served on (suspect), or that had the pool to itself (fault)."""
    shortage = case.failure.shortage
    asked, fits = shortage.asked_tokens, shortage.fitting_tokens
    length = "a request" if asked is None else f"a request of {format_count(asked)} tokens"
    most = "" if fits is None else f" ({format_count(fits)} tokens)"
    remedy = joined(f"raise {case.flag('max_model_len')} if the pool holds more", "shorten the prompt or its output")
    if shortage.kind == "long_request":
        summary = f"{length} was refused: longer than the engine serves{most}"
        return Finding(CONTEXT, "suspect", summary, evidence(case), remedy=remedy)
    summary = f"{length} that ran alone did not fit in the KV pool"
    remedy = joined(f"lower {case.flag('max_model_len')} to what the pool holds", "enlarge the pool")
    return Finding(CONTEXT, "fault", summary, evidence(case), remedy=remedy)


def _change(tokens: int | None, fitting: int | None) -> str:
    """From the length that was asked for to the one that fits, as far as they are known."""
    if fitting is None:
        return ""
    return f" to {fitting}" if tokens is None else f": {tokens} -> {fitting}"


def judge_misconfigured(case: Case, limits: Limits) -> Finding:
    """Compare the memory fraction with the device, and allocations made once at start with what was free."""
    failure = case.failure
    shortage = failure.shortage
    if shortage.kind == "budget":
        return _fault(case, _budget_summary(shortage), joined(_fitting_fraction(case), _freed(shortage)))
    if shortage.kind == "blocks":
        return _no_blocks(case)
    if shortage.kind in {"model", "component", "prefill"}:
        return _refused(case, limits)
    if (held := outside_torch(case, limits)) is not None:
        summary = f"{asked_for(case)}: the process uses {format_bytes(held)} outside torch, which has next to nothing"
        return _fault(
            case, summary, joined(lower_fraction(case, shortage.short_bytes), f"lower {case.flag('max_num_seqs')}")
        )
    if shortage.kind == "context":
        return Finding(MISCONFIGURED, "ok", "the pool fits the device; only the allowed length is too long for it")
    if shortage.kind == "limit":
        allowed = "" if shortage.allowed_bytes is None else f" of {format_bytes(shortage.allowed_bytes)}"
        summary = f"{asked_for(case)}: refused by a limit{allowed} below the device's memory"
        return _fault(case, summary, "Raise or remove per_process_memory_fraction; the device had room.")
    if shortage.kind == "absurd":
        summary = "more was requested than any device has: a size overflowed in the caller; the device was not full"
        return _fault(case, summary, "Check the tensor shapes of the failing call; no memory setting helps.")
    if shortage.kind == "library" and failure.phase != "graph_capture":
        summary = f"{asked_for(case)}: a library outside torch could not allocate, so the headroom is too small"
        return _fault(case, summary, joined(lower_fraction(case, shortage.short_bytes)))
    if failure.phase not in {"load", "kv_pool", "startup"} or shortage.kind not in OUT:
        if failure.phase is None and shortage.kind in OUT:
            missing = f"not known whether it failed before the first request{case.missing_log}"
            return Finding(MISCONFIGURED, "unknown", missing)
        return Finding(MISCONFIGURED, "ok", "no allocation of weights or KV pool failed at start")
    found = foreign(case, limits)
    if found is not None and found.sure:
        return Finding(MISCONFIGURED, "ok", "it would have fit without other processes' memory")
    if _on_the_host(shortage):
        smaller = "load a smaller or further quantized model"
        if failure.phase != "load":
            smaller = lower_fraction(case, None)
        remedy = joined(smaller, "add host memory", _layers(case, "raise"))
        return _fault(case, f"{asked_for(case)}: the host's memory is too small, not the GPU's", remedy)
    if failure.phase == "load":
        # The pool does not exist yet, so the memory fraction takes nothing from the weights.
        short = shortage.short_bytes
        remedy = joined(
            _layers(case, "lower"),
            f"split the weights over more GPUs ({case.flag('tensor_parallel')})",
            "quantize them",
            None if short is None else f"free {format_bytes(short)} plus what is still to load",
        )
        return _fault(case, f"{asked_for(case)}: the weights do not fit on this device", remedy)
    if (shortage.asked_bytes or 0) > (shortage.total_bytes or math.inf):
        sizes = f"lower {case.flag('max_num_seqs')} or {case.flag('max_model_len')}, by which it is sized"
        return _fault(case, f"{asked_for(case)}: more than the whole device has", joined(sizes))
    summary = f"{asked_for(case)}: the allocations at start leave too little free memory"
    return _fault(case, summary, joined(lower_fraction(case, shortage.short_bytes)))


def _layers(case: Case, change: str) -> str | None:
    """The change of how many layers the device takes, where the engine can keep some on the host."""
    return f"{change} {case.flag('device_layers')}" if "device_layers" in case.flags else None


def outside_torch(case: Case, limits: Limits) -> int | None:
    """What the failed process uses of the device where torch has nothing of it: the engine took it by itself."""
    shortage = case.failure.shortage
    held, allocated, total = shortage.process_bytes, shortage.allocated_bytes, shortage.total_bytes
    if held is None or allocated is None or total is None:
        return None
    reserved = allocated + (shortage.unallocated_bytes or 0)
    return held if held >= limits.outside_torch_ratio * total and reserved <= limits.torch_trace_ratio * held else None


def _refused(case: Case, limits: Limits) -> Finding:
    """A refusal to start that names what did not fit: the model, a part of the executor, the trial prefill."""
    shortage = case.failure.shortage
    fewer = f"lower {case.flag('max_num_batched_tokens')}, {case.flag('max_num_seqs')}"
    if shortage.kind == "model":
        needed = shortage.part or "the model"
        needed += "" if shortage.needed_bytes is None else f" needs {format_bytes(shortage.needed_bytes)}"
        there = "" if shortage.available_bytes is None else f", {format_bytes(shortage.available_bytes)} is free"
        smaller = f"lower {case.flag('max_model_len')} or {case.flag('max_num_seqs')}"
        remedy = joined(smaller, "load a smaller or further quantized model", "unload other models")
        if shortage.part is not None:
            remedy = joined(f"lower {case.flag('host_caches')}", "add host memory")
        return _fault(case, f"{needed}{'' if there else ' does not fit'}{there}", remedy)
    if shortage.kind == "prefill":
        whole = shortage.part == "total tokens"
        remedy = joined(
            f"lower {case.flag('blocks_override' if whole else 'max_num_batched_tokens')}",
            f"raise {case.flag('tensor_parallel')}",
            "quantize the weights",
        )
        if shortage.asked_tokens is None:
            summary = "the trial prefill of the warm-up failed; its log does not show whether for lack of memory"
            return Finding(MISCONFIGURED, "suspect", summary, evidence(case), remedy=remedy)
        what = "KV pool" if whole else "trial prefill"
        summary = f"the {what} of {format_count(shortage.asked_tokens)} tokens does not fit next to the weights"
        return _fault(case, summary, remedy)
    if foreign(case, limits) is not None:
        return Finding(MISCONFIGURED, "ok", "it would have fit without other processes' memory")
    total = "" if shortage.total_bytes is None else f" of {format_bytes(shortage.total_bytes)}"
    free = "" if shortage.free_bytes is None else f": {format_bytes(shortage.free_bytes)}{total} was free before it"
    summary = f"{shortage.part or 'a part of the executor'} could not be created{free}"
    return _fault(case, summary, joined(lower_fraction(case, None), fewer))


def _fault(case: Case, summary: str, remedy: str) -> Finding:
    return Finding(MISCONFIGURED, "fault", summary, evidence(case), remedy=remedy)


def _budget_summary(shortage: Shortage) -> str:
    if shortage.free_bytes is None or shortage.needed_bytes is None or shortage.total_bytes is None:
        return "less memory is free at start than the memory fraction claims"
    where = "" if shortage.device is None else f" on GPU {shortage.device}"
    short_bytes = shortage.needed_bytes - shortage.free_bytes
    more = format_bytes(short_bytes) if short_bytes > 0 else "slightly"  # the message rounds both
    share = "" if shortage.fraction_ratio is None else f"{format_fraction(shortage.fraction_ratio)} of "
    claimed = f"{format_bytes(shortage.needed_bytes)}{where} ({share}{format_bytes(shortage.total_bytes)})"
    return f"the memory fraction claims {claimed}, {more} more than is free at start"


def _fitting_fraction(case: Case) -> str | None:
    """The fraction whose budget is free; `None` where that is too little of the device for any server."""
    shortage, flag = case.failure.shortage, case.flag("memory_fraction")
    if shortage.free_bytes is None or shortage.total_bytes is None:
        return f"lower {flag} below free / total"
    fits, old = fraction_that_fits(shortage.free_bytes, shortage.total_bytes), shortage.fraction_ratio
    if old is not None:
        fits = min(fits, old - 0.01)  # the message rounds both sizes
    if fits < DEFAULT_LIMITS.min_fraction_ratio:
        return None
    change = " to" if old is None else f": {format_fraction(old)} ->"
    size = format_bytes(fits * shortage.total_bytes)
    return f"lower {flag}{change} {format_fraction(fits)}, if the weights and the KV pool fit in {size}"


def _freed(shortage: Shortage) -> str | None:
    """How much other processes have to release for the engine's budget."""
    if shortage.needed_bytes is None or shortage.free_bytes is None:
        return None
    missing_bytes = shortage.needed_bytes - shortage.free_bytes
    missing = f"{format_bytes(missing_bytes)} more" if missing_bytes > 0 else "slightly more"
    return f"free {missing}: nvidia-smi on the host lists the processes on the GPU"


def _no_blocks(case: Case) -> Finding:
    rank, total, fraction = case.rank, case.total_bytes, case.fraction_ratio
    shortage = case.failure.shortage
    if shortage.weights_bytes is not None and shortage.free_bytes is not None:
        return _weights_fill_the_fraction(case, shortage.weights_bytes, shortage.free_bytes)
    used = None
    if rank is not None:
        parts = [rank.consumed or rank.weights, rank.activation, None if rank.consumed else rank.non_torch]
        used = sum(part.nominal_bytes for part in parts if part is not None) or None
    missing = case.failed_pool_bytes
    if missing is None and used is not None and total is not None and fraction is not None:
        missing = max(used - round(fraction * total), 0) or None
    took = "" if used is None else f": weights, activations and other memory use {format_bytes(used)}"
    budget = "" if total is None or fraction is None else f" of the {format_bytes(fraction * total)} budget"
    peak = f"lower {case.flag('max_num_batched_tokens')} and {case.flag('max_num_seqs')}, which size the profiled peak"
    remedy = joined(
        raise_fraction(case, missing),
        peak if case.profiles else None,
        "split or quantize the weights",
    )
    return _fault(case, f"no memory is left for the KV pool{took}{budget}", remedy)


def _weights_fill_the_fraction(case: Case, weights: int, free: int) -> Finding:
    """The fraction counts weights and pool together, of what was free before the weights: how far to raise it."""
    shortage = case.failure.shortage
    least = shortage.minimum_ratio or 1.0 - free / (free + weights)
    old = "" if shortage.fraction_ratio is None else f" under a fraction of {format_fraction(shortage.fraction_ratio)}"
    used = f"the weights use {format_bytes(weights)} of {format_bytes(free + weights)}"
    summary = f"no memory is left for the KV pool{old}: {used}"
    remedy = joined(
        f"raise {case.flag('memory_fraction')} above {least:.3f}, by as much more as the KV pool needs",
        "split or quantize the weights",
    )
    return _fault(case, summary, remedy)
