"""Judge what stays on the devices while the engine sleeps: from sleep to sleep it must be the same.

An engine asleep has given its weights and pool away. Its memory over hours is judged awake alone, but a leak outside
the pool shows best asleep: the lowest samples of each sleep are compared, sleep after sleep. They grow where so many
rises are no coincidence (Mann-Kendall) and the later half rises at half the rate of the earlier one at least.
"""

from collections.abc import Iterator
from itertools import groupby

from kvdiag import stats
from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.growth_evidence import HOUR_SECONDS
from kvdiag.diagnosis.growth.growth_limits import GrowthLimits
from kvdiag.diagnosis.growth.memory_series import EngineActivity, Points, memory_series
from kvdiag.diagnosis.limits import Limits
from kvdiag.formatting import format_bytes
from kvdiag.model import Evidence, Facts, Finding, GrowthFigures, Status, Timeline
from kvdiag.stats.rank_tests import rising


def asleep_growth(timeline: Timeline, facts: Facts, limits: Limits, verdict: str) -> Finding | None:
    """The device whose memory grows from sleep to sleep the most; `None` where none does, or the engine never slept."""
    series = memory_series(timeline, facts, limits)
    if True not in series.engines.asleep:
        return None
    part = Part.SERVER if series.points[Part.SERVER] else Part.DEVICE
    found = []
    for owner, line in series.points[part].items():
        floors = list(_floors(line, series.engines, limits.growth))
        one = _judged(floors, owner.who, part, verdict, limits.growth)
        if one is not None:
            found.append((floors[-1][1] - floors[0][1], one))
    return max(found, key=lambda one: one[0])[1] if found else None


def _floors(line: Points, engines: EngineActivity, limits: GrowthLimits) -> Iterator[tuple[float, int]]:
    """The end of each sleep and the fewest bytes in it."""
    for asleep, group in groupby(zip(*line, strict=True), lambda one: engines.at(one[0], limits)[1]):
        if asleep:
            samples = list(group)
            yield samples[-1][0], min(size for _, size in samples)


def _judged(
    floors: list[tuple[float, int]], who: str, part: Part, verdict: str, limits: GrowthLimits
) -> Finding | None:
    if len(floors) < limits.sleeps:
        return None
    sizes = [size for _, size in floors]
    gain, half = sizes[-1] - sizes[0], len(sizes) // 2
    p_rising = rising(sizes)
    earlier, later = stats.theil_sen(sizes[: half + 1]), stats.theil_sen(sizes[-half - 1 :])
    steady = later >= limits.later_ratio * earlier
    if gain < limits.min_gain_bytes or p_rising >= limits.sleep_p or not steady:
        return None
    per_sleep = stats.theil_sen(sizes)
    hours = (floors[-1][0] - floors[0][0]) / HOUR_SECONDS
    per_hour = per_sleep * (len(sizes) - 1) / hours
    summary = (
        f"{who}: {part.label} in use while asleep rose from {format_bytes(sizes[0])} to {format_bytes(sizes[-1])} over "
        f"{len(sizes)} sleeps and is not released"
    )
    evidence = (
        Evidence("holder", who, "holder", part.source),
        Evidence("sleeps", len(sizes), "sleeps", "engine"),
        Evidence("first_sleep_min", sizes[0], "bytes", part.source),
        Evidence("last_sleep_min", sizes[-1], "bytes", part.source),
        Evidence("growth_per_sleep", per_sleep, "bytes", part.source),
        Evidence("growth_per_hour", per_hour, "bytes per hour", part.source),
        Evidence("later_half_ratio", later / earlier if earlier > 0.0 else 1.0, "ratio", "computed"),
        Evidence("p_rising", p_rising, "p-value", "computed"),
    )
    status: Status = "fault" if p_rising < limits.certain_sleep_p else "suspect"
    growth = GrowthFigures(bytes_per_second=per_hour / HOUR_SECONDS)
    return Finding(verdict, status, summary, evidence, holder=who, growth=growth, since_seconds=floors[0][0])
