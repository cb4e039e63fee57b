"""Measured overheads of one model on one GPU, kept for later plans: values, their JSON form, and which one fits a plan.

Pure; a document is untrusted like any other input. A log that reports the parts gives them; where only weights, pool
and total are known, the remainder is kept as one figure and never split.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_BYTES, check_range
from kvdiag.kv.calibration.engine_report import EngineReport, RankReport
from kvdiag.kv.families.architecture import text_fields
from kvdiag.kv.families.base import CONFIG_NAMES
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.layout.layers import Architecture, AttentionLayer

SCHEMA_VERSION = 1
MAX_PROFILES = 4096
_MAX_TEXT = 512
SAME_GPU_RATIO = 0.05
"""The CUDA runtime shows an engine 0.4 to 4.4 % less than NVML's total: ECC, firmware and the driver keep some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """Which model: a digest of what decides its activation and weights, and its name for people."""

    digest: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileQuery:
    """What a plan looks for. `max_num_batched_tokens` is None where the plan has no wish of its own."""

    gpu_total_bytes: int
    gpu_name: str | None = None
    model: ModelKey
    tensor_parallel: int
    pipeline_parallel: int
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(ProfileQuery):
    """What one engine took besides weights and pool, bytes on one GPU.

    `overhead_bytes` is context, activation and graphs in one where they were not reported apart; it then replaces
    the first two, and of the graphs where `graph_bytes` is None. `graphs_in_fraction` says whether the engine kept
    its graphs' room inside the memory fraction.
    """

    context_bytes: int | None = None
    activation_bytes: int | None = None
    graph_bytes: int | None = None
    overhead_bytes: int | None = None
    graphs_in_fraction: bool = True
    engine_version: str | None = None
    date: str
    source: str

    def __post_init__(self) -> None:
        sizes = (self.context_bytes, self.activation_bytes, self.graph_bytes, self.overhead_bytes)
        for size in (self.gpu_total_bytes, *sizes):
            check_range("profile", size or 0, 0, MAX_BYTES)
        counts = (self.tensor_parallel, self.pipeline_parallel, self.max_num_batched_tokens or 1)
        check_range("profile", min(self.gpu_total_bytes, *counts), 1, MAX_BYTES)
        if any(len(text or "") > _MAX_TEXT for text in (self.gpu_name, self.engine_version, self.date, self.source)):
            raise KvModelError(f"a profile has a text of more than {_MAX_TEXT} characters", "profile")
        if self.overhead_bytes is None and (self.context_bytes is None or self.activation_bytes is None):
            raise KvModelError("a profile needs context and activation bytes, or overhead bytes", "profile")

    @property
    def key(self) -> tuple[object, ...]:
        """What a newer profile of replaces this one."""
        return (
            self.gpu_name or self.gpu_total_bytes,
            self.model.digest,
            self.tensor_parallel,
            self.pipeline_parallel,
            self.max_num_batched_tokens,
        )

    @property
    def overheads(self) -> Overheads:
        """The same as a plan takes it."""
        split = self.overhead_bytes is None
        return Overheads(
            context_bytes=(self.context_bytes or 0) if split else 0,
            activation_bytes=(self.activation_bytes or 0) if split else 0,
            graph_bytes=(self.graph_bytes or 0) if self.graphs_in_fraction else 0,
            overhead_bytes=self.overhead_bytes or 0,
            source=f"measured: profile of {self.date}, {self.source}",
        )


def model_key(config: Mapping[str, object], architecture: Architecture, *, name: str) -> ModelKey:
    """The identity of a model: its shape and quantization, and neither its name nor its place."""
    text = text_fields(config)
    kv_heads = sorted({layer.kv_heads for layer in architecture.layers if isinstance(layer, AttentionLayer)})
    quantization = config.get("quantization_config") or config.get("compression_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    shape = [
        architecture.model_type,
        architecture.depth,
        architecture.attention_heads,
        kv_heads,
        [text.maybe_integer(*names, high=1 << 26) for names in CONFIG_NAMES["profiled_sizes"]],
        str(method) if method is not None else None,
    ]
    digest = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]
    return ModelKey(digest=digest, name=name[:_MAX_TEXT])


