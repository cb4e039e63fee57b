"""What llama.cpp's slots, settings and metrics say, as recorded and where they are wrong."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvdiag.engines.llamacpp import ENGINE
from kvdiag.engines.llamacpp.slots import (
    CELLS,
    SLEEPING,
    TOKENS,
    parse_engines,
    parse_pools,
    slots_of,
    slots_page,
    weights_bytes,
)
from kvdiag.model import Engine
from kvdiag.sources.prometheus_text import Page, Series
from tests.unit.engines.llamacpp.llama_answers import DEFAULT, SPLIT, answer, metrics, page

BUSY = {"id": 0, "n_ctx": 4096, "is_processing": True, "id_task": 1}


def only_engine(of: Page) -> Engine:
    """The one engine of a page."""
    engines, gaps = parse_engines(of)
    assert engines is not None
    assert () == gaps
    return engines[0]


def test_tokens_of_ended_requests_are_a_cache_and_not_in_use() -> None:
    """After the load all four slots hold 2,147 tokens; none processes a request, so none is in use."""
    after = page("unified4", "after")
    assert 2147 == max(line.value for line in after[TOKENS])
    engine = only_engine(after)
    assert (0.0, 0, 0, True) == (engine.kv_usage_ratio, engine.requests_running, engine.requests_waiting, engine.idle)


def test_tokens_of_running_requests_are_in_use() -> None:
    """Four slots process their prompts: of 2,048 tokens each 2,047 are there, of one, of others none yet."""
    loaded = page("unified4", "load")
    engine = only_engine(loaded)
    held = sum(line.value for line in loaded[TOKENS])
    assert (4, held) == (engine.requests_running, round((engine.kv_usage_ratio or 0.0) * 32768))


def test_all_slots_busy_leaves_waiting_requests_to_the_metrics() -> None:
    """A request waits only while every slot is taken; then the metrics alone show it."""
    loaded = page("unified4", "load")
    assert (None, False) == (only_engine(loaded).requests_waiting, only_engine(loaded).idle)
    engine = only_engine({**loaded, **metrics("b11549-unified4-load")})
    assert (4, 6, 2048) == (engine.requests_running, engine.requests_waiting, engine.prompt_tokens_total)


@pytest.mark.parametrize("name", ["b11549-unified4-load", "0c1e570-load"])
def test_without_slots_the_metrics_alone_are_read(name: str) -> None:
    """Requests are known then, the pool's usage is not."""
    engine = only_engine(metrics(name))
    assert (4, None) == (engine.requests_running, engine.kv_usage_ratio)


def test_an_older_build_has_the_same_slots() -> None:
    """The build of llama_cpp_python 0.3.36: four slots of 8,192 tokens."""
    older = slots_page(slots_of(answer("0c1e570-load-slots")))
    assert [8192.0] * 4 == [line.value for line in older["llamacpp:slot_context_tokens"]]
    assert 4 == only_engine(older).requests_running


def test_the_newest_output_token_has_no_cell_yet() -> None:
    """Prompt and output together are one more than the cells that they have; as many as that counts without it."""
    slot = {**BUSY, "n_prompt_tokens": 131, "n_prompt_tokens_processed": 100, "next_token": [{"n_decoded": 31}]}
    (tokens,) = slots_page(slots_of([slot]))[TOKENS]
    assert 130 == tokens.value
    (tokens,) = slots_page(slots_of([{**slot, "n_prompt_tokens": 130}]))[TOKENS]
    assert 130 == tokens.value


def test_drafted_tokens_are_not_in_use() -> None:
    """A slot with a draft model counts the three tokens drafted for the next step, too (recorded of b11549)."""
    slot = {**BUSY, "speculative": True, "n_prompt_tokens": 292, "n_prompt_tokens_processed": 100}
    (tokens,) = slots_page(slots_of([{**slot, "n_prompt_tokens_cache": 0, "next_token": [{"n_decoded": 189}]}]))[TOKENS]
    assert 288 == tokens.value


def test_more_tokens_than_cells_are_a_full_pool() -> None:
    """A slot counts the tokens of its next batch before there are cells for them."""
    slots = [{**BUSY, "id": number, "n_prompt_tokens": 1399} for number in range(4)]
    engine = only_engine({**slots_page(slots_of(slots)), CELLS: (Series({}, 4096.0),)})
    assert 1.0 == engine.kv_usage_ratio


def test_a_sleeping_server_is_idle_and_asleep() -> None:
    """Its settings are all that is read of it."""
    engine = only_engine({SLEEPING: (Series({}, 1.0),), TOKENS: ()})
    assert (True, True, 0) == (engine.asleep, engine.idle, engine.requests_running)


