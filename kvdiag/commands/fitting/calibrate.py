"""`kvdiag fit --calibrate URL` and `--from-log FILE`: compares prediction and report, and keeps what it measured.

In this order: the engine's report and the model's config, where a contradiction between them is an error and no drift;
reported settings complete the options, and an option that contradicts one is an error; a batch size that is not
reported is the one that matches the reported figures exactly, if there is one; then comparison and explanation. The
overheads become a profile only if weights and pool are known, the pool was not set by hand, and the figures do not look
like another model's, since a wrong profile would spoil later plans. The arithmetic is in kvdiag/kv/calibration.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import click
from click.core import ParameterSource

from kvdiag.commands.fitting.calibration_subject import CalibrationSubject, subject_of_log, subject_of_server
from kvdiag.commands.fitting.engine_calibration import calibrate_engine
from kvdiag.commands.fitting.fit_inputs import (
    architecture_of,
    deployment_of,
    files_of,
    known_profiles,
    overheads_of,
    weights_of,
)
from kvdiag.commands.fitting.fit_options import FitOptions
from kvdiag.commands.fitting.profile_file import write_profiles
from kvdiag.commands.printing import print_json, print_text
from kvdiag.errors import KvdiagError, KvModelError
from kvdiag.formatting import format_bytes, format_ratio
from kvdiag.kv.calibration import profiles
from kvdiag.kv.calibration.drift_reasons import ANOTHER_MODEL_RATIO, explain, settled_batches
from kvdiag.kv.calibration.engine_report import EngineReport
from kvdiag.kv.calibration.predicted_vs_reported import Calibration, Expected, Figure, compare, contradiction
from kvdiag.kv.calibration.profiles import Profile, ProfileQuery, find_profile, measure, model_key, with_profile
from kvdiag.kv.fit.gpu_catalogue import compute_capability, gpu_bytes, gpu_name
from kvdiag.kv.fit.plan import Demand
from kvdiag.kv.fit.scenario import GivenWeights, Scenario, WeightsSource, rank_weights, scenario_budgets
from kvdiag.kv.layout.deployment import (
    Deployment,
    default_batched_tokens,
    deployed_layout,
    formats_note,
)
from kvdiag.kv.layout.dtypes import MODEL_DTYPE_BYTES
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.layers import Architecture
from kvdiag.kv.pools.flag_bounds import ENGINE_FLAGS
from kvdiag.outputs.terminal.calibration_text import calibration_document, render_calibration
from kvdiag.sources.model_files import ModelFiles

# Before, no version schedules a step ahead by default (config/vllm.py::VllmConfig).
_FIRST_WITH_ASYNC_SCHEDULING = (0, 14)

_REPORTED_SETTINGS: Mapping[str, str] = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "dcp": "decode_context_parallel",
    "kv_dtype": "kv_dtype",
    "block_size": "block_size_tokens",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "memory_fraction": "memory_fraction_ratio",
    "mamba_cache_mode": "state_cache_mode",
    "mamba_ssm_cache_dtype": "state_dtype",
    "num_speculative_tokens": "speculative_tokens",
    "hybrid_kv_cache_manager": "hybrid_manager",
}
"""Options and the reported settings they must agree with where both are given."""


def calibrate(model: str | None, options: FitOptions) -> int:
    """Compare MODEL with the engine that the options name; print, keep the profile, and return the exit code.

    Raises:
        KvdiagError: the log or server cannot be read, contradicts MODEL or an option, or reports nothing to compare.
    """
    if options.calibrate is not None and options.from_log is not None:
        raise click.UsageError("pass --calibrate URL or --from-log FILE, not both")
    if options.kv_pool_bytes is not None or options.grid:
        raise click.UsageError(
            "--calibrate and --from-log read the pool from the engine: omit --kv-pool-bytes and --grid"
        )
    subject = (
        subject_of_log(options.from_log) if options.from_log is not None else asyncio.run(subject_of_server(options))
    )
    if subject.report.engine_name in ENGINE_FLAGS:
        return calibrate_engine(model, subject.report, subject.origin, options)
    files = _files(model, subject, options)
    subject = _completed(subject, options)
    architecture = _architecture(files, subject, options)
    chosen = _chosen(subject, options)
    total, name = _gpu(subject, options)
    batched = chosen.max_num_batched_tokens
    if batched is None and chosen.max_in_flight_tokens is None and total is not None:
        chosen = replace(chosen, max_num_batched_tokens=default_batched_tokens(total, name or ""))
    deployment = on_gpu(_deployment(architecture, subject.report, chosen), name)
    notes = [note for note in (formats_note(architecture, deployment),) if note]
    if not _given("max_num_batched_tokens") and not _given("max_in_flight_tokens"):
        settled = settled_batches(architecture, deployment, subject.report)
        if settled is not None:
            deployment = replace(deployment, max_num_batched_tokens=settled)
            notes.append(f"max_num_batched_tokens is not reported; {settled:,} matches the reported figures exactly")
    path, known = known_profiles(options)
    key = None
    if total is not None:
        key = ProfileQuery(
            gpu_total_bytes=total,
            gpu_name=name,
            model=model_key(files.config, architecture, name=files.origin),
            tensor_parallel=deployment.tensor_parallel,
            pipeline_parallel=deployment.pipeline_parallel,
            max_num_batched_tokens=batched,
        )
    profile = None if key is None else find_profile(known, key)
    expected = _expected(files, architecture, deployment, subject, chosen, total=total, profile=profile)
    calibration = explain(
        compare(architecture, deployment, subject.report, expected), architecture, deployment, subject.report, expected
    )
    calibration = replace(calibration, notes=(*calibration.notes, *notes))
    if not calibration.comparisons:
        raise KvdiagError(f"{subject.origin} reports nothing to compare: it lacks {', '.join(calibration.missing)}")
    new, why_not = _profile(architecture, deployment, subject, expected, key, calibration)
    if new is not None and path is not None:
        write_profiles(path, with_profile(known, new))
    saved = new if path is not None else None
    shown: dict[str, Any] = {
        "model": files.origin,
        "origin": subject.origin,
        "profile": saved,
        "note": f"profile saved in {path}" if saved is not None else why_not or "no profile saved: --no-profile",
    }
    if options.output == "json":
        file = None if saved is None else str(path)
        print_json(calibration_document(calibration, subject.report, **shown, profile_file=file))
    else:
        print_text(render_calibration(calibration, subject.report, **shown))
    return 0 if calibration.within_limit else 1


def _architecture(files: ModelFiles, subject: CalibrationSubject, options: FitOptions) -> Architecture:
    """MODEL's architecture, with the reported dtype.

    Raises:
        KvdiagError: the engine's report or the server's own config contradicts it.
    """
    settings = subject.report.settings
    architecture = architecture_of(files, options)
    conflict = contradiction(files.config, architecture, settings)
    if conflict is None and subject.files is not None and files is not subject.files:
        own = architecture_of(subject.files, options)
        if own.layers != architecture.layers:
            conflict = f"the server's config has {_kinds(own)}, MODEL has {_kinds(architecture)}"
    if conflict is not None:
        raise KvdiagError(f"{subject.origin} and {files.origin} are different models: {conflict}")
    if settings.dtype in MODEL_DTYPE_BYTES:
        return replace(architecture, dtype=settings.dtype)
    return architecture


def _kinds(architecture: Architecture) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in architecture.kinds.items())
    return f"{architecture.model_type} with {kinds} layers"


def _files(model: str | None, subject: CalibrationSubject, options: FitOptions) -> ModelFiles:
    if model is not None:
        return files_of(model, options)
    if subject.files is not None:
        return subject.files
    named = subject.report.settings.model
    hint = f"; the engine calls it {named[:120]!r}" if named else ""
    raise KvdiagError(f"{subject.origin} does not show its model's config: pass MODEL too, a folder or a Hub id{hint}")


def _chosen(subject: CalibrationSubject, options: FitOptions) -> FitOptions:
    """The options with the reported settings; where the user gave one too, they must agree."""
    settings = subject.report.settings
    changes: dict[str, Any] = {}
    for option, name in _REPORTED_SETTINGS.items():
        reported = getattr(settings, name)
        if reported is None:
            continue
        if (
            _given(option)
            and getattr(options, option) != reported
            and not (option == "kv_dtype" and "auto" in (reported, getattr(options, option)))
        ):
            flag = f"--{option.replace('_', '-')}"
            raise KvdiagError(
                f"{flag} is {getattr(options, option)}, but {subject.origin} reports {reported}: omit {flag}"
            )
        if not (option == "kv_dtype" and reported == "auto"):
            changes[option] = reported
    if settings.prefix_caching is not None:
        changes["no_prefix_caching"] = not settings.prefix_caching
    if settings.is_cpu:
        changes["platform"] = Platform.CPU.value
    return replace(options, **changes)


def _completed(subject: CalibrationSubject, options: FitOptions) -> CalibrationSubject:
    """What the user gives and the engine does not report: the longest request, and the memory fraction."""
    report = subject.report
    settings = report.settings
    if report.context_tokens is None and options.context is not None:
        settings = replace(settings, max_model_len_tokens=options.context)
    if settings.memory_fraction_ratio is None and options.memory_fraction is not None:
        settings = replace(settings, memory_fraction_ratio=options.memory_fraction)
    return replace(subject, report=replace(report, settings=settings))


def _given(option: str) -> bool:
    """Whether the user gave the option: on the command line, in the environment or in the file of settings."""
    context = click.get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source(option)
    return source not in (None, ParameterSource.DEFAULT)


def on_gpu(deployment: Deployment, name: str | None) -> Deployment:
    """The deployment on the GPU of that name, unless --gpu names one."""
    if deployment.compute_capability is not None or name is None:
        return deployment
    return replace(deployment, compute_capability=compute_capability(name))


def _deployment(architecture: Architecture, report: EngineReport, chosen: FitOptions) -> Deployment:
    settings = report.settings
    deployment = deployment_of(architecture, chosen)
    release = settings.release
    scheduling = settings.async_scheduling
    if scheduling is None and release is not None and release < _FIRST_WITH_ASYNC_SCHEDULING:
        scheduling = False
    if report.is_v0:
        # V0 had one block table for all layers.
        deployment = replace(deployment, hybrid_manager=False)
    return replace(deployment, async_scheduling=scheduling)


def _gpu(subject: CalibrationSubject, options: FitOptions) -> tuple[int | None, str | None]:
    """The device's memory and name: as the engine or NVML reports them, else as --gpu says."""
    if subject.report.settings.is_cpu:
        return None, None
    reported = subject.report.total_bytes or subject.gpu_total_bytes
    if options.gpu is None:
        return reported, subject.gpu_name
    given = gpu_bytes(options.gpu)
    if reported is not None and abs(given - reported) > profiles.SAME_GPU_RATIO * given:
        raise KvdiagError(
            f"--gpu {options.gpu} has {format_bytes(given)}, but {subject.origin} reports {format_bytes(reported)}: "
            "pass the GPU that the engine ran on, or omit --gpu"
        )
    return reported or given, gpu_name(options.gpu) or subject.gpu_name


