"""A server with the stand-in torch that runs out of memory, its black box, and the diagnosis of it."""

from pathlib import Path

from tests.integration.vllm.cli import kvdiag
from tests.unit.agent.subject import environment, run

SERVER = """
import json, os, torch
from torch.world import ACTIVE, FREE, MIB, WORLD
from kvdiag_agent.thread import Agent
torch.cuda.init()
WORLD.segment(*BLOCKS)
WORLD.free_bytes = 300 * MIB
WORLD.total_bytes = 1700 * MIB
agent = Agent(os.environ["KVDIAG_AGENT_DIR"])
agent.publish()
try:
    WORLD.allocate(1000 * MIB)
except torch.OutOfMemoryError as error:
    print(json.dumps(str(error)))
"""


def died(agent: Path, folder: Path, blocks: str) -> str:
    """The message of a server whose blocks did not take 1000 MiB more; its black box lies in the folder."""
    message: str = run(SERVER.replace("*BLOCKS", blocks), environment(agent, folder))
    return message


def test_holes_are_told_from_exhaustion_by_the_black_box(agent: Path, tmp_path: Path) -> None:
    """The same bytes unallocated are a fault between live blocks, and none where they are too few."""
    died(agent, tmp_path / "holes", "*[(600 * MIB, FREE), (100 * MIB, ACTIVE)] * 2")
    died(agent, tmp_path / "full", "(100 * MIB, FREE), (1100 * MIB, ACTIVE)")

    holes, full = (
        kvdiag("diagnose", "--postmortem", str(tmp_path / name), "--output", "json") for name in ("holes", "full")
    )

    assert (2, "fault") == (holes.code, holes.finding("fragmentation.allocator")["status"])
    assert (2, "ok") == (full.code, full.finding("fragmentation.allocator")["status"])
    assert "fault" == full.finding("spike.activation")["status"]
    evidence = {one["name"]: one["value"] for one in full.finding("spike.activation")["evidence"]}
    assert (1000 * 2**20, 300 * 2**20, 100 * 2**20, 0) == tuple(
        evidence[name] for name in ("requested", "free_on_device", "stranded", "device")
    )


def test_black_box_and_message_agree(agent: Path, tmp_path: Path) -> None:
    """The message of the same failure adds what the box has not, and does not contradict it."""
    message = died(agent, tmp_path / "published", "(100 * MIB, FREE), (1100 * MIB, ACTIVE)")
    log = tmp_path / "server.log"
    log.write_text(f'Traceback (most recent call last):\n  File "x.py", line 1, in capture_model\n{message}\n')

    actual = kvdiag(
        "diagnose", "--postmortem", "--black-box", str(tmp_path / "published"), "--log", str(log), "--output", "json"
    )

    found = actual.finding("spike.graph_capture")
    assert (2, "fault", []) == (actual.code, found["status"], actual.document["gaps"])
    told = {one["name"]: one["value"] for one in found["evidence"]}
    assert told["sources"].endswith("; server.log, line 3 agrees")
    assert 1000 * 2**20 == told["requested"]
