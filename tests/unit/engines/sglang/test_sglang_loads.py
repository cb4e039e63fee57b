"""The snapshots of /v1/loads: which of them show an idle scheduler, and what they add to the page."""

import pytest

from kvdiag.engines.sglang.client import Rank, generates_none, parse_loads, parse_server_info, with_loads
from kvdiag.engines.sglang.metrics import parse_engines, parse_pools
from kvdiag.model import Engine
from kvdiag.sources.prometheus_text import Page
from tests.builders.metrics_pages import parse_page
from tests.unit.engines.sglang.sglang_pages import load, loads_of, page_of


def read(rank: Rank, earlier: Rank | None = None, page: Page | None = None) -> Engine:
    """The engine that a snapshot makes of a page, after an earlier snapshot."""
    engines, _ = parse_engines(with_loads(page or {}, (rank,), {} if earlier is None else {0: earlier}))
    assert engines
    return engines[0]


def test_snapshot_counts_before_the_page() -> None:
    """The page is of another moment: its running requests do not belong to the tokens of the snapshot."""
    page = page_of("0.5.23-cpu-page1-10x1600-after")
    (rank,) = loads_of("0.5.23-cpu-page1-10x1600-load")
    engine = read(rank, page=page)
    assert (engine.requests_running, engine.requests_waiting) == (2, 5)
    assert engine.kv_usage_ratio == 7096 / 8192


def test_prompt_in_chunks_runs() -> None:
    """A request whose prompt is processed in chunks is counted nowhere, but its tokens wait to be processed."""
    assert read(load(used_tokens=4096, uncached_tokens=3904)).idle is False


def test_tokens_without_a_request_are_no_idle_pool_at_first() -> None:
    """A request that was just prefilled is not counted either: what one snapshot shows may be such a request."""
    assert read(load(used_tokens=101)).idle is None


@pytest.mark.parametrize(
    "later",
    [
        pytest.param({"at_seconds": 2.0, "work": (200.0, 16.0)}, id="it worked in between"),
        pytest.param({"at_seconds": 1.0}, id="the same snapshot"),
        pytest.param({"at_seconds": 2.0, "used_tokens": 103}, id="other tokens are in use"),
    ],
)
def test_short_requests_one_after_the_other_are_no_leak(later: dict[str, object]) -> None:
    """Each snapshot may show another request of the same length, after its prefill and before it is counted."""
    earlier = load(used_tokens=101)
    assert read(load(**{"used_tokens": 101, **later}), earlier).idle is None


def test_tokens_that_stay_while_nothing_is_done_are_idle() -> None:
    """The second snapshot of a scheduler that did nothing since the first shows that no request holds these tokens."""
    engine = read(load(used_tokens=42, at_seconds=2.0), load(used_tokens=42))
    assert (engine.idle, engine.kv_usage_ratio) == (True, 42 / 8192)


def test_tokens_of_open_sessions_are_idle_late() -> None:
    """Where clients can have sessions, the page says half a minute late how many of them are open."""
    page = parse_page("sglang:num_streaming_sessions 0\n")
    assert read(load(used_tokens=42, at_seconds=31.5), load(used_tokens=42), page).idle is None
    assert read(load(used_tokens=42, at_seconds=32.5), load(used_tokens=42), page).idle is True


def test_tokens_of_sessions_that_the_page_shows_are_idle_at_once() -> None:
    """Whose tokens these may be is known then: a run with sessions open is judged by what it adds."""
    page = parse_page('sglang:num_streaming_sessions{dp_rank="0"} 1\n')
    engine = read(load(used_tokens=42, at_seconds=2.0), load(used_tokens=42), page)
    assert (engine.idle, engine.open_sessions) == (True, 1)


def test_state_slots_are_counted_once_the_page_must_have_been_renewed() -> None:
    """No snapshot has them, and the page of an idle scheduler is half a minute late."""
    page = parse_page("sglang:mamba_used_tokens 2\n")
    counts = [read(load(at_seconds=at), load(), page).state_slots_used for at in (31.5, 32.5)]
    assert [None, 2] == counts
    assert read(load(at_seconds=32.5, running=1), load(), page).state_slots_used is None


