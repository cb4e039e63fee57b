"""An LLM server with a simulated GPU: the default subject where there is no real one.

It shares no code with what diagnoses it, and tells it nothing that a real server and a real NVML would not.
"""

from kvdiag.sim.nvml_state import RemoteNvml
from kvdiag.sim.scenarios import SCENARIOS, Scenario
from kvdiag.sim.server import Drill

__all__ = ["SCENARIOS", "Drill", "RemoteNvml", "Scenario"]
