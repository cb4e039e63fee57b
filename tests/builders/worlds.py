"""Servers with knobs: a `World`, the facts that are known of it beforehand, and one of every kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvdiag.diagnosis.timeline_queries import NO_POOL
from kvdiag.model import Facts, Gap, KvPool, Process, Workload
from tests.builders.values import GIB, GPU_LOST, MIB, NO_NVML, OOM, OOM_WITH_ROOM, SERVER_PID, pool, process


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
    """Blocks freed late: still in use in the first, second, … settling of the run, and after it, at any load."""

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

    outside_reported: bool = True
    """Whether NVML reports to the agents the size of their processes."""

    foreign: Mapping[int, tuple[Process, ...]] = field(default_factory=dict)
    """Other processes by GPU index; each GPU named that is not the server's is another device of the host."""

    foreign_growth_bytes: Mapping[int, int] = field(default_factory=dict)
    """Growth per second of the first foreign process of a GPU, independent of the server."""

    zombie_bytes: int = 0
    """On GPU 0, held by no process."""

    server_seen: bool = True
    """Whether the server's process ids are known, and are the ones that NVML lists."""

    processes_reported: bool = True
    server_bytes_reported: bool = True
    memory_reported: bool = True
    nvml: Gap | None = None
    """Why there are no devices at all."""

    resident_at_once: int | None = None
    """Most requests of a load that the pool takes at once; the others wait with the pool full."""

    preemptions: int = 0
    failing: Mapping[str, str] = field(default_factory=dict)
    """Error text of all requests of a step."""

    other_prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that the server takes from another client while a step's load runs."""

    unseen: tuple[str, ...] = ()
    """Steps under whose load the engine's metrics were not read."""

    again: tuple[str, ...] = ()
    """Steps whose first load was not observed, so that it was offered once more."""

    passing: tuple[str, ...] = ()
    """Steps in whose load another client's request runs, whose prompt is counted when it has ended."""

    busy: bool = False
    """Another client's request runs all the time."""

    cut_short_in: str | None = None
    """The step in whose load everything ends."""

    lost_in: str | None = None
    """The step in whose load the server stops answering."""

    usage_reported: bool = True
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
        gaps = (Gap(source="engine", kind="absent", reason=NO_POOL),)
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
        "memory not told": World(memory_reported=False),
        "processes not told": World(processes_reported=False),
        "server not seen": World(server_seen=False),
        "usage not told": World(usage_reported=False),
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
"""One world of every kind, by the condition it represents."""


def named_so(text: str) -> tuple[World, Facts]:
    """A world in which every name and every message from outside is this text."""
    world = World(
        foreign={0: (process(7, 6 * GIB, text),)},
        device_bytes=48 * GIB,
        failing={"long_context": f"{OOM}{text}", "concurrent": text},
        notes=(text,),
    )
    known = replace(
        facts(world),
        model=text,
        url=f"http://{text}",
        engine_name=text,
        engine_version=text,
        gaps=(Gap(source=text, kind="failed", reason=text),),
    )
    return world, known
