"""The black box: written when an allocation fails, before the server gets torch's error, which stays as it was."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.subject import environment, run

MIB = 2**20
SERVER = """
import json, os, sys, time, torch
from torch.world import ACTIVE, FREE, MIB, WORLD
from kvdiag_agent.thread import Agent
torch.cuda.init()
WORLD.segment((900 * MIB, FREE), (100 * MIB, ACTIVE))
WORLD.free_bytes = 300 * MIB
agent = Agent(os.environ["KVDIAG_AGENT_DIR"])
agent.publish()

def ask(size):
    try:
        WORLD.allocate(size)
    except BaseException as error:
        return type(error).__name__
"""


def boxes(folder: Path) -> list[dict[str, Any]]:
    """Every black box in a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("oom-*.json"))]


def test_failed_allocation_leaves_what_there_was(agent: Path, tmp_path: Path) -> None:
    """What was asked, what was free, and why the reserved bytes were of no use are there when the error arrives."""
    # 900 MiB in one hole, and 1000 MiB asked for
    program = SERVER + (
        "seen = ask(1000 * MIB)\n"
        "print(json.dumps([seen, any(name.startswith('oom') for name in os.listdir(os.environ['KVDIAG_AGENT_DIR']))]))"
    )

    actual = run(program, environment(agent, tmp_path))

    (box,) = boxes(tmp_path)
    (device,) = box["document"]["devices"]
    assert ["OutOfMemoryError", True] == actual
    assert (1, 0, 1000 * MIB, 300 * MIB) == tuple(
        box[name] for name in ("kvdiag_black_box", "device", "asked_bytes", "free_bytes")
    )
    assert 1 == device["statistics"]["num_ooms"]
    assert (900 * MIB, 1000 * MIB, False, 1.0) == tuple(
        device["fragmentation"][name] for name in ("stranded_bytes", "request_bytes", "fits", "unusable_ratio")
    )
    assert {} == box["document"]["errors"]


@pytest.mark.parametrize(
    "damage",
    [
        "folder = os.environ['KVDIAG_AGENT_DIR']; os.rename(folder, folder + '.old'); open(folder, 'w').close()",
        "torch.cuda.memory_stats_as_nested_dict = lambda device: 1 / 0",
        "torch.cuda.memory_stats_as_nested_dict = lambda device: sys.exit(1)",
        "torch._C._cuda_memorySnapshot = None",
        "del sys.modules['torch.cuda']",
    ],
)
def test_server_gets_the_same_error_whatever_happens(agent: Path, tmp_path: Path, damage: str) -> None:
    """A black box that cannot be written takes no error's place: vLLM knows running out of memory by its type."""
    actual = run(SERVER + damage + "\nprint(json.dumps(ask(1000 * MIB)))", environment(agent, tmp_path / "published"))
    assert "OutOfMemoryError" == actual


def test_one_box_a_second_and_the_newest_eight(agent: Path, tmp_path: Path) -> None:
    """A server that fails repeatedly is not delayed each time, and its black boxes do not fill the disk."""
    program = SERVER + (
        "from kvdiag_agent import black_box\n"
        "ask(1000 * MIB); ask(1001 * MIB)\n"
        "black_box.PAUSE_SECONDS = 0\n"
        "for more in range(9): ask((1002 + more) * MIB)"
    )

    run(program, environment(agent, tmp_path))

    told = sorted((box["number"], box["asked_bytes"] // MIB) for box in boxes(tmp_path))
    assert [(number, 1001 + number) for number in range(2, 10)] == told


def test_allocator_that_takes_no_observer_is_told(agent: Path, tmp_path: Path) -> None:
    """Under cudaMallocAsync there is no black box; the publication says so, and is whole."""
    program = SERVER.replace("torch.cuda.init()", "torch.cuda.init(); WORLD.backend = 'cudaMallocAsync'")
    run(program + "agent.publish()", environment(agent, tmp_path))
    (file,) = tmp_path.iterdir()
    told = json.loads(file.read_text())
    assert ("cudaMallocAsync", 2) == (told["torch"]["backend"], told["sequence"])
    assert "does not yet support" in told["errors"]["black_box"]


def test_driver_that_hangs_is_not_asked(agent: Path, tmp_path: Path) -> None:
    """The server waits for its black box, so nothing in it comes from NVML, which may never answer."""
    run(SERVER + "ask(1000 * MIB)", environment(agent, tmp_path))
    (box,) = boxes(tmp_path)
    assert "driver" not in box["document"]["devices"][0]
    assert "driver" not in box["document"]["errors"]
