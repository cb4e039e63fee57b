"""The model of a running server: the settings that meet what the engine says of itself, and what none explains."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.predicted_vs_reported import Comparison, Figure, exactly
from kvdiag.kv.calibration.running_server import (
    all_pools_bytes,
    block_bytes,
    bytes_problem,
    pool_bytes,
    reported_blocks,
    served,
)
from kvdiag.kv.calibration.served_layout import Served
from kvdiag.kv.layout.kernel_blocks import Platform
from kvdiag.kv.layout.pages import StateCacheMode
from kvdiag.model import Facts, KvPool
from tests.unit.kv.vectors import DATA

SHAPE = {"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
DENSE = json.dumps({"model_type": "llama", **SHAPE})
"""Two layers of 8 KV heads x 128: 128 KiB a block of 16 tokens, 7 blocks a request of 100."""
BLOCK = 131_072


LLAMA, LATENT, SPARSE, FORTY_HEADS = (
    (DATA / "configs" / f"{name}.json").read_text(encoding="utf-8")
    for name in ("Llama-3.1-8B", "DeepSeek-V3", "DeepSeek-V3.2-Exp", "Qwen2.5-14B")
)


def pool(engine: str = "0", *, blocks: int = 70, **changes: Any) -> KvPool:
    """A pool of 70 blocks, in which 10 requests of 100 tokens fit."""
    known = KvPool(
        engine=engine,
        block_tokens=16,
        total_blocks=blocks,
        usable_blocks=blocks - 1,
        usage_blocks=blocks - 1,
        capacity_tokens=blocks * 100 // 7,
        max_concurrency=blocks / 7,
        cache_dtype="auto",
    )
    return replace(known, **changes)


def facts(*pools: KvPool, **changes: Any) -> Facts:
    """A server on one GPU."""
    known = Facts(
        pools=pools or (pool(),),
        max_model_len_tokens=100,
        model_config=DENSE,
        tensor_parallel=1,
        pipeline_parallel=1,
        engine_version="0.32.0",
    )
    return replace(known, **changes)


def model(known: Facts) -> Served:
    """The model, which there must be."""
    found = served(known, known.pools[0])
    assert isinstance(found, Served), found
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_config": None}, "not readable"),
        ({"max_model_len_tokens": None}, "max_model_len"),
        ({"model_config": "{"}, "not valid JSON"),
        ({"model_config": ""}, "not valid JSON"),
        ({"model_config": "[" * 100_000}, "not valid JSON"),
        ({"model_config": "5"}, "cannot be used"),
        ({"model_config": json.dumps({"model_type": "no-such-model"})}, "cannot be used"),
        ({"tensor_parallel": 3}, "cannot be used"),
    ],
)
def test_why_there_is_no_model(change: dict[str, Any], words: str) -> None:
    """In one clause; nothing is computed then."""
    known = facts(**change)

    problem = served(known, known.pools[0])

    assert isinstance(problem, str)
    assert words in problem
    assert (problem, None, None) == (
        bytes_problem(known),
        block_bytes(known, known.pools[0]),
        pool_bytes(known, known.pools[0]),
    )


def test_a_model_that_meets_every_figure() -> None:
    """128 KiB a block, 7 blocks a request, and what was assumed for it."""
    found = model(facts())

    assert (BLOCK, 7, "max_num_batched_tokens 2048, cuda kernels") == (
        found.block_bytes,
        found.planned_blocks,
        found.assumed,
    )
    assert [(Figure.TOKENS, 1000, 1000), (Figure.CONCURRENCY, 10, 10)] == [
        (one.figure, one.predicted.nominal, one.reported.nominal) for one in found.figures
    ]
    assert (None, None) == (found.drift(), bytes_problem(facts()))


@pytest.mark.parametrize(("tensor_parallel", "divided"), [(1, 1), (2, 2), (8, 8), (16, 8)])
def test_bytes_of_an_engine_that_tells_none_follow_from_its_config_and_ranks(
    tensor_parallel: int, divided: int
) -> None:
    """A block of 16 tokens of Llama 3.1 8B is 2 MiB, divided by the ranks as far as there are KV heads."""
    known = facts(model_config=LLAMA, tensor_parallel=tensor_parallel)

    assert (16 * BLOCK // divided, "computed") == block_bytes(known, known.pools[0])
    assert (70 * 16 * BLOCK // divided, "computed") == pool_bytes(known, known.pools[0])
    assert [0.0, 0.0] == [figure.drift_ratio for figure in model(known).figures]
    assert bytes_problem(known) is None


def test_what_the_engine_reports_comes_first() -> None:
    """A pool whose bytes the engine reports is not computed."""
    known = facts(pool(pool_bytes=70 * 77))

    assert (77, "reported") == block_bytes(known, known.pools[0])


def test_latent_attention_costs_the_same_on_any_number_of_ranks() -> None:
    """A latent cache is whole on every rank, so that its bytes are known where the ranks are not."""
    large = pool(block_tokens=64, max_concurrency=35.0, capacity_tokens=3500)
    known = facts(large, model_config=LATENT, tensor_parallel=None, pipeline_parallel=None)

    # 61 layers of 576 numbers of 16 bits for each of 64 tokens
    assert (64 * 61 * 576 * 2, "computed") == block_bytes(known, known.pools[0])


def sparse(cache_dtype: str, **changes: Any) -> Facts:
    """A server with sparse latent attention in blocks of 64 tokens, and that format."""
    large = pool(block_tokens=64, max_concurrency=35.0, capacity_tokens=3500, cache_dtype=cache_dtype, **changes)
    return facts(large, model_config=SPARSE)


# 61 layers of 64 rows of 128 numbers of 8 bits and a scale for the indexer, next to 656 packed or 576 plain bytes.
PACKED, PLAIN_FP8 = (61 * 64 * (132 + row) for row in (656, 576))


@pytest.mark.parametrize(
    ("cache_dtype", "size"), [("auto", None), ("fp8", None), ("fp8_ds_mla", PACKED), ("bfloat16", 61 * 64 * 1284)]
)
def test_a_format_that_depends_on_the_generation_has_no_bytes(cache_dtype: str, size: int | None) -> None:
    """Hopper and desktop Blackwell pack 8-bit rows, data-centre Blackwell does not; a format by name decides."""
    known = sparse(cache_dtype)

    assert (size, size is None) == (model(known).block_bytes, model(known).generation_open)
    problem = bytes_problem(known)
    assert problem is None if size is not None else "generation" in (problem or "")
    assert model(known).drift() is None


@pytest.mark.parametrize(("size", "generation"), [(PACKED, 90), (PLAIN_FP8, 100)])
def test_the_bytes_of_a_pool_decide_the_generation(size: int, generation: int) -> None:
    """The first whose format gives the reported number of blocks."""
    known = sparse("fp8", pool_bytes=70 * size)

    assert (generation, size) == (model(known).deployment.compute_capability, model(known).block_bytes)
    assert (None, None) == (model(known).drift(), bytes_problem(known))


def test_fewer_blocks_than_the_bytes_hold_are_a_drift() -> None:
    """An engine whose other rank has a tenth less takes the smaller number of blocks: the rest is lost."""
    drift = model(facts(pool(blocks=63, pool_bytes=70 * BLOCK))).drift()
    assert drift is not None
    assert (Figure.BLOCKS, 70, 63) == (drift.figure, drift.predicted.nominal, drift.reported.nominal)
    assert drift.reasons


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ((), None),
        ((pool(),), (70 * BLOCK, "computed")),
        ((pool(), pool("1", blocks=35)), (105 * BLOCK, "computed")),
        ((pool(pool_bytes=5), pool("1", pool_bytes=7)), (12, "reported")),
        ((pool(), pool("1", max_concurrency=1.0)), None),
    ],
    ids=["none", "one", "two", "reported", "one that is another model's"],
)
def test_bytes_of_all_pools(pools: tuple[KvPool, ...], expected: tuple[int, str] | None) -> None:
    """The sum, where every one is known."""
    assert expected == all_pools_bytes(replace(facts(), pools=pools))


def test_whichever_engine_it_is_and_whatever_its_fraction_the_model_is_the_same() -> None:
    """Neither a label nor the memory fraction changes what a block costs."""
    assert model(facts()) == model(facts(pool("7", memory_fraction_ratio=0.5)))


@pytest.mark.parametrize(
    ("concurrency", "expected"), [(None, None), (0.0, None), (10.0, 7), (70 / 6.4, 6), (70 / 6.6, 7)]
)
def test_blocks_that_the_engine_plans_for_a_request(concurrency: float | None, expected: int | None) -> None:
    """70 blocks divided by the concurrency, rounded to the nearest; unknown where vLLM does not report it."""
    assert expected == reported_blocks(pool(max_concurrency=concurrency))


@pytest.mark.parametrize(
    ("drifts", "most_ratio", "expected"),
    [((), 0.02, None), ((101, 99), 0.02, None), ((103, 96), 0.02, 1), ((104, 96), 0.05, None), ((104, 104), 0.02, 0)],
)
def test_the_figure_that_is_furthest_off(drifts: tuple[int, ...], most_ratio: float, expected: int | None) -> None:
    """Above or below what is reported, beyond a limit; the first of equals."""
    figures = tuple(
        Comparison(figure=figure, predicted=exactly(percent), reported=exactly(100))
        for figure, percent in zip((Figure.BLOCKS, Figure.TOKENS), drifts, strict=False)
    )
    found = replace(model(facts()), figures=figures)

    assert (None if expected is None else figures[expected]) == found.drift(most_ratio)


@pytest.mark.parametrize(
    ("change", "ranks", "size"),
    [
        ({}, 1, None),
        ({"pipeline_parallel": 2, "tensor_parallel": 1}, 1, BLOCK // 2),
        ({"tensor_parallel": 4}, 4, BLOCK // 4),
        *(({"pools": (pool(pool_bytes=70 * BLOCK // ranks),)}, ranks, BLOCK // ranks) for ranks in (1, 2, 4, 8)),
        # 40 heads: 16 ranks are none of its possible settings. 48 layers of 64 KiB over 4 ranks.
        (
            {"pools": (pool(pool_bytes=70 * 48 * BLOCK // 2 // 4),), "model_config": FORTY_HEADS},
            4,
            48 * BLOCK // 2 // 4,
        ),
    ],
    ids=["not seen", "two stages", "seen", *(f"told by the bytes: {ranks}" for ranks in (1, 2, 4, 8)), "40 heads"],
)
def test_ranks_decide_what_a_block_costs(change: dict[str, Any], ranks: int, size: int | None) -> None:
    """With an unknown number of ranks the bytes of a block are unknown, unless the pool's bytes are reported."""
    known = facts(**({"tensor_parallel": None, "pipeline_parallel": None} | change))

    assert (ranks, size) == (model(known).deployment.tensor_parallel, model(known).block_bytes)
    assert model(known).drift() is None
    problem = bytes_problem(known)
    assert problem is None if size is not None else "tensor-parallel" in (problem or "")


