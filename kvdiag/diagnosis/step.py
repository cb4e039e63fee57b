"""What a test step is: a workload as data and a pure judge over the span that the workload left in the timeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvdiag.diagnosis.limits import Limits
from kvdiag.model import Facts, StepResult, Timeline, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One of the test steps. `cycles` is how often its workload is offered, each time on its own span."""

    id: str
    title: str
    workload: Workload
    cycles: int
    judge: Callable[[Timeline, Facts, Limits], StepResult]
