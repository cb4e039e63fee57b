"""The server's own gauges, read apart from kvdiag: what a test compares kvdiag's word with."""

import urllib.request
from collections.abc import Callable
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.hostile import eventually

Reading = dict[str, float]
"""By metric name, summed over the engines."""


def read(url: str) -> Reading:
    """The gauges that show whether the server is busy: requests and share of the pool."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    reading = dict.fromkeys(names, 0.0)
    for name, _, value in _samples(url, names):
        reading[name] += value
    return reading


def held_blocks(url: str) -> int:
    """Blocks in use on all engines; the null block of each is neither free nor used.

    The number of blocks is that of all engines together, and stands with each of them.
    """
    engines = _samples(url, ("vllm:cache_config_info",))
    of_each = int(engines[0][1]["num_gpu_blocks"]) // len(engines)
    return round(read(url)["vllm:kv_cache_usage_perc"] * (of_each - 1))


def block_tokens(url: str) -> int:
    """Tokens that a block of the pool holds."""
    _, labels, _ = _samples(url, ("vllm:cache_config_info",))[0]
    return int(labels["block_size"])


def wait_until(url: str, reached: Callable[[Reading], bool]) -> None:
    """Poll until `reached`."""
    assert eventually(lambda: reached(read(url))), read(url)


def loaded(reading: Reading) -> bool:
    """A request runs and holds blocks."""
    return reading["vllm:num_requests_running"] > 0 and reading["vllm:kv_cache_usage_perc"] > 0


def idle(reading: Reading) -> bool:
    """Nothing runs or waits, and no block is held."""
    return not any(reading.values())


def _samples(url: str, names: tuple[str, ...]) -> list[tuple[str, dict[str, str], float]]:
    query = urlencode([("name[]", name) for name in names])
    # Several API servers answer an empty page to a filter.
    page = _page(f"{url}/metrics/?{query}") or _page(f"{url}/metrics/")
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return [(sample.name, sample.labels, sample.value) for sample in samples if sample.name in names]


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=120) as answer:
        page: str = answer.read().decode()
        return page
