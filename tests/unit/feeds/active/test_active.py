"""The active feed against servers that do not let themselves be measured: each refusal in one line, and at once."""

import asyncio
import itertools
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps import STEPS
from kvdiag.diagnosis.timeline_queries import whole_load
from kvdiag.engines.vllm import ENGINE
from kvdiag.errors import KvdiagError
from kvdiag.feeds.active.isolation_probe import IsolationFeed
from kvdiag.feeds.active.load_generator import REFRESH_PROMPT_TOKENS, Requests, Speed
from kvdiag.feeds.active.run_timeline import unfinished
from kvdiag.feeds.active.soak_plan import SoakPlan
from kvdiag.feeds.active.step_runner import ActiveFeed
from kvdiag.feeds.live.sampling import Clock, Pace, Sampler, TimelineBuilder
from kvdiag.model import Capabilities, Facts, MemoryProfile, Sample, Timeline
from kvdiag.sources.device_reader import DeviceReading
from kvdiag.sources.http import NO_ANSWER, HttpReader
from kvdiag.sources.worker_thread import ThreadedReader
from tests.builders.answers import containing
from tests.builders.values import engine
from tests.fixtures.hostile import Answer, Hostile, Peer, head, raw, reply, reply_json, silent

LONG_SECONDS = 120.0
PAGE = (Path(__file__).parents[3] / "fixtures" / "scrapes" / "vllm-0.32.0-cpu-tp2-idle.prom").read_text()
BASELINE = replace(STEPS[0], workload=replace(STEPS[0].workload, hold_seconds=0.0))
SINGLE = replace(STEPS[1], cycles=3)
WARMUPS = 2
"""Requests to a server of one engine before the first step."""


def no_devices(**_: object) -> DeviceReading:
    """The NVML sample of a host without devices."""
    return None, ()


def run(
    answers: Mapping[str, Answer],
    facts: Facts | None = None,
    *,
    steps: int = 2,
    soak: Callable[[Speed | None], SoakPlan] | None = None,
    profile: Callable[[Timeline], Awaitable[tuple[MemoryProfile, ...]]] | None = None,
    probe: bool = False,
    other_headers: Mapping[str, str] | None = None,
    silence_seconds: float = 0.3,
) -> Timeline:
    """The first two steps, or the first alone, and a soak, or the isolation probe, against a server that answers so."""

    async def work(url: str) -> Timeline:
        recorder = TimelineBuilder()
        nvml = ThreadedReader(no_devices, "nvml")
        async with httpx2.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            requests = Requests(client, "tiny", silence_seconds=silence_seconds, engine=ENGINE)
            sampler = Sampler(
                engine=ENGINE.open(HttpReader(client)),
                nvml=nvml,
                facts=facts or Facts(),
                record=recorder.add,
                pace=Pace(),
                clock=Clock(),
                load=requests.load,
            )
            isolation = IsolationFeed(
                sampler=sampler,
                requests=requests,
                recorder=recorder,
                other_headers=other_headers,
            )
            feed = ActiveFeed(
                steps=(BASELINE, SINGLE)[:steps],
                sampler=sampler,
                requests=requests,
                recorder=recorder,
                progress=lambda progress: None,
                soak=soak,
                profile=profile,
                instead=isolation.run if probe else None,
            )
            try:
                async with asyncio.timeout(LONG_SECONDS):
                    return await feed.run()
            finally:
                nvml.close()

    with Hostile(answers) as server:
        return asyncio.run(work(server.url))


def page_with(name: str, value: str, page: str = PAGE) -> str:
    """The idle page, or another, with one figure's lines replaced."""
    lines = [line for line in page.splitlines() if not line.startswith(f"{name}{{")]
    return "\n".join([*lines, f'{name}{{engine="0"}} {value}', ""])


