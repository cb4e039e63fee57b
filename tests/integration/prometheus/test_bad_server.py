"""`kvdiag diagnose --prometheus` on servers that fail, and with options that cannot be meant: one line, exit 3."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

import pytest

from kvdiag.feeds.history.prometheus_feed import REPLICAS_AT_ONCE
from tests.builders.answers import containing
from tests.fixtures.hostile import Answer, Hostile, Peer, refused_port, reply, reply_json
from tests.integration.prometheus.conftest import Judged
from tests.integration.prometheus.histories import END_SECONDS

Diagnose = Callable[..., Judged]


def refusal(said: Judged) -> str:
    """The one line on stderr that refuses bad input; on a busy machine progress comes before it."""
    lines = [line for line in said.stderr.splitlines() if re.fullmatch(r"[0-9]+ of [0-9]+ replicas", line) is None]
    assert (3, "", 1) == (said.code, said.stdout, len(lines)), said.stderr
    return lines[0].removeprefix("kvdiag: ")


def pods(count: int) -> list[dict[str, str]]:
    """An idle server's series, for so many pods, and the GPU of each."""
    found: list[dict[str, str]] = []
    for number in range(count):
        own = {"pod": f"vllm-{number:02d}", "instance": f"10.0.0.{number}:8000"}
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        found += [{"__name__": f"vllm:{name}", "engine": "0", **own} for name in names]
        found.append({"__name__": "vllm:cache_config_info", "block_size": "16", "num_gpu_blocks": "101", **own})
        gpu = {"exported_pod": own["pod"], "UUID": f"GPU-{number}", "instance": "node:9400"}
        found += [{"__name__": f"DCGM_FI_DEV_FB_{name}", **gpu} for name in ("USED", "FREE")]
    return found


def serving(
    series: list[dict[str, str]],
    fails: Callable[[str], Answer | None] = lambda _query: None,
    listed_with: Mapping[str, object] = MappingProxyType({}),
) -> Hostile:
    """A server that has these series, with a sample a minute; what `fails` gives for a query comes instead.

    `listed_with` is what else its list of series has.
    """

    def listed(peer: Peer) -> None:
        reply_json({"status": "success", "data": series, **listed_with})(peer)

    def queried(peer: Peer) -> None:
        form = parse_qs(peer.request_body.decode())
        query, end = form["query"][0], float(form["time"][0])
        failure = fails(query)
        if failure is not None:
            failure(peer)
            return
        once = query.startswith("last_over_time")
        values = [[end, "1"]] if once else [[end - 60.0 * number, "0"] for number in reversed(range(5))]
        asked = [one for one in series if one["__name__"] in query]
        wanted = [one for one in asked if "UUID" in query or one.get("pod", "no pod") in query]
        result = [{"metric": one, "values": values} for one in wanted]
        reply_json({"status": "success", "data": {"resultType": "matrix", "result": result}})(peer)

    return Hostile({"/api/v1/series": listed, "/api/v1/query": queried})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--match", "up"], "--match 'up'", id="a metric"),
        pytest.param(["--match", '{a="b"} or {c="d"}'], "is not a selector", id="an expression"),
        pytest.param(["--match", '{a="b"}[5m]'], "is not a selector", id="a range"),
        pytest.param(["--window", "yesterday"], "'yesterday' is not a duration", id="no duration"),
        pytest.param(["--window", "10s"], "at least 1 min", id="a short window"),
        pytest.param(["--window", "5000d"], "longer than 31 days", id="a long window"),
        pytest.param(["--start", "soon"], "'soon' is not a time", id="no time"),
        pytest.param(["--start", "nan"], "'nan' is not a time", id="no number"),
        pytest.param(["--start", "2026-11-21T00:00:00Z"], "at least 1 min", id="starts after its end"),
        pytest.param(
            ["--header", "X-Scope-OrgID"],
            "give NAME:VALUE",
            id="header",
        ),
        pytest.param(["--header", "A:b\nC:d"], "'A' is not a header", id="two headers in one"),
        pytest.param(["--token", "a", "--user", "b"], "--token-file", id="two credentials"),
        pytest.param(["--password", "a"], "a password needs --user", id="a password alone"),
        pytest.param(["--key-file", "a"], "--key-file needs --cert-file", id="a key alone"),
        pytest.param(["--token", "a\nb"], "invalid in HTTP", id="a token of two lines"),
        pytest.param(["--token-file", "/nowhere"], "cannot read /nowhere:", id="no file"),
        pytest.param(["--cert-file", "/nowhere"], "cannot use --cert-file /nowhere", id="no certificate"),
        pytest.param(["trace.jsonl"], "or --prometheus", id="two sources"),
        pytest.param(["--timeout", "0"], "Invalid value for '--timeout'", id="no time at all"),
    ],
)
def test_options_that_cannot_be_meant_are_told(diagnose: Diagnose, options: list[str], message: str) -> None:
    """Before anything is asked for."""
    with refused_port() as port:
        assert message in refusal(diagnose("--prometheus", f"http://127.0.0.1:{port}", *options))


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://a:b@", "http://[::1", "http://x:99999"])
def test_what_is_no_address_is_told(diagnose: Diagnose, url: str) -> None:
    """Its password, if there is one, is not repeated."""
    said = refusal(diagnose("--prometheus", url))
    assert "is not a Prometheus address" in said
    assert "a:b" not in said


