"""Days of `kvdiag serve` in minutes: whether its memory, its descriptors or its disk usage grow.

python -m tests.quality.bench.serve_soak [--hours N]

The daemon's own parts in a loop whose clock jumps: eight GPUs, a server that alternates between busy and idle, agents,
host processes, a flight recorder on a real disk, a diagnosis each hour. Every figure changes in each sample. Exits 1
where memory, descriptors or disk usage have grown since the history was full.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.engines.engine import EngineClient
from kvdiag.engines.vllm import ENGINE
from kvdiag.feeds.daemon.diagnosis_schedule import DiagnosisSchedule
from kvdiag.feeds.daemon.retention import Retention
from kvdiag.feeds.daemon.server_tracker import FoundServer
from kvdiag.feeds.daemon.watch import Watch
from kvdiag.feeds.live.sampling import Clock, HostReading
from kvdiag.feeds.recording.disk_recorder import DiskRecorder
from kvdiag.feeds.recording.segment_store import SegmentStore
from kvdiag.model import Allocator, Device, Diagnosis, Engine, Facts, Gap, Lengths, Memory, Process, Timeline
from kvdiag.sources import host
from kvdiag.sources.agents.allocator_files import AgentReading
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.prometheus_text import Series
from kvdiag.sources.worker_thread import ThreadedReader
from tests.builders.finders import Finding
from tests.builders.values import pool
from tests.quality.bench.table import note
from tests.unit.feeds.daemon.virtual_time import now_seconds, run

GIB = 2**30
MIB = 2**20
GPUS = 8
TOTAL_BYTES = 80 * GIB
HOURS = 72
FULL_HOURS = 25
"""After which the history of a day is full, and nothing has a reason to grow."""

MAX_GROWTH_BYTES = 4 * MIB
"""Of the heap's own making: pages of it are taken and given back by the MiB."""

MAX_BYTES = 64 * MIB
BEGUN_SECONDS = 1_700_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the daemon had at an hour."""

    hour: float
    resident_bytes: int
    descriptors: int
    disk_bytes: int
    samples: int
    worst: str | None


class _Drawn:
    """Random figures that change in each sample."""

    def __init__(self) -> None:
        self._random = random.Random(1)  # noqa: S311 - for variety, not for secrets
        self._readings = 0

    def bytes(self, most: int) -> int:
        return self._random.randrange(most)

    async def lengths(self) -> Lengths | None:
        """The lengths of finished requests, from histograms that grow."""
        lines = tuple(Series({"le": bound}, self._readings * share) for bound, share in (("100", 0.5), ("+Inf", 1.0)))
        return ENGINE.parse_lengths(dict.fromkeys(ENGINE.length_metrics, lines))

    async def read(self) -> tuple[tuple[Engine, ...], tuple[Gap, ...]]:
        """The engine: busy for an hour, idle for ten minutes."""
        self._readings += 1
        busy = self._readings % 4200 < 3600
        usage = self._random.random() if busy else 0.0
        count = self._readings * 100
        return (
            Engine(
                engine="0",
                kv_usage_ratio=usage,
                requests_running=self.bytes(200) if busy else 0,
                requests_waiting=0,
                requests_waiting_for_capacity=0,
                preemptions_total=0,
                prompt_tokens_total=count,
                generation_tokens_total=count,
            ),
        ), ()


class _Devices(ThreadedReader[DeviceReading]):
    def __init__(self, drawn: _Drawn) -> None:
        super().__init__(lambda: (None, ()), "nvml")
        self._drawn = drawn

    async def ask(self, timeout_seconds: float, **kwargs: object) -> DeviceReading:
        """All GPUs, with one process each where processes are asked for."""
        free_bytes = [self._drawn.bytes(GIB) for _ in range(GPUS)]
        return tuple(
            Device(
                uuid=f"GPU-{number}",
                index=number,
                name="NVIDIA H100 80GB HBM3",
                memory=Memory(total_bytes=TOTAL_BYTES, free_bytes=free, driver_reserved_bytes=600 * MIB),
                processes=(Process(pid=os.getpid(), used_bytes=TOTAL_BYTES - GIB - free, name="VLLM::Worker"),)
                if kwargs["processes"]
                else None,
            )
            for number, free in enumerate(free_bytes)
        ), ()


class _Agents(ThreadedReader[AgentReading]):
    def __init__(self, drawn: _Drawn) -> None:
        super().__init__(lambda: AgentReading(None, ()), "agents")
        self._drawn = drawn

    async def ask(self, timeout_seconds: float, **kwargs: object) -> AgentReading:
        """An agent for each GPU."""
        found = []
        for number in range(GPUS):
            reserved = 60 * GIB + self._drawn.bytes(GIB)
            allocated = reserved - self._drawn.bytes(GIB)
            found.append(
                Allocator(
                    device_uuid=str(number),
                    pid=os.getpid(),
                    pid_seen=True,
                    start_ticks=1,
                    age_seconds=0.5,
                    allocated_bytes=allocated,
                    reserved_bytes=reserved,
                    title=f"VLLM::Worker_TP{number}",
                    tensor_rank=number,
                )
            )
        return AgentReading(tuple(found), ())


class _Host(ThreadedReader[HostReading]):
    def __init__(self) -> None:
        super().__init__(host.read, "host")

    async def ask(self, timeout_seconds: float, **kwargs: Any) -> HostReading:
        """The processes, read within the loop."""
        return host.read(**kwargs)


class _Inline(DiagnosisSchedule):
    """Diagnoses within the loop: its clock would run on while a thread works."""

    async def _made(self, timeline: Timeline, facts: Facts, limits: Limits) -> Diagnosis:
        return self._diagnose(timeline=timeline, facts=facts, limits=limits)


class _Watch(Watch):
    """Reads the host within the loop, for the same reason."""

    def __init__(self, *found: Any, **options: Any) -> None:
        super().__init__(*found, **options)
        self._processes = _Host()


def soaked(
    folder: Path,
    *,
    hours: float,
    every_hours: float = 1.0,
    retention: Retention | None = None,
    max_bytes: int = MAX_BYTES,
) -> list[Standing]:
    """A daemon's resource usage at the end of each interval of so many hours."""
    return run(_soaked(folder, hours, every_hours, retention, max_bytes))


