"""A Prometheus that lies, is slow or fails half-way: those replicas are unknown with the reason, others are judged."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from kvdiag.commands.options.prometheus_options import PrometheusOptions
from kvdiag.feeds.fleet.fleet_feed import FleetFeed
from kvdiag.feeds.fleet.fleet_round import FleetRound
from kvdiag.feeds.fleet.state_folder import StateFolder
from kvdiag.feeds.history.prometheus_feed import REPLICAS_AT_ONCE
from kvdiag.outputs.fleet_results import Judged
from kvdiag.outputs.presentation import sentence
from kvdiag.sources import prometheus_api
from tests.fixtures.hostile import Answer, Hostile, Peer, eventually, reply, reply_json, silent
from tests.integration.prometheus.histories import END_SECONDS
from tests.integration.prometheus.test_bad_server import pods
from tests.integration.prometheus.test_fleet_daemon import daemon
from tests.integration.prometheus.test_fleet_rounds import diagnosed

Series = dict[str, str]
SAMPLES = 180


def counted(count: int, instance: str | None = None) -> list[Series]:
    """The series of so many idle servers, with their counters."""
    found = pods(count)
    found += [{**one, "__name__": COUNTER} for one in found if one["__name__"] == RUNNING]
    return [one if instance is None else {**one, "instance": instance} for one in found]


COUNTER, RUNNING = "vllm:generation_tokens_total", "vllm:num_requests_running"


def rising(one: Series, age: int) -> str:
    """A value as an idle server's: counters only rise."""
    return str(1000 * (SAMPLES - age)) if one["__name__"] == COUNTER else "40000" if "DCGM" in one["__name__"] else "0"


def selects(selector: str, one: Series) -> bool:
    """Whether all matchers of a selector select a series."""
    matchers = re.findall(r'(\w+)([=!])~"((?:[^"\\]|\\.)*)"', selector)
    return all(
        (re.fullmatch(value.replace("\\\\", "\\"), one.get(label, "")) is not None) == (sign == "=")
        for label, sign, value in matchers
    )


def holding(
    series: list[Series],
    value: Callable[[Series, int], str] = rising,
    fails: Callable[[str], Answer | None] = lambda _query: None,
    ends: Callable[[Series], float] = lambda _one: END_SECONDS,
) -> Hostile:
    """A server with these series, a sample a minute until each ends, none where its value is "".

    What `fails` gives for a query comes instead.
    """

    def listed(peer: Peer) -> None:
        form = parse_qs(peer.request_body.decode())
        start = float(form["start"][0])
        alive = [one for one in series if ends(one) >= start]
        data = [one for one in alive if any(selects(selector, one) for selector in form["match[]"])]
        reply_json({"status": "success", "data": data})(peer)

    def queried(peer: Peer) -> None:
        form = parse_qs(peer.request_body.decode())
        query = form["query"][0]
        if (failure := fails(query)) is not None:
            failure(peer)
            return
        end = float(form["time"][0])
        once = query.startswith("last_over_time")
        start = end - int(re.findall(r"\[(\d+)ms\]", query)[0]) / 1000.0
        moments = {age: END_SECONDS - 60.0 * age for age in reversed(range(SAMPLES))}
        result = []
        for one in series:
            until = min(end, ends(one))
            values = [[at, text] for age, at in moments.items() if start <= at <= until and (text := value(one, age))]
            if one["__name__"] in query and ("UUID" in query or one.get("pod", "no pod") in query) and values:
                result.append({"metric": one, "values": [[end, "1"]] if once else values})
        reply_json({"status": "success", "data": {"resultType": "matrix", "result": result}})(peer)

    return Hostile({"/api/v1/series": listed, "/api/v1/query": queried})


@contextmanager
def feed(server: Hostile, folder: Path, *, timeout: float = 30.0) -> Iterator[FleetFeed]:
    """A feed of that server."""
    kept = StateFolder(folder, {})
    access = PrometheusOptions(prometheus=server.url, timeout=timeout).access()
    try:
        yield FleetFeed(access.source, "", 24.0 * 3600.0, kept, cpu_seconds=1e9)
    finally:
        kept.close()