def test_a_server_that_is_not_there_is_told(diagnose: Diagnose) -> None:
    """Its address without the credentials in it."""
    with refused_port() as port:
        said = refusal(diagnose("--prometheus", f"http://me:hush@127.0.0.1:{port}/graph"))
    assert said.startswith(f"http://127.0.0.1:{port}: cannot connect")
    assert "hush" not in said


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(reply("<html></html>", content_type="text/html"), "address of a Prometheus", id="HTML"),
        pytest.param(reply("", status=401), "--token-file", id="401"),
        pytest.param(reply("", status=500), "500 on /api/v1/series", id="500"),
        pytest.param(reply_json({"status": "success", "data": []}), "no metrics of an engine", id="nothing"),
        pytest.param(
            reply_json({"status": "success", "data": [{"__name__": "node_load1"}]}),
            "no metrics of an engine",
            id="others",
        ),
    ],
)
def test_a_server_without_a_list_is_told(diagnose: Diagnose, answer: Answer, message: str) -> None:
    """Without a list of series the command fails with one line that gives the reason."""
    with Hostile({"/api/v1/series": answer}) as server:
        assert message in refusal(diagnose("--prometheus", server.url))


def test_a_server_that_answers_no_query_is_told(diagnose: Diagnose) -> None:
    """It lists series, and then nothing can be read."""
    with serving(pods(1), lambda _query: reply_json({"status": "error", "error": "disk gone"}, status=500)) as server:
        said = refusal(diagnose("--prometheus", server.url))
    assert f"{server.url}: no samples" in said
    assert DAY in said
    assert said.endswith("disk gone")


DAY = "2026-11-19T00:00:00Z to 2026-11-20T00:00:00Z"
"""The window."""


def whole(said: Judged) -> dict[str, Any]:
    """The document."""
    decoded: dict[str, Any] = json.loads(said.stdout)
    return decoded


def test_what_is_lost_half_way_makes_it_unknown(diagnose: Diagnose) -> None:
    """The engines were read, the GPUs were not: a gap, and no ok."""
    # A server that has lost DCGM's samples.
    lost = reply_json({"status": "error", "error": "block is corrupted"}, status=500)
    with serving(pods(1), lambda query: lost if "DCGM" in query else None) as server:
        said = diagnose("--prometheus", server.url, "--output", "json")
    replica = whole(said)["replicas"][0]
    assert (3, "unknown") == (said.code, replica["worst"])
    assert containing(DAY, "block is corrupted") in [gap["reason"] for gap in replica["gaps"]]
    assert "ok" == next(one["status"] for one in replica["findings"] if one["id"] == "leak.kv_blocks")


def test_a_warning_makes_it_unknown(diagnose: Diagnose) -> None:
    """Thanos answers with what some of its stores have: what the others had is not known."""
    partly = reply_json(
        {"status": "success", "data": {"resultType": "matrix", "result": []}, "warnings": ["store eu-1 is gone"]}
    )
    with serving(pods(1), lambda query: partly if "DCGM" in query else None) as server:
        replica = whole(diagnose("--prometheus", server.url, "--output", "json"))["replicas"][0]
    assert "unknown" == replica["worst"]
    assert containing("store eu-1 is gone") in [gap["reason"] for gap in replica["gaps"]]


