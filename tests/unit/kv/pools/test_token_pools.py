"""SGLang's pools, against starts of the real scheduler (0.5.23 on a CPU) and published logs."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.dtypes import MODEL_DTYPE_BYTES
from kvdiag.kv.pools.token_cells import TokenSettings
from kvdiag.kv.pools.token_pools import GIB, TokenModel
from tests.unit.kv.pools.recorded_engines import config, settings_of, sglang_model, vectors

ROWS = [row for row in vectors("sglang", measured=True) if row["reported"]]
LIMITED = [row for row in ROWS if "--max-total-tokens" in row["flags"]]
BY_FRACTION = [row for row in ROWS if row not in LIMITED]
PRINTED_GIB = 0.01


def ids(rows: list[dict[str, Any]]) -> list[str]:
    """Their names in test reports."""
    return [row["id"] for row in rows]


@pytest.mark.parametrize("row", LIMITED, ids=ids(LIMITED))
def test_a_limited_pool(row: dict[str, Any]) -> None:
    """With --max-total-tokens every rank's tokens, window tokens, longest prompt and requests, to the token."""
    model = sglang_model(row["model_config"], **settings_of("sglang", row["flags"]))
    figures = row["figures"]

    pools = model.pools_of(None)

    for rank in row["reported"]:
        assert rank == {
            "max_total_num_tokens": pools.tokens,
            "max_req_input_len": pools.longest_input_tokens,
        }
    assert pools.window_tokens == figures.get("swa_tokens")
    assert pools.max_running_requests == figures["max_running_requests"]
    if pools.state_slots is not None:
        assert pools.state_slots == figures["mamba_slots"]


@pytest.mark.parametrize("row", BY_FRACTION, ids=ids(BY_FRACTION))
def test_a_pool_by_fraction(row: dict[str, Any]) -> None:
    """The printed sizes are those of the reported tokens, and a hybrid's slots follow from the memory of both pools.

    The memory that a fraction is of cannot be compared: on a CPU it is the machine's, and moves while a server starts.
    """
    tokens = row["reported"][0]["max_total_num_tokens"]
    model = sglang_model(row["model_config"], **settings_of("sglang", row["flags"]))
    (cell,), figures = model.cells, row["figures"]
    k_share = k_bytes(row["model_config"], model) / cell.full_bytes

    assert figures["k_gib"] == pytest.approx((tokens + 1) * cell.full_bytes * k_share / GIB, abs=PRINTED_GIB)
    if cell.state_layers:
        slots = figures["mamba_slots"]
        budget = (tokens * cell.full_bytes + (slots + 1) * cell.state_bytes) / GIB
        pools = model.pools_of(budget + 1e-9)
        assert pools.state_slots == pytest.approx(slots, abs=1)
        assert pools.tokens == pytest.approx(tokens, rel=1e-3)
    if "swa_tokens" in figures:
        limited = TokenModel(
            parse_architecture(row["model_config"]), replace(model.settings, max_total_tokens=tokens)
        ).pools_of(None)
        assert limited.window_tokens == figures["swa_tokens"]


def k_bytes(fields: dict[str, Any], model: TokenModel) -> float:
    """The bytes of K in a token's full layers."""
    value = fields.get("v_head_dim", fields["head_dim"])
    share: float = fields["head_dim"] / (fields["head_dim"] + value)
    return model.cells[0].full_bytes * share