def test_a_model_that_two_ranks_cannot_share_is_not_said_to_be_the_same_on_all() -> None:
    """7 heads: two ranks cannot share the model, but the number of ranks and a block's bytes remain unknown."""
    shape = {**SHAPE, "hidden_size": 896, "num_attention_heads": 7, "num_key_value_heads": 7}
    known = facts(
        model_config=json.dumps({"model_type": "llama", **shape}), tensor_parallel=None, pipeline_parallel=None
    )

    assert model(known).block_bytes is None


def test_stages_of_unlike_size_have_no_one_block() -> None:
    """Three layers over two stages: 128 KiB on one and 64 KiB on the other."""
    config = json.dumps({"model_type": "llama", **SHAPE, "num_hidden_layers": 3})

    known = facts(model_config=config, pipeline_parallel=2)
    assert (None, (BLOCK, BLOCK // 2)) == (model(known).block_bytes, model(known).layout.bytes_per_block)
    assert "pipeline stages" in (bytes_problem(known) or "")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("auto", None, None, True)),
        ({"cache_dtype": None}, ("auto", None, None, True)),
        ({"cache_dtype": "fp8"}, ("fp8", None, None, True)),
        ({"state_dtype": "auto"}, ("auto", None, None, True)),
        ({"state_dtype": "float32"}, ("auto", "float32", None, True)),
        ({"state_cache_mode": "align"}, ("auto", None, StateCacheMode.ALIGN, True)),
        ({"state_cache_mode": "of tomorrow"}, ("auto", None, None, True)),
        ({"prefix_caching": False}, ("auto", None, None, False)),
        ({"prefix_caching": True}, ("auto", None, None, True)),
    ],
)
def test_what_the_page_tells_is_taken(change: dict[str, Any], expected: tuple[object, ...]) -> None:
    """And vLLM's own defaults for the rest."""
    deployment = model(facts(pool(**change))).deployment

    assert expected == (
        deployment.kv_dtype,
        deployment.state_dtype,
        deployment.state_cache_mode,
        deployment.prefix_caching,
    )
    assert (16, 1, Platform.CUDA) == (deployment.block_size_tokens, deployment.pipeline_parallel, deployment.platform)