def test_state_slots_are_counted_at_once_where_the_page_shows_no_token_in_use() -> None:
    """Each prefill writes its tokens there, so that such a page was renewed after the last request."""
    renewed, stale = (parse_page(f"sglang:mamba_used_tokens 2\nsglang:kv_used_tokens {used}\n") for used in (0, 101))
    assert [2, None] == [read(load(), page=page).state_slots_used for page in (renewed, stale)]
    assert read(load(used_tokens=101), page=renewed).state_slots_used is None


def test_empty_pool_is_idle_at_once() -> None:
    """Where nothing runs and no token is in use there is nothing to wait for."""
    assert read(load()).idle is True


def test_data_parallel_ranks_are_engines() -> None:
    """Each rank's snapshot is an engine with a pool of its own."""
    page = with_loads(page_of("0.5.23-cpu-dp2-8x700-load"), loads_of("0.5.23-cpu-dp2-8x700-load"), {})
    engines, _ = parse_engines(page)
    assert [(one.engine, one.requests_running, one.kv_usage_ratio) for one in engines or ()] == [
        ("0", 4, 2004 / 4096),
        ("1", 4, 2004 / 4096),
    ]


def test_pool_of_an_older_page_comes_from_the_loads() -> None:
    """A page without the pool's size gets it from the snapshot."""
    page = with_loads(page_of("0.4-docs-excerpt"), (load(total_tokens=400_000),), {})
    (pool,), gaps = parse_pools(page, None)
    assert (pool.usable_blocks, gaps) == (400_000, ())


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"loads": {}},
        {"loads": []},
        {"loads": [None]},
        {"loads": [{"dp_rank": 0}]},
        {
            "loads": [
                {"dp_rank": 0, "timestamp": 1, "num_running_reqs": -1, "num_waiting_reqs": 0, "num_used_tokens": 0}
            ]
        },
        {
            "loads": [
                {"dp_rank": 0, "timestamp": "x", "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
            ]
        },
        {
            "loads": [
                {"dp_rank": 0, "timestamp": 10**400, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
            ]
        },
        {"loads": [{}] * 1000},
    ],
)
def test_impossible_loads_are_none(answer: object) -> None:
    """What is no list of possible snapshots is not used at all."""
    assert parse_loads(answer) is None


def test_two_snapshots_of_one_rank_are_refused() -> None:
    """One server has each rank once."""
    one = {"dp_rank": 0, "timestamp": 1, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
    assert parse_loads({"loads": [one, one]}) is None


@pytest.mark.parametrize(
    ("answer", "version"),
    [({"version": "0.5.23"}, "0.5.23"), ({"version": "x" * 1000}, None), ({"version": 5}, None), ({}, None)],
)
def test_version_is_a_short_text(answer: object, version: str | None) -> None:
    """The server's version is what it says, within limits."""
    info = parse_server_info(answer)
    assert info is not None
    assert info.version == version


def test_server_info_that_is_no_object_is_none() -> None:
    """Only an object has figures."""
    assert parse_server_info([1]) is None


def test_a_model_that_generates_nothing_is_known() -> None:
    """Only where the server says so: a version without the field is asked for completions as before."""
    assert [True, False, False, False] == [
        generates_none(answer) for answer in ({"is_generation": False}, {"is_generation": True}, {}, [1])
    ]


def test_server_info_has_the_models_folder_and_the_intervals() -> None:
    """The models' list has only the name under which the model is served."""
    info = parse_server_info({"model_path": "/models/m", "load_snapshot_publish_interval": 40, "page_size": True})
    assert info is not None
    assert (info.model_path, dict(info.figures)) == ("/models/m", {"sglang:loads_publish_interval": 40.0})


def test_requests_that_run_at_once_are_those_of_the_snapshot() -> None:
    """The pool has the scheduler's limit of running requests, which no metric reports; without loads there is none."""
    page = page_of("0.5.23-cpu-page1-10x1600-load")
    ranks = loads_of("0.5.23-cpu-page1-10x1600-load")
    pools = [parse_pools(each, None)[0] for each in (page, with_loads(page, ranks, {}))]
    assert [[pool.max_requests for pool in each] for each in pools] == [[None], [2048]]
