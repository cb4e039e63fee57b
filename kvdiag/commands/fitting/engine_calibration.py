"""`kvdiag fit --from-log` for engines other than vLLM: the pools that a log reports, by that engine's arithmetic.

What the log reports completes the options and the engine's flags; flags on the command line come first, since a log
does not show all that decides a pool. Bytes are predicted for the tokens that the engine reports and compared with what
it printed, inside the rounding of its figures; tokens are predicted from the printed bytes. No profile is kept.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from kvdiag.commands.fitting.engine_fit import data_parallel_groups, engine_planner, is_given
from kvdiag.commands.fitting.engine_flags import engine_settings
from kvdiag.commands.fitting.fit_options import FitOptions
from kvdiag.commands.printing import print_json, print_text
from kvdiag.errors import KvdiagError, KvModelError
from kvdiag.kv.calibration.engine_report import EngineReport, PrintedSize
from kvdiag.kv.calibration.predicted_vs_reported import Calibration, Comparison, Figure, Interval, between, exactly
from kvdiag.kv.pools.cell_cache import CellSettings
from kvdiag.kv.pools.engine_plan import EnginePlan, EnginePool
from kvdiag.kv.pools.gguf_header import GgufHeader
from kvdiag.kv.pools.share_pools import default_blocks, default_share
from kvdiag.outputs.terminal.calibration_text import calibration_document, render_calibration

_VERSION = re.compile(r"\b\d{1,4}(?=\.)|(?<=\.)\d{1,4}")
_NO_PROFILE = "no profile saved: measured overheads are kept for vLLM alone"
_CELLS, _PAGED, _WINDOWS = "llamacpp", "sglang", "sliding window"
_NOT_COMPARED = "weights are not compared: {}"
_ON_HOST = "part of them stays in host memory"
_NO_TENSORS = "the log lists no tensors; pass the model's GGUF file"
_ASSUMED = "the log does not show the types of the cache: f16 is assumed; pass -ctk and -ctv"
_OMIT = "the log lists the settings of the model's file: omit MODEL to compare with those"
_ASSUMED_BLOCK = "the log does not show the tokens of a block: {} are assumed; pass --block-size"
_LISTED = "the model that the log lists"
_BLOCK_MISSING = "the tokens of a block ({} by default, which do not match); pass --block-size"
_PART_OF_PAGE = "the log's {:,} tokens are no multiple of the page of {:,} tokens that is given"
_OTHER_SLOTS = "{:,} state slots are given, but the log has {:,}"
_LARGEST_PAGE_TOKENS = 256
"""Of SGLang's backends (DiffusionGemma's)."""
_NOT_ALIKE = "the engine holds them quantized as MODEL's config does not say; pass --weights"


class _Compared(NamedTuple):
    """Where the model is from, the report, what the engine makes of the model, and what cannot be compared."""

    name: str
    report: EngineReport
    plan: EnginePlan
    comparisons: tuple[Comparison, ...]
    why: tuple[str, ...]

    def fits(self) -> bool:
        """Whether the pool is as large as the model's."""
        return all(one.within_limit for one in self.comparisons if one.figure is not Figure.WEIGHTS)