def judged(state: FleetRound) -> dict[str, tuple[str, str]]:
    """Each replica's verdict, and the reasons of its failed gaps."""
    return {
        one.key.rpartition("/")[2]: (
            one.present.worst,
            "; ".join(gap.reason for gap in one.present.gaps if gap.kind == "failed"),
        )
        for one in state.verdicts
    }


def test_counters_that_run_backwards_make_their_replica_unknown(tmp_path: Path) -> None:
    """It names the counter and how often it fell; the server next to it is judged."""

    def backwards(one: Series, age: int) -> str:
        lies = one["__name__"] == COUNTER and one["pod"] == "vllm-00"
        return str(1000 * age) if lies else rising(one, age)

    with holding(counted(2), backwards) as server, feed(server, tmp_path) as kept:
        found = judged(asyncio.run(kept.round(END_SECONDS)))
    assert ("ok", "") == found["vllm-01"]
    assert "unknown" == found["vllm-00"][0]
    assert f"generation_tokens_total falls {SAMPLES - 1} times in {SAMPLES} samples" in found["vllm-00"][1]


def leaking(one: Series, age: int) -> str:
    """The first address of the first server has a leak."""
    grows = one["__name__"] == "process_resident_memory_bytes" and one["instance"] == "10.0.0.0:8000"
    return str(2**33 + grows * 2**27 * (SAMPLES - age)) if "memory" in one["__name__"] else rising(one, age)


def twins_of_a_leak(one: Series, age: int) -> str:
    """Another server of the same name has worked less."""
    return "7" if one["__name__"] == COUNTER and one["instance"] == "10.9.9.9:8000" else leaking(one, age)


def answering_in_turn(one: Series, age: int) -> str:
    """Another server answers at its address in every fourth to sixth minute."""
    other = one["__name__"] == COUNTER and one["pod"] == "vllm-00" and age % 6 < 3
    return str(52 + 3 * (SAMPLES - age)) if other else leaking(one, age)


TWINS = [one for one in counted(1, "10.9.9.9:8000") if "pod" in one]


@pytest.mark.parametrize(
    ("more", "value", "reason"),
    [
        pytest.param(TWINS, twins_of_a_leak, "at once (10.0.0.0, 10.9.9.9)", id="name"),
        pytest.param([], answering_in_turn, "at one address in turn", id="address"),
    ],
)
def test_several_servers_in_one_are_unknown_whatever_their_figures_show(
    tmp_path: Path, more: list[Series], value: Callable[[Series, int], str], reason: str
) -> None:
    """The same document as that of `kvdiag diagnose`, without a finding; the leak is one where it is one server's."""
    memory = [{**one, "__name__": "process_resident_memory_bytes"} for one in counted(2) if one["__name__"] == COUNTER]
    with holding(counted(2) + memory, leaking) as server, feed(server, tmp_path / "one") as kept:
        assert "suspect" == judged(asyncio.run(kept.round(END_SECONDS)))["vllm-00"][0]
    with holding(counted(2) + memory + more, value) as server, feed(server, tmp_path / "several") as kept:
        state = asyncio.run(kept.round(END_SECONDS))
        assert {one.key: one.present for one in state.verdicts} == diagnosed(server.url, END_SECONDS)
    found = {one.key.rpartition("/")[2]: one for one in state.verdicts}
    assert ("unknown", "ok") == (found["vllm-00"].present.worst, found["vllm-01"].present.worst)
    assert {"unknown"} == {finding.status for finding in found["vllm-00"].present.findings}
    assert reason in Judged(key="", subject=(), diagnosis=found["vllm-00"].present).summary
    assert reason in sentence(found["vllm-00"].present)
    summary = found["vllm-00"].summary
    assert summary is not None
    assert ((), "vllm") == (summary.growths, summary.version.engine)


def of_first(metric: str, value: Callable[[int], str]) -> Callable[[Series, int], str]:
    """Values that lie about a metric of the first server."""
    return lambda one, age: value(age) if metric in one["__name__"] and "vllm-00" in one.values() else rising(one, age)


