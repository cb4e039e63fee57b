"""spike.graph_capture and spike.activation: a transient allocation that did not fit.

Each is ruled out first: another phase of the server, fragmentation, other processes' memory, a second copy of the
weights, a leak that had taken the headroom before. What remains is a step that was too large.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.headroom import OUT, foreign, holes
from kvdiag.diagnosis.postmortem.remedies import STEP_TOKENS, joined, lower_fraction, scaled
from kvdiag.diagnosis.rule import unknown
from kvdiag.formatting import format_bytes
from kvdiag.model import Finding

CAPTURE = "spike.graph_capture"
ACTIVATION = "spike.activation"
COPY = "baseline.duplicate_model"

_TRANSIENT = frozenset({"profile", "warmup", "prefill", "decode", "request", "sampler", "logprobs", "encoder", "wake"})
_NOT_TRANSIENT = {"load": "loading the weights", "kv_pool": "allocating the KV pool", "startup": "starting"}


def judge_capture(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Memory ran out while graphs were captured; a capture that failed for another reason decides nothing."""
    chief = case.chief
    if chief is None:
        return unknown(CAPTURE, "no failure is reported; pass a log, a black box or torch's message")
    if chief.shortage.kind == "capture":
        summary = "a graph capture failed, but no figure shows lack of memory; look at the first error before it"
        return (Finding(CAPTURE, "unknown", summary, evidence(case)),)
    if chief.phase is None:
        return unknown(CAPTURE, f"not known whether graphs were being captured{case.log_would}")
    if chief.phase != "graph_capture" or chief.shortage.kind not in OUT:
        return (Finding(CAPTURE, "ok", "it did not fail during graph capture"),)
    if foreign(case, limits) is not None:
        summary = f"{asked_for(case)}; other processes use enough to explain it"
        return (Finding(CAPTURE, "suspect", summary, evidence(case)),)
    rank = case.rank
    estimate = None if rank is None or rank.graphs_estimate is None else rank.graphs_estimate.nominal_bytes
    short = chief.shortage.short_bytes
    remedy = joined(
        lower_fraction(case, short) + (" (a minimum: further graphs need more)" if short is not None else ""),
        "capture fewer sizes (--max-cudagraph-capture-size, or cudagraph_capture_sizes in --compilation-config)",
        _fewer_sequences(case),
        "set --enforce-eager, which needs no graphs but is slower",
    )
    promised = "" if estimate is None else f"; the engine had reserved {format_bytes(estimate)} for them"
    return (
        Finding(
            CAPTURE,
            "fault",
            f"{asked_for(case)}{promised}",
            evidence(case),
            remedy=remedy,
        ),
    )


def judge_activation(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """An allocation of a step did not fit: not holes, not others' memory, and not what is taken once at start."""
    chief = case.chief
    if chief is None:
        return unknown(ACTIVATION, "no failure is reported; pass a log, a black box or torch's message")
    shortage = chief.shortage
    if shortage.kind not in OUT - {"library"}:
        return (Finding(ACTIVATION, "ok", "no step ran out of device memory"),)
    if chief.phase is not None and chief.phase not in _TRANSIENT:
        told = _NOT_TRANSIENT.get(
            chief.phase, "capturing CUDA graphs" if chief.phase == "graph_capture" else "the cache grew"
        )
        return (Finding(ACTIVATION, "ok", f"it failed while {told}, not in a step"),)
    if chief.phase is None and shortage.asked_bytes is None:
        return unknown(
            ACTIVATION,
            f"{asked_for(case)}, without size or time; add the engine's log from its start, or the agent's black box",
        )
    if holes(chief, limits).state == "confirmed":
        return (Finding(ACTIVATION, "ok", "enough memory was free, but not in one block"),)
    if shortage.kind == "async" and chief.phase is None:
        return unknown(ACTIVATION, "cudaMallocAsync does not report what it caches; use torch's own allocator")
    if foreign(case, limits) is not None:
        return (Finding(ACTIVATION, "ok", "it would have fit without other processes' memory"),)
    if any(
        one.id == COPY and one.status in {"fault", "suspect"} for one in (case.before.findings if case.before else ())
    ):
        summary = "it would have fit without the second copy of the weights that the trace shows"
        return (Finding(ACTIVATION, "ok", summary),)
    grown = [one for one in (case.before.findings if case.before else ()) if one.id.startswith("leak.device")]
    leaks = next((one for one in grown if one.status in {"fault", "suspect"}), None)
    when = "" if chief.phase is not None else f"; whether at start or while serving is unknown{case.log_would}"
    enough = shortage.free_bytes is not None and shortage.free_bytes >= (shortage.asked_bytes or 2**63)
    if shortage.enough_free:
        when = "; the device had enough free memory, so another limit refused the allocation" + when
    summary = asked_for(case) + (when if leaks is None else f"; {leaks.id} had used up the headroom before")
    return (
        Finding(
            ACTIVATION,
            "fault" if leaks is None and not enough else "suspect",
            summary,
            evidence(case),
            remedy=_remedy(case),
        ),
    )


def _remedy(case: Case) -> str:
    chief = case.chief
    phase = None if chief is None else chief.phase
    if chief is not None and chief.shortage.kind == "workspace":
        return (
            "Raise the library's workspace (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE), or lower --max-num-batched-tokens."
        )
    if chief is not None and chief.shortage.enough_free:
        return (
            "Look for another limit: of the process (ulimit -v, the share of a vGPU or container), or host memory "
            "on a GPU "
            "without its own. Lower --gpu-memory-utilization where other processes come and go."
        )
    tokens = scaled("--max-num-batched-tokens", _batched(case), case, step=STEP_TOKENS)
    if phase == "profile":
        # The pool does not exist yet: a smaller memory fraction would free nothing.
        return joined(
            tokens or "lower --max-num-batched-tokens", _fewer_sequences(case), "raise --tensor-parallel-size"
        )
    room = lower_fraction(case, None if chief is None else chief.shortage.short_bytes)
    if phase in {"sampler", "warmup", "decode"}:
        return joined(room, _fewer_sequences(case) or "lower --max-num-seqs")
    if phase == "logprobs":
        return joined(room, "lower --max-logprobs, and avoid prompt_logprobs for long prompts", tokens)
    if phase == "encoder":
        return joined(room, "lower --limit-mm-per-prompt or the image size (--mm-processor-kwargs)")
    return joined(room, tokens or "lower --max-num-batched-tokens where prompts are long")


def _batched(case: Case) -> int | None:
    settings = None if case.report is None else case.report.settings
    work = None if case.chief is None else case.chief.work
    told = None if settings is None else settings.max_num_batched_tokens
    return told or (None if work is None else work.scheduled_tokens)


def _fewer_sequences(case: Case) -> str | None:
    chief = case.chief
    if chief is None:
        return None
    return scaled("--max-num-seqs", chief.max_num_seqs or chief.shortage.requests, case)
