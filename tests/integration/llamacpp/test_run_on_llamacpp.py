"""`kvdiag run` and what it is made of against llama.cpp's own server: to the cell."""

import asyncio
import http.client
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvdiag.engines import recognise
from kvdiag.engines.llamacpp import ENGINE
from kvdiag.feeds.active.load_generator import Requests, token_ids
from kvdiag.model import Engine, Outcome, Workload
from kvdiag.sources.http import HttpReader
from tests.fixtures.hostile import eventually
from tests.integration.llamacpp.conftest import Start
from tests.integration.llamacpp.served_gguf import LlamaServer, facts_at
from tests.integration.vllm.cli import kvdiag
from tests.unit.commands.bad_input.refusals import call

SLACK = 16
"""Cells of a request by which slots and streams may differ where the machine is busy."""


def reads(server: LlamaServer, seconds: float, *, until_asleep: bool) -> Engine | None:
    """The last sample of a client that reads for so long, or until the server sleeps."""

    async def ask() -> Engine | None:
        async with httpx2.AsyncClient(base_url=server.url) as http:
            client = await recognise(HttpReader(http))
            await client.identify()
            deadline, last = time.monotonic() + seconds, None
            while time.monotonic() < deadline and not (until_asleep and last is not None and last.asleep):
                engines, _ = await client.read()
                last = None if engines is None else engines[0]
                await asyncio.sleep(0.05)
            return last

    return asyncio.run(ask())


def offered(server: LlamaServer, workload: Workload) -> Outcome:
    """The outcome of kvdiag's own requests."""

    async def ask() -> Outcome:
        async with httpx2.AsyncClient(base_url=server.url) as client:
            ids = await token_ids(client, "tiny")
            return await Requests(client, "tiny", ids, engine=ENGINE).offer(workload)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("args", "slots", "pool", "longest"),
    [
        pytest.param(("-c", "4096", "--metrics"), 4, 4096, 4096, id="shared by four slots"),
        pytest.param(("-c", "8192", "-np", "2"), 2, 8192, 4096, id="a pool for each of two slots"),
        pytest.param(("-c", "1024", "-np", "4"), 4, 1024, 256, id="slots of 256 tokens"),
        pytest.param(("-c", "40000"), 4, 40_192, 32_768, id="beyond the trained context", marks=pytest.mark.long),
        pytest.param(("-c", "4096", "-ctk", "q8_0"), 4, 4096, 4096, id="quantised", marks=pytest.mark.long),
    ],
)
def test_all_steps_match_to_the_cell(llama: Start, args: tuple[str, ...], slots: int, pool: int, longest: int) -> None:
    """Cells in use are those of the tokens; in the last step the pool is filled again, so that none is lost."""
    server = llama(*args)
    result = kvdiag("run", "--url", server.url, "--output", "json")
    assert ["ok"] * 4 == [step["status"] for step in result.document["steps"]], result.not_ok
    for step in ("single_request", "concurrent", "long_context"):
        expected, measured = result.step(step)["expected"], result.step(step)["measured"]
        assert abs(expected["blocks"] - measured["blocks"]) <= SLACK * measured["requests"]
    statuses = {one: result.finding(one)["status"] for one in ("leak.kv_blocks", "capacity.concurrency")}
    assert {"leak.kv_blocks": "ok", "capacity.concurrency": "ok"} == statuses
    # The last requests' tokens stay in the slots: a cache, which is no fault.
    kept = [slot.get("n_prompt_tokens", 0) for slot in server.get("/slots")]
    assert pool // -(-pool // longest) - 1 == max(kept)
    (found,) = facts_at(server.url).pools
    assert (pool, slots, longest) == (
        found.usable_blocks,
        found.max_requests,
        facts_at(server.url).max_model_len_tokens,
    )


