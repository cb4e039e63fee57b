"""vLLM's stored pages from 0.5 to 0.32 into engines and pools, and what their versions count."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvdiag.engines.metrics_reader import parse_version
from kvdiag.engines.vllm.metrics import parse_engines, parse_pools
from kvdiag.model.codec import to_plain
from tests.unit.engines.vllm.vllm_pages import page_of

VERSIONS = {
    "vllm-0.5-V0-cpu-excerpt": "0.5.0",
    "vllm-0.6.0-V0-rendered": "0.6.0",
    "vllm-0.6.6-V0-rendered": "0.6.6.post1",
    "vllm-0.7.3-V0-rendered": "0.7.3",
    "vllm-0.8.4-V0-rendered": "0.8.4",
    "vllm-0.8.5.post2-V1-rendered": "0.8.5.post2",
    "vllm-0.9.0.1-V1-rendered": "0.9.0.1",
    "vllm-0.9.2-V1-rendered": "0.9.2",
    "vllm-0.10.2-V1-rendered": "0.10.2",
    "vllm-0.11.0-V1-rendered": "0.11.0",
    "vllm-0.11.2-V1-rendered": "0.11.2",
    "vllm-0.11.2-V1-hidden-rendered": "0.11.2",
    "vllm-0.14.0-V1-rendered": "0.14.0+cu129",
    "vllm-0.28.0-cpu-load": "0.28.0+cpu",
    "vllm-0.32.0-cpu-load": "0.32.0",
    "vllm-0.32.0-cpu-devmode-sleep": "0.32.0",
    "vllm-0.32.0-cpu-tp2-idle": "0.32.0",
    "vllm-0.32.0-cpu-dp2-apiserver2-load": "0.32.0",
    "vllm-0.32.0-cpu-dp2-apiserver2-idle": "0.32.0",
}
"""Stored page to the version that wrote it."""

BOTH_USAGE_NAMES = ("vllm-0.10.2-V1-rendered", "vllm-0.11.2-V1-hidden-rendered")
"""Newer versions' metrics that cannot be distinguished from 0.9.2's, whose usage gauge counts the null block."""


def test_every_version_reads_alike(golden: Callable[[str, str], None]) -> None:
    """The page of each version gives its engines' figures and its pools, and nothing is missed."""
    lines = []
    for name, version in VERSIONS.items():
        engines, gaps = parse_engines(page_of(name))
        pools, pool_gaps = parse_pools(page_of(name), version)
        assert ((), ()) == (gaps, pool_gaps)
        lines += [f"{name} as {version}", *(f"  {json.dumps(to_plain(one))}" for one in (*(engines or ()), *pools))]
    golden("vllm_pages.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", VERSIONS)
def test_unknown_version_is_told_by_the_page(name: str) -> None:
    """Without /version the pool comes out the same, but where a version shows both names of the usage gauge."""
    pools, _ = parse_pools(page_of(name), VERSIONS[name])
    if name in BOTH_USAGE_NAMES:
        pools = tuple(replace(pool, usage_blocks=pool.total_blocks) for pool in pools)
    actual = [parse_pools(page_of(name), version) for version in (None, "", "dev", "v", "0", "1" * 5000)]
    assert [(pools, ())] * 6 == actual


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.6.0", (0, 6, 0)),
        ("0.8.5.post2", (0, 8, 5)),
        ("0.10.2+cu128", (0, 10, 2)),
        ("v0.11.1rc2", (0, 11, 1)),
        ("0.32", (0, 32, 0)),
        ("1.0.0", (1, 0, 0)),
        ("main", None),
        ("", None),
        (None, None),
        ("9999999.1.2", None),
    ],
)
def test_version_is_three_numbers(version: str | None, expected: tuple[int, int, int] | None) -> None:
    """Major, minor and patch are what counts of a version; anything else is none."""
    assert expected == parse_version(version)


@pytest.mark.parametrize(
    ("page", "version", "usage_ratio", "expected"),
    [
        pytest.param("vllm-0.8.4-V0-rendered", "0.8.4", 0.0, 0, id="V0 idle"),
        pytest.param("vllm-0.8.4-V0-rendered", "0.8.4", 270 / 27000, 270, id="V0 load"),
        pytest.param("vllm-0.9.2-V1-rendered", "0.9.2", 1 / 27000, 0, id="V1 0.9.2 idle"),
        pytest.param("vllm-0.9.2-V1-rendered", "0.9.2", 271 / 27000, 270, id="V1 0.9.2 load"),
        pytest.param("vllm-0.9.2-V1-rendered", "0.9.2", 0.0, 0, id="V1 0.9.2 before its first step"),
        pytest.param("vllm-0.10.2-V1-rendered", "0.10.2", 270 / 26999, 270, id="V1 0.10.2 load"),
        pytest.param("vllm-0.10.2-V1-rendered", "0.10.1", 271 / 27000, 270, id="V1 0.10.1 load"),
        pytest.param("vllm-0.32.0-cpu-load", "0.32.0", 272 / 4095, 272, id="V1 0.32 load"),
    ],
)
def test_usage_counts_blocks_as_its_version_does(page: str, version: str, usage_ratio: float, expected: int) -> None:
    """The usage gauge gives the blocks that requests hold, whether or not its version counts the null block."""
    (pool,), _ = parse_pools(page_of(page), version)
    assert expected == pool.used_blocks(usage_ratio)
