"""A running server as a scenario of `kvdiag fit`: its pool as the engine reports it, its device as NVML does.

A plan estimates what a server would take; here it is known: the pool's blocks are the engine's own, and what weights,
context, graphs and activations take together is the rest of its budget. The model's config gives what other formats
and more GPUs would make of a block. Where it is not readable or does not agree with the engine, the cache is one layer
with blocks of the reported size: counts of requests and tokens stay exact, and those two changes are not computed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions.typed_flags import typed
from kvdiag.diagnosis.timeline_queries import NO_DEVICES, assigned_uuids, gap_reason, server_devices
from kvdiag.engine_memory import advice_engine, engine_title, fraction_is_of_device, modelled_engines
from kvdiag.kv.calibration.running_server import block_bytes, bytes_problem, served
from kvdiag.kv.fit.gpu_catalogue import unsupported_levers
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import Demand, Plan
from kvdiag.kv.fit.scenario import FP8, FRACTION, WIDER, GivenWeights, Scenario
from kvdiag.kv.layout.capacity import NULL_BLOCKS
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.dtypes import MODEL_DTYPE_BYTES
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LayerKind
from kvdiag.kv.layout.pages import ceil_div
from kvdiag.model import Facts, KvPool, Timeline

ROUNDING = 1e-6
"""Of hundredths of a share that were computed."""

_DTYPE = "bfloat16"
_CHANGES = {FRACTION: "a larger pool", FP8: "an fp8 KV cache", WIDER: "more GPUs"}

NOT_OF_DEVICE = "its share is of what was free after the weights, which is not reported; see the startup log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The server's fullest device: its size without the driver's own, and the least that was free on it."""

    total_bytes: int
    free_bytes: int
    name: str


