"""An LLM server with a simulated GPU, used where there is no real one.

It shares no code with the diagnosis, and shows it only what a real server and a real NVML show.
"""

from kvdiag.sim.nvml_state import RemoteNvml
from kvdiag.sim.scenarios import SCENARIOS, Scenario
from kvdiag.sim.server import Drill
from kvdiag.sim.start_flags import started_with
