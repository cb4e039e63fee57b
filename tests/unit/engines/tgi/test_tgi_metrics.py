"""TGI's metrics: tokens that admitted requests reserve."""

import pytest

from kvdiag.engines.engine import SOURCE
from kvdiag.engines.tgi import ENGINE
from kvdiag.engines.tgi.metrics import parse_engines, parse_pools
from kvdiag.model import Engine, Gap, KvPool
from tests.builders.answers import containing
from tests.builders.metrics_pages import parse_page
from tests.builders.scrapes import scrape

CAPACITY, RESERVED = "tgi_batch_max_total_tokens", "tgi_batch_current_max_tokens"


def test_reserved_tokens_are_the_usage() -> None:
    """The batch's reserved tokens of those that fit, the queue, and sums of histograms as totals."""
    engine = Engine(
        engine="0",
        kv_usage_ratio=21_470 / 123_449,
        requests_running=10,
        requests_waiting=3,
        preemptions_total=0,
        prompt_tokens_total=51_200,
        generation_tokens_total=1200,
        requests_finished_total=12,
        prefix_queries_total=51_200,
        prefix_hits_total=2048,
    )
    assert ((engine,), ()) == parse_engines(scrape("tgi-3.3-written"))


def test_the_pool_is_in_tokens() -> None:
    """One token a unit, all of which can be reserved."""
    pool = KvPool(
        engine="0",
        block_tokens=1,
        total_blocks=123_449,
        usable_blocks=123_449,
        usage_blocks=123_449,
        capacity_tokens=123_449,
    )
    assert ((pool,), ()) == parse_pools(scrape("tgi-3.3-written"), "3.3.6", ())


def test_gauges_that_no_batch_has_set_are_zero() -> None:
    """A server that has warmed up and served nothing is idle."""
    engines, gaps = parse_engines(scrape("tgi-3.3-before-first-batch-written"))
    assert engines is not None
    assert (0.0, True, ()) == (engines[0].kv_usage_ratio, engines[0].idle, gaps)


def test_a_queue_before_the_first_batch_is_not_idle() -> None:
    """The queue's gauge is set when a request arrives."""
    engines, _ = parse_engines(parse_page(f"{CAPACITY} 100\ntgi_queue_size 2\n"))
    assert engines is not None
    assert (0, 2) == (engines[0].requests_running, engines[0].requests_waiting)


def test_without_the_capacity_nothing_is_known() -> None:
    """Before its warm-up a server reports no capacity: neither usage nor pool, and no zero."""
    page = parse_page("tgi_request_count 0\ntgi_queue_size 0\n")
    engines, _ = parse_engines(page)
    assert engines is not None
    assert (None, None) == (engines[0].kv_usage_ratio, engines[0].requests_running)
    assert ((), (Gap(SOURCE, "absent", containing(CAPACITY)),)) == parse_pools(page, None, ())
    assert not ENGINE.capabilities(page).usage


@pytest.mark.parametrize(("reserved", "reason"), [("101", "is 101"), ("NaN", "is nan"), ("-1", "is -1")])
def test_impossible_reservations_are_a_gap(reserved: str, reason: str) -> None:
    """More tokens than fit, or no number of tokens."""
    engines, gaps = parse_engines(parse_page(f"{CAPACITY} 100\n{RESERVED} {reserved}\n"))
    assert engines is not None
    assert (None, (Gap(SOURCE, "failed", containing(RESERVED, reason)),)) == (engines[0].kv_usage_ratio, gaps)


def test_its_capabilities() -> None:
    """Tokens are reserved; a leaked one shows nowhere; neither sleep, nor salts, nor a forced length."""
    shown = ENGINE.capabilities(scrape("tgi-3.3-written"))
    assert ("token", True, True, True) == (shown.unit, shown.usage, shown.blocks, shown.reserved)
    assert not any((shown.returns, shown.salt, shown.forces_length))


def test_lengths_of_finished_requests() -> None:
    """Generated tokens by their buckets, and the mean prompt."""
    lengths = ENGINE.parse_lengths(scrape("tgi-3.3-written"))
    assert lengths is not None
    assert (12, 2048.0) == (sum(lengths.counts), lengths.mean_prompt_tokens)
