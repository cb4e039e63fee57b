"""What flags of `vllm serve` besides sizes make of a deployment: drafters, connectors, steps, the environment.

Each follows vLLM 0.32 (config/speculative.py, config/vllm.py, engine/arg_utils.py). A drafter with layers of its own
has them in the pool: its config is read as the model's is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import click

from kvdiag.commands.fitting.fit_options import FitOptions
from kvdiag.commands.fitting.request_length import parsed_object
from kvdiag.commands.fitting.vllm_command import environment, is_on
from kvdiag.errors import KvdiagError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.fit.gpu_catalogue import gpu_bytes
from kvdiag.kv.layout.deployment import DEFAULT_BATCHED_TOKENS, default_batched_tokens
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LatentLayer, Layer, LayerKind, StateLayer
from kvdiag.sources.model_files import ModelFiles, read_model

_LAYERLESS_DRAFTERS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of config/speculative.py whose drafters keep no KV cache."""

_LAYERED_DRAFTERS = ("eagle", "eagle3", "draft_model")
_UNMODELLED_DRAFTS = ("kv_cache_dtype", "num_speculative_tokens_per_batch_size", "parallel_drafting")
_PLAIN_BACKENDS = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"})
"""Attention backends whose blocks and rows are the default ones, for heads of one plain layer kind."""

_HYBRID_CONNECTORS = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleHiddenStatesConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
"""KV connectors that work with the hybrid cache manager (SupportsHMA)."""

_UNMODELLED_CONNECTORS = frozenset({"HiSparseConnector"})
# Requests of a step without --max-num-seqs, on GPUs with small and with large steps.
_REQUESTS, _MANY_REQUESTS = 256, 1_024
# Of a model that denoises, vLLM takes so many as none given, and how many it runs then.
_DENOISED_FROM, _DENOISED_REQUESTS = 128, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Draft tokens of a step, the drafter's layers, and whether those draft one after the other (MTP)."""

    tokens: int = 0
    layers: tuple[Layer, ...] = ()
    modules: bool = True
    files: ModelFiles | None = None
    """The drafter's own, where it is another model."""
    whole: bool = False
    """Whether the drafter has an embedding and an output layer of its own."""


def drafts_of(architecture: Architecture | None, options: FitOptions) -> Drafts:
    """The drafts that the options ask for.

    Raises:
        click.UsageError: the method is missing, unknown or not modelled, or the model has no draft layers.
    """
    given = _speculative(options)
    if given is None:
        tokens = options.num_speculative_tokens
        if tokens > 0 and architecture is not None and not architecture.draft_layers:
            raise click.UsageError(
                "--num-speculative-tokens alone stands for the model's own draft (MTP) layers, and none are known for "
                "this model: pass --speculative-config with a method"
            )
        return Drafts(tokens=tokens, layers=_own_layers(architecture, tokens))
    method, asked = _method(given), given.get("num_speculative_tokens")
    tokens = asked if isinstance(asked, int) and not isinstance(asked, bool) else 0
    if tokens < 1:
        raise click.UsageError('--speculative-config needs "num_speculative_tokens", such as 3')
    if (unmodelled := next((name for name in _UNMODELLED_DRAFTS if given.get(name)), None)) is not None:
        raise click.UsageError(f"--speculative-config with {unmodelled} is not modelled")
    if method == "mtp" or method.endswith("_mtp"):
        if architecture is not None and not architecture.draft_layers:
            raise click.UsageError(
                "--speculative-config names the model's own draft (MTP) layers, and none are known for this model: "
                f"pass one of {', '.join((*_LAYERLESS_DRAFTERS, *_LAYERED_DRAFTERS))}"
            )
        return Drafts(tokens=tokens, layers=_own_layers(architecture, tokens))
    if method in _LAYERLESS_DRAFTERS:
        return Drafts(tokens=tokens)
    if method not in _LAYERED_DRAFTERS:
        known = ", ".join(("mtp", *_LAYERLESS_DRAFTERS, *_LAYERED_DRAFTERS))
        raise click.UsageError(
            f"--speculative-config with method {method[:40]!a} is not modelled, since that drafter's layers share the "
            f"pool: pass one of {known}"
        )
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise click.UsageError(f"--speculative-config with method {method} needs the drafter's model")
    if given.get("draft_tensor_parallel_size") not in (None, options.tp):
        raise click.UsageError(
            "--speculative-config: draft_tensor_parallel_size other than the model's is not modelled"
        )
    files = read_model(model, offline=options.offline)
    layers = parse_architecture(files.config, by_vllm=False).layers
    if any(isinstance(layer, StateLayer) for layer in layers):
        raise click.UsageError("--speculative-config: drafters with recurrent states are not modelled")
    last = 0 if architecture is None else architecture.depth - 1
    # Its layers are on the last pipeline stage, after the model's own.
    placed = tuple(replace(layer, index=last + 1 + layer.index) for layer in layers)
    return Drafts(tokens=tokens, layers=placed, modules=False, files=files, whole=method == "draft_model")


