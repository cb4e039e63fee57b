"""`kvdiag fit --engine` for an engine other than vLLM: its pools from its own flags, and whether a demand fits.

In this order: the model, a GGUF file for llama.cpp or a config for every engine; the settings, from the engine's flags
first and from those that `fit` has for all engines; the demand; then the engine's arithmetic in kvdiag/kv/pools, on a
GPU with weights and overheads where --gpu is given, else of the pool alone. Options of vLLM's block manager are errors.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvdiag.commands.fitting import fit_inputs
from kvdiag.commands.fitting.engine_flags import engine_settings
from kvdiag.commands.fitting.fit_options import FitOptions
from kvdiag.commands.fitting.request_length import check_length, sglang_context_tokens
from kvdiag.commands.printing import is_ascii_only, print_json, print_text
from kvdiag.errors import KvdiagError
from kvdiag.kv.calibration.predicted_vs_reported import Interval, exactly
from kvdiag.kv.families.architecture import parse_architecture, text_fields
from kvdiag.kv.families.base import WIDTH_NAMES
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.fit.gpu_catalogue import gpu_bytes, gpu_name
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.fit.scenario import CountedWeights, Scenario, rank_weights
from kvdiag.kv.fit.vllm_flags import VLLM_OPTIONS
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.kv.layout.layers import Architecture, LayerKind
from kvdiag.kv.pools.cell_cache import CellSettings, plan_cells, size_cells
from kvdiag.kv.pools.cell_model import CellModel, cells_of
from kvdiag.kv.pools.engine_plan import POOL_TYPES, EnginePlan, Machine
from kvdiag.kv.pools.gguf_header import GgufHeader
from kvdiag.kv.pools.gguf_layers import cells_of_gguf
from kvdiag.kv.pools.share_plan import plan_share
from kvdiag.kv.pools.share_pools import TGI_BLOCKS, ShareModel, ShareSettings
from kvdiag.kv.pools.static_fraction import plan_tokens, vision_ratio
from kvdiag.kv.pools.token_cells import TokenSettings
from kvdiag.kv.pools.token_pools import TokenModel
from kvdiag.outputs.documents.pool_document import grid_document, pool_document
from kvdiag.outputs.terminal.fit_text import render_grid
from kvdiag.outputs.terminal.pool_text import render_pools
from kvdiag.sources.gguf_file import is_gguf, read_gguf
from kvdiag.sources.model_files import ModelFiles, read_model

EXIT_CODES: Mapping[Outcome | None, int] = {None: 0, Outcome.FITS: 0, Outcome.TIGHT: 1, Outcome.DOES_NOT_FIT: 2}
_DECODING: Mapping[str, Any] = {"architectures": [], "is_causal": True, "use_bidirectional_attention": False}
_ALIKE: Mapping[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_KINDS = ("layer_types", "sliding_window")
_DRAFTING = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"})
_DRAFTS = (5, 4, 8)
_MTP_DRAFTS = (3, 1, 4)
_NGRAM_DRAFTS = (1, 10, 12)
"""Steps, branches and draft tokens by default, of Llama, of models with MTP layers, and without a drafter
(speculative_hook.py::_auto_choose_speculative_params, _handle_ngram)."""


def engine_fit(model: str, options: FitOptions) -> int:
    """Print the plan for an engine other than vLLM, and return the exit code.

    Raises:
        KvdiagError: the model or a flag cannot be used with this engine.
    """
    for name in VLLM_OPTIONS:
        if is_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} does not apply to --engine {options.engine}")
    if options.grid and (options.gpu is None or options.kv_pool_bytes is not None):
        raise click.UsageError(f"--grid needs --gpu with --engine {options.engine}")
    origin, planned, _ = engine_planner(model, options, engine_settings())
    plan = planned(options)
    rows = _grid(planned, options) if options.grid else ()
    if options.output == "json":
        document = pool_document(plan, origin=origin)
        print_json(document | ({"grid": grid_document(rows)} if rows else {}))
    else:
        print_text(render_pools(plan, origin=origin, ascii_only=is_ascii_only()))
        if rows:
            print_text(render_grid(rows))
    return EXIT_CODES[plan.outcome]


def _grid(planned: Callable[[FitOptions], EnginePlan], options: FitOptions) -> tuple[tuple[EnginePlan, ...], ...]:
    """Plans over context x concurrency, one row for each context that the model allows."""
    rows = []
    for context in fit_inputs.GRID_CONTEXTS:
        with suppress(KvdiagError, click.UsageError):
            rows.append(
                tuple(
                    planned(replace(options, context=context, concurrency=requests, request_rate=None))
                    for requests in fit_inputs.GRID_REQUESTS
                )
            )
    return tuple(rows)


def is_given(option: str) -> bool:
    """Whether the user gave the option."""
    context = click.get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source(option)
    return source not in (None, ParameterSource.DEFAULT)


def engine_planner(
    model: str, options: FitOptions, flags: Mapping[str, Any], header: GgufHeader | None = None
) -> tuple[str, Callable[[FitOptions], EnginePlan], Callable[[], tuple[Interval, ...]]]:
    """Where the model is from, what the engine makes of it with its own `flags` and some options, and its weights of
    each stage: none where the engine holds them quantized as neither the model's files nor the options say. A `header`
    is the model's, as the engine listed it, without tensors.
    """
    path = Path(model).expanduser()
    if header is None and path.is_file() and is_gguf(path):
        if options.engine != "llamacpp":
            raise KvdiagError(f"{path} is a GGUF file: pass --engine llamacpp, or a config.json")
        header = read_gguf(path)
    if header is not None:
        total = sum(header.tensor_bytes.values())
        # The token embedding stays on the host unless the output layer is the same tensor.
        embedding = header.tensor_bytes.get("token_embd.weight", 0) if "output.weight" in header.tensor_bytes else 0
        held = cells_of_gguf(header)
        weighed = (exactly(total),) if total else ()
        return model, lambda asked: _cell_plan(held, total - embedding, asked, flags), lambda: weighed
    files = read_model(model, offline=options.offline)
    architecture = fit_inputs.architecture_of(files, options)
    if architecture.is_vllms_alone:
        raise KvdiagError(f"the pools of {architecture.model_type} are modelled for vLLM alone: pass --engine vllm")

    def weights() -> tuple[Interval, ...]:
        source = fit_inputs.weights_of(files, architecture, options)
        plain = isinstance(source, CountedWeights) and not source.quantization.quantizes and "quantization" in flags
        # The config is that of the model before it was made a GGUF file, which is quantized in another way.
        if options.weights == "auto" and (options.engine == "llamacpp" or plain):
            return ()
        groups = data_parallel_groups(flags)[1]
        kept = flags.get("dp_lm_head") if groups > 1 else False
        least = _with_whole_head if kept else _unpadded
        most = _in_engine_file if options.engine == "trtllm" else None if kept is False else _with_whole_head
        ends = (_weights(files, architecture, options, changed) for changed in (least, most))
        attention = max(1, options.tp // groups)
        sizes = zip(*(end(options.tp, options.pp, attention) for end in ends), strict=True)
        return tuple(Interval(nominal=high, low=low, high=high) for low, high in sizes)

    if options.engine == "llamacpp":
        text = text_fields(files.config)
        cells = cells_of(
            architecture,
            hidden_size=text.integer(*WIDTH_NAMES),
            vocabulary=text.integer("vocab_size", "padded_vocab_size", default=0, low=0, high=1 << 26),
        )
        total = 0 if options.gpu is None else _weights(files, architecture, options)(1, 1, 1)[0]
        return files.origin, lambda asked: _noted(_cell_plan(cells, total, asked, flags), files), weights
    plan = _token_plan if options.engine == "sglang" else _share_plan
    limited = _limited(architecture, files, options)

    def planned(asked: FitOptions) -> EnginePlan:
        if asked.from_log is None and asked.calibrate is None:
            check_length(limited, asked.context)
        return _noted(plan(files, limited, asked, flags), files)

    return files.origin, planned, weights


def _noted(plan: EnginePlan, files: ModelFiles) -> EnginePlan:
    return replace(plan, notes=(files.note, *plan.notes)) if files.note else plan


def _limited(architecture: Architecture, files: ModelFiles, options: FitOptions) -> Architecture:
    """The architecture with the longest request that this engine accepts, which it also serves by default."""
    longest = architecture.accepted_context_tokens
    if options.engine == "sglang" and longest is not None:
        longest = sglang_context_tokens(text_fields(files.config))
    return replace(architecture, max_context_tokens=longest, accepted_context_tokens=longest)


def _machine(files: ModelFiles, architecture: Architecture, options: FitOptions) -> Machine | None:
    """The GPU with its weights and overheads; None where only the pool is asked for."""
    if options.gpu is None or options.kv_pool_bytes is not None:
        return None

    def overheads(tensor_parallel: int, tokens: int) -> Overheads:
        deployment = Deployment(tensor_parallel=tensor_parallel, max_num_batched_tokens=tokens)
        return fit_inputs.overheads_of(files, deployment, options)

    return Machine(gpu_bytes(options.gpu), _weights(files, architecture, options), overheads)


def _unpadded(source: CountedWeights) -> CountedWeights:
    """As the checkpoint has them: kernels of other engines than vLLM's may pad experts by less or not at all."""
    return replace(source, quantization=replace(source.quantization, padded_experts=False))


