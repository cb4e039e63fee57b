"""Servers of every engine that send what none ever sent: a gap each, never an exception or a wrong figure."""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.engines import ENGINES, llamacpp, ollama, recognise
from kvdiag.engines.engine import EngineAdapter
from kvdiag.engines.llamacpp import slots
from kvdiag.engines.ollama import runners
from kvdiag.model import Engine, KvPool
from kvdiag.sources.http import HttpReader, Unreadable
from kvdiag.sources.prometheus_text import Page, Series
from tests.builders.metrics_pages import parse_page
from tests.fixtures.hostile import Hostile, reply

SCRAPES = Path(__file__).parents[2] / "fixtures" / "scrapes"

PAGES = [
    pytest.param(engine, path, id=path.stem)
    for engine in ENGINES
    for path in sorted(SCRAPES.glob(f"{engine.name}-*.prom"))
]
READ = [engine for engine in ENGINES if any(SCRAPES.glob(f"{engine.name}-*.prom"))]
"""Engines with a metrics endpoint of their own."""

COMMANDS = ("", "x" * 2**14, "--block-size 99999999999 --page-size -1 -c -5 -np 0", "\ud800 \0 -c 1e9 --page-size=")
VALUES = (math.nan, math.inf, -math.inf, -1.0, 0.0, 0.5, 1.5, 1e300, 1e-300, 2.0**63, 5e-324)
LABELS = ("", "x" * 5000, "-1", "NaN", "9" * 400, "\ud800", "\u0663", "0x10", "None", "1e9", "a\nb\0")


@cache
def recorded(path: Path) -> Page:
    """A scrape, parsed."""
    return parse_page(path.read_text(encoding="utf-8"))


def read_all(engine: EngineAdapter, page: Page) -> tuple[tuple[Engine, ...], tuple[KvPool, ...]]:
    """What every parser of an engine makes of a page."""
    engines, gaps = engine.parse_engines(page)
    assert engines or gaps
    pools: tuple[KvPool, ...] = ()
    for version in (None, "0.0.0", "99.99.99", "b11549-abc", "\ud800"):
        pools, pool_gaps = engine.parse_pools(page, version, COMMANDS)
        assert pools or pool_gaps
        assert all(len(gap.reason) < 2000 for gap in pool_gaps)
    engine.parse_caches(page)
    engine.parse_lengths(page)
    engine.capabilities(page)
    engine.kv_connector(page, COMMANDS)
    engine.parallel_ranks(COMMANDS)
    assert len(gaps) <= 64
    assert len(engines or ()) <= 512
    return engines or (), pools


def spoilt(page: Page, spoil: Callable[[str, Series], tuple[Series, ...]]) -> Page:
    """The page with each series replaced."""
    return {name: tuple(each for line in lines for each in spoil(name, line)) for name, lines in page.items()}


@pytest.mark.parametrize(("engine", "path"), PAGES)
def test_values_that_cannot_be(engine: EngineAdapter, path: Path) -> None:
    """Every figure is inside its range or missing, though all values of a page are impossible."""
    for value in VALUES:
        page = recorded(path)
        valued = {name: tuple(replace(line, value=value) for line in lines) for name, lines in page.items()}
        engines, _ = read_all(engine, valued)
        ratios = [one.kv_usage_ratio for one in engines if one.kv_usage_ratio is not None]
        assert all(0.0 <= ratio <= 1.0 for ratio in ratios), value
        if not 0 <= value <= 2**60:
            assert all(one.requests_running is None for one in engines), value


@pytest.mark.parametrize("engine", [llamacpp.ENGINE, ollama.ENGINE], ids=lambda engine: engine.name)
@pytest.mark.parametrize("value", VALUES)
def test_slots_that_cannot_be(engine: EngineAdapter, value: float) -> None:
    """Kvdiag makes these series of a server's answers, but the server's own metrics may have their names, too."""
    names = (slots.SLOTS, slots.CONTEXT, slots.CELLS, slots.TOKENS, slots.OUTPUT, runners.PORT)
    busy = {slots.PROCESSING: (Series({"id": "0", "model": "x"}, 1.0),), runners.LOADED: (Series({}, 1.0),)}
    labels = {"id": "0", "model": "x"}
    read_all(engine, busy | {name: (Series(labels, value),) for name in names})
    for name in names:
        read_all(engine, busy | {other: (Series(labels, value if other == name else 2.0),) for other in names})


@pytest.mark.parametrize(("engine", "path"), PAGES)
def test_labels_that_cannot_be(engine: EngineAdapter, path: Path) -> None:
    """A label with any text is one engine's, or refused."""
    page = recorded(path)
    for text in LABELS:
        labelled = {
            name: tuple(replace(line, labels=dict.fromkeys(line.labels, text)) for line in lines)
            for name, lines in page.items()
        }
        read_all(engine, labelled)


