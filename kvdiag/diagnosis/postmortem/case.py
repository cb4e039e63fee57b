"""What is known of one failure: an account from each source, what they agree in, and what contradicts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvdiag.diagnosis.rule import number
from kvdiag.diagnosis.timeline_queries import readable_bytes
from kvdiag.kv.calibration.engine_report import EngineReport, RankReport
from kvdiag.model import Allocator, Diagnosis, Evidence, Facts, Gap, ReservedSplit, Timeline
from kvdiag.oom.log import Work
from kvdiag.oom.message import Shortage
from kvdiag.oom.phase import IN_WORDS, SERVING, Phase

SAME_RATIO = 0.01
SAME_BYTES = 11 * 2**20
"""Texts print two decimals: of GiB, ten MiB."""

LAST_SECONDS = 600.0
"""The part of a trace that may show what led to a failure at its end."""

_FILLED = (
    "device", "asked_bytes", "free_bytes", "total_bytes", "allowed_bytes", "allocated_bytes", "unallocated_bytes",
    "private_bytes", "process_bytes", "others",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One source's word on a failure. `exact` figures are bytes as counted, others are rounded to print.

    `at_seconds` is a wall clock; `allocator` and `split` are what torch held when it failed.
    """

    origin: str
    shortage: Shortage
    exact: bool = False
    at_seconds: float | None = None
    process: str = ""
    rank: int | None = None
    phase: Phase | None = None
    phase_told_by: str | None = None
    work: Work | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None
    max_num_seqs: int | None = None
    later: int = 0
    allocator: Allocator | None = None
    split: ReservedSplit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that is known of one death. `report` is what the engine's log says of its memory before it.

    `has_log` is whether a log is among what was given, or a part of one.
    """

    accounts: tuple[Account, ...] = ()
    report: EngineReport | None = None
    timeline: Timeline | None = None
    facts: Facts = field(default_factory=Facts)
    before: Diagnosis | None = None
    gaps: tuple[Gap, ...] = ()
    has_log: bool = False
    failed_pool_bytes: int | None = None
    """By how much the pool's size, as the log prints it, is below zero."""

    @property
    def chief(self) -> Account | None:
        """The account that is judged: the first one, its missing parts filled from those that agree with it."""
        if not self.accounts:
            return None
        first = _heard(self.accounts).first
        if first.phase is None and self.serving_before:
            first = replace(first, phase="request", phase_told_by="the trace")
        return first

    @property
    def agreement(self) -> str:
        """Which sources tell of this failure."""
        if not self.accounts:
            return ""
        heard = _heard(self.accounts)
        same = [one.origin for one in heard.agreeing]
        told = f"{', '.join(same)} {'agrees' if len(same) == 1 else 'agree'}"
        return f"{heard.first.origin}; {told}" if same else heard.first.origin

    @property
    def contradictions(self) -> tuple[Gap, ...]:
        """The accounts that tell of another failure than the one that is judged."""
        if not self.accounts:
            return ()
        heard = _heard(self.accounts)
        return tuple(
            Gap(
                source="postmortem",
                kind="failed",
                reason=f"{other.origin} contradicts {heard.first.origin}: it tells of {_said(other)}, the other of "
                f"{_said(heard.first)}; the latter is judged",
            )
            for other in heard.contradicting
        )

    @property
    def serving_before(self) -> bool:
        """Whether the last readings of the trace saw requests in the engine."""
        samples = self.timeline.samples[-30:] if self.timeline is not None else ()
        return any(engine.requests_running for sample in samples for engine in sample.engines or ())

    @property
    def rank(self) -> RankReport | None:
        """What the log says of the failed process's memory; of several that may be it, the one with least."""
        ranks = self.report.ranks if self.report is not None else ()
        names = {account.process for account in self.accounts} - {""}
        own = [rank for rank in ranks if rank.name in names]
        smallest = self.report.deciding_rank if self.report is not None else None
        return next(iter(own), None) or smallest or next(iter(ranks), None)

    @property
    def log_would(self) -> str:
        """Which log would tell what is not told of the time of the failure; empty where that log is given."""
        if not self.has_log:
            return "; the engine's log (--log) would"
        return "; the log from the engine's start would" if self.report is None else ""

    @property
    def total_bytes(self) -> int | None:
        """The device's memory, by the message or the log."""
        chief = self.chief
        told = None if chief is None else chief.shortage.total_bytes
        return told or (self.report.total_bytes if self.report is not None else None)

    @property
    def fraction_ratio(self) -> float | None:
        """The memory fraction in force; `None` without a log of the start."""
        if self.report is None or self.report.settings.pool_bytes is not None:
            return None
        told = self.report.settings
        return told.fraction_ratio if told.memory_fraction_ratio or told.version else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """The first of several accounts, filled by those that agree with it, and those that do not."""

    first: Account
    agreeing: tuple[Account, ...]
    contradicting: tuple[Account, ...]


