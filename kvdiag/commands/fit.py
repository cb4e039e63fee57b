"""`kvdiag fit`: whether a model fits on a GPU, the most that fits, and what to change where it does not.

The options decide among three answers: --calibrate and --from-log compare a prediction with an engine's own report
(`fitting/calibrate`, imported only then); --kv-pool-bytes asks the capacity model alone, where weights do not matter;
everything else makes a plan. A plan takes the GPU memory and the overheads of a measured profile where one matches, and
estimates them otherwise. Changes are searched unless the plan fits with room to spare. All arithmetic is in kvdiag/kv.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click

from kvdiag.commands.fitting import fit_inputs, vllm_settings
from kvdiag.commands.fitting.engine_flags import EngineCommand
from kvdiag.commands.fitting.fit_options import FitOptions, fit_options
from kvdiag.commands.fitting.request_length import refused_length
from kvdiag.commands.fitting.vllm_command import estimated_note
from kvdiag.commands.printing import is_ascii_only, print_json, print_text
from kvdiag.errors import KvdiagError
from kvdiag.formatting import format_bytes, format_number, plural
from kvdiag.kv.calibration.profiles import Profile
from kvdiag.kv.families.architecture import dropped_note
from kvdiag.kv.fit.gpu_catalogue import gpu_bytes, unsupported_levers
from kvdiag.kv.fit.overheads import ESTIMATE, GENERIC_ENGINE, architecture_note
from kvdiag.kv.fit.plan import DEFAULT_MEMORY_FRACTION, Outcome, Plan
from kvdiag.kv.fit.scenario import (
    BLOCKS_OPTION,
    DEMAND_LEVERS,
    Lever,
    Scenario,
    block_waste_ratio,
    demand_grid,
    find_combinations,
    find_levers,
    scenario_plan,
)
from kvdiag.kv.layout.capacity import plan_layout, pool_capacity
from kvdiag.kv.layout.deployment import (
    deployed_layout,
    formats_note,
    processor_note,
    stage_ends,
)
from kvdiag.kv.layout.page_specs import is_spec_document, parse_page_specs
from kvdiag.kv.layout.pages import RequestTerms, StateCacheMode
from kvdiag.kv.pools.flag_bounds import ENGINE_FLAGS
from kvdiag.outputs.documents.fit_document import capacity_document, fit_document, grid_document
from kvdiag.outputs.terminal.fit_text import render_fit, render_grid
from kvdiag.sources.model_files import ModelFiles, catalogue

EXIT_CODES: Mapping[Outcome, int] = {Outcome.FITS: 0, Outcome.TIGHT: 1, Outcome.DOES_NOT_FIT: 2}
TRAFFIC = "Demand at this rate: {} or fewer at once, 99 % of the time"
POOL_OPTION = "--kv-cache-memory-bytes"
MEASURE = "; --calibrate URL measures them on a running server"


@click.command(cls=EngineCommand)
@click.argument("model", required=False)
@fit_options
def command(model: str | None, options: FitOptions) -> int:
    """Check whether MODEL fits on a GPU, and what would make it fit.

    MODEL is a folder, a config.json, a GGUF file, a Hub id, or a name such as llama_70b. With --engine NAME, that
    engine's own flags are options, too: --engine NAME --help lists them.

    \b
    kvdiag fit llama_70b --gpu a100 --tp 4 --context 8192 --concurrency 32
    kvdiag fit Qwen/Qwen3-32B --gpu h100 --request-rate 4 --prompt-tokens 2000 --output-tokens 400
    kvdiag fit ./model --kv-pool-bytes 10737418240 --context 131072 --output json
    kvdiag fit Qwen/Qwen3-32B --gpu h100 --from-log startup.log
    kvdiag fit llama_70b --engine sglang --gpu h100 --tp 4 --mem-fraction-static 0.85
    kvdiag fit model.gguf --engine llamacpp -c 32768 -np 4 -ctk q8_0

    Exit codes: 0 fits, 1 fits with less than 10 % of the pool free, 2 does not fit, 3 unknown. With --calibrate or
    --from-log: 0 all figures within 2 % of what the engine reports, 1 a figure is off, 3 nothing to compare.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    if options.list_models:
        print_text("\n".join(catalogue().names))
        return 0
    if model is not None and not model.strip():
        raise click.UsageError("MODEL is empty: pass a folder, a config.json, a Hub id, or a name from --list")
    fit_inputs.check_options(options)
    if options.calibrate is not None or options.from_log is not None:
        calibrate = importlib.import_module("kvdiag.commands.fitting.calibrate")
        result: int = calibrate.calibrate(model, options)
        return result
    if model is None:
        raise click.UsageError("MODEL is missing: pass a folder, a config.json, a Hub id, or a name from --list")
    if options.engine in ENGINE_FLAGS:
        engine_fit = importlib.import_module("kvdiag.commands.fitting.engine_fit")
        code: int = engine_fit.engine_fit(model, options)
        return code
    if options.kv_cache_memory_bytes is not None and options.gpu is None:
        options = replace(options, kv_pool_bytes=options.kv_cache_memory_bytes)
    if options.kv_pool_bytes is not None:
        return _capacity(fit_inputs.files_of(model, options), options)
    if options.gpu is None:
        raise click.UsageError("--gpu is missing: pass a GPU's name, such as h100, or its memory, such as 80GB")
    return _show(planned(fit_inputs.files_of(model, options), options, options.gpu), options.output)


