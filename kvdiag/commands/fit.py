"""`kvdiag fit`: will it fit, what is the largest that does, and what to change when it does not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvdiag.commands.show import print_json, print_text
from kvdiag.errors import KvdiagError
from kvdiag.kv.architecture import given_architecture, parse_architecture, text_fields
from kvdiag.kv.capacity import CacheLayout, plan_layout, pool_capacity
from kvdiag.kv.deployment import DEFAULT_BATCHED_TOKENS, Deployment, Platform, deployed_layout
from kvdiag.kv.errors import KvModelError
from kvdiag.kv.estimates import Overheads, architecture_note, generic_overheads, vllm_overheads
from kvdiag.kv.gpus import gpu_bytes, parse_bytes
from kvdiag.kv.layers import Architecture, AttentionLayer
from kvdiag.kv.pages import RequestTerms, StateCacheMode
from kvdiag.kv.parameters import count_parameters
from kvdiag.kv.plan import DEFAULT_MEMORY_FRACTION, Demand, Outcome, Traffic, traffic_from_histogram
from kvdiag.kv.scenario import (
    CheckpointWeights,
    CountedWeights,
    GivenWeights,
    Scenario,
    WeightsSource,
    demand_grid,
    find_levers,
    scenario_plan,
)
from kvdiag.kv.specs import is_spec_document, parse_page_specs
from kvdiag.kv.weights import declared_weight_format, parse_weight_format, read_headers
from kvdiag.outputs.fit_json import capacity_document, fit_document, grid_document
from kvdiag.outputs.fit_text import render_fit, render_grid
from kvdiag.sources.model_files import ModelFiles, catalogue, read_model

EXIT_CODES: Mapping[Outcome, int] = {Outcome.FITS: 0, Outcome.TIGHT: 1, Outcome.DOES_NOT_FIT: 2}
GRID_CONTEXTS = (2_048, 8_192, 32_768, 131_072)
GRID_REQUESTS = (1, 4, 16, 64, 256)
PEAK_QUANTILE_RATIO = 0.99
DEFAULT_CONTEXT_TOKENS = 8_192
LARGE_GPU_BYTES = 70 << 30
HUGE_GPU_BYTES = 160 << 30
BATCHED_TOKENS_LARGE = 8_192
BATCHED_TOKENS_HUGE = 16_384
"""What `vllm serve` batches by default above 70 and 160 GiB (engine/arg_utils.py::EngineArgs.get_batch_defaults)."""


@click.command()
@click.argument("model", required=False)
@click.option("--list", "list_models", is_flag=True, help="List the models known by name.")
@click.option("--gpu", default="h100", show_default=True, help="GPU by name, or its memory: 80GB, 80GiB, bytes.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel GPUs.")
@click.option("--pp", default=1, show_default=True, help="Pipeline stages.")
@click.option("--dcp", default=1, show_default=True, help="Decode context parallel ranks.")
@click.option("--context", type=int, help="Tokens of one request, prompt and output together.")
@click.option("--concurrency", type=int, help="Requests at once.")
@click.option("--kv-dtype", default="auto", show_default=True, help="--kv-cache-dtype of the engine.")
@click.option("--weights", default="auto", show_default=True, help="Format (fp8, awq, ...) or size of the weights.")
@click.option("--memory-fraction", type=float, help=f"Share of the GPU for the engine [{DEFAULT_MEMORY_FRACTION}].")
@click.option("--engine", type=click.Choice(["vllm", "generic"]), default="vllm", show_default=True)
@click.option("--request-rate", type=float, help="Requests a second, instead of --concurrency.")
@click.option("--prompt-tokens", type=float, help="Mean prompt length of that traffic.")
@click.option("--output-tokens", type=float, help="Mean output length of that traffic.")
@click.option("--lengths", type=click.Path(path_type=Path), help="JSON: [[prompt, output, weight], ...] instead.")
@click.option("--seconds-per-token", type=float, default=0.03, show_default=True, help="Seconds per output token.")
@click.option("--seconds-to-first", type=float, default=0.5, show_default=True, help="Seconds to the first token.")
@click.option("--grid", is_flag=True, help="A table over context and concurrency.")
@click.option("--kv-pool-bytes", type=int, help="The capacity of a pool of so many bytes per rank, and nothing else.")
@click.option("--kv-bytes-per-token", type=int, help="Bytes a token takes on one GPU, for unknown architectures.")
@click.option("--block-size", type=int, help="Tokens of a block.")
@click.option("--max-num-batched-tokens", type=int, help="Tokens of one engine step.")
@click.option("--max-in-flight-tokens", type=int, help="Tokens of all steps in flight, instead.")
@click.option("--mamba-cache-mode", type=click.Choice([mode.value for mode in StateCacheMode]), help="State blocks.")
@click.option("--mamba-ssm-cache-dtype", help="Number format of recurrent states, where it is not the model's.")
@click.option("--no-prefix-caching", is_flag=True, help="The engine runs without prefix caching.")
@click.option(
    "--hybrid-kv-cache-manager/--no-hybrid-kv-cache-manager", default=None, help="Whether windows free their blocks."
)
@click.option("--num-speculative-tokens", type=int, default=0, help="Draft tokens; a model's MTP layers are counted.")
@click.option("--platform", type=click.Choice([one.value for one in Platform]), default="cuda", show_default=True)
@click.option("--offline", is_flag=True, help="Do not ask the Hub.")
@click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Form of the result."
)
def command(model: str | None, **options: Any) -> int:
    """Say whether MODEL fits: a folder, a config.json, a Hub id, or a name such as llama_70b.

    \b
    kvdiag fit llama_70b --gpu a100 --tp 4 --context 8192 --concurrency 32
    kvdiag fit Qwen/Qwen3-32B --gpu h100 --request-rate 4 --prompt-tokens 2000 --output-tokens 400
    kvdiag fit ./model --kv-pool-bytes 10737418240 --context 131072 --output json

    Exit codes: 0 fits, 1 fits with less than a tenth of the pool to spare, 2 does not fit, 3 cannot say.
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    if options["list_models"]:
        print_text("\n".join(catalogue().names))
        return 0
    if model is None:
        raise click.UsageError("name a MODEL: a folder, a config.json, a Hub id, or one of --list")
    try:
        files = read_model(model, offline=options["offline"])
        if options["kv_pool_bytes"] is not None:
            return _capacity(files, options)
        return _fit(files, options)
    except KvModelError as error:
        raise KvdiagError(error.message) from error


