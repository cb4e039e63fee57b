"""`SCENARIOS`: servers and their faults, as data. Engine and GPU simulate them; nothing here is a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvdiag.sim.gpu import GIB, KIB, MIB, GpuProcess
from kvdiag.sim.model_folder import ModelShape
from kvdiag.sim.scheduler import SchedulerLimits

MODEL_NAME = "drill"
"""The model's name in the API and the metrics."""

THREE_B = ModelShape(layers=32, hidden=2560, intermediate=7680, heads=24, kv_heads=8, head_dim=128, vocab=128256)
"""2.8 billion parameters: 5.2 GiB; 128 KiB of KV cache a token, 2 MiB a block of 16."""

TEN_B = ModelShape(layers=36, hidden=5120, intermediate=13824, heads=40, kv_heads=8, head_dim=128, vocab=32000)
"""10 billion parameters: 18.8 GiB; 144 KiB of KV cache a token, 2.25 MiB a block of 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comb:
    """What a loader leaves behind in torch's allocator: one large segment, cut by small tensors that stay.

    Between them are `teeth` holes of `hole_bytes`: reserved, free, and too small for larger requests.
    """

    teeth: int
    hole_bytes: int
    tooth_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(SchedulerLimits):
    """A server and its device. Sizes are what the engine requests; the device decides whether they fit."""

    name: str
    summary: str
    model: ModelShape = THREE_B
    device_bytes: int = 24 * GIB
    driver_reserved_bytes: int = 464 * MIB
    context_bytes: int = 426 * MIB
    """CUDA context of the server's process, outside torch (426 MiB measured on an RTX 6000 Ada, unsloth-zoo#1053)."""
    prefix_caching: bool = True
    salts_ignored: bool = False
    """As behind a gateway that drops cache_salt, or in an engine without it."""
    memory_fraction_ratio: float = 0.92
    kv_cache_memory_bytes: int | None = 16 * GIB
    """--kv-cache-memory-bytes; `None`: the pool gets what the memory fraction leaves after a profiling run."""
    workspace_bytes: int = 640 * MIB
    """Activations of any step, allocated at the first one and kept in the allocator's cache."""
    activation_bytes_per_batched_token: int = 0
    activation_bytes_per_context_token: int = 0
    """Attention workspace for the longest prompt in prefill, in steps of 4096 tokens: no profiling run sees it."""
    weight_copies: int = 1
    comb: Comb | None = None
    foreign: tuple[GpuProcess, ...] = ()
    """Other programs on the same device."""
    lazy_bytes: tuple[int, ...] = ()
    """Outside torch, once each at the first, second, … request: kernels that are loaded on first use."""
    device_bytes_kept_per_request: int = 0
    """Outside torch, at every request, never returned."""
    blocks_kept_per_request: int = 0
    """Blocks of a finished request's table that are never released."""


_ALL = (
    Scenario(name="healthy", summary="Everything that a request takes is released."),
    Scenario(
        name="kv-leak", summary="Each finished request leaves four of its KV blocks behind.", blocks_kept_per_request=4
    ),
    Scenario(
        name="device-leak",
        summary="Each request leaves 6 MiB of device memory behind, outside torch.",
        kv_cache_memory_bytes=14 * GIB,
        device_bytes_kept_per_request=6 * MIB,
    ),
    Scenario(
        name="fragmentation",
        summary="3 GiB of torch's memory is free in holes of 62 MiB: ten requests need 2.75 GiB in one piece.",
        kv_cache_memory_bytes=11 * GIB + 512 * MIB,
        max_batched_tokens=4096,
        activation_bytes_per_batched_token=704 * KIB,
        comb=Comb(teeth=48, hole_bytes=62 * MIB, tooth_bytes=2 * MIB),
    ),
    Scenario(
        name="foreign-memory",
        summary="Another program holds 6 GiB of the device.",
        kv_cache_memory_bytes=10 * GIB,
        foreign=(GpuProcess(pid=4_194_303, name="/usr/bin/python3 train.py", used_bytes=6 * GIB),),
    ),
    Scenario(
        name="duplicate-model",
        summary="The server's process holds the weights twice.",
        kv_cache_memory_bytes=8 * GIB,
        weight_copies=2,
    ),
    Scenario(
        name="concurrency-thrash",
        summary="The model leaves room for about 900 blocks: ten requests of 2K tokens do not fit, and are preempted.",
        model=TEN_B,
        max_model_len_tokens=8192,
        max_batched_tokens=512,
        reserve_full_prompt=False,
        prefix_caching=False,
        kv_cache_memory_bytes=None,
        workspace_bytes=808 * MIB,
    ),
    Scenario(
        name="long-context-oom",
        summary="The prefill of a 16K prompt needs 3 GiB of workspace that the device does not have.",
        kv_cache_memory_bytes=15 * GIB,
        activation_bytes_per_context_token=192 * KIB,
    ),
    Scenario(
        name="warmup",
        summary="The first three requests load kernels, then device memory stays flat: nothing is wrong.",
        kv_cache_memory_bytes=15 * GIB,
        lazy_bytes=(180 * MIB, 120 * MIB, 60 * MIB),
    ),
    Scenario(
        name="salt-ignored",
        summary="cache_salt is dropped: one tenant's prefix cache answers another's request (run --isolation).",
        salts_ignored=True,
    ),
)

SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _ALL})
"""Every scenario by name, in the order shown to users."""