def _with_whole_head(source: CountedWeights) -> CountedWeights:
    """As with SGLang's --enable-dp-lm-head: ranks of attention divide the output layer, as they do the embedding."""
    parts = source.parameters
    return replace(_unpadded(source), parameters=replace(parts, embedding=parts.embedding + parts.head, head=0))


def _in_engine_file(source: CountedWeights) -> CountedWeights:
    """As TensorRT-LLM's C++ runtime has them by default: each rank has the whole embedding (use_parallel_embedding is
    off), and a tied output layer is a copy (use_embedding_sharing is off).
    """
    parts = source.parameters
    apart = replace(parts, embedding=0, head=parts.head or parts.embedding, other=parts.other + parts.embedding)
    return replace(source, parameters=apart)


def _weights(
    files: ModelFiles,
    architecture: Architecture,
    options: FitOptions,
    changed: Callable[[CountedWeights], CountedWeights] | None = None,
) -> Callable[[int, int, int], tuple[int, ...]]:
    """Bytes of each stage; `changed` makes of those counted what the engine holds."""
    source = fit_inputs.weights_of(files, architecture, options)
    if changed is not None and isinstance(source, CountedWeights):
        source = changed(source)

    def weights(tensor_parallel: int, pipeline_parallel: int, attention_ranks: int) -> tuple[int, ...]:
        scenario = Scenario(
            architecture=architecture,
            deployment=Deployment(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel),
            gpu_bytes=1,
            memory_fraction_ratio=1.0,
            weights=source,
            overheads=Overheads(context_bytes=0, activation_bytes=0, graph_bytes=0),
            demand=Demand(context_tokens=1, requests=1),
        )
        return rank_weights(scenario, attention_ranks=attention_ranks)

    return weights


