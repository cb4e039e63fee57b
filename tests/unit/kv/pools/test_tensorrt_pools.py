"""TensorRT-LLM's windows, V and states: against public logs where there are any, else by its source's arithmetic."""

from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import Demand
from kvdiag.kv.pools.engine_plan import EnginePlan, Machine
from kvdiag.kv.pools.share_plan import plan_share
from kvdiag.kv.pools.share_pools import ShareModel, ShareSettings
from tests.unit.kv.pools.recorded_engines import config

GIB = 1 << 30
DEMAND = Demand(context_tokens=4_096, requests=1)
# NVIDIA/TensorRT-LLM 1.3.0rc0, a report on two layers of MiMo-V2-Flash
MIMO = {
    "model_type": "mimo_v2_flash",
    "hidden_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_key_value_heads": 8,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1],
    "vocab_size": 152_576,
    "max_position_embeddings": 262_144,
    "torch_dtype": "bfloat16",
}
# Nemotron-3-Nano: 23 Mamba layers of 6,144 channels x 3 in bfloat16 and 64 heads of 64 x 128 in float32, 6 of attention
STATE_BYTES, ROW_BYTES = 23 * (6_144 * 3 * 2 + 64 * 64 * 128 * 4), 6 * 2 * 128 * 2 * 2


