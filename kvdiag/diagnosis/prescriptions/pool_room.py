"""How a KV pool comes to hold more: fewer requests at once, shorter ones, a smaller format, a larger pool, more GPUs.

The demand is what the verdict saw: the requests of a test step at the longest that they may be (its outputs are longer
on a faster server, or in the next run), or those that ran and waited when the pool was fullest, at the mean size of
those that ran.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.prescriptions.measured_scenario import (
    Measured,
    Room,
    measured,
    resized,
    room_of,
    sized_by_context,
)
from kvdiag.diagnosis.prescriptions.typed_flags import typed
from kvdiag.diagnosis.timeline_queries import pool_tokens
from kvdiag.errors import KvModelError
from kvdiag.formatting import format_bytes, plural
from kvdiag.kv.fit.plan import Demand, Plan
from kvdiag.kv.fit.scenario import FEWER, FP8, FRACTION, SHORTER, WIDER, Lever, Scenario, find_levers, scenario_plan
from kvdiag.kv.layout.capacity import NULL_BLOCKS
from kvdiag.model import Change, Facts, KvPool, Prescription, Timeline

_SETTINGS = {FEWER: "max_num_seqs", SHORTER: "max_model_len", FP8: "kv_fp8", WIDER: "tensor_parallel"}
_HARM = (FEWER, SHORTER, FRACTION, FP8, WIDER)
"""The least harmful first: requests wait that would have been preempted, or are refused that could never run; less is
free; answers lose accuracy; hardware.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What one prescription is computed from; `is_mean`: some requests are longer than the demand's."""

    facts: Facts
    pool: KvPool
    room: Room | str
    server: Measured
    plan: Plan
    is_mean: bool

    @property
    def demand(self) -> Demand:
        return self.plan.demand


def for_requests(timeline: Timeline, facts: Facts, limits: Limits, *, step: str) -> Prescription | None:
    """How the pool holds the requests that lacked room; `None` where none was observed to."""
    pool = min(facts.pools, key=pool_tokens, default=None)
    if pool is None:
        missing = f"the pool's size in {facts.capabilities.unit}s is not reported; `kvdiag doctor` shows what is"
        return Prescription(missing=(missing,))
    demand = _crowd(timeline, facts, limits, pool, step)
    return None if demand is None else _prescribed(timeline, facts, limits, pool, demand)


def for_context(timeline: Timeline, facts: Facts, limits: Limits, *, pool: KvPool, tokens: int) -> Prescription:
    """How the pool holds one request of so many tokens, or the engine does not accept it."""
    return _prescribed(timeline, facts, limits, pool, _Demanded(tokens, 1))


class _Demanded(NamedTuple):
    """Tokens of a request, and requests at once of each engine."""

    tokens: int
    requests: int
    is_mean: bool = False


