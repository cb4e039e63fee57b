"""Lengths of finished requests out of a real page, and out of pages that no vLLM ever sent."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.engines.vllm.metrics import parse_lengths
from tests.builders.metrics_pages import parse_page

SCRAPES = Path(__file__).parents[3] / "fixtures" / "scrapes"
BUCKET = 'vllm:request_generation_tokens_bucket{{engine="{engine}",le="{le}"}} {count}\n'


def page(*rows: tuple[str, str, str], more: str = "") -> str:
    """Buckets by engine, bound and count."""
    lines = [BUCKET.format(engine=engine, le=le, count=count) for engine, le, count in rows]
    return "# TYPE vllm:request_generation_tokens histogram\n" + "".join(lines) + more


def test_a_real_page_after_load() -> None:
    """A page of vLLM 0.32 under load: its requests wrote no more than their buckets say."""
    text = (SCRAPES / "vllm-0.32.0-cpu-load.prom").read_text()
    lengths = parse_lengths(parse_page(text))
    # As many are counted as the page says, with the mean of their prompts
    assert lengths is not None
    count = next(line for line in text.splitlines() if line.startswith("vllm:request_generation_tokens_count"))
    assert float(count.split()[-1]) == lengths.finished > 0
    assert math.inf == lengths.upper_tokens[-1]
    assert lengths.mean_prompt_tokens is not None


def test_engines_are_added() -> None:
    """Which engine a request comes to is not known."""
    lengths = parse_lengths(
        parse_page(page(("0", "1.0", "2"), ("0", "+Inf", "5"), ("1", "1.0", "1"), ("1", "+Inf", "1")))
    )
    assert lengths is not None
    assert ((1.0, math.inf), (3, 3), None) == (lengths.upper_tokens, lengths.counts, lengths.mean_prompt_tokens)


@pytest.mark.parametrize(
    "text",
    [
        "",
        page(("0", "much", "2")),
        page(("0", "1.0", "5"), ("0", "+Inf", "2")),
        page(("0", "-1.0", "2"), ("0", "+Inf", "2")),
        page(("0", "1.0", "NaN")),
        page(("0", "1.0", "+Inf")),
    ],
)
def test_what_was_never_measured_is_not_used(text: str) -> None:
    """No histogram, bounds that are none, counts that fall, counts that are no number."""
    assert parse_lengths(parse_page(text)) is None


@given(
    st.lists(
        st.tuples(st.sampled_from("01"), st.sampled_from(["1", "2", "x", "+Inf", "NaN", "-3"]), st.floats()), max_size=8
    )
)
def test_no_page_makes_it_raise(rows: list[tuple[str, str, float]]) -> None:
    """Any values in the histogram's buckets are read without an error."""
    lengths = parse_lengths(parse_page(page(*[(engine, le, repr(count)) for engine, le, count in rows])))
    assert lengths is None or lengths.finished >= 0
