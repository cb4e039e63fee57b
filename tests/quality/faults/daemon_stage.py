"""A real daemon with all of its real sources, each of which can be broken and mended while it runs."""

import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.integration.vllm.cli import started
from tests.quality.faults.faulty_engine import Engine
from tests.stand_ins.clock.wall_clock import WallClock
from tests.stand_ins.nvml.stand_in import Delay, Failure, Gpu, Running, StandIn, State, build
from tests.unit.commands.serve.test_serve import Daemon
from tests.unit.sim.client import Client
from tests.unit.sources.agents.publications import PUBLICATION, SELF, UUID

GIB = 2**30
FLAP_SECONDS = 0.3
DRIVER_NOT_LOADED = 9
AGENT_FILE = f"agent-{SELF['pid']}-{SELF['start_ticks']}.json"


class Stage:
    """The daemon, a server, a GPU driver, an agent and a disk. `set` brings a source into a condition."""

    def __init__(self, folder: Path, *, tick_seconds: float = 0.1) -> None:
        """Use this folder; entering the block starts everything."""
        self.engine = Engine()
        self.agents = folder / "agents"
        self.records = folder / "records"
        self.clock = WallClock(folder)
        self._driver = StandIn(build(folder), folder / "state")
        self._tick_seconds = tick_seconds
        self._conditions: dict[str, str] = {}
        self.lost_records = False
        """Whether something was not recorded, or was taken away, since the daemon began."""
        self.has_damage = False
        """Whether a segment of its records was damaged."""

        self._over = threading.Event()
        self._playing = threading.Thread(target=self._play, name="stage", daemon=True)
        self._lock = threading.Lock()
        """Held while a source changes: what flaps may be mended at the same moment."""
        self._daemon = contextlib.ExitStack()
        self.serving: Daemon

    def __enter__(self) -> Self:
        self._show_driver("well")
        self._publish(next(_SEQUENCE))
        self.engine.start()
        self.start_daemon()
        self._playing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._playing.join()
        self._daemon.close()
        self.engine.kill()

    def set(self, source: str, condition: str) -> None:
        """Bring a source into a condition; `well` is as it should be."""
        with self._lock:
            self._conditions[source] = condition
            self.lost_records = self.lost_records or (source == "recorder" and condition != "well")
            self._enter(source, condition)

    def kill_daemon(self) -> None:
        """Kill -9."""
        self.serving.process.send_signal(signal.SIGKILL)
        self.serving.process.wait(30)
        self._daemon.close()

    def start_daemon(self) -> None:
        """Start one, on the folder of records of those before it."""
        process = self._daemon.enter_context(
            started(
                *("serve", "--url", self.engine.url, "--listen", "127.0.0.1:0"),
                *("--tick-seconds", str(self._tick_seconds), "--agent-dir", str(self.agents)),
                *("--record-dir", str(self.records), "--record-max-size", "16MiB"),
                env={**self._driver.environment(), **self.clock.environment()},
            )
        )
        # Before it listens it says what it left out of its folder.
        lines = (json.loads(line) for line in process.stderr or ())
        address = next(line["address"] for line in lines if "address" in line)
        self.serving = Daemon(process, Client(address), address)
        threading.Thread(target=_drain, args=(self.serving.process,), daemon=True).start()
        self._limit_disk(self._conditions.get("recorder", "well"))
        self.lost_records = False

    def _enter(self, source: str, condition: str) -> None:
        match source, condition:
            case (("engine" | "host"), "absent"):
                self.engine.kill()
            case "engine", "restarted":
                self.engine.kill()
                self.engine.start()
            case "engine", _:
                self.engine.start()
                self.engine.answer(condition)
            case "host", "well":
                self.engine.start()
            case "nvml", _:
                self._show_driver(condition)
            case "torch_allocator", "absent":
                shutil.rmtree(self.agents)
            case "recorder", "absent":
                # At once: while a folder is emptied, its recorder may put another file into it.
                shutil.rmtree(self.records.rename(self.records.with_name("removed")))
            case "recorder", _:
                self.records.mkdir(exist_ok=True)
                self._limit_disk(condition)

    def _play(self) -> None:
        """The background activity: an agent that publishes, and everything that flaps."""
        last_flap, broken = time.monotonic(), False
        while not self._over.wait(self._tick_seconds):
            with self._lock:
                if time.monotonic() - last_flap >= FLAP_SECONDS:
                    last_flap, broken = time.monotonic(), not broken
                    for source in ("nvml", "recorder", "host"):
                        if self._condition(source) == "flapping":
                            self._flap(source, broken=broken)
                self._play_agent(broken=broken)

    def _play_agent(self, *, broken: bool) -> None:
        match self._condition("torch_allocator"):
            case "well":
                self._publish(next(_SEQUENCE))
            case "garbage":
                self._write('{"kvdiag_agent": 1, "process": [[[[')
            case "flapping":
                if broken:
                    self._write("")
                else:
                    self._publish(next(_SEQUENCE))

    def _condition(self, source: str) -> str:
        return self._conditions.get(source, "well")

    def _flap(self, source: str, *, broken: bool) -> None:
        match source:
            case "nvml":
                self._show_driver("absent" if broken else "well")
            case "recorder":
                self._limit_disk("full" if broken else "well")
            case "host":
                (self.engine.kill if broken else self.engine.start)()

    def _show_driver(self, condition: str) -> None:
        free_bytes = 100 * GIB if condition == "garbage" else 30 * GIB
        running = (Running(pid=os.getpid(), used_bytes=50 * GIB, name="python"),)
        gpu = Gpu(uuid=f"GPU-{UUID}", total_bytes=80 * GIB, free_bytes=free_bytes, processes=running)
        self._driver.show(
            State(
                gpus=(gpu,),
                failures=(Failure("nvml*", DRIVER_NOT_LOADED),) if condition == "absent" else (),
                delays=_DELAYS.get(condition, ()),
            )
        )

    def _publish(self, sequence: int) -> None:
        self.agents.mkdir(exist_ok=True)
        self._write(json.dumps({**PUBLICATION, "sequence": sequence, "monotonic_seconds": time.monotonic()}))

    def _write(self, text: str) -> None:
        draft = self.agents / "draft"
        draft.write_text(text)
        # The kernel's clock is not the one that the daemon reads.
        os.utime(draft, (self.clock.now_seconds(),) * 2)
        draft.replace(self.agents / AGENT_FILE)

    def _limit_disk(self, condition: str) -> None:
        _, hard = resource.prlimit(self.serving.process.pid, resource.RLIMIT_FSIZE)
        limit = 0 if condition == "full" else hard
        resource.prlimit(self.serving.process.pid, resource.RLIMIT_FSIZE, (limit, hard))


_SEQUENCE = itertools.count(1)
_DELAYS: Mapping[str, tuple[Delay, ...]] = {
    "slow": (Delay("nvmlDeviceGetMemoryInfo*", 0.1),),
    "hanging": (Delay("nvmlDeviceGetMemoryInfo*", 3600.0),),
}


def _drain(process: subprocess.Popen[str]) -> None:
    """Take what it logs: a pipe that is full would hold it up."""
    for _ in process.stderr or ():
        pass
