"""Pages that no vLLM ever sent: refused as no page, or read without harm."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvdiag.engines.vllm.metrics import parse_engines, parse_pools
from kvdiag.sources.prometheus_text import MAX_LINE_CHARACTERS
from tests.builders.metrics_pages import parse_page
from tests.unit.engines.vllm.vllm_pages import SCRAPES


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("<!DOCTYPE html>\n<html><body>Login</body></html>\n", id="HTML"),
        pytest.param('{"detail":"Not Found"}', id="JSON"),
        pytest.param("vllm:num_requests_running\n", id="no value"),
        pytest.param("vllm:num_requests_running three\n", id="a word for a value"),
        pytest.param('vllm:num_requests_running{engine="0} 1\n', id="open quote"),
        pytest.param('vllm:num_requests_running{engine="0"\n', id="cut off"),
        pytest.param('vllm:num_requests_running{engine="0",engine="1"} 1\n', id="a label twice"),
        pytest.param("# TYPE vllm:num_requests_running\n", id="no type"),
        pytest.param('x{a="b", ="c"} 1\n', id="a label without a name"),
        pytest.param("\x00\x01\x02\xff", id="binary"),
        pytest.param(f'x{{a="{"a" * MAX_LINE_CHARACTERS}"}} 1\n', id="an endless line"),
        pytest.param("x{" + ",".join(f'l{n}="v"' for n in range(100_000)) + "} 1\n", id="100,000 labels"),
    ],
)
def test_what_is_no_page_is_refused(text: str) -> None:
    """Text that is not in the metrics format raises one kind of error at once."""
    with pytest.raises(ValueError, match=r".") as caught:
        parse_page(text)
    # A subclass such as UnicodeError would be another kind
    assert ValueError is type(caught.value)


LINES = [
    line
    for name in ("vllm-0.32.0-cpu-dp2-apiserver2-load", "vllm-0.6.0-V0-rendered", "vllm-0.9.2-V1-rendered")
    for line in (SCRAPES / f"{name}.prom").read_text().splitlines()
    if re.search(r"vllm:(cache_config|\w+_usage_perc|num_|prompt_tokens_total|engine_sleep)", line)
]
PIECES = st.sampled_from(
    [
        *'{}"\\=, #\n\t\r\x00_:',
        *("NaN", "+Inf", "-1", "1e999", "9" * 400, "٣", "²", "é", "\u2028", "\ud800", "# TYPE ", "# HELP ", "counter"),
        *("_total", 'engine="', "vllm:kv_cache_usage_perc", 'num_gpu_blocks="', 'block_size="0"', '"} 1\n', " 0.5\n"),
    ]
)


@st.composite
def spoilt_pages(draw: st.DrawFn) -> str:
    """Lines of real pages, cut and pasted over."""
    text = "\n".join(draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=5)))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(PIECES) + text[start + draw(st.integers(0, 12)) :]
    return text


@settings(max_examples=400, deadline=None)
@given(
    text=st.one_of(spoilt_pages(), st.lists(PIECES).map("".join), st.text()),
    version=st.one_of(st.none(), st.text(max_size=12), st.sampled_from(["0.6.0", "0.9.2", "0.10.2", "0.32.0"])),
)
@example(text="# HELP a b= , =c", version=None)
@example(text='vllm:num_requests_running{engine="' + "1" * 5000 + '"} 1', version=None)
@example(text="vllm:kv_cache_usage_perc " + "9" * 400, version=None)
def test_no_text_does_harm(text: str, version: str | None) -> None:
    """Any text from a server is either refused or parsed; no other error is raised."""
    try:
        page = parse_page(text)
    except ValueError:
        return

    engines, gaps = parse_engines(page)
    pools, pool_gaps = parse_pools(page, version)

    # Missing samples are not reported as zero
    assert engines or gaps
    assert pools or pool_gaps
