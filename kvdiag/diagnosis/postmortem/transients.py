"""spike.*, fragmentation.allocator and leak.*: an allocation that did not fit while serving, or at a capture.

Spikes: every other cause is ruled out first: another phase of the server, fragmentation, other processes' memory, a
second copy of the weights. What remains is a step that was too large, and a suspect where a leak had used up the
headroom before.
Fragmentation: blocks decide where a black box has them, else torch's message (`holes`). torch's advice about
fragmentation is always printed and is no evidence. cudaMallocAsync has no blocks: only a large rest that torch does not
count is suspect.
Leaks: one failure shows no growth by itself. torch's bytes are compared with the figures of the start in the log. A
kill for lack of host memory is a fault, whether memory had grown or not; signal 9 alone is unknown.
"""

import math
import re

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import OUT, Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.remedies import STEP_TOKENS, joined, lower_fraction, scaled, smaller_pool
from kvdiag.diagnosis.postmortem.startup import foreign, outside_torch
from kvdiag.diagnosis.request_failures import Holes, holes_in_message
from kvdiag.formatting import format_bytes
from kvdiag.model import Finding, ReservedSplit, Status
from kvdiag.oom.account import Account
from kvdiag.oom.phase import SERVING

CAPTURE, ACTIVATION, HOLES = "spike.graph_capture", "spike.activation", "fragmentation.allocator"
TORCH, HOST = "leak.device_torch", "leak.host"
COPY = "baseline.duplicate_model"

_FOR_MEMORY = re.compile(
    r"(?i)(?<![a-z])oom(?!killed\W{1,4}false)|out of memory|memory (?:used|pressure)|low on memory"
)
"""Wordings by which a kill was for lack of memory."""
_TRANSIENT = frozenset(
    {
        "profile",
        "compute",
        "warmup",
        "prefill",
        "decode",
        "request",
        "sampler",
        "logprobs",
        "encoder",
        "wake",
        "scratch",
    }
)
_NOT_TRANSIENT = {
    "load": "loading the weights",
    "kv_pool": "allocating the KV pool",
    "startup": "starting",
    "graph_capture": "capturing CUDA graphs",
    "kv_growth": "the cache grew",
}


def judge_capture(case: Case, limits: Limits) -> Finding:
    """Memory ran out while graphs were captured; a capture that failed for another reason decides nothing."""
    failure = case.failure
    if failure.shortage.kind == "capture":
        summary = "a graph capture failed, but no figure shows lack of memory; look at the first error before it"
        return Finding(CAPTURE, "unknown", summary, evidence(case))
    if failure.shortage.kind not in OUT:
        return Finding(CAPTURE, "ok", "device memory did not run out")
    if failure.phase is None:
        return Finding(CAPTURE, "unknown", f"not known whether graphs were being captured{case.missing_log}")
    if failure.phase != "graph_capture":
        return Finding(CAPTURE, "ok", "the failure was not during graph capture")
    if foreign(case, limits) is not None:
        summary = f"{asked_for(case)}; other processes use enough to explain it"
        return Finding(CAPTURE, "suspect", summary, evidence(case))
    rank, short = case.rank, failure.shortage.short_bytes
    estimate = None if rank is None else rank.graphs_estimate
    rest, others = _further_graphs(case)
    missing = None if short is None else short + (rest or 0)
    remedy = joined(
        lower_fraction(case, missing)
        + ("" if missing is None or rest is not None else "; this is a minimum, since further graphs need more"),
        f"capture fewer sizes ({case.flag('graph_sizes')})",
        _fewer_sequences(case),
        f"set {case.flag('enforce_eager')}, which needs no graphs but is slower",
    )
    kept = "" if estimate is None else f"; the engine estimated {format_bytes(estimate.nominal_bytes)} for all graphs"
    summary = f"{asked_for(case)}{kept}{others}"
    fix = smaller_pool(case, missing)
    return Finding(CAPTURE, "fault", summary, evidence(case), remedy=remedy, prescription=fix)