def test_a_warning_of_an_incomplete_list_makes_it_unknown(diagnose: Diagnose) -> None:
    """The series that a store did not list, such as those of a GPU that leaks, are not queried for."""
    listed = [one for one in pods(1) if "DCGM" not in one["__name__"]]
    with serving(listed, listed_with={"warnings": ["store eu-1 is gone"]}) as server:
        replica = whole(diagnose("--prometheus", server.url, "--output", "json"))["replicas"][0]
    assert "unknown" == replica["worst"]
    assert containing("store eu-1 is gone") in [gap["reason"] for gap in replica["gaps"]]


@pytest.fixture
def one_processor() -> Iterator[None]:
    """This process may use one processor, so that replicas are read one portion after the other."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_servers_whose_queries_all_fail_leave_the_others_judged(diagnose: Diagnose) -> None:
    """As many as are read together, and those after them are read."""
    dead, count = reply("", status=500), 3 * REPLICAS_AT_ONCE
    bad = {one["pod"] for one in pods(2 * REPLICAS_AT_ONCE) if "pod" in one}
    bad -= {one["pod"] for one in pods(REPLICAS_AT_ONCE) if "pod" in one}
    with serving(pods(count), lambda query: dead if any(pod in query for pod in bad) else None) as server:
        document = whole(diagnose("--prometheus", server.url, "--output", "json"))
    assert {"fault": 0, "suspect": 0, "unknown": len(bad), "ok": count - len(bad)} == document["fleet"]["by_worst"]


@pytest.mark.usefixtures("one_processor")
def test_a_server_that_dies_half_way_is_not_asked_for_the_others(diagnose: Diagnose) -> None:
    """What was read stays; the others are listed as unknown."""
    # A server that answers for the first portion of four, and then for none.
    dead, count = reply("", status=500), 4 * REPLICAS_AT_ONCE
    answered = {one["pod"] for one in pods(REPLICAS_AT_ONCE) if "pod" in one}
    died: list[str] = []

    def queried(query: str) -> Answer | None:
        died.extend(() if any(pod in query for pod in answered) else (query,))
        return dead if died else None

    with serving(pods(count), queried) as server:
        document = whole(diagnose("--prometheus", server.url, "--output", "json"))
        queries = server.requests.count("/api/v1/query")
    unread = count - REPLICAS_AT_ONCE
    assert {"fault": 0, "suspect": 0, "unknown": unread, "ok": REPLICAS_AT_ONCE} == document["fleet"]["by_worst"]
    samples = sorted(one["window"]["samples"] for one in document["replicas"])
    assert [0] * unread + [5] * REPLICAS_AT_ONCE == samples
    assert queries < 120


def test_credentials_and_tenant_are_sent(diagnose: Diagnose, tmp_path: Path) -> None:
    """The token is read from its file without the line end, and the tenant header for Mimir is sent as given."""
    heads: list[bytes] = []
    (tmp_path / "token").write_text("sesame\n")

    def listed(peer: Peer) -> None:
        heads.append(peer.request_head)
        reply_json({"status": "success", "data": []})(peer)

    with Hostile({"/prometheus/api/v1/series": listed}) as server:
        refusal(
            diagnose(
                *("--prometheus", f"{server.url}/prometheus/", "--token-file", str(tmp_path / "token")),
                *("--header", "X-Scope-OrgID: team-a"),
            )
        )
    told = heads[0].decode().lower().split("\r\n")
    assert {"authorization: bearer sesame", "x-scope-orgid: team-a"} <= set(told)


def test_the_end_is_now_unless_told_otherwise(diagnose: Diagnose) -> None:
    """Samples end at the window's end, which is the one that was given."""
    with serving(pods(1)) as server:
        replica = whole(diagnose("--prometheus", server.url, "--output", "json", "--start", "2026-11-19T12:00:00Z"))
    assert (END_SECONDS - 43_200.0, END_SECONDS) == (replica["source"]["start"], replica["source"]["end"])
