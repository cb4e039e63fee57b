"""Every scenario, in the order in which they are played: a file and a name here for a new one."""

from __future__ import annotations

from tests.integration.gpu.scenario import Measurement, Scenario
from tests.integration.gpu.scenarios import cost, daemon, fragmentation, leaks, ledger, neighbour, out_of_memory

SCENARIOS: tuple[Scenario | Measurement, ...] = (
    daemon.SCENARIO,
    *ledger.SCENARIOS,
    *leaks.SCENARIOS,
    *fragmentation.SCENARIOS,
    neighbour.SCENARIO,
    out_of_memory.SCENARIO,
    cost.SCENARIO,
)