@pytest.mark.long
@pytest.mark.parametrize("model", ["gemma3", "lfm2", "deepseek2"])
def test_other_architectures_match_to_the_cell(llama: Start, model: str) -> None:
    """Sliding windows, short convolutions and latent attention: a token is a cell of the first cache."""
    server = llama("-c", "4096", model=model)
    result = kvdiag("run", "--url", server.url, "--output", "json")
    assert ["ok"] * 4 == [step["status"] for step in result.document["steps"]], result.not_ok


def test_a_pool_that_is_too_small_fails_all_that_run(llama: Start) -> None:
    """Four requests of 100 + 900 tokens in 1,024 cells: the server's error says so, and kvdiag knows it.

    None has ended before the last begins, however late a busy machine is with it.
    """
    server = llama("-c", "1024")
    outcome = offered(server, Workload(requests=4, prompt_tokens=100, max_tokens=900))
    assert 4 == outcome.failed
    assert ["Context size has been exceeded."] == list(outcome.errors)
    # None of them holds anything any more: a request of the whole context has room.
    assert 1 == offered(server, Workload(requests=1, prompt_tokens=1000, max_tokens=23)).completed


def test_a_cancelled_request_gives_back_its_cells(llama: Start) -> None:
    """The client leaves midway: the slot becomes idle, and a request of the whole context has room."""
    server = llama("-c", "4096", "-np", "1")
    body = {"prompt": [300] * 64, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    leaving = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    leaving.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert leaving.getresponse().read(1)
    assert [True] == [one > 0 for one in server.processing()]
    leaving.close()
    assert eventually(lambda: not server.processing())
    assert 1 == offered(server, Workload(requests=1, prompt_tokens=4000, max_tokens=95)).completed


def test_erased_slots_keep_nothing(llama: Start, tmp_path: Any) -> None:
    """A server with --slot-save-path lets kvdiag erase the slots of its own requests."""
    server = llama("-c", "512", "-np", "2", "--slot-save-path", f"{tmp_path}/")

    async def ask() -> str | None:
        async with httpx2.AsyncClient(base_url=server.url) as http:
            client = await recognise(HttpReader(http))
            await client.identify()
            await client.read()
            await asyncio.to_thread(server.complete, [300] * 100, 8)
            return await client.clean_up()

    assert asyncio.run(ask()) is None
    assert {0} == {slot.get("n_prompt_tokens", 0) for slot in server.get("/slots")}


def test_a_server_falls_asleep_although_it_is_read(llama: Start) -> None:
    """--sleep-idle-seconds: reading its slots would keep it awake; it is read asleep without being woken."""
    server = llama("-c", "512", "--metrics", "--sleep-idle-seconds", "1")
    slept = reads(server, 30.0, until_asleep=True)
    assert slept is not None
    assert slept.asleep
    still = reads(server, 0.5, until_asleep=False)
    assert still is not None
    assert (True, True) == (still.asleep, server.get("/props")["is_sleeping"])


PLAIN, QUANTISED = ("f16", "bf16", "f32"), ("q8_0", "q4_0", "q5_1")
FLAGS = {
    "-c": ("0", "256", "1000", "4096", "5000", "40000"),
    "-np": ("1", "2", "3", "7"),
    "-ub": ("32", "100", "1024"),
    "-b": ("64", "512"),
    "-fa": ("on", "auto", "off"),
}
SWITCHES = ("-kvu", "--swa-full")


def drawn(seed: int) -> tuple[str, list[str]]:
    """A model and flags that llama.cpp accepts for it: quantised V needs flash attention, latent rows one type."""
    draw = random.Random(seed)  # noqa: S311 - a test draws flags
    model = ("llama", "gemma3", "lfm2", "mamba", "deepseek2")[seed % 5]
    given = {flag: draw.choice(values) for flag, values in FLAGS.items() if draw.random() < 0.6}
    accepted = PLAIN if model in ("mamba", "deepseek2") or given.get("-fa") == "off" else PLAIN + QUANTISED
    given["-ctk"] = draw.choice(accepted)
    given["-ctv"] = given["-ctk"] if model == "deepseek2" else draw.choice(accepted)
    args = [word for flag, value in given.items() for word in (flag, value)]
    return model, [*args, *(switch for switch in SWITCHES if draw.random() < 0.3)]


@pytest.mark.parametrize("seed", range(10))
def test_any_caches_are_those_allocated(llama: Start, seed: int) -> None:
    """By command line and GGUF header, and by its log alone, as that prints its cells and buffers, to two decimals."""
    model, args = drawn(seed)
    server = llama(*args, "-lv", "4", model=model)
    assert eventually(lambda: b"n_slots = " in server.log.read_bytes())
    text = server.log.read_text(errors="replace")
    (pool,) = facts_at(server.url).pools
    sizes = [float(size) for size in re.findall(r"(?:KV|RS) buffer size = *([\d.]+) MiB", text)]
    predicted = json.loads(call("fit", "--from-log", str(server.log), "--output", "json").stdout)["comparisons"]

    assert re.findall(r"llama_context: n_ctx += (\d+)", text) == [str(pool.total_blocks)]
    assert sum(sizes) == pytest.approx((pool.pool_bytes or 0) / 2**20, abs=0.006 * len(sizes))
    assert {("kv_pool_bytes", 0.0), ("capacity_tokens", 0.0)} == {
        (one["figure"], one["drift_ratio"]) for one in predicted
    }


@pytest.mark.long
def test_drafted_tokens_are_no_waste(llama: Start, llama_home: tuple[Path, Path]) -> None:
    """A draft model's tokens are in the slots before they are accepted: the steps match to the cell."""
    server = llama("-c", "4096", "-md", str(llama_home[1] / "llama.gguf"))
    result = kvdiag("run", "--url", server.url, "--output", "json")
    assert ["ok"] * 4 == [step["status"] for step in result.document["steps"]], result.not_ok


def test_the_environment_shows_the_pool(llama: Start) -> None:
    """Containers set LLAMA_ARG_*: two slots of 1,024 cells each."""
    server = llama(LLAMA_ARG_CTX_SIZE="2048", LLAMA_ARG_N_PARALLEL="2", LLAMA_ARG_CACHE_TYPE_K="q8_0")
    (pool,) = facts_at(server.url).pools
    assert (2048, 2, "f16/q8_0") == (pool.usable_blocks, pool.max_requests, pool.cache_dtype)
    shared = llama(LLAMA_ARG_CTX_SIZE="2048", LLAMA_ARG_KV_UNIFIED="on", LLAMA_ARG_N_PARALLEL="2")
    assert 1.0 == facts_at(shared.url).pools[0].max_concurrency


def test_the_environment_limits_the_prompt_cache(llama: Start) -> None:
    """LLAMA_ARG_CACHE_RAM is its limit; the command line has the last word; without either it is the default."""

    def limits(*args: str, **environ: str) -> dict[str, int]:
        return {cache.flag: cache.limit_bytes for cache in facts_at(llama(*args, **environ).url).host_caches or ()}

    assert 16 << 20 == limits(LLAMA_ARG_CACHE_RAM="16")["LLAMA_ARG_CACHE_RAM"]
    assert 32 << 20 == limits("-cram", "32", LLAMA_ARG_CACHE_RAM="16")["-cram"]
    assert 8 << 30 == limits()["--cache-ram, by default"]


def test_doctor_names_the_flag_that_turns_metrics_on(llama: Start) -> None:
    """Slots are read without it; waiting requests and counters are not."""
    server = llama("-c", "512")
    result = kvdiag("doctor", "--url", server.url, "--output", "json")
    (check,) = [one for one in result.document["checks"] if one["id"] == "engine.series"]
    assert "warn" == check["outcome"]
    assert check["fix"].startswith("start the server with --metrics")
