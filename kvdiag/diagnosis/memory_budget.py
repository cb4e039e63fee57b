"""What a server may use of a device by its configuration: the share of its memory fraction, and what comes on top."""

from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Device, Facts, KvPool, Memory


def budget_bytes(memory: Memory, pool: KvPool) -> int | None:
    """The server's budget on a device; `None` where the pool was sized by hand, or no fraction is reported.

    It is a share of CUDA's total, which is NVML's total without the driver's reservation (cudaMemGetInfo;
    vllm/v1/worker/utils.py::request_memory).
    """
    if pool.memory_fraction_ratio is None or pool.pool_bytes is not None:
        return None
    return int(pool.memory_fraction_ratio * (memory.total_bytes - (memory.driver_reserved_bytes or 0)))


def without_driver_bytes(memory: Memory) -> int:
    """Used bytes of all processes on a device, without the driver's own."""
    return memory.used_bytes - (memory.driver_reserved_bytes or 0)


def allowance_bytes(device: Device, memory: Memory, facts: Facts, limits: Limits) -> int:
    """What a server takes beyond its budget: the pool is sized after each process's CUDA context is created and
    before graphs are captured.
    """
    own = len(facts.own_processes(device))
    reported = memory.driver_reserved_bytes is not None or own > 0
    driver = 0 if reported else limits.driver_reserved_bytes
    return limits.context_bytes * max(own, 1) + driver + int(limits.over_budget_ratio * memory.total_bytes)
