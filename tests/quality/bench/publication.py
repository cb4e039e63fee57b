"""What one publication of one GPU's figures takes, alone in a process beside a stand-in for torch.

Again and again, as budgets for it are set, and once in a while as in a server, where every cache is cold by then.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.unit.agent.subject import environment, installed, run

MEMORY = "/dev/shm"  # noqa: S108 - where a volume in memory is, as the agents' folder should be
ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, os, sys, statistics, time, torch
from torch.world import ACTIVE, FREE, MIB, WORLD
from kvdiag_agent import publication
from kvdiag_agent.thread import Agent
from tests.integration.gpu.subject import timed
torch.cuda.init()
for _ in range(300): WORLD.segment((60 * MIB, FREE), (4 * MIB, ACTIVE))
# The stand-in counts its segments anew each time, which torch does not.
counted = WORLD.statistics(0)
torch.cuda.memory_stats_as_nested_dict = lambda device: counted
agent = Agent(os.environ["KVDIAG_AGENT_DIR"])
agent.publish()
(name,) = os.listdir(agent.directory)
told = json.load(open(os.path.join(agent.directory, name)))
whole = told.pop("memory_stats")
size = os.stat(os.path.join(agent.directory, name)).st_size
def median(call): return statistics.median(timed(call, 1000)[0])
folder = publication.Folder(agent.directory)
whole_json = publication.encode(whole)
wall, busy = timed(agent.publish, 1000)
def now_and_then():
    time.sleep(0.2)
    began = time.perf_counter(); agent.publish()
    return time.perf_counter() - began
json_seconds = median(lambda: publication.encode(told))
cold_seconds = statistics.median(now_and_then() for _ in range(25))
let_go, calls = [0.0], [0]
def clocked(function):
    def call(*arguments, **named):
        began = time.perf_counter()
        try: return function(*arguments, **named)
        finally:
            calls[0] += 1
            let_go[0] += time.perf_counter() - began
    return call
# What the clock itself takes is no part of a publication.
def ticking():
    nothing, let_go[0], began = clocked(int), 0.0, time.perf_counter()
    for _ in range(1000): nothing()
    return (time.perf_counter() - began - let_go[0]) / 1000
tick_seconds = statistics.median(ticking() for _ in range(9))
for name in ("open", "read", "write", "close", "stat", "fchmod", "rename"):
    setattr(os, name, clocked(getattr(os, name)))
def held():
    let_go[0], calls[0], began = 0.0, 0, time.perf_counter()
    agent.publish()
    return time.perf_counter() - began - let_go[0] - calls[0] * tick_seconds
print(json.dumps({
    "size_bytes": size,
    "wall_seconds": statistics.median(wall),
    "busy_seconds": busy,
    "json_seconds": json_seconds,
    "file_seconds": median(lambda: folder.put("other.json", told, {"memory_stats": whole_json})) - json_seconds,
    "whole_json_seconds": median(lambda: publication.encode(whole)),
    "gil_seconds": statistics.median(held() for _ in range(1000)),
    "cold_seconds": cold_seconds,
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Medians but for `busy_seconds`, the mean of the processor's time, slow periods among them.

    `json_seconds` and `file_seconds` are parts of `wall_seconds`; `whole_json_seconds` comes once in a slow period, for
    all that torch counts; `gil_seconds` is what passes outside of the system's calls, which let other threads run.
    """

    size_bytes: int
    wall_seconds: float
    busy_seconds: float
    json_seconds: float
    file_seconds: float
    whole_json_seconds: float
    gil_seconds: float
    cold_seconds: float


def measured() -> Publication:
    """Measure it."""
    with tempfile.TemporaryDirectory(
        prefix="kvdiag-publication-", dir=MEMORY if Path(MEMORY).is_dir() else None
    ) as work:
        env = environment(installed(Path(work) / "agent"), Path(work) / "published")
        return Publication(**run(PROGRAM, {**env, "PYTHONPATH": f"{env['PYTHONPATH']}:{ROOT}"}))
