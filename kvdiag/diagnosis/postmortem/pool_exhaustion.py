"""leak.kv_blocks and capacity.concurrency by an engine's own words about its KV pool: lost, or full.

Lost: the engine counts its pool while nothing runs, and the count does not add up (a fault of any size); or it
has no blocks left although it admits only requests whose blocks are free (suspect, since the count is not printed).
Full: it found no room for what was running. A pool that was full while requests only gave way is suspect. One request
that had the pool to itself was too long, not one of too many.
"""

import re
from collections.abc import Sequence

from kvdiag.diagnosis.blocks.orphans import LISTED, named_orphans, who_held
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.postmortem.case import Case, evidence
from kvdiag.diagnosis.postmortem.remedies import joined
from kvdiag.formatting import format_count, plural
from kvdiag.model import Evidence, Finding, Status
from kvdiag.oom.last_requests import LastRequest
from kvdiag.oom.pool_count import PoolCount

BLOCKS, CONCURRENCY = "leak.kv_blocks", "capacity.concurrency"
_ALONE = re.compile(r"only one request")
_LOST_IDS = re.compile(r"\bleaked_(\w{1,30})_pages=\{(\d[\d, ]{0,2000})")
_RELEASED_TWICE = re.compile(r"double free|use-after-free")


def judge_lost_blocks(case: Case, limits: Limits) -> Finding | None:
    """Read the engine's own count of its pool."""
    shortage = case.failure.shortage
    if shortage.kind == "kv_held":
        return _held_by_connector(case)
    if _by_rounding(case, limits) or (shortage.kind not in {"kv_lost", "kv_overrun"} and not unexplained(case, limits)):
        return None
    if shortage.kind == "kv_overrun":
        summary = "no KV blocks were left although the engine admits only requests whose blocks are free"
        kept = f"{summary}: earlier requests did not release theirs"
        return Finding(BLOCKS, "suspect", kept, evidence(case))
    if shortage.kind == "kv_full":
        used = f"the requests that failed had {format_count(shortage.held_tokens or 0)} tokens"
        summary = f"the KV pool of {format_count(shortage.fitting_tokens or 0)} tokens was full while {used}"
        return Finding(BLOCKS, "suspect", summary, evidence(case))
    wrong = [_off(count) for count in shortage.counts if count.lost]
    twice = _RELEASED_TWICE.search(shortage.message) is not None
    uncounted = "released twice, or while in use" if twice else "lost"
    counted = "; ".join(wrong) or f"units of its KV pool are {uncounted} (the log's end has no figures)"
    twice = twice or any(count.lost < 0 for count in shortage.counts)
    who, holders = _who(case, "released them twice" if twice else "lost them")
    return Finding(
        BLOCKS,
        "fault",
        f"the engine's own check: {counted}; {who}",
        (*evidence(case), *_lost_ids(shortage.message), *holders),
    )


def _who(case: Case, did: str) -> tuple[str, tuple[Evidence, ...]]:
    """The requests that lost what the engine missed: by the agent's black box, else by the log, else how to learn them.

    An engine counts its pool whenever nothing runs: one of the requests since then lost it.
    """
    owners, last = case.failure.owners, case.failure.last_requests
    if owners is not None and owners.orphaned_blocks:
        return who_held((owners,)), named_orphans((owners,))
    if not last:
        return f"which request {did} is unknown; run the server with the agent, and pass its black box", ()
    rows = _listed(sorted(last, key=lambda one: one.finished)[:LISTED])
    without_end = sum(not one.finished for one in last)
    which = f", {format_count(without_end)} without an end" if without_end else ""
    which = f": {last[0].request}" if len(last) == 1 else which
    return f"the log has {plural(len(last), 'request')} since the engine was last idle{which}", rows


def _held_by_connector(case: Case) -> Finding:
    """Blocks that no other server fetched: the connector released them at its timeout."""
    failure = case.failure
    name, requests = failure.connector or "the KV connector", failure.last_requests
    held = plural(len(requests), "finished request") if requests else "finished requests"
    which = f": {requests[0].request}" if len(requests) == 1 else ""
    summary = f"{name} held the KV blocks of {held} until its timeout{which}"
    rows = (*evidence(case), Evidence("connector", name, "", "log"), *_listed(requests[-LISTED:]))
    return Finding(BLOCKS, "suspect", summary, rows)


