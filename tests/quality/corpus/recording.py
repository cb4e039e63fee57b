"""What kvdiag's recorder would have kept of a server, from tracks; and what the standard series alone show of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

from kvdiag.model import (
    Allocator,
    Device,
    Engine,
    Facts,
    FailedAllocation,
    Gap,
    HostProcess,
    KvPool,
    Memory,
    Process,
    ReservedSplit,
    Sample,
    Timeline,
)
from tests.quality.corpus.tape import MIB, Tape, Track, pages, running_total

START_SECONDS = 1_700_000_000.0

NO_ENGINE = Gap(source="engine", kind="absent", reason="the server has no vLLM metrics page")
NOT_UP = Gap(source="engine", kind="failed", reason="connection refused")
CONTAINER_PID = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process on a GPU: bytes over time, 0 while it does not live; `own` where it is one of the server's."""

    pid: int
    name: str
    held: Track
    own: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device: who holds it, what no process holds, and whether NVML lists processes."""

    total_bytes: int
    holders: tuple[Holder, ...] = ()
    unlisted: Track | None = None
    driver_reserved_bytes: int = 480 * MIB
    lists_processes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """What an agent in one process publishes, where the report gives torch's own figures."""

    pid: int
    gpu: int
    allocated: Track
    reserved: Track
    split: Callable[[int, int], ReservedSplit] | None = None
    """From live and reserved bytes to what the blocks show."""

    fails_at_hour: float | None = None
    failure: FailedAllocation | None = None
    backend: str = "native"
    retries: Track | None = None
    title: str = "VLLM::Worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """One process's host memory: anonymous over time, and what it maps from files."""

    pid: int
    name: str
    anonymous: Track
    file_bytes: int = 400 * MIB
    files: Track | None = None
    """What comes on top of that."""