def find_profile(profiles: Sequence[Profile], query: ProfileQuery) -> Profile | None:
    """The newest profile of that model on that GPU, with the same ranks. Names decide where both have one; the totals
    must be near each other in any case.
    """

    def fits(profile: Profile) -> bool:
        wanted = query.max_num_batched_tokens
        named = query.gpu_name is None or profile.gpu_name is None or query.gpu_name == profile.gpu_name
        return (
            named
            and abs(profile.gpu_total_bytes - query.gpu_total_bytes) <= SAME_GPU_RATIO * query.gpu_total_bytes
            and profile.model.digest == query.model.digest
            and (profile.tensor_parallel, profile.pipeline_parallel) == (query.tensor_parallel, query.pipeline_parallel)
            and (wanted is None or profile.max_num_batched_tokens in (None, wanted))
        )

    # Of two of one day the later one in the file is the newer.
    return max(filter(fits, reversed(profiles)), key=lambda profile: profile.date, default=None)


def with_profile(profiles: Sequence[Profile], new: Profile) -> tuple[Profile, ...]:
    """The profiles with `new` in place of the one it replaces; the oldest go where there are too many."""
    kept = [profile for profile in profiles if profile.key != new.key]
    return (*sorted(kept, key=lambda profile: profile.date)[-(MAX_PROFILES - 1) :], new)


def measure(
    report: EngineReport, query: ProfileQuery, *, weights_bytes: int | None, pool_bytes: int, date: str, source: str
) -> Profile | None:
    """What the engine took besides weights and pool, of the rank with the smallest pool; None where weights and pool
    already are more than its budget, so that the total or the weights cannot be right.

    v1/worker/gpu_worker.py::determine_available_memory, worker/worker.py (V0): budget - weights - non-torch -
    activation = pool, the graphs' estimate within activation where it is applied.
    """
    settings = report.settings
    rank = report.deciding_rank or RankReport(name="")
    within = settings.graphs_in_fraction
    printed = rank.graphs_estimate if within else rank.graphs_actual
    graphs = None if printed is None else printed.nominal_bytes
    inside = (graphs or 0) if within else 0
    weights = weights_bytes if rank.weights is None else rank.weights.nominal_bytes
    if weights is None:
        return None
    activation, context, overhead = _activation(rank), _context(rank), None
    if activation is not None and context is not None:
        activation = max(0, activation - inside)
    else:
        total = query.gpu_total_bytes
        overhead = min(total, math.ceil(total * settings.fraction_ratio)) - weights - pool_bytes - inside
        activation = context = None
        if overhead < 0:
            return None
    return Profile(
        **{field.name: getattr(query, field.name) for field in fields(query)},
        context_bytes=context,
        activation_bytes=activation,
        graph_bytes=graphs,
        overhead_bytes=overhead,
        graphs_in_fraction=within,
        engine_version=settings.version,
        date=date,
        source=source,
    )


def _activation(rank: RankReport) -> int | None:
    if rank.activation is not None:
        return rank.activation.nominal_bytes
    if rank.peak_torch is not None and rank.weights is not None:
        # 0.6.4 reports the peak of everything that torch holds, weights included.
        return max(0, rank.peak_torch.nominal_bytes - rank.weights.nominal_bytes)
    return None


def _context(rank: RankReport) -> int | None:
    if rank.non_torch is not None:
        return rank.non_torch.nominal_bytes
    if rank.consumed is not None and rank.weights is not None:
        return max(0, rank.consumed.nominal_bytes - rank.weights.nominal_bytes)
    return None


def profiles_document(profiles: Sequence[Profile]) -> dict[str, Any]:
    """The JSON form."""
    from kvdiag.model import codec  # noqa: PLC0415 - with its package; most plans have no profile

    return {"schema_version": SCHEMA_VERSION, "profiles": [codec.to_plain(profile) for profile in profiles]}


def parse_profiles(document: object) -> tuple[Profile, ...]:
    """The profiles of a document.

    Raises:
        KvModelError: it is not one, or of a newer schema.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("profiles"), list):
        raise KvModelError("it has no list `profiles`", "profiles")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise KvModelError(
            f"schema_version is {str(version)[:20]!r}, but this kvdiag reads {SCHEMA_VERSION}", "schema_version"
        )
    entries = document["profiles"]
    if len(entries) > MAX_PROFILES:
        raise KvModelError(f"it has {len(entries):,} profiles, at most {MAX_PROFILES:,} are supported", "profiles")
    from kvdiag.model import codec  # noqa: PLC0415 - as above

    profiles = []
    for number, entry in enumerate(entries, start=1):
        try:
            profiles.append(codec.from_plain(Profile, entry, lenient=True))
        except ValueError as error:
            raise KvModelError(f"profile {number}: {error}", "profiles") from error
    return tuple(profiles)
