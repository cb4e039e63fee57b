"""The result of a diagnosis: findings, step results, ledger lines, and the `Diagnosis` that holds them.

Outputs show these values and judge nothing. Each figure has a name and a unit, so that text, HTML and JSON agree on it;
figures that alerts need are typed fields (`GrowthFigures`) rather than rows of evidence. `unknown` is a status and not
the lack of one. `Diagnosis.worst` covers all lives of the server and `present_worst` the last one, because a restart
ends a problem and must not hide it.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from kvdiag.model.allocation_profile import ConcludedProfile
from kvdiag.model.block_owners import BlockOwners
from kvdiag.model.facts import Facts
from kvdiag.model.readings import Gap

Status = Literal["ok", "suspect", "fault", "unknown"]
Provenance = Literal["measured", "reported", "computed"]
LifeEnd = Literal["exited", "unreachable", "restarted"]
"""No answer, and its device memory was freed; no answer; a new process without an outage that was observed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure behind a finding, for people: its unit, and its source; `value` is `None` where it is not known."""

    name: str
    value: float | str | None
    unit: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What a step compares, expected or measured; `None` where a figure is unknown, or not one of the step's.

    `blocks` and their `bytes`, per rank, are those in use at the peak of the load, of the baseline while idle;
    `highest_blocks` those at any time of the load; `blocks_kept` those not released after it, negative if older ones
    were.
    """

    requests: int | None = None
    tokens: int | None = None
    blocks: int | None = None
    bytes: int | None = None
    device_used_bytes: int | None = None
    blocks_kept: int | None = None
    highest_blocks: int | None = None
    other_salt_hit_ratio: float | None = None
    other_unsalted_hit_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFigures(StepFigures):
    """What a step measured, with figures that have no expectation. The smallest detectable leak: blocks per request."""

    filled_ratio: float | None = None
    samples_of_whole_load: int | None = None
    cycles_judged: int | None = None
    idle_cycles_judged: int | None = None
    smallest_detectable_leak: float | None = None
    own_hit_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The verdict of one test step: expected and measured figures."""

    id: str
    status: Status
    summary: str
    _: KW_ONLY
    expected: StepFigures = StepFigures()
    measured: MeasuredFigures = MeasuredFigures()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the server's settings that mends a finding: as it is typed, what it buys and what it costs.

    `mends`: alone it ends the finding; else it makes it smaller. `requests` of the demand's length, or one of
    `context_tokens`, then fit into the pool at once; `pool_tokens` is the pool's size then, `free_bytes` what stays
    free on the fullest device. `None` where a figure is unknown, or not one of the change's.
    """

    change: str
    gain: str
    cost: str
    mends: bool = True
    requests: int | None = None
    context_tokens: int | None = None
    pool_tokens: int | None = None
    free_bytes: int | None = None


Certainty = Literal["confirmed", "reported"]
"""Of a public report: its cause was found in the code; or the symptom alone is known."""

