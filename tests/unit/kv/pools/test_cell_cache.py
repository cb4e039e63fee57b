"""llama.cpp's caches, against starts of the real engine (b11549 on a CPU): every cell and every printed digit."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.pools.cell_cache import CellCache, CellSettings, plan_cells, size_cells
from kvdiag.kv.pools.cell_model import CellModel, cells_of
from kvdiag.kv.pools.gguf_header import GgufHeader
from kvdiag.kv.pools.gguf_layers import cells_of_gguf
from tests.unit.kv.pools.recorded_engines import config, recorded, settings_of, vectors

MIB = 1 << 20
HALF_DIGIT = 0.0051
STARTS = recorded("llamacpp_starts.jsonl")
PUBLISHED = recorded("llamacpp_published.jsonl")
VECTORS = vectors("llama.cpp", measured=True)
EVERY_OTHER = 2


def header(architecture: str, values: dict[str, Any]) -> GgufHeader:
    """The header of a GGUF file with these settings of its architecture."""
    own = {f"{architecture}.{name}": value for name, value in values.items()}
    return GgufHeader(values={"general.architecture": architecture, **own}, lengths={}, tensor_bytes={}, formats={})


def model_of(row: dict[str, Any]) -> CellModel:
    """The tiny model of a measured row, as tiny_gguf.py of the recording wrote it."""
    config = row["model_config"]
    heads, size, layers = config["heads"], config["head_dim"], config["layers"]
    values = {
        "block_count": layers,
        "context_length": config["ctx"],
        "embedding_length": config["embd"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["kv_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
    }
    match row["arch"]:
        case "gemma3":
            values |= {"attention.sliding_window": config["window"]}
        case "lfm2":
            kv_heads = [config["kv_heads"] * (index % EVERY_OTHER) for index in range(layers)]
            values |= {"attention.head_count_kv": kv_heads, "shortconv.l_cache": 3}
        case "mamba":
            values |= {"attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16}
        case "deepseek2":
            values |= {"attention.head_count_kv": 1, "attention.key_length": 96, "attention.value_length": 64}
            values |= {"attention.key_length_mla": 96, "attention.value_length_mla": 64}
    return cells_of_gguf(header(row["arch"], values))


def caches(cache: CellCache) -> list[tuple[int, int, int, float, float]]:
    """Cells, layers, streams, MiB of K and of V."""
    return [
        (pool.units, pool.layers, pool.streams, (pool.k_bytes or 0) / MIB, (pool.v_bytes or 0) / MIB)
        for pool in cache.pools
        if pool.unit == "cell" and pool.layers
    ]


@pytest.mark.parametrize("row", VECTORS, ids=[row["id"] for row in VECTORS])
def test_a_measured_start(row: dict[str, Any]) -> None:
    """Context, slots, cells and bytes as the server printed them."""
    cache = size_cells(model_of(row), CellSettings(**settings_of("llamacpp", row["flags"])))

    printed = [(one["cells"], one["layers"], one["streams"], one["k_mib"], one["v_mib"]) for one in row["kv"]]
    states = [pool.bytes / MIB for pool in cache.pools if pool.unit == "slot"]
    assert (cache.context_tokens, cache.slot_tokens) == (row["n_ctx"], row["props"]["n_ctx"])
    assert caches(cache) == [pytest.approx(one, abs=HALF_DIGIT) for one in printed]
    assert states == pytest.approx([one["mib"] for one in row["recurrent"]], abs=HALF_DIGIT)


@pytest.mark.parametrize("row", STARTS, ids=[f"{row['architecture']}-{place}" for place, row in enumerate(STARTS)])
def test_an_architecture(row: dict[str, Any]) -> None:
    """Each architecture that the engine could load, with random sizes and flags: what it allocated, or its refusal."""
    model = cells_of_gguf(header(row["architecture"], row["values"]))

    for start in row["starts"]:
        # Recorded without the server, which fits an unset context to its slots.
        settings = CellSettings(**start["settings"], fit=False)
        if start["refused"]:
            with pytest.raises(KvModelError):
                size_cells(model, settings)
            continue
        cache = size_cells(model, settings)
        states = [pool for pool in cache.pools if pool.unit == "slot"]
        assert cache.context_tokens == start["n_ctx"]
        assert caches(cache) == [pytest.approx(one, abs=HALF_DIGIT) for one in start["caches"]]
        assert all(pool.units == start["settings"]["slots"] for pool in states)
        assert sum(pool.bytes / MIB for pool in states) == pytest.approx(
            sum(conv + recurrent for _, conv, recurrent in start["states"]), abs=2 * HALF_DIGIT
        )


@pytest.mark.parametrize("row", PUBLISHED, ids=[row["model"] for row in PUBLISHED])
def test_a_start_in_a_public_log(row: dict[str, Any]) -> None:
    """Cells and MiB of each cache, and the states', as logs of 2024 to 2026 print them with their command lines."""
    settings = CellSettings(**settings_of("llamacpp", row["flags"]))
    cache = size_cells(cells_of_gguf(header(row["architecture"], row["values"])), settings)
    cells, sizes = zip(*row["printed"], strict=True)
    assert cells == tuple(pool.units if pool.unit == "cell" else None for pool in cache.pools)
    assert sizes == pytest.approx(tuple(pool.bytes / MIB for pool in cache.pools), abs=HALF_DIGIT)


