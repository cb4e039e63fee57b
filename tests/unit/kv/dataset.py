"""The published startup logs as checks of the KV-cost model.

A check is one printed figure of one row: tokens, blocks, concurrency or bytes needed. GiB figures are printed to two
decimals, so each check asks whether the printed figure lies between what the model gives for both ends of the printed
GiB figure's rounding. A check is strict where nothing was fitted: the source itself names the model, the number format
and the ranks, and every engine setting that the log leaves open gives the same figure.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.drift_reasons import eagle_drafts
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.capacity import CacheLayout, pool_capacity
from kvdiag.kv.layout.deployment import Deployment, deployed_layout
from kvdiag.kv.layout.layers import Architecture, LayerKind
from kvdiag.kv.layout.pages import StateCacheMode

DATA = Path(__file__).parent / "data"
GIB = 1 << 30
# Tokens that vLLM may batch by default, on devices below and above 70 GiB and above 160 GiB (engine/arg_utils.py).
_USUAL_BATCHES = (2048, 4096, 8192, 16384, 32768)
_RECENT_DIRECT_LINE = "new"
_OLD_LINE = "old"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One printed figure and what the model gives for it."""

    row: str
    figure: str
    printed: float
    low: float
    high: float
    strict: bool
    settings: str

    @property
    def inside(self) -> bool:
        """Whether the printed figure is what the model gives, within rounding."""
        return self.low <= self.printed <= self.high

    @property
    def miss_ratio(self) -> float:
        """How far outside the printed figure lies, relative to it; 0 inside."""
        if self.inside:
            return 0.0
        nearest = self.low if self.printed < self.low else self.high
        return nearest / self.printed - 1 if self.printed else 0.0


def rows() -> list[dict[str, Any]]:
    """All rows of the dataset."""
    return [json.loads(line) for line in (DATA / "dataset.jsonl").read_text().splitlines()]


def config_of(name: str) -> dict[str, Any]:
    """A model config of the dataset by its `cfg` name."""
    found: dict[str, Any] = json.loads((DATA / "configs" / f"{name}.json").read_text())
    return found


def checks() -> list[Check]:
    """Every check that the dataset allows, the best of the possible settings where a row does not log one."""
    return [check for row in rows() for check in row_checks(row)]


def row_checks(row: dict[str, Any]) -> list[Check]:
    """The checks of one row."""
    if row["cfg"] is None:
        return []
    try:
        architecture = parse_architecture(config_of(row["cfg"]))
    except KvModelError:
        return []
    if architecture.is_compressed:
        # vLLM before 0.32 gave a block of these models other pages; test_compressed.py compares the blocks of requests.
        return []
    if row["engine"] == "sglang" or row["engine"] == "tensorrt-llm":
        return list(_pool_checks(row, architecture))
    candidates: list[list[Check]] = []
    for deployment, line in _settings(row, architecture):
        try:
            layout = deployed_layout(architecture, deployment)
        except KvModelError:
            continue
        candidates.append(list(_log_checks(row, architecture, deployment, layout, line)))
    if not candidates:
        return []
    best = max(candidates, key=_rank)
    if row["num_spec"] is None and len(best) > 1 and not any(check.inside for check in best):
        # Several figures that all miss, of a log that does not say whether there is a drafter.
        best = next(_drafted(row, architecture), best)
    if not _named_by_source(row):
        return best
    settled = {
        check.figure
        for check in best
        if len({(other.low, other.high) for found in candidates for other in found if other.figure == check.figure})
        == 1
    }
    return [replace(check, strict=check.figure in settled) for check in best]


def _drafted(row: dict[str, Any], architecture: Architecture) -> Iterator[list[Check]]:
    """The checks with a drafter of one layer with which every figure is inside."""
    for deployment, line in _settings(row, architecture):
        for drafted in eagle_drafts(architecture, deployment):
            layout = deployed_layout(architecture, drafted)
            found = list(_log_checks(row, architecture, drafted, layout, line))
            if all(check.inside for check in found):
                yield [replace(check, settings=f"{check.settings}, a drafter of one layer") for check in found]


def _rank(found: list[Check]) -> tuple[int, float]:
    """How good a choice of settings is: checks inside, then how far the others miss."""
    return sum(check.inside for check in found), -sum(abs(check.miss_ratio) for check in found)


