"""What is known of one failure: the report of each source, where they agree, and what contradicts. Pure.

Exact figures come first, unverified ones last; every further report must agree with all that was taken before it (sizes
within rounding, one device, one kind of failure), and then fills in what is missing. A report that does not agree
becomes a gap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.engine_memory import allocates_by_torch, sized_by_trial_run
from kvdiag.formatting import format_bytes
from kvdiag.kv.calibration.engine_report import EngineReport, RankReport
from kvdiag.model import Diagnosis, Evidence, Facts, Gap, Timeline
from kvdiag.oom.account import Account
from kvdiag.oom.message import WARNINGS, Kind
from kvdiag.oom.phase import IN_WORDS

OUT: frozenset[Kind] = frozenset({"torch", "async", "driver", "library", "masked", "warmup", "workspace", "buffer"})
"""Kinds that mean that device memory ran out."""

OF_ANY_ENGINE: frozenset[Kind] = frozenset({"torch", "async", "driver", "library", "masked"})
"""Kinds among these whose message is torch's or CUDA's, the same for each engine."""

_REFUSALS: frozenset[Kind] = frozenset({"budget", "blocks", "context", "profiling", "model", "component", "prefill"})
"""Kinds that mean that the engine refused to start."""

_POOL: frozenset[Kind] = frozenset({"kv_lost", "kv_overrun", "kv_full", *WARNINGS})
"""Kinds of the KV pool, which is there and does not suffice."""

_HOST: frozenset[Kind] = frozenset({"host", "sanitizer"})

_FILLED_FIGURES = (
    "device", "asked_bytes", "free_bytes", "total_bytes", "allowed_bytes", "allocated_bytes", "unallocated_bytes",
    "private_bytes", "process_bytes", "others", "killed", "limit_bytes", "usage_bytes",
)  # fmt: skip
_FILLED_PARTS = (
    "process", "rank", "phase", "phase_source", "work", "running", "waiting", "kv_usage_ratio", "max_num_seqs",
    "graphs_captured", "allocator", "split", "owners", "last_requests",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that is known of one crash. `report` is the engine's memory report in the log, else empty.

    `engine_name` is the engine that wrote the log, `flags` are its settings' command-line flags; `has_log` is whether a
    log, or a part of one, was given, `clean_logs` those of them without a failure. `kv_connector` and `features` are
    those that a log shows, `signs` the ids of known reports whose line it has.
    """

    accounts: tuple[Account, ...] = ()
    report: EngineReport = field(default_factory=EngineReport)
    engine_name: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    timeline: Timeline | None = None
    facts: Facts = field(default_factory=Facts)
    before: Diagnosis | None = None
    gaps: tuple[Gap, ...] = ()
    has_log: bool = False
    clean_logs: tuple[str, ...] = ()
    kv_connector: str | None = None
    features: tuple[str, ...] | None = None
    signs: tuple[str, ...] = ()
    failed_pool_bytes: int | None = None
    """How far below zero the pool's size is that the log prints."""

    @property
    def has_report(self) -> bool:
        """Whether a log has reported anything of the start."""
        return self.report != EngineReport()

    @property
    def failure(self) -> Account:
        """The report that is judged: the first one, its missing parts filled from those that agree with it.

        Raises:
            ValueError: no failure is reported.
        """
        first, _, _ = _merged(self.accounts)
        samples = self.timeline.samples[-DEFAULT_LIMITS.last_samples :] if self.timeline is not None else ()
        if first.phase is None and any(one.requests_running for sample in samples for one in sample.engines or ()):
            return replace(first, phase="request", phase_source="the trace")
        return first

    @property
    def allocates_by_torch(self) -> bool:
        """Whether torch may hold the engine's memory; where the engine is not known it may."""
        name = self.engine_name or self.facts.engine_name
        return name is None or allocates_by_torch(name)

    @property
    def profiles(self) -> bool:
        """Whether the engine sizes its pool by a trial run of its largest step."""
        return sized_by_trial_run(self.engine_name or self.facts.engine_name)

    def flag(self, setting: str) -> str:
        """The flag that changes a setting; the setting in words where the engine has none."""
        return self.flags.get(setting) or f"the {setting.replace('_', ' ')}"

    @property
    def agreement(self) -> str:
        """Which sources report this failure, and which logs none."""
        first, agreeing, _ = _merged(self.accounts)
        same = [one.origin for one in agreeing]
        parts = [first.origin]
        if same:
            parts.append(f"{', '.join(same)} {'agrees' if len(same) == 1 else 'agree'}")
        if self.clean_logs:
            parts.append(f"no failure in {', '.join(self.clean_logs)}")
        return "; ".join(parts)

    @property
    def contradictions(self) -> tuple[Gap, ...]:
        """The reports of another failure than the one that is judged."""
        if not self.accounts:
            return ()
        first, _, contradicting = _merged(self.accounts)
        return tuple(
            Gap(
                source="postmortem",
                kind="failed",
                reason=f"{other.origin} contradicts {first.origin} ({_brief(other)}, not {_brief(first)}); "
                "the latter is judged",
            )
            for other in contradicting
        )

    @property
    def rank(self) -> RankReport | None:
        """The log's memory report of the failed process; of several that may be it, the one with the least memory."""
        names = {account.process for account in self.accounts} - {""}
        own = [rank for rank in self.report.ranks if rank.name in names]
        return next(iter(own), None) or self.report.deciding_rank or next(iter(self.report.ranks), None)

    @property
    def missing_log(self) -> str:
        """Which log would fill in what is missing, as the end of a sentence; empty where that log was given."""
        if not self.has_log:
            return "; add the engine's log (--log)"
        return "; add the agent's black box" if self.has_report else "; add the log from the engine's start"

    @property
    def total_bytes(self) -> int | None:
        """The device's memory, from the message or the log."""
        printed = self.failure.shortage.total_bytes if self.accounts else None
        return printed or self.report.total_bytes

    @property
    def pool_bytes(self) -> int | None:
        """The KV pool's size where a setting gives it, by the log of the start or the trace."""
        known = self.facts.pools[0].pool_bytes if self.facts.pools else None
        return known if self.report.settings.pool_bytes is None else self.report.settings.pool_bytes

    @property
    def fraction_ratio(self) -> float | None:
        """The memory fraction in use; `None` without a log of the start or a trace, or where the pool has a size."""
        if self.pool_bytes is not None:
            return None
        if self.facts.pools and not self.has_report:
            return self.facts.pools[0].memory_fraction_ratio
        settings = self.report.settings
        return settings.fraction_ratio if settings.memory_fraction_ratio or settings.version else None