def _capacity(files: ModelFiles, options: FitOptions) -> int:
    """The capacity model alone: a pool's blocks, tokens and concurrency."""
    notes: Iterable[str] = ()
    refused = ""
    if is_spec_document(files.config):
        deployment = fit_inputs.deployment_of(None, options)
        layout = plan_layout(
            parse_page_specs(files.config), hybrid_manager=options.hybrid_kv_cache_manager is not False
        )
        mode = options.mamba_cache_mode
        terms = RequestTerms(
            max_in_flight_tokens=deployment.in_flight_tokens,
            encoder_tokens=deployment.max_num_batched_tokens,
            decode_context_parallel=deployment.decode_context_parallel,
            state_cache_mode=StateCacheMode.NONE if mode is None else StateCacheMode(mode),
        )
        context = fit_inputs.DEFAULT_CONTEXT_TOKENS if options.context is None else options.context
    else:
        architecture = fit_inputs.architecture_of(files, options)
        deployment = fit_inputs.deployment_of(architecture, options)
        fit_inputs.check_settings(architecture, deployment, options, files.config)
        layout = deployed_layout(architecture, deployment)
        if not layout.groups:
            raise KvdiagError(f"{files.origin} has no KV cache: --kv-pool-bytes does not apply")
        terms = deployment.request_terms(architecture)
        context = fit_inputs.context_of(architecture, options)
        refused = refused_length(files, architecture, context, options.engine)
        dropped, formats = dropped_note(architecture.model_type), formats_note(architecture, deployment)
        notes = filter(None, [refused, files.note, dropped, formats, processor_note(architecture, deployment)])
    capacity = pool_capacity(layout, pool_bytes=options.kv_pool_bytes or 0, context_tokens=context, terms=terms)
    document = capacity_document(layout, capacity, deployment, origin=files.origin, notes=tuple(notes))
    if options.output == "json":
        print_json(document)
    else:
        print_text("\n".join(_capacity_lines(document)))
    return 0 if capacity.admits_one and not refused else EXIT_CODES[Outcome.DOES_NOT_FIT]


