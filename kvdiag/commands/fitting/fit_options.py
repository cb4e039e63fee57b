"""The options of `kvdiag fit`: one field each, with its click option; None where the user gives none."""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

from dataclasses import dataclass
from pathlib import Path

import click

from kvdiag.commands.options.common import (
    ServerAccess,
    Size,
    Tokens,
    collected,
    given_by,
    output_option,
    server_access,
)
from kvdiag.engine_memory import modelled_engines
from kvdiag.kv.fit.gpu_catalogue import MIB
from kvdiag.kv.fit.overheads import GENERIC_ENGINE
from kvdiag.kv.fit.plan import DEFAULT_MEMORY_FRACTION
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.pages import StateCacheMode
from kvdiag.kv.pools.flag_bounds import ENGINE_FLAGS

MODEL_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
"""config/model.py::ModelDType"""


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What a user asks of `kvdiag fit`."""

    list_models: bool = given_by("List the models known by name.", "--list")
    gpu: str | None = given_by("GPU name or memory (80GB, 80GiB); required for a plan.")
    tp: int = given_by("Tensor-parallel size.", "--tp", "-tp", "--tensor-parallel-size", default=1)
    pp: int = given_by("Pipeline-parallel size.", "--pp", "-pp", "--pipeline-parallel-size", default=1)
    dcp: int = given_by("Decode-context-parallel size.", "--dcp", "-dcp", "--decode-context-parallel-size", default=1)
    context: int | None = given_by(
        "Prompt plus output [model's limit]; 32k: 32000, 32K: 32768.", "--context", "--max-model-len", type=Tokens()
    )
    concurrency: int | None = given_by("Concurrent requests [--max-num-seqs, or 1].")
    max_num_seqs: int | None = given_by("Most requests of a step, as vLLM's --max-num-seqs.")
    kv_dtype: str = given_by("KV-cache number format.", "--kv-dtype", "--kv-cache-dtype", default="auto")
    kv_cache_dtype_skip_layers: str | None = given_by("Layers in the model's own format: 0,1 or sliding_window.")
    dtype: str | None = given_by("Number format of the model [the config's].", type=click.Choice(MODEL_DTYPES))
    weights: str = given_by(
        "Weight format (fp8, awq, ...) or total size.", "--weights", "--quantization", "-q", default="auto"
    )
    memory_fraction: float | None = given_by(
        f"GPU memory fraction for the engine [{DEFAULT_MEMORY_FRACTION}].",
        "--memory-fraction",
        "--gpu-memory-utilization",
        "--device-memory-utilization",
    )
    engine: str = given_by(
        "Engine to plan for; generic: a rule of thumb.",
        type=click.Choice([*modelled_engines(), *ENGINE_FLAGS, GENERIC_ENGINE]),
        default=modelled_engines()[0],
    )
    request_rate: float | None = given_by("Derive --concurrency (p99) from requests per second.")
    prompt_tokens: float | None = given_by("Mean prompt length with --request-rate.")
    output_tokens: float | None = given_by("Mean output length with --request-rate.")
    lengths: Path | None = given_by("JSON of lengths: [[prompt, output, share], ...].")
    seconds_per_token: float = given_by("Seconds per output token.", default=0.03)
    seconds_to_first: float = given_by("Seconds to the first token.", default=0.5)
    grid: bool = given_by("Print a table of outcomes by context and concurrency.")
    kv_pool_bytes: int | None = given_by("Compute only the capacity of a pool of this size per rank.", type=Size(MIB))
    kv_cache_memory_bytes: int | None = given_by("KV pool per GPU, in place of the memory fraction.", type=Size())
    kv_bytes_per_token: int | None = given_by("KV bytes per token and GPU, for unknown architectures.", type=Size())
    block_size: int | None = given_by("Tokens per block.")
    max_num_batched_tokens: int | None = given_by("Tokens per engine step.", type=Tokens())
    no_enable_chunked_prefill: bool = given_by("Assume a prompt is one step.")
    performance_mode: str = given_by(
        "Default step size, as vLLM's --performance-mode.",
        type=click.Choice(["balanced", "interactivity", "throughput"]),
        default="balanced",
    )
    async_scheduling: bool | None = given_by(
        "Whether a step is scheduled before the last one ends.", "--async-scheduling/--no-async-scheduling"
    )
    max_in_flight_tokens: int | None = given_by("Tokens of all batches in flight (async, pipeline).")
    mamba_cache_mode: str | None = given_by(
        "Prefix-cache mode of recurrent states (such as Mamba).",
        type=click.Choice([mode.value for mode in StateCacheMode]),
    )
    mamba_cache_dtype: str | None = given_by("Number format of states and convolutions [the model's].")
    mamba_ssm_cache_dtype: str | None = given_by("Number format of recurrent states [the model's].")
    no_prefix_caching: bool = given_by(
        "Assume prefix caching is off.", "--no-prefix-caching", "--no-enable-prefix-caching"
    )
    hybrid_kv_cache_manager: bool | None = given_by(
        "Assume sliding-window layers free old blocks (the default).",
        "--hybrid-kv-cache-manager/--no-hybrid-kv-cache-manager",
        "--no-disable-hybrid-kv-cache-manager/--disable-hybrid-kv-cache-manager",
    )
    disable_sliding_window: bool = given_by("Plan with --disable-sliding-window.")
    hf_overrides: str | None = given_by("JSON object that replaces fields of the model's config.")
    num_speculative_tokens: int = given_by("Draft tokens per step; above 0 adds the MTP layers.", default=0)
    speculative_config: str | None = given_by(
        "JSON as for vLLM, with method and num_speculative_tokens.", "--speculative-config", "-sc"
    )
    spec_method: str | None = given_by("Method of --speculative-config.")
    spec_model: str | None = given_by("Drafter of --speculative-config.")
    spec_tokens: int | None = given_by("Draft tokens of --speculative-config.")
    kv_transfer_config: str | None = given_by("JSON as for vLLM; may turn the hybrid manager off.")
    kv_offloading_size: float | None = given_by("GiB of host memory for KV blocks; no effect on the pool.")
    kv_offloading_backend: str = given_by(
        "Backend of --kv-offloading-size.", type=click.Choice(["native", "lmcache"]), default="native"
    )
    cpu_offload_gb: float = given_by("GiB of weights in host memory, per GPU.", default=0.0)
    enforce_eager: bool = given_by("Assume no CUDA graphs.", "--enforce-eager/--no-enforce-eager")
    attention_backend: str | None = given_by("Attention backend, where it changes nothing.")
    data_parallel_size: int = given_by("Replicas, planned as one.", "--data-parallel-size", "-dp", default=1)
    enable_expert_parallel: bool = given_by(
        "Divide experts, not matrices.", "--enable-expert-parallel/--no-enable-expert-parallel", "-ep"
    )
    enable_lora: bool = given_by("Count the slots of LoRA adapters.", "--enable-lora/--no-enable-lora")
    max_loras: int = given_by("Adapters of a step with --enable-lora.", default=1)
    max_lora_rank: int = given_by("Largest rank of an adapter with --enable-lora.", default=16)
    lora_dtype: str = given_by(
        "Number format of adapters [the model's].", type=click.Choice(["auto", "float16", "bfloat16"]), default="auto"
    )
    num_gpu_blocks_override: int | None = given_by("Number of KV blocks, as vLLM's --num-gpu-blocks-override.")
    platform: str = given_by(
        "Platform that the engine runs on.", type=click.Choice([one.value for one in Platform]), default="cuda"
    )
    calibrate: str | None = given_by("Compare with a running server and save its overheads.", metavar="URL")
    from_log: Path | None = given_by("Compare with an engine's startup log (- for stdin).")
    profile: Path | None = given_by("Overheads that --calibrate or --from-log saved.")
    no_profile: bool = given_by("Use estimates; read and save no profile.")
    access: ServerAccess = given_by(server_access)
    offline: bool = given_by("Do not contact the Hugging Face Hub.")
    output: str = given_by(output_option, default="text")


fit_options = collected(FitOptions, "options")
