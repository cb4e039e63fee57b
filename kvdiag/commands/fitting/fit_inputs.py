"""Turns the options of `kvdiag fit` into the values that kvdiag/kv calculates with, and refuses those it cannot use.

There is one function for each input, used by plan and calibration, so that both read an option in the same way. The
most direct source comes first: weights from a given size, then from the checkpoint's headers, then counted from the
config; a request's length from --context, then from the model. An option without effect on the answer is an error,
because it would seem to be part of the plan.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from kvdiag.commands.fitting import vllm_settings
from kvdiag.commands.fitting.fit_options import FitOptions
from kvdiag.commands.fitting.profile_file import default_path, read_profiles
from kvdiag.commands.fitting.request_length import parsed_object, with_overrides
from kvdiag.commands.fitting.vllm_command import is_on
from kvdiag.errors import KvdiagError
from kvdiag.files import opened
from kvdiag.kv.bounds import MAX_BYTES, MAX_TOKENS, check_range
from kvdiag.kv.calibration.profiles import Profile, ProfileQuery, find_profile, model_key
from kvdiag.kv.families.architecture import given_architecture, parse_architecture, text_fields
from kvdiag.kv.families.base import WIDTH_NAMES
from kvdiag.kv.fit.gpu_catalogue import MIB, compute_capability, gpu_bytes, gpu_name, parse_bytes
from kvdiag.kv.fit.overheads import GENERIC_ENGINE, Overheads, generic_overheads, vllm_overheads
from kvdiag.kv.fit.plan import Demand, Traffic, traffic_from_histogram
from kvdiag.kv.fit.scenario import CheckpointWeights, CountedWeights, GivenWeights, WeightsSource
from kvdiag.kv.layout.deployment import Deployment, check_kernels
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, CachelessLayer
from kvdiag.kv.layout.pages import StateCacheMode
from kvdiag.kv.pools.flag_bounds import ENGINE_FLAGS
from kvdiag.kv.weights.adapter_slots import MOST_SLOTS, RANKS, AdapterSlots, adapter_slots
from kvdiag.kv.weights.checkpoint import read_headers
from kvdiag.kv.weights.parameters import count_parameters
from kvdiag.kv.weights.quantization import declared_quantization, parse_weight_format, usual_quantization
from kvdiag.sources.bounded_json import decode
from kvdiag.sources.model_files import ModelFiles, read_model

MAX_LENGTHS_BYTES = 16 * 2**20
MAX_LENGTHS_VALUES = 1_000_000
"""Of which a length has four."""

PEAK_QUANTILE_RATIO = 0.99
DEFAULT_CONTEXT_TOKENS = 8_192
MAX_BYTES_PER_TOKEN = 1 << 24
GRAPHS_VARIABLE = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
"""Where it is 0, CUDA graphs are captured outside the memory fraction."""

STATE_DTYPES = ("auto", "float32", "float16", "bfloat16")
"""config/cache.py::MambaDType"""

GRID_CONTEXTS = (2_048, 8_192, 32_768, 131_072)
GRID_REQUESTS = (1, 4, 16, 64, 256)


def files_of(model: str, options: FitOptions) -> ModelFiles:
    """The model's files, with the config as --hf-overrides changes it."""
    files = read_model(model, offline=options.offline)
    if options.hf_overrides is None:
        return files
    return replace(files, config=with_overrides(files.config, parsed_object(options.hf_overrides, "hf-overrides")))


def architecture_of(files: ModelFiles, options: FitOptions) -> Architecture:
    """The model's layers, or one layer of --kv-bytes-per-token."""
    per_token = options.kv_bytes_per_token
    if per_token is None:
        windows = not options.disable_sliding_window
        by_vllm = options.engine not in ENGINE_FLAGS
        architecture = parse_architecture(files.config, beside=files.limits, sliding_window=windows, by_vllm=by_vllm)
        architecture = architecture if windows else architecture.without_windows()
        return vllm_settings.as_run(architecture, text_fields(files.config), options) if by_vllm else architecture
    if not 1 <= per_token <= MAX_BYTES_PER_TOKEN:
        raise KvdiagError(f"--kv-bytes-per-token is {per_token:,}: it must be between 1 and {MAX_BYTES_PER_TOKEN:,}")
    return given_architecture(bytes_per_token=per_token)


