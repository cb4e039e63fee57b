"""Every scenario, in the order in which they are played, and their traces judged again."""

from pathlib import Path

from tests.integration.gpu.figures import Figure
from tests.integration.gpu.scenario import Measurement, Scenario
from tests.integration.gpu.scenarios import fragmentation, measurements, memory
from tests.integration.gpu.scenarios.engine_servers import SERVERS

SCENARIOS: tuple[Scenario | Measurement, ...] = (
    measurements.DAEMON,
    *memory.SCENARIOS,
    *fragmentation.SCENARIOS,
    *memory.BY_OTHERS,
    measurements.COST,
)
BY_NAME = {each.name: each for each in (*SCENARIOS, *SERVERS)}
"""Those, and the ones that are played only where they are named."""

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
    names = {f"{name}{SUFFIX}" for name, each in BY_NAME.items() if not isinstance(each, Scenario)}
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.name not in names)
