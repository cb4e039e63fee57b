"""Replicas for tests of a fleet: a day of samples at ten-minute intervals each, on any kind of memory."""

from dataclasses import replace

from kvdiag.diagnosis.fleet import ReplicaSummary, Version, summarise
from kvdiag.diagnosis.fleet.replica import ReplicaGrowth
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Facts, Finding, Timeline
from tests.builders.series import Part, timeline, torch_part
from tests.builders.values import SERVER_PID, pool

FACTS = Facts(
    engine_name="vllm", engine_version="0.32.0", model="m", pools=(pool(),), server_pids=(SERVER_PID, SERVER_PID + 1)
)
LIVE = torch_part(live=True)
MB = 1e6


def day(
    seed: int, *, name: str = "fast noise", leak: float = 0.0, part: Part = LIVE, hours: float = 24.0, busy: bool = True
) -> Timeline:
    """One replica's samples; `leak` in MB/h."""
    return timeline(name, seed, hours=hours, tick_seconds=600.0, leak_mb_per_hour=leak, part=part, busy=busy)


def unloaded(seen: Timeline) -> Timeline:
    """The same samples without engines."""
    return Timeline(samples=tuple(replace(sample, engines=None) for sample in seen.samples))


def replica(seen: Timeline, name: str, facts: Facts = FACTS, version: str | None = None) -> ReplicaSummary:
    """The summary of a replica."""
    return summarise(seen, facts, DEFAULT_LIMITS, replica=name, version=version)


def replicas(
    count: int,
    *,
    name: str = "fast noise",
    leak: float = 0.0,
    part: Part = LIVE,
    hours: float = 24.0,
    version: str = "0.32.0",
) -> list[ReplicaSummary]:
    """So many replicas of one version, each with its own noise and load."""
    return [
        replica(day(seed, name=name, leak=leak, part=part, hours=hours), f"{version}/{seed}", version=version)
        for seed in range(count)
    ]


def made(
    slopes: dict[str, float],
    name: str = "",
    *,
    version: str | None = "0.32.0",
    model: str = "m",
    hours: float = 23.0,
    age: float | None = None,
    began: float = 0.0,
    load: bool = True,
    ended: bool = False,
    later: float = 1.0,
    floor: float = 1.0,
    downs: int = 2,
    restarts: int = 0,
) -> ReplicaSummary:
    """A replica whose components grow by so many MB/h."""
    return ReplicaSummary(
        replica=name,
        version=Version(engine="vllm", version=version, model=model),
        began_seconds=began,
        age_seconds=(hours + 1.0 if age is None else age) * 3600.0,
        watched_seconds=hours * 3600.0,
        restarts=restarts,
        growths=tuple(
            ReplicaGrowth(
                component=MemoryComponent(component),
                newest=20e9,
                per_hour=slope * MB,
                later_per_hour=0.0 if ended else slope * later * MB,
                floor_per_hour=slope * floor * MB,
                later_floor_per_hour=slope * floor * MB,
                jumps_up=0,
                jumps_down=0 if floor == 1.0 else downs,
                load_reported=load,
            )
            for component, slope in slopes.items()
        ),
    )


def fleet_of(count: int, component: str, slope: float, **others: object) -> list[ReplicaSummary]:
    """Replicas whose slopes lie within a tenth around one."""
    return [
        made({component: slope * (0.9 + 0.2 * place / count)}, f"{others}{place}", **others)  # type: ignore[arg-type]
        for place in range(count)
    ]


def of(found: tuple[Finding, ...], verdict: str) -> list[Finding]:
    """The findings of one verdict."""
    return [one for one in found if one.id == verdict]
