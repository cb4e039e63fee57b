"""vLLM's metrics page into engines: figures that cannot be, engines of every number, and pages without any."""

from __future__ import annotations

import re

import pytest

from kvdiag.engines.engine import SOURCE
from kvdiag.engines.vllm.metrics import MAX_SERIES, WAITING_BY_REASON, parse_engines, parse_pools
from kvdiag.model import MAX_COUNT, Engine, Gap
from kvdiag.sources.prometheus_text import parse_page
from tests.builders.answers import containing
from tests.unit.engines.vllm.vllm_pages import NO_POOL, SCRAPES, engine_page


@pytest.mark.parametrize(
    ("lines", "expected", "reasons"),
    [
        pytest.param(
            ["vllm:num_requests_running NaN", "vllm:num_requests_waiting 0.0"],
            Engine(engine="0", requests_waiting=0),
            [containing("vllm:num_requests_running", "engine 0 is nan")],
            id="count NaN",
        ),
        pytest.param(
            ["vllm:num_requests_running -1.0"],
            Engine(engine="0"),
            [containing("vllm:num_requests_running", "engine 0 is -1")],
            id="count negative",
        ),
        pytest.param(
            ["vllm:prompt_tokens_total +Inf"],
            Engine(engine="0"),
            [containing("vllm:prompt_tokens_total", "engine 0 is inf")],
            id="count infinite",
        ),
        pytest.param(
            [f"vllm:prompt_tokens_total {2 * MAX_COUNT}.0"],
            Engine(engine="0"),
            [containing("vllm:prompt_tokens_total", "engine 0 is 1.80144e+16")],
            id="count beyond what a float carries",
        ),
        pytest.param(
            [f"vllm:num_requests_running 1{'0' * 400}"],
            Engine(engine="0"),
            [containing("vllm:num_requests_running", "engine 0 is inf")],
            id="count of 401 digits",
        ),
        pytest.param(
            ["vllm:kv_cache_usage_perc NaN"],
            Engine(engine="0"),
            [containing("KV usage", "engine 0 is nan")],
            id="usage NaN",
        ),
        pytest.param(
            ["vllm:kv_cache_usage_perc -0.1"],
            Engine(engine="0"),
            [containing("KV usage", "engine 0 is -0.1")],
            id="usage negative",
        ),
        pytest.param(
            ["vllm:kv_cache_usage_perc 37.5"],
            Engine(engine="0"),
            [containing("KV usage", "engine 0 is 37.5")],
            id="usage in percent",
        ),
        pytest.param(
            ['vllm:engine_sleep_state{sleep_state="awake"} NaN'],
            Engine(engine="0"),
            [containing("vllm:engine_sleep_state", "engine 0 is nan")],
            id="sleep state NaN",
        ),
        pytest.param(
            [
                'vllm:engine_sleep_state{sleep_state="awake"} 0.0',
                'vllm:engine_sleep_state{sleep_state="discard_all"} 1',
            ],
            Engine(engine="0", asleep=True),
            [],
            id="asleep",
        ),
        pytest.param(
            ['vllm:num_requests_waiting_by_reason{reason="capacity"} -3'],
            Engine(engine="0"),
            [containing("vllm:num_requests_waiting_by_reason", "engine 0 is -3")],
            id="waiting for capacity negative",
        ),
        pytest.param(
            ['vllm:num_requests_running{model_name="a"} 1.0', 'vllm:num_requests_running{model_name="b"} 0.0'],
            Engine(engine="0"),
            [containing("vllm:num_requests_running", "2 times", "engine 0")],
            id="two servers on one page",
        ),
        pytest.param(
            ['vllm:num_requests_waiting_by_reason{reason="capacity"} 3'] * 2,
            Engine(engine="0"),
            [containing(WAITING_BY_REASON, "2 times", "engine 0")],
            id="a reason twice",
        ),
        pytest.param(
            ['vllm:engine_sleep_state{sleep_state="awake"} 0', 'vllm:engine_sleep_state{sleep_state="awake"} 1'],
            Engine(engine="0"),
            [containing("vllm:engine_sleep_state", "2 times", "engine 0")],
            id="a sleep state twice",
        ),
    ],
)
def test_impossible_figure_is_a_gap(lines: list[str], expected: Engine, reasons: list[str]) -> None:
    """A figure that cannot be is missing from the engine, and a gap names it; the others stand."""
    actual = parse_engines(parse_page(engine_page(*lines)))

    assert ((expected,), tuple(Gap(source=SOURCE, kind="failed", reason=reason) for reason in reasons)) == actual


def test_fraction_of_a_count_is_rounded() -> None:
    """A count that was averaged on its way, as multiprocess modes can, comes out whole."""
    engines, gaps = parse_engines(parse_page("vllm:num_requests_running 2.6\n"))

    assert ((Engine(engine="0", requests_running=3),), ()) == (engines, gaps)


def test_engines_come_in_numeric_order() -> None:
    """Ten data-parallel engines are listed by number, labels that are none after them."""
    labels = ["10", "2", "x", "0", "٣", "9" * 5000]
    page = parse_page("".join(f'vllm:num_requests_running{{engine="{label}"}} 0\n' for label in labels))

    engines, _ = parse_engines(page)

    assert engines is not None
    assert ["0", "2", "٣", "10", "9" * 5000, "x"] == [engine.engine for engine in engines]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(
            re.sub(r"(?m)^(# (HELP|TYPE) )?vllm:.*\n", "", (SCRAPES / "vllm-0.28.0-cpu-load.prom").read_text()),
            "--disable-log-stats",
            id="--disable-log-stats",
        ),
        pytest.param("", "no vllm:* series", id="empty"),
        pytest.param('node_cpu_seconds_total{cpu="0",mode="idle"} 5.0\n', "no vllm:* series", id="another exporter"),
    ],
)
def test_page_without_engines_says_why(text: str, reason: str) -> None:
    """A page that shows no engine is a gap with what to do, not an idle server."""
    page = parse_page(text)

    actual = (parse_engines(page), parse_pools(page, "0.32.0"))

    assert ((None, (Gap(source=SOURCE, kind="absent", reason=containing(reason)),)), ((), (NO_POOL,))) == actual


def test_hostile_number_of_engines_is_refused() -> None:
    """A page with more engines than any server has is a gap, not an hour's work."""
    count = 5_000
    page = parse_page("".join(f'vllm:num_requests_running{{engine="{number}"}} 0\n' for number in range(count)))

    actual = parse_engines(page)

    reason = f"vllm:num_requests_running has {count} series, more than {MAX_SERIES}: not a page of one server"
    assert (None, (Gap(source=SOURCE, kind="failed", reason=reason),)) == actual
