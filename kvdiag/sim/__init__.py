"""An LLM server with a simulated GPU: the default subject where there is no real one.

It shares no code with what diagnoses it, and tells it nothing that a real server and a real NVML would not.
"""

from kvdiag.sim.nvml_state import RemoteNvml
from kvdiag.sim.scenarios import STORIES, Story
from kvdiag.sim.server import Drill

__all__ = ["STORIES", "Drill", "RemoteNvml", "Story"]
