"""capacity.long_context: the engine refused to start because its KV pool is smaller than one longest request.

A cache that grows in torch, where no pool is taken, runs out in the same way while it serves.
"""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.remedies import joined, lower_fraction, raise_fraction
from kvdiag.diagnosis.rule import unknown
from kvdiag.formatting import format_bytes
from kvdiag.model import Finding

ID = "capacity.long_context"


def judge(case: Case, limits: Limits) -> tuple[Finding, ...]:  # noqa: ARG001 - every rule is called alike
    """Read the refusal, or the failed growth of a cache in torch."""
    chief = case.chief
    if chief is None:
        return unknown(ID, "no failure is reported; pass a log, a black box or torch's message")
    told = chief.shortage
    if chief.phase == "kv_growth" and told.kind in {"torch", "driver", "masked"}:
        remedy = joined("shorten contexts or the batch", lower_fraction(case, told.short_bytes))
        summary = f"{asked_for(case)}: the KV cache of the running requests does not fit"
        return (Finding(ID, "fault", summary, evidence(case), remedy=remedy),)
    if told.kind != "context":
        return (Finding(ID, "ok", "the engine did not reject the context length"),)
    missing = None
    if told.needed_bytes is not None and told.available_bytes is not None:
        missing = told.needed_bytes - told.available_bytes
    asked = "the longest request" if told.asked_tokens is None else f"a request of {told.asked_tokens:,} tokens"
    needs = " does not fit:"
    if told.needed_bytes is not None:
        needs = f" needs {format_bytes(told.needed_bytes)} of KV cache, and"
    has = "" if told.available_bytes is None else f" has {format_bytes(told.available_bytes)} and"
    fits = "less" if told.fitting_tokens is None else f"{told.fitting_tokens:,} tokens"
    remedy = joined(
        "lower --max-model-len"
        + ("" if told.fitting_tokens is None else f": {told.asked_tokens or 'now'} -> {told.fitting_tokens}"),
        raise_fraction(case, missing) if missing else None,
        "--kv-cache-dtype fp8 holds twice the tokens",
        f"split the model over more GPUs: {format_bytes(missing)} are missing" if missing else None,
    )
    return (
        Finding(
            ID,
            "fault",
            f"{asked}{needs} the pool{has} holds {fits}",
            evidence(case),
            remedy=remedy,
        ),
    )