async def _soaked(
    folder: Path, hours: float, every_hours: float, retention: Retention | None, max_bytes: int
) -> list[Standing]:
    drawn = _Drawn()
    nvml = _Devices(drawn)
    facts = Facts(url="http://127.0.0.1:8000", engine_name="vllm", pools=(pool(),), server_pids=(os.getpid(),))

    async def find() -> FoundServer:
        return FoundServer(facts=facts, engine=cast("EngineClient", drawn), nvml=nvml)

    recorder = DiskRecorder(SegmentStore(folder, max_bytes=max_bytes))
    watch = _Watch(
        Finding(find, nvml),
        agents=_Agents(drawn),
        limits=DEFAULT_LIMITS,
        schedule=partial(_Inline, every_seconds=3600.0 * every_hours),
        recorder=recorder,
        clock=Clock(wall=lambda: BEGUN_SECONDS + now_seconds(), steady=now_seconds),
        retention=retention,
    )
    task = asyncio.create_task(watch.run())
    found = []
    for number in range(round(hours / every_hours)):
        for _ in range(round(every_hours * 60)):
            await asyncio.sleep(60.0)
            # Its thread knows nothing of the loop's clock: it has to come after.
            recorder.drained()
        found.append(_standing((number + 1) * every_hours, watch, folder))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    recorder.close()
    return found


def _standing(hour: float, watch: _Watch, folder: Path) -> Standing:
    shown = watch.snapshot()
    return Standing(
        hour=hour,
        resident_bytes=_resident_bytes(),
        descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - as the kernel lists them
        disk_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        samples=len(watch.history()),
        worst=None if shown.diagnosis is None else shown.diagnosis.worst,
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(standings: Sequence[Standing], max_bytes: int) -> list[str]:
    """What has grown from the first to the last of these, or is more than allowed."""
    first, last = standings[0], standings[-1]
    problems = []
    if (more := last.resident_bytes - first.resident_bytes) > MAX_GROWTH_BYTES:
        problems.append(f"memory by {more / MIB:.1f} MiB")
    half = len(standings) // 2
    # One more or less is a segment that is just being begun.
    before, after = (max(one.descriptors for one in part) for part in (standings[: half + 1], standings[half:]))
    if (count := after - before) > 0:
        problems.append(f"descriptors by {count}")
    if (size := max(one.disk_bytes for one in standings)) > max_bytes:
        problems.append(f"disk to {size / MIB:.1f} MiB")
    if last.samples > max(one.samples for one in standings[: max(len(standings) // 2, 1)]) * 1.1:
        problems.append(f"samples to {last.samples}")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures by hours; 1 where something has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=int, default=HOURS, help="simulated hours, more than the day that is kept")
    hours = max(parser.parse_args(arguments).hours, FULL_HOURS + 2)
    with tempfile.TemporaryDirectory(prefix="kvdiag-serve-soak-") as folder:
        standings = soaked(Path(folder), hours=hours)
    sys.stdout.write("hour  resident MiB  descriptors  disk MiB  samples  verdict\n")
    for one in standings:
        if one.hour % 6 == 0 or one.hour in (1, FULL_HOURS, hours):
            sys.stdout.write(
                f"{one.hour:4.0f}  {one.resident_bytes / MIB:12.1f}  {one.descriptors:11}  "
                f"{one.disk_bytes / MIB:8.1f}  {one.samples:7}  {one.worst}\n"
            )
    problems = grown(standings[FULL_HOURS:], MAX_BYTES)
    full, last = standings[FULL_HOURS], standings[-1]
    span = f"serve after {hours} simulated hours, 8 GPUs:"
    before = f"at hour {FULL_HOURS + 1}"
    note(f"{span} resident memory", last.resident_bytes / MIB, full.resident_bytes / MIB, than=before, unit="MiB")
    note(f"{span} open files", last.descriptors, full.descriptors, than=before, unit="")
    most = max(one.disk_bytes for one in standings)
    note(f"{span} peak disk use", most / MIB, MAX_BYTES / MIB, than="--record-max-size", unit="MiB")
    sys.stdout.write(f"grown since hour {FULL_HOURS + 1}: {', '.join(problems) or 'nothing'}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
