"""The simulated LMDeploy server: a share that a timer renews, and requests by token ids."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvdiag.sim import SCENARIOS, Drill
from tests.unit.sim.client import Client, eventually

HEALTHY, LEAKING = (
    replace(SCENARIOS[f"lmdeploy-{name}"], gauges_renewed_seconds=0.2) for name in ("healthy", "kv-leak")
)
USAGE, RUNNING = "lmdeploy:gpu_cache_usage_perc", "lmdeploy:num_requests_running"


def series(client: Client) -> dict[str, float]:
    """The metrics without their labels."""
    lines = [line for line in client.get("/metrics")[1].splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def events(client: Client, tokens: int, max_tokens: int) -> list[dict[str, object]]:
    """The events of one streamed answer, without its end."""
    body = {"input_ids": [7] * tokens, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    status, text = client.ask("POST", "/generate", json.dumps(body))
    assert 200 == status
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of the healthy scenario, whose timer is short."""
    with Drill(HEALTHY) as drill:
        yield Client(drill.url)


def test_the_timer_renews_share_and_requests(client: Client) -> None:
    """Under load the share of 2,048 blocks of 64 tokens, 0 at idle; tokens are counted at once."""
    with client.watching(lambda: series(client)) as seen:
        answer = events(client, 640, 100)
        assert 740 == sum(series(client)[f"lmdeploy:{name}_tokens_total"] for name in ("prompt", "generation"))
        assert eventually(lambda: series(client)[USAGE] == 0)
    assert {10 / 2048, 11 / 2048, 12 / 2048} & {one[USAGE] for one in seen if one[RUNNING] == 1}
    assert [{"completion_tokens": number} for number in range(1, 101)] == [
        {"completion_tokens": dict(one["meta_info"])["completion_tokens"]}  # type: ignore[call-overload]
        for one in answer
    ]


def test_cached_prefixes_count_as_used() -> None:
    """With prefix caching an idle server is not at 0, and says that it caches."""
    with Drill(replace(HEALTHY, prefix_caching=True)) as drill:
        client = Client(drill.url)
        events(client, 640, 2)
        assert eventually(lambda: series(client)[USAGE] == 10 / 2048)
        assert 'enable_prefix_caching="True"' in client.get("/metrics")[1]
        assert 0 == series(client)[RUNNING]


def test_a_leak_stays_in_the_share() -> None:
    """Four blocks of each request."""
    with Drill(LEAKING) as drill:
        client = Client(drill.url)
        for _ in range(3):
            events(client, 640, 2)
        assert eventually(lambda: series(client)[USAGE] == 12 / 2048)


def test_ids_are_required(client: Client) -> None:
    """As many as the context holds."""
    assert [400, 400] == [client.post("/generate", {"input_ids": ids})[0] for ids in ([], [7] * 40_000)]