IDLE = reply(PAGE)
STREAM = head(content_type="text/event-stream")


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        pytest.param(silent(), f"a completion of 512 tokens failed: {NO_ANSWER}", id="silence"),
        pytest.param(silent(STREAM), f"a completion of 512 tokens failed: {NO_ANSWER}", id="a silent stream"),
        pytest.param(
            reply_json({"error": {"message": "no such model"}}, status=404), "HTTP 404: no such model", id="404"
        ),
        pytest.param(reply("x" * 500, status=400), f"HTTP 400: {'x' * 190}", id="a long reason"),
    ],
)
def test_server_that_completes_nothing_is_told(completions: Answer, message: str) -> None:
    """A server that does not answer its first request, or refuses it, is asked for no other."""
    with pytest.raises(KvdiagError) as caught:
        run({"/metrics/": IDLE, "/v1/completions": completions})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        pytest.param(page_with("vllm:num_requests_waiting", "2.0"), "other traffic (2 requests", id="other traffic"),
        pytest.param(page_with("vllm:kv_cache_usage_perc", "NaN"), "engine 0 is nan", id="a usage that cannot be"),
        pytest.param(
            PAGE.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0'), "the engine is asleep", id="asleep"
        ),
    ],
)
def test_server_that_cannot_be_measured_is_refused(page: str, message: str) -> None:
    """A server whose metrics cannot support the steps is refused before any load."""
    with pytest.raises(KvdiagError) as caught:
        run({"/metrics/": reply(page)})
    assert message in str(caught.value)


def test_two_servers_in_turn_are_refused() -> None:
    """Behind a load balancer a counter falls and is back at once: no request is sent to whichever answers."""
    read = itertools.count()

    def page(peer: Peer) -> None:
        reply(page_with("vllm:prompt_tokens_total", "9000.0" if next(read) % 2 else "0.0"))(peer)

    with pytest.raises(KvdiagError, match="several servers"):
        run({"/metrics/": page, "/v1/completions": IDLE})


def test_other_traffic_on_a_slow_server_is_refused() -> None:
    """A page that takes seconds is read for longer: requests that begin between two of the first pages are noticed."""
    read = itertools.count()

    def page(peer: Peer) -> None:
        peer.pause(0.2)
        reply(page_with("vllm:num_requests_running", f"{float(next(read) == 12)}"))(peer)

    with pytest.raises(KvdiagError, match="other traffic"):
        run({"/metrics/": page})


@pytest.mark.parametrize(
    ("error", "waiting", "queued"),
    [
        pytest.param(NO_ANSWER, (0, 8, 0), True, id="silent, eight waiting"),
        pytest.param("timed out after 120 s", (8,), True, id="too slow, eight waiting"),
        pytest.param(NO_ANSWER, (0, 0), False, id="silent, none waiting"),
        pytest.param("HTTP 500: boom", (8,), False, id="an error of its own"),
    ],
)
def test_requests_that_wait_in_a_full_pool_are_queued(error: str, waiting: tuple[int, ...], queued: bool) -> None:
    """No hanging server and no firewall: the engine itself counts them."""
    samples = [
        Sample(at_seconds=float(at), engines=(engine(waiting=count, usage=0.9),)) for at, count in enumerate(waiting)
    ]
    found = unfinished(error, samples, Facts())
    assert queued == (containing("8 requests", "queued") == found)
    assert queued or error == found


def test_requests_that_wait_beside_an_empty_pool_are_limited_by_their_number() -> None:
    """A server that runs one request at a time lets the others wait: no room in the pool is missing."""
    samples = [Sample(at_seconds=1.0, engines=(engine(waiting=8, usage=0.1),))]
    assert containing("8 requests", "only 10 %", "limits") == unfinished(NO_ANSWER, samples, Facts())


@pytest.mark.parametrize(
    ("capabilities", "counted", "reason"),
    [
        (Capabilities(), 9, "hangs"),
        (Capabilities(), None, "too small"),
        (Capabilities(reserved=True), 9, "too small"),
    ],
    ids=["every step shows", "no tokens counted", "figures of requests"],
)
def test_requests_behind_an_engine_that_does_nothing_are_not_blamed_on_the_pool(
    capabilities: Capabilities, counted: int | None, reason: str
) -> None:
    """A queue that no token of which was processed for half a minute is no matter of the pool's size."""
    stuck = replace(engine(usage=0.9, running=1, waiting=8), prompt_tokens_total=counted)
    samples = [Sample(at_seconds=10.0 * number, engines=(stuck,)) for number in range(4)]
    actual = unfinished(NO_ANSWER, samples, Facts(capabilities=capabilities))
    assert containing("8 requests", reason) == actual


