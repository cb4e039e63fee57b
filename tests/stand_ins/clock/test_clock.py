"""A process with the stand-in reads the wall clock that was set, whichever call it uses, and no other clock changes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.fixtures.require import require
from tests.stand_ins.clock.wall_clock import WallClock
from tests.stand_ins.nvml.stand_in import compiler

READ = """
import ctypes, json, sys, time
libc = ctypes.CDLL(None)
libc.time.restype = ctypes.c_long
of_day = (ctypes.c_long * 2)()
for _ in sys.stdin:
    libc.gettimeofday(of_day, None)
    print(json.dumps([[time.time(), libc.time(None), of_day[0]], time.monotonic()]), flush=True)
"""
TOLERANCE_SECONDS = 60.0
"""Of a machine that is busy; a jump is longer."""


def test_the_wall_clock_alone_is_set(tmp_path: Path) -> None:
    """Forward by two hours, then back by three, while the process runs."""
    require(compiler() is not None, "a C compiler (cc)")
    clock = WallClock(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", READ],
        env={**os.environ, **clock.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for ahead_seconds, jump in ((0, 7200), (7200, -10_800), (-3600, 0)):
            process.stdin.write("\n")
            process.stdin.flush()
            wall, steady = json.loads(process.stdout.readline())
            assert all(abs(at - ahead_seconds - time.time()) < TOLERANCE_SECONDS for at in wall)
            assert abs(steady - time.monotonic()) < TOLERANCE_SECONDS
            clock.jump(jump)
        process.stdin.close()