def _named_by_source(row: dict[str, Any]) -> bool:
    """Whether the source itself names the model, the number format and the ranks, rather than kvdiag deriving them from
    figures. A check of such a row is strict if all settings that the row leaves open give the same figure.
    """
    notes = (row.get("notes") or "").lower()
    if config_of(row["cfg"])["_source_kind"] == "inferred":
        return False
    if any(word in notes for word in ("identified", "inferred", "class", "shape")):
        return False
    if any(word in row["model"].lower() for word in ("class", "shape", "layers x", "?")) or row["tp"] is None:
        return False
    if row["engine"] == "vllm-ascend":
        return False
    return row["kv_dtype"] is None or "inferred" not in row["kv_dtype"]


def _settings(row: dict[str, Any], architecture: Architecture) -> Iterator[tuple[Deployment, str]]:
    """The settings a row may have been logged under; one where nothing is open."""
    dtype = (row["kv_dtype"] or "auto").split(" ")[0]
    kinds = set(architecture.kinds)
    lines = _lines(row)
    batches = (row["max_num_batched_tokens"],) if row["max_num_batched_tokens"] else _USUAL_BATCHES
    in_flight: tuple[int, ...] = tuple(
        sorted({batch * count for batch in batches for count in (1, 2)})
        if kinds & {LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.CROSS_ATTENTION}
        else (batches[0],)
    )
    modes = (StateCacheMode.NONE, StateCacheMode.ALIGN) if architecture.is_hybrid else (StateCacheMode.NONE,)
    state_dtypes: tuple[str | None, ...] = (None,)
    if "mamba_ssm_cache_dtype=float16" in row["model"]:
        state_dtypes = ("float16",)
    spec = row["num_spec"] or 0
    specs = (spec,) if not row.get("num_spec_unknown") else (1, 2, 3)
    for line in lines:
        for mode in modes:
            for tokens in in_flight:
                for drafts in specs:
                    for state_dtype in state_dtypes:
                        yield (
                            Deployment(
                                tensor_parallel=row["tp"] or 1,
                                pipeline_parallel=row["pp"] or 1,
                                decode_context_parallel=row["dcp"] or 1,
                                block_size_tokens=None if architecture.is_hybrid else row["block_size"] or 16,
                                kv_dtype=dtype,
                                state_dtype=state_dtype,
                                max_num_batched_tokens=tokens,
                                max_in_flight_tokens=tokens,
                                state_cache_mode=mode,
                                speculative_tokens=drafts,
                                draft_layers=architecture.draft_layers if drafts else (),
                            ),
                            line,
                        )


def _lines(row: dict[str, Any]) -> tuple[str, ...]:
    """Which of the two token lines the log has: blocks x block size before vLLM 0.21, concurrency x context since."""
    if "old token line" in (row.get("notes") or ""):
        return (_OLD_LINE,)
    version = (row["engine_version"] or "").split(" ")[0].split("-")[0].removesuffix("+").removesuffix(".x")
    parts = [part for part in version.split(".") if part.isdigit()]
    if len(parts) >= 2:
        number = (int(parts[0]), int(parts[1]))
        if number < (0, 20):
            return (_OLD_LINE,)
        if number >= (0, 22):
            return (_RECENT_DIRECT_LINE,)
    if row["max_model_len"] is None:
        return (_OLD_LINE,)
    return (_OLD_LINE, _RECENT_DIRECT_LINE)


