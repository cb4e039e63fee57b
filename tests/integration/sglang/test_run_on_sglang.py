"""kvdiag against SGLang 0.5.23 itself: its verdicts and numbers on healthy servers, odd ones, and one that leaks."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.engines import recognise
from kvdiag.engines.engine import EngineClient
from kvdiag.model import Diagnosis, Facts, Finding, Sample, Timeline
from kvdiag.sources.http import HttpReader
from tests.fixtures.hostile import eventually
from tests.integration.sglang.conftest import POOL_TOKENS
from tests.integration.sglang.servers import Nursery, Server
from tests.integration.vllm.cli import Result, kvdiag
from tests.integration.vllm.meddling import published

pytestmark = pytest.mark.long

REQUESTS_OF_STEP = {"single_request": 1, "concurrent": 10, "long_context": 1}
LATE_TOKENS, UNREAD_TOKENS = 16, 64
"""Of each request: the snapshot may be this old, and a busy client has so many still to read."""

FORGOTTEN_TOKENS = 7


def assert_exact(result: Result, page_tokens: int, *, without: str = "") -> None:
    """Every step that sends requests, but one, agrees with the pages that the tokens of each request fill."""
    for step_id, requests in REQUESTS_OF_STEP.items():
        if step_id == without:
            continue
        step = result.step(step_id)
        assert step["status"] == "ok", step
        measured = step["measured"]
        fewest = measured["tokens"] / page_tokens
        late, unread = (requests * (tokens / page_tokens + 1) for tokens in (LATE_TOKENS, UNREAD_TOKENS))
        assert fewest - late <= measured["blocks"] <= fewest + unread, step


def looked_at(server: Server, samples: int = 12) -> Diagnosis:
    """The diagnosis of a few samples of a server, as a daemon takes them."""

    async def look() -> Diagnosis:
        async with httpx2.AsyncClient(base_url=server.url) as http:
            client: EngineClient = await recognise(HttpReader(http))
            identity = await client.identify()
            page = await client.page()
            pools, _ = client.engine.parse_pools(page, identity.version, ())
            facts = Facts(
                engine_name=client.engine.name, pools=pools, capabilities=client.engine.capabilities(page),
                max_model_len_tokens=identity.max_model_len_tokens, engine_version=identity.version,
            )  # fmt: skip
            read = []
            for _ in range(samples):
                engines, gaps = await client.read()
                read.append(Sample(at_seconds=time.time(), engines=engines, gaps=gaps))
                await asyncio.sleep(0.3)
            return diagnose(Timeline(samples=tuple(read)), facts)

    return asyncio.run(look())


def leak(diagnosis: Diagnosis) -> Finding:
    """The finding about the pool."""
    return next(one for one in diagnosis.findings if one.id == "leak.kv_blocks")


def idle(server: Server) -> Callable[[], bool]:
    """Whether no request runs or waits."""
    return lambda: not any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in server.loads())


def test_healthy_server_with_a_full_radix_cache_is_exact(server: Server) -> None:
    """The tokens of ended requests fill the pool as a cache: no fault, and each step is what its tokens need."""
    for number in range(5):
        server.complete(8000, 1, first=100 * number, cache_salt=str(number))
    result = kvdiag("run", "--url", server.url, "--output", "json")
    assert (result.code, result.document["worst"]) == (0, "ok"), result.not_ok
    assert result.document["subject"]["engine"] == "sglang"
    assert result.document["subject"]["engine_version"] == "0.5.23"
    assert result.document["subject"]["pools"][0]["usable_blocks"] == POOL_TOKENS
    assert_exact(result, 1)


def test_pages_of_sixteen_tokens_are_exact_and_flushed(nursery: Nursery) -> None:
    """With pages the same steps count pages; what the run left in an empty cache is removed."""
    with nursery.start("page16", "--max-total-tokens", str(POOL_TOKENS), "--page-size", "16") as paged:
        result = kvdiag("run", "--url", paged.url, "--output", "json")
        assert (result.code, result.document["worst"]) == (0, "ok"), result.not_ok
        assert_exact(result, 16)
        again = paged.complete(64, 1)
        assert again["usage"]["prompt_tokens"] == 64


def test_an_embedding_server_is_sent_no_completion(nursery: Nursery) -> None:
    """SGLang exits at one: the run is refused, and the server lives."""
    with nursery.start("embedding", "--max-total-tokens", str(POOL_TOKENS), "--is-embedding") as embedding:
        assert kvdiag("run", "--url", embedding.url).code == 3
        assert kvdiag("run", "--url", embedding.url, "--isolation").code == 3
        assert embedding.get("/model_info")["is_generation"] is False


def test_forgotten_tokens_are_a_leak(nursery: Nursery) -> None:
    """An allocator that forgets seven tokens at each free is a fault, with as many as the scheduler says are in use."""
    with nursery.start(
        "leaking",
        *("--max-total-tokens", str(POOL_TOKENS), "--disable-radix-cache"),
        env={
            "KVDIAG_TEST_PLUGIN": "forget_tokens",
            "KVDIAG_TEST_FORGOTTEN_TOKENS": str(FORGOTTEN_TOKENS),
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
        },
    ) as leaking:
        result = kvdiag("run", "--url", leaking.url, "--output", "json")
        lost = leaking.used_tokens()
        assert lost > 0
        assert lost % FORGOTTEN_TOKENS == 0
        finding = result.finding("leak.kv_blocks")
        assert (result.code, finding["status"]) == (2, "fault"), result.not_ok
        assert lost in [one["value"] for one in finding["evidence"] if one["unit"] == "blocks"]
        assert leak(looked_at(leaking)).status == "fault"


def test_open_streaming_session_is_no_leak(server: Server) -> None:
    """A session keeps its tokens between requests, more than any series says: unknown, and ok once it is closed."""
    session = server.post("/open_session", capacity_of_str_len=1000, streaming=True)
    server.post(
        "/generate",
        input_ids=list(range(300, 400)),
        sampling_params={"max_new_tokens": 20, "ignore_eos": True},
        session_params={"id": session},
    )
    assert eventually(lambda: server.used_tokens() > 0)
    held = leak(looked_at(server))
    assert held.status == "unknown"
    # Its open session is reported by now.
    held = leak(looked_at(server, samples=120))
    server.post("/close_session", session_id=session)
    assert eventually(lambda: server.used_tokens() == 0)
    assert held.status == "unknown"
    assert leak(looked_at(server)).status == "ok"


def test_short_requests_in_a_row_are_no_leak(server: Server) -> None:
    """Requests that end between two snapshots are never taken for tokens that stay in use."""
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [server.complete(100, 4, first=number) for number in range(40)])
        diagnosis = looked_at(server)
        sent.result()
    assert leak(diagnosis).status in ("ok", "unknown")


def test_retracted_requests_are_preemptions(nursery: Nursery) -> None:
    """Requests that the scheduler retracts are counted as preempted, and all of them are answered."""
    with nursery.start("small", "--max-total-tokens", "4096", env={"KVDIAG_TEST_PLUGIN": "retract_requests"}) as small:
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda number: small.complete(50, 100, first=number), range(16)))
        assert len(answers) == 16
        assert eventually(idle(small))

        async def retracted() -> int | None:
            async with httpx2.AsyncClient(base_url=small.url) as http:
                client = await recognise(HttpReader(http))
                engines, _ = await client.read()
                return engines[0].preemptions_total if engines else None

        assert (asyncio.run(retracted()) or 0) > 0
        assert leak(looked_at(small)).status == "ok"


def test_data_parallel_pools_add_up(nursery: Nursery) -> None:
    """Two data-parallel ranks are two engines with pools of their own, and both have their processes' rank."""
    with nursery.start("dp2", "--max-total-tokens", "4096", "--dp-size", "2") as two:
        for number in range(4):
            two.complete(200, 4, first=number)
        result = kvdiag("audit", "--url", two.url, "--output", "json")
        pools = result.document["subject"]["pools"]
        assert [(pool["engine"], pool["usable_blocks"]) for pool in pools] == [("0", 4096), ("1", 4096)]
        assert leak(looked_at(two)).status == "ok"


