"""The Python side of the clock stand-in: compiles it, and sets the wall clock of its clients while they run."""

import struct
import subprocess
import time
from pathlib import Path

from tests.stand_ins.nvml.stand_in import compiler

SOURCE = Path(__file__).with_name("stand_in.c")


class WallClock:
    """The wall clock of the processes that have its `environment`; `jump` sets it, now and for those to come."""

    def __init__(self, folder: Path) -> None:
        """Compile the library into `folder`; the clock is the machine's."""
        self._library = folder / "clock.so"
        self._file = folder / "ahead"
        self.ahead_seconds = 0
        self.jump(0)
        subprocess.run(
            [
                *(compiler() or "cc", "-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror"),
                *("-o", str(self._library), str(SOURCE)),
            ],
            check=True,
        )

    def jump(self, seconds: int) -> None:
        """Set the clock by so much, at once."""
        self.ahead_seconds += seconds
        # In place: clients have the file mapped.
        with self._file.open("r+b" if self._file.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("=q", self.ahead_seconds))

    def now_seconds(self) -> float:
        """Seconds since the epoch, as the clients read them."""
        return time.time() + self.ahead_seconds

    def environment(self) -> dict[str, str]:
        """What the environment of a client has besides."""
        return {"LD_PRELOAD": str(self._library), "CLOCK_STAND_IN_AHEAD": str(self._file)}
