"""What `kvdiag` says of an SGLang 0.5.23 whose pool is small, which loses tokens at aborts, or runs out of memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.hostile import eventually
from tests.integration.alerts.test_rules_on_pages import assert_queries, input_series
from tests.integration.sglang.servers import Nursery, Server
from tests.integration.sglang.test_run_on_sglang import assert_exact, leak, looked_at
from tests.integration.vllm.cli import Result, kvdiag
from tests.unit.commands.serve.test_serve import daemon

pytestmark = pytest.mark.long

POOL_TOKENS = 8192
FORGOTTEN_TOKENS = 7
LEFT = 4
SEQUENTIAL_REQUESTS = 8


def run_on(server: Server) -> Result:
    """A run of the four steps."""
    return kvdiag("run", "--url", server.url, "--output", "json")


@pytest.fixture
def lossy(nursery: Nursery) -> Iterator[Server]:
    """A server that loses tokens when a request is aborted."""
    env = {
        "KVDIAG_TEST_PLUGIN": "forget_aborted",
        "KVDIAG_TEST_FORGOTTEN_TOKENS": str(FORGOTTEN_TOKENS),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
    }
    with nursery.start("lossy", "--max-total-tokens", "32768", env=env) as one:
        yield one


@pytest.fixture
def small(nursery: Nursery) -> Iterator[Server]:
    """A pool of a third of the concurrent step's tokens."""
    with nursery.start("small-pool", "--max-total-tokens", str(POOL_TOKENS)) as one:
        yield one


def test_a_pool_too_small_for_ten_requests_is_judged_by_shorter_ones(small: Server) -> None:
    """Requests that waited for room are the finding, and are repeated with as many tokens as it holds."""
    result = run_on(small)
    assert (result.code, result.finding("capacity.concurrency")["status"]) == (1, "suspect"), result.not_ok
    assert result.finding("leak.kv_blocks")["status"] == "ok"
    assert_exact(result, 1)
    tokens = result.step("concurrent")["measured"]["tokens"]
    assert POOL_TOKENS / 2 < tokens < POOL_TOKENS


def test_tokens_lost_with_aborted_requests_are_a_fault(lossy: Server, tmp_path: Path) -> None:
    """Clients that disconnect midway leave seven tokens each, which no request of the run adds to; a daemon's metrics
    fire the alert.
    """
    for number in range(LEFT):
        lossy.leave(300, first=number)
    lost = LEFT * FORGOTTEN_TOKENS
    assert eventually(lambda: lossy.used_tokens() == lost)
    result = run_on(lossy)
    finding = result.finding("leak.kv_blocks")
    evidence = {one["name"]: one["value"] for one in finding["evidence"]}
    assert (result.code, finding["status"]) == (2, "fault"), result.not_ok
    assert (evidence["blocks_at_first_idle"], evidence["blocks_at_last_idle"]) == (lost, lost)
    assert leak(looked_at(lossy)).status == "fault"
    with daemon(lossy.url) as serving:
        assert eventually(serving.says("fault"))
        series = [*input_series(serving.client.get("/metrics")[1], {"job": "kvdiag", "instance": "sglang-0:9743"})]
    firing = 'count(ALERTS{alertname="KvdiagLeakKvBlocks",alertstate="firing"})'
    assert_queries(tmp_path, series, [(firing, "60m", 1)])


def test_device_memory_that_runs_out_ends_the_server_and_its_log_says_why(nursery: Nursery) -> None:
    """A prefill that finds no memory: the run says that the server is down, its log which setting to change."""
    env = {"KVDIAG_TEST_PLUGIN": "exhaust_device", "KVDIAG_TEST_REFUSED_TOKENS": "1500"}
    with nursery.start("exhausted", "--max-total-tokens", "32768", env=env) as exhausted:
        result = run_on(exhausted)
        assert result.code == 3, result.not_ok
        assert result.step("single_request")["status"] == "ok"
        assert [result.step(one)["status"] for one in ("concurrent", "long_context")] == ["unknown"] * 2
        assert "Scheduler hit an exception" in exhausted.log.read_text(errors="replace")
        read = kvdiag("diagnose", "--postmortem", "--log", str(exhausted.log), "--output", "json")
    finding = read.finding("spike.activation")
    evidence = {one["name"]: one["value"] for one in finding["evidence"]}
    assert (read.code, finding["status"]) == (2, "fault")
    assert evidence["requested"] == round(1.96 * 2**30)
    assert evidence["free_on_device"] == round(1.02 * 2**30)
    assert "--chunked-prefill-size" in finding["remedy"]


@pytest.mark.parametrize(("lost", "status"), [pytest.param(1, "fault", id="lost"), pytest.param(0, "ok", id="kept")])
def test_state_slots_lost_with_each_request_are_a_fault(nursery: Nursery, lost: int, status: str) -> None:
    """No token is lost: the slots of recurrent states are a pool of their own, which the page alone shows."""
    env = {"KVDIAG_TEST_PLUGIN": "lose_state_slots", "KVDIAG_TEST_LOST_SLOTS": str(lost)}
    with nursery.start(f"slots-{lost}", "--max-total-tokens", "32768", env=env) as server:
        result = run_on(server)
    assert result.step("single_request")["status"] == status, result.not_ok
    finding = result.finding("leak.kv_blocks")
    evidence = {one["name"]: one["value"] for one in finding["evidence"]}
    assert (finding["status"], evidence["blocks_at_last_idle"]) == (status, 0), result.not_ok
    assert (evidence.get("state_slots_at_last_idle", 0) >= SEQUENTIAL_REQUESTS) is bool(lost)