def _settings(kind: type[Any], flags: Mapping[str, Any], **common: Any) -> Any:
    """The engine's settings: `common` ones where they are not None, overridden by the engine's own flags."""
    known = {field.name for field in fields(kind)}
    own = {name: value for name, value in flags.items() if name in known}
    return kind(**{name: value for name, value in common.items() if value is not None} | own)


def _token_plan(
    files: ModelFiles, architecture: Architecture, options: FitOptions, flags: Mapping[str, Any]
) -> EnginePlan:
    text = text_fields(files.config)
    if architecture.model_type in POOL_TYPES["latent"]:
        # SGLang keeps latent rows where vLLM keeps heads (configs/model_config.py).
        architecture = parse_architecture({**files.config, "model_type": "deepseek_v2"}, by_vllm=False)
    if LayerKind.ENCODER_ONLY in architecture.kinds:
        # It keeps the rows of a decoder that encodes, too (EmbeddingGemma).
        architecture = parse_architecture({**files.config, **_DECODING}, by_vllm=False)
    if flags.get("transformers"):
        # Its backend for models without a class of its own knows one kind of layer (models/transformers.py).
        inner = files.config.get("text_config")
        text_config = inner if isinstance(inner, Mapping) else files.config
        alike = {name: value for name, value in text_config.items() if not name.startswith(_KINDS)}
        architecture = parse_architecture({**alike, **_ALIKE})
    architecture = _limited(architecture, files, options)
    classes = Fields(files.config).strings("architectures") or ()
    windows = flags.get("window_pool", True) and not any(one in POOL_TYPES["no_window_pool"] for one in classes)
    draft_layers, draft_tokens, taken = _drafts(files, architecture, options, flags)
    replicas, groups = data_parallel_groups(flags)
    settings = _settings(
        TokenSettings,
        {**flags, "attention_parallel": groups, "window_pool": windows},
        tensor_parallel=options.tp,
        pipeline_parallel=options.pp,
        replicas=replicas,
        page_size=options.block_size,
        kv_dtype=options.kv_dtype,
        mem_fraction_static=options.memory_fraction,
        vision_ratio=_vision_ratio(files),
        context_tokens=options.context,
        chunked_prefill_size=options.max_num_batched_tokens,
        state_dtype=options.mamba_ssm_cache_dtype,
        radix_cache=not options.no_prefix_caching,
        draft_layers=draft_layers,
        draft_tokens=draft_tokens,
        draft_step_tokens=taken,
    )
    model = TokenModel(architecture, settings, config_state_dtype=text.text("mamba_ssm_dtype"))
    demand = fit_inputs.demand_of(
        architecture, options if settings.context_tokens is None else replace(options, context=settings.context_tokens)
    )
    machine = _machine(files, architecture, options)
    return plan_tokens(model, demand, machine=machine, pool_bytes=options.kv_pool_bytes)