def _log_checks(
    row: dict[str, Any], architecture: Architecture, deployment: Deployment, layout: CacheLayout, line: str
) -> Iterator[Check]:
    settings = f"{line} line, {deployment.max_in_flight_tokens} in flight, states {deployment.state_cache_mode}"

    def check(figure: str, printed: float, low: float, high: float) -> Check:
        return Check(row=row["id"], figure=figure, printed=printed, low=low, high=high, strict=False, settings=settings)

    context = row["max_model_len"]
    terms = deployment.request_terms(architecture)
    if row.get("cpu_blocks"):
        blocks = int(row["swap_space_gib"] * GIB) // layout.bytes_per_block[0]
        yield check("cpu_blocks", row["cpu_blocks"], blocks, blocks)
    if row["available_kv_gib"] is None or row["available_kv_gib"] <= 0:
        return
    ends = [
        pool_capacity(
            layout, pool_bytes=int((row["available_kv_gib"] + slack) * GIB), context_tokens=context or 1, terms=terms
        )
        for slack in (-0.005, 0.005)
    ]
    if row["num_blocks"] is not None:
        yield check("num_blocks", row["num_blocks"], ends[0].num_blocks, ends[1].num_blocks)
    if row["kv_tokens"] is not None:
        if line == _RECENT_DIRECT_LINE:
            low, high = ends[0].capacity_tokens, ends[1].capacity_tokens
        else:
            scale = (layout.block_size_tokens or 1) * deployment.decode_context_parallel
            low, high = (end.num_blocks // len(layout.groups) * scale for end in ends)
        yield check("kv_tokens", row["kv_tokens"], low, high)
    if row["max_concurrency"] is not None and context is not None:
        share = (layout.block_size_tokens or 1) / context
        least, most = (round(end.num_blocks * share if _is_v0(row) else end.max_concurrency, 2) for end in ends)
        yield check("max_concurrency", row["max_concurrency"], least, most)


def _is_v0(row: dict[str, Any]) -> bool:
    return "V0" in (row["engine_version"] or "")


def _pool_checks(row: dict[str, Any], architecture: Architecture) -> Iterator[Check]:
    """SGLang and TensorRT-LLM print tokens and the bytes they took."""
    deployment = Deployment(block_size_tokens=1, kv_dtype=row["kv_dtype"] or "auto")
    per_token = deployed_layout(architecture, deployment).bytes_per_token()
    if per_token is None or row.get("kv_pool_gib") is None or row["kv_tokens"] is None:
        return
    gib = row["kv_tokens"] * per_token[0] / GIB
    # SGLang allocates one page beyond its tokens (mem_cache/memory_pool.py), of at most 64 tokens.
    page = 64 if row["engine"] == "sglang" else 0
    most = (row["kv_tokens"] + page) * per_token[0] / GIB
    low, high = (round(gib, 2) - 0.005, round(most, 2) + 0.005)
    yield Check(
        row=row["id"],
        figure="kv_pool_gib",
        printed=row["kv_pool_gib"],
        low=low,
        high=high,
        strict="inferred" not in (row.get("notes") or ""),
        settings="tokens x bytes per token",
    )


def with_range(check: Check, low: float, high: float) -> Check:
    """The same check with what another calculator gives."""
    return replace(check, low=low, high=high, settings="another calculator")


def textbook_bytes_per_token(config: dict[str, Any], *, tensor_parallel: int, element_bytes: int) -> float:
    """What a calculator without kinds of layers says a token costs on one rank."""
    layers: int = config.get("num_hidden_layers") or config["decoder_layers"]
    heads = config.get("num_attention_heads") or config.get("decoder_attention_heads") or 1
    kv_heads: int = config.get("num_key_value_heads") or heads
    hidden = config.get("hidden_size") or config.get("d_model") or 0
    size: int = config.get("head_dim") or hidden // heads or 128
    return 2 * layers * kv_heads * size * element_bytes / tensor_parallel


def textbook_range(row: dict[str, Any], figure: str) -> tuple[float, float]:
    """The textbook's figure for both ends of the printed GiB figure."""
    element = 1 if (row["kv_dtype"] or "").startswith(("fp8", "int8")) else 2
    per_token = textbook_bytes_per_token(config_of(row["cfg"]), tensor_parallel=row["tp"] or 1, element_bytes=element)
    if figure == "kv_pool_gib":
        gib = row["kv_tokens"] * per_token / GIB
        return round(gib, 2) - 0.005, round(gib, 2) + 0.005
    block = row["block_size"] or 16
    if figure == "cpu_blocks":
        blocks = row["swap_space_gib"] * GIB // (per_token * block)
        return blocks, blocks
    ends = []
    for slack in (-0.005, 0.005):
        blocks = (row["available_kv_gib"] + slack) * GIB // (per_token * block)
        value = {
            "num_blocks": blocks,
            "kv_tokens": blocks * block * (row["dcp"] or 1),
            "max_concurrency": round(blocks * block / (row["max_model_len"] or 1), 2),
        }[figure]
        ends.append(value)
    return ends[0], ends[1]