Pages = list[tuple[Engine, ...] | Gap | None]
"""The engines' page at each time; a gap where it should have answered, `None` where there is no such page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All tracks of one incident, and what is known of its server."""

    tape: Tape
    pages: Pages | None = None
    gpus: tuple[Gpu, ...] = ()
    torch: tuple[Torch, ...] = ()
    host: tuple[HostMemory, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def play(self) -> tuple[Timeline, Facts]:
        """The timeline and the facts."""
        samples = [self._sample(place, hour) for place, hour in enumerate(self.tape.hours)]
        return Timeline(samples=tuple(samples)), self._facts()

    def _facts(self) -> Facts:
        own = {holder.pid for gpu in self.gpus for holder in gpu.holders if holder.own}
        own |= {one.pid for one in self.host}
        gaps = (NO_ENGINE,) if self.pages is None else ()
        return Facts(**{"server_pids": tuple(sorted(own)) or None, "gaps": gaps, **self.facts})

    def _sample(self, place: int, hour: float) -> Sample:
        page = None if self.pages is None else self.pages[place]
        gap = isinstance(page, Gap)
        return Sample(
            at_seconds=START_SECONDS + round(hour * 3600.0, 3),
            engines=None if isinstance(page, Gap) else page,
            devices=tuple(self._device(index, gpu, place) for index, gpu in enumerate(self.gpus)) or None,
            allocators=tuple(self._allocator(one, place, hour) for one in self.torch) or None,
            host=tuple(
                HostProcess(
                    pid=one.pid,
                    name=one.name,
                    resident_bytes=_kib(one.anonymous[place]) + one.file_bytes + _files(one, place),
                    anonymous_bytes=_kib(one.anonymous[place]),
                )
                for one in self.host
            )
            or None,
            gaps=(page,) if gap and isinstance(page, Gap) else (),
        )

    def _device(self, index: int, gpu: Gpu, place: int) -> Device:
        alive = [(one, pages(one.held[place])) for one in gpu.holders]
        listed = tuple(Process(pid=one.pid, used_bytes=size, name=one.name) for one, size in alive if size)
        used = gpu.driver_reserved_bytes + sum(size for _, size in alive)
        used += 0 if gpu.unlisted is None else pages(gpu.unlisted[place])
        return Device(
            uuid=f"GPU-{index:04d}",
            index=index,
            name="GPU",
            memory=Memory(
                total_bytes=gpu.total_bytes,
                free_bytes=max(gpu.total_bytes - used, 0),
                driver_reserved_bytes=gpu.driver_reserved_bytes,
            ),
            processes=listed if gpu.lists_processes else None,
        )

    def _allocator(self, one: Torch, place: int, hour: float) -> Allocator:
        live = round(one.allocated[place] / 512) * 512
        reserved = max(pages(one.reserved[place]), live)
        gpu = self.gpus[one.gpu]
        held = next((pages(holder.held[place]) for holder in gpu.holders if holder.pid == one.pid), None)
        failed = one.fails_at_hour is not None and hour >= one.fails_at_hour
        failure = None
        if failed and one.failure is not None and one.fails_at_hour is not None:
            failure = replace(one.failure, age_seconds=round((hour - one.fails_at_hour) * 3600.0, 3))
        memory = self._device(one.gpu, gpu, place).memory
        return Allocator(
            device_uuid=f"{one.gpu:04d}",
            pid=one.pid,
            pid_seen=True,
            start_ticks=one.pid,
            age_seconds=0.5,
            allocated_bytes=live,
            reserved_bytes=reserved,
            alloc_retries_total=0 if one.retries is None else round(one.retries[place]),
            ooms_total=int(failed),
            backend=one.backend,
            expandable_segments=False,
            process_bytes=held,
            memory=memory,
            split=None if one.split is None else one.split(live, reserved),
            failure=failure,
            title=one.title,
        )


def _files(one: HostMemory, place: int) -> int:
    return 0 if one.files is None else _kib(one.files[place])


def _kib(value: float) -> int:
    """Bytes as /proc counts them, no finer than its readers print."""
    return max(round(value / MIB), 0) * MIB


def serving(
    tape: Tape,
    demand: Sequence[float],
    kv: KvPool | None,
    *,
    most_running: int = 32,
    request_tokens: int = 3_000,
    requests_per_hour: float = 1_200.0,
    held_blocks: Sequence[float] | None = None,
    restarts: Sequence[float] = (),
) -> Pages:
    """An engine's metrics under a demand of 0 to 1; `held_blocks` add to the running requests' blocks."""
    made: Pages = []
    events = tape.events([requests_per_hour * value for value in demand])
    finished = running_total(events)
    forgotten, pending = 0.0, list(restarts)
    for place, (hour, value) in enumerate(zip(tape.hours, demand, strict=True)):
        if pending and hour >= pending[0]:
            pending.pop(0)
            forgotten = finished[place]
        running = round(most_running * value) if value > 0.0 else 0
        done = finished[place] - forgotten
        made.append(
            (engine(kv, running, request_tokens, done, held=0.0 if held_blocks is None else held_blocks[place]),)
        )
    return made


def engine(
    kv: KvPool | None,
    running: int,
    request_tokens: int,
    done: float,
    *,
    held: float = 0.0,
    waiting: int = 0,
    preemptions: int = 0,
    label: str = "0",
) -> Engine:
    """One page: so many requests that hold their tokens' blocks, and so many done so far."""
    usage = None
    if kv is not None:
        blocks = running * -(-request_tokens // kv.block_tokens) + round(held)
        usage = min(blocks / kv.usage_blocks, 1.0)
    prompts = round(done * request_tokens * 0.8)
    return Engine(
        engine=label,
        kv_usage_ratio=usage,
        requests_running=running,
        requests_waiting=waiting,
        preemptions_total=preemptions,
        prompt_tokens_total=prompts,
        generation_tokens_total=round(done * request_tokens * 0.2),
        prefix_queries_total=prompts,
        prefix_hits_total=round(0.3 * prompts),
    )


def scraped(timeline: Timeline, random: Random, *, tick_seconds: float, lost: float = 0.01) -> Timeline:
    """The same, each sample up to a fifth of an interval late, and some missing."""
    kept = [sample for sample in timeline.samples if random.random() >= lost] or list(timeline.samples)
    waits = [random.uniform(0.0, 0.2 * tick_seconds) for _ in kept]
    late = [replace(sample, at_seconds=sample.at_seconds + wait) for sample, wait in zip(kept, waits, strict=True)]
    return Timeline(samples=tuple(late))


DEVICE_LATE, HOST_LATE = 0.2, 0.45
"""Shares of an interval by which other targets are scraped after the engine."""


def standard_series(timeline: Timeline, facts: Facts) -> tuple[Timeline, Facts]:
    """The timeline that vLLM's metrics, DCGM and cAdvisor alone give, each scraped at a time of its own.

    No processes, no torch, no files of the server's.
    """
    times = [sample.at_seconds for sample in timeline.samples]
    steps = [later - earlier for earlier, later in pairwise(times)] or [60.0]
    samples: list[Sample] = []
    for sample, step in zip(timeline.samples, [*steps, min(steps)], strict=True):
        bare = Sample(at_seconds=sample.at_seconds)
        if sample.engines is not None or sample.gaps:
            samples.append(replace(bare, engines=sample.engines, gaps=sample.gaps))
        if sample.devices is not None:
            devices = tuple(replace(device, processes=None) for device in sample.devices)
            samples.append(replace(bare, at_seconds=sample.at_seconds + DEVICE_LATE * step, devices=devices))
        if sample.host:
            host = (_container(sample.host),)
            samples.append(replace(bare, at_seconds=sample.at_seconds + HOST_LATE * step, host=host))
    known = replace(
        facts,
        server_pids=None,
        weights_bytes=None,
        model_config=None,
        max_model_len_tokens=None,
        tensor_parallel=None,
        pipeline_parallel=None,
        device_uuids=tuple(sorted({device.uuid for one in samples for device in one.devices or ()})) or None,
    )
    return Timeline(samples=tuple(samples)), known


def _container(host: tuple[HostProcess, ...]) -> HostProcess:
    """container_memory_rss and container_memory_working_set_bytes of all of them."""
    anonymous = sum(one.anonymous_bytes or 0 for one in host)
    resident = sum(one.resident_bytes for one in host)
    return HostProcess(pid=CONTAINER_PID, name="container", resident_bytes=resident, anonymous_bytes=anonymous)
