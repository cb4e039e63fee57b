"""The stand-in is useful only if common GPU monitors read it as they read NVIDIA's library."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.require import require
from tests.stand_ins.nvml.stand_in import Gpu, Running, Slice, StandIn, State, build, compiler

GIB = 2**30
MIB = 2**20
LIMIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """Two GPUs, one of them cut by MIG, with this very process on the other."""
    require(compiler() is not None, "a C compiler (cc)")
    folder = tmp_path_factory.mktemp("nvml")
    stand_in = StandIn(build(folder), folder / "state")
    running = (Running(pid=os.getpid(), used_bytes=60 * GIB, name="python"),)
    part = Slice(slot=0, uuid="MIG-1", total_bytes=10 * GIB, free_bytes=3 * GIB)
    stand_in.show(
        State(
            gpus=(
                Gpu(uuid="GPU-1", total_bytes=80 * GIB, free_bytes=10 * GIB, processes=running),
                Gpu(uuid="GPU-2", total_bytes=80 * GIB, free_bytes=79 * GIB, slices=(part,)),
            )
        )
    )
    return stand_in


@pytest.mark.nvml_stand_in
def test_gpustat_reads_it(stand_in: StandIn) -> None:
    """Gpustat shows the stand-in's memory and processes, and complains of nothing."""
    shown = monitor(stand_in, "gpustat", "--json")

    gpus = json.loads(shown)["gpus"]
    actual = [
        (gpu["uuid"], gpu["memory.used"], gpu["memory.total"], [p["gpu_memory_usage"] for p in gpu["processes"]])
        for gpu in gpus
    ]
    expected = [("GPU-1", 70 * GIB // MIB, 80 * GIB // MIB, [60 * GIB // MIB]), ("GPU-2", 1024, 80 * GIB // MIB, [])]
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_nvitop_reads_it(stand_in: StandIn) -> None:
    """Nvitop shows the stand-in's GPUs, its slice and its process, and complains of nothing."""
    shown = monitor(stand_in, "nvitop", "--once")
    figures = ("70.00GiB / 80.00GiB", "1024MiB / 80.00GiB", "7168MiB / 10240MiB", "60.00GiB")
    assert dict.fromkeys(figures, True) == {figure: figure in shown for figure in figures}


def monitor(stand_in: StandIn, module: str, *arguments: str) -> str:
    """What a monitor writes to stdout; anything on stderr, or an exit code, fails the test."""
    require(importlib.util.find_spec(module) is not None, f"the monitor {module}")
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**stand_in.environment(), "COLUMNS": "120", "TERM": "dumb"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert (0, "") == (ended.returncode, ended.stderr)
    return ended.stdout