def room_of(timeline: Timeline, facts: Facts) -> Room | str:
    """The device with the least free memory at any time; or why it is not known, and how to get it."""

    def fullest() -> Room | str:
        own = assigned_uuids(timeline, facts)
        found: Room | None = None
        for sample in timeline.samples:
            devices = server_devices(sample.devices, own)
            if not own and len(devices) > 1:
                return f"unknown which of {len(devices)} GPUs the server uses; run kvdiag in its PID namespace"
            for device in devices:
                memory = device.memory
                if memory is not None and (found is None or memory.free_bytes < found.free_bytes):
                    total = memory.total_bytes - (memory.driver_reserved_bytes or 0)
                    found = Room(total_bytes=total, free_bytes=memory.free_bytes, name=device.name or "")
        return found or gap_reason(timeline, facts, "nvml") or NO_DEVICES

    return timeline.once(("fullest_device", facts.server_pids, facts.device_uuids), fullest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A running server's scenario; the setting that sizes its pool; what cannot be computed of it, and why.

    `unsized` is why neither the pool nor what the device has left can be changed: a figure that is missing, and how to
    get it.
    """

    scenario: Scenario
    setting: str
    block_tokens: int
    fraction_known: bool
    unsized: str | None
    missing: tuple[str, ...]


def measured(facts: Facts, pool: KvPool, demand: Demand, room: Room | str, limits: Limits) -> Measured | str:
    """The scenario of the engine with this pool; or which figure is missing for any, and how to get it."""
    architecture, deployment, unmodelled = _cache(facts, pool, limits)
    if pool.mixed and unmodelled:
        return f"what a request costs, since windows or states are cached besides; {unmodelled}"
    unsized = room if isinstance(room, str) else None
    if unsized is None and block_bytes(facts, pool) is None:
        unsized = bytes_problem(facts) or "the pool's bytes are not reported"
    spare_blocks = facts.capabilities.spare_blocks
    (per_block,) = set(deployed_layout(architecture, deployment).bytes_per_block)
    pool_bytes = (max(pool.usable_blocks - spare_blocks, 0) + NULL_BLOCKS) * per_block
    total, spare, gpu = pool_bytes, 0, ""
    if unsized is None and not isinstance(room, str):
        total, spare, gpu = max(room.total_bytes, pool_bytes), room.free_bytes - limits.headroom_bytes, room.name
    setting = sizing_setting(facts, pool)
    fraction = pool.memory_fraction_ratio if setting == "memory_fraction" and unsized is None else None
    weights_bytes = None if facts.weights_bytes is None else facts.weights_bytes // max(len(facts.pools), 1)
    lacking = {FRACTION: unsized, FP8: unmodelled, WIDER: unmodelled or unsized}
    if not unsized and setting == "memory_fraction" and not fraction_is_of_device(facts.engine_name):
        lacking[FRACTION] = NOT_OF_DEVICE
    if not lacking[WIDER] and fraction is not None and weights_bytes is None:
        lacking[WIDER] = "the size of the weights is not known; run kvdiag where the model's files are"
    if fraction is None:  # the pool was not sized by a share, or by one that is not reported: it has one of its own
        weights_bytes, share = 0, pool_bytes / total
        most = min(share + max(spare, 0) / total, 1.0)
    else:
        weights_bytes, share = weights_bytes or 0, fraction
        most = min(int(100 * (share + max(spare, 0) / total)) / 100, limits.max_fraction_ratio)
    rest = min(total, math.ceil(total * share)) - ceil_div(weights_bytes, deployment.tensor_parallel) - pool_bytes
    scenario = Scenario(
        architecture=architecture,
        deployment=deployment,
        gpu_bytes=total,
        memory_fraction_ratio=share,
        weights=GivenWeights(total_bytes=weights_bytes),
        overheads=Overheads(context_bytes=0, activation_bytes=0, graph_bytes=0, overhead_bytes=rest),
        demand=demand,
        most_context_tokens=facts.max_model_len_tokens,
        most_fraction_ratio=most,
        unsupported_levers=unsupported_levers(gpu) | {name for name, reason in lacking.items() if reason},
    )
    return Measured(
        scenario=scenario,
        setting=setting,
        block_tokens=pool.block_tokens,
        fraction_known=fraction is not None,
        unsized=unsized,
        missing=tuple(_by_reason(lacking)),
    )


def _by_reason(lacking: Mapping[str, str | None]) -> Iterator[str]:
    for reason in dict.fromkeys(filter(None, lacking.values())):
        *others, last = (_CHANGES[name] for name, one in lacking.items() if one == reason)
        yield f"{' and '.join(filter(None, (', '.join(others), last)))}: {reason}"


def sizing_setting(facts: Facts, pool: KvPool) -> str:
    """The setting that sizes a pool, as named in flags.json."""
    if pool.overridden or typed(facts.engine_name, "memory_fraction") is None:
        return "blocks_override"
    by_hand = pool.pool_bytes is not None and pool.memory_fraction_ratio is not None
    return "pool_bytes" if by_hand and typed(facts.engine_name, "pool_bytes") else "memory_fraction"


def _cache(facts: Facts, pool: KvPool, limits: Limits) -> tuple[Architecture, Deployment, str | None]:
    """The model and its deployment as the engine's own figures confirm them; else blocks of one layer, and why."""
    title = engine_title(advice_engine())
    reason: str | None = f"kvdiag models the block manager of {title} alone; compute them with `kvdiag fit`"
    if facts.engine_name in modelled_engines():
        model = served(facts, pool)
        if isinstance(model, str):
            reason = model
        elif len(set(model.layout.bytes_per_block)) > 1:
            reason = "block sizes differ between pipeline stages; see `kvdiag audit`"
        elif model.drift(limits.model_drift_ratio) is not None:
            reason = bytes_problem(facts) or "the engine's figures do not match the model's config; see `kvdiag audit`"
        else:  # where the ranks are not known, blocks of one rank: what formats make of them is the same on more
            return model.architecture, model.deployment, None
    size = block_bytes(facts, pool)
    elements = 2 if size is None else max(size[0] // pool.block_tokens // MODEL_DTYPE_BYTES[_DTYPE], 2)
    layer = AttentionLayer(
        index=0, kind=LayerKind.FULL, kv_heads=1, head_size=elements // 2, head_size_v=elements - elements // 2
    )
    blocks = Architecture(model_type="blocks", depth=1, attention_heads=1, layers=(layer,), dtype=_DTYPE)
    return blocks, Deployment(block_size_tokens=pool.block_tokens), reason


def resized(facts: Facts, server: Measured, before: Plan, after: Plan) -> str | None:
    """The setting that gives the pool of another plan, as it is typed: with its value, or by how much to change it.

    `None` where that cannot be computed: the share is not one of the device.
    """
    name, setting = facts.engine_name, server.setting
    if setting == "pool_bytes":
        return typed(name, setting, after.capacity.num_blocks * after.capacity.bytes_per_block[0])
    if setting == "blocks_override":
        flag, blocks = typed(name, setting) or "", after.capacity.num_blocks + facts.capabilities.spare_blocks
        return typed(name, setting, blocks if "block" in flag else (blocks - NULL_BLOCKS) * server.block_tokens)
    if not fraction_is_of_device(name):
        return None
    new, old = (plan.budgets[0].memory_fraction_ratio for plan in (after, before))
    if server.fraction_known:
        return typed(name, setting, f"{new:g}")
    # What is raised by less would not be enough, and what is lowered by more is enough.
    by = (math.ceil(100 * (new - old) - ROUNDING) if new > old else math.floor(100 * (new - old) + ROUNDING)) / 100
    return f"{'raise' if by > 0 else 'lower'} {typed(name, setting)} by {abs(by):g}" if by else None


def sized_by_context(engine_name: str | None) -> bool:
    """Whether an engine's limit of a request's length is also the size of its pool."""
    longest = typed(engine_name, "max_model_len")
    return longest is not None and longest == typed(engine_name, "blocks_override")
