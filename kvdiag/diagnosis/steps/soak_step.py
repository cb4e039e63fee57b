"""The soak: alternating load and idle cycles, for minutes, which detect slow growth per request.

Runs only with `kvdiag run --soak`.
"""

from __future__ import annotations

from kvdiag.diagnosis.blocks.step_accounting import unknown
from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.soak_memory import ORDER, SOAK, Soak, soaked
from kvdiag.diagnosis.growth.soak_verdicts import verdict, visible, worst
from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.rule import SEVERITY
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
    measured = (
        Quantity("requests", found.requests, "requests"),
        Quantity("blocks_kept", kept, "blocks"),
        Quantity("cycles_judged", max(one.soaked.load_cycles for one in found.components), "cycles"),
        Quantity("idle_cycles_judged", max(one.soaked.idle_cycles for one in found.components), "cycles"),
    )
    expected = (Quantity("blocks_kept", 0, "blocks"),)
    notes = (*spans[0].notes, *_notes(found, limits))
    return StepResult(ID, status, summary, expected=expected, measured=measured, notes=notes)


def _length(found: Soak) -> str:
    load = sum(cycle.clean and cycle.requests > 0 for cycle in found.cycles)
    idle = sum(cycle.clean and not cycle.requests for cycle in found.cycles)
    return f"{load} load and {idle} idle cycles, {found.requests:,} requests"


def _notes(found: Soak, limits: Limits) -> tuple[str, ...]:
    """The worst verdict of each kind; the detection limit where all are flat."""
    notes = []
    if found.blocks_kept == 0:
        notes.append(f"KV blocks: all released (detection limit 1 block over {found.requests:,} requests)")
    problems = [cycle.problem for cycle in found.cycles if cycle.problem is not None]
    if problems:
        notes.append(f"{len(problems)} of {len(found.cycles)} cycles left out: {problems[0]}")
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
