"""`kvdiag serve` while everybody wants something of it: crowds of scrapes, clients that never end, hostile servers."""

import asyncio
import contextlib
import time

import pytest

from kvdiag.outputs.metrics.families import MAX_SERIES
from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import Hostile, eventually, reply
from tests.unit.commands.serve.test_serve import Daemon, daemon

CROWD = 500
SLOW = 40


def sampled(serving: Daemon) -> float:
    """Ticks at which engine and devices were read, of each."""
    due, missed = (serving.series(f"kvdiag_ticks{name}_total") for name in ("", "_missed"))
    return min(due[source,] - missed[source,] for source in ("engine", "nvml"))


async def crowd(port: int) -> list[bytes]:
    """The status lines of hundreds of parallel scrapes, with clients connected that never finish their request."""

    async def asked(request: bytes) -> bytes:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(request)
                return (await reader.read()).partition(b"\r\n")[0]
            finally:
                writer.transport.abort()
        return b""

    held = [asyncio.create_task(asked(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")) for _ in range(SLOW)]
    await asyncio.sleep(0)
    try:
        return await asyncio.gather(
            *(asked(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") for _ in range(CROWD))
        )
    finally:
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


def test_crowds_cost_no_sample() -> None:
    """During 500 parallel scrapes, with stalled clients connected, the daemon samples at least every 2 s on average."""
    with Drill(SCENARIOS["healthy"]) as drill, daemon(drill.url) as serving:
        assert eventually(serving.says("ok"))
        before, begun_seconds = sampled(serving), time.monotonic()
        answers = asyncio.run(crowd(int(serving.address.rpartition(":")[2])))
        assert {b"HTTP/1.1 200 OK", b""} >= set(answers)
        assert answers.count(b"HTTP/1.1 200 OK") >= CROWD // 4
        # Sampled ten times as often as usual, one reading in twenty was made even on a busy machine.
        assert sampled(serving) - before >= int((time.monotonic() - begun_seconds) / 2)


def page(models: int) -> str:
    """A page of a server with so many engines."""
    lines = ["# TYPE vllm:kv_cache_usage_perc gauge"]
    for number in range(models):
        labels = f'{{engine="{number}",model_name="model-{number}-{"x" * 40}"}}'
        lines += [f"vllm:{name}{labels} 0.0" for name in ("kv_cache_usage_perc", "num_requests_running")]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text",
    [page(10_000), "\0\xff garbage {{{ 1 1 1\n" * 500 + "vllm:kv_cache_usage_perc NaN\n" * 9],
    ids=["10,000 models", "garbage"],
)
def test_pages_from_hell_are_counted(text: str) -> None:
    """For every hostile metrics answer, kvdiag's own pages are bounded, gaps are counted, and GPUs are read."""
    answers = {
        "/metrics": reply(text),
        "/metrics/": reply(text),
        "/version": reply('{"version": "0.32.0"}', content_type="application/json"),
        "/v1/models": reply('{"data": [{"id": "m"}]}', content_type="application/json"),
    }
    with Hostile(answers) as server, daemon(server.url) as serving:
        assert eventually(lambda: serving.series("kvdiag_sample_timestamp_seconds") != {})
        assert eventually(
            lambda: ("nvml",) in serving.series("kvdiag_source_errors_total") or "nvml" in str(gaps(serving))
        )
        _, shown = serving.client.get("/metrics")
        assert len(shown) < 2**20
        assert len(serving.series("kvdiag_kv_usage_ratio")) <= MAX_SERIES
        assert 200 == serving.client.get("/-/healthy")[0]
        assert serving.process.poll() is None
        assert not serving.says("ok")()


def gaps(serving: Daemon) -> list[str]:
    """Sources that could not be read."""
    return [gap["source"] for gap in serving.get("/api/v1/ledger")["gaps"]]
