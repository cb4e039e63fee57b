"""`kvdiag.log_memory()` and `kvdiag.memory_report()` in a server's own code."""

import json
import logging
import os
import sys
from pathlib import Path

import pytest

import kvdiag
from kvdiag.formatting import format_bytes
from tests.builders.answers import containing
from tests.unit.agent.subject import TORCH, run

ROOT = Path(__file__).parents[3]
SERVER = """
import json, logging, sys, torch
from torch.world import ACTIVE, FREE, MIB, WORLD
import kvdiag
torch.cuda.init()
WORLD.segment((512 * MIB, ACTIVE)); WORLD.segment((60 * MIB, FREE), (4 * MIB, ACTIVE)); WORLD.segment((20 * MIB, FREE))
"""


@pytest.fixture
def server() -> dict[str, str]:
    """The environment of a server that has kvdiag and the stand-in torch, and no agent."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**inherited, "PYTHONPATH": os.pathsep.join((str(TORCH), str(ROOT)))}


def test_report_has_the_agents_figures(server: dict[str, str]) -> None:
    """One call gives torch's statistics and the split of the reserved bytes, without any agent or daemon."""
    report = run(SERVER + "print(json.dumps(kvdiag.memory_report()))", server)
    (device,) = report["devices"]
    mib = 2**20
    assert 596 * mib == device["statistics"]["reserved_bytes"]["current"]
    assert (20 * mib, 60 * mib) == tuple(
        device["fragmentation"][f"{part}_bytes"] for part in ("releasable", "stranded")
    )


def test_one_line_per_gpu_is_logged(server: dict[str, str]) -> None:
    """The line says what is allocated and reserved, and what of the difference is of use."""
    line = run(
        SERVER + "logging.basicConfig(stream=sys.stdout, level=20, format='\"%(name)s %(message)s\"')\n"
        "kvdiag.log_memory('after load')",
        server,
    )
    before, _, amounts = line.partition(": GPU 0: ")
    sizes = {"allocated": 516, "reserved": 596, "releasable": 20, "stranded": 60, "private": 0}
    assert ("kvdiag after load", [f"{format_bytes(size * 2**20)} {name}" for name, size in sizes.items()]) == (
        before,
        amounts.split(", "),
    )


def test_what_torch_does_not_tell_is_not_called_nothing(server: dict[str, str]) -> None:
    """Memory that cannot be read is reported as unreadable, never as zero."""
    assert "AttributeError" in run(
        SERVER + "del torch.cuda.memory_stats_as_nested_dict\n"
        "logging.basicConfig(stream=sys.stdout, level=20, format='\"%(message)s\"')\n"
        "kvdiag.log_memory()",
        server,
    )


def test_without_torch_nothing_is_held_and_nothing_imported(caplog: pytest.LogCaptureFixture) -> None:
    """In a process that has no torch the report has no device, and no torch is imported for it."""
    with caplog.at_level(logging.INFO, logger="kvdiag"):
        report = kvdiag.log_memory()
    assert ([], None, False) == (report["devices"], report["torch"], "torch" in sys.modules)
    assert [containing("no GPU memory")] == caplog.messages
    assert json.dumps(report)
