"""Other kinds of servers, and servers with impossible figures: one clear error line, or a gap next to the rest."""

import gzip
import re
from collections.abc import Callable, Mapping

import pytest

from tests.fixtures.hostile import Answer, Hostile, endless, head, raw, reply, reply_json, silent
from tests.unit.commands.bad_input.refusals import MODEL, PAGE, SERVER, call, listed, refusal

MIB = 2**20

HTML = reply("<!DOCTYPE html>\n<html>\n<body>\nLogin\n</body>\n</html>\n", content_type="text/html")

WRONG_SERVERS: Mapping[str, Mapping[str, Answer]] = {
    "another server": {},
    "HTML everywhere": {"/v1/models": HTML},
    "401": {"/v1/models": reply("", status=401)},
    "403": {"/v1/models": reply("", status=403)},
    "redirect": {"/v1/models": reply("", status=302, Location="/login")},
    "a list": {"/v1/models": reply_json([])},
    "no model": {"/v1/models": reply_json({"data": []})},
    "nested without end": {"/v1/models": reply("[" * 100_000)},
    "garbage": {"/v1/models": raw(b"\x00" * 999)},
    "silence": {"/v1/models": silent()},
    "no metrics": {**SERVER, "/metrics/": reply("", status=404)},
    "HTML metrics": {**SERVER, "/metrics/": HTML},
    "HTML that says it is text": {**SERVER, "/metrics/": reply("<html>\r\n</html>")},
    "no series": {**SERVER, "/metrics/": reply("")},
    "--disable-log-stats": {**SERVER, "/metrics/": reply('http_requests_total{code="2xx"} 5.0\n')},
    "a page of 100 MB": {**SERVER, "/metrics/": endless(head(), b"# HELP x y\n" * 9999, limit_bytes=100 * MIB)},
    "a page of one line": {**SERVER, "/metrics/": reply("x{" + 'label="v",' * 999_999 + "} 1\n")},
    "a page that never ends": {**SERVER, "/metrics/": endless(head(), b"#", pause_seconds=0.05)},
    "a packed bomb": {**SERVER, "/metrics/": reply(gzip.compress(bytes(64 * MIB)), Content_Encoding="gzip")},
}


def test_server_that_is_no_vllm_is_one_line(golden: Callable[[str, str], None]) -> None:
    """A server that is something else, wants a key, or misbehaves is one line with what to look at."""
    told = {}
    for name, answers in WRONG_SERVERS.items():
        with Hostile(answers) as server:
            text = refusal("run", "--url", server.url).replace(server.url, "URL")
            told[name] = re.sub(r" \([^)]*\)+", " (…)", text)
    golden("errors/servers.txt", listed(told))


def page_with(name: str, value: str) -> str:
    """A page on which one gauge has another value."""
    return re.sub(rf"(?m)^({name}{{[^}}]*}}) .*$", rf"\g<1> {value}", PAGE)


@pytest.mark.parametrize(
    ("value", "told"),
    [("NaN", "nan"), ("-1.0", "-1"), ("1e300", "1e+300"), ("9" * 400, "inf")],
    ids=lambda text: text[:6],
)
def test_impossible_count_is_a_gap(value: str, told: str) -> None:
    """A NaN, negative or huge count is a gap of kind `failed` that names the metric; the other figures are shown."""
    page = page_with("vllm:num_requests_running", value)

    with Hostile({**SERVER, "/metrics/": reply(page)}) as server:
        result = call("audit", "--url", server.url, "--output", "json")

    assert (0, "") == (result.code, result.stderr)
    failed = {gap["reason"] for gap in result.document["gaps"] if gap["kind"] == "failed"}
    assert [True] == [f" is {told}:" in reason for reason in failed if "num_requests_running" in reason]
    assert ["kv_held", "kv_free"] == [line["component"] for line in result.document["ledger"]]


@pytest.mark.parametrize(("value", "told"), [("NaN", "nan"), ("-0.5", "-0.5"), ("1e300", "1e+300")])
def test_impossible_usage_leaves_nothing_to_show(value: str, told: str) -> None:
    """An impossible KV cache usage, with nothing else to show, is an error that names the value."""
    page = page_with("vllm:kv_cache_usage_perc", value)

    with Hostile({**SERVER, "/metrics/": reply(page)}) as server:
        actual = refusal("audit", "--url", server.url)

    assert f" is {told}:" in actual


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
    version = reply(b'{"version":"0.32.0"}', content_type="application/json", Server="kvdiag-drill")

    with Hostile({**SERVER, "/version": version, "/drill/nvml": gpu}) as server:
        result = call("audit", "--url", server.url, "--output", "json")

    assert (0, "", []) == (result.code, result.stderr, result.document["devices"])
    assert ["nvml"] == [gap["source"] for gap in result.document["gaps"] if gap["source"] == "nvml"]


@pytest.mark.parametrize("name", ["\ud800", "", "x" * 5000, 7, None])
def test_model_without_a_name_is_told(name: object) -> None:
    """A server whose model has no name that could be asked for is refused."""
    with Hostile({**SERVER, "/v1/models": reply_json({"data": [{**MODEL, "id": name}]})}) as server:
        actual = refusal("run", "--url", server.url)

    assert "/v1/models" in actual
