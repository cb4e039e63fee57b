"""The test steps in the order in which they run. A new step is one file and one name here."""

from __future__ import annotations

from kvdiag.diagnosis.step import Step
from kvdiag.diagnosis.steps import baseline, concurrent, isolation, long_context, single_request, soak

STEPS: tuple[Step, ...] = (baseline.STEP, single_request.STEP, concurrent.STEP, long_context.STEP)

SOAK: Step = soak.STEP
"""Runs after the others where it was asked for; judged where a timeline holds it."""

ISOLATION: Step = isolation.STEP
"""Runs in the place of the others where it was asked for."""