PLAIN = header(
    "llama",
    {
        "block_count": 32,
        "context_length": 131_072,
        "embedding_length": 4_096,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
    },
)


def test_a_published_start() -> None:
    """Llama-3-8B with a context of 1,048,576 (ggml-org/llama.cpp#8101): cells x 131,072 bytes, but for an alignment."""
    (row,) = vectors("llama.cpp", measured=False)[:1]

    cache = size_cells(cells_of_gguf(PLAIN), CellSettings(context_size=1_048_576))

    assert row["reported"]["cells"] == cache.context_tokens
    assert 0 <= row["reported"]["kv_bytes"] - cache.bytes <= 32


def test_slots_by_default() -> None:
    """Without -np, and with -np -1, four slots share the context."""
    model = cells_of_gguf(PLAIN)
    automatic = [size_cells(model, CellSettings(context_size=8_192, slots=slots)) for slots in (None, -1)]

    assert automatic[0] == automatic[1]
    assert (automatic[0].streams, automatic[0].slot_tokens) == (1, 8_192)


@pytest.mark.parametrize(
    ("settings", "context", "slot"),
    [
        ({"slots": 3}, 393_216, 131_072),
        ({"slots": 3, "fit": False}, 131_328, 43_776),
        ({"slots": 3, "unified": True}, 131_072, 131_072),
        ({"slots": 3, "unified": True, "slot_size": 1_000}, 3_072, 1_000),
        ({"slots": 3, "unified": True, "slot_size": 200_000}, 600_064, 131_072),
        ({"slots": 3, "context_size": 8_192, "slot_size": 1_024}, 8_448, 1_024),
        ({"slots": 1, "rope_scaling": "yarn", "rope_scale": 4.0}, 524_288, 524_288),
        ({"slots": 1, "rope_scaling": "yarn", "rope_scale": 4.0, "fit": False}, 131_072, 131_072),
        ({"slots": 1, "rope_scaling": "yarn", "rope_scale": 4.0, "yarn_tokens": 1_024}, 4_096, 4_096),
        ({"slots": 1, "rope_scaling": "linear", "rope_scale": 4.0, "context_size": 262_144}, 262_144, 131_072),
    ],
)
def test_slots_without_a_context(settings: dict[str, Any], context: int, slot: int) -> None:
    """An unset context is fitted to split slots, to --kv-unified-per-slot, or to what YaRN makes of the trained one, as
    b11549 did with a model of 32,768.
    """
    cache = size_cells(cells_of_gguf(PLAIN), CellSettings(**settings))
    assert (context, slot) == (cache.context_tokens, cache.slot_tokens)


@pytest.mark.parametrize(
    ("name", "model_type"), [("Llama-3.2-11B-Vision", None), ("Qwen3-Next-80B-A3B", "qwen4_exp_text")]
)
def test_a_model_whose_caches_are_not_modelled(name: str, model_type: str | None) -> None:
    """llama.cpp has no architecture that attends to images, and an indexer of its own for Qwen4."""
    known = parse_architecture(config(name))
    with pytest.raises(KvModelError):
        cells_of(replace(known, model_type=model_type or known.model_type), hidden_size=4_096, vocabulary=128_256)


def test_a_device_that_is_too_small() -> None:
    """Weights and caches beyond the device do not fit, and cheaper cells are a lever."""
    demand = Demand(context_tokens=32_768, requests=4)

    plan = plan_cells(
        cells_of_gguf(PLAIN),
        CellSettings(context_size=131_072, slots=4),
        demand,
        weights_bytes=8 << 30,
        gpu_bytes=24 << 30,
    )

    assert plan.outcome is Outcome.DOES_NOT_FIT
    assert plan.shortfall_bytes > 0
    assert "-ctk q8_0 -ctv q8_0" in [lever.change for lever in plan.levers]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"type_k": "fp8"}, "cache_type_k"),
        ({"context_size": 1}, "ctx_size"),
        ({"slots": 257}, "slots"),
        ({"type_v": "q8_0", "flash_attention": False}, "cache_type_v"),
    ],
)
def test_refused_flags(settings: dict[str, Any], field: str) -> None:
    """Flags that the server refuses are errors that name the flag."""
    with pytest.raises(KvModelError) as refused:
        size_cells(cells_of_gguf(PLAIN), CellSettings(**settings))

    assert refused.value.field == field