def test_a_run_beside_a_session_counts_what_it_adds(nursery: Nursery) -> None:
    """Tokens of a client's session in one of two data-parallel ranks stay as they are, and the steps are exact."""
    options = ("--max-total-tokens", str(POOL_TOKENS), "--dp-size", "2", "--enable-streaming-session")
    with nursery.start("session", *options) as two:
        session = two.post("/open_session", capacity_of_str_len=1000, streaming=True)
        two.post(
            "/generate",
            input_ids=list(range(300, 400)),
            sampling_params={"max_new_tokens": 20, "ignore_eos": True},
            session_params={"id": session},
        )
        assert eventually(lambda: two.used_tokens() > 0)
        held = two.used_tokens()
        result = kvdiag("run", "--url", two.url, "--output", "json")
    # Two schedulers on two cores may take longer for 16K tokens than a step waits.
    assert_exact(result, 1, without="long_context")
    finding = result.finding("leak.kv_blocks")
    evidence = {one["name"]: one["value"] for one in finding["evidence"]}
    assert (finding["status"], evidence["blocks_at_first_idle"], evidence["blocks_at_last_idle"]) == (
        "unknown", held, held,
    )  # fmt: skip


def test_tensor_parallel_ranks_are_one_pool(nursery: Nursery, agent: dict[str, str]) -> None:
    """Two tensor-parallel ranks that both report their metrics are one engine; each has the agent, with its rank."""
    with nursery.start(
        "tp2", "--max-total-tokens", "8192", "--tp-size", "2", "--enable-metrics-for-all-schedulers"
    ) as two:
        two.complete(200, 4)
        result = kvdiag("audit", "--url", two.url, "--agent-dir", agent["KVDIAG_AGENT_DIR"], "--output", "json")
        subject = result.document["subject"]
        assert [pool["usable_blocks"] for pool in subject["pools"]] == [8192]
        assert len(two.pids("sglang::scheduler_TP")) == 2
        ranks = [
            one["ranks"]
            for one in published(Path(agent["KVDIAG_AGENT_DIR"])).values()
            if one["process"]["pid"] in two.pids()
        ]
        assert {0, 1} <= {rank.get("tensor") for rank in ranks}


def test_doctor_names_the_flag_that_turns_metrics_on(nursery: Nursery) -> None:
    """A server without --enable-metrics has no /metrics: the doctor says which flag is missing."""
    with nursery.start("dark", "--max-total-tokens", "8192", metrics=False) as dark:
        result = kvdiag("doctor", "--url", dark.url, "--output", "json")
        (series,) = [one for one in result.document["checks"] if one["id"] == "engine.series"]
        assert series["outcome"] == "fail"
        assert "--enable-metrics" in series["fix"]
