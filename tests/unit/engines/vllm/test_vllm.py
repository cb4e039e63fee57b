"""vLLM's metrics endpoint to engines: impossible figures, any number of engines, and endpoints without any."""

import re

import pytest

from kvdiag.engines.engine import SOURCE
from kvdiag.engines.metrics_reader import MAX_GAPS, MAX_SERIES
from kvdiag.engines.vllm.metrics import POLLED_NAMES, WAITING_BY_REASON, parse_engines, parse_pools
from kvdiag.model import MAX_COUNT, Engine, Gap
from tests.builders.answers import containing
from tests.builders.metrics_pages import parse_page
from tests.unit.engines.vllm.vllm_pages import NO_POOL, SCRAPES, engine_page

RUNNING, TOKENS, USAGE = "vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc"
AWAKE = 'vllm:engine_sleep_state{sleep_state="awake"}'
CAPACITY = f'{WAITING_BY_REASON}{{reason="capacity"}}'

IMPOSSIBLE: dict[str, tuple[list[str], Engine, tuple[str, ...]]] = {
    "count NaN": (
        [f"{RUNNING} NaN", "vllm:num_requests_waiting 0.0"],
        Engine(engine="0", requests_waiting=0),
        (RUNNING, "engine 0 is nan"),
    ),
    "count negative": ([f"{RUNNING} -1.0"], Engine(engine="0"), (RUNNING, "engine 0 is -1")),
    "count infinite": ([f"{TOKENS} +Inf"], Engine(engine="0"), (TOKENS, "engine 0 is inf")),
    "count beyond what a float carries": (
        [f"{TOKENS} {2 * MAX_COUNT}.0"],
        Engine(engine="0"),
        (TOKENS, "engine 0 is 1.80144e+16"),
    ),
    "count of 401 digits": ([f"{RUNNING} 1{'0' * 400}"], Engine(engine="0"), (RUNNING, "engine 0 is inf")),
    "usage NaN": ([f"{USAGE} NaN"], Engine(engine="0"), ("KV usage", "engine 0 is nan")),
    "usage negative": ([f"{USAGE} -0.1"], Engine(engine="0"), ("KV usage", "engine 0 is -0.1")),
    "usage in percent": ([f"{USAGE} 37.5"], Engine(engine="0"), ("KV usage", "engine 0 is 37.5")),
    "sleep state NaN": ([f"{AWAKE} NaN"], Engine(engine="0"), ("vllm:engine_sleep_state", "engine 0 is nan")),
    "asleep": (
        [f"{AWAKE} 0.0", 'vllm:engine_sleep_state{sleep_state="discard_all"} 1'],
        Engine(engine="0", asleep=True),
        (),
    ),
    "waiting for capacity negative": ([f"{CAPACITY} -3"], Engine(engine="0"), (WAITING_BY_REASON, "engine 0 is -3")),
    "two servers on one page": (
        [f'{RUNNING}{{model_name="a"}} 1.0', f'{RUNNING}{{model_name="b"}} 0.0'],
        Engine(engine="0"),
        (RUNNING, "2 times", "engine 0"),
    ),
    "a reason twice": ([f"{CAPACITY} 3"] * 2, Engine(engine="0"), (WAITING_BY_REASON, "2 times", "engine 0")),
    "a sleep state twice": (
        [f"{AWAKE} 0", f"{AWAKE} 1"],
        Engine(engine="0"),
        ("vllm:engine_sleep_state", "2 times", "engine 0"),
    ),
}


@pytest.mark.parametrize(("lines", "expected", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_figure_is_a_gap(lines: list[str], expected: Engine, reason: tuple[str, ...]) -> None:
    """An impossible figure is missing from the engine, and a gap names it; the others stand."""
    gaps = (Gap(source=SOURCE, kind="failed", reason=containing(*reason)),) if reason else ()
    assert ((expected,), gaps) == parse_engines(parse_page(engine_page(*lines)))


def test_fraction_of_a_count_is_rounded() -> None:
    """A count that was averaged on its way, as multiprocess modes can, comes out whole."""
    engines, gaps = parse_engines(parse_page("vllm:num_requests_running 2.6\n"))
    assert ((Engine(engine="0", requests_running=3),), ()) == (engines, gaps)


def test_engines_come_in_numeric_order() -> None:
    """Ten data-parallel engines are listed by number, labels that are none after them."""
    labels = ["10", "2", "x", "0", "٣", "9" * 60]
    page = parse_page("".join(f'vllm:num_requests_running{{engine="{label}"}} 0\n' for label in labels))
    engines, _ = parse_engines(page)
    assert engines is not None
    assert ["0", "2", "٣", "10", "9" * 60, "x"] == [engine.engine for engine in engines]


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
    """More engines than any server has are a gap, also where each name has its own: 7,680 held a daemon for 4 s."""
    many = "".join(f'vllm:num_requests_running{{engine="{number}"}} 0\n' for number in range(5_000))
    others = "".join(f'{name}{{engine="{name}{at}"}} 0\n' for name in POLLED_NAMES for at in range(MAX_SERIES))
    for page in (many, others):
        engines, gaps = parse_engines(parse_page(page))
        assert (None, ["refused"]) == (engines, [gap.kind for gap in gaps])


def test_hostile_labels_and_gaps_are_few() -> None:
    """24 labels of 15,000 characters, others in each page, grew a daemon by 100 MB a minute."""
    page = parse_page(f'vllm:num_requests_running{{engine="{"x" * 15_000}"}} -1\n')
    assert (None, "refused") == (parse_engines(page)[0], parse_engines(page)[1][0].kind)

    page = parse_page("".join(f'vllm:num_requests_running{{engine="{number}"}} -1\n' for number in range(500)))
    engines, gaps = parse_engines(page)
    assert (500, MAX_GAPS) == (len(engines or ()), len(gaps))