def _capacity(files: ModelFiles, options: Mapping[str, Any]) -> int:
    """The capacity model alone: a pool's blocks, tokens and concurrency."""
    if is_spec_document(files.config):
        deployment = _deployment(None, options)
        layout = plan_layout(
            parse_page_specs(files.config), hybrid_manager=options["hybrid_kv_cache_manager"] is not False
        )
        mode = options["mamba_cache_mode"]
        terms = RequestTerms(
            max_in_flight_tokens=deployment.in_flight_tokens,
            max_encoder_tokens=deployment.encoder_tokens,
            decode_context_parallel=deployment.decode_context_parallel,
            state_cache_mode=StateCacheMode.NONE if mode is None else StateCacheMode(mode),
        )
        context = DEFAULT_CONTEXT_TOKENS if options["context"] is None else options["context"]
    else:
        architecture = _architecture(files, options)
        deployment = _deployment(architecture, options)
        layout = deployed_layout(architecture, deployment)
        terms = deployment.request_terms(architecture)
        context = _context(architecture, options)
    capacity = pool_capacity(layout, pool_bytes=options["kv_pool_bytes"], context_tokens=context, terms=terms)
    document = capacity_document(layout, capacity, deployment, origin=files.origin)
    if options["output"] == "json":
        print_json(document)
    else:
        print_text("\n".join(_capacity_lines(layout, document)))
    return 0 if capacity.admits_one else EXIT_CODES[Outcome.DOES_NOT_FIT]