def _vision_ratio(files: ModelFiles) -> float | None:
    """Of the model's encoder for images; None without one."""
    encoder = Fields(files.config).child("vision_config")
    if encoder is None:
        return None
    return vision_ratio(encoder.maybe_integer("num_hidden_layers"), encoder.maybe_integer("hidden_size"))


def data_parallel_groups(flags: Mapping[str, Any]) -> tuple[int, int]:
    """SGLang's replicas, and the groups of each for attention (arg_groups/parallel_hook.py)."""
    replicas, groups = flags.get("data_parallel", 1), flags.get("attention_parallel", 1)
    return (1, replicas) if flags.get("dp_attention") and groups == 1 else (replicas, groups)


def _drafts(
    files: ModelFiles, architecture: Architecture, options: FitOptions, flags: Mapping[str, Any]
) -> tuple[int, int | None, int | None]:
    """Layers of the drafter, which are in the pool too, tokens that it drafts, and those that a step takes."""
    algorithm = str(flags.get("speculative_algorithm", "")).upper()
    if algorithm not in (*_DRAFTING, "NGRAM") and not options.num_speculative_tokens:
        return 0, None, None
    drafts = _DRAFTS if architecture.model_type == "llama" and algorithm != "STANDALONE" else _MTP_DRAFTS
    steps, branches, usual = _NGRAM_DRAFTS if algorithm == "NGRAM" else drafts
    tokens = flags.get("draft_tokens") or options.num_speculative_tokens or usual
    taken = max(tokens, flags.get("draft_steps", steps) * flags.get("draft_topk", branches))
    if algorithm == "NGRAM":
        return 0, tokens, taken
    path = flags.get("draft_model")
    if path is not None:
        draft = read_model(str(path), offline=options.offline)
        return fit_inputs.architecture_of(draft, options).depth, tokens, taken
    layers = text_fields(files.config).integer("num_nextn_predict_layers", default=0, low=0, high=64)
    return layers, tokens, taken


def _share_plan(
    files: ModelFiles, architecture: Architecture, options: FitOptions, flags: Mapping[str, Any]
) -> EnginePlan:
    settings = _settings(
        ShareSettings,
        flags,
        engine=options.engine,
        tensor_parallel=options.tp,
        pipeline_parallel=options.pp,
        kv_dtype=options.kv_dtype,
        share=options.memory_fraction,
        block_tokens=TGI_BLOCKS.get(flags.get("attention", "")) if options.block_size is None else options.block_size,
        step_tokens=options.max_num_batched_tokens,
        context_tokens=options.context,
        gpu_name=None if options.gpu is None else gpu_name(options.gpu),
        state_dtype=options.mamba_ssm_cache_dtype or text_fields(files.config).text("mamba_ssm_cache_dtype"),
        vocabulary=text_fields(files.config).integer("vocab_size", "padded_vocab_size", default=0, low=0, high=1 << 26),
    )
    demand = fit_inputs.demand_of(
        architecture, options if settings.context_tokens is None else replace(options, context=settings.context_tokens)
    )
    machine = _machine(files, architecture, options)
    return plan_share(ShareModel(architecture, settings), demand, machine=machine, pool_bytes=options.kv_pool_bytes)


def _cell_plan(model: CellModel, weights: int, options: FitOptions, flags: Mapping[str, Any]) -> EnginePlan:
    if options.kv_pool_bytes is not None:
        raise click.UsageError("--kv-pool-bytes does not apply to --engine llamacpp: its caches follow from -c")
    dtype = None if options.kv_dtype == "auto" else options.kv_dtype
    settings: CellSettings = _settings(CellSettings, flags, type_k=dtype, type_v=dtype)
    asked = options.context is not None or options.concurrency is not None or options.request_rate is not None
    if asked:
        known = Architecture(
            model_type=model.architecture,
            depth=model.depth,
            attention_heads=model.attention_heads,
            layers=(),
            dtype="float16",
            max_context_tokens=model.trained_tokens or None,
        )
        demand = fit_inputs.demand_of(known, options)
        if settings.slots is None and settings.context_size == 0:
            settings = replace(settings, slots=demand.requests)
        if settings.context_size == 0:
            slots = settings.slot_count
            settings = replace(settings, context_size=demand.context_tokens * max(slots, demand.requests))
    else:
        cache = size_cells(model, settings)
        requests = settings.slot_count if cache.streams > 1 else 1
        demand = Demand(context_tokens=cache.slot_tokens, requests=requests)
    return plan_cells(
        model,
        settings,
        demand,
        weights_bytes=weights,
        gpu_bytes=None if options.gpu is None else gpu_bytes(options.gpu),
        gpus=options.tp * options.pp,
    )
