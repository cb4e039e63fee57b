"""The memory in use on the stand-in's GPU, written to the NVML stand-in's state file (tests/stand_ins/nvml) where
there is one: this process's line, next to those of other live processes.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from pathlib import Path

from .world import MIB, WORLD

CONTEXT_BYTES = 420 * MIB
RESERVED_BYTES = 464 * MIB
STATE = os.environ.get("NVML_STAND_IN_STATE", "")
_serial = [1_000_000 * os.getpid()]


def free_bytes() -> int:
    """Free bytes of the GPU; the configured figure where there is no NVML."""
    if not STATE:
        return WORLD.free_bytes
    held = _own_bytes() + sum(_others().values())
    return max(WORLD.total_bytes - RESERVED_BYTES - held, 0)


def show(*, gone: bool = False) -> None:
    """Write what this process holds now into NVML's state file."""
    if not STATE:
        return
    held = _others()
    if WORLD.initialised and not gone:
        held[os.getpid()] = _own_bytes()
    free = max(WORLD.total_bytes - RESERVED_BYTES - sum(held.values()), 0)
    _serial[0] += 1
    lines: list[tuple[object, ...]] = [
        ("serial", _serial[0]),
        ("generation", 1),
        ("stride", 24),
        ("driver", "580.0-standin"),
        ("gpu", 0, f"GPU-{WORLD.uuids[0]}", "NVIDIA Stand-in", WORLD.total_bytes, free, RESERVED_BYTES),
        *(("process", 0, pid, size, 0, "python") for pid, size in held.items()),
    ]
    draft = Path(f"{STATE}.{os.getpid()}")
    draft.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
    draft.replace(STATE)


def _own_bytes() -> int:
    reserved: int = sum(segment["total_size"] for segment in WORLD.segments)
    return CONTEXT_BYTES + reserved + _past_torch_bytes()


def _past_torch_bytes() -> int:
    """What the driver's stand-in gave out itself (tests/integration/gpu/stand_in.c), where it is on the path."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").stand_in_held_mib()) * MIB
    except (OSError, AttributeError):
        return 0


def _others() -> dict[int, int]:
    """The other living processes of the state file."""
    held = {}
    for line in Path(STATE).read_text().splitlines() if Path(STATE).exists() else ():
        kind, *fields = line.split("\t")
        if kind == "process" and int(fields[1]) != os.getpid() and Path(f"/proc/{fields[1]}").exists():
            held[int(fields[1])] = int(fields[2])
    return held


# A process that was killed leaves its line, which the next one drops.
atexit.register(show, gone=True)