def _further_graphs(case: Case) -> tuple[int | None, str]:
    """Bytes for the graphs not captured yet, as much for each as those before took, and a clause that says so.

    What was taken is the process's memory beyond weights, pool and non-torch memory, or else the engine's own estimate
    and what lies free in the graphs' pools. An upper limit: vLLM captures the largest batch first.
    """
    graphs, rank, shortage = case.failure.graphs_captured, case.rank, case.failure.shortage
    if graphs is None or not 0 < graphs[0] < graphs[1]:
        return None, ""
    done, total = graphs
    parts = (
        () if rank is None else (rank.pool, *((rank.consumed,) if rank.consumed else (rank.weights, rank.non_torch)))
    )
    known = [part.nominal_bytes for part in parts if part is not None]
    if parts and len(known) == len(parts) and shortage.process_bytes is not None:
        taken = shortage.process_bytes - sum(known) - (shortage.unallocated_bytes or 0)
    else:
        estimate = None if rank is None else rank.graphs_estimate
        taken = max(shortage.private_bytes or 0, 0 if estimate is None else estimate.nominal_bytes * done // total)
    if taken <= 0:
        return None, f"; {done} of {total} graphs were captured"
    rest = round(taken / done * (total - done))
    failed = "" if shortage.asked_bytes is None else f" on top of the failed {format_bytes(shortage.asked_bytes)}"
    return rest, f"; {done} of {total} graphs were captured, the rest need up to {format_bytes(rest)}{failed}"


def judge_activation(case: Case, limits: Limits) -> Finding:
    """An allocation of a step did not fit: not holes, not others' memory, and not what is taken once at start."""
    failure = case.failure
    shortage, phase = failure.shortage, failure.phase
    if shortage.kind not in OUT - {"library"}:
        return Finding(ACTIVATION, "ok", "no step ran out of device memory")
    if phase is not None and phase not in _TRANSIENT:
        return Finding(ACTIVATION, "ok", f"the server failed while {_NOT_TRANSIENT[phase]}, not in a step")
    if outside_torch(case, limits) is not None:
        return Finding(ACTIVATION, "ok", "torch has next to nothing, so no step of it filled the device")
    if phase is None and shortage.asked_bytes is None:
        missing = "size and phase are not reported; add the engine's log from its start, or the agent's black box"
        return Finding(ACTIVATION, "unknown", f"{asked_for(case)}: {missing}")
    if holes(failure, limits).state == "confirmed":
        return Finding(ACTIVATION, "ok", "free plus reserved-but-unallocated memory was enough, but not in one block")
    if shortage.kind == "async" and phase is None:
        missing = "cudaMallocAsync does not report what it caches; use torch's own allocator"
        return Finding(ACTIVATION, "unknown", missing)
    if (others := foreign(case, limits)) is not None:
        whose = "other processes' memory" if others.sure else "the memory that is neither torch's nor a CUDA context's"
        return Finding(ACTIVATION, "ok", f"it would have fit without {whose}")
    before = case.before.findings if case.before is not None else ()
    called = [one.id for one in before if one.status in ("fault", "suspect")]
    if COPY in called:
        summary = "it would have fit without the second copy of the weights that the trace shows"
        return Finding(ACTIVATION, "ok", summary)
    leak = next((verdict for verdict in called if verdict.startswith("leak.device")), None)
    when = "" if phase is not None else f"; whether at start or while serving is unknown{case.missing_log}"
    if shortage.enough_free:
        when = "; the device had enough free memory, so another limit refused the allocation" + when
    if leak is not None:
        when = f"; {leak} had used up the headroom before"
    enough = shortage.free_bytes is not None and shortage.free_bytes >= (shortage.asked_bytes or math.inf)
    status: Status = "fault" if leak is None and not enough else "suspect"
    pool_decides = not enough and failure.shortage.kind != "workspace" and failure.phase not in {"compute", "profile"}
    fix = smaller_pool(case, failure.shortage.short_bytes) if pool_decides else None
    return Finding(ACTIVATION, status, asked_for(case) + when, evidence(case), remedy=_remedy(case), prescription=fix)


def _remedy(case: Case) -> str:
    failure, batch_flag = case.failure, case.flag("max_num_batched_tokens")
    if failure.shortage.kind == "workspace":
        return f"Raise the library's workspace ({case.flag('library_workspace')}), or lower {batch_flag}."
    if failure.shortage.enough_free:
        return (
            "Look for another limit: ulimit -v, the container's or the vGPU's limit, or, on an integrated GPU, how "
            f"much host memory is free. Lower {case.flag('memory_fraction')} where other processes come and go."
        )
    batched = case.report.settings.max_num_batched_tokens
    used = None if failure.work is None else failure.work.scheduled_tokens
    tokens = scaled("max_num_batched_tokens", batched or used, case, step=STEP_TOKENS, used=used)
    if failure.phase == "compute":
        smaller = f"lower {batch_flag} and {case.flag('max_model_len')}, which size the compute buffers"
        return joined(smaller, _fewer_sequences(case))
    if failure.phase == "profile":
        # The pool does not exist yet: a smaller memory fraction would free nothing.
        smaller = tokens or f"lower {batch_flag}"
        return joined(smaller, _fewer_sequences(case), f"raise {case.flag('tensor_parallel')}")
    room = lower_fraction(case, failure.shortage.short_bytes)
    if failure.phase in {"sampler", "warmup", "decode"}:
        return joined(room, _fewer_sequences(case) or f"lower {case.flag('max_num_seqs')}")
    if failure.phase == "logprobs":
        return joined(room, f"lower {case.flag('max_logprobs')}, and avoid prompt_logprobs for long prompts", tokens)
    if failure.phase == "encoder":
        images = f"lower {case.flag('images_per_prompt')} or the image size ({case.flag('image_size')})"
        return joined(room, images)
    return joined(room, tokens or f"lower {batch_flag} where prompts are long")


def _fewer_sequences(case: Case) -> str | None:
    failure = case.failure
    return scaled("max_num_seqs", failure.max_num_seqs or failure.shortage.requests, case)


def judge_torch_growth(case: Case, limits: Limits) -> Finding | None:
    """Compare torch's allocated bytes with weights, pool and peak activation at start."""
    failure, rank = case.failure, case.rank
    if (
        not case.allocates_by_torch
        or failure.shortage.kind not in OUT
        or (failure.phase is not None and failure.phase not in SERVING)
    ):
        return None
    allocated = failure.shortage.allocated_bytes
    if allocated is None or rank is None or rank.weights is None or rank.pool is None:
        missing = "torch's allocated bytes at start are missing; add the startup log or an hours-long trace"
        return Finding(TORCH, "unknown", missing)
    total = case.total_bytes or 0
    peak = round(limits.activation_ratio * total) if rank.activation is None else rank.activation.nominal_bytes
    graphs = 0 if rank.graphs_actual is None else rank.graphs_actual.nominal_bytes
    planned = rank.weights.nominal_bytes + rank.pool.nominal_bytes + peak + graphs
    over = allocated - planned
    summary = f"torch had allocated {format_bytes(allocated)}; expected from the startup log: {format_bytes(planned)}"
    if over > max(limits.reserved_gap_bytes, round(limits.over_budget_ratio * total)):
        summary = f"{summary}: {format_bytes(over)} more, from growth or from this one step"
        return Finding(TORCH, "suspect", summary, evidence(case))
    return Finding(TORCH, "ok", summary, evidence(case))


def judge_host_growth(case: Case, limits: Limits) -> Finding | None:
    """A kill for lack of host memory is a fault; whether memory had grown, a kill alone does not show.

    Only that signal 9 ended the process is unknown: a liveness probe sends it too.
    """
    shortage = case.failure.shortage
    if shortage.kind == "sanitizer":
        size = "memory" if shortage.leaked_bytes is None else format_bytes(shortage.leaked_bytes)
        summary = f"the sanitizer found {size} of host memory that nothing pointed to when the process ended"
        remedy = "Look in its report for the calls that allocated the largest part, and report them to the engine."
        return Finding(HOST, "fault", summary, evidence(case), remedy=remedy)
    if shortage.kind != "host":
        return None
    used, limit, usage = shortage.process_bytes, shortage.limit_bytes, shortage.usage_bytes
    who = shortage.killed or "the process"
    if re.search(r"allocate|MemoryError", shortage.message):
        asked = "" if shortage.asked_bytes is None else f" of {format_bytes(shortage.asked_bytes)}"
        said = f"an allocation{asked} of host memory failed"
        return Finding(HOST, "fault", said, evidence(case), remedy=_more_memory(case, limits))
    if not _FOR_MEMORY.search(shortage.message):
        summary = (
            f"{who} was killed by signal 9; the kernel's log or `kubectl describe pod` says whether memory ran out"
        )
        return Finding(HOST, "unknown", summary, evidence(case))
    figures = (
        None if used is None else f"{format_bytes(used)} of host memory was its own (anon-rss)",
        None if usage is None else f"{format_bytes(usage)} in use in its cgroup",
        None if limit is None else f"limit {format_bytes(limit)}",
    )
    said = "; ".join((f"{who} was killed: out of host memory, not GPU memory", *filter(None, figures), GROWN))
    return Finding(HOST, "fault", said, evidence(case), remedy=_more_memory(case, limits))


GROWN = "a leak, or a limit that is too low: a recording (--trace) shows which"


def _more_memory(case: Case, limits: Limits) -> str:
    """A memory limit with headroom, in the steps in which one is set, and what else uses host memory."""
    shortage = case.failure.shortage
    most = shortage.limit_bytes or max(shortage.usage_bytes or 0, shortage.process_bytes or 0)
    step = 2**30 if most < 16 * 2**30 else 4 * 2**30 if most < 128 * 2**30 else 16 * 2**30
    new = format_bytes(-(-round(most * limits.host_limit_factor) // step) * step)
    old = " to" if shortage.limit_bytes is None else f": {format_bytes(shortage.limit_bytes)} ->"
    raised = "raise the memory limit of the container or host" + (f"{old} {new}" if most else "")
    return joined(raised, f"lower the settings that use host memory ({case.flag('host_caches')})")


def judge_fragmentation(case: Case, limits: Limits) -> Finding:
    """Look at the blocks where they are known, else at the unused bytes in torch's message."""
    failure = case.failure
    shortage = failure.shortage
    if shortage.kind not in OUT - {"library", "workspace", "buffer"}:
        return Finding(HOLES, "ok", "no torch allocation failed for lack of memory")
    if shortage.kind == "driver" and not case.allocates_by_torch:
        return Finding(HOLES, "ok", "the engine does not allocate through torch")
    if shortage.kind == "async" and failure.phase in {"load", "profile", "warmup"}:
        return Finding(HOLES, "ok", "nothing had run before, so nothing can be fragmented")
    if shortage.kind == "async":
        return _async(case, limits)
    found = holes(failure, limits)
    if found.state in ("unknown", "none"):
        summary = f"{found.figures}: {found.reason}" if found.figures else found.reason
        return Finding(HOLES, "unknown" if found.state == "unknown" else "ok", summary, evidence(case))
    expandable = failure.allocator is not None and failure.allocator.expandable_segments is True
    change = (
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF from torch 2.10) and "
        "restart (a restart alone frees the fragmented memory only for now)"
    )
    if failure.phase == "wake":
        change = "restart the server (sleep mode does not start with expandable_segments:True)"
    remedy = joined(None if expandable else change, lower_fraction(case, shortage.short_bytes))
    summary = f"{asked_for(case)}: {found.reason}"
    if found.state == "slight":
        full = "but they are a tiny share of the device: a full device is likelier"
        return Finding(HOLES, "unknown", f"{summary}, {full}; the agent's black box shows the blocks", evidence(case))
    return Finding(HOLES, "fault", summary, evidence(case), remedy=remedy)


def _async(case: Case, limits: Limits) -> Finding:
    """Bytes that torch does not count are kept by cudaMallocAsync's pool, or belong to other processes."""
    shortage = case.failure.shortage
    if shortage.total_bytes is None or shortage.free_bytes is None or shortage.allocated_bytes is None:
        missing = "cudaMallocAsync reports no blocks, and the message no figures; use torch's own allocator"
        return Finding(HOLES, "unknown", missing)
    rest = shortage.total_bytes - shortage.free_bytes - shortage.allocated_bytes
    if rest <= limits.async_rest_ratio * shortage.total_bytes:
        return Finding(HOLES, "unknown", "cudaMallocAsync reports no blocks; use torch's own allocator")
    summary = (
        f"{asked_for(case)}: {format_bytes(rest)} is in use beyond the {format_bytes(shortage.allocated_bytes)} that "
        "torch counts: cached by cudaMallocAsync, or used by other processes (see nvidia-smi)"
    )
    remedy = "Use torch's own allocator: leave backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF."
    return Finding(HOLES, "suspect", summary, evidence(case), remedy=remedy)


def holes(account: Account, limits: Limits) -> Holes:
    """Judge by the blocks where a black box has looked at them, else by the message."""
    shortage = account.shortage
    if shortage.kind == "async":
        return Holes("unknown", "cudaMallocAsync reports no blocks")
    if shortage.kind == "torch" and shortage.asked_bytes is not None and account.split is not None:
        return _by_blocks(account.split, shortage.asked_bytes, shortage.free_bytes or 0)
    return holes_in_message(shortage, limits)


def _by_blocks(split: ReservedSplit, asked: int, free: int) -> Holes:
    stranded, largest = format_bytes(split.stranded_bytes), format_bytes(split.largest_free_block_bytes)
    figures = f"{format_bytes(asked)} requested, {format_bytes(free)} free, {stranded} stranded between live blocks"
    if free + split.stranded_bytes + split.releasable_bytes < asked:
        if split.pending_bytes < asked:
            return Holes("none", "not enough in total", figures)
        waits = f"{format_bytes(split.pending_bytes)} wait for another stream, so a retry may work"
        return Holes("unknown", f"not enough in total; {waits}", figures)
    if split.largest_free_block_bytes >= asked:
        reason = f"a free block of {largest} was in another pool or stream; retry with one stream"
        return Holes("unknown", reason, figures)
    return Holes("confirmed", f"enough in total, but the largest free block has {largest}", figures)
