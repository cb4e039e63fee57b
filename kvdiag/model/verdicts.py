"""The result of a diagnosis: findings, step results, ledger lines, and the `Diagnosis` that holds them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from kvdiag.model.facts import Facts
from kvdiag.model.readings import Gap

Status = Literal["ok", "suspect", "fault", "unknown"]
Provenance = Literal["measured", "reported", "computed"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A named number with its unit; `value` is `None` where it is not known."""

    name: str
    value: float | str | None
    unit: str


@dataclass(frozen=True, slots=True)
class Evidence(Quantity):
    """One figure behind a finding, and the source that measured it."""

    source: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """The verdict of one test step: expected and measured quantities."""

    id: str
    status: Status
    summary: str
    _: KW_ONLY
    expected: tuple[Quantity, ...] = ()
    measured: tuple[Quantity, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFigures:
    """How fast the memory of a finding grows, and how long the room lasts, for outputs and alerts.

    `low` and `high` are bounds. `room_bytes` and the times are `None` where the room is not known, or nothing is being
    used up; `exhaustion_high_seconds` also where the growth may end before it.
    """

    bytes_per_second: float
    low_bytes_per_second: float | None = None
    high_bytes_per_second: float | None = None
    room_bytes: int | None = None
    exhaustion_seconds: float | None = None
    exhaustion_low_seconds: float | None = None
    exhaustion_high_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImbalanceFigures:
    """What one rank holds beyond the others, and the KV tokens that this costs every rank; `None` where unknown."""

    excess_bytes: int | None = None
    lost_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's verdict with the numbers that decided. The last four come from the knowledge base.

    `holder` names the process or device whose memory it is about, if it is one. Outputs read `growth` and
    `imbalance`, never a row of the evidence by its name.
    """

    id: str
    status: Status
    summary: str
    evidence: tuple[Evidence, ...] = ()
    _: KW_ONLY
    holder: str | None = None
    growth: GrowthFigures | None = None
    imbalance: ImbalanceFigures | None = None
    likely_cause: str | None = None
    confirm: str | None = None
    remedy: str | None = None
    runbook: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One part of a device's used bytes. The lines of a device add up to its used bytes exactly.

    Only a residual (`unaccounted`, `server_other`, `torch_other`) may be negative: then a reported or computed line
    claims more than was measured, and hiding that would hide an error. `gpu` and `uuid` are `None` if no device was
    observed.
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
