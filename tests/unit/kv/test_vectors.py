"""The integers of vLLM 0.32's own get_kv_cache_configs and get_kv_cache_capacity."""

from typing import Any

import pytest

from kvdiag.kv.layout.capacity import plan_layout, pool_capacity
from kvdiag.kv.layout.page_specs import parse_page_specs
from kvdiag.kv.layout.pages import PageKind, PageSpec, RequestTerms, StateCacheMode
from tests.unit.kv.vectors import vectors


@pytest.mark.parametrize("vector", [v for v in vectors() if "layers" in v], ids=lambda v: v["name"])
def test_capacity_equals_the_engines_own(vector: dict[str, Any]) -> None:
    """A pool of a vector's layers has the blocks, groups, tokens and concurrency that vLLM 0.32 computed."""
    pages = parse_page_specs(vector)
    terms = RequestTerms(
        max_in_flight_tokens=vector["max_in_flight_tokens"],
        encoder_tokens=vector["max_in_flight_tokens"],
        state_cache_mode=StateCacheMode(vector.get("mode", "none")),
    )

    layout = plan_layout(pages)
    capacity = pool_capacity(
        layout, pool_bytes=vector["available_bytes"], context_tokens=vector["max_model_len"], terms=terms
    )
    actual = {
        "num_blocks": capacity.num_blocks,
        "groups": len(layout.groups),
        "tokens": capacity.capacity_tokens,
        "max_concurrency": capacity.max_concurrency,
        "bytes_per_block": capacity.bytes_per_block[0],
    }

    assert vector["expect"] == actual


def test_a_request_as_large_as_the_pool_is_refused_as_the_engine_refuses_it() -> None:
    """The vector of the null block: 128 blocks are not enough for a request of 128, which needs 0.25 GiB."""
    vector = next(vector for vector in vectors() if "refused" in vector)
    block_bytes = vector["available_bytes"] // (vector["max_model_len"] // 16)
    page = PageSpec(kind=PageKind.FULL, block_size_tokens=16, heads=1, row_bytes=block_bytes // 16)
    terms = RequestTerms(max_in_flight_tokens=vector["max_in_flight_tokens"], encoder_tokens=0)

    capacity = pool_capacity(
        plan_layout([page]), pool_bytes=vector["available_bytes"], context_tokens=vector["max_model_len"], terms=terms
    )

    assert (128, 128, False) == (capacity.num_blocks, capacity.blocks_per_request, capacity.admits_one)
    assert f"({capacity.needed_bytes[0] / (1 << 30):.2f} GiB KV cache is needed" in vector["refused"]
