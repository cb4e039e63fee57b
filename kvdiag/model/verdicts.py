"""What a judgement says: findings, step results, ledger lines, and the diagnosis that holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvdiag.model.facts import Facts
from kvdiag.model.readings import Gap

Status = Literal["ok", "suspect", "fault", "unknown"]
Provenance = Literal["measured", "reported", "computed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A named number with its unit; `value` is `None` where it is not known."""

    name: str
    value: float | str | None
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A number that a finding stands on, and where it was seen."""

    name: str
    value: float | str | None
    unit: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A test step's verdict: what had to be seen against what was."""

    id: str
    status: Status
    summary: str
    expected: tuple[Quantity, ...] = ()
    measured: tuple[Quantity, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule's verdict with the numbers that decided. The last four come from the knowledge base."""

    id: str
    status: Status
    summary: str
    evidence: tuple[Evidence, ...] = ()
    likely_cause: str | None = None
    confirm: str | None = None
    remedy: str | None = None
    runbook: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One part of a device's used bytes. The lines of a device add up to its used bytes exactly.

    Only a residual (`unaccounted`, `server_other`, `torch_other`) may be negative: then a reported or computed line
    claims more than was measured, and hiding that would hide an error. `gpu` and `uuid` are `None` where no device was
    seen.
    """

    gpu: int | None
    component: str
    bytes: int
    provenance: Provenance
    detail: str = ""
    uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The judgement of one timeline: all that the outputs show."""

    worst: Status
    facts: Facts
    start_seconds: float
    end_seconds: float
    samples: int
    steps: tuple[StepResult, ...]
    findings: tuple[Finding, ...]
    ledger: tuple[LedgerLine, ...]
    gaps: tuple[Gap, ...]