SLIDING = json.dumps(
    {
        "model_type": "gemma2",
        **SHAPE,
        "head_dim": 128,
        "sliding_window": 1024,
        "layer_types": ["full_attention", "sliding_attention"],
    }
)


@pytest.mark.parametrize(
    ("in_flight_tokens", "assumed"),
    [
        (4096, "max_num_batched_tokens 2048, cuda kernels"),
        (32_768, "max_num_batched_tokens 16384, cuda kernels"),
        (2048, "max_num_batched_tokens 1024, cuda kernels"),
        (1024, "max_num_batched_tokens 1024, cpu kernels"),
        (5000, "4994 tokens in flight, cuda kernels"),
        (100_000, "99986 tokens in flight, cuda kernels"),
    ],
)
def test_what_is_in_flight_is_found_by_the_blocks_of_a_request(in_flight_tokens: int, assumed: str) -> None:
    """Requests of 131,072 tokens: 8,192 full blocks, and ceil((1,023 + in flight) / 16) + 1 of the window.

    A GPU has two batches in flight. Of all that give the same blocks the fewest tokens are named: 1,023 + 4,994 = 6,017
    is one above 376 x 16.
    """
    planned = 8192 + -(-(1023 + in_flight_tokens) // 16) + 1
    blocks = 100_000
    known = facts(
        pool(blocks=blocks, max_concurrency=blocks / planned, capacity_tokens=int(blocks / planned * 131_072)),
        model_config=SLIDING,
        max_model_len_tokens=131_072,
    )

    found = model(known)

    assert (planned, assumed, None) == (found.planned_blocks, found.assumed, found.drift())


def test_what_nothing_explains_stays_a_drift() -> None:
    """Half the blocks that a request of any kind would need: the first guess stands, and the figure is named."""
    known = facts(pool(max_concurrency=20.0, capacity_tokens=2000))

    found = model(known)

    drift = found.drift()
    assert drift is not None
    assert (Figure.TOKENS, -0.5) == (drift.figure, drift.drift_ratio)
    assert "max_num_batched_tokens 2048, cuda kernels" == found.assumed
    assert "capacity_tokens" in (bytes_problem(known) or "")
    assert block_bytes(known, known.pools[0]) is None


@pytest.mark.parametrize(("engine", "refused"), [("vllm", True), (None, True), ("sglang", False)])
def test_classes_that_vllm_alone_keeps_in_another_way(engine: str | None, *, refused: bool) -> None:
    """A server of another engine is not refused for the class of its model."""
    config = json.dumps({"model_type": "llama", "architectures": ["CLIPModel"], **SHAPE})
    facts = Facts(model_config=config, max_model_len_tokens=100, tensor_parallel=1, engine_name=engine, pools=(pool(),))

    assert refused is isinstance(served(facts, facts.pools[0]), str)