@pytest.mark.parametrize(
    ("name", "settings", "bytes_per_token"),
    [
        ("sg-glm5-tp8-fp8", {"kv_dtype": "fp8_e4m3", "tensor_parallel": 8}, 61_464),
        ("sg-dsv3-fp8-524288", {"kv_dtype": "fp8_e4m3", "tensor_parallel": 8, "attention_parallel": 8}, 35_136),
        ("sg-dsr1-tp16", {"tensor_parallel": 16}, 70_272),
        ("sg-llama31-8b", {}, 131_072),
    ],
)
def test_a_published_cell(name: str, settings: dict[str, Any], bytes_per_token: int) -> None:
    """The bytes per token that reproduce the printed sizes: latent rows are whole on every rank."""
    models = {
        "sg-glm5-tp8-fp8": {**config("DeepSeek-V3.2-Exp"), "num_hidden_layers": 78},
        "sg-dsv3-fp8-524288": config("DeepSeek-V3"),
        "sg-dsr1-tp16": config("DeepSeek-V3"),
        "sg-llama31-8b": config("Llama-3.1-8B"),
    }
    (row,) = [one for one in vectors("sglang", measured=False) if one["id"] == name]
    reported = row["reported"]

    (cell,) = sglang_model(models[name], **settings).cells

    assert cell.full_bytes == bytes_per_token
    sizes = [reported[size] for size in ("kv_gib", "k_gib", "v_gib") if size in reported]
    if sizes:
        assert sum(sizes) == pytest.approx(reported["tokens"] * cell.full_bytes / GIB, abs=PRINTED_GIB)


def test_shared_indexers_leave_the_rows_alike() -> None:
    """Of 61 layers 16 have an indexer; each has a row with its scales (calculate_mla_kv_cache_dim)."""
    shared = {**config("DeepSeek-V3.2-Exp"), "index_topk_freq": 4}

    (cell,) = sglang_model(shared, kv_dtype="fp8_e4m3", tensor_parallel=8).cells

    assert cell.full_bytes == 61 * 656 + 16 * 132


@pytest.mark.parametrize(
    ("name", "settings", "tokens", "gib"),
    [
        # sgl-project/sglang#11309: 8 B200, data-parallel attention.
        ("DeepSeek-V3.2-Exp", {"kv_dtype": "fp8_e4m3", "tensor_parallel": 8, "attention_parallel": 8}, 975_424, 43.67),
        # A startup banner of 2026-09 with 48 state slots: 19.98 GB each of K and V.
        ("Nemotron-Nano-9B-v2", {"radix_cache": False, "max_running_requests": 48}, 2_618_868, 39.96),
        # sgl-project/sglang#18263: 76.44 GB each of K and V on one MI300.
        ("Qwen3-30B-A3B", {}, 1_669_816, 152.88),
        # A startup log of 0.5.17 of a model of this shape: 5.22 GB each.
        ("Qwen3.6-27B", {"state_dtype": "bfloat16"}, 171_008, 10.44),
    ],
)
def test_a_published_pool(name: str, settings: dict[str, Any], tokens: int, gib: float) -> None:
    """Printed tokens and bytes of logs that no constant was chosen by: a page of padding is in the bytes."""
    model = sglang_model(config(name), **settings)
    (cell,) = set(model.cells)
    assert (tokens + model.page) * cell.full_bytes / GIB == pytest.approx(gib, abs=2 * PRINTED_GIB)


def test_published_slots() -> None:
    """Nemotron Nano 9B v2: 48 slots and one of padding are 0.09 GB of convolutions and 6.46 GB of states."""
    (cell,) = sglang_model(config("Nemotron-Nano-9B-v2"), radix_cache=False, max_running_requests=48).cells
    assert 49 * cell.state_bytes / GIB == pytest.approx(0.09 + 6.46, abs=2 * PRINTED_GIB)


def test_published_slots_of_half_precision() -> None:
    """43 slots and one of padding in bfloat16 (0.5.17): 0.12 GB of convolutions and 3.09 GB of states."""
    (cell,) = sglang_model(config("Qwen3.6-27B"), state_dtype="bfloat16").cells
    assert 44 * cell.state_bytes / GIB == pytest.approx(0.12 + 3.09, abs=2 * PRINTED_GIB)


