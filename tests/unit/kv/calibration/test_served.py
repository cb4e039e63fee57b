"""The model of a running server: its config under settings that meet what the engine says of itself."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.kv.calibration.predicted_vs_reported import Figure
from kvdiag.kv.calibration.running_server import Served, block_bytes, bytes_problem, pool_bytes, served
from kvdiag.model import Facts, KvPool

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
LLAMA = (CONFIGS / "Llama-3.1-8B.json").read_text(encoding="utf-8")
GEMMA = (CONFIGS / "gemma-3-27b.json").read_text(encoding="utf-8")
LATENT = (CONFIGS / "DeepSeek-V3.json").read_text(encoding="utf-8")

LLAMA_BLOCK_BYTES = 16 * 131_072
LONGEST_TOKENS = 32_768


def pool(blocks: int = 5_000, *, per_request: int = LONGEST_TOKENS // 16, block_tokens: int = 16) -> KvPool:
    """What an engine on a GPU reports: blocks and what they come to, but no bytes."""
    most = blocks / per_request
    return KvPool(
        engine="0",
        block_tokens=block_tokens,
        total_blocks=blocks,
        usable_blocks=blocks - 1,
        usage_blocks=blocks - 1,
        capacity_tokens=int(most * LONGEST_TOKENS),
        max_concurrency=most,
        cache_dtype="auto",
    )


def facts(*pools: KvPool, config: str | None = LLAMA, tensor_parallel: int | None = 1) -> Facts:
    """A server of these pools."""
    return Facts(
        pools=pools,
        max_model_len_tokens=LONGEST_TOKENS,
        model_config=config,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=tensor_parallel and 1,
    )


def model(known: Facts) -> Served:
    """The model of a server that has one."""
    found = served(known, known.pools[0])
    assert isinstance(found, Served), found
    return found


@pytest.mark.parametrize(("tensor_parallel", "divided"), [(1, 1), (2, 2), (8, 8), (16, 8)])
def test_bytes_of_an_engine_that_tells_none_follow_from_its_config_and_ranks(
    tensor_parallel: int, divided: int
) -> None:
    """A block of 16 tokens of Llama 3.1 8B is 2 MiB, divided by the ranks as far as there are KV heads."""
    known = facts(pool(), tensor_parallel=tensor_parallel)

    assert (LLAMA_BLOCK_BYTES // divided, "computed") == block_bytes(known, known.pools[0])
    assert (5_000 * LLAMA_BLOCK_BYTES // divided, "computed") == pool_bytes(known, known.pools[0])
    assert [0.0, 0.0] == [figure.drift_ratio for figure in model(known).figures]
    assert bytes_problem(known) is None


def test_what_the_engine_reports_comes_first() -> None:
    """A pool whose bytes are told is not computed."""
    known = facts(replace(pool(), pool_bytes=5_000 * 77))

    assert (77, "reported") == block_bytes(known, known.pools[0])


def test_latent_attention_costs_the_same_on_any_number_of_ranks() -> None:
    """A latent cache is whole on every rank, so that its bytes are known where the ranks are not."""
    known = facts(pool(per_request=LONGEST_TOKENS // 64, block_tokens=64), config=LATENT, tensor_parallel=None)

    # 61 layers of 576 numbers of 16 bits for each of 64 tokens
    assert (64 * 61 * 576 * 2, "computed") == block_bytes(known, known.pools[0])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_reported_bytes_tell_the_ranks_that_cannot_be_seen(ranks: int) -> None:
    """Among the usual sizes of a tensor-parallel group the one that explains the number of blocks is taken."""
    size = 5_000 * LLAMA_BLOCK_BYTES // ranks
    known = facts(replace(pool(), pool_bytes=size), tensor_parallel=None)

    assert ranks == model(known).deployment.tensor_parallel
    assert model(known).drift() is None


def test_fewer_blocks_than_the_bytes_hold_are_a_drift() -> None:
    """An engine whose other rank has a tenth less takes the smaller number of blocks: the rest is lost."""
    known = facts(replace(pool(4_500), pool_bytes=5_000 * LLAMA_BLOCK_BYTES))

    drift = model(known).drift()
    assert drift is not None
    assert (Figure.BLOCKS, 5_000, 4_500) == (drift.figure, drift.predicted.nominal, drift.reported.nominal)
    assert drift.reasons


def test_ranks_that_do_not_divide_a_model_are_not_tried() -> None:
    """Qwen2.5-14B has 40 heads: 16 ranks are none of its possible settings, and no reason to give up."""
    config = (CONFIGS / "Qwen2.5-14B.json").read_text(encoding="utf-8")
    size = 16 * 48 * 8 * 128 * 2 * 2 // 4
    known = facts(replace(pool(), pool_bytes=5_000 * size), config=config, tensor_parallel=None)

    assert 4 == model(known).deployment.tensor_parallel
    assert size == model(known).block_bytes