def _capacity_lines(layout: CacheLayout, document: Mapping[str, Any]) -> Sequence[str]:
    per_token = document["kv_bytes_per_token"]
    groups = "1 group" if len(layout.groups) == 1 else f"{len(layout.groups)} groups"
    return (
        f"{document['num_blocks']:,} blocks of {document['bytes_per_block']:,} bytes, {groups}",
        f"{document['blocks_per_request']:,} blocks a request, {document['max_concurrency']:.2f} at once",
        f"{document['capacity_tokens']:,} tokens, as the engine counts them",
        "no single bytes per token" if per_token is None else f"{per_token:,} bytes per token on each GPU",
    )


def _fit(files: ModelFiles, options: Mapping[str, Any]) -> int:
    architecture = _architecture(files, options)
    total = gpu_bytes(options["gpu"])
    chosen = dict(options)
    if chosen["max_num_batched_tokens"] is None and chosen["max_in_flight_tokens"] is None:
        chosen["max_num_batched_tokens"] = _batched_tokens(total, options["gpu"])
    deployment = _deployment(architecture, chosen)
    fraction = options["memory_fraction"]
    scenario = Scenario(
        architecture=architecture,
        deployment=deployment,
        gpu_bytes=total,
        memory_fraction_ratio=_fraction(fraction, options["engine"]),
        weights=_weights(files, architecture, options),
        overheads=_overheads(files, deployment, options),
        demand=_demand(architecture, options),
        most_context_tokens=architecture.max_context_tokens,
    )
    plan = scenario_plan(scenario)
    levers = find_levers(scenario, plan) if plan.outcome is not Outcome.FITS else ()
    notes = [
        f"context, activation and graphs: {scenario.overheads.source}",
        *filter(None, [architecture_note(architecture)]),
    ]
    rows = demand_grid(scenario, contexts=GRID_CONTEXTS, concurrencies=GRID_REQUESTS) if options["grid"] else ()
    if options["output"] == "json":
        document = fit_document(scenario, plan, levers, origin=files.origin, notes=notes)
        if rows:
            document["grid"] = grid_document(rows)
        print_json(document)
    else:
        print_text(render_fit(scenario, plan, levers, origin=files.origin, notes=notes))
        if rows:
            print_text(render_grid(rows))
    return EXIT_CODES[plan.outcome]


def _architecture(files: ModelFiles, options: Mapping[str, Any]) -> Architecture:
    per_token = options["kv_bytes_per_token"]
    if per_token is None:
        return parse_architecture(files.config)
    if per_token < 1:
        raise KvdiagError(f"--kv-bytes-per-token is {per_token}; a token takes at least one byte")
    return given_architecture(bytes_per_token=per_token)


def _deployment(architecture: Architecture | None, options: Mapping[str, Any]) -> Deployment:
    if options["max_num_batched_tokens"] is not None and options["max_in_flight_tokens"] is not None:
        raise click.UsageError("give --max-num-batched-tokens or --max-in-flight-tokens, not both")
    given = options["kv_bytes_per_token"] is not None
    mode = options["mamba_cache_mode"]
    drafts = options["num_speculative_tokens"]
    in_flight = options["max_in_flight_tokens"]
    batched = options["max_num_batched_tokens"]
    if batched is None:
        batched = DEFAULT_BATCHED_TOKENS if in_flight is None else in_flight
    block = options["block_size"]
    return Deployment(
        tensor_parallel=options["tp"],
        pipeline_parallel=options["pp"],
        decode_context_parallel=options["dcp"],
        block_size_tokens=16 if given and block is None else block,
        kv_dtype="fp8" if given else options["kv_dtype"],
        state_dtype=None if options["mamba_ssm_cache_dtype"] == "auto" else options["mamba_ssm_cache_dtype"],
        max_num_batched_tokens=batched,
        max_in_flight_tokens=in_flight,
        prefix_caching=not options["no_prefix_caching"],
        state_cache_mode=None if mode is None else StateCacheMode(mode),
        hybrid_manager=options["hybrid_kv_cache_manager"],
        speculative_tokens=drafts,
        draft_layers=architecture.draft_layers if architecture is not None and drafts else (),
        platform=Platform(options["platform"]),
    )


def _batched_tokens(total_bytes: int, name: str) -> int:
    if total_bytes >= HUGE_GPU_BYTES:
        return BATCHED_TOKENS_HUGE
    return (
        BATCHED_TOKENS_LARGE
        if total_bytes >= LARGE_GPU_BYTES and "a100" not in name.lower()
        else DEFAULT_BATCHED_TOKENS
    )


