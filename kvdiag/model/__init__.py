"""The values that everything else makes, judges or shows: frozen, keyword-only, checked.

Rules of this package: a missing figure is `None`, never 0 or nan; a name carries its unit (`_bytes`, `_ratio`,
`_seconds`, `_tokens`, `_blocks`, `_total` for a counter); an impossible value (free > total, descending times)
cannot be built, so that a source which reads one has to report a `Gap`.
"""

from kvdiag.model.allocation_profile import (
    MAX_PROFILE_SECONDS,
    MIN_PROFILE_SECONDS,
    ConcludedProfile,
    Frame,
    MemoryProfile,
    ProfileAnswer,
    ProfiledLoad,
    ProfileKind,
    ProfileSnapshot,
    StackGrowth,
)
from kvdiag.model.block_owners import OWNERS, BlockOwners, LastHolder, RequestBlocks
from kvdiag.model.capabilities import Capabilities
from kvdiag.model.facts import Facts, HostCache, KvPool
from kvdiag.model.readings import (
    ENGINE_COUNTS,
    INSIDE,
    NATIVE,
    Allocator,
    Device,
    Engine,
    FailedAllocation,
    Gap,
    GapKind,
    HostProcess,
    Memory,
    Process,
    ReservedSplit,
    cuda_uuid,
    without_mig_parents,
)
from kvdiag.model.request_lengths import Lengths
from kvdiag.model.snapshot import PressureThresholds, ServerState, Snapshot, SourceHealth
from kvdiag.model.timeline import PARTS, Load, Mark, Outcome, Phase, Probe, ProbeKind, Sample, Span, Timeline, Workload
from kvdiag.model.validation import MAX_BYTES, MAX_COUNT
from kvdiag.model.verdicts import (
    Change,
    Confidence,
    ConfidenceWord,
    Diagnosis,
    Evidence,
    Finding,
    GrowthFigures,
    ImbalanceFigures,
    KnownReport,
    LedgerLine,
    Life,
    LifeEnd,
    MeasuredFigures,
    Prescription,
    Provenance,
    Status,
    StepFigures,
    StepResult,
)