def alternating(one: Series, age: int) -> str:
    """Every second sample is one of what "else" names, the others of the rest; the first server has both."""
    is_first = "vllm-00" in one.values()
    changes = is_first and (one.get("num_gpu_blocks") or one["__name__"].endswith(("requests_running", "running_reqs")))
    is_other = "sglang" in one["__name__"] or one.get("num_gpu_blocks") == "202"
    return "" if changes and (age % 2 == 0) is is_other else rising(one, age)


RESIZED = [{**one, "num_gpu_blocks": "202"} for one in counted(1) if one["__name__"] == "vllm:cache_config_info"]
OTHERS = [
    {**one, "__name__": "sglang:num_running_reqs"} for one in counted(1) if one["__name__"].endswith("requests_running")
]


@pytest.mark.parametrize(
    ("value", "more", "reason"),
    [
        pytest.param(of_first("running", lambda _: "-5"), [], "180 impossible samples", id="negative"),
        pytest.param(of_first(COUNTER, lambda _: "1e300"), [], "180 impossible samples", id="huge"),
        pytest.param(of_first("usage", lambda age: "+Inf" if age % 2 else "0"), [], "infinite samples", id="infinite"),
        pytest.param(alternating, RESIZED, "its pool changes 179 times", id="pools"),
        pytest.param(alternating, OTHERS, "engine changes 179 times", id="engines"),
    ],
)
def test_values_that_no_server_has_make_their_replica_unknown(
    tmp_path: Path, value: Callable[[Series, int], str], more: list[Series], reason: str
) -> None:
    """With the reason, and the same document as that of `kvdiag diagnose`; the server next to it is judged."""
    with holding(counted(2) + more, value) as server, feed(server, tmp_path) as kept:
        state = asyncio.run(kept.round(END_SECONDS))
        assert {one.key: one.present for one in state.verdicts} == diagnosed(server.url, END_SECONDS)
    first, second = sorted(state.verdicts, key=lambda one: one.key)
    assert ("unknown", "ok") == (first.present.worst, second.present.worst)
    assert reason in Judged(key="", subject=(), diagnosis=first.present).summary


def test_a_label_that_changes_in_each_sample_costs_none_of_them(tmp_path: Path) -> None:
    """Series of one sample each, in the order of their times and not of their labels."""
    series = counted(1)
    moved = [{**one, "build": str(age)} for one in series for age in range(SAMPLES) if one["__name__"] == COUNTER]

    def value(one: Series, age: int) -> str:
        return rising(one, age) if one.get("build", str(age)) == str(age) else ""

    for some, folder in ((series, "one"), ([one for one in series if one["__name__"] != COUNTER] + moved, "many")):
        with holding(some, value) as server, feed(server, tmp_path / folder) as kept:
            (verdict,) = asyncio.run(kept.round(END_SECONDS)).verdicts
        assert ("ok", SAMPLES) == (verdict.present.worst, verdict.present.samples)
        assert not any("exist twice" in gap.reason for gap in verdict.present.gaps)


def test_a_pool_of_another_size_leaves_the_start_of_the_process(tmp_path: Path) -> None:
    """Where the size of a pool changed, its description is read throughout: the start is asked for all the same."""
    resized = [{**one, "num_gpu_blocks": "202"} for one in counted(1) if one["__name__"] == "vllm:cache_config_info"]
    asked: list[str] = []
    with holding(counted(1) + resized, fails=asked.append) as server, feed(server, tmp_path) as kept:
        asyncio.run(kept.round(END_SECONDS))
    assert any("process_start_time_seconds" in query for query in asked if query.startswith("last_over_time"))


@pytest.mark.parametrize("more", [1, 11])
def test_a_server_with_several_addresses_is_judged_once(tmp_path: Path, more: int) -> None:
    """All report the same figures at the same times: it is one server, and its addresses are named."""
    twins = [one for number in range(more) for one in counted(1, f"10.9.9.{9 + number}:8000") if "pod" in one]
    with holding(counted(1) + twins) as server, feed(server, tmp_path) as kept:
        (verdict,) = asyncio.run(kept.round(END_SECONDS)).verdicts
    assert "ok" == verdict.present.worst
    reasons = [gap.reason for gap in verdict.present.gaps if "10.0.0.0" in gap.reason]
    assert [True] == ["scraped at several addresses (10.0.0.0, 10.9.9." in reason for reason in reasons]


