"""`SCENARIOS`: servers and their faults, as data. Engine and GPU simulate them; nothing here is a sample."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any

from kvdiag.sim.gpu import GIB, KIB, MIB, GpuProcess
from kvdiag.sim.model_folder import ModelShape
from kvdiag.sim.scheduler import SchedulerLimits

MODEL_NAME = "drill"
"""The model's name in the API and the metrics."""

THREE_B = ModelShape(layers=32, hidden=2560, intermediate=7680, heads=24, kv_heads=8, head_dim=128, vocab=128256)
"""2.8 billion parameters: 5.2 GiB; 128 KiB of KV cache a token, 2 MiB a block of 16."""


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
    engine: str = "vllm"
    """Whose API, metrics and pool it has (`kvdiag.sim.server.APIS`)."""
    model: ModelShape = THREE_B
    device_bytes: int = 24 * GIB
    driver_reserved_bytes: int = 464 * MIB
    context_bytes: int = 426 * MIB
    """CUDA context of the server's process, outside torch (426 MiB measured on an RTX 6000 Ada, unsloth-zoo#1053)."""
    null_block: bool = True
    """One of the pool's blocks is never handed out."""
    prefix_caching: bool = True
    salts_ignored: bool = False
    """As behind a gateway that drops cache_salt, or in an engine without it."""
    memory_fraction_ratio: float = 0.92
    kv_cache_memory_bytes: int | None = 16 * GIB
    """--kv-cache-memory-bytes; `None`: the pool gets what the memory fraction leaves after a profiling run."""
    kv_element_bytes: int = 2
    """--kv-cache-dtype: 2 as the model's own, 1 with fp8."""
    expandable_segments: bool = False
    """Of torch's allocator: it returns the free pages of a segment that tensors still use a part of."""
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
    gauges_renewed_seconds: float = 0.0
    """Between two renewals of the gauges, on an engine whose timer renews them."""

    @property
    def kv_bytes_per_token_per_layer(self) -> int:
        """Key and value of one token in one layer."""
        return self.model.kv_elements_per_token_per_layer * self.kv_element_bytes


_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB}
_KINDS = {"model": ModelShape, "comb": Comb, "foreign": GpuProcess}


def _value(field: str, written: Any) -> Any:
    """The value of a field in scenarios.json, where sizes are written with their unit: `14 GiB`."""
    match written:
        case dict():
            return _KINDS.get(field, Scenario)(**{name: _value(name, one) for name, one in written.items()})
        case list():
            return tuple(_value(field, one) for one in written)
        case str() if "_bytes" in f"_{field}":
            number, unit = written.split()
            return int(float(number) * _UNITS[unit])
    return written


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        name: _value("", {"name": name, **fields})
        for name, fields in json.loads(resources.files("kvdiag.sim").joinpath("scenarios.json").read_bytes()).items()
    }
)
"""Every scenario by name, in the order shown to users."""