def _own_layers(architecture: Architecture | None, tokens: int) -> tuple[Layer, ...]:
    if architecture is None or not tokens:
        return ()
    each = architecture.layers_per_draft
    return architecture.draft_layers[: None if each is None else each * tokens]


def _speculative(options: FitOptions) -> Mapping[str, Any] | None:
    """--speculative-config with what --spec-method, --spec-model and --spec-tokens say; None without any."""
    short = {
        "method": options.spec_method,
        "model": options.spec_model,
        "num_speculative_tokens": options.spec_tokens,
    }
    named = {name: value for name, value in short.items() if value is not None}
    if options.speculative_config is None and not named:
        return None
    if options.num_speculative_tokens:
        raise click.UsageError("pass --speculative-config or --num-speculative-tokens, not both")
    whole = (
        {} if options.speculative_config is None else parsed_object(options.speculative_config, "speculative-config")
    )
    return {**whole, **named}


def _method(given: Mapping[str, Any]) -> str:
    """The method, or the one that vLLM takes a drafter's name for (SpeculativeConfig.__post_init__)."""
    method, model = given.get("method"), str(given.get("model") or "").lower()
    if method is not None:
        return str(method)
    if model in ("ngram", "[ngram]"):
        return "ngram"
    for mark, name in (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark")):
        if mark in model:
            return name
    known = ", ".join(("mtp", *_LAYERLESS_DRAFTERS, *_LAYERED_DRAFTERS))
    raise click.UsageError(f'--speculative-config names no method: add "method", one of {known}')


def drafter_note(options: FitOptions, *, weighed: bool) -> str:
    """A drafter whose weights are left out of the plan; empty without one, or where they are `weighed`."""
    if weighed:
        return ""
    given = _speculative(options)
    method = "" if given is None else _method(given)
    if method == "medusa":
        return "the weights of the Medusa heads are not counted"
    return "the weights of the drafter are not counted" if method in (*_LAYERED_DRAFTERS, "mlp_speculator") else ""


def batched_tokens(options: FitOptions, context_tokens: int) -> int:
    """The tokens of a step without --max-num-batched-tokens
    (EngineArgs._set_default_max_num_seqs_and_batched_tokens_args).
    """
    gpu = options.gpu
    tokens = DEFAULT_BATCHED_TOKENS if gpu is None else default_batched_tokens(gpu_bytes(gpu), gpu)
    if options.performance_mode == "throughput":
        tokens *= 2
    if options.no_enable_chunked_prefill:
        tokens = max(tokens, context_tokens)
    return tokens if options.max_num_seqs is None else min(tokens, options.max_num_seqs * context_tokens)


def waiting_note(architecture: Architecture, options: FitOptions, requests: int) -> str:
    """That vLLM runs fewer requests at once than are planned; empty where it runs them all
    (EngineArgs.get_batch_defaults, models/config.py::DiffusionGemmaModelForBlockDiffusionConfig).
    """
    most = options.max_num_seqs
    if most is None:
        gpu = options.gpu or ""
        large = bool(gpu) and default_batched_tokens(gpu_bytes(gpu), gpu) > DEFAULT_BATCHED_TOKENS
        most = (_MANY_REQUESTS if large else _REQUESTS) * (2 if options.performance_mode == "throughput" else 1)
    if architecture.denoises and most >= _DENOISED_FROM:
        most = _DENOISED_REQUESTS
    if requests <= most:
        return ""
    needed = min(requests, _DENOISED_FROM - 1) if architecture.denoises else requests
    return f"vLLM runs at most {most} requests at once, and others wait: pass --max-num-seqs {needed}"


def hybrid_manager(architecture: Architecture | None, options: FitOptions) -> bool | None:
    """Whether the hybrid cache manager is on, where a flag, a connector or the environment decides it
    (VllmConfig.__post_init__).
    """
    chosen = options.hybrid_kv_cache_manager
    chunked = architecture is not None and LayerKind.CHUNKED in architecture.kinds
    if chosen is None and chunked and not is_on("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", default=True):
        return False
    if chosen is None and options.kv_offloading_size and options.kv_offloading_backend == "lmcache":
        return False
    if options.kv_transfer_config is None:
        return chosen
    named = _connectors(parsed_object(options.kv_transfer_config, "kv-transfer-config"))
    if (unmodelled := next((one for one in named if one in _UNMODELLED_CONNECTORS), None)) is not None:
        raise click.UsageError(f"--kv-transfer-config with {unmodelled} is not modelled: it moves part of the pool")
    return False if chosen is None and not _HYBRID_CONNECTORS.issuperset(named) else chosen


def _connectors(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The connector's name, or those that a MultiConnector has."""
    name = str(given.get("kv_connector"))
    if name != "MultiConnector":
        return (name,)
    extra = given.get("kv_connector_extra_config")
    listed = extra.get("connectors") if isinstance(extra, Mapping) else None
    children = listed if isinstance(listed, list) else []
    return tuple(str(one.get("kv_connector")) for one in children[:64] if isinstance(one, Mapping)) or ("",)


def as_run(architecture: Architecture, text: Fields, options: FitOptions) -> Architecture:
    """The architecture in the format of --dtype, and as vLLM's environment changes it."""
    if options.dtype not in (None, "auto"):
        architecture = replace(architecture, dtype=str(options.dtype))
    if is_on("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        architecture = replace(architecture, accepted_context_tokens=None)
    if is_on("VLLM_MLA_DISABLE") and architecture.uses_mla:
        architecture = _without_latent(architecture, text)
    return architecture


def _without_latent(architecture: Architecture, text: Fields) -> Architecture:
    """The model with VLLM_MLA_DISABLE=1: K and V of every head, both as long as a query's (DeepseekV2Attention)."""
    plain = all(isinstance(layer, LatentLayer) and layer.indexer_row_bytes is None for layer in architecture.layers)
    if not plain or architecture.depth != len(architecture.layers):
        raise KvdiagError(f"VLLM_MLA_DISABLE=1 with {architecture.model_type} is not modelled: unset it")
    size = text.integer("qk_nope_head_dim") + text.integer("qk_rope_head_dim")

    def heads(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return tuple(
            AttentionLayer(
                index=layer.index,
                kind=LayerKind.FULL,
                kv_heads=architecture.attention_heads,
                head_size=size,
                head_size_v=size,
            )
            for layer in layers
        )

    return replace(architecture, layers=heads(architecture.layers), draft_layers=heads(architecture.draft_layers))


def stage_layers() -> tuple[int, ...] | None:
    """The layers of each pipeline stage by VLLM_PP_LAYER_PARTITION; None without it."""
    text = environment().get("VLLM_PP_LAYER_PARTITION")
    if text is None:
        return None
    try:
        return tuple(int(part[:9]) for part in text[:4096].split(","))
    except ValueError:
        raise KvdiagError(
            f"VLLM_PP_LAYER_PARTITION is {text[:40]!a}: give the layers of each stage, as in 20,12"
        ) from None


def check_flags(architecture: Architecture, config: Mapping[str, object], options: FitOptions) -> None:
    """Refuse flags whose effect on this model is not modelled; click.UsageError."""
    plain = all(isinstance(layer, AttentionLayer) for layer in architecture.layers)
    backend = options.attention_backend
    if backend is not None and not (plain and backend.upper() in _PLAIN_BACKENDS):
        raise click.UsageError(
            f"--attention-backend {backend[:40]} is not modelled for this model: it decides the block size and the "
            "cache's format; leave it out"
        )
    if options.kv_cache_dtype_skip_layers and not plain and not architecture.is_hybrid:
        raise click.UsageError("--kv-cache-dtype-skip-layers is not modelled for latent attention")
    experts = _experts(config)
    if options.data_parallel_size > 1 and experts:
        raise click.UsageError(
            "--data-parallel-size divides experts over the replicas' GPUs, which is not modelled: pass --weights BYTES "
            "for one replica, and no --data-parallel-size"
        )
    if options.enable_expert_parallel and experts % options.tp:
        raise click.UsageError(
            f"--enable-expert-parallel with {experts} experts on {options.tp} GPUs is not modelled: some hold more"
        )


def _experts(config: Mapping[str, object]) -> int:
    """The routed experts of a layer; 0 for a dense model."""
    fields = Fields(config)
    nested = fields.child("text_config") or fields
    for holder in (nested, fields):
        for name in ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"):
            value = holder.raw(name)
            if isinstance(value, int) and value > 1:
                return value
    return 0
