"""The scenarios without a GPU: stand-ins of torch, of NVML and of the one driver function, in processes of their own.

Proves that the scenarios are played, recorded, judged and written down rightly; of a GPU it proves nothing.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.stand_ins.nvml.stand_in import Gpu, StandIn, State, build, compiler
from tests.unit.agent.subject import TORCH

ROOT = Path(__file__).parents[3]
GIB = 2**30
EMPTY = State(
    gpus=(
        Gpu(
            uuid="GPU-01234567-89ab-cdef-0123-456789abcdef",
            name="NVIDIA Stand-in",
            total_bytes=80 * GIB,
            free_bytes=80 * GIB - 464 * 2**20,
            reserved_bytes=464 * 2**20,
        ),
    )
)


def library(folder: Path) -> Path:
    """Compile both libraries into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(compiler() or "cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"),
            *("-o", str(folder / "libcuda.so.1"), str(Path(__file__).with_name("stand_in.c"))),
        ],
        check=True,
    )
    return build(folder)


def begin(libraries: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the program on a GPU of its own, with the libraries that `library` made."""
    out.parent.mkdir(parents=True, exist_ok=True)
    stand_in = StandIn(libraries, out.with_suffix(".state"))
    stand_in.show(EMPTY)
    return program(["--out", str(out), *arguments], env={**stand_in.environment(), "PYTHONPATH": str(TORCH)})


def program(arguments: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the program."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.gpu.check", *arguments],
        cwd=ROOT,
        env=env or dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