def _expected(
    files: ModelFiles,
    architecture: Architecture,
    deployment: Deployment,
    subject: CalibrationSubject,
    chosen: FitOptions,
    *,
    total: int | None,
    profile: Profile | None,
) -> Expected:
    settings = subject.report.settings
    if settings.host_weights:
        return Expected(why_no_weights="part of the weights stays in host memory", total_bytes=total)
    weights: WeightsSource
    try:
        weights = weights_of(files, architecture, chosen)
        estimate = overheads_of(files, deployment, chosen, graphs=settings.graphs_in_fraction)
    except KvModelError as error:
        # Blocks, tokens and concurrency need neither.
        return Expected(why_no_weights=str(error), total_bytes=total)
    if subject.checkpoint_bytes is not None and not _given("weights") and not files.headers:
        weights = GivenWeights(total_bytes=subject.checkpoint_bytes)
    overheads = estimate if profile is None else profile.overheads
    fraction = chosen.memory_fraction
    scenario = Scenario(
        architecture=architecture,
        deployment=deployment,
        gpu_bytes=total or 1,
        memory_fraction_ratio=settings.fraction_ratio if fraction is None else fraction,
        weights=weights,
        overheads=overheads,
        demand=Demand(context_tokens=1, requests=1),
    )
    planned = total is not None and settings.pool_bytes is None and settings.blocks_override is None
    return Expected(
        weights_bytes=rank_weights(scenario),
        pool_bytes=tuple(budget.pool_bytes for budget in scenario_budgets(scenario)) if planned else None,
        pool_source=overheads.source,
        total_bytes=total,
    )


