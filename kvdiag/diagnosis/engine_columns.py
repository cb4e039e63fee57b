"""The engines' figures over a whole timeline, as columns with one row per answer: read once, for every rule.

A day has thousands of answers, and a rule that looks at each of them costs a millisecond. Rules that need one figure
throughout ask for its column.
"""

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter

from kvdiag.model import Engine, Sample, Timeline
from kvdiag.model.timeline import EngineCount

Totals = Sequence[int | None]


class EngineColumns:
    """The samples in which engines answered, and the figures of all engines together in each of them."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Take samples whose engines are not `None`."""
        self.samples = samples
        self.times_seconds = [sample.at_seconds for sample in samples]
        engines = [sample.engines or () for sample in samples]
        only = [each[0] for each in engines if len(each) == 1]
        self.only: list[Engine] | None = only if len(only) == len(engines) else None
        """The engine of each sample, where all have one."""
        self._totals: dict[tuple[EngineCount, ...], Totals] = {}

    def total(self, *names: EngineCount) -> Totals:
        """The sum of some figures of all engines in each sample; `None` where one is not reported."""
        if names not in self._totals:
            self._totals[names] = self._total(names)
        return self._totals[names]

    def _total(self, names: tuple[EngineCount, ...]) -> Totals:
        if self.only is None:
            return [sample.total(*names) for sample in self.samples]
        first = list(map(attrgetter(names[0]), self.only))
        if len(names) == 1:
            return first
        columns = (first, *(self.total(name) for name in names[1:]))
        if any(column.count(None) == len(column) for column in columns):
            return [None] * len(first)
        total: Totals = first
        for column in columns[1:]:
            total = [
                None if one is None or other is None else one + other for one, other in zip(total, column, strict=True)
            ]
        return total

    @property
    def tokens(self) -> Totals:
        """Prompt and generated tokens of all engines in each sample; `None` where one is not reported."""
        return self.total("prompt_tokens_total", "generation_tokens_total")

    @cached_property
    def idle(self) -> Sequence[bool | None]:
        """`Sample.engines_idle` of each sample."""
        if self.only is None:
            return [sample.engines_idle for sample in self.samples]
        return list(map(attrgetter("idle"), self.only))

    @cached_property
    def loads(self) -> Sequence[float]:
        """How much of their pools the engines of each sample use together, else how many requests they run."""
        if self.only is None:
            return [sum([_load(engine) for engine in sample.engines or ()]) for sample in self.samples]
        return [_load(engine) for engine in self.only]

    @cached_property
    def usages(self) -> Sequence[float | None]:
        """The usage of each engine of each sample, one after the other."""
        if self.only is None:
            return [one.kv_usage_ratio for sample in self.samples for one in sample.engines or ()]
        return list(map(attrgetter("kv_usage_ratio"), self.only))

    @cached_property
    def have_state_slots(self) -> bool:
        """Whether any engine ever reports how many of its state slots are in use: most models have none."""
        every = self.only or [one for sample in self.samples for one in sample.engines or ()]
        return any(one.state_slots_used is not None for one in every)


def _load(engine: Engine) -> float:
    return float(engine.requests_running or 0) if engine.kv_usage_ratio is None else engine.kv_usage_ratio


def engine_columns(timeline: Timeline) -> EngineColumns:
    """The columns of a timeline, read once."""
    return timeline.once(
        "engine_columns", lambda: EngineColumns([sample for sample in timeline.samples if sample.engines is not None])
    )