def _crowd(timeline: Timeline, facts: Facts, limits: Limits, pool: KvPool, step: str) -> _Demanded | None:
    """Tokens of a request and requests at once for each engine: a step's, where the pool does not hold them, else those
    of the fullest sample in which requests waited.
    """
    engines = len(facts.pools)
    loads = [span.workload for span in timeline.spans(step) if span.workload is not None and span.workload.requests]
    if loads:
        load = max(loads, key=lambda one: one.tokens_per_request)
        requests = -(-load.requests // engines)
        longest = replace(load, max_tokens=max(load.max_tokens, limits.step_output_tokens)).tokens_per_request
        tokens = min(longest, facts.max_model_len_tokens or longest)
        if requests * -(-tokens // pool.block_tokens) > pool.usable_blocks:
            return _Demanded(tokens, requests)
    fullest: tuple[int, int, int] | None = None
    for sample in timeline.samples:
        for engine in sample.engines or ():
            of, usage, running = facts.pool(engine.engine), engine.kv_usage_ratio, engine.requests_running
            if of is None or usage is None or not running or not engine.requests_waiting:
                continue
            blocks = of.used_blocks(usage)
            each = -(-blocks // running)
            fullest = max(fullest or (0, 0, 0), (blocks, each * of.block_tokens, running + engine.requests_waiting))
    return None if fullest is None or not fullest[1] else _Demanded(fullest[1], fullest[2], is_mean=True)


def _prescribed(timeline: Timeline, facts: Facts, limits: Limits, pool: KvPool, asked: _Demanded) -> Prescription:
    room = room_of(timeline, facts)
    try:
        demand = Demand(context_tokens=asked.tokens, requests=asked.requests)
        server = measured(facts, pool, demand, room, limits)
        if isinstance(server, str):
            return Prescription(missing=(server,))
        plan = scenario_plan(server.scenario)
        levers = find_levers(_no_larger_than_needed(server, plan), plan)
    except KvModelError as error:
        return Prescription(missing=(f"a figure that the cost model accepts: {error}",))
    case = _Case(facts=facts, pool=pool, room=room, server=server, plan=plan, is_mean=asked.is_mean)
    return Prescription(changes=tuple(_changes(case, levers)), missing=server.missing)


def _no_larger_than_needed(server: Measured, plan: Plan) -> Scenario:
    """The scenario with a share at most that which the demand needs: what is left stays free for spikes."""
    scenario = server.scenario
    missing_bytes = plan.needed_bytes - plan.budgets[plan.limiting_stage].pool_bytes
    share = scenario.memory_fraction_ratio + max(missing_bytes, 0) / scenario.gpu_bytes
    enough = math.ceil(100 * share) / 100 if server.fraction_known else share + 1 / scenario.gpu_bytes
    return replace(scenario, most_fraction_ratio=min(scenario.most_fraction_ratio, enough))


def _changes(case: _Case, levers: Sequence[Lever]) -> Iterator[Change]:
    """The levers that this engine has, in order of least harm, then replicas."""
    demand, alone = case.demand, case.demand.requests == 1
    usable = [one for one in levers if one.supported and one.name in (_HARM if alone else set(_HARM) - {SHORTER})]
    made = [(lever, change) for lever in usable if (change := _change(case, lever)) is not None]
    made.sort(key=lambda one: (one[0].name == WIDER, not one[1].mends, _HARM.index(one[0].name)))
    yield from (change for _, change in made)
    each = case.plan.max_requests
    if 0 < each < demand.requests:
        replicas = -(-demand.requests // each)
        yield Change(
            change=f"{replicas} replicas",
            gain=f"they hold {plural(each * replicas, 'request')} at once",
            cost=f"{replicas} times the GPUs",
            requests=each * replicas,
        )


def _change(case: _Case, lever: Lever) -> Change | None:
    demand, plan, engine_name = case.demand, lever.plan, case.facts.engine_name
    _, _, value = lever.change.partition(" ")
    tokens = f"{demand.context_tokens:,} tokens"
    setting = _SETTINGS.get(lever.name)
    if setting is None:
        change = resized(case.facts, case.server, case.plan, plan)
    else:
        change = typed(engine_name, setting, None if lever.name == FP8 else value)
    if change is None or (lever.name == SHORTER and sized_by_context(engine_name)):
        return None
    capacity = (plan.capacity.num_blocks - NULL_BLOCKS) * case.pool.block_tokens
    holds, longest = plan.max_requests, plan.max_context_tokens
    if lever.name == FEWER:
        waiting = case.demand.requests - holds
        return Change(
            change=change,
            gain=f"the pool holds {plural(holds, 'request')} of {tokens}"
            + (
                ", the mean when it was fullest: longer ones may be preempted"
                if case.is_mean
                else ": none is preempted"
            ),
            cost=f"{waiting:,} of {plural(case.demand.requests, 'request')} wait in the queue",
            requests=holds,
            pool_tokens=capacity,
        )
    if lever.name == SHORTER:
        return Change(
            change=change,
            gain="each request that is accepted fits the pool",
            cost=f"requests of more than {plan.demand.context_tokens:,} tokens are refused, which now never run",
            context_tokens=plan.demand.context_tokens,
            pool_tokens=capacity,
        )
    free = None
    cost = lever.price
    if lever.name == FRACTION and not isinstance(case.room, str):
        free = case.room.free_bytes - (plan.budgets[0].pool_bytes - case.plan.budgets[0].pool_bytes)
        cost = f"only {format_bytes(free)} of the fullest GPU stay free"
    alone = demand.requests == 1
    if (longest <= case.plan.max_context_tokens) if alone else (holds <= case.plan.max_requests):
        return None
    return Change(
        change=change,
        gain=f"the pool holds {longest:,} tokens"
        if alone
        else f"the pool holds {plural(holds, 'request')} of {tokens}",
        cost=cost,
        mends=longest >= demand.context_tokens if alone else holds >= demand.requests,
        requests=None if alone else holds,
        context_tokens=longest if alone else None,
        pool_tokens=capacity,
        free_bytes=free,
    )
