"""How many bytes an idle server can explain: its pool, its weights, an allowance for the rest. Computed, not seen."""

from __future__ import annotations

from collections.abc import Sequence

from kvdiag.diagnosis.limits import Limits
from kvdiag.kv.calibration.running_server import all_pools_bytes
from kvdiag.model import Device, Facts


def explained_bytes(devices: Sequence[Device], facts: Facts, limits: Limits) -> int | None:
    """Most bytes that can be explained over all of a server's devices; `None` where pool or weights are not known.

    Weights are counted once over all ranks, the pool once per rank. The allowance is a CUDA context and a share of the
    device for activations, CUDA graphs and allocator cache. It is never more than there is.
    """
    memories = [device.memory for device in devices if device.memory is not None]
    pools = all_pools_bytes(facts)
    if not memories or facts.weights_bytes is None or pools is None:
        return None
    copies = len(facts.pools)
    # One engine on several devices is tensor parallel, each rank with a pool of this size; engines share devices out.
    pool_bytes = pools[0] * max(len(memories) // copies, 1)
    reserved = sum(memory.driver_reserved_bytes or 0 for memory in memories)
    allowance = sum(limits.context_bytes + int(limits.activation_ratio * memory.total_bytes) for memory in memories)
    room_bytes = sum(memory.total_bytes for memory in memories)
    return min(pool_bytes + copies * facts.weights_bytes + reserved + allowance, room_bytes)
