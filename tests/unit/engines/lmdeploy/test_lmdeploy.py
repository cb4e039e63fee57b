"""LMDeploy: a share of its pool and nothing else, whether it sleeps, its requests and its logs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from kvdiag.engines.engine import SOURCE
from kvdiag.engines.lmdeploy import ENGINE, completion_body, generated, parallel_ranks
from kvdiag.engines.lmdeploy.metrics import ON_A_TIMER, parse_engines, parse_pools
from kvdiag.errors import KvdiagError
from kvdiag.model import Engine, Gap
from kvdiag.sources.http import HttpReader
from tests.builders.answers import containing
from tests.builders.metrics_pages import parse_page
from tests.builders.scrapes import SCRAPES, scrape

PAGE = "lmdeploy-0.18-written"


def test_the_share_in_use_is_read() -> None:
    """Usage, requests and tokens; preemptions are not counted."""
    engine = Engine(
        engine="0",
        kv_usage_ratio=0.375,
        requests_running=5,
        requests_waiting=1,
        prompt_tokens_total=40_960,
        generation_tokens_total=2000,
        requests_finished_total=20,
        prefix_queries_total=40_960,
        prefix_hits_total=1024,
    )
    assert ((engine,), ()) == parse_engines(scrape(PAGE))


def test_the_pool_s_size_is_nowhere() -> None:
    """Blocks cannot be counted: the gap says where the size is printed."""
    assert ((), (Gap(SOURCE, "absent", containing("startup log")),)) == parse_pools(scrape(PAGE), "0.18.0", ())
    shown = ENGINE.capabilities(scrape(PAGE))
    assert (True, False, False) == (shown.usage, shown.blocks, shown.salt)


@pytest.mark.parametrize(("caching", "how"), [("False", "startup log"), ("True", "--enable-prefix-caching")])
def test_the_gap_says_what_stands_in_the_way_of_a_run(caching: str, how: str) -> None:
    """A run measures the pool, unless cached blocks count as used."""
    page = parse_page(f'lmdeploy:backend_config_info{{enable_prefix_caching="{caching}"}} 1\n')
    assert ((), (Gap(SOURCE, "absent", containing(how)),)) == parse_pools(page, None, ())


@pytest.mark.parametrize(("caching", "visible"), [("False", True), ("True", False), (None, False)])
def test_a_leak_shows_only_where_nothing_is_cached(caching: str | None, visible: bool) -> None:
    """Blocks of the prefix cache are in the share of an idle server, where there is one or may be one."""
    line = "" if caching is None else f'lmdeploy:backend_config_info{{enable_prefix_caching="{caching}"}} 1\n'
    assert visible is ENGINE.capabilities(parse_page(f"lmdeploy:gpu_cache_usage_perc 0.5\n{line}")).returns


@pytest.mark.parametrize("usage", ["1.5", "NaN", "-0.1"])
def test_an_impossible_share_is_a_gap(usage: str) -> None:
    """A share in percent, or none, is left out."""
    engines, gaps = parse_engines(parse_page(f"lmdeploy:gpu_cache_usage_perc {usage}\n"))
    assert engines is not None
    assert (None, ["failed"]) == (engines[0].kv_usage_ratio, [gap.kind for gap in gaps])


def read(answers: dict[str, Callable[[], httpx2.Response]], times: int = 1) -> tuple[list[Engine], list[str]]:
    """The engine as read several times, and the paths that were asked for."""
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        made = answers.get(request.url.path, lambda: httpx2.Response(404))()

        async def wire() -> AsyncIterator[bytes]:
            yield made.content

        return httpx2.Response(made.status_code, content=wire())

    async def ask() -> list[Engine]:
        async with httpx2.AsyncClient(base_url="http://place", transport=httpx2.MockTransport(answer)) as client:
            reader = ENGINE.open(HttpReader(client))
            return [engines[0] for engines, _ in [await reader.read() for _ in range(times)] if engines]

    return asyncio.run(ask()), asked


METRICS: dict[str, Callable[[], httpx2.Response]] = {
    "/metrics": lambda: httpx2.Response(200, text=(SCRAPES / f"{PAGE}.prom").read_text())
}


@pytest.mark.parametrize(
    ("body", "asleep"),
    [({"is_sleeping": True}, True), ({"is_sleeping": False}, False), ({"is_sleeping": 1}, None), ([], None)],
)
def test_whether_it_sleeps_is_asked(body: object, asleep: bool | None) -> None:
    """GET /is_sleeping says it; its metrics do not."""
    (engine,), _ = read({**METRICS, "/is_sleeping": lambda: httpx2.Response(200, json=body)})
    assert asleep is engine.asleep


def test_a_server_without_the_answer_is_asked_once() -> None:
    """Older versions answer with 404, and are not asked again."""
    engines, asked = read(METRICS, times=3)
    assert [None] * 3 == [engine.asleep for engine in engines]
    assert ["/metrics", "/is_sleeping", "/metrics", "/metrics"] == asked


def test_a_request_has_token_ids_and_a_length() -> None:
    """`/generate` takes ids, and continues past the end of a text."""
    body = completion_body(model="m", token_ids=[5, 6], max_tokens=7, cache_salt=None, user=None)
    assert ([5, 6], 7, True) == (body["input_ids"], body["max_tokens"], body["ignore_eos"])


@pytest.mark.parametrize(
    ("event", "before", "tokens"),
    [
        ({"meta_info": {"completion_tokens": 3}}, 2, 3),
        ({"meta_info": {"completion_tokens": 1}}, 2, 2),
        ({"meta_info": {"completion_tokens": "9"}}, 2, 2),
        ({"meta_info": None}, 2, 2),
        ({}, 2, 2),
    ],
)
def test_events_have_the_tokens_so_far(event: dict[str, Any], before: int, tokens: int) -> None:
    """Each event has the number of all tokens; another value is not believed."""
    assert tokens == generated(event, before)


@pytest.mark.parametrize("of", ["free", "cacheable"])
def test_turbomind_s_log_has_the_region(of: str) -> None:
    """Its budget in bytes, and the share that it was asked to take."""
    report = ENGINE.parse_startup_log(
        f"[TM][INFO] Object cache budget: 43200.00 MB from {of} 54000.00 MB and ratio 0.80\n"
    )
    (rank,) = report.ranks
    assert rank.pool is not None
    assert (43_200 << 20, 0.8) == (rank.pool.nominal_bytes, report.settings.memory_fraction_ratio)


# A public log of InternLM-Chat-7B: a block of 128 tokens x 512 KiB
BLOCKS = "[TM][INFO] [BlockManager] block_size = 64 MB\n[TM][INFO] [BlockManager] max_block_count = 159\n"


def test_turbomind_s_older_log_has_blocks() -> None:
    """Until 0.14 the size of a block in whole MB, rounded down, and their number."""
    report = ENGINE.parse_startup_log(BLOCKS + "[TM][INFO] [BlockManager] chunk_size = 1\n")
    (rank,) = report.ranks
    assert rank.pool is not None
    assert (159, 159 * 64 << 20, 159 * 65 << 20) == (report.num_blocks, rank.pool.low_bytes, rank.pool.high_bytes)


def test_a_block_s_decimals() -> None:
    """Newer logs print three of them (github.com/InternLM/lmdeploy/issues/3825): no part of a MB is open then."""
    (rank,) = ENGINE.parse_startup_log(BLOCKS.replace("64 MB", "9.000 MB")).ranks

    assert rank.pool is not None
    assert abs(rank.pool.nominal_bytes - 159 * 9 * 2**20) <= rank.pool.slack_bytes < 2**17


@pytest.mark.parametrize("line", BLOCKS.splitlines())
def test_half_of_the_blocks_is_no_pool(line: str) -> None:
    """Either line alone says nothing of the pool's bytes."""
    with suppress(KvdiagError):
        assert not ENGINE.parse_startup_log(line).ranks


def test_a_log_of_settings_alone_is_no_report() -> None:
    """Without a pool there is nothing to compare."""
    with pytest.raises(KvdiagError):
        ENGINE.parse_startup_log("PytorchEngineConfig(tp=1, session_len=None, cache_max_entry_count=0.8)")


@pytest.mark.parametrize(
    ("commands", "ranks"),
    [
        (["lmdeploy serve api_server m --tp 4"], (4, 1)),
        (["lmdeploy serve api_server m"], (1, 1)),
        (["lmdeploy serve proxy"], None),
    ],
)
def test_ranks_by_the_command_line(commands: list[str], ranks: tuple[int, int] | None) -> None:
    """One rank without the flag; a proxy serves nothing."""
    assert ranks == parallel_ranks(commands)


def test_a_page_without_the_timer_s_figures_is_of_no_use() -> None:
    """0.9 keeps the figures of the last output, so that an idle server shows the blocks of an ended request."""
    page = scrape(PAGE)
    old = {name: lines for name, lines in page.items() if name != ON_A_TIMER}
    assert (True, False) == (ENGINE.capabilities(page).usage, ENGINE.capabilities(old).usage)
