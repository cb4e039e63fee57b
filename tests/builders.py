"""What a run of kvdiag would have seen of a server, as plain values: timelines and facts from a `World` with knobs.

Pure: no clock, no randomness, no I/O. `run(world)` marks and samples as kvdiag/feeds/active.py does: engines at 10 Hz,
devices apart from them at 1 Hz (their processes every fifth time and in every settling), unjudged warm-up requests
after the baseline, then each step's cycles with a quiet lead-in and a settle-out. `seen(…)` makes a timeline of single
samples for rules that need no steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.steps import STEPS
from kvdiag.model import (
    Allocator,
    Device,
    Diagnosis,
    Engine,
    Facts,
    Finding,
    Gap,
    KvPool,
    Load,
    Mark,
    Memory,
    Outcome,
    Phase,
    Process,
    ReservedSplit,
    Sample,
    StepResult,
    Timeline,
    Workload,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30

START_SECONDS = 1_000.0
TICK = 10
"""One engine reading, in hundredths of a second."""

DEVICE_TICKS = 10
PROCESS_TICKS = 50
QUIET_TICKS = 13
SETTLE_TICKS = 3
HOLD_TICKS = 40

PREFILL_TOKENS_PER_TICK = 4096
TOKENS_PER_TICK = 16

SERVER_PID = 100
"""The server's process on GPU 0; its rank on GPU n has this plus n."""