def plan(model: dict[str, Any], *, pool_bytes: int | None = None, gpu: int = 0, **settings: Any) -> EnginePlan:
    """The plan for a model; its weights are 13 GiB, its overheads 2 GiB."""
    overheads = Overheads(context_bytes=GIB // 2, activation_bytes=GIB, graph_bytes=GIB // 2)
    machine = Machine(gpu, lambda ranks, *_: (13 * GIB // ranks,), lambda *_: overheads) if gpu else None
    share = ShareModel(parse_architecture(model), ShareSettings(engine="trtllm", **settings))
    return plan_share(share, DEMAND, machine=machine, pool_bytes=pool_bytes)


@pytest.mark.parametrize(
    ("model", "settings", "tokens", "gib"),
    [
        (MIMO, {}, 6_931_712, 59.50),
        (config("gpt-oss-120b"), {"version": (1, 1, 0)}, 86_720, 5.95),
        (config("Kimi-K2"), {"kv_dtype": "fp8"}, 5_073_376, 166.02),
        (config("Qwen3-8B"), {"kv_dtype": "fp8"}, 46_208, 3.17),
    ],
    ids=["V of 128 as wide as K of 192", "windows keep every token", "latent rows", "fp8"],
)
def test_published_pools(model: dict[str, Any], settings: dict[str, Any], tokens: int, gib: float) -> None:
    """The pools that public logs print ("Allocated … GiB for max tokens in paged KV cache"), to the printed digit."""
    found = plan(model, max_tokens=tokens, **settings)

    assert found.capacity_tokens == tokens
    assert found.pool_bytes / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize(("version", "tokens"), [((1, 1, 0), 86_720), ((1, 2, 0), 86_688), (None, 86_688)])
def test_blocks_round_up_until_1_1(version: tuple[int, ...] | None, tokens: int) -> None:
    """1.1.0rc3 made 86,720 tokens of 86,711 (a public log of gpt-oss-120b on a DGX Spark)."""
    assert plan(config("gpt-oss-120b"), max_tokens=86_711, version=version).capacity_tokens == tokens


def test_windows_divide_the_pool_equally() -> None:
    """Of Gemma 3's 62 layers 52 keep 1,024 tokens; both pools have 30 GiB of 60."""
    found = plan(config("gemma-3-27b"), pool_bytes=60 * GIB, windows=(1_024,) * 5 + (131_072,))

    row = 16 * 128 * 2 * 2
    assert [(pool.layers, pool.units) for pool in found.pools] == [
        (52, 30 * GIB // (52 * row * 32)),
        (10, 30 * GIB // (10 * row * 32)),
    ]
    assert found.capacity_tokens == sum(pool.units for pool in found.pools) * 32
    assert found.max_requests == 30 * GIB // (52 * row * 32) // 33
    again = plan(config("gemma-3-27b"), max_tokens=found.capacity_tokens, windows=(1_024,) * 5 + (131_072,))
    assert again.pool_bytes == pytest.approx(60 * GIB, rel=1e-3)


@pytest.mark.parametrize("windows", [(1_024,), (1_024, 4_096)])
def test_requests_may_be_longer_than_their_windows(windows: tuple[int, ...]) -> None:
    """What has left a window needs no block: the model's context stays the limit of a request."""
    found = plan(config("gemma-3-27b"), pool_bytes=60 * GIB, windows=windows, context_tokens=131_072)

    assert (found.longest_request_tokens, found.outcome) == (131_072, None)


def test_windows_are_cut_where_no_sequence_fits() -> None:
    """A pool below one sequence keeps the small window whole, and of the large one what the rest holds."""
    row = 16 * 128 * 2 * 2
    pool = 1_024 * 62 * row + 4_096 * 10 * row
    found = plan(config("gemma-3-27b"), pool_bytes=pool, windows=(1_024,) * 5 + (131_072,))

    assert found.longest_request_tokens == 1_024 + 4_096


def test_a_pool_for_each_window_is_a_lever() -> None:
    """Where layers have windows of their own, pools by window are offered, and hold more requests."""
    found = plan(config("gemma-3-27b"), gpu=33 * GIB // 2)

    (lever,) = [lever for lever in found.levers if lever.change.startswith("max_attention_window of 1024, ")]
    assert lever.max_requests > found.max_requests


def test_states_beyond_the_gpu_are_a_shortfall() -> None:
    """With the default of 2,048 requests the states alone exceed a GPU; fewer requests are the lever."""
    found = plan(config("Nemotron-3-Nano-30B-A3B"), gpu=80 * GIB, state_dtype="float32")

    assert found.shortfall_bytes > 0
    assert "--max_batch_size 1" in [lever.change for lever in found.levers]


@pytest.mark.parametrize(
    ("version", "pool_bytes"),
    [((1, 2, 1), (65 * GIB - 64 * STATE_BYTES) * 0.9), ((1, 3, 0), 65 * GIB * 0.9 - 64 * STATE_BYTES)],
    ids=["outside the pool", "in the pool"],
)
def test_states_take_a_slot_for_each_request(version: tuple[int, ...], pool_bytes: float) -> None:
    """The states of --max_batch_size requests, which 1.2 allocates before the pool and 1.3 in it."""
    model = config("Nemotron-3-Nano-30B-A3B")
    found = plan(model, gpu=80 * GIB - GIB // 2, version=version, max_requests=64, state_dtype="float32")

    assert (found.pools[1].unit, found.pools[1].units, found.pools[1].bytes) == ("slot", 64, 64 * STATE_BYTES)
    assert found.pools[0].units == int(pool_bytes) // (ROW_BYTES * 32)
    assert found.max_requests == 64


def test_snapshots_of_states_cost_by_the_token() -> None:
    """With mamba_state_cache_interval each so many tokens hold a snapshot."""
    model = config("Nemotron-3-Nano-30B-A3B")
    found = plan(model, pool_bytes=40 * GIB, max_requests=64, state_dtype="float32", state_interval=256)

    token = ROW_BYTES + -(-STATE_BYTES // 256)
    assert found.pools[0].units == (40 * GIB - 64 * STATE_BYTES) // (token * 32)


@pytest.mark.parametrize("windows", [None, (1_024,), (131_072, 262_144)])
def test_one_pool_of_the_newer_manager_has_the_same_blocks(windows: tuple[int, ...] | None) -> None:
    """KVCacheManagerV2 divides nothing where all layers keep as many tokens; a granule may cost a block or two."""
    settings: dict[str, Any] = {"pool_bytes": 60 * GIB, "windows": windows, "context_tokens": 131_072}
    older, newer = (plan(config("gemma-3-27b"), manager_v2=one, **settings) for one in ("false", "true"))

    assert older.pools == newer.pools
    assert "granules" in newer.notes[-1]


def test_the_newer_manager_resumes_requests_below_its_whole_pool() -> None:
    """Its pool for max_tokens holds them in the 0.95 up to which it resumes requests."""
    found = plan(config("Qwen3-8B"), max_tokens=9_500, pool_bytes=GIB * 60, manager_v2="true")

    assert found.capacity_tokens == 10_000 // 32 * 32


def test_other_pools_of_the_newer_manager_are_named() -> None:
    """Which of the two is taken is the model's and the version's choice, unless a flag says so."""
    windows: dict[str, Any] = {"pool_bytes": 60 * GIB, "windows": (1_024,) * 5 + (131_072,)}

    assert any("KV cache manager v2" in note for note in plan(config("gemma-3-27b"), **windows).notes)
    assert not any("v2" in note for note in plan(config("gemma-3-27b"), manager_v2="false", **windows).notes)
    assert not any("v2" in note for note in plan(config("Qwen3-8B"), pool_bytes=GIB).notes)


@pytest.mark.parametrize(
    ("model", "settings", "field"),
    [
        (
            "gemma-3-27b",
            {"pool_bytes": GIB, "windows": (1_024, 131_072), "manager_v2": "true"},
            "use_kv_cache_manager_v2",
        ),
        ("Nemotron-3-Nano-30B-A3B", {"pool_bytes": GIB, "manager_v2": "true"}, "use_kv_cache_manager_v2"),
        ("LFM2-1.2B", {"pool_bytes": GIB}, "engine"),
        ("gemma-3-27b", {"pool_bytes": GIB, "windows": (1_024, 8_192), "version": (1, 1)}, "version"),
        ("Nemotron-3-Nano-30B-A3B", {"max_tokens": 4_096}, "max_tokens"),
        ("gemma-3-27b", {"pool_bytes": GIB, "windows": (0,)}, "windows"),
    ],
)
def test_what_is_not_known_is_refused(model: str, settings: dict[str, Any], field: str) -> None:
    """States that it has no manager for, older rules for windows, and tokens that do not show the states' share."""
    with pytest.raises(KvModelError) as refused:
        plan(config(model), **settings)

    assert refused.value.field == field
