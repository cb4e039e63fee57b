"""What the GPUs of a `World` and the server's ranks on them hold, so far into a run."""

from dataclasses import replace

from kvdiag.model import Allocator, Device, Process
from tests.builders.values import GIB, MIB, SERVER_PID, allocator, device, process
from tests.builders.worlds import World


def rank_allocator(world: World, index: int, *, requests: int) -> Allocator:
    """Torch's allocator in the rank on a GPU, after so many requests."""
    grown = requests if index == 0 else 0
    own = _server_bytes(world, index, requests)
    first = own - grown * world.device_growth_bytes - world.overhead_bytes * 3 // 4
    live = first + grown * world.torch_growth_bytes + sum(world.torch_late_bytes[:grown])
    return allocator(
        device_uuid=str(index),
        pid=SERVER_PID + index,
        allocated_bytes=live,
        reserved_bytes=live + 100 * MIB + grown * world.cache_growth_bytes,
        process_bytes=own if world.outside_reported else None,
        title=f"VLLM::Worker_TP{index}",
        tensor_rank=index,
    )


def gpu(world: World, index: int, *, requests: int, run_centiseconds: int, processes: bool) -> Device:
    """A GPU after so many requests and hundredths of a second, with its processes where they are asked for."""
    reserved = world.driver_reserved_bytes
    running: list[Process] = []
    used = reserved or 0
    if index < world.gpus:
        own = _server_bytes(world, index, requests)
        used += own
        running.append(process(SERVER_PID + index, own if world.server_bytes_reported else None, "VLLM::EngineCore"))
    for number, other in enumerate(world.foreign.get(index, ())):
        grown = world.foreign_growth_bytes.get(index, 0) * run_centiseconds // 100 if number == 0 else 0
        used += (other.used_bytes or 0) + grown
        told = None if other.used_bytes is None else other.used_bytes + grown
        running.append(replace(other, used_bytes=told))
    used += world.zombie_bytes if index == 0 else 0
    return device(
        index,
        used_bytes=used if world.memory_reported else None,
        total_bytes=world.device_bytes,
        driver_reserved_bytes=reserved,
        processes=tuple(running) if processes and world.processes_reported else None,
    )


def _server_bytes(world: World, index: int, requests: int) -> int:
    pools = [one.pool_bytes or 12 * GIB for one in world.pools] or [12 * GIB]
    # One engine has a rank on every GPU; several engines share the GPUs out.
    mine = [size for number, size in enumerate(pools) if len(pools) == 1 or number % world.gpus == index]
    ranks = max(world.gpus // len(pools), 1)
    weights = len(mine) * (6 * GIB if world.weights_bytes is None else world.weights_bytes) // ranks
    grown = sum(world.first_touch_bytes[:requests])
    if index == 0:
        grown += world.device_growth_bytes * requests
    return sum(mine) + weights + world.overhead_bytes + world.rank_extra_bytes.get(index, 0) + grown
