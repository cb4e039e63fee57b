"""What is known of one failure: the report of each source, where they agree, and what contradicts. Pure.

Exact figures come first; every further report must agree with all that was taken before it (sizes within rounding, one
device, one kind of failure), and then fills in what is missing. A report that does not agree becomes a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.formatting import format_bytes
from kvdiag.kv.calibration.engine_report import EngineReport, RankReport
from kvdiag.model import Diagnosis, Evidence, Facts, Gap, Timeline
from kvdiag.oom.account import Account
from kvdiag.oom.phase import IN_WORDS, SERVING

_FILLED = (
    "device", "asked_bytes", "free_bytes", "total_bytes", "allowed_bytes", "allocated_bytes", "unallocated_bytes",
    "private_bytes", "process_bytes", "others",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that is known of one crash. `report` is the memory report in the engine's log before it.

    `has_log` is whether a log, or a part of one, was given.
    """

    accounts: tuple[Account, ...] = ()
    report: EngineReport | None = None
    timeline: Timeline | None = None
    facts: Facts = field(default_factory=Facts)
    before: Diagnosis | None = None
    gaps: tuple[Gap, ...] = ()
    has_log: bool = False
    failed_pool_bytes: int | None = None
    """How far below zero the pool's size is that the log prints."""

    @property
    def chief(self) -> Account | None:
        """The report that is judged: the first one, its missing parts filled from those that agree with it."""
        if not self.accounts:
            return None
        first = _heard(self.accounts).first
        if first.phase is None and self.serving_before:
            first = replace(first, phase="request", phase_told_by="the trace")
        return first

    @property
    def agreement(self) -> str:
        """Which sources report this failure."""
        if not self.accounts:
            return ""
        heard = _heard(self.accounts)
        same = [one.origin for one in heard.agreeing]
        told = f"{', '.join(same)} {'agrees' if len(same) == 1 else 'agree'}"
        return f"{heard.first.origin}; {told}" if same else heard.first.origin

    @property
    def contradictions(self) -> tuple[Gap, ...]:
        """The reports of another failure than the one that is judged."""
        if not self.accounts:
            return ()
        heard = _heard(self.accounts)
        return tuple(
            Gap(
                source="postmortem",
                kind="failed",
                reason=f"{other.origin} contradicts {heard.first.origin} ({_said(other)}, not {_said(heard.first)}); "
                "the latter is judged",
            )
            for other in heard.contradicting
        )

    @property
    def serving_before(self) -> bool:
        """Whether requests ran in the last samples of the trace."""
        samples = self.timeline.samples[-30:] if self.timeline is not None else ()
        return any(engine.requests_running for sample in samples for engine in sample.engines or ())

    @property
    def rank(self) -> RankReport | None:
        """The log's memory report of the failed process; of several that may be it, the one with the least memory."""
        ranks = self.report.ranks if self.report is not None else ()
        names = {account.process for account in self.accounts} - {""}
        own = [rank for rank in ranks if rank.name in names]
        smallest = self.report.deciding_rank if self.report is not None else None
        return next(iter(own), None) or smallest or next(iter(ranks), None)

    @property
    def log_would(self) -> str:
        """Which log would fill in what is missing; empty where that log was given."""
        if not self.has_log:
            return "; add the engine's log (--log)"
        return "; add the log from the engine's start" if self.report is None else ""

    @property
    def total_bytes(self) -> int | None:
        """The device's memory, from the message or the log."""
        chief = self.chief
        told = None if chief is None else chief.shortage.total_bytes
        return told or (self.report.total_bytes if self.report is not None else None)

    @property
    def fraction_ratio(self) -> float | None:
        """The memory fraction in use; `None` without a log of the start."""
        if self.report is None or self.report.settings.pool_bytes is not None:
            return None
        told = self.report.settings
        return told.fraction_ratio if told.memory_fraction_ratio or told.version else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """The first of several reports, filled by those that agree with it, and those that do not."""

    first: Account
    agreeing: tuple[Account, ...]
    contradicting: tuple[Account, ...]


def _heard(accounts: Sequence[Account]) -> _Heard:
    """Take one after the other, exact ones first: each has to agree with all that was filled in before it."""
    first, *others = sorted(accounts, key=lambda one: not one.exact)
    agreeing, contradicting = [], []
    for other in others:
        if agree(first, other):
            first = _filled(first, other)
            agreeing.append(other)
        else:
            contradicting.append(other)
    return _Heard(first=first, agreeing=tuple(agreeing), contradicting=tuple(contradicting))


def agree(one: Account, other: Account) -> bool:
    """Whether two reports may be of one failure: no figure of both differs, and they are of one kind."""
    pairs = (
        (one.shortage.asked_bytes, other.shortage.asked_bytes),
        (one.shortage.total_bytes, other.shortage.total_bytes),
    )
    near = all(
        a is None
        or b is None
        or abs(a - b)
        <= max(DEFAULT_LIMITS.same_ratio * max(a, b), DEFAULT_LIMITS.same_bytes if max(a, b) > 2**30 else 0)
        for a, b in pairs
    )
    devices = {one.shortage.device, other.shortage.device} - {None}
    hosts = {one.shortage.kind == "host", other.shortage.kind == "host"}
    refusals = {one.shortage.kind in _REFUSALS, other.shortage.kind in _REFUSALS}
    return near and len(devices) < 2 and len(hosts) == 1 and len(refusals) == 1  # noqa: PLR2004 - one and the same


