"""Blocks that stay in use for long after all requests ended, until a timeout releases them."""

from dataclasses import dataclass
from itertools import compress

from kvdiag.diagnosis.engine_columns import engine_columns
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import held_blocks
from kvdiag.model import Facts, Sample, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LateFree:
    """Blocks that stayed in use for so long at least, while nothing ran and nothing waited."""

    seconds: float
    blocks: int


def late_frees(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[LateFree, ...]:
    """Every interval of idle samples with a noticeable part of the pool in use for longer than frees may take."""
    key = ("late_frees", facts.pools, facts.capabilities, limits)
    return timeline.once(key, lambda: _late_frees(timeline, facts, limits))


def _late_frees(timeline: Timeline, facts: Facts, limits: Limits) -> tuple[LateFree, ...]:
    columns = engine_columns(timeline)
    if columns.only is not None and not any(compress(columns.usages, columns.idle)):
        return ()
    total = sum(pool.usable_blocks for pool in facts.pools)
    holds: list[LateFree] = []
    run: list[tuple[float, int]] = []
    for sample in (*timeline.samples, None):
        if sample is not None and sample.engines is None:
            continue
        held = None if sample is None else held_idle(sample, facts)
        if sample is not None and held:
            if run and sample.at_seconds - run[-1][0] > limits.growth.reading_age_seconds:
                run = []
            run.append((sample.at_seconds, held))
            continue
        if run:
            hold = LateFree(seconds=run[-1][0] - run[0][0], blocks=min(blocks for _, blocks in run))
            if hold.seconds >= limits.late_blocks_seconds and hold.blocks >= limits.late_blocks_ratio * total:
                holds.append(hold)
        run = []
    return tuple(holds)


def held_idle(sample: Sample, facts: Facts) -> int | None:
    """Blocks held in a sample of idle engines; `None` where they work, do not report it, or clients' sessions are open,
    which hold blocks for their next requests.
    """
    # Most samples of a day are of a server that works, or that holds nothing.
    if not any(engine.kv_usage_ratio for engine in sample.engines or ()) or sample.engines_idle is not True:
        return None
    if any(engine.open_sessions for engine in sample.engines or ()):
        return None
    return None if sample.load is not None and sample.load.requests else held_blocks(sample, facts)