def test_published_states() -> None:
    """Qwen3.5-9B on two ranks: 186 slots and one of padding, states to KV as 0.9 to 1."""
    (row,) = [one for one in vectors("sglang", measured=False) if one["id"] == "sg-qwen35-9b-tp2"]
    fields = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262_144,
    }
    model = sglang_model(fields, tensor_parallel=2)
    (cell,), derived, reported = model.cells, row["derivation"], row["reported"]

    budget = (reported["tokens"] * cell.full_bytes + derived["slots"] * cell.state_bytes) / GIB
    pools = model.pools_of(budget)

    assert cell.full_bytes == 2 * derived["k_bytes_per_token"]
    assert cell.state_bytes == derived["ssm_bytes_per_slot"] + derived["conv_bytes_per_slot"]
    assert pools.state_slots == reported["max_mamba_cache_size"]


def test_published_windows() -> None:
    """Gemma-4-26B with pages of 256: 67,584 full and 54,016 window tokens."""
    (row,) = [one for one in vectors("sglang", measured=False) if one["id"] == "sg-gemma4-26b-diffusion"]
    model = sglang_model(config("gemma-4-26b-a4b"), page_size=256, max_total_tokens=67_584 + 255)

    pools, (cell,) = model.pools_of(None), model.cells

    assert (pools.tokens, pools.window_tokens) == (row["reported"]["full_tokens"], row["reported"]["swa_tokens"])
    assert cell.full_bytes == 2 * row["derivation"]["full_k_bytes_per_token"]
    assert cell.window_bytes == 2 * row["derivation"]["swa_k_bytes_per_token"]


def test_a_drafter_takes_its_share() -> None:
    """Layers of a drafter are in the cell, one layer of 32 as large as each of the model's."""
    plain = sglang_model(config("Llama-3.1-8B")).pools_of(10.0).tokens
    drafted = sglang_model(config("Llama-3.1-8B"), draft_layers=1, draft_tokens=4).pools_of(10.0)

    assert drafted.tokens == plain * 32 // 33
    assert drafted.max_running_requests == 48


def test_stages_are_bounded_by_the_largest() -> None:
    """Three stages of 32 layers have 10, 11 and 11: eleven decide."""
    (full,) = sglang_model(config("Llama-3.1-8B")).cells
    model = sglang_model(config("Llama-3.1-8B"), pipeline_parallel=3)

    assert [cell.full_layers for cell in model.cells] == [10, 11, 11]
    assert model.pools_of(10.0).tokens == 10 * GIB // (full.full_bytes * 11 // 32)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"mem_fraction_static": 1.5}, "mem_fraction_static"),
        ({"window_ratio": 0.0}, "window_ratio"),
        ({"tensor_parallel": 2, "attention_parallel": 3}, "attention_parallel"),
        ({"page_size": -1}, "page_size"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], field: str) -> None:
    """An impossible flag is an error that names it."""
    with pytest.raises(KvModelError) as refused:
        TokenSettings(**settings)

    assert refused.value.field == field


def test_a_window_pool_that_is_too_small() -> None:
    """SGLang refuses a window pool that holds no request, and so does the plan."""
    model = sglang_model(config("gpt-oss-120b"), max_total_tokens=100)

    with pytest.raises(KvModelError) as refused:
        model.pools_of(None)

    assert refused.value.field == "swa_full_tokens_ratio"


@pytest.mark.parametrize("dtype", ["fp4_e2m1", "float4_e2m1fn_x2", "nvfp4", "fp4_mx_block16"])
def test_dtypes_are_known(dtype: str) -> None:
    """A model's own dtype is the cache's where none is asked for."""
    assert "bfloat16" in MODEL_DTYPE_BYTES
    assert sglang_model(config("Llama-3.1-8B"), kv_dtype=dtype).cells[0].full_bytes == 131_072 // 4 + 131_072 // 32


@pytest.mark.parametrize(("asked", "page"), [(None, 128), (16, 16)])
def test_ascend_s_devices_have_pages_of_128(asked: int | None, page: int) -> None:
    """hardware_backend/npu/utils.py sets the page where no flag does."""
    model = sglang_model(config("Llama-3.1-8B"), backend="ascend", page_size=asked, max_total_tokens=4096)
    assert page == model.page