_REFUSALS = frozenset({"budget", "blocks", "context", "profiling"})


def _filled(first: Account, other: Account) -> Account:
    shortage = first.shortage
    missing = {name: getattr(other.shortage, name) for name in _FILLED if getattr(shortage, name) in (None, ())}
    names = ("process", "rank", "phase", "phase_told_by", "work", "running", "waiting", "kv_usage_ratio",
             "max_num_seqs", "allocator", "split")  # fmt: skip
    parts = {name: getattr(other, name) for name in names if getattr(first, name) in (None, "")}
    return replace(first, shortage=replace(shortage, **missing), later=max(first.later, other.later), **parts)


def _said(account: Account) -> str:
    shortage = account.shortage
    asked = "an allocation" if shortage.asked_bytes is None else format_bytes(shortage.asked_bytes)
    if shortage.kind in _REFUSALS:
        asked = "a refusal to start"
    elif shortage.kind == "host":
        asked = "lack of host memory"
    return asked if shortage.device is None else f"{asked} on GPU {shortage.device}"


def asked_for(case: Case) -> str:
    """What was requested and what was free, in words."""
    chief = case.chief
    if chief is None:
        return "no failure is reported"
    shortage = chief.shortage
    where = "" if shortage.device is None else f" on GPU {shortage.device}"
    who = f" by {chief.process}" if chief.process else ""
    asked = "memory was requested"
    if shortage.asked_bytes is not None:
        asked = f"{format_bytes(shortage.asked_bytes)} requested"
    elif shortage.kind == "masked":
        asked = "out of memory (NVML hides the figures, as on MIG slices and Jetson)"
    there = [] if shortage.free_bytes is None else [f"{format_bytes(shortage.free_bytes)} free"]
    if shortage.unallocated_bytes is not None:
        there.append(f"{format_bytes(shortage.unallocated_bytes)} reserved but unallocated")
    when = "" if chief.phase is None else f" {IN_WORDS[chief.phase]}"
    return f"{asked}{where}{who}{when}" + (f", {' and '.join(there)}" if there else "")


def serving(case: Case) -> bool:
    """Whether it failed while serving."""
    chief = case.chief
    return chief is not None and chief.phase in SERVING


def evidence(case: Case) -> tuple[Evidence, ...]:
    """The figures of the failure, as evidence of every finding about it; unknown ones are left out."""
    chief = case.chief
    if chief is None:
        return ()
    shortage, told, split, work = chief.shortage, chief.origin, chief.split, chief.work
    found = (
        Evidence("sources", case.agreement, "", "kvdiag"),
        Evidence("phase", chief.phase, "", chief.phase_told_by or told),
        Evidence("process", chief.process or None, "", told),
        Evidence("rank", chief.rank, "", told),
        Evidence("device", shortage.device, "", told),
        Evidence("requested", shortage.asked_bytes, "bytes", told),
        Evidence("free_on_device", shortage.free_bytes, "bytes", told),
        Evidence("device_total", shortage.total_bytes, "bytes", told),
        Evidence("allowed", shortage.allowed_bytes, "bytes", told),
        Evidence("allocated", shortage.allocated_bytes, "bytes", told),
        Evidence("reserved", shortage.reserved_bytes, "bytes", told),
        Evidence("reserved_but_unallocated", shortage.unallocated_bytes, "bytes", told),
        Evidence("private_pools", shortage.private_bytes, "bytes", told),
        Evidence("this_process", shortage.process_bytes, "bytes", told),
        Evidence("other_processes", shortage.other_bytes, "bytes", told),
        Evidence("needed", shortage.needed_bytes, "bytes", told),
        Evidence("available", shortage.available_bytes, "bytes", told),
        Evidence("max_model_len", shortage.asked_tokens, "tokens", told),
        Evidence("max_fitting_model_len", shortage.fitting_tokens, "tokens", told),
        Evidence("stranded", None if split is None else split.stranded_bytes, "bytes", told),
        Evidence("releasable", None if split is None else split.releasable_bytes, "bytes", told),
        Evidence("pending", None if split is None else split.pending_bytes, "bytes", told),
        Evidence("largest_free_block", None if split is None else split.largest_free_block_bytes, "bytes", told),
        Evidence("scheduled_tokens", None if work is None else work.scheduled_tokens, "tokens", told),
        Evidence("scheduled_requests", None if work is None else work.requests, "requests", told),
        Evidence("largest_request", None if work is None else work.largest_request, "", told),
        Evidence("running", chief.running, "requests", told),
        Evidence("waiting", chief.waiting, "requests", told),
        Evidence("kv_usage", chief.kv_usage_ratio, "ratio", told),
        Evidence("later_failures", chief.later or None, "times", told),
    )
    return tuple(one for one in found if one.value is not None)
