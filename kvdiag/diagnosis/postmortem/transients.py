"""spike.graph_capture and spike.activation: a transient need that met too little room."""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.headroom import OUT, foreign, holes
from kvdiag.diagnosis.postmortem.remedies import STEP_TOKENS, joined, lower_fraction, scaled
from kvdiag.diagnosis.rule import unseen
from kvdiag.model import Finding

CAPTURE = "spike.graph_capture"
ACTIVATION = "spike.activation"
COPY = "baseline.duplicate_model"

_TRANSIENT = frozenset({"profile", "warmup", "prefill", "decode", "request", "sampler", "logprobs", "encoder", "wake"})
_NOT_TRANSIENT = {"load": "the weights were loaded", "kv_pool": "the KV pool was taken", "startup": "it started"}


def judge_capture(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """Memory ran out while graphs were captured; a capture that failed for another reason decides nothing."""
    chief = case.chief
    if chief is None:
        return unseen(CAPTURE, "no failure is told")
    if chief.shortage.kind == "capture":
        told = "a capture failed, and no figure says that it was for want of memory; the first error before it would"
        return (Finding(id=CAPTURE, status="unknown", summary=f"cannot tell: {told}", evidence=evidence(case)),)
    if chief.phase is None:
        return unseen(CAPTURE, f"whether graphs were being captured is not told{case.log_would}")
    if chief.phase != "graph_capture" or chief.shortage.kind not in OUT:
        return (Finding(id=CAPTURE, status="ok", summary="it was not while graphs were captured"),)
    if foreign(case, limits) is not None:
        summary = f"{asked_for(case)}; what others hold would have been enough"
        return (Finding(id=CAPTURE, status="suspect", summary=summary, evidence=evidence(case)),)
    rank = case.rank
    estimate = None if rank is None or rank.graphs_estimate is None else rank.graphs_estimate.nominal_bytes
    short = chief.shortage.short_bytes
    remedy = joined(
        lower_fraction(case, short)
        + (" (at least: the graphs not yet captured come on top)" if short is not None else ""),
        "capture fewer sizes (--max-cudagraph-capture-size, or cudagraph_capture_sizes in --compilation-config)",
        _fewer_sequences(case),
        "--enforce-eager does without graphs, and is slower",
    )
    promised = "" if estimate is None else f"; the engine had kept {estimate / 2**30:.2f} GiB for them"
    return (
        Finding(
            id=CAPTURE,
            status="fault",
            summary=f"{asked_for(case)}{promised}",
            evidence=evidence(case),
            remedy=remedy,
        ),
    )


def judge_activation(case: Case, limits: Limits) -> tuple[Finding, ...]:
    """An allocation of a step did not fit: not holes, not others' memory, and not what is taken once at start."""
    chief = case.chief
    if chief is None:
        return unseen(ACTIVATION, "no failure is told")
    shortage = chief.shortage
    if shortage.kind not in OUT - {"library"}:
        return (Finding(id=ACTIVATION, status="ok", summary="no step ran out of device memory"),)
    if chief.phase is not None and chief.phase not in _TRANSIENT:
        told = _NOT_TRANSIENT.get(chief.phase, "graphs were captured" if chief.phase == "graph_capture" else "it grew")
        return (Finding(id=ACTIVATION, status="ok", summary=f"it was when {told}, not in a step"),)
    if chief.phase is None and shortage.asked_bytes is None:
        return unseen(
            ACTIVATION,
            f"{asked_for(case)}, and neither how much was asked for nor when is told; the engine's log "
            "from its start, or the agent's black box, would",
        )
    if holes(chief, limits).state == "confirmed":
        return (Finding(id=ACTIVATION, status="ok", summary="there was room for it, in pieces"),)
    if shortage.kind == "async" and chief.phase is None:
        return unseen(ACTIVATION, "what cudaMallocAsync keeps is not told")
    if foreign(case, limits) is not None:
        return (Finding(id=ACTIVATION, status="ok", summary="without what others hold there was room for it"),)
    if any(
        one.id == COPY and one.status in {"fault", "suspect"} for one in (case.before.findings if case.before else ())
    ):
        summary = "without the second copy of its weights, as the time before it shows, there was room for it"
        return (Finding(id=ACTIVATION, status="ok", summary=summary),)
    grown = [one for one in (case.before.findings if case.before else ()) if one.id.startswith("leak.device")]
    leaks = next((one for one in grown if one.status in {"fault", "suspect"}), None)
    when = "" if chief.phase is not None else f"; whether it was a request or the start is not told{case.log_would}"
    enough = shortage.free_bytes is not None and shortage.free_bytes >= (shortage.asked_bytes or 2**63)
    if shortage.enough_free:
        when = "; the device had more free, so another limit stood against it" + when
    summary = asked_for(case) + (when if leaks is None else f"; {leaks.id} had taken the headroom before")
    return (
        Finding(
            id=ACTIVATION,
            status="fault" if leaks is None and not enough else "suspect",
            summary=summary,
            evidence=evidence(case),
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
            "Look for the limit: of the process (ulimit -v, a vGPU's or container's share), or of the host's memory on "
            "a GPU that has none of its own; a smaller --gpu-memory-utilization helps where others come and go."
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
        return joined(room, "limit --max-logprobs, and prompt_logprobs of long prompts", tokens)
    if phase == "encoder":
        return joined(room, "lower --limit-mm-per-prompt, or the images' size (--mm-processor-kwargs)")
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
