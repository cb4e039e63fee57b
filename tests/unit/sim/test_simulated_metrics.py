import re
from pathlib import Path

import pytest

from tests.unit.sim.client import Client

REAL_PAGE = Path(__file__).parent / "fixtures" / "vllm-0.32.0-series.txt"
"""HELP and TYPE lines and series of a real server's metrics, without values; labels with values where fixed."""

FIXED = ("le", "reason", "sleep_state", "finished_reason", "source", "engine")


def signature(line: str) -> str:
    """A page's line without its value, and without label values that differ from server to server."""
    if line.startswith("#"):
        return line
    name, _, rest = line.rpartition(" ")[0].partition("{")
    labels = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', rest)
    return name + "{" + ",".join(sorted(f"{key}={value}" if key in FIXED else key for key, value in labels)) + "}"


def test_every_line_is_one_of_the_real_page(visitor: Client) -> None:
    """Names, types, help texts, labels and buckets are those of a real vLLM 0.32; nothing is invented."""
    real = set(REAL_PAGE.read_text().splitlines())
    _, page = visitor.get("/metrics")
    assert set() == {signature(line) for line in page.splitlines()} - real


def test_the_filter_leaves_what_was_asked_for(visitor: Client) -> None:
    """`/metrics/?name[]=` gives the named series alone, with their help; `_created` is another name."""
    _, page = visitor.get("/metrics/?name[]=vllm:num_preemptions_total&name%5B%5D=vllm:kv_cache_usage_perc")

    assert [
        "# HELP vllm:kv_cache_usage_perc",
        "# HELP vllm:num_preemptions_total",
        "# TYPE vllm:kv_cache_usage_perc",
        "# TYPE vllm:num_preemptions_total",
        'vllm:kv_cache_usage_perc{engine="0",model_name="drill"} 0.0',
        'vllm:num_preemptions_total{engine="0",model_name="drill"} 0.0',
    ] == sorted(" ".join(line.split()[:3]) for line in page.splitlines())


@pytest.mark.parametrize("path", ["/metrics/?name[]=nope", "/metrics/?name[]="])
def test_an_unknown_name_leaves_an_empty_page(visitor: Client, path: str) -> None:
    """Names that no series has give an empty page, not an error."""
    assert (200, "") == visitor.get(path)


def test_without_slash_nothing_is_filtered(visitor: Client) -> None:
    """`/metrics` gives all metrics for any query, as on a real server."""
    _, page = visitor.get("/metrics?name[]=vllm:kv_cache_usage_perc")
    assert "vllm:cache_config_info" in page
