"""What will be offered to this server: the steps' workloads, scaled down to what it admits. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps import LONG_CONTEXT, STEPS, Step
from kvdiag.feeds.active.load_generator import SILENCE_SECONDS, Speed
from kvdiag.formatting import format_duration, plural
from kvdiag.model import Capabilities, Facts, Workload

STEPS_SECONDS = 60.0
"""How long the steps take on a server of usual speed whose figures are current."""

MIN_OUTPUT_TOKENS = 64
"""A load of fewer tokens may begin and end between two samples of the gauge."""

MAX_OUTPUT_TOKENS = DEFAULT_LIMITS.step_output_tokens

RENEWALS = 1.5
"""Times that an engine which renews its figures at an interval does so during a load: once for certain."""

SHORT_SECONDS = 0.4
"""A load of less has fewer than four samples at the usual interval: 200 tokens of a small model take 20 ms."""

SHORT_READS = 20
"""Reads of the engine in such a load: enough on a busy machine for two that see all of its requests, and no more, since
each takes time of the server (llama.cpp answers between two steps)."""

MAX_HELD_TOKENS = 4096
"""The same for a load that was offered before and not sampled whole: ten seconds of a fast server."""

CYCLES_SECONDS = 25.0
"""Time for all cycles of a step together, so that a whole run stays within a minute and a half."""

MIN_CYCLES = 6
"""Two for warm-up, three to judge, and one that is allowed to be unseen."""

MIN_LATE_CYCLES = 3
"""The same on an engine whose figures are half a minute late: one for warm-up, two to judge."""

FILLING_SECONDS = 30.0
"""Most time for the prompts that fill a pool."""

CYCLE_OVERHEAD_SECONDS = 1.0
"""Lead-in and settling of a cycle."""

CONCURRENT_SLOWDOWN = 0.5
"""Ten requests at once each generate at about half the speed of one alone on a server that is not yet compute-bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step as it will run here, and what was changed from its definition.

    `read_seconds` is the interval of reads in loads that may end too soon for samples at the usual one; None in others.
    """

    step: Step
    workload: Workload
    cycles: int
    read_seconds: float | None = None
    notes: tuple[str, ...] = ()


def plan(steps: tuple[Step, ...], facts: Facts, speed: Speed | None = None) -> tuple[PlannedStep, ...]:
    """Every step fitted to the server; without `speed` outputs have their defined length."""
    return tuple(_fit(step, facts, speed) for step in steps)


def expected_seconds(capabilities: Capabilities) -> float:
    """About how long all steps take on a server of usual speed, whose figures each load waits for."""
    late = capabilities.late_seconds
    loads = sum(min(step.cycles, MIN_LATE_CYCLES if _is_late(late) else step.cycles) for step in STEPS)
    return STEPS_SECONDS + loads * (RENEWALS * capabilities.renewed_seconds + late)


def _is_late(late_seconds: float) -> bool:
    return late_seconds >= CYCLES_SECONDS / MIN_CYCLES


def fits_together(workload: Workload, facts: Facts) -> bool:
    """Whether the pool holds all requests of a workload at their full length."""
    return admitted(workload, facts, together=True)[0] == workload


_REPEATED = "repeated with "


def repeated(planned: PlannedStep, facts: Facts, *, waited: bool) -> PlannedStep:
    """The step for its next attempt: with outputs three times as long, as far as the server accepts that.

    Where requests waited because the pool does not hold all of them, they are cut to what it holds together instead.
    """
    fits = fits_together(planned.workload, facts)
    if waited and not fits:
        workload, notes = admitted(planned.workload, facts, together=True)
        why = "shorter requests: in the previous attempt, requests waited for room in the pool"
    else:
        longer = replace(planned.workload, max_tokens=min(3 * planned.workload.max_tokens, MAX_HELD_TOKENS))
        workload, notes = admitted(longer, facts, together=fits)
        what = f"{workload.max_tokens:,} output tokens"
        if workload.max_tokens <= planned.workload.max_tokens:
            workload, notes = _mostly_output(planned.workload, longer.max_tokens), ()
            what = f"{workload.prompt_tokens:,} prompt and {workload.max_tokens:,} output tokens"
        why = f"{what} per request, so that they last longer: in the previous attempt, "
        why += "too few samples had all requests running"
    # Of several repetitions the last one says how the step was run.
    kept = [note for note in planned.notes if not note.startswith(_REPEATED)]
    notes = (*dict.fromkeys((*kept, *notes)), f"{_REPEATED}{why}")
    every = SHORT_SECONDS / SHORT_READS if planned.read_seconds is None else planned.read_seconds
    return replace(planned, workload=workload, read_seconds=every, notes=notes)


def _mostly_output(workload: Workload, wanted_tokens: int) -> Workload:
    """The same tokens of each request, with up to three quarters of them as output: prompts are processed at once."""
    tokens = workload.prompt_tokens + workload.max_tokens
    output = max(workload.max_tokens, min(wanted_tokens, tokens * 3 // 4))
    return replace(workload, prompt_tokens=tokens - output, max_tokens=output)


def _fit(step: Step, facts: Facts, speed: Speed | None) -> PlannedStep:
    if not step.workload.requests:
        return PlannedStep(step=step, workload=step.workload, cycles=step.cycles)
    tokens = 0.0 if speed is None else SILENCE_SECONDS * speed.prompt_tokens_per_second / step.workload.requests
    why = f"at the measured speed, longer prompts take more than {format_duration(SILENCE_SECONDS)}"
    rooms = [] if speed is None else [(int(tokens), why)]
    workload, notes = shortened(_held(step.workload, facts, speed), facts, rooms, least_tokens=1)
    if step.id == LONG_CONTEXT.id and not facts.capabilities.returns:
        workload, notes = _filling(workload, facts, speed)
    cycles = step.cycles
    if speed is not None and cycles > MIN_CYCLES:
        output_seconds = workload.max_tokens / speed.tokens_per_second
        late_seconds = facts.capabilities.late_seconds
        cycle_seconds = speed.first_token_seconds + output_seconds + CYCLE_OVERHEAD_SECONDS + late_seconds
        least = MIN_LATE_CYCLES if _is_late(late_seconds) else MIN_CYCLES
        cycles = min(cycles, max(least, int(CYCLES_SECONDS / cycle_seconds)))
    if cycles < step.cycles:
        notes += (f"{cycles} cycles instead of {step.cycles}: a cycle takes longer on this server",)
    load_seconds = None if speed is None else workload.max_tokens / speed.tokens_per_second
    every = None if load_seconds is None or load_seconds >= SHORT_SECONDS else load_seconds / SHORT_READS
    return PlannedStep(step=step, workload=workload, cycles=cycles, read_seconds=every, notes=notes)


def _filling(workload: Workload, facts: Facts, speed: Speed | None) -> tuple[Workload, tuple[str, ...]]:
    """Requests that fill the whole pool, since only that shows that cells of ended requests are free again.

    As many of the longest ones as it holds, or as few equal ones as it takes where no scheduler keeps a part of it
    for itself; shorter where their prompts would take too long at the measured speed.
    """
    pool = min((pool.usable_blocks * pool.block_tokens for pool in facts.pools), default=None)
    if pool is None:
        return workload, ()
    most = min((pool.max_requests for pool in facts.pools if pool.max_requests), default=pool)
    longest = min(facts.max_model_len_tokens or pool, pool)
    requests = max(pool // longest, 1) if facts.capabilities.waits else min(-(-pool // longest), most)
    longest = min(longest, pool // requests)
    output = min(workload.max_tokens, max(longest // 4, 1))
    prompt = longest - output
    affordable = prompt if speed is None else int(FILLING_SECONDS * speed.prompt_tokens_per_second / requests)
    cut = max(min(prompt, affordable), min(workload.prompt_tokens, prompt))
    pooled = f"the {pool:,} tokens of the pool"
    sent, lost = f"{plural(requests, 'request')} of {cut:,} + {output:,} tokens", f"lost {facts.capabilities.unit}s"
    note = f"{sent}, to fill {pooled}: only that shows {lost}"
    if cut < prompt:
        limit = format_duration(FILLING_SECONDS)
        note = f"{sent}; {pooled} would take more than {limit}"
    return replace(workload, requests=requests, prompt_tokens=cut, max_tokens=output), (note,)


def _held(workload: Workload, facts: Facts, speed: Speed | None) -> Workload:
    """The workload with outputs long enough to hold all requests together for its `hold_seconds`, or until the engine
    has renewed its figures meanwhile.
    """
    if speed is None:
        return workload
    renewed_seconds = RENEWALS * facts.capabilities.renewed_seconds
    most = MAX_HELD_TOKENS if renewed_seconds else MAX_OUTPUT_TOKENS
    rate = speed.tokens_per_second * (CONCURRENT_SLOWDOWN if workload.requests > 1 else 1.0)
    tokens = round(rate * max(workload.hold_seconds, renewed_seconds))
    return replace(workload, max_tokens=min(max(tokens, MIN_OUTPUT_TOKENS), most))


def admitted(workload: Workload, facts: Facts, *, together: bool = False) -> tuple[Workload, tuple[str, ...]]:
    """The workload cut to the longest request that the server accepts and that its pool can hold.

    Also to as many requests as run at once, where the server reports it; and to what the pool holds of all of them
    `together`, which is always so where requests beyond that fail instead of waiting.
    """
    workload, fewer = _at_once(workload, facts)
    limits = [(facts.max_model_len_tokens, "the server accepts {} tokens per request")]
    spare = facts.capabilities.spare_blocks
    holds = "the scheduler admits {} tokens" if spare else "the pool holds {} tokens"
    limits += [
        (max(pool.usable_blocks - spare, 1) * pool.block_tokens, holds)
        for pool in facts.pools
        if pool.sliding_window_tokens is None
    ]
    waits = facts.capabilities.waits
    if workload.requests > 1 and (together or not waits):
        beyond = "and more would fail" if not waits else "and more would wait"
        each = f"the pool holds {{}} tokens for each of {workload.requests} requests, {beyond}"
        # A scheduler reserves up to a block more of each than its tokens fill.
        limits += [
            (max(pool.usable_blocks // workload.requests - waits, 0) * pool.block_tokens, each) for pool in facts.pools
        ]
    known = [(limit, reason) for limit, reason in limits if limit is not None]
    if not known:
        return workload, fewer
    limit, reason = min(known)
    if workload.prompt_tokens + workload.max_tokens <= limit:
        return workload, fewer
    output = min(workload.max_tokens, max(limit // 4, 1))
    prompt = min(workload.prompt_tokens, max(limit - output, 1))
    notes = tuple(
        f"{what} of {defined:,} tokens scaled down to {fitting:,}: {reason.format(f'{limit:,}')}"
        for what, defined, fitting in (
            ("prompt", workload.prompt_tokens, prompt),
            ("output", workload.max_tokens, output),
        )
        if fitting < defined
    )
    return replace(workload, prompt_tokens=prompt, max_tokens=output), (*fewer, *notes)


def _at_once(workload: Workload, facts: Facts) -> tuple[Workload, tuple[str, ...]]:
    # A data-parallel server may send all requests of a load to one of its engines.
    most = min((pool.max_requests for pool in facts.pools if pool.max_requests), default=0)
    if not most or workload.requests <= most:
        return workload, ()
    note = f"{workload.requests} requests scaled down to {most}: the server runs {most} at once"
    return replace(workload, requests=most), (note,)


def shortened(
    workload: Workload, facts: Facts, rooms: Iterable[tuple[int, str]], *, least_tokens: int
) -> tuple[Workload, tuple[str, ...]]:
    """The admitted workload with its prompts cut to the smallest of `rooms`, tokens each with its reason."""
    fitting, notes = admitted(workload, facts)
    room, reason = min(rooms, default=(fitting.prompt_tokens, ""))
    if room >= fitting.prompt_tokens:
        return fitting, notes
    tokens = max(room, least_tokens)
    note = f"prompt of {workload.prompt_tokens:,} tokens scaled down to {tokens:,}: {reason}"
    return replace(fitting, prompt_tokens=min(tokens, fitting.prompt_tokens)), (note,)
