"""Pools of TensorRT-LLM, TGI and LMDeploy: a share of free memory, against published figures and by hand."""

from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.pools.engine_plan import EnginePlan, Machine
from kvdiag.kv.pools.share_plan import plan_share
from kvdiag.kv.pools.share_pools import ShareModel, ShareSettings
from tests.unit.kv.pools.recorded_engines import config, vectors

GIB = 1 << 30
DEMAND = Demand(context_tokens=4_096, requests=1)
OVERHEADS = Overheads(context_bytes=GIB // 2, activation_bytes=GIB, graph_bytes=GIB // 2)


def plan(engine: str, *, pool_bytes: int | None = None, gpu: int = 0, **settings: Any) -> EnginePlan:
    """The plan for a 7B model with 512 KiB per token."""
    model = ShareModel(parse_architecture(config("Llama-2-7b")), ShareSettings(engine=engine, **settings))
    machine = Machine(gpu, lambda ranks, *_: (13 * GIB // ranks,), lambda *_: OVERHEADS) if gpu else None
    return plan_share(model, DEMAND, machine=machine, pool_bytes=pool_bytes)


def test_published_blocks_round_up() -> None:
    """TensorRT-LLM 0.13 on an A100 of 40 GB: 630.4 blocks were 631 (NVIDIA/TensorRT-LLM#2268)."""
    (row,) = [one for one in vectors("tensorrt-llm", measured=False) if one["id"] == "tr-qwen15-7b"]
    pool = int(row["reported"]["available_gib"] * 0.9 * GIB) + 10 * 2**20

    older = plan("trtllm", pool_bytes=pool, block_tokens=64, version=(0, 13))
    newer = plan("trtllm", pool_bytes=pool, block_tokens=64)

    assert older.pools[0].units == row["reported"]["blocks"]
    assert newer.pools[0].units == row["reported"]["blocks"] - 1


def test_published_bytes() -> None:
    """TensorRT-LLM with Llama-2-7B: 2,072 blocks of 64 tokens are 69,524,783,104 bytes."""
    found = plan("trtllm", pool_bytes=69_524_783_104, block_tokens=64)

    assert (found.pools[0].units, found.capacity_tokens, found.pool_bytes) == (2_072, 132_608, 69_524_783_104)


@pytest.mark.parametrize(
    ("name", "settings", "tokens", "gib"),
    [
        ("Qwen3-0.6B", {}, 643_136, 68.69),
        ("Llama-3.1-8B", {"kv_dtype": "fp8"}, 263_008, 16.05),
        ("Llama-3.1-8B", {"block_tokens": 64}, 220_480, 26.91),
    ],
)
def test_published_tokens(name: str, settings: dict[str, Any], tokens: int, gib: float) -> None:
    """TensorRT-LLM's "Allocated … GiB for max tokens in paged KV cache (…)" in public logs, to the printed digit."""
    model = ShareModel(parse_architecture(config(name)), ShareSettings(engine="trtllm", **settings))
    assert tokens * model.token_bytes[0] / GIB == pytest.approx(gib, abs=0.005)
    assert model.pools(model.bytes_of(tokens))[0].blocks * model.settings.block == tokens


def test_tgi_keeps_block_0_and_a_tenth() -> None:
    """TGI leaves 0.1 of the device free; its capacity counts the block that it keeps."""
    found = plan("tgi", gpu=24 * GIB)

    pool = int(24 * GIB - 13 * GIB - 1.5 * GIB - (1 - 0.9) * 24 * GIB)
    assert found.capacity_tokens == pool // (512 << 10)
    assert found.pools[0].units == found.capacity_tokens - 1


def test_lmdeploy_counts_from_what_is_free() -> None:
    """LMDeploy since 0.2.1 takes its share of what is free, before of the device, and earlier no share."""
    newer = plan("lmdeploy", gpu=24 * GIB, vocabulary=32_000)
    older = plan("lmdeploy", gpu=24 * GIB, vocabulary=32_000, share=0.4, version=(0, 2, 0))

    reserve = (8_192 + 2 * 128) * 32_000 * 2
    assert newer.capacity_tokens == int((24 * GIB - 13.5 * GIB - reserve) * 0.8) // (64 * 512 << 10) * 64
    assert older.capacity_tokens == int(24 * GIB * 0.4) // (64 * 512 << 10) * 64
    with pytest.raises(KvModelError):
        plan("lmdeploy", gpu=24 * GIB, version=(0, 0, 14))


@pytest.mark.parametrize(
    ("gpu_name", "version", "requests"),
    [("l40s", None, 128), ("h100", None, 1_024), ("a100", None, 384), ("a100", (0, 9, 2), 256), (None, None, 128)],
)
def test_lmdeploy_s_requests_by_device(gpu_name: str | None, version: tuple[int, ...] | None, requests: int) -> None:
    """LMDeploy's default batch by the device's name (utils.py::get_max_batch_size of 0.9.2 and 0.16)."""
    assert ShareSettings(engine="lmdeploy", gpu_name=gpu_name, version=version).running == requests


def test_levers_have_the_engine_s_own_names() -> None:
    """What to change is named as on the engine's command line."""
    found = plan("trtllm", gpu=15 * GIB)

    assert found.outcome is Outcome.DOES_NOT_FIT
    assert "--tp_size 2" in [lever.change for lever in found.levers]


@pytest.mark.parametrize("engine", ["tgi", "lmdeploy"])
def test_states_are_refused(engine: str) -> None:
    """A model with recurrent states is an error where the engine's arithmetic for them is unknown, and no advice."""
    with pytest.raises(KvModelError) as refused:
        ShareModel(parse_architecture(config("Qwen3-Next-80B-A3B")), ShareSettings(engine=engine))

    assert refused.value.field == "engine"
    assert "--engine" not in str(refused.value)