def vector(more: Series) -> Answer:
    """An answer with one series that no query was for."""
    result = [{"metric": {"__name__": "vllm:num_requests_running", **more}, "values": [[END_SECONDS - 60.0, "1"]]}]
    return reply_json({"status": "success", "data": {"resultType": "matrix", "result": result}})


def test_a_server_whose_queries_hang_is_soon_alone(tmp_path: Path) -> None:
    """It costs the servers that its first query was also for one round, and none after that."""
    count = 2 * REPLICAS_AT_ONCE

    def fails(query: str) -> Answer | None:
        return silent() if "vllm:" in query and "vllm-03" in query else None

    with holding(counted(count), fails=fails) as server, feed(server, tmp_path, timeout=2.0) as kept:
        first = judged(asyncio.run(kept.round(END_SECONDS - 301.0)))
        again = judged(asyncio.run(kept.round(END_SECONDS)))
    assert ("ok", "") == first[f"vllm-{count - 1:02d}"]
    assert "no complete answer within 2 s" in again.pop("vllm-03")[1]
    assert {("ok", "")} == set(again.values())


@pytest.mark.parametrize(
    ("failure", "reason", "unknown"),
    [
        pytest.param(
            reply_json({"status": "error", "error": "block is corrupted"}, 500), "block is corrupted", 1, id="500"
        ),
        pytest.param(reply("oops", status=502), "502 on /api/v1/query", 1, id="502"),
        pytest.param(reply("{", content_type="application/json"), "is not JSON", 1, id="cut off"),
        pytest.param(reply("<html>", content_type="text/html"), "not JSON", 1, id="a page"),
        pytest.param(reply("", status=302, Location="http://127.0.0.1:1/"), "302 on /api/v1/query", 1, id="redirect"),
        pytest.param(vector({}), "not queried", 1, id="another query's"),
        pytest.param(vector({"pod": "\ud800"}), "invalid labels", 1, id="half a character"),
        pytest.param(silent(), "no complete answer within 3 s", 2 * REPLICAS_AT_ONCE, id="slow"),
    ],
)
def test_failures_half_way_leave_the_others_judged(tmp_path: Path, failure: Answer, reason: str, unknown: int) -> None:
    """The servers that the failing queries were for are unknown with the reason; the next rounds judge all."""
    count = 2 * REPLICAS_AT_ONCE
    broken = [True]

    def fails(query: str) -> Answer | None:
        return failure if broken and "vllm:" in query and f"vllm-{count - 1:02d}" in query else None

    # A busy machine may take a second for an answer that fails with none of these reasons.
    timeout = 3.0 if "within 3 s" in reason else 30.0
    with holding(counted(count), fails=fails) as server, feed(server, tmp_path, timeout=timeout) as kept:
        found = judged(asyncio.run(kept.round(END_SECONDS)))
        broken.clear()
        again = judged(asyncio.run(kept.round(END_SECONDS + 301.0)))
    worst = {name: verdict for name, (verdict, _) in found.items()}
    assert ("ok", "unknown") == (worst["vllm-00"], worst[f"vllm-{count - 1:02d}"])
    assert all((verdict == "unknown") == (reason in said) for verdict, said in found.values())
    # A query that has an answer is split until it fails for one server alone.
    assert unknown >= sum(verdict == "unknown" for verdict in worst.values())
    assert {("ok", "")} == set(again.values())


@pytest.mark.parametrize("first", [0, REPLICAS_AT_ONCE + 2], ids=["the first ones", "in the middle"])
def test_many_bad_servers_side_by_side_leave_the_others_judged(tmp_path: Path, first: int) -> None:
    """However many errors come one after the other: the server works for the others."""
    count = 3 * REPLICAS_AT_ONCE
    bad = [f"vllm-{number:02d}" for number in range(first, first + 12)]
    corrupted = reply_json({"status": "error", "error": "block is corrupted"}, 500)

    def fails(query: str) -> Answer | None:
        return corrupted if "vllm:" in query and any(name in query for name in bad) else None

    with holding(counted(count), fails=fails) as server, feed(server, tmp_path) as kept:
        found = judged(asyncio.run(kept.round(END_SECONDS)))
    assert bad == sorted(name for name, (verdict, _) in found.items() if verdict == "unknown")
    assert all("block is corrupted" in found[name][1] for name in bad)
    assert count - len(bad) == sum(one == ("ok", "") for one in found.values())


