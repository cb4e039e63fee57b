"""The simulated server of llama.cpp: slots that keep their tokens, and one pool of cells without a queue for it."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.unit.sim.client import Client, eventually
from tests.unit.sim.conftest import Serve

POOL = 32_768


def slots(client: Client) -> list[dict[str, Any]]:
    """The slots as they are now."""
    found: list[dict[str, Any]] = json.loads(client.get("/slots")[1])
    return found


def complete(client: Client, prompt: int, output: int) -> tuple[int, dict[str, Any]]:
    """Status and answer of a request of so many tokens."""
    return client.post("/v1/completions", {"prompt": [300] * prompt, "max_tokens": output, "ignore_eos": True})


def test_a_slot_keeps_the_tokens_of_its_request(serve: Serve) -> None:
    """Prompt and output, less the last token, which never has a cell; until another takes it, or it is erased."""
    client, _ = serve("llamacpp-healthy")
    assert [{"id": 0, "n_ctx": POOL, "is_processing": False}] == slots(client)[:1]
    for prompt in (100, 50):
        assert 200 == complete(client, prompt, 20)[0]
        assert eventually(lambda: not slots(client)[0]["is_processing"])
        assert (prompt + 19, 0) == (slots(client)[0]["n_prompt_tokens"], slots(client)[0]["next_token"][0]["n_decoded"])
    assert 1 == slots(client)[0]["id_task"]
    assert (200, {"id_slot": 0, "n_erased": 69}) == client.post("/slots/0?action=erase", {})
    assert 0 == slots(client)[0]["n_prompt_tokens"]


def gauges(client: Client) -> dict[str, float]:
    """The metrics, none of which has labels."""
    lines = [line for line in client.get("/metrics")[1].splitlines() if not line.startswith("#")]
    return {name.removeprefix("llamacpp:"): float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_a_request_beyond_the_slots_waits(serve: Serve) -> None:
    """Six requests on four slots: two are deferred, none fails."""
    client, _ = serve("llamacpp-healthy")
    with client.watching(lambda: gauges(client)) as seen, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: complete(client, 100, 100)[0], range(6)))
    assert [200] * 6 == answers
    assert (4, 2) in {(one["requests_processing"], one["requests_deferred"]) for one in seen}


def test_all_that_run_fail_when_no_cell_is_free(serve: Serve) -> None:
    """Three requests of 12,000 tokens in 32,768 cells; afterwards the whole pool is free again."""
    client, _ = serve("llamacpp-healthy")
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: complete(client, 12_000, 100), range(3)))
    assert {(500, "Context size has been exceeded.")} == {
        (status, answer.get("error", {}).get("message")) for status, answer in answers
    }
    assert 200 == complete(client, POOL - 1, 1)[0]


def test_lost_cells_show_when_the_pool_is_filled_alone(serve: Serve) -> None:
    """No figure of the server shows them."""
    client, _ = serve("llamacpp-kv-leak")
    assert 200 == complete(client, 100, 20)[0]
    assert 500 == complete(client, POOL - 1, 1)[0]