def _merged(accounts: Sequence[Account]) -> tuple[Account, list[Account], list[Account]]:
    """The first of several reports, filled by those that agree with it, those reports, and those that do not.

    Exact ones come first, unverified ones last, and each has to agree with all that was filled in before it.
    """
    first, *others = sorted(accounts, key=lambda one: (one.unverified, not one.exact))
    agreeing: list[Account] = []
    contradicting: list[Account] = []
    for other in others:
        if agree(first, other):
            first = _filled(first, other)
            agreeing.append(other)
        else:
            contradicting.append(other)
    return first, agreeing, contradicting


def agree(one: Account, other: Account) -> bool:
    """Whether two reports may be of one failure: no figure of both differs, and they are of one kind."""
    mine, its = one.shortage, other.shortage
    near = all(
        a is None or b is None or abs(a - b) <= DEFAULT_LIMITS.same_ratio * max(a, b)
        for a, b in ((mine.asked_bytes, its.asked_bytes), (mine.total_bytes, its.total_bytes))
    )
    one_device = None in (mine.device, its.device) or mine.device == its.device
    return near and one_device and _class_of(mine.kind) == _class_of(its.kind)


def _class_of(kind: Kind) -> int:
    return next((place for place, kinds in enumerate((_HOST, _REFUSALS, _POOL)) if kind in kinds), -1)


def _filled(first: Account, other: Account) -> Account:
    shortage = first.shortage
    figures = {name: getattr(other.shortage, name) for name in _FILLED_FIGURES if getattr(shortage, name) in (None, ())}
    parts = {name: getattr(other, name) for name in _FILLED_PARTS if getattr(first, name) in (None, "", ())}
    return replace(first, shortage=replace(shortage, **figures), later=max(first.later, other.later), **parts)


def _brief(account: Account) -> str:
    shortage = account.shortage
    asked = "an allocation" if shortage.asked_bytes is None else format_bytes(shortage.asked_bytes)
    if shortage.kind in _REFUSALS:
        asked = "a refusal to start"
    elif shortage.kind in _HOST:
        asked = "lack of host memory"
    elif shortage.kind in _POOL:
        asked = "its KV pool"
    return asked if shortage.device is None else f"{asked} on GPU {shortage.device}"