def _heard(accounts: Sequence[Account]) -> _Heard:
    """Hear one after the other, exact ones first: each has to agree with all that was filled in before it."""
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
    """Whether two accounts may be of one failure: no figure that both tell differs, and it is of one kind."""
    pairs = (
        (one.shortage.asked_bytes, other.shortage.asked_bytes),
        (one.shortage.total_bytes, other.shortage.total_bytes),
    )
    near = all(
        a is None or b is None or abs(a - b) <= max(SAME_RATIO * max(a, b), SAME_BYTES if max(a, b) > 2**30 else 0)
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
    asked = "an allocation" if shortage.asked_bytes is None else readable_bytes(shortage.asked_bytes)
    if shortage.kind in _REFUSALS:
        asked = "a refusal to start"
    elif shortage.kind == "host":
        asked = "the host's memory"
    return asked if shortage.device is None else f"{asked} on GPU {shortage.device}"


def asked_for(case: Case) -> str:
    """What was asked and what was there, in words."""
    chief = case.chief
    if chief is None:
        return "nothing is told"
    shortage = chief.shortage
    where = "" if shortage.device is None else f" on GPU {shortage.device}"
    who = f" by {chief.process}" if chief.process else ""
    asked = "memory was asked for"
    if shortage.asked_bytes is not None:
        asked = f"{readable_bytes(shortage.asked_bytes)} asked for"
    elif shortage.kind == "masked":
        asked = "memory ran out (NVML refused the figures, as on MIG slices and Jetson)"
    there = [] if shortage.free_bytes is None else [f"{readable_bytes(shortage.free_bytes)} free"]
    if shortage.unallocated_bytes is not None:
        there.append(f"{readable_bytes(shortage.unallocated_bytes)} reserved but unallocated")
    when = "" if chief.phase is None else f" {IN_WORDS[chief.phase]}"
    return f"{asked}{where}{who}{when}" + (f", {' and '.join(there)}" if there else "")


def serving(case: Case) -> bool:
    """Whether it failed while serving."""
    chief = case.chief
    return chief is not None and chief.phase in SERVING


def evidence(case: Case) -> tuple[Evidence, ...]:
    """The figures of the failure that every finding on it stands on; what nobody tells is left out."""
    chief = case.chief
    if chief is None:
        return ()
    shortage, told, split, work = chief.shortage, chief.origin, chief.split, chief.work
    found = (
        number("told_by", case.agreement, "", "kvdiag"),
        number("phase", chief.phase, "", chief.phase_told_by or told),
        number("process", chief.process or None, "", told),
        number("rank", chief.rank, "", told),
        number("device", shortage.device, "", told),
        number("asked", shortage.asked_bytes, "bytes", told),
        number("free_on_device", shortage.free_bytes, "bytes", told),
        number("device_total", shortage.total_bytes, "bytes", told),
        number("allowed", shortage.allowed_bytes, "bytes", told),
        number("allocated", shortage.allocated_bytes, "bytes", told),
        number("reserved", shortage.reserved_bytes, "bytes", told),
        number("reserved_but_unallocated", shortage.unallocated_bytes, "bytes", told),
        number("private_pools", shortage.private_bytes, "bytes", told),
        number("this_process", shortage.process_bytes, "bytes", told),
        number("others", shortage.other_bytes, "bytes", told),
        number("needed", shortage.needed_bytes, "bytes", told),
        number("available", shortage.available_bytes, "bytes", told),
        number("max_model_len", shortage.asked_tokens, "tokens", told),
        number("longest_that_fits", shortage.fitting_tokens, "tokens", told),
        number("stranded", None if split is None else split.stranded_bytes, "bytes", told),
        number("releasable", None if split is None else split.releasable_bytes, "bytes", told),
        number("pending", None if split is None else split.pending_bytes, "bytes", told),
        number("largest_free_block", None if split is None else split.largest_free_block_bytes, "bytes", told),
        number("scheduled_tokens", None if work is None else work.scheduled_tokens, "tokens", told),
        number("scheduled_requests", None if work is None else work.requests, "requests", told),
        number("largest_request", None if work is None else work.largest_request, "", told),
        number("running", chief.running, "requests", told),
        number("waiting", chief.waiting, "requests", told),
        number("kv_usage", chief.kv_usage_ratio, "ratio", told),
        number("later_failures", chief.later or None, "times", told),
    )
    return tuple(one for one in found if one.value is not None)
