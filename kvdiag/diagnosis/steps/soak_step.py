"""The soak: alternating load and idle cycles, for minutes, which detect slow growth per request.

Runs only with `kvdiag run --soak`.
"""

from __future__ import annotations

from kvdiag.diagnosis.blocks.step_accounting import unknown
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.soak_memory import ORDER, SOAK, Soak, soaked
from kvdiag.diagnosis.growth.soak_verdicts import SEVERITY, verdict, visible, worst
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.step import Step
from kvdiag.model import Facts, Quantity, StepResult, Timeline, Workload

ID = SOAK


def judge(timeline: Timeline, facts: Facts, limits: Limits) -> StepResult:
    """The worst verdict of all components; a note per kind gives its verdict or its detection limit."""
    found = soaked(timeline, facts, limits)
    spans = timeline.spans(ID)
    if found is None or found.problem is not None:
        return unknown(ID, found.problem if found and found.problem else "it did not run", spans[0] if spans else None)
    first = worst(found.components, limits)
    judged = [verdict(one, limits) for one in found.components]
    status = max((one for one, _ in judged), key=SEVERITY.index)
    summary = f"no leak found over {_length(found)}"
    if first is not None and status != "ok":
        summary = verdict(first, limits)[1]
    kept = found.blocks_kept
    if kept is not None and kept > 0:
        status, summary = "fault", f"{kept:,} KV blocks are still in use after {_length(found)}"
    load = max(one.soaked.load_cycles for one in found.components)
    idle = max(one.soaked.idle_cycles for one in found.components)
    return StepResult(
        id=ID,
        status=status,
        summary=summary,
        expected=(Quantity(name="blocks_kept", value=0, unit="blocks"),),
        measured=(
            Quantity(name="requests", value=found.requests, unit="requests"),
            Quantity(name="blocks_kept", value=kept, unit="blocks"),
            Quantity(name="cycles_judged", value=load, unit="cycles"),
            Quantity(name="idle_cycles_judged", value=idle, unit="cycles"),
        ),
        notes=(*spans[0].notes, *_notes(found, limits)),
    )


def _length(found: Soak) -> str:
    load = sum(cycle.clean and cycle.requests > 0 for cycle in found.cycles)
    idle = sum(cycle.clean and not cycle.requests for cycle in found.cycles)
    return f"{load} load and {idle} idle cycles, {found.requests:,} requests"


def _notes(found: Soak, limits: Limits) -> tuple[str, ...]:
    """The worst verdict of each kind; the detection limit where all are flat."""
    notes = []
    if found.blocks_kept == 0:
        notes.append(f"KV blocks: all released (detection limit 1 block over {found.requests:,} requests)")
    spoilt = [cycle.problem for cycle in found.cycles if cycle.problem is not None]
    if spoilt:
        notes.append(f"{len(spoilt)} of {len(found.cycles)} cycles left out: {spoilt[0]}")
    for kind in ORDER:
        first = worst(found.of(kind), limits)
        if first is None or kind is MemoryComponent.KV_HELD_IDLE:
            continue
        if first.soaked.shape == "flat":
            least = max(found.of(kind), key=lambda one: one.soaked.visible_per_cycle)
            notes.append(f"{kind.label}: flat (detection limit {visible(least)})")
        else:
            notes.append(verdict(first, limits)[1])
    return tuple(notes)


STEP = Step(
    id=ID,
    title="Soak: alternating load and idle cycles, memory must stay flat",
    workload=Workload(requests=4, prompt_tokens=2048, max_tokens=16),
    cycles=30,
    judge=judge,
)
