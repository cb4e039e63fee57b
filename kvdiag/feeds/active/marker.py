"""Marks of test steps as they happen: which step, which cycle, how far it is."""

from __future__ import annotations

from dataclasses import dataclass

from kvdiag.feeds.live.sampling import Clock, TimelineBuilder
from kvdiag.model import Mark, Outcome, Phase, Workload


@dataclass(frozen=True, slots=True)
class Marker:
    """Adds a mark to the recorder with the moment at which it is called."""

    recorder: TimelineBuilder
    clock: Clock

    def __call__(
        self,
        step: str,
        cycle: int,
        phase: Phase,
        *,
        workload: Workload | None = None,
        outcome: Outcome | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """Mark that a cycle of a step has come to this phase."""
        self.recorder.add(
            Mark(
                at_seconds=self.clock.now_seconds(),
                step=step,
                cycle=cycle,
                phase=phase,
                workload=workload,
                outcome=outcome,
                notes=notes,
            )
        )