def check_options(options: FitOptions) -> None:
    """Refuse options that no part of the answer would use.

    Raises:
        click.UsageError: options exclude one another, or name what does not exist.
    """
    if options.grid and options.kv_pool_bytes is not None:
        raise click.UsageError("pass --grid or --kv-pool-bytes, not both")
    if options.num_gpu_blocks_override is not None and options.kv_pool_bytes is not None:
        raise click.UsageError("pass --num-gpu-blocks-override or --kv-pool-bytes, not both")
    if options.kv_cache_memory_bytes is not None:
        for name in ("num_gpu_blocks_override", "kv_pool_bytes"):
            if getattr(options, name) is not None:
                raise click.UsageError(f"pass --kv-cache-memory-bytes or --{name.replace('_', '-')}, not both")
    if not 0 <= options.cpu_offload_gb <= MAX_BYTES >> 30:
        raise click.UsageError(f"--cpu-offload-gb is {options.cpu_offload_gb:g}: it must be 0 or more")
    for name in ("data_parallel_size", "max_num_seqs", "spec_tokens"):
        check_range(name, 1 if (value := getattr(options, name)) is None else value, 1, MAX_TOKENS)
    if options.kv_bytes_per_token is not None and options.kv_dtype != "auto":
        raise click.UsageError("pass --kv-dtype or --kv-bytes-per-token, not both")
    for name in ("mamba_ssm_cache_dtype", "mamba_cache_dtype"):
        state_dtype = getattr(options, name)
        if state_dtype is not None and state_dtype not in STATE_DTYPES:
            raise click.UsageError(
                f"unknown --{name.replace('_', '-')} {state_dtype[:40]!r}: pass one of {', '.join(STATE_DTYPES)}"
            )


def check_settings(
    architecture: Architecture, deployment: Deployment, options: FitOptions, config: Mapping[str, object]
) -> None:
    """Refuse settings that this model has no use for, or that no kernel takes.

    Raises:
        click.UsageError: an option is about layers that the model does not have.
        KvModelError: no kernel takes the cache's format or block size.
    """
    if options.kv_bytes_per_token is None:
        if options.engine != GENERIC_ENGINE:
            check_kernels(architecture, deployment)
        vllm_settings.check_flags(architecture, config, options)
    if options.mamba_ssm_cache_dtype not in (None, "auto") and not architecture.is_hybrid:
        raise click.UsageError("--mamba-ssm-cache-dtype does not apply: this model has no recurrent states")
    if options.grid and all(isinstance(layer, CachelessLayer) for layer in architecture.layers):
        raise click.UsageError("--grid does not apply: this model has no KV cache")


def deployment_of(architecture: Architecture | None, options: FitOptions) -> Deployment:
    """How the options say the model is served."""
    if options.max_num_batched_tokens is not None and options.max_in_flight_tokens is not None:
        raise click.UsageError("pass --max-num-batched-tokens or --max-in-flight-tokens, not both")
    given = options.kv_bytes_per_token is not None
    mode = options.mamba_cache_mode
    drafts = vllm_settings.drafts_of(architecture, options)
    in_flight, batched = options.max_in_flight_tokens, options.max_num_batched_tokens
    if batched is None:
        context = context_of(architecture, options)
        batched = vllm_settings.batched_tokens(options, context) if in_flight is None else in_flight
    return Deployment(
        tensor_parallel=options.tp,
        pipeline_parallel=options.pp,
        decode_context_parallel=options.dcp,
        block_size_tokens=16 if given and options.block_size is None else options.block_size,
        kv_dtype="fp8" if given else options.kv_dtype,
        skip_layers=frozenset(filter(None, (options.kv_cache_dtype_skip_layers or "").replace(" ", ",").split(","))),
        state_dtype=_state_dtype(options),
        conv_dtype=None if options.mamba_cache_dtype == "auto" else options.mamba_cache_dtype,
        max_num_batched_tokens=batched,
        max_in_flight_tokens=in_flight,
        async_scheduling=options.async_scheduling,
        prefix_caching=not options.no_prefix_caching,
        state_cache_mode=None if mode is None else StateCacheMode(mode),
        hybrid_manager=vllm_settings.hybrid_manager(architecture, options),
        speculative_tokens=drafts.tokens,
        draft_layers=drafts.layers,
        draft_modules=drafts.modules,
        stage_layers=vllm_settings.stage_layers(),
        blocks_override=options.num_gpu_blocks_override,
        platform=Platform(options.platform),
        compute_capability=None if options.gpu is None else compute_capability(options.gpu),
    )


