"""Ollama's models, by its API and their real llama.cpp servers; Ollama itself is a stand-in."""

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from kvdiag.engines import recognise
from kvdiag.sources import host
from kvdiag.sources.http import HttpReader
from tests.fixtures.hostile import Hostile, free_port, reply_json
from tests.integration.llamacpp.conftest import Start
from tests.integration.llamacpp.served_gguf import PROGRAM, facts_at
from tests.integration.vllm.cli import kvdiag
from tests.unit.commands.bad_input.refusals import call


@pytest.fixture
def ollama(llama_home: tuple[Path, Path]) -> Iterator[str]:
    """The address of a stand-in with one loaded model of 1,024 tokens."""
    env, models = llama_home
    port = free_port()
    script = str(Path(__file__).with_name("ollama_stand_in.py"))
    command = [sys.executable, script, str(port), str(env / "bin" / "python"), str(PROGRAM)]
    process = subprocess.Popen([*command, str(models / "llama.gguf"), "1024"], stdout=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    assert process.stdout is not None
    assert b"ready\n" == process.stdout.readline()
    try:
        yield url
    finally:
        generate(url, keep_alive=0)
        process.kill()
        process.communicate()


def generate(url: str, **body: object) -> None:
    """Load, reload or unload the model."""
    request = urllib.request.Request(f"{url}/api/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60):
        pass


def test_a_model_is_read_loaded_reloaded_and_unloaded(ollama: str) -> None:
    """Each state by its own child: none is a failure of the server, and an unloaded one has released its memory."""

    async def ask() -> list[tuple[str, bool | None, float | None]]:
        found = []
        async with httpx2.AsyncClient(base_url=ollama) as http:
            client = await recognise(HttpReader(http))
            assert "ollama" == client.engine.name
            for change in ({}, {"options": {"num_ctx": 512}}, {"keep_alive": 0}, {"options": {"num_ctx": 1024}}):
                if change:
                    await asyncio.to_thread(generate, ollama, **change)
                engines, gaps = await client.read()
                assert engines is not None, gaps
                found += [(one.engine, one.asleep, one.kv_usage_ratio) for one in engines]
        return found

    loaded = ("tiny:latest", False, 0.0)
    assert [loaded, loaded, ("none", True, 0.0), loaded] == asyncio.run(ask())


def test_the_pool_of_a_model_is_its_childs(ollama: str) -> None:
    """1,024 cells for one request at a time, by the child's command line."""
    facts = facts_at(ollama)
    assert ("0.14.0", 1024) == (facts.engine_version, facts.max_model_len_tokens)
    assert [("tiny:latest", 1024, 1)] == [(pool.engine, pool.usable_blocks, pool.max_requests) for pool in facts.pools]


def test_test_steps_are_for_the_models_own_server(ollama: str) -> None:
    """Ollama takes text alone: the refusal says where to run."""
    result = kvdiag("run", "--url", ollama)
    assert 3 == result.code
    assert "kvdiag doctor" in result.stderr


def test_doctor_lists_every_engine_of_this_host(llama: Start, ollama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A llama.cpp server without --metrics next to Ollama: the second is named with what it misses."""
    server = llama("-c", "512")
    monkeypatch.setattr(host, "PORTS", (int(ollama.rpartition(":")[2]), server.port))
    checks = {check["id"]: check for check in json.loads(call("doctor", "--output", "json").stdout)["checks"]}
    assert ollama in checks["engine.answers"]["found"]
    assert f"{server.url} (llama.cpp" in checks["engine.others"]["found"]
    assert ("warn", True) == (checks["engine.others"]["outcome"], "--metrics" in checks["engine.others"]["fix"])


def test_a_router_is_refused_with_the_addresses_of_its_models_servers(llama: Start) -> None:
    """llama-server without a model starts one server for each; the router here is this process (the wheel has none)."""
    server = llama("-c", "512")
    models = {"data": [{"id": "llama", "owned_by": "llamacpp", "status": {"value": "loaded"}}]}
    with Hostile({"/v1/models": reply_json(models), "/props": reply_json({"role": "router"})}) as router:
        refused = kvdiag("run", "--url", router.url)
        checks = {
            one["id"]: one for one in kvdiag("doctor", "--url", router.url, "--output", "json").document["checks"]
        }
    assert (3, True) == (refused.code, f"llama.gguf at {server.url}" in refused.stderr)
    assert ("fail", True) == (checks["engine.answers"]["outcome"], server.url in checks["engine.answers"]["found"])


def test_two_models_are_two_engines(ollama: str) -> None:
    """Each with the pool of its own child: after one was unloaded, the other reloaded with fewer tokens, that alone."""

    def pools() -> list[tuple[str, int]]:
        return sorted((pool.engine, pool.usable_blocks) for pool in facts_at(ollama).pools)

    generate(ollama, model="second:latest", options={"num_ctx": 2048})
    assert [("second:latest", 2048), ("tiny:latest", 1024)] == pools()
    generate(ollama, keep_alive=0)
    generate(ollama, model="second:latest", options={"num_ctx": 512})
    assert [("second:latest", 512)] == pools()
    generate(ollama, model="second:latest", keep_alive=0)


def test_doctor_prints_the_address_of_a_models_own_server(ollama: str) -> None:
    """The four steps run against it."""
    checks = {check["id"]: check for check in kvdiag("doctor", "--url", ollama, "--output", "json").document["checks"]}
    address = re.search(r"llama.gguf at (http://127\.0\.0\.1:\d+)", checks["engine.version"]["found"])
    assert address is not None
    with urllib.request.urlopen(f"{address[1]}/props", timeout=30) as answer:
        assert 1 == json.load(answer)["total_slots"]
