"""Servers that are something else, or whose figures cannot be: one clear line, or a gap beside the rest."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping

import pytest

from tests.fixtures.hostile import Answer, Hostile, endless, head, raw, reply, reply_json, silent
from tests.integration.vllm.cli import kvdiag
from tests.unit.commands.refusals import MODEL, PAGE, SERVER, refusal

MIB = 2**20

CHECK = "check the URL, is a vLLM server there?"
HTML = reply("<!DOCTYPE html>\n<html>\n<body>\nLogin\n</body>\n</html>\n", content_type="text/html")

WRONG_SERVERS = [
    pytest.param({}, f"404 on /v1/models: {CHECK}", id="another server"),
    pytest.param({"/v1/models": HTML}, f"the answer is not JSON: {CHECK}", id="HTML everywhere"),
    pytest.param(
        {"/v1/models": reply("", status=401)},
        "401 on /v1/models: the server requires an API key: pass --api-key together with the server's address",
        id="401",
    ),
    pytest.param(
        {"/v1/models": reply("", status=403)},
        "403 on /v1/models: the server requires an API key: pass --api-key together with the server's address",
        id="403",
    ),
    pytest.param(
        {"/v1/models": reply("", status=302, Location="/login")}, f"302 on /v1/models: {CHECK}", id="redirect"
    ),
    pytest.param({"/v1/models": reply_json([])}, "/v1/models lists no model: is this a vLLM server?", id="a list"),
    pytest.param(
        {"/v1/models": reply_json({"data": []})}, "/v1/models lists no model: is this a vLLM server?", id="no model"
    ),
    pytest.param({"/v1/models": reply("[" * 100_000)}, f"the answer is not JSON: {CHECK}", id="nested without end"),
    pytest.param({"/v1/models": raw(b"\x00" * 999)}, "the answer broke off (…)", id="garbage"),
    pytest.param({"/v1/models": silent()}, "no whole answer within 5 s on /v1/models", id="silence"),
    pytest.param({**SERVER, "/metrics/": reply("", status=404)}, f"404 on /metrics/: {CHECK}", id="no metrics"),
    pytest.param(
        {**SERVER, "/metrics/": HTML}, "answered a web page where metrics should be: check the URL", id="HTML metrics"
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply("<html>\r\n</html>")},
        "the metrics page is malformed: invalid metric name:<html>",
        id="HTML that says it is text",
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply("")},
        "the page has no vllm:* series: is this the metrics page of a vLLM server?",
        id="no series",
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply('http_requests_total{code="2xx"} 5.0\n')},
        "the page has no vllm:* series: start the server without --disable-log-stats",
        id="--disable-log-stats",
    ),
    pytest.param(
        {**SERVER, "/metrics/": endless(head(), b"# HELP x y\n" * 9999, limit_bytes=100 * MIB)},
        "more than 16 MiB on /metrics/: not a metrics page",
        id="a page of 100 MB",
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply("x{" + ",".join(f'l{n}="v"' for n in range(999_999)) + "} 1\n")},
        "the metrics page is malformed: a line has more than 16384 characters",
        id="a page of one line",
    ),
    pytest.param(
        {**SERVER, "/metrics/": endless(head(), b"#", pause_seconds=0.05)},
        "no whole answer within 5 s on /metrics/",
        id="a page that never ends",
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply(gzip.compress(bytes(64 * MIB)), Content_Encoding="gzip")},
        "the answer on /metrics/ is packed (…) although that was not asked for",
        id="a packed bomb",
    ),
]


@pytest.mark.parametrize(("answers", "message"), WRONG_SERVERS)
def test_server_that_is_no_vllm_is_told(answers: Mapping[str, Answer], message: str) -> None:
    """A server that is something else, wants a key, or misbehaves is one line with what to look at."""
    # WHEN
    with Hostile(answers) as server:
        actual = refusal("run", "--url", server.url)

    # THEN
    assert f"URL: {message}" == re.sub(r" \([^)]*\)+", " (…)", actual.replace(server.url, "URL"))


def page_with(name: str, value: str) -> str:
    """A page on which one gauge has another value."""
    return re.sub(rf"(?m)^({name}{{[^}}]*}}) .*$", rf"\g<1> {value}", PAGE)


@pytest.mark.parametrize(
    ("value", "told"),
    [("NaN", "nan"), ("-1.0", "-1"), ("1e300", "1e+300"), ("9" * 400, "inf")],
    ids=lambda text: text[:6],
)
def test_impossible_count_is_a_gap(value: str, told: str) -> None:
    """A count that is NaN, negative or huge is named as a reading that failed, and the rest is shown."""
    # GIVEN
    page = page_with("vllm:num_requests_running", value)

    # WHEN
    with Hostile({**SERVER, "/metrics/": reply(page)}) as server:
        result = kvdiag("audit", "--url", server.url, "--output", "json")

    # THEN
    reason = f"vllm:num_requests_running of engine 0 is {told}: not a possible figure"
    assert (0, "") == (result.code, result.stderr)
    assert {"source": "vllm", "kind": "failed", "reason": reason} in result.document["gaps"]
    assert ["kv_held", "kv_free"] == [line["component"] for line in result.document["ledger"]]


@pytest.mark.parametrize(("value", "told"), [("NaN", "nan"), ("-0.5", "-0.5"), ("1e300", "1e+300")])
def test_impossible_usage_leaves_nothing_to_show(value: str, told: str) -> None:
    """A usage that cannot be, where nothing else is seen, is the reason why nothing is shown."""
    # GIVEN
    page = page_with("vllm:kv_cache_usage_perc", value)

    # WHEN
    with Hostile({**SERVER, "/metrics/": reply(page)}) as server:
        actual = refusal("audit", "--url", server.url)

    # THEN
    assert f"nothing to audit: KV usage of engine 0 is {told}: not a possible figure" == actual


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(reply("garbage"), id="garbage"),
        pytest.param(reply_json({"driver_version": "1", "devices": [{}]}), id="no GPU"),
        pytest.param(reply("[" * 100_000), id="nested without end"),
        pytest.param(endless(head(), b" " * 65536, limit_bytes=100 * MIB), id="100 MB"),
    ],
)
def test_server_that_plays_a_drill_is_not_trusted(gpu: Answer) -> None:
    """Who says that it is a drill, and shows no GPU for it, is a server without one."""
    # GIVEN
    version = reply(b'{"version":"0.32.0"}', content_type="application/json", Server="kvdiag-drill")

    # WHEN
    with Hostile({**SERVER, "/version": version, "/drill/nvml": gpu}) as server:
        result = kvdiag("audit", "--url", server.url, "--output", "json")

    # THEN
    assert (0, "", []) == (result.code, result.stderr, result.document["devices"])
    assert ["nvml"] == [gap["source"] for gap in result.document["gaps"] if gap["source"] == "nvml"]


@pytest.mark.parametrize("name", ["\ud800", "", "x" * 5000, 7, None])
def test_model_without_a_name_is_told(name: object) -> None:
    """A server whose model has no name that could be asked for is refused."""
    # WHEN
    with Hostile({**SERVER, "/v1/models": reply_json({"data": [{**MODEL, "id": name}]})}) as server:
        actual = refusal("run", "--url", server.url)

    # THEN
    assert "the server does not name its model, so nothing can be asked of it" == actual