@pytest.mark.parametrize(("engine", "path"), PAGES)
def test_series_that_appear_twice(engine: EngineAdapter, path: Path) -> None:
    """Of a figure with two values neither is taken; SGLang's ranks report one pool, of which the largest counts."""
    page = recorded(path)
    engines, pools = read_all(engine, spoilt(page, lambda _, line: (line, replace(line, value=line.value / 2))))
    once = all(one.requests_waiting is None or one.requests_running is None for one in engines) or not pools
    assert once or engine.name == "sglang"


@pytest.mark.parametrize(("engine", "path"), PAGES)
def test_more_engines_than_a_server_has(engine: EngineAdapter, path: Path) -> None:
    """A page of thousands of servers is refused, not read."""
    page = recorded(path)

    def many(_: str, line: Series) -> tuple[Series, ...]:
        return tuple(
            replace(line, labels={**line.labels, "engine": str(n), "dp_rank": str(n), "model_name": str(n)})
            for n in range(700)
        )

    engines, _ = read_all(engine, spoilt({name: lines[:1] for name, lines in page.items()}, many))
    # A page without any of the series that are counted is still one server's.
    assert len(engines) <= 1


@pytest.mark.parametrize("engine", READ, ids=lambda engine: engine.name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pages_of_parts(engine: EngineAdapter, data: st.DataObject) -> None:
    """Any part of a real page, with any value and label in any place, does no harm."""
    paths = sorted(SCRAPES.glob(f"{engine.name}-*.prom"))
    page = recorded(data.draw(st.sampled_from(paths)))
    names = data.draw(st.lists(st.sampled_from(sorted(page)), max_size=12, unique=True))
    values, labels = st.sampled_from(VALUES), st.sampled_from(LABELS)

    def spoil(_: str, line: Series) -> tuple[Series, ...]:
        changed = {name: data.draw(st.one_of(st.just(text), labels)) for name, text in line.labels.items()}
        return (Series(changed, data.draw(st.one_of(st.just(line.value), values))),) * data.draw(st.integers(0, 2))

    read_all(engine, spoilt({name: page[name][:3] for name in names}, spoil))


BODIES = {
    "nothing": "",
    "null": "null",
    "a number": "4",
    "a text": '"x"',
    "an empty list": "[]",
    "an empty object": "{}",
    "a list of nothing": "[null, [], {}, 3, true]",
    "a list of objects": '[{"id": {}, "n_ctx": "x", "is_processing": 4, "next_token": 7}]',
    "models that are none": '{"data": [7], "models": 4, "loads": {"a": 1}, "instances": 3}',
    "a model without a name": '{"data": [{"id": 7, "owned_by": [], "max_model_len": true, "meta": "x"}]}',
    "numbers out of range": '{"data": [{"id": "m", "max_model_len": -1, "meta": {"n_ctx": 1e400}}], "version": 5,'
    ' "loads": [{"dp_rank": -1, "num_used_tokens": 1e999, "memory": []}], "total_slots": -3, "n_ctx": NaN,'
    ' "default_generation_settings": {"n_ctx": -1}}',
    "deep nesting": '{"data": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "many values": '{"loads": [' + "0," * 400_000 + "0]}",
    "long text": '{"data": [{"id": "' + "m" * 100_000 + '", "owned_by": "' + "o" * 100_000 + '"}]}',
    "surrogates": '{"data": [{"id": "\\ud800", "owned_by": "\\udfff"}], "version": "\\ud800"}',
    "HTML": "<!DOCTYPE html><html><body>Sign in</body></html>",
    "cut off": '{"data": [{"id": "m"',
    "binary": "\0\1\2",
}


@pytest.mark.parametrize(("body", "status"), [*((body, 200) for body in BODIES), ("null", 500)])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_answers_that_are_none(engine: EngineAdapter, body: str, status: int) -> None:
    """On every path the same nonsense: a reason, in one line, and nothing else."""

    async def ask(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url) as http:
            client = engine.open(HttpReader(http))
            for work in (client.identify, client.page, client.lengths):
                with suppress(Unreadable):
                    await work()
            engines, gaps = await client.read()
            assert engines or gaps
            assert all("\n" not in gap.reason for gap in gaps)
            assert (await recognise(HttpReader(http))).engine in ENGINES

    with Hostile(reply(BODIES[body], status=status, content_type="application/json")) as server:
        asyncio.run(asyncio.wait_for(ask(server.url), 60))
