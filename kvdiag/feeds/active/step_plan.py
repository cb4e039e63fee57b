"""What will be offered to this server: the steps' workloads, scaled down to what it admits. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvdiag.diagnosis.steps import Step
from kvdiag.feeds.active.load_generator import Speed
from kvdiag.model import Facts, Workload

MIN_OUTPUT_TOKENS = 64
"""A load of fewer tokens may begin and end between two samples of the gauge."""

MAX_OUTPUT_TOKENS = 512

MAX_HELD_TOKENS = 4096
"""The same for a load that was offered before and not sampled whole: ten seconds of a fast server."""

CYCLES_SECONDS = 25.0
"""Time for all cycles of a step together, so that a whole run stays within a minute and a half."""

MIN_CYCLES = 6
"""Two for warm-up, three to judge, and one that is allowed to be unseen."""

CYCLE_OVERHEAD_SECONDS = 1.0
"""Lead-in and settling of a cycle."""

CONCURRENT_SLOWDOWN = 0.5
"""Ten requests at once each generate at about half the speed of one alone on a server that is not yet compute-bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step as it will run here, and what was changed from its definition."""

    step: Step
    workload: Workload
    cycles: int
    notes: tuple[str, ...] = ()


def plan(steps: tuple[Step, ...], facts: Facts, speed: Speed | None = None) -> tuple[PlannedStep, ...]:
    """Every step fitted to the server; without `speed` outputs have their defined length."""
    return tuple(_fit(step, facts, speed) for step in steps)


def held_longer(planned: PlannedStep, facts: Facts) -> PlannedStep:
    """The same step with outputs three times as long, as far as the server accepts that."""
    longer = replace(planned.workload, max_tokens=min(3 * planned.workload.max_tokens, MAX_HELD_TOKENS))
    workload, notes = admitted(longer, facts)
    longer_by = f"repeated with {workload.max_tokens:,} output tokens per request, so that they last longer"
    note = f"{longer_by}: in the first attempt, no sample had all requests running"
    return replace(planned, workload=workload, notes=(*notes, note))


def _fit(step: Step, facts: Facts, speed: Speed | None) -> PlannedStep:
    if not step.workload.requests:
        return PlannedStep(step=step, workload=step.workload, cycles=step.cycles)
    workload, notes = admitted(_held(step.workload, speed), facts)
    cycles = step.cycles
    if speed is not None and cycles > MIN_CYCLES:
        output_seconds = workload.max_tokens / speed.tokens_per_second
        cycle_seconds = speed.first_token_seconds + output_seconds + CYCLE_OVERHEAD_SECONDS
        cycles = min(cycles, max(MIN_CYCLES, int(CYCLES_SECONDS / cycle_seconds)))
    if cycles < step.cycles:
        notes += (f"{cycles} cycles instead of {step.cycles}: a cycle takes longer on this server",)
    return PlannedStep(step=step, workload=workload, cycles=cycles, notes=notes)


def _held(workload: Workload, speed: Speed | None) -> Workload:
    """The workload with outputs long enough to hold all requests together for its `hold_seconds`."""
    if speed is None:
        return workload
    rate = speed.tokens_per_second * (CONCURRENT_SLOWDOWN if workload.requests > 1 else 1.0)
    tokens = round(rate * workload.hold_seconds)
    return replace(workload, max_tokens=min(max(tokens, MIN_OUTPUT_TOKENS), MAX_OUTPUT_TOKENS))


def admitted(workload: Workload, facts: Facts) -> tuple[Workload, tuple[str, ...]]:
    """The workload cut to the longest request that the server accepts and that its pool can hold."""
    limits = [(facts.max_model_len_tokens, "the server accepts {} tokens per request")]
    limits += [
        (pool.usable_blocks * pool.block_tokens, "the pool holds {} tokens")
        for pool in facts.pools
        if pool.sliding_window_tokens is None
    ]
    known = [(limit, reason) for limit, reason in limits if limit is not None]
    if not known:
        return workload, ()
    limit, reason = min(known)
    if workload.prompt_tokens + workload.max_tokens <= limit:
        return workload, ()
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
    return replace(workload, prompt_tokens=prompt, max_tokens=output), notes


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
