"""The test steps in the order in which they run. A new step is one file and one name here."""

from __future__ import annotations

from kvdiag.diagnosis.step import Step
from kvdiag.diagnosis.steps import concurrent, idle_baseline, long_context, prefix_isolation, single_request, soak_step

STEPS: tuple[Step, ...] = (idle_baseline.STEP, single_request.STEP, concurrent.STEP, long_context.STEP)

SOAK: Step = soak_step.STEP
"""Runs after the others where it was asked for; judged where a timeline holds it."""

ISOLATION: Step = prefix_isolation.STEP
"""Runs in the place of the others where it was asked for."""
