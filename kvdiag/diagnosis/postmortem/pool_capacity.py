"""capacity.long_context: the engine says that one request of the longest context does not fit its pool."""

from __future__ import annotations

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, asked_for, evidence
from kvdiag.diagnosis.postmortem.remedies import joined, lower_fraction, raise_fraction
from kvdiag.diagnosis.rule import unseen
from kvdiag.diagnosis.timeline_queries import readable_bytes
from kvdiag.model import Finding

ID = "capacity.long_context"


def judge(case: Case, limits: Limits) -> tuple[Finding, ...]:  # noqa: ARG001 - every rule is called alike
    """Read the refusal; a cache that grows in torch, where no pool was taken, runs out like this as well."""
    chief = case.chief
    if chief is None:
        return unseen(ID, "no failure is told")
    told = chief.shortage
    if chief.phase == "kv_growth" and told.kind in {"torch", "driver", "masked"}:
        remedy = joined("shorten contexts or the batch", lower_fraction(case, told.short_bytes))
        summary = f"{asked_for(case)}: the cache of the requests in flight needs more than there is"
        return (Finding(id=ID, status="fault", summary=summary, evidence=evidence(case), remedy=remedy),)
    if told.kind != "context":
        return (Finding(id=ID, status="ok", summary="the engine did not refuse a context length"),)
    missing = None
    if told.needed_bytes is not None and told.available_bytes is not None:
        missing = told.needed_bytes - told.available_bytes
    asked = "the longest request" if told.asked_tokens is None else f"a request of {told.asked_tokens:,} tokens"
    needs = " does not fit:"
    if told.needed_bytes is not None:
        needs = f" needs {readable_bytes(told.needed_bytes)} of KV cache, and"
    has = "" if told.available_bytes is None else f" has {readable_bytes(told.available_bytes)} and"
    fits = "less" if told.fitting_tokens is None else f"{told.fitting_tokens:,} tokens"
    remedy = joined(
        "lower --max-model-len"
        + ("" if told.fitting_tokens is None else f": {told.asked_tokens or 'now'} -> {told.fitting_tokens}"),
        raise_fraction(case, missing) if missing else None,
        "--kv-cache-dtype fp8 holds twice the tokens",
        f"split the model further: {missing} bytes ({readable_bytes(missing)}) are missing" if missing else None,
    )
    return (
        Finding(
            id=ID,
            status="fault",
            summary=f"{asked}{needs} the pool{has} holds {fits}",
            evidence=evidence(case),
            remedy=remedy,
        ),
    )
