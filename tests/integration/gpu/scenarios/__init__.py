"""Every scenario, in the order in which they are played, and their traces judged again."""

from pathlib import Path

from tests.integration.gpu.figures import Figure
from tests.integration.gpu.scenario import Measurement, Scenario
from tests.integration.gpu.scenarios import fragmentation, measurements, memory

SCENARIOS: tuple[Scenario | Measurement, ...] = (
    measurements.DAEMON,
    *memory.SCENARIOS,
    *fragmentation.SCENARIOS,
    *memory.BY_OTHERS,
    measurements.COST,
)
SUFFIX = ".jsonl.gz"


def replay(trace: Path) -> tuple[Figure, ...]:
    """The verdicts and figures of a trace.

    Raises:
        KeyError: no scenario is called so.
        StageError: the trace lacks what is judged.

    """
    scenarios = {each.name: each for each in SCENARIOS if isinstance(each, Scenario)}
    return scenarios[trace.name.removesuffix(SUFFIX)].judge(trace)


def recorded(folder: Path) -> list[Path]:
    """The scenarios' traces in a folder; measurements leave some too, which nothing is judged by."""
    names = {f"{each.name}{SUFFIX}" for each in SCENARIOS if not isinstance(each, Scenario)}
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.name not in names)