def _listed(requests: Sequence[LastRequest]) -> tuple[Evidence, ...]:
    ends = {True: "finished", False: "no end in the log"}
    return tuple(Evidence("last_request", f"{one.request}: {ends[one.finished]}", "", "log") for one in requests)


def _lost_ids(message: str) -> tuple[Evidence, ...]:
    """The ids of what is lost, where the check prints them."""
    return tuple(
        Evidence(f"lost_{pool}_ids", ", ".join(ids.replace(" ", "").split(",")[:LISTED]), "", "log")
        for pool, ids in _LOST_IDS.findall(message)
    )


def _off(count: PoolCount) -> str:
    if count.lost < 0:
        more = f"{format_count(-count.lost)} more are free or cached than its {format_count(count.total)}"
        return f"{count.pool}: {more}: released twice"
    return f"{count.pool}: {format_count(count.lost)} of {format_count(count.total)} lost"


def _by_rounding(case: Case, limits: Limits) -> bool:
    """Whether hardly any block is missing where only requests whose tokens have room are admitted."""
    shortage = case.failure.shortage
    asked, left = shortage.asked_tokens, shortage.fitting_tokens
    if shortage.kind != "kv_overrun" or asked is None or left is None:
        return False
    return asked - left <= limits.rounding_ratio * asked


def unexplained(case: Case, limits: Limits) -> bool:
    """Whether a pool was full although what the failed requests had of it is too little: something kept the rest."""
    shortage = case.failure.shortage
    held, capacity = shortage.held_tokens, shortage.fitting_tokens
    if held is None or capacity is None:
        return False
    return held + limits.batch_tokens < limits.unexplained_ratio * capacity


def alone(case: Case, limits: Limits) -> bool:
    """Whether one request was too long for the pool, rather than all requests together."""
    failure = case.failure
    shortage, pools = failure.shortage, case.facts.pools
    if shortage.kind != "kv_full" or unexplained(case, limits):
        return False
    capacity = case.report.tokens or (pools[0].capacity_tokens if pools else None)
    longer = capacity is not None and shortage.part is None and (shortage.asked_tokens or 0) > capacity
    return longer or shortage.requests == 1 or _ALONE.search(shortage.message) is not None


def judge_concurrency(case: Case, limits: Limits) -> Finding | None:
    """Read that the engine found no room in its pool, or that running requests gave way."""
    failure = case.failure
    shortage = failure.shortage
    if shortage.kind not in {"kv_full", "retracted"} and not _by_rounding(case, limits):
        return None
    if alone(case, limits):
        return Finding(CONCURRENCY, "ok", "one request alone was too long for the pool")
    if unexplained(case, limits):
        return Finding(CONCURRENCY, "ok", "the requests that ran did not fill the pool")
    slots = shortage.part if shortage.kind != "kv_overrun" else None
    what = slots or "KV pool"
    load = [
        f"{format_count(count)} {state}"
        for count, state in ((failure.running, "running"), (failure.waiting, "waiting"))
        if count is not None
    ]
    asked, left = shortage.asked_tokens, shortage.fitting_tokens
    unit = "slots" if slots else shortage.part or "tokens"
    short = "" if asked is None else f": {format_count(asked)} {unit} needed"
    short += "" if left is None or asked is None else f", {format_count(left)} left"
    counted = f" ({', '.join(load)})" if load else ""
    status: Status = "fault"
    if shortage.kind == "retracted":
        summary, status = f"the {what} was full and running requests gave way{counted}", "suspect"
    elif asked is not None and left is not None and left >= asked:
        summary, status = (
            f"the {what} refused an allocation{short}: whole pages are needed, or another pool was short",
            "suspect",
        )
    else:
        few = f"there were too few {slots}" if slots else "the KV pool was too small"
        summary = f"{few} for the requests that ran at once{short}{counted}"
    remedy: str | None = joined(
        f"lower {case.flag('max_num_seqs')}" + ("" if not failure.running else f" below {failure.running}"),
        None if shortage.part else f"shorten contexts ({case.flag('max_model_len')})",
        "add a replica",
    )
    if case.flag("blocks_override") == case.flag("max_model_len"):
        remedy = None  # one flag is the pool's size, too: the engine's own text says what to do
    return Finding(CONCURRENCY, status, summary, evidence(case), remedy=remedy)