def _capacity_lines(document: Mapping[str, Any]) -> Sequence[str]:
    per_token = document["kv_bytes_per_token"]
    size = format_bytes(document["bytes_per_block"])
    blocks, request = plural(document["num_blocks"], "block"), plural(document["blocks_per_request"], "block")
    return (
        f"{blocks} of {document['block_size']} tokens, {size} each, in {plural(document['groups'], 'KV-cache group')}",
        f"{request} per request, {format_number(document['max_concurrency'])} requests at once",
        f"{plural(document['capacity_tokens'], 'token')} of capacity, as vLLM will report it",
        "bytes per token depend on request length"
        if per_token is None
        else f"{format_bytes(per_token)} per token on each GPU",
        *document["notes"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A plan, what would help where it is not comfortable, and what to know about the figures.

    `block_waste_ratio` is what the last block of each request leaves empty, `None` without a cache; `rows` are those of
    --grid.
    """

    scenario: Scenario
    plan: Plan
    levers: tuple[Lever, ...]
    combinations: tuple[Lever, ...]
    origin: str
    notes: tuple[str, ...]
    block_waste_ratio: float | None
    rows: tuple[tuple[Plan, ...], ...]

    def document(self) -> dict[str, Any]:
        """The JSON document of `kvdiag fit --output json`."""
        document = fit_document(
            self.scenario,
            self.plan,
            self.levers,
            self.combinations,
            origin=self.origin,
            notes=self.notes,
            block_waste_ratio=self.block_waste_ratio,
        )
        if self.rows:
            document["grid"] = grid_document(self.rows)
        return document


def planned(files: ModelFiles, options: FitOptions, gpu: str) -> Fitted:
    """The plan for a model on a GPU.

    Raises:
        KvdiagError: the model, the GPU or an option cannot be used.
    """
    architecture = fit_inputs.architecture_of(files, options)
    total = gpu_bytes(gpu)
    chosen = options
    asked = fit_inputs.deployment_of(architecture, options)
    profile = fit_inputs.profile_of(files, architecture, asked, options, gpu)
    if chosen.max_num_batched_tokens is None and chosen.max_in_flight_tokens is None:
        measured_with = None if profile is None else profile.max_num_batched_tokens
        chosen = replace(options, gpu=gpu, max_num_batched_tokens=measured_with)
    deployment = fit_inputs.deployment_of(architecture, chosen)
    fit_inputs.check_settings(architecture, deployment, options, files.config)
    fraction = options.memory_fraction
    if fraction is None:
        fraction = 1.0 if options.engine == GENERIC_ENGINE else DEFAULT_MEMORY_FRACTION
    overheads = fit_inputs.overheads_of(files, deployment, options) if profile is None else profile.overheads
    scenario = Scenario(
        architecture=architecture,
        deployment=deployment,
        gpu_bytes=total if profile is None else profile.gpu_total_bytes,
        memory_fraction_ratio=fraction,
        weights=fit_inputs.weights_of(files, architecture, options),
        drafter=fit_inputs.drafter_weights(architecture, options),
        adapters=fit_inputs.adapters_of(files, architecture, options),
        overheads=overheads,
        estimate=partial(fit_inputs.overheads_of, files, options=options) if profile is None else None,
        demand=fit_inputs.demand_of(architecture, options),
        pool_bytes=options.kv_cache_memory_bytes,
        host_weights_bytes=int(options.cpu_offload_gb * 2**30),
        unsupported_levers=unsupported_levers(gpu),
        most_context_tokens=architecture.accepted_context_tokens,
    )
    plan = scenario_plan(scenario)
    refused = refused_length(files, architecture, scenario.demand.context_tokens, options.engine)
    generic = options.engine == GENERIC_ENGINE
    waiting = "" if generic else vllm_settings.waiting_note(architecture, options, scenario.demand.requests)
    estimated = scenario.overheads.source == ESTIMATE
    fits = plan.outcome is Outcome.FITS
    levers = () if fits else find_levers(scenario, plan)
    if options.request_rate is not None:
        # Fewer or shorter requests than arrive are no way to serve them: the queue would grow for as long as they come.
        levers = tuple(one for one in levers if one.name not in DEMAND_LEVERS)
    combinations = () if fits else find_combinations(scenario, plan)
    notes = [
        *filter(None, [refused, waiting, _override_note(plan, options), files.note]),
        f"CUDA context, activation and graphs: {scenario.overheads.source}{MEASURE if estimated else ''}",
        *_band_notes(plan),
        *([] if options.request_rate is None else [TRAFFIC.format(plural(scenario.demand.requests, "request"))]),
        *_profile_notes(profile),
        *filter(
            None,
            [
                architecture_note(architecture) if profile is None else "",
                "" if generic else dropped_note(architecture.model_type),
                _slots_note(scenario),
                vllm_settings.drafter_note(options, weighed=scenario.drafter is not None),
                estimated_note(),
                formats_note(architecture, deployment),
                processor_note(architecture, deployment),
            ],
        ),
    ]
    waste = block_waste_ratio(scenario) if plan.keeps_cache else None
    rows = (
        demand_grid(scenario, contexts=fit_inputs.GRID_CONTEXTS, concurrencies=fit_inputs.GRID_REQUESTS)
        if options.grid
        else ()
    )
    return Fitted(
        scenario=scenario,
        plan=plan,
        levers=tuple(levers),
        combinations=tuple(combinations),
        origin=files.origin,
        notes=tuple(notes),
        block_waste_ratio=waste,
        rows=tuple(rows),
    )


def _band_notes(plan: Plan) -> Iterator[str]:
    """How far the pool may be off; nothing where it was measured, or where there is none."""
    budget = plan.budgets[plan.limiting_stage]
    low, high = budget.pool_range_bytes
    if plan.keeps_cache and low != high:
        yield f"KV pool per GPU: {format_bytes(low)} to {format_bytes(high)} by the range of published logs"


def _slots_note(scenario: Scenario) -> str:
    """What the slots of adapters take; empty without them."""
    if scenario.adapters is None:
        return ""
    ends = stage_ends(scenario.architecture.depth, scenario.deployment)
    most = max(scenario.adapters.stage_bytes(scenario.deployment.tensor_parallel, ends))
    return f"LoRA slots: {format_bytes(most)} per GPU, counted with the weights"


def _override_note(plan: Plan, options: FitOptions) -> str:
    """What a pool that is set by hand comes to; empty without one, or where weights do not fit."""
    budget = plan.budgets[plan.limiting_stage]
    if budget.override_bytes is None or budget.shortfall_bytes:
        return ""
    needed, room = format_bytes(budget.override_bytes), format_bytes(budget.available_bytes)
    option = f"{BLOCKS_OPTION} {plan.capacity.num_blocks}"
    if options.kv_cache_memory_bytes is not None:
        option = f"{POOL_OPTION} {options.kv_cache_memory_bytes}"
    if budget.overrun_bytes:
        return f"{option} needs {needed} per GPU, and {room} are left for the pool: lower it"
    return f"{option} sets the pool to {needed} per GPU; {room} are available for it"


def _show(fitted: Fitted, output: str) -> int:
    if output == "json":
        print_json(fitted.document())
    else:
        print_text(
            render_fit(
                fitted.scenario,
                fitted.plan,
                fitted.levers,
                fitted.combinations,
                origin=fitted.origin,
                notes=fitted.notes,
                block_waste_ratio=fitted.block_waste_ratio,
                ascii_only=is_ascii_only(),
            )
        )
        if fitted.rows:
            print_text(render_grid(fitted.rows))
    return EXIT_CODES[fitted.plan.outcome]


def _profile_notes(profile: Profile | None) -> Iterator[str]:
    """What a measured profile changes in a plan besides the overheads."""
    if profile is None:
        return
    yield f"GPU memory as that engine reported it: {format_bytes(profile.gpu_total_bytes)}"
    if profile.graph_bytes and not profile.graphs_in_fraction:
        yield f"CUDA graphs take another {format_bytes(profile.graph_bytes)}, outside the memory fraction"