def test_a_server_that_fails_for_all_is_soon_left_alone(tmp_path: Path) -> None:
    """Whether it has answered a query before or not; no replica is ok."""
    broken = reply_json({"status": "error", "error": "no space left on device"}, 500)
    failing = [0]

    def fails(query: str) -> Answer | None:
        failing[0] += 1
        return broken if failing[0] > answered else None

    for answered, most in ((0, 400), (2, 60)):
        failing[0] = 0
        folder = tmp_path / str(answered)
        with holding(counted(99), fails=fails) as server, feed(server, folder) as kept:
            found = judged(asyncio.run(kept.round(END_SECONDS)))
        assert 99 == len(found)
        assert sum(verdict != "unknown" for verdict, _ in found.values()) <= REPLICAS_AT_ONCE
        assert failing[0] < most


def test_a_sample_that_is_no_number_costs_its_own_server_alone(tmp_path: Path) -> None:
    """Others that the same answer is for are asked for again."""

    def odd(one: Series, age: int) -> str:
        return "1_000" if one["__name__"] == COUNTER and one["pod"] == "vllm-03" else rising(one, age)

    with holding(counted(9), odd) as server, feed(server, tmp_path) as kept:
        found = judged(asyncio.run(kept.round(END_SECONDS)))
    assert "is no number" in found.pop("vllm-03")[1]
    assert {("ok", "")} == set(found.values())


def test_a_list_of_series_that_is_too_much_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the 50,000 series of 3,000 replicas are: all replicas are judged."""
    monkeypatch.setattr(prometheus_api, "SERIES_AT_ONCE", 20)
    with holding(counted(9)) as server, feed(server, tmp_path) as kept:
        found = judged(asyncio.run(kept.round(END_SECONDS)))
    assert (9, {("ok", "")}) == (len(found), set(found.values()))


def test_a_label_that_differs_in_each_request_costs_its_own_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its series are not listed, which is why it is unknown. A target without other metrics is a gap of the fleet."""
    monkeypatch.setattr(prometheus_api, "SERIES_AT_ONCE", 50)
    flood = [
        {"__name__": RUNNING, "pod": pod, "instance": instance, "request_id": f"{number}"}
        for pod, instance in (("vllm-03", "10.0.0.3:8000"), ("other-0", "10.0.1.1:8000"))
        for number in range(60)
    ]
    with holding(counted(9) + flood) as server, feed(server, tmp_path) as kept:
        state = asyncio.run(kept.round(END_SECONDS))
    found = judged(state)
    status, reason = found.pop("vllm-03")
    assert ("unknown", True) == (status, "10.0.0.3:8000" in reason and RUNNING in reason)
    assert (8, {("ok", "")}) == (len(found), set(found.values()))
    assert [True] == [RUNNING in gap.reason for gap in state.gaps if gap.kind == "failed"]


def test_a_million_series_are_a_failed_round_with_the_reason() -> None:
    """The daemon stays, answers, and its page says what failed and not that the first round is in progress."""
    series = b'{"__name__":"vllm:num_requests_running","pod":"vllm-%d"},'
    many = b"".join(series % number for number in range(1_000_000))
    with (
        Hostile({"/api/v1/series": reply(b'{"status":"success","data":[' + many + b"{}]}")}) as server,
        daemon(server.url) as serving,
    ):
        assert eventually(lambda: serving.series("kvdiag_fleet_rounds_failed_total").get((), 0.0) >= 2.0)
        page = serving.client.get("/")[1]
        assert 200 == serving.client.get("/-/healthy")[0]
        status, text = serving.client.get("/api/v1/fleet")
    assert (503, True) == (status, "narrow --match" in text)
    assert "narrow --match" in re.sub("<[^>]+>", "", page)
    assert "No replica has a verdict." in page
    assert "yet" not in page
