"""One engine version or configuration against another, by what their test steps measured. Pure.

A baseline has the figures of one run: idle memory, the pool, and the cost of the steps. Costs are per token, so that
runs whose loads were fitted to the server can be compared. A figure is worse if it means more memory for the same
tokens, or less room for them; a difference counts only beyond the tolerance, the workspace of a library and one block,
which vary from start to start. A verdict that only the newer run has is worse. What only one run shows is named and is
not a change.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from kvdiag.kv.calibration.running_server import block_bytes, pool_bytes
from kvdiag.model import Diagnosis, Facts, StepResult, Timeline
from kvdiag.model.codec import from_plain, to_plain

VERSION = 1

TOLERANCE_RATIO = 0.02
"""Relative difference that is ignored: idle memory of one server differs by less from start to start."""

MIN_BYTES = 32 * 2**20
"""Smaller differences in bytes are ignored, too: the workspace of a library depends on its version."""

CALLED = "called"
"""The unit of a verdict: 1 if it was found, 0 if not."""

Worse = Literal["higher", "lower"]
Outcome = Literal["same", "better", "worse", "missing", "new"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number: its unit, and in which direction it is worse.

    `grain`, in the same unit, is what one block more or less makes of it: a request's tokens end somewhere in its last
    block, and where that is differs from run to run of the same server.
    """

    name: str
    unit: str
    value: float
    worse: Worse
    grain: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a figure without name or unit."""
        if not self.name or not self.unit:
            raise ValueError("a figure has no name or no unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of the server, as text."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The figures of one run. `verdicts` holds the titles of suspects and faults."""

    engine: str | None
    engine_version: str | None
    model: str | None
    worst: str
    verdicts: tuple[str, ...]
    figures: tuple[Figure, ...]
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure in both. `missing`: only the older run has it; `new`: only the newer has it."""

    name: str
    unit: str
    outcome: Outcome
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """The change as a share of what was before; a verdict has none."""
        if self.unit == CALLED or self.before is None or self.after is None or not self.before:
            return None
        return self.after / self.before - 1.0


def baseline_of(timeline: Timeline, diagnosis: Diagnosis) -> Baseline:
    """The figures of a run with test steps.

    Raises:
        ValueError: it has none.
    """
    if not diagnosis.steps:
        raise ValueError("no test step was run: a baseline is made from `kvdiag run --record`")
    facts = diagnosis.facts
    figures = [*_idle(timeline, diagnosis), *_pools(facts)]
    for step in diagnosis.steps:
        figures += _step(step)
    return Baseline(
        engine=facts.engine_name,
        engine_version=facts.engine_version,
        model=facts.model,
        worst=diagnosis.worst,
        verdicts=tuple(one.title for one in diagnosis.findings if one.status in ("suspect", "fault")),
        figures=tuple(figures),
        settings=_settings(facts),
    )


def _settings(facts: Facts) -> tuple[Setting, ...]:
    """What was set on the server, as far as it is known; the same for every pool."""
    pool = next(iter(facts.pools), None)
    names = (
        "block_tokens",
        "cache_dtype",
        "memory_fraction_ratio",
        "prefix_caching",
        "state_cache_mode",
        "state_dtype",
    )
    rows = {name: getattr(facts, name) for name in ("engine_version", "model", "max_model_len_tokens")}
    rows |= {name: getattr(facts, name) for name in ("tensor_parallel", "pipeline_parallel", "kv_connector")}
    rows |= {} if pool is None else {name: getattr(pool, name) for name in names}
    rows |= {cache.flag: cache.limit_bytes for cache in facts.host_caches or ()}
    return tuple(Setting(name=name, value=str(value)) for name, value in rows.items() if value is not None)


def changed_settings(before: Baseline, after: Baseline) -> tuple[tuple[str, str | None, str | None], ...]:
    """Name, old and new value of each setting that differs; `None` where one side does not have it.

    Of baselines that were saved without settings nothing is known.
    """
    if not before.settings or not after.settings:
        return ()
    old, new = ({one.name: one.value for one in each.settings} for each in (before, after))
    return tuple((name, old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name))


def _idle(timeline: Timeline, diagnosis: Diagnosis) -> Iterable[Figure]:
    used = next((step.measured.device_used_bytes for step in diagnosis.steps if step.id == "baseline"), None)
    if used is not None:
        yield Figure(name="idle.device_used", unit="bytes", value=used, worse="higher")
    parts: dict[str, int] = {}
    for line in diagnosis.ledger:
        if line.component not in ("kv_pool", "kv_held", "kv_free"):
            parts[line.component] = parts.get(line.component, 0) + line.bytes
    for component, size in parts.items():
        yield Figure(name=f"idle.{component}", unit="bytes", value=size, worse="higher")
    spans = timeline.spans("baseline")
    totals = [
        sum(process.anonymous_bytes for process in sample.host if process.anonymous_bytes is not None)
        for span in spans
        for sample in timeline.between(span.begin_seconds, span.end_seconds or span.begin_seconds)
        if sample.host
    ]
    if totals:
        yield Figure(name="idle.host_anonymous", unit="bytes", value=min(totals), worse="higher")


def _pools(facts: Facts) -> Iterable[Figure]:
    for pool in facts.pools:
        name = "pool" if len(facts.pools) == 1 else f"pool.{pool.engine}"
        tokens = pool.capacity_tokens or pool.usable_blocks * pool.block_tokens
        yield Figure(name=f"{name}.capacity_tokens", unit="tokens", value=tokens, worse="lower")
        if pool.max_concurrency is not None:
            yield Figure(name=f"{name}.max_concurrency", unit="requests", value=pool.max_concurrency, worse="lower")
        if (whole := pool_bytes(facts, pool)) is not None:
            yield Figure(name=f"{name}.bytes", unit="bytes", value=whole[0], worse="lower")
        if (block := block_bytes(facts, pool)) is not None:
            cost = block[0] / pool.block_tokens
            yield Figure(name=f"{name}.bytes_per_token", unit="bytes/token", value=cost, worse="higher")


def _step(step: StepResult) -> Iterable[Figure]:
    figures = step.measured
    tokens, held, blocks, kept = figures.tokens, figures.bytes, figures.blocks, figures.blocks_kept
    if tokens and blocks is not None:
        cost, grain = 1000.0 * blocks / tokens, 1000.0 / tokens
        name = f"{step.id}.blocks_per_1000"
        yield Figure(name=name, unit="blocks per 1,000 tokens", value=cost, worse="higher", grain=grain)
    if tokens and held is not None:
        cost = held / tokens
        grain = cost / blocks if blocks else 0.0
        yield Figure(name=f"{step.id}.bytes_per_token", unit="bytes/token", value=cost, worse="higher", grain=grain)
    if kept is not None:
        yield Figure(name=f"{step.id}.blocks_kept", unit="blocks", value=kept, worse="higher")


def compare(before: Baseline, after: Baseline, tolerance_ratio: float = TOLERANCE_RATIO) -> tuple[Change, ...]:
    """Every figure of either, in the order of the older; differences within the tolerance count as `same`."""
    old = {figure.name: figure for figure in before.figures}
    new = {figure.name: figure for figure in after.figures}
    changes = []
    for name, figure in {**old, **new}.items():
        was, now = old.get(name), new.get(name)
        outcome = _outcome(was, now, tolerance_ratio)
        before_value, after_value = (None if one is None else one.value for one in (was, now))
        changes.append(Change(name=name, unit=figure.unit, outcome=outcome, before=before_value, after=after_value))
    for verdict in dict.fromkeys((*before.verdicts, *after.verdicts)):
        was_there, is_there = verdict in before.verdicts, verdict in after.verdicts
        outcome = "same" if was_there == is_there else "worse" if is_there else "better"
        changes.append(
            Change(name=verdict, unit=CALLED, outcome=outcome, before=float(was_there), after=float(is_there))
        )
    return tuple(changes)


def _outcome(was: Figure | None, now: Figure | None, tolerance_ratio: float) -> Outcome:
    if was is None or now is None:
        return "new" if was is None else "missing"
    apart = now.value - was.value
    least = MIN_BYTES if was.unit == "bytes" else max(was.grain, now.grain)
    if abs(apart) <= max(tolerance_ratio * abs(was.value), least):
        return "same"
    return "worse" if (apart > 0) == (was.worse == "higher") else "better"


def document(baseline: Baseline) -> dict[str, Any]:
    """A baseline as it is saved."""
    return {"kvdiag_baseline": VERSION, **to_plain(baseline)}


def parse(value: Any) -> Baseline:
    """The baseline of a document.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, dict) or value.get("kvdiag_baseline") != VERSION:
        raise ValueError(f"it has no kvdiag_baseline of version {VERSION}")
    return from_plain(Baseline, value, lenient=True)