@pytest.mark.parametrize(
    ("usages", "reason"), [((0.1, 0.2, 0.3, 0.4), "too slow"), ((0.4,) * 4, "hangs"), ((0.4, 0.4), "hanging")]
)
def test_a_prompt_that_is_still_computed_is_slow(usages: tuple[float, ...], reason: str) -> None:
    """Blocks are allocated as a prompt is processed: that is no hang, and a standstill of half a minute is one."""
    samples = [
        Sample(at_seconds=10.0 * number, engines=(engine(usage=usage, running=1),))
        for number, usage in enumerate(usages)
    ]
    assert reason in unfinished(NO_ANSWER, samples[:1] if len(usages) < 3 else samples, Facts())


def test_failing_requests_are_recorded() -> None:
    """A server that fails each request leaves every span with its outcome, for the diagnosis to judge."""
    failing = raw(STREAM, b'data: {"error": {"message": "CUDA out of memory"}}\n\n')
    actual = run({"/metrics/": IDLE, "/v1/completions": failing})
    spans = actual.spans("single_request")
    assert SINGLE.cycles == len(spans)
    assert all(span.complete for span in spans)
    assert {("CUDA out of memory",)} == {span.outcome.errors for span in spans if span.outcome is not None}


def slow_page_server(blind_tokens: int) -> Mapping[str, Answer]:
    """A server of 200 tokens a second that shows no page while it generates `blind_tokens` or fewer for a request."""
    blind, running = threading.Event(), threading.Event()

    def completions(peer: Peer) -> None:
        wanted = int(json.loads(peer.request_body)["max_tokens"])
        running.set()
        if wanted <= blind_tokens:
            blind.set()
        try:
            peer.send(STREAM)
            for count in range(1, wanted + 1):
                event = {"choices": [{"text": "a"}], "usage": {"completion_tokens": count}}
                peer.send(f"data: {json.dumps(event)}\n\n".encode())
                peer.pause(0.005)
        finally:
            running.clear()
            blind.clear()

    def page(peer: Peer) -> None:
        while blind.is_set() and peer.pause():
            pass
        reply(page_with("vllm:num_requests_running", f"{float(running.is_set())}"))(peer)

    return {"/metrics/": page, "/v1/completions": completions}


def test_load_that_was_over_between_two_pages_is_held_longer() -> None:
    """If no sample was taken while the first load ran, the next loads generate more until one is sampled completely."""
    actual = run(slow_page_server(blind_tokens=150))
    spans = actual.spans("single_request")
    seen = [len(whole_load(actual, span, Facts())) >= DEFAULT_LIMITS.load_samples for span in spans]
    tokens = [span.workload.max_tokens for span in spans if span.workload is not None]
    assert SINGLE.cycles == len(tokens)
    assert [False, *[True] * (SINGLE.cycles - 1)] == seen
    assert [3 * tokens[0]] * (SINGLE.cycles - 1) == tokens[1:]
    assert "repeated with" in spans[-1].notes[-1]


def server_with_stale_gauges() -> Mapping[str, Answer]:
    """A server that shows three running requests from the end of the first request of a step to the next request."""
    stale = threading.Event()
    prompts: list[int] = []
    running: list[int] = []

    def completions(peer: Peer) -> None:
        body = json.loads(peer.request_body)
        prompts.append(len(body["prompt"]))
        running.append(len(prompts))
        for sent in range(1, int(body["max_tokens"]) + 1):
            event = {"choices": [{"text": "a"}], "usage": {"completion_tokens": sent}}
            peer.send((STREAM if sent == 1 else b"") + f"data: {json.dumps(event)}\n\n".encode())
        running.pop()
        (stale.set if len(prompts) == WARMUPS + 1 else stale.clear)()

    def page(peer: Peer) -> None:
        with_gauge = page_with("vllm:num_requests_running", f"{3.0 if stale.is_set() else len(running)}")
        reply(page_with("vllm:prompt_tokens_total", f"{float(sum(prompts))}", page=with_gauge))(peer)

    return {"/metrics/": page, "/v1/completions": completions}


def test_gauges_that_the_last_step_left_behind_are_renewed() -> None:
    """Where gauges show requests that no step works on, a small request renews them, and counts as kvdiag's own."""
    actual = run(server_with_stale_gauges())
    spans = actual.spans("single_request")
    small = [
        span.outcome.prompt_tokens - span.workload.prompt_tokens for span in spans if span.outcome and span.workload
    ]
    assert small == [REFRESH_PROMPT_TOKENS, 0, 0]
    for span in spans:
        assert span.end_seconds is not None
        assert actual.between(span.begin_seconds, span.end_seconds)[-1].engines_idle is not False