def calibrate_engine(model: str | None, report: EngineReport, origin: str, options: FitOptions) -> int:
    """Compare MODEL with an engine's report, print the comparison, and return the exit code.

    Raises:
        KvdiagError: there is nothing to compare.
    """
    engine = report.engine_name or options.engine
    header = None
    if model is None and report.model_settings is not None:
        header = GgufHeader(values=report.model_settings, lengths={}, tensor_bytes={}, formats={})
        model = report.settings.model or report.settings.architecture or _LISTED
    if model is None:
        named = report.settings.model
        hint = f"; the engine calls it {named[:120]!r}" if named else ""
        raise KvdiagError(f"{origin} does not show its model's config: pass MODEL too, a folder or a Hub id{hint}")
    chosen = _chosen(report, replace(options, engine=engine, gpu=None, kv_pool_bytes=None))
    own = engine_settings()
    report = _with_share(report, own.get("share"), engine)
    given_block = own.get("page_size") or own.get("block_tokens") or chosen.block_size
    assumed = () if given_block or report.tokens is not None or report.num_blocks is None else default_blocks(engine)
    if report.tokens is None and (report.num_blocks is None or not (given_block or assumed)):
        rank = report.deciding_rank
        pool = None if rank is None else rank.pool
        hint = "" if pool is None else f"; plan its pool by --engine {engine} --kv-pool-bytes {pool.nominal_bytes}"
        raise KvdiagError(f"{origin} does not report a capacity in tokens: nothing to compare{hint}")

    def compared(block: int | None) -> _Compared:
        read, sized = report, chosen
        if report.tokens is None and report.num_blocks is not None and block is not None:
            notes = (_ASSUMED_BLOCK.format(block),) if assumed else ()
            read = replace(report, tokens=report.num_blocks * block, notes=(*report.notes, *notes))
            sized = replace(chosen, block_size=block)
        return _compared(model, read, sized, own, header, given_block=given_block is not None)

    first = compared(assumed[0] if assumed else given_block)
    found = next(filter(_Compared.fits, chain((first,), map(compared, assumed[1:]))), first)
    name, report, plan, comparisons, why = found
    lacks = None if report.deciding_rank is not None else "bytes of the pool"
    if assumed and not found.fits():
        # The defaults are no evidence against the model.
        comparisons = tuple(one for one in comparisons if one.figure is Figure.WEIGHTS)
        lacks = _BLOCK_MISSING.format(*assumed[:1])
    if not comparisons:
        raise KvdiagError(f"{origin} reports nothing to compare: it lacks {lacks or 'bytes of the pool'}")
    given = report.settings.kv_dtype is not None or not report.cache_layers or "type_k" in own
    types = () if given or engine != _CELLS else (_ASSUMED,)
    calibration = Calibration(
        comparisons=comparisons,
        missing=() if lacks is None else (lacks,),
        notes=(*report.notes, *contradictions(report, own), *plan.notes, *why, *types),
    )
    if not calibration.within_limit and header is None and report.model_settings is not None:
        calibration = replace(calibration, notes=(*calibration.notes, _OMIT))
    shown: dict[str, Any] = {"model": name, "origin": origin, "profile": None, "note": _NO_PROFILE}
    if options.output == "json":
        print_json(calibration_document(calibration, report, **shown, profile_file=None))
    else:
        print_text(render_calibration(calibration, report, **shown))
    return 0 if calibration.within_limit else 1


def _compared(
    model: str,
    report: EngineReport,
    chosen: FitOptions,
    own: Mapping[str, Any],
    header: GgufHeader | None,
    *,
    given_block: bool,
) -> _Compared:
    """A report with its tokens, and what the engine makes of the model for so many."""
    engine = chosen.engine
    flags = {**_reported_flags(engine, report), **own}
    if report.state_slots is not None:
        flags.setdefault("state_slots", report.state_slots * data_parallel_groups(flags)[1])
    name, planned, weights = engine_planner(model, chosen, flags, header)
    plan = planned(chosen)
    if further := _window_flags(plan, report, flags):
        name, planned, weights = engine_planner(model, chosen, {**flags, **further}, header)
        plan = planned(chosen)
    held, why = _held(report, weights, lacking=_NO_TENSORS if header else _NOT_ALIKE)
    # A page more than the capacity is allocated, and the tokens show which pages are possible.
    page = (report.tokens or 0) & -(report.tokens or 0)
    widest = planned(replace(chosen, block_size=min(page, _LARGEST_PAGE_TOKENS))) if engine == _PAGED else plan
    comparisons = tuple(_comparisons((plan, plan if given_block else widest), report, held))
    return _Compared(name, report, plan, comparisons, why)


def _with_share(report: EngineReport, given: float | None, engine: str) -> EngineReport:
    """With the pool as the share of free memory that the engine takes, in whole blocks, where it prints only that."""
    share = given or report.settings.memory_fraction_ratio or default_share(engine)
    if share is None or not report.num_blocks:
        return report
    ranks = []
    for rank in report.ranks:
        pool = rank.pool
        if pool is None and rank.free is not None:
            size = round(rank.free.nominal_bytes * share)
            slack = round(rank.free.slack_bytes * share) + size // report.num_blocks
            pool = PrintedSize(nominal_bytes=size, slack_bytes=slack)
        ranks.append(replace(rank, pool=pool))
    return replace(report, ranks=tuple(ranks))