ConfidenceWord = Literal["certain", "likely", "possible"]
"""How far findings of an id and status can be relied on: see `kvdiag.diagnosis.confidence`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownReport:
    """A public report of an engine's defect that may be a finding's cause; all its texts come with kvdiag.

    `affected` are the versions in words. `fixed_in` is the first release with the fix, `None` where none is known.
    `version_affected` is whether this server's version is among those that have it: `None` where the version is not
    reported, or newer than the newest that was. `met` are the report's conditions that this server is known to meet,
    `unknown` those that it may meet; a report whose condition it does not meet is left out.
    """

    id: str
    summary: str
    remedy: str
    links: tuple[str, ...]
    certainty: Certainty
    affected: str
    fixed_in: str | None = None
    version_affected: bool | None = None
    met: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether the server has the version and meets each of the conditions."""
        return self.version_affected is True and not self.unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Prescription:
    """The changes that mend a finding on this server, the least harmful first, and the figures that others lack.

    `known_reports` match the server and the finding, those that meet most conditions first; `known_issue` is their
    first line.
    """

    changes: tuple[Change, ...] = ()
    missing: tuple[str, ...] = ()
    known_issue: str | None = None
    known_reports: tuple[KnownReport, ...] = ()

    @property
    def first(self) -> Change | None:
        """The change to make: it mends the finding with the least harm."""
        return self.changes[0] if self.changes and self.changes[0].mends else None

    @property
    def is_known(self) -> bool:
        """Whether a known report matches of which nothing is left to ask."""
        return any(one.certain for one in self.known_reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How often findings of one id and status were right on servers whose state is known.

    `ratio` is that share of `cases`, `low_ratio` what it is at least, at 95 %, by their number. `word` follows from
    that bound.
    """

    word: ConfidenceWord
    ratio: float
    low_ratio: float
    cases: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's verdict with the numbers that decided. The last four come from the knowledge base.

    `holder` names the process or device whose memory it is about, if it is one. Outputs read `growth`, `imbalance` and
    `prescription`, the computed fix, never a row of the evidence by its name. `since_seconds` is when it was first
    true, as far as observed; `last_seen_seconds` is the newest sample that it holds for. `or_id` is the verdict that it
    may be as well, where no source separates the two: nothing shown may then name one culprit. `confidence` is `None`
    where too few such findings were compared with the truth.
    """

    id: str
    status: Status
    summary: str
    evidence: tuple[Evidence, ...] = ()
    _: KW_ONLY
    holder: str | None = None
    since_seconds: float | None = None
    last_seen_seconds: float | None = None
    growth: GrowthFigures | None = None
    imbalance: ImbalanceFigures | None = None
    prescription: Prescription | None = None
    likely_cause: str | None = None
    confirm: str | None = None
    remedy: str | None = None
    runbook: str | None = None
    or_id: str | None = None
    confidence: Confidence | None = None

    @property
    def title(self) -> str:
        """What it is called in texts: both ids where it may be either."""
        return self.id if self.or_id is None else f"{self.id} or {self.or_id}"

    @property
    def is_unexplained(self) -> bool:
        """Whether growth, an exit or bytes were observed that stay unknown with all figures: nothing is healthy then.

        Only these three families are about memory that is not accounted for. What others cannot say without a test run
        says nothing against a server.
        """
        return self.status == "unknown" and bool(self.evidence) and self.id.startswith(("leak.", "spike.", "baseline."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of a server, from a start of its process to its last answer, judged by itself.

    `end_seconds` and `end` are `None` while the server answers. `findings` are its suspects and faults. `engine` is its
    engine's name.
    """

    start_seconds: float
    end_seconds: float | None = None
    end: LifeEnd | None = None
    end_detail: str | None = None
    engine: str | None = None
    worst: Status
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One part of a device's used bytes. The lines of a device add up to its used bytes exactly.

    Only a residual (`unaccounted`, `server_other`, `torch_other` or `torch_with_kv_pool`) may be negative: then a
    reported or computed line claims more than was measured, and hiding that would hide an error. `gpu` and `uuid` are
    `None` if no device was observed.
    """

    gpu: int | None
    component: str
    bytes: int
    provenance: Provenance
    detail: str = ""
    uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The judgement of one timeline: all that the outputs show.

    `findings` are those of the last of the `lives`, `worst` is the worst of all of them. `profiles` say which lines of
    code hold what the server's processes gained, where it was asked; `block_owners` are the newest counts of who has
    the blocks of each KV pool.
    """

    worst: Status
    facts: Facts
    start_seconds: float
    end_seconds: float
    samples: int
    steps: tuple[StepResult, ...]
    findings: tuple[Finding, ...]
    ledger: tuple[LedgerLine, ...]
    gaps: tuple[Gap, ...]
    lives: tuple[Life, ...] = ()
    profiles: tuple[ConcludedProfile, ...] = ()
    block_owners: tuple[BlockOwners, ...] = ()

    @property
    def present_worst(self) -> Status:
        """The verdict on the last life alone, if it is over as of its end: a restart ended what those before it had."""
        return self.lives[-1].worst if self.lives else self.worst

    @property
    def down_since_seconds(self) -> float | None:
        """When the server stopped answering, `None` if it answers or never did."""
        return self.lives[-1].end_seconds if self.lives else None

    @property
    def worst_past_life(self) -> Life | None:
        """The newest of the worst earlier lives, if it was worse than the last one."""
        order = ("fault", "suspect", self.present_worst)
        past = [life for life in self.lives[:-1] if life.worst in order[: order.index(self.present_worst)]]
        return min(reversed(past), key=lambda life: order.index(life.worst), default=None)