def _state_dtype(options: FitOptions) -> str | None:
    """The format of recurrent states: its own, else that of all states (MambaStateDtypeCalculator)."""
    asked = [one for one in (options.mamba_ssm_cache_dtype, options.mamba_cache_dtype) if one not in (None, "auto")]
    return asked[0] if asked else None


def weights_of(files: ModelFiles, architecture: Architecture, options: FitOptions) -> WeightsSource:
    """From a size, else from the checkpoint's headers, else counted from the config."""
    if options.weights[:1].isdigit():
        return GivenWeights(total_bytes=parse_bytes(options.weights, field="weights", least=MIB))
    weight_format = parse_weight_format(options.weights)
    if files.headers and weight_format is None:
        return _stored(files, architecture)
    if options.kv_bytes_per_token is not None:
        raise KvdiagError("the weights of an unknown architecture cannot be computed: pass --weights BYTES")
    return CountedWeights(
        parameters=count_parameters(files.config, architecture),
        quantization=declared_quantization(files.config)
        if weight_format is None
        else usual_quantization(weight_format),
    )


def _stored(files: ModelFiles, architecture: Architecture) -> CheckpointWeights:
    kv_heads = [layer.kv_heads for layer in architecture.layers if isinstance(layer, AttentionLayer)]
    tied = text_fields(files.config).flag("tie_word_embeddings", default=False)
    return CheckpointWeights(tensors=read_headers(files.headers), kv_heads=max(kv_heads, default=1), tied=tied)


def drafter_weights(architecture: Architecture, options: FitOptions) -> WeightsSource | None:
    """The weights of a drafter that is another model. Of one that shares the model's embedding or output layer, only
    its checkpoint says which it has of its own (v1/spec_decode/llm_base_proposer.py); `None` without.
    """
    drafts = vllm_settings.drafts_of(architecture, options)
    if drafts.files is None:
        return None
    own = parse_architecture(drafts.files.config, by_vllm=False)
    if drafts.files.headers:
        return _stored(drafts.files, own)
    if not drafts.whole:
        return None
    return CountedWeights(
        parameters=count_parameters(drafts.files.config, own),
        quantization=declared_quantization(drafts.files.config),
    )


def adapters_of(files: ModelFiles, architecture: Architecture, options: FitOptions) -> AdapterSlots | None:
    """The slots of LoRA adapters; `None` without --enable-lora."""
    if not options.enable_lora:
        return None
    check_range("max_loras", options.max_loras, 1, MOST_SLOTS)
    if options.max_lora_rank not in RANKS:
        raise click.UsageError(f"--max-lora-rank is {options.max_lora_rank}: pass one of {', '.join(map(str, RANKS))}")
    return adapter_slots(
        files.config,
        architecture,
        count=options.max_loras,
        rank=options.max_lora_rank,
        dtype=options.lora_dtype,
    )


def overheads_of(files: ModelFiles, deployment: Deployment, options: FitOptions, *, graphs: bool = True) -> Overheads:
    """The estimate of context, activation and graphs; `graphs` where the engine keeps room for them."""
    if options.engine == GENERIC_ENGINE or options.kv_bytes_per_token is not None:
        return generic_overheads()
    text = text_fields(files.config)
    graphs = graphs and not options.enforce_eager and is_on(GRAPHS_VARIABLE, default=True)
    hidden = text.integer(*WIDTH_NAMES)
    width = text.integer("intermediate_size", "moe_intermediate_size", "ffn_dim", "decoder_ffn_dim", default=4 * hidden)
    return vllm_overheads(
        hidden_size=hidden,
        feed_forward_size=width,
        vocabulary=text.integer("vocab_size", "padded_vocab_size", high=1 << 26),
        tensor_parallel=deployment.tensor_parallel,
        batched_tokens=deployment.max_num_batched_tokens,
        graphs=graphs,
        whole_context=options.engine in ENGINE_FLAGS,
    )