def asked_for(case: Case) -> str:
    """What was requested and what was free, in words."""
    failure = case.failure
    shortage = failure.shortage
    where = "" if shortage.device is None else f" on GPU {shortage.device}"
    who = f" {'in' if shortage.asked_bytes is None else 'by'} {failure.process}" if failure.process else ""
    asked = "out of memory"
    if shortage.asked_bytes is not None:
        asked = f"{format_bytes(shortage.asked_bytes)} requested"
    elif shortage.kind == "masked":
        asked = "out of memory (NVML hides the figures, as on MIG slices and Jetson)"
    there = [] if shortage.free_bytes is None else [f"{format_bytes(shortage.free_bytes)} free"]
    if shortage.unallocated_bytes is not None:
        there.append(f"{format_bytes(shortage.unallocated_bytes)} reserved but unallocated")
    when = "" if failure.phase is None else f" {IN_WORDS[failure.phase]}"
    return f"{asked}{where}{who}{when}" + (f", {' and '.join(there)}" if there else "")


def evidence(case: Case) -> tuple[Evidence, ...]:
    """The figures of the failure, as evidence of every finding about it; unknown ones are left out."""
    failure = case.failure
    shortage, split, work = failure.shortage, failure.split, failure.work
    graphs, unit = failure.graphs_captured, shortage.part
    fits = "max_fitting_model_len"
    if shortage.kind in {"kv_full", "kv_overrun"}:
        fits = "tokens_left" if shortage.held_tokens is None else "capacity"
    rows: list[tuple[str, str | int | float | None, str]] = [
        ("process", failure.process or None, "holder"),
        ("rank", failure.rank, ""),
        ("device", shortage.device, ""),
        ("requested", shortage.asked_bytes, "bytes"),
        ("free_on_device", shortage.free_bytes, "bytes"),
        ("device_total", shortage.total_bytes, "bytes"),
        ("allowed", shortage.allowed_bytes, "bytes"),
        ("allocated_by_torch", shortage.allocated_bytes, "bytes"),
        ("reserved_by_torch", shortage.reserved_bytes, "bytes"),
        ("reserved_but_unallocated", shortage.unallocated_bytes, "bytes"),
        ("private_pools", shortage.private_bytes, "bytes"),
        ("this_process", shortage.process_bytes, "bytes"),
        ("other_processes", shortage.other_bytes, "bytes"),
        ("memory_in_use", shortage.usage_bytes, "bytes"),
        ("memory_limit", shortage.limit_bytes, "bytes"),
        ("needed", shortage.needed_bytes, "bytes"),
        ("available", shortage.available_bytes, "bytes"),
        ("needed_units" if unit else "needed_tokens", shortage.asked_tokens, unit or "tokens"),
        ("units_left" if unit else fits, shortage.fitting_tokens, unit or "tokens"),
        ("weights", shortage.weights_bytes, "bytes"),
        ("held_by_failed", shortage.held_tokens, "tokens"),
        ("leaked_at_exit", shortage.leaked_bytes, "bytes"),
        ("part", shortage.part, ""),
    ]
    for count in shortage.counts:
        rows += [("pool_counted", f"{count.pool}: {count.accounted} of {count.total}", "")]
    if split is not None:
        rows += [
            ("stranded", split.stranded_bytes, "bytes"),
            ("releasable", split.releasable_bytes, "bytes"),
            ("pending", split.pending_bytes, "bytes"),
            ("largest_free_block", split.largest_free_block_bytes, "bytes"),
        ]
    if work is not None:
        rows += [
            ("scheduled_tokens", work.scheduled_tokens, "tokens"),
            ("scheduled_requests", work.requests, "requests"),
            ("largest_request", work.largest_request, ""),
        ]
    rows += [
        ("running", failure.running, "requests"),
        ("waiting", failure.waiting, "requests"),
        ("kv_usage", failure.kv_usage_ratio, "ratio"),
        ("graphs_captured", graphs[0] if graphs else None, "graphs"),
        ("graphs", graphs[1] if graphs else None, "graphs"),
        ("later_failures", failure.later or None, "times"),
    ]
    found = (
        Evidence("sources", case.agreement, "", "kvdiag"),
        Evidence("phase", failure.phase, "", failure.phase_source or failure.origin),
        *(Evidence(name, value, unit, failure.origin) for name, value, unit in rows),
    )
    return tuple(one for one in found if one.value is not None)