def _profile(
    architecture: Architecture,
    deployment: Deployment,
    subject: CalibrationSubject,
    expected: Expected,
    key: ProfileQuery | None,
    calibration: Calibration,
) -> tuple[Profile | None, str]:
    """What the engine took besides weights and pool, and a note where no profile is saved."""
    report = subject.report
    settings = report.settings
    if settings.is_cpu:
        return None, "no profile saved: the engine runs on a CPU"
    if settings.pool_bytes is not None or settings.blocks_override is not None:
        return None, "no profile saved: the pool size was set by hand"
    if key is None:
        return None, "no profile saved: the engine does not report its GPU memory; pass --gpu NAME"
    rank = report.deciding_rank
    if rank is not None and rank.pool is not None:
        pool = rank.pool.nominal_bytes
    elif report.num_blocks is not None:
        pool = report.num_blocks * max(deployed_layout(architecture, deployment).bytes_per_block)
    else:
        return None, 'no profile saved: the pool size is not reported ("Available KV cache memory")'
    planned = None if expected.weights_bytes is None else max(expected.weights_bytes)
    if any(
        abs(one.drift_ratio) > ANOTHER_MODEL_RATIO for one in calibration.comparisons if one.figure is not Figure.POOL
    ):
        return None, "no profile saved: the engine's figures differ too much from MODEL's"
    profile = measure(
        report,
        key,
        weights_bytes=planned,
        pool_bytes=pool,
        date=datetime.now(UTC).date().isoformat(),
        source=f"{subject.origin[:480]}{', without graphs' if settings.enforce_eager else ''}",
    )
    if profile is None:
        return None, (
            f"no profile saved: weights and pool are unknown or exceed {format_ratio(settings.fraction_ratio)} of "
            f"{format_bytes(key.gpu_total_bytes)}; check --gpu"
        )
    return profile, ""
