"""How more of the device stays free: a pool smaller by the missing bytes, and what that costs in tokens."""

from dataclasses import replace

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions.measured_scenario import NOT_OF_DEVICE, measured, resized, room_of
from kvdiag.diagnosis.prescriptions.typed_flags import typed
from kvdiag.diagnosis.request_failures import SNAPSHOT
from kvdiag.diagnosis.timeline_queries import NO_POOL, block_bytes, pool_tokens
from kvdiag.errors import KvModelError
from kvdiag.formatting import format_bytes
from kvdiag.kv.calibration.running_server import bytes_problem
from kvdiag.kv.fit.plan import Demand
from kvdiag.kv.fit.scenario import scenario_plan
from kvdiag.kv.layout.capacity import NULL_BLOCKS
from kvdiag.model import MAX_COUNT, Change, Facts, Prescription, Timeline

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def joined_holes(holes_bytes: int | None) -> Prescription:
    """Torch's allocator set to return and join the free parts of its segments (CUDACachingAllocator.cpp)."""
    size = "the holes" if holes_bytes is None else f"{format_bytes(holes_bytes)} in holes"
    cost = "a restart of the server, which then cannot use sleep mode"
    return Prescription(changes=(Change(change=EXPANDABLE, gain=f"{size} serve any allocation", cost=cost),))


def with_room_for(
    timeline: Timeline, facts: Facts, limits: Limits, asked: int | None, free: int | None
) -> Prescription:
    """The pool with which an allocation that failed fits, by what it asked for and what was free."""
    if asked is None or free is None:
        return Prescription(missing=(f"a smaller pool: the failure's message lacks the free bytes; {SNAPSHOT}",))
    needed_bytes = asked - free + limits.headroom_bytes
    if needed_bytes <= 0:
        found = f"{format_bytes(free)} were free for {format_bytes(asked)}"
        return Prescription(missing=(f"what the allocation lacked: {found}, so no smaller pool helps; {SNAPSHOT}",))
    gain = f"the {format_bytes(asked)} requested fit, with {format_bytes(limits.headroom_bytes)} to spare"
    return smaller_pool(timeline, facts, limits, needed_bytes=needed_bytes, gain=gain)


def memory_won_back(
    facts: Facts, *, change: str, cost: str, size_bytes: int, tokens: int | None = None
) -> Prescription:
    """What is to be done about memory that is not the pool's, and the tokens of pool that it is worth.

    The pool does not grow while the server runs: it is sized again by a restart.
    """
    block, pool = block_bytes(facts), next(iter(facts.pools), None)
    if tokens is None and block and pool is not None:
        tokens = min(size_bytes // block * pool.block_tokens, MAX_COUNT)
    room = format_bytes(size_bytes)
    if tokens is None:
        missing = f"what that is in tokens of the pool: {NO_POOL if pool is None else bytes_problem(facts)}"
        return Prescription(changes=(Change(change=change, gain=f"room of {room}", cost=cost),), missing=(missing,))
    gain = f"room of {room} for {tokens:,} more tokens, when the pool is sized again at a start"
    larger = None if pool is None else min(pool_tokens(pool) + tokens, MAX_COUNT)
    return Prescription(changes=(Change(change=change, gain=gain, cost=cost, pool_tokens=larger),))


def smaller_pool(timeline: Timeline, facts: Facts, limits: Limits, *, needed_bytes: int, gain: str) -> Prescription:
    """The pool with which `needed_bytes` more are free on each of its devices; `gain` is what that buys.

    Where the longest request that the engine accepts does not fit into it, its limit is lowered, too: engines do not
    start with a longer one.
    """
    pool = min(facts.pools, key=pool_tokens, default=None)
    room = room_of(timeline, facts)
    if pool is None:
        return Prescription(missing=("a smaller pool: the engine does not report it; `kvdiag doctor` shows what is",))
    longest = facts.max_model_len_tokens or pool.block_tokens
    try:
        server = measured(facts, pool, Demand(context_tokens=longest, requests=1), room, limits)
        if isinstance(server, str):
            return Prescription(missing=(f"a smaller pool: {server}",))
        if server.unsized is not None:
            return Prescription(missing=(f"a smaller pool: {server.unsized}",))
        before = server.scenario
        share = before.memory_fraction_ratio - needed_bytes / before.gpu_bytes
        if server.fraction_known:
            share = int(100 * share) / 100
        if share <= 0:
            return Prescription(missing=(f"a smaller pool: it has less than the {format_bytes(needed_bytes)} missing",))
        plan, old = scenario_plan(replace(before, memory_fraction_ratio=share)), scenario_plan(before)
    except KvModelError as error:
        return Prescription(missing=(f"a figure that the cost model accepts: {error}",))
    change = resized(facts, server, old, plan)
    if change is None:
        return Prescription(missing=(f"a smaller pool: {NOT_OF_DEVICE}",))
    left = (plan.capacity.num_blocks - NULL_BLOCKS) * pool.block_tokens
    lost = (old.capacity.num_blocks - plan.capacity.num_blocks) * pool.block_tokens
    cost = f"the pool holds {left:,} tokens, {lost:,} fewer"
    if plan.max_context_tokens < 1:
        return Prescription(missing=(f"a smaller pool: it has less than the {format_bytes(needed_bytes)} missing",))
    if plan.max_requests < 1 <= old.max_requests:
        shorter = typed(facts.engine_name, "max_model_len", plan.max_context_tokens)
        if shorter is None:
            return Prescription(missing=(f"a smaller pool: it has less than the {format_bytes(needed_bytes)} missing",))
        change, cost = f"{change} {shorter}", f"{cost}, and longer requests are refused"
    freed = old.budgets[0].pool_bytes - plan.budgets[0].pool_bytes
    free = None if isinstance(room, str) else room.free_bytes + freed
    return Prescription(changes=(Change(change=change, gain=gain, cost=cost, pool_tokens=left, free_bytes=free),))