def _held(
    report: EngineReport, weights: Callable[[], tuple[Interval, ...]], *, lacking: str
) -> tuple[tuple[Interval, ...], tuple[str, ...]]:
    """The model's weights of each stage, where the engine reports its own; and why they cannot be compared."""
    if not any(rank.weights for rank in report.ranks):
        return (), ()
    if report.settings.host_weights:
        return (), (_NOT_COMPARED.format(_ON_HOST),)
    try:
        held = weights()
    except KvModelError as error:
        return (), (_NOT_COMPARED.format(error),)
    return held, () if held else (_NOT_COMPARED.format(lacking),)


def contradictions(report: EngineReport, own: Mapping[str, Any]) -> Iterator[str]:
    """What the user's flags say otherwise than the log."""
    page, tokens = own.get("page_size"), report.tokens
    if page and tokens and tokens % page:
        yield _PART_OF_PAGE.format(tokens, page)
    slots, groups = own.get("state_slots"), data_parallel_groups(own)[1]
    if slots and report.state_slots and slots // groups != report.state_slots:
        yield _OTHER_SLOTS.format(slots // groups, report.state_slots)


def _chosen(report: EngineReport, options: FitOptions) -> FitOptions:
    """The options with what the log reports, where the user gives none."""
    settings = report.settings
    dtype = settings.kv_dtype
    if dtype is not None:
        dtype = None if report.engine_name == _CELLS else "fp8" if dtype.startswith("float8") else dtype
    reported: dict[str, Any] = {
        "tp": settings.tensor_parallel,
        "pp": settings.pipeline_parallel,
        "kv_dtype": dtype,
        "block_size": None if report.engine_name == _CELLS else settings.block_size_tokens,
        "mamba_ssm_cache_dtype": settings.state_dtype,
        "context": None if report.engine_name == _CELLS else settings.max_model_len_tokens,
    }
    return replace(
        options, **{name: value for name, value in reported.items() if value is not None and not is_given(name)}
    )


def _reported_flags(engine: str, report: EngineReport) -> Mapping[str, Any]:
    """The report as the engine's own flags."""
    tokens = report.tokens or 0
    if engine != _CELLS:
        quantized = {} if report.settings.quantization is None else {"quantization": report.settings.quantization}
        window = report.settings.window_tokens
        # SGLang rounds the share down.
        windows = {} if window is None or not tokens else {"window_ratio": min(1.0, (window + 0.5) / tokens)}
        version = tuple(int(part) for part in _VERSION.findall(report.settings.version or ""))
        versions: dict[str, Any] = {"version": version} if version else {}
        if (report.settings.architecture or "").startswith("Transformers"):
            versions["transformers"] = True
        tokens_asked = {"max_total_tokens": tokens, "max_tokens": tokens}
        return {**report.settings.flags, **tokens_asked, **quantized, **windows, **versions}
    settings = report.settings
    parts = 1 if settings.shares_pool else tokens // (settings.max_model_len_tokens or tokens or 1)
    kinds = (settings.kv_dtype or "f16").split("/")
    flags: dict[str, Any] = {"context_size": tokens, "type_k": kinds[0], "type_v": kinds[-1]}
    if settings.slots or parts > 1:
        flags |= {"slots": settings.slots or parts, "unified": parts <= 1 and settings.shares_pool is not False}
    if (step := settings.max_num_batched_tokens) is not None:
        flags |= {"ubatch": step, "batch": max(step, CellSettings().batch)}
    if settings.speculative_tokens:
        # Whichever the drafter is: its own cache is not compared.
        flags |= {"spec_type": "draft-eagle3", "draft_tokens": settings.speculative_tokens}
    return flags


def _window_flags(plan: EnginePlan, report: EngineReport, flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """What llama.cpp's caches show of windows: --swa-full, or a build before May 2025, by as many cells as all tokens
    have, or one cache for the layers of both; else -ub by the cells, which hold a step's tokens after each request's
    window. Nothing where the log or the user gives it, or the default fits.
    """
    windows = next((pool for pool in plan.pools if pool.name == _WINDOWS), None)
    if plan.engine != _CELLS or windows is None:
        return {}
    if report.cache_layers == (sum(pool.layers for pool in plan.pools if pool.name in ("KV", _WINDOWS)),):
        return {"swa_full": True}
    cells = report.settings.window_tokens
    if cells is None or cells == windows.units:
        return {}
    if cells == plan.pools[0].units:
        return {"swa_full": True}
    if "ubatch" in flags:
        return {}
    step = max(1, CellSettings().ubatch + cells - windows.units)
    return {"ubatch": step, "batch": step}


def _counted(plan: EnginePlan, report: EngineReport) -> list[EnginePool]:
    """The pools that the engine's figures are of: without a drafter's, and without what is not in an excerpt."""
    own = [pool for pool in plan.pools if not pool.name.startswith("draft")]
    if plan.engine != _CELLS:
        # SGLang prints states in a line of their own, llama.cpp among its buffers.
        return [pool for pool in own if pool.unit != "slot"]
    absent = {"slot"} if report.settings.state_dtype is None else set[str]()
    if report.cache_layers == ():
        absent.add("cell")
    alone = next((pool.layers for pool in own if pool.name == "KV"), 0)
    cut = report.cache_layers == (alone,)
    return [pool for pool in own if pool.unit not in absent and not (cut and pool.name == _WINDOWS)]


def _comparisons(
    plans: tuple[EnginePlan, EnginePlan], report: EngineReport, weights: tuple[Interval, ...]
) -> Iterator[Comparison]:
    """Weights, bytes of the pool, tokens; `plans` with the smallest and the largest page that it can have."""
    plan, _ = plans
    printed = [rank.weights for rank in report.ranks if rank.weights is not None]
    pools = [rank.pool for rank in report.ranks if rank.pool is not None]
    # On a CPU what a start took of the machine is not the weights alone: other processes take and release memory, too.
    if printed and weights and not (report.settings.is_cpu and plan.engine != _CELLS):
        # llama.cpp lists devices that share the model; other engines ranks, each with its own.
        size = _sum(printed) if plan.engine == _CELLS else max(printed, key=lambda size: size.nominal_bytes)
        largest = max(weights, key=lambda stage: stage.high)
        yield Comparison(figure=Figure.WEIGHTS, predicted=largest, reported=between(size))
    states = [rank.states for rank in report.ranks if rank.states is not None]
    slots = next((pool for pool in plan.pools if pool.unit == "slot"), None)
    if states and slots is not None and report.state_slots is not None:
        size = min(states, key=lambda size: size.nominal_bytes)
        yield Comparison(figure=Figure.STATES, predicted=exactly(slots.bytes), reported=between(size))
    predicted, most = (sum(pool.bytes for pool in _counted(one, report)) for one in plans)
    if not pools or not predicted:
        return
    pool = _sum(pools) if plan.engine == _CELLS else min(pools, key=lambda size: size.nominal_bytes)
    held = Interval(nominal=predicted, low=predicted, high=most)
    yield Comparison(figure=Figure.POOL, predicted=held, reported=between(pool))
    tokens = report.tokens or 0
    if plan.engine == _CELLS:
        yield Comparison(figure=Figure.TOKENS, predicted=exactly(plan.capacity_tokens), reported=exactly(tokens))
        return
    ratio, least = tokens / predicted, tokens / most
    interval = Interval(nominal=pool.nominal_bytes * ratio, low=pool.low_bytes * least, high=pool.high_bytes * ratio)
    yield Comparison(figure=Figure.TOKENS, predicted=interval, reported=exactly(tokens))


def _sum(sizes: list[PrintedSize]) -> PrintedSize:
    return PrintedSize(
        nominal_bytes=sum(size.nominal_bytes for size in sizes), slack_bytes=sum(size.slack_bytes for size in sizes)
    )