def _fraction(fraction: float | None, engine: str) -> float:
    if fraction is not None:
        return fraction
    return DEFAULT_MEMORY_FRACTION if engine == "vllm" else 1.0


def _weights(files: ModelFiles, architecture: Architecture, options: Mapping[str, Any]) -> WeightsSource:
    """From a size, else from the checkpoint's headers, else counted from the config."""
    asked = options["weights"]
    if asked[:1].isdigit():
        return GivenWeights(total_bytes=parse_bytes(asked, field="weights"))
    weight_format = parse_weight_format(asked)
    if files.headers and weight_format is None:
        kv_heads = [layer.kv_heads for layer in architecture.layers if isinstance(layer, AttentionLayer)]
        tied = text_fields(files.config).flag("tie_word_embeddings", default=False)
        return CheckpointWeights(tensors=read_headers(files.headers), kv_heads=max(kv_heads, default=1), tied=tied)
    if options["kv_bytes_per_token"] is not None:
        raise KvdiagError("weights cannot be counted for an unknown architecture; pass --weights BYTES")
    return CountedWeights(
        parameters=count_parameters(files.config, architecture),
        weight_format=weight_format or declared_weight_format(files.config, dtype=architecture.dtype),
    )


def _overheads(files: ModelFiles, deployment: Deployment, options: Mapping[str, Any]) -> Overheads:
    if options["engine"] == "generic" or options["kv_bytes_per_token"] is not None:
        return generic_overheads()
    text = text_fields(files.config)
    hidden = text.integer("hidden_size", "n_embd", "d_model")
    width = text.integer("intermediate_size", "moe_intermediate_size", "ffn_dim", "decoder_ffn_dim", default=4 * hidden)
    return vllm_overheads(
        hidden_size=hidden,
        feed_forward_size=width,
        vocabulary=text.integer("vocab_size", "padded_vocab_size", high=1 << 26),
        tensor_parallel=deployment.tensor_parallel,
        batched_tokens=deployment.max_num_batched_tokens,
    )


def _context(architecture: Architecture, options: Mapping[str, Any]) -> int:
    asked: int | None = options["context"]
    if asked is not None:
        return asked
    return architecture.max_context_tokens or DEFAULT_CONTEXT_TOKENS


def _demand(architecture: Architecture, options: Mapping[str, Any]) -> Demand:
    """A point, or the requests and lengths that traffic comes to: 99 % of the time not more, each at its longest."""
    traffic = _traffic(options)
    if traffic is None:
        requests = options["concurrency"]
        return Demand(context_tokens=_context(architecture, options), requests=1 if requests is None else requests)
    if options["concurrency"] is not None:
        raise click.UsageError("give --concurrency or --request-rate, not both")
    context = options["context"]
    return Demand(
        context_tokens=traffic.peak_tokens if context is None else context,
        requests=traffic.requests_at(PEAK_QUANTILE_RATIO),
    )


def _traffic(options: Mapping[str, Any]) -> Traffic | None:
    rate = options["request_rate"]
    if rate is None:
        return None
    if options["lengths"] is not None:
        return traffic_from_histogram(
            _lengths(options["lengths"]),
            requests_per_second=rate,
            seconds_per_output_token=options["seconds_per_token"],
            seconds_to_first_token=options["seconds_to_first"],
        )
    if options["prompt_tokens"] is None or options["output_tokens"] is None:
        raise click.UsageError("--request-rate needs --prompt-tokens and --output-tokens, or --lengths")
    return Traffic(
        requests_per_second=rate,
        prompt_tokens=options["prompt_tokens"],
        output_tokens=options["output_tokens"],
        seconds_per_output_token=options["seconds_per_token"],
        seconds_to_first_token=options["seconds_to_first"],
    )


def _lengths(path: Path) -> list[tuple[float, float, float]]:
    try:
        entries = json.loads(path.read_bytes())
        return [(float(prompt), float(output), float(weight)) for prompt, output, weight in entries]
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise KvdiagError(f"{path} is not a JSON list of [prompt tokens, output tokens, weight]") from error