def test_a_server_with_both_endpoints_off_is_a_gap() -> None:
    """The reason names both flags."""
    engines, (gap,) = parse_engines({})
    assert (None, "absent") == (engines, gap.kind)
    assert "--metrics" in gap.reason
    assert "--no-slots" in gap.reason


@pytest.mark.parametrize(
    "slots",
    [
        None,
        7,
        {},
        ["x", 7, None, {}],
        [{"id": -1}],
        [{"id": True}],
        [{"id": 0, "is_processing": "yes", "n_ctx": 1.5, "n_prompt_tokens": "7", "next_token": 7}],
    ],
    ids=str,
)
def test_slots_that_are_none_have_no_series(slots: object) -> None:
    """An answer of another form is no state of a slot."""
    found = slots_page(slots_of(slots))
    assert not found.get("llamacpp:slot_processing")
    assert not found.get("llamacpp:slot_context_tokens")


@pytest.mark.parametrize("figure", [-1, 2**60, 1.5, "7", None, True])
def test_impossible_tokens_of_a_running_request_leave_the_usage_unknown(figure: object) -> None:
    """The slot is known to process, its tokens are not."""
    found = {**slots_page(slots_of([{**BUSY, "n_prompt_tokens": figure}])), CELLS: (Series({}, 4096.0),)}
    engine = only_engine(found)
    assert (1, None) == (engine.requests_running, engine.kv_usage_ratio)


def test_a_crowd_of_slots_is_refused() -> None:
    """No server has so many."""
    engines, (gap,) = parse_engines(slots_page(slots_of([{**BUSY, "id": number} for number in range(600)])))
    assert (None, "refused") == (engines, gap.kind)


def test_slots_that_share_a_pool_count_it_once() -> None:
    """Each of the four slots says 32,768 tokens; the pool has as many, of one token each."""
    (pool,), gaps = parse_pools(page("unified4", "load"), None, [DEFAULT])
    assert ["absent"] == [gap.kind for gap in gaps]  # its bytes: the model's file is not here
    assert (1, 32768, 32768, 32768) == (pool.block_tokens, pool.total_blocks, pool.usable_blocks, pool.usage_blocks)
    assert (4, 1.0, "f16") == (pool.max_requests, pool.max_concurrency, pool.cache_dtype)


def test_slots_with_a_pool_each_add_up() -> None:
    """Four slots of 8,192 tokens: no request has more than a quarter of the pool."""
    (pool,), gaps = parse_pools(page("split4", "load", SPLIT), None, [f"{SPLIT} -ctk q8_0 -ctv q4_0"])
    assert ["absent"] == [gap.kind for gap in gaps]
    assert (32768, 4.0, "q4_0/q8_0") == (pool.usable_blocks, pool.max_concurrency, pool.cache_dtype)


@pytest.mark.parametrize(
    "broken", [{}, {"llamacpp:slots": (Series({}, 0.0),)}, {"llamacpp:slots": (Series({}, -1.0),)}]
)
def test_a_server_that_reports_no_slots_has_no_pool(broken: Mapping[str, Any]) -> None:
    """The gap says where to look."""
    pools, (gap,) = parse_pools(broken, None, [DEFAULT])
    assert ((), "absent") == (pools, gap.kind)


def test_the_weights_are_those_that_are_loaded() -> None:
    """/v1/models has their size; an impossible one is none."""
    assert 7_484_416 == weights_bytes(answer("b11549-unified4-models"))
    assert {None} == {weights_bytes({"data": [{"meta": {"size": size}}]}) for size in (0, -1, "x", True, 2**60)}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        ("b11434-0123abc", (11434, 0, 0)),
        ("11434", (11434, 0, 0)),
        ("b0-unknown", None),
        ("b1-0c1e570", None),
        (None, None),
    ],
)
def test_a_build_is_a_version(build: str | None, expected: tuple[int, int, int] | None) -> None:
    """A build without a number has none."""
    assert expected == ENGINE.parse_version(build)


def test_its_metrics_alone_show_neither_pool_nor_usage() -> None:
    """What a Prometheus has of it; with its slots both are there, and ended requests stay hidden in their cache."""
    alone, with_slots = ENGINE.capabilities(metrics("b11549-unified4-load")), ENGINE.capabilities({TOKENS: ()})
    assert (False, False) == (alone.usage, alone.blocks)
    assert ("cell", True, True, False, False) == (
        with_slots.unit,
        with_slots.usage,
        with_slots.blocks,
        with_slots.returns,
        with_slots.waits,
    )


def test_an_event_counts_tokens_by_its_timings() -> None:
    """Several tokens come in one event; an event without timings, as of another server, is one."""
    count = ENGINE.request.generated
    assert 9 == count({"choices": [{}], "timings": {"predicted_n": 9}}, 1)
    assert 2 == count({"choices": [{}], "timings": {"predicted_n": -9}}, 1)
    assert 2 == count({"choices": [{}], "timings": 7}, 1)