OOM = (
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 512.00 MiB is "
    "free. Process 100 has 22.10 GiB memory in use. Of the allocated memory 21.00 GiB is allocated by PyTorch, and "
    "256.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
"""Torch's message where all that is left together is not enough."""

OOM_WITH_ROOM = OOM.replace("3.00 GiB", "2.50 GiB").replace("256.00 MiB is reserved", "2.95 GiB is reserved")
"""Torch's message where what is left would be enough in one piece."""

NO_NVML = Gap(source="nvml", kind="absent", reason="no NVIDIA driver here: its library is not found")
GPU_LOST = Gap(source="nvml", kind="failed", reason="GPU 0 is out of reach (GPU is lost)")
NO_ANSWER = Gap(source="vllm", kind="failed", reason="connection refused")


def pool(engine: str = "0", *, block_tokens: int = 16, usable_blocks: int = 6144, **changes: object) -> KvPool:
    """A pool as vLLM 0.32 reports it: 12 GiB in blocks of 2 MiB, three requests of 32,768 tokens."""
    total = usable_blocks + 1
    most = total / -(-32768 // block_tokens)
    usual = KvPool(
        engine=engine,
        block_tokens=block_tokens,
        total_blocks=total,
        usable_blocks=usable_blocks,
        usage_blocks=usable_blocks,
        capacity_tokens=int(most * 32768),
        max_concurrency=most,
        pool_bytes=total * 2 * MIB,
        cache_dtype="auto",
        memory_fraction_ratio=0.92,
        prefix_caching=True,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A server, its devices, and what goes wrong with them. The default is healthy: one engine on one 24-GiB GPU."""

    pools: tuple[KvPool, ...] = field(default_factory=lambda: (pool(),))
    gpus: int = 1
    device_bytes: int = 24 * GIB
    driver_reserved_bytes: int | None = 464 * MIB
    weights_bytes: int | None = 6 * GIB
    overhead_bytes: int = 1 * GIB
    """Context, activations and graphs of each rank."""

    max_model_len_tokens: int | None = 32768
    forced: bool = False

    held_at_start_blocks: int = 0
    leaked_blocks_per_request: int = 0
    extra_blocks_per_request: int = 0
    """Held by a request beyond what its tokens need, and given back with it."""

    late_blocks: tuple[int, ...] = ()
    """Held in the first, second, … settling of the run and after it, whatever the requests did: blocks freed late."""

    first_touch_bytes: tuple[int, ...] = ()
    """Taken on every GPU of the server by its first, second, … request, and kept."""

    device_growth_bytes: int = 0
    """Taken on GPU 0 by every request, and kept."""

    rank_extra_bytes: Mapping[int, int] = field(default_factory=dict)
    """What the rank on a GPU holds beyond the others."""

    agents: bool = False
    """Whether the server's processes publish what torch holds, a quarter of their overhead among it."""

    torch_growth_bytes: int = 0
    """What of the growth of GPU 0 lives in torch."""

    torch_late_bytes: tuple[int, ...] = ()
    """What of all that torch has reserved comes to live on GPU 0 with the first, second, … request, and stays."""

    cache_growth_bytes: int = 0
    """What of the growth of GPU 0 torch reserves, and nothing lives in."""

    outside_told: bool = True
    """Whether the agents are told by NVML what their processes hold."""

    foreign: Mapping[int, tuple[Process, ...]] = field(default_factory=dict)
    """Other processes by GPU index; each GPU named that is not the server's is another device of the host."""

    foreign_growth_bytes: Mapping[int, int] = field(default_factory=dict)
    """What the first foreign process of a GPU takes in each second, whatever the server does."""

    zombie_bytes: int = 0
    """On GPU 0, held by no process."""

    server_seen: bool = True
    """Whether the server's process ids are known, and are the ones that NVML lists."""

    processes_told: bool = True
    server_bytes_told: bool = True
    memory_told: bool = True
    nvml: Gap | None = None
    """Why there are no devices at all."""

    resident_at_once: int | None = None
    """Most requests of a load that the pool takes at once; the others wait with the pool full."""

    preemptions: int = 0
    failing: Mapping[str, str] = field(default_factory=dict)
    """Error text of all requests of a step."""

    other_prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that the server takes from somebody else while a step's load runs."""

    unseen: tuple[str, ...] = ()
    """Steps under whose load the engine's page was not read."""

    again: tuple[str, ...] = ()
    """Steps whose first load was not seen, so that it was offered once more."""

    passing: tuple[str, ...] = ()
    """Steps in whose load somebody else's request passes by, whose prompt is counted when it is over."""

    busy: bool = False
    """Somebody else's request runs all the time."""

    cut_short_in: str | None = None
    """The step in whose load everything ends."""

    lost_in: str | None = None
    """The step in whose load the server stops answering."""

    usage_told: bool = True
    workloads: Mapping[str, Workload] = field(default_factory=dict)
    """What a step offers instead of its definition, as when it was scaled down."""

    notes: tuple[str, ...] = ()

    @property
    def server_pids(self) -> tuple[int, ...] | None:
        """The server's processes, one a GPU."""
        return tuple(SERVER_PID + rank for rank in range(self.gpus)) if self.server_seen else None


def facts(world: World) -> Facts:
    """What is known of a world's server beforehand."""
    gaps: tuple[Gap, ...] = ()
    if not world.pools:
        gaps = (Gap(source="vllm", kind="absent", reason="the page has no vllm:cache_config_info"),)
    return Facts(
        url="http://127.0.0.1:8000",
        engine_name="vllm",
        engine_version="0.32.0",
        model="test/model",
        max_model_len_tokens=world.max_model_len_tokens,
        pools=world.pools,
        server_pids=world.server_pids,
        weights_bytes=world.weights_bytes,
        forced=world.forced,
        gaps=gaps,
    )


def run(world: World | None = None) -> Timeline:
    """A whole active run against a world."""
    return _Run(world or World()).whole()


def judged(world: World | None = None) -> Diagnosis:
    """The diagnosis of an active run."""
    world = world or World()
    return diagnose(run(world), facts(world))


def finding(diagnosis: Diagnosis, verdict: str) -> Finding:
    """The one finding of a verdict."""
    (found,) = [one for one in diagnosis.findings if one.id == verdict]
    return found


def step(diagnosis: Diagnosis, name: str) -> StepResult:
    """The result of a step."""
    (found,) = [one for one in diagnosis.steps if one.id == name]
    return found


def statuses(found: Sequence[Finding]) -> dict[str, str]:
    """Status by verdict id."""
    return {one.id: one.status for one in found}


def evidence(found: Finding) -> dict[str, float | str | None]:
    """Evidence values by name."""
    return {one.name: one.value for one in found.evidence}


def expected(result: StepResult) -> dict[str, float | str | None]:
    """Expected values of a step by name."""
    return {one.name: one.value for one in result.expected}


def measured(result: StepResult) -> dict[str, float | str | None]:
    """Measured values of a step by name."""
    return {one.name: one.value for one in result.measured}


def engine(
    *,
    usage: float | None = 0.0,
    running: int | None = 0,
    waiting: int | None = 0,
    preemptions: int | None = 0,
    prompt_tokens: int | None = 0,
    label: str = "0",
) -> Engine:
    """One engine's page at a moment; idle unless told otherwise."""
    return Engine(
        engine=label,
        kv_usage_ratio=usage,
        requests_running=running,
        requests_waiting=waiting,
        preemptions_total=preemptions,
        prompt_tokens_total=prompt_tokens,
        generation_tokens_total=0,
    )


def holding(blocks: int, *, of: KvPool | None = None, running: int = 0, waiting: int = 0) -> Engine:
    """An engine of which so many blocks are held."""
    return engine(usage=blocks / (of or pool()).usage_blocks, running=running, waiting=waiting)


def device(
    index: int = 0,
    *,
    used_bytes: int | None = 20 * GIB,
    total_bytes: int = 24 * GIB,
    driver_reserved_bytes: int | None = 464 * MIB,
    processes: tuple[Process, ...] | None = None,
    uuid: str | None = None,
    mig_parent_uuid: str | None = None,
) -> Device:
    """A GPU at a moment; `used_bytes` is `None` where its memory cannot be read."""
    memory = None
    if used_bytes is not None:
        memory = Memory(
            total_bytes=total_bytes, free_bytes=total_bytes - used_bytes, driver_reserved_bytes=driver_reserved_bytes
        )
    return Device(
        uuid=uuid or f"GPU-{index}",
        index=index,
        name="NVIDIA Test",
        memory=memory,
        processes=processes,
        mig_parent_uuid=mig_parent_uuid,
    )


def process(pid: int, used_bytes: int | None, name: str | None = "python3") -> Process:
    """A process on a device."""
    return Process(pid=pid, used_bytes=used_bytes, name=name)


def allocator(**changes: object) -> Allocator:
    """The server's allocator on GPU 0: 6 GiB of 8 GiB reserved are live."""
    usual = Allocator(
        device_uuid="0",
        pid=SERVER_PID,
        pid_seen=True,
        start_ticks=1,
        age_seconds=0.0,
        allocated_bytes=6 * GIB,
        reserved_bytes=8 * GIB,
        alloc_retries_total=0,
        ooms_total=0,
        backend="native",
        expandable_segments=False,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def split(**changes: object) -> ReservedSplit:
    """The split of 8 GiB reserved, of which 6 are live and 2 releasable."""
    usual = ReservedSplit(
        age_seconds=0.0,
        reserved_bytes=8 * GIB,
        live_bytes=6 * GIB,
        pending_bytes=0,
        private_bytes=0,
        releasable_bytes=2 * GIB,
        stranded_bytes=0,
        largest_free_block_bytes=2 * GIB,
        pinned_segments=0,
        pinned_free_bytes=0,
        request_bytes=512 * MIB,
        fits=True,
        unusable_ratio=0.0,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def seen(*engines: Engine | tuple[Engine, ...] | Gap, devices: tuple[Device, ...] | Gap | None = None) -> Timeline:
    """A timeline without test steps: one reading of the devices, then one of the engines every tenth of a second."""
    samples: list[Sample] = []
    if isinstance(devices, Gap):
        samples.append(Sample(at_seconds=START_SECONDS, gaps=(devices,)))
    elif devices is not None:
        samples.append(Sample(at_seconds=START_SECONDS, devices=devices))
    for number, reading in enumerate(engines, start=1):
        at_seconds = START_SECONDS + number / 10
        if isinstance(reading, Gap):
            samples.append(Sample(at_seconds=at_seconds, gaps=(reading,)))
        else:
            page = reading if isinstance(reading, tuple) else (reading,)
            samples.append(Sample(at_seconds=at_seconds, engines=page))
    return Timeline(samples=tuple(samples))


class _OverError(Exception):
    """Nothing more is seen of the run."""


class _Run:
    """A run under way: what the server and its devices hold, and what was seen of them so far."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._samples: list[Sample] = []
        self._marks: list[Mark] = []
        self._now = 0
        self._ticks = 0
        self._lost = False
        self._passing = 0
        engines = max(len(world.pools), 1)
        self._leaked = [0] * engines
        self._prompt_tokens = [0] * engines
        self._generated_tokens = [0] * engines
        self._preemptions = 0
        self._requests = 0
        self._settlings = 0

    def whole(self) -> Timeline:
        """All steps, or as many as the world lets through."""
        try:
            self._idle(QUIET_TICKS)
            for one in STEPS:
                if one.workload.requests == 0:
                    self._hold_still(one.id)
                    self._warm_up()
                else:
                    for cycle in range(one.cycles + (one.id in self._world.again)):
                        self._cycle(one.id, cycle, self._world.workloads.get(one.id, one.workload))
        except _OverError:
            pass
        return Timeline(samples=tuple(self._samples), marks=tuple(self._marks))

    def _hold_still(self, name: str) -> None:
        self._mark(name, 0, "begin")
        self._read_devices(processes=True)
        self._idle(HOLD_TICKS)
        self._settle()
        self._mark(name, 0, "end")

    def _warm_up(self) -> None:
        for cycle in range(2 * max(len(self._world.pools), 1)):
            workload = Workload(requests=1, prompt_tokens=512, max_tokens=32)
            self._mark("warmup", cycle, "begin")
            self._mark("warmup", cycle, "offer")
            outcome = self._load("warmup", workload)
            self._mark("warmup", cycle, "release", outcome=outcome)
            self._mark("warmup", cycle, "end")

    def _cycle(self, name: str, cycle: int, workload: Workload) -> None:
        self._mark(name, cycle, "begin", workload=workload, notes=self._world.notes)
        self._settle()
        self._mark(name, cycle, "offer")
        outcome = self._load(name, workload, cycle)
        self._mark(name, cycle, "release", outcome=outcome)
        self._settle()
        self._mark(name, cycle, "end")

    def _load(self, name: str, workload: Workload, cycle: int = 0) -> Outcome:
        world = self._world
        if name == world.cut_short_in:
            self._engines(self._held([workload.prompt_tokens]), running=workload.requests)
            raise _OverError
        if name == world.lost_in:
            self._lost = True
        text = "connection refused" if self._lost else world.failing.get(name)
        looking = name not in world.unseen and (cycle > 0 or name not in world.again)
        self._passing = int(name in world.passing)
        at_once = min(world.resident_at_once or workload.requests, workload.requests)
        done = 0
        while done < workload.requests and text is None:
            batch = min(at_once, workload.requests - done)
            waiting = workload.requests - done - batch
            self._prefill(workload, batch, waiting, looking=looking)
            if name == "concurrent":
                self._preemptions += world.preemptions if not done else 0
            self._decode(workload, batch, waiting, looking=looking)
            done += batch
        if text is not None and not self._lost:
            self._prefill(workload, workload.requests, 0, looking=looking)
        self._passing = 0
        for number in range(done):
            at = number % len(self._leaked)
            self._leaked[at] += world.leaked_blocks_per_request
            self._prompt_tokens[at] += workload.prompt_tokens
            self._generated_tokens[at] += workload.max_tokens
        self._requests += done
        self._prompt_tokens[0] += world.other_prompt_tokens.get(name, 0)
        return Outcome(
            completed=done,
            failed=workload.requests - done,
            prompt_tokens=done * workload.prompt_tokens,
            generated_tokens=done * workload.max_tokens,
            errors=() if text is None else (text,),
        )

    def _prefill(self, workload: Workload, batch: int, waiting: int, *, looking: bool) -> None:
        total = batch * workload.prompt_tokens
        for computed in range(PREFILL_TOKENS_PER_TICK, total, PREFILL_TOKENS_PER_TICK):
            parts = [
                min(max(computed - number * workload.prompt_tokens, 0), workload.prompt_tokens)
                for number in range(batch)
            ]
            held = self._held([part for part in parts if part])
            self._tick(held, running=batch, waiting=waiting, open_requests=batch + waiting, looking=looking)

    def _decode(self, workload: Workload, batch: int, waiting: int, *, looking: bool) -> None:
        for generated in range(1, workload.max_tokens, TOKENS_PER_TICK):
            resident = [workload.prompt_tokens + generated - 1] * batch
            self._tick(
                self._held(resident),
                running=batch,
                waiting=waiting,
                open_requests=batch + waiting,
                resident=tuple(resident),
                looking=looking,
            )

    def _held(self, resident: Sequence[int]) -> list[int]:
        """Blocks of each engine that requests with so many tokens hold, dealt out in turn."""
        held = [0] * len(self._leaked)
        for number, tokens in enumerate(resident):
            at = number % len(held)
            if self._world.pools:
                one = self._world.pools[at]
                held[at] += -(-tokens // one.block_tokens) + self._world.extra_blocks_per_request
                if one.sliding_window_tokens is not None:
                    held[at] -= max(tokens - one.sliding_window_tokens + 1, 0) // one.block_tokens
        return held

    def _idle(self, ticks: int) -> None:
        for _ in range(ticks):
            self._tick([0] * len(self._leaked), running=0)

    def _settle(self) -> None:
        self._settlings += 1
        self._idle(SETTLE_TICKS)
        self._read_devices(processes=True)
        self._idle(1)

    def _tick(
        self,
        held: Sequence[int],
        *,
        running: int,
        waiting: int = 0,
        open_requests: int = 0,
        resident: tuple[int, ...] = (),
        looking: bool = True,
    ) -> None:
        """One engine reading, and after it the devices' where one is due."""
        if self._lost:
            for _ in range(5):
                self._add(Sample(at_seconds=self._time(), load=Load(requests=0), gaps=(NO_ANSWER,)))
            raise _OverError
        if looking:
            self._engines(
                held, running=running, waiting=waiting, load=Load(requests=open_requests, resident_tokens=resident)
            )
        self._now += TICK
        self._ticks += 1
        if self._ticks % DEVICE_TICKS == 1:
            self._read_devices(processes=self._ticks % PROCESS_TICKS == 1)

    def _engines(self, held: Sequence[int], *, running: int, waiting: int = 0, load: Load | None = None) -> None:
        world = self._world
        page = []
        for number in range(len(self._leaked)):
            ours = sum(1 for request in range(running) if request % len(self._leaked) == number)
            usage = None
            if world.pools and world.usage_told:
                one = world.pools[number]
                null = one.usage_blocks - one.usable_blocks
                kept = self._leaked[number] + world.held_at_start_blocks
                kept += self._late() + 200 * self._passing if number == 0 else 0
                usage = min((held[number] + kept + null) / one.usage_blocks, 1.0)
                if waiting:
                    usage = max(usage, 1 - 1 / one.usage_blocks)
            page.append(
                Engine(
                    engine=str(number) if not world.pools else world.pools[number].engine,
                    kv_usage_ratio=usage,
                    requests_running=ours + world.busy + (self._passing if number == 0 else 0),
                    requests_waiting=waiting if number == 0 else 0,
                    requests_waiting_for_capacity=waiting if number == 0 else 0,
                    preemptions_total=self._preemptions if number == 0 else 0,
                    prompt_tokens_total=self._prompt_tokens[number],
                    generation_tokens_total=self._generated_tokens[number],
                    prefix_queries_total=self._prompt_tokens[number],
                    prefix_hits_total=0,
                )
            )
        self._add(Sample(at_seconds=self._time(), engines=tuple(page), load=load or Load(requests=0)))

    def _late(self) -> int:
        late = self._world.late_blocks
        return late[min(self._settlings, len(late)) - 1] if late and self._settlings else 0

    def _read_devices(self, *, processes: bool) -> None:
        world = self._world
        if world.agents:
            held = tuple(self._allocator(index) for index in range(world.gpus))
            self._add(Sample(at_seconds=self._time(), allocators=held))
        if world.nvml is not None:
            self._add(Sample(at_seconds=self._time(), gaps=(world.nvml,)))
            return
        indices = sorted({*range(world.gpus), *world.foreign})
        self._add(
            Sample(
                at_seconds=self._time(), devices=tuple(self._device(index, processes=processes) for index in indices)
            )
        )

    def _allocator(self, index: int) -> Allocator:
        world = self._world
        grown = self._requests if index == 0 else 0
        own = self._server_bytes(index)
        first = own - grown * world.device_growth_bytes - world.overhead_bytes * 3 // 4
        live = first + grown * world.torch_growth_bytes + sum(world.torch_late_bytes[:grown])
        return allocator(
            device_uuid=str(index),
            pid=SERVER_PID + index,
            allocated_bytes=live,
            reserved_bytes=live + 100 * MIB + grown * world.cache_growth_bytes,
            process_bytes=own if world.outside_told else None,
            title=f"VLLM::Worker_TP{index}",
            tensor_rank=index,
        )

    def _device(self, index: int, *, processes: bool) -> Device:
        world = self._world
        reserved = world.driver_reserved_bytes
        running: list[Process] = []
        used = reserved or 0
        if index < world.gpus:
            own = self._server_bytes(index)
            used += own
            running.append(process(SERVER_PID + index, own if world.server_bytes_told else None, "VLLM::EngineCore"))
        for number, other in enumerate(world.foreign.get(index, ())):
            grown = world.foreign_growth_bytes.get(index, 0) * self._now // 100 if number == 0 else 0
            used += (other.used_bytes or 0) + grown
            told = None if other.used_bytes is None else other.used_bytes + grown
            running.append(replace(other, used_bytes=told))
        used += world.zombie_bytes if index == 0 else 0
        return device(
            index,
            used_bytes=used if world.memory_told else None,
            total_bytes=world.device_bytes,
            driver_reserved_bytes=reserved,
            processes=tuple(running) if processes and world.processes_told else None,
        )

    def _server_bytes(self, index: int) -> int:
        world = self._world
        pools = [one.pool_bytes or 12 * GIB for one in world.pools] or [12 * GIB]
        # One engine has a rank on every GPU; several engines share the GPUs out.
        mine = [size for number, size in enumerate(pools) if len(pools) == 1 or number % world.gpus == index]
        ranks = max(world.gpus // len(pools), 1)
        weights = len(mine) * (6 * GIB if world.weights_bytes is None else world.weights_bytes) // ranks
        grown = sum(world.first_touch_bytes[: self._requests])
        if index == 0:
            grown += world.device_growth_bytes * self._requests
        return sum(mine) + weights + world.overhead_bytes + world.rank_extra_bytes.get(index, 0) + grown

    def _add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def _mark(
        self,
        name: str,
        cycle: int,
        phase: Phase,
        *,
        workload: Workload | None = None,
        outcome: Outcome | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._marks.append(
            Mark(
                at_seconds=self._time(),
                step=name,
                cycle=cycle,
                phase=phase,
                workload=workload,
                outcome=outcome,
                notes=notes,
            )
        )

    def _time(self) -> float:
        """A moment later than every one before."""
        self._now += 1
        return START_SECONDS + self._now / 100


SMALL_POOL = pool(usable_blocks=1100, capacity_tokens=17_600, max_concurrency=None)
"""Seven requests of the concurrent step fit, and one of the long one."""

TRAINING = process(4242, 6 * GIB, "train.py")

WORLDS: Mapping[str, World] = MappingProxyType(
    {
        "healthy": World(),
        "two GPUs, tensor parallel": World(gpus=2),
        "two engines, data parallel": World(pools=(pool("0"), pool("1")), gpus=2),
        "sliding window": World(pools=(pool(sliding_window_tokens=1024),)),
        "pool without bytes": World(pools=(pool(pool_bytes=None),)),
        "no pool": World(pools=()),
        "no GPU": World(nvml=NO_NVML),
        "GPU lost": World(nvml=GPU_LOST),
        "memory not told": World(memory_told=False),
        "processes not told": World(processes_told=False),
        "server not seen": World(server_seen=False),
        "usage not told": World(usage_told=False),
        "blocks leak": World(leaked_blocks_per_request=4),
        "blocks held at start": World(held_at_start_blocks=50),
        "device memory leaks": World(device_growth_bytes=6 * MIB),
        "torch leaks": World(agents=True, device_growth_bytes=6 * MIB, torch_growth_bytes=6 * MIB),
        "leak beside torch": World(agents=True, device_growth_bytes=6 * MIB),
        "agents on two GPUs": World(agents=True, gpus=2),
        "ranks uneven": World(gpus=2, rank_extra_bytes={1: 2 * GIB}),
        "warm-up": World(first_touch_bytes=(180 * MIB, 120 * MIB, 60 * MIB)),
        "foreign process": World(foreign={0: (TRAINING,)}, device_bytes=48 * GIB),
        "foreign process of unknown size": World(foreign={0: (process(4242, None),)}),
        "zombie": World(zombie_bytes=2 * GIB),
        "blocks wasted": World(extra_blocks_per_request=100),
        "requests wait": World(max_model_len_tokens=17_600, pools=(SMALL_POOL,), resident_at_once=7),
        "requests are preempted": World(
            max_model_len_tokens=17_600, pools=(SMALL_POOL,), resident_at_once=7, preemptions=5
        ),
        "one request runs out of memory": World(failing={"long_context": OOM}),
        "ten requests find no hole": World(failing={"concurrent": OOM_WITH_ROOM}),
        "requests fail": World(failing={"single_request": "HTTP 500: internal error"}),
        "other traffic": World(busy=True, forced=True),
        "other prompts": World(other_prompt_tokens={"single_request": 100, "concurrent": 100, "long_context": 100}),
        "loads not seen": World(unseen=("single_request", "concurrent", "long_context")),
        "cut short": World(cut_short_in="concurrent"),
        "server lost": World(lost_in="single_request"),
    }
)
"""One world of every kind, by what is to be said of it."""
