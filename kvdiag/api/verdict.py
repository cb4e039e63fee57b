"""The verdict on a history, as a value that a notebook shows and a script asks."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

import kvdiag
from kvdiag import diagnosis as rules
from kvdiag.api.checked_arguments import checked
from kvdiag.api.history import History, Picture
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.errors import KvdiagError
from kvdiag.model import Diagnosis as Judged
from kvdiag.model import Finding, LedgerLine, Status, StepResult
from kvdiag.outputs.documents import diagnosis_document
from kvdiag.outputs.html.report_page import Making, render
from kvdiag.outputs.presentation import problems_of, sentence
from kvdiag.outputs.terminal import text

WIDTH = 80


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis:
    """What kvdiag says of a history. `judged` is the value that the commands print."""

    history: History
    judged: Judged

    @property
    def status(self) -> Status:
        """The worst: ok, suspect, fault or unknown."""
        return self.judged.worst

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        return sentence(self.judged)

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The faults and suspects, the worst first."""
        return tuple(problems_of(self.judged.findings))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One for each verdict id."""
        return self.judged.findings

    @property
    def steps(self) -> tuple[StepResult, ...]:
        """The test steps of a run; none of a history."""
        return self.judged.steps

    @property
    def ledger(self) -> tuple[LedgerLine, ...]:
        """Where every byte of the newest samples is."""
        return self.judged.ledger

    def finding(self, verdict: str) -> Finding:
        """The finding of an id such as leak.kv_blocks.

        Raises:
            KeyError: there is no such verdict.
        """
        return {one.id: one for one in self.findings}[verdict]

    def document(self) -> dict[str, Any]:
        """The JSON document of `kvdiag diagnose --output json`."""
        return diagnosis_document.document(self.judged)

    def report(self) -> str:
        """The HTML report of `--report`."""
        making = Making(version=kvdiag.__version__, command="kvdiag.diagnose", made_seconds=time.time())
        return render(self.judged, self.history.timeline, making)

    def __str__(self) -> str:
        console = Console(width=WIDTH, highlight=False, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(text.render(self.judged))
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __repr__(self) -> str:
        return f"<Diagnosis of {self.history.name}: {self.status}: {self.summary}>"

    def _repr_html_(self) -> str:
        return Picture(page=self.report(), height=640)._repr_html_()


@checked
def diagnose(history: History, *, reserved_gap_bytes: int | None = None) -> Diagnosis:
    """Judge a history by every rule, as `kvdiag diagnose` does.

    Args:
        history: from `load` or `read_prometheus`.
        reserved_gap_bytes: as --reserved-gap-bytes.

    Raises:
        KvdiagError: that is no number of bytes.
    """
    if reserved_gap_bytes is None:
        limits = DEFAULT_LIMITS
    elif reserved_gap_bytes >= 0:
        limits = replace(DEFAULT_LIMITS, reserved_gap_bytes=reserved_gap_bytes)
    else:
        raise KvdiagError(f"reserved_gap_bytes is {reserved_gap_bytes!r}: give a number of bytes, 0 or more")
    return Diagnosis(history=history, judged=rules.diagnose(history.timeline, history.facts, limits))