def context_of(architecture: Architecture | None, options: FitOptions) -> int:
    """The tokens of one request: as --context says, else the longest that the model supports."""
    if options.context is not None:
        return options.context
    longest = None if architecture is None else architecture.max_context_tokens
    return longest or DEFAULT_CONTEXT_TOKENS


def demand_of(architecture: Architecture, options: FitOptions) -> Demand:
    """A point, or the requests and lengths that traffic comes to: 99 % of the time not more, each at its longest."""
    traffic = _traffic(options)
    if traffic is None:
        requests = options.max_num_seqs if options.concurrency is None else options.concurrency
        return Demand(context_tokens=context_of(architecture, options), requests=1 if requests is None else requests)
    if options.concurrency is not None:
        raise click.UsageError("pass --concurrency or --request-rate, not both")
    context = options.context
    return Demand(
        context_tokens=traffic.peak_tokens if context is None else context,
        requests=traffic.requests_at(PEAK_QUANTILE_RATIO),
    )


def _traffic(options: FitOptions) -> Traffic | None:
    rate = options.request_rate
    if rate is None:
        for name in ("prompt_tokens", "output_tokens", "lengths"):
            if getattr(options, name) is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --request-rate")
        return None
    if options.lengths is not None:
        return traffic_from_histogram(
            _lengths(options.lengths),
            requests_per_second=rate,
            seconds_per_output_token=options.seconds_per_token,
            seconds_to_first_token=options.seconds_to_first,
        )
    if options.prompt_tokens is None or options.output_tokens is None:
        raise click.UsageError("--request-rate needs --prompt-tokens and --output-tokens, or --lengths")
    return Traffic(
        requests_per_second=rate,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        seconds_per_output_token=options.seconds_per_token,
        seconds_to_first_token=options.seconds_to_first,
    )


def _lengths(path: Path) -> list[tuple[float, float, float]]:
    try:
        with opened(path) as file:
            content = file.read(MAX_LENGTHS_BYTES + 1)
        if len(content) > MAX_LENGTHS_BYTES:
            raise KvdiagError(
                f"{path} is larger than {MAX_LENGTHS_BYTES >> 20} MiB: summarise the requests in a histogram"
            )
        entries = decode(content, max_values=MAX_LENGTHS_VALUES)
        return [(float(prompt), float(output), float(weight)) for prompt, output, weight in entries]
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise KvdiagError(f"{path} is not a JSON list of [prompt tokens, output tokens, weight]") from error


def profile_of(
    files: ModelFiles, architecture: Architecture, deployment: Deployment, options: FitOptions, gpu: str
) -> Profile | None:
    """The measured profile for this model on this GPU, where there is one, unless --no-profile.

    Raises:
        KvdiagError: the file of profiles is there and cannot be used.
    """
    _, known = known_profiles(options)
    if not known or options.engine == GENERIC_ENGINE or options.kv_bytes_per_token is not None:
        return None
    query = ProfileQuery(
        gpu_total_bytes=gpu_bytes(gpu),
        gpu_name=gpu_name(gpu),
        model=model_key(files.config, architecture, name=files.origin),
        tensor_parallel=deployment.tensor_parallel,
        pipeline_parallel=deployment.pipeline_parallel,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    return find_profile(known, query)


def known_profiles(options: FitOptions) -> tuple[Path | None, tuple[Profile, ...]]:
    """The file of --profile or the default one, and its profiles; neither with --no-profile."""
    if options.no_profile:
        if options.profile is not None:
            raise click.UsageError("pass --profile or --no-profile, not both")
        return None, ()
    path = options.profile or default_path()
    required = options.profile is not None and options.calibrate is None and options.from_log is None
    return path, () if path is None else read_profiles(path, required=required)
