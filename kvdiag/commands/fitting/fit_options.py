"""What a user asks of `kvdiag fit`, one typed field for each option of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvdiag.kv.fit.overheads import MODELLED_ENGINE
from kvdiag.kv.layout.deployment import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The options of `kvdiag fit`; None where the user gives none."""

    list_models: bool = False
    gpu: str = "h100"
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    context: int | None = None
    concurrency: int | None = None
    kv_dtype: str = "auto"
    weights: str = "auto"
    memory_fraction: float | None = None
    engine: str = MODELLED_ENGINE
    request_rate: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    lengths: Path | None = None
    seconds_per_token: float = 0.03
    seconds_to_first: float = 0.5
    grid: bool = False
    kv_pool_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    max_in_flight_tokens: int | None = None
    mamba_cache_mode: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    no_prefix_caching: bool = False
    hybrid_kv_cache_manager: bool | None = None
    num_speculative_tokens: int = 0
    platform: str = Platform.CUDA.value
    calibrate: str | None = None
    from_log: Path | None = None
    profile: Path | None = None
    no_profile: bool = False
    api_key: str | None = None
    ca_file: Path | None = None
    insecure: bool = False
    offline: bool = False
    output: str = "text"
