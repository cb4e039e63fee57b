"""What the HTTP shell answers."""

import asyncio
import gzip
import json
from dataclasses import replace
from http import HTTPStatus

import pytest

from kvdiag.alert_files import runbooks
from kvdiag.model import Sample
from kvdiag.server.endpoints import Pages
from kvdiag.server.request import Request
from tests.unit.outputs.test_metrics import page, snapshot
from tests.unit.server.shell import STARTING, Shell, shell


def test_metrics_are_the_page(serving: Shell) -> None:
    """A scrape gets the page with the exact type that Prometheus asks for, packed where it takes that."""
    plain = serving.ask("GET /metrics")
    packed = serving.ask("GET /metrics/", accept_encoding="gzip", accept="application/openmetrics-text;version=1.0.0")
    assert (200, page(snapshot()).encode()) == (plain.status, plain.body)
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert packed.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert gzip.decompress(packed.body).endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "openmetrics-text"),
        ("application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5", "plain"),
        ("application/openmetrics-text", "openmetrics-text"),
        ("application/openmetrics-text;version=1.0.0;q=0", "plain"),
        ("application/openmetrics-text;version=abc", "plain"),
        ("application/openmetrics-text;version=9.9.9", "plain"),
        ("text/plain;version=\xb2", "plain"),
        ("", "plain"),
    ],
    ids=["Prometheus", "an older one", "any version", "refused", "no version", "a later version", "no number", "none"],
)
def test_the_form_is_one_of_two(serving: Shell, accept: str, expected: str) -> None:
    """For any Accept header the client gets one of the two known forms, without text from its header."""
    answer = serving.ask("GET /metrics", accept=accept)
    forms = {
        "plain": "text/plain; version=0.0.4; charset=utf-8",
        "openmetrics-text": "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores",
    }
    assert (200, forms[expected]) == (answer.status, answer.headers["content-type"])


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("identity", False),
        ("identity, gzip;q=0", False),
        ("gzip;q=0.000", False),
        ("notgzip", False),
    ],
    ids=["asked for", "among others", "not asked for", "refused", "refused at length", "another"],
)
def test_only_who_takes_it_gets_it_packed(serving: Shell, accepted: str, expected: bool) -> None:
    """A page is packed for clients that say so, and not for those that say they do not want it."""
    answer = serving.ask("GET /metrics", accept_encoding=accepted)
    assert expected == ("content-encoding" in answer.headers)


def test_a_mistake_of_our_own_costs_one_answer(serving: Shell) -> None:
    """An unforeseen exception is answered with 500, and the next request is served."""
    # What cannot be shown
    right, serving.shown = serving.shown, None  # type: ignore[assignment]
    broken = serving.ask("GET /-/ready").status
    serving.shown = right
    assert (500, 200) == (broken, serving.ask("GET /-/ready").status)


def test_names_filter_the_page(serving: Shell) -> None:
    """`name[]` asks for some series alone."""
    answer = serving.ask("GET /metrics?name[]=kvdiag_kv_usage_ratio&name[]=kvdiag_build_info")
    lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
    assert ['kvdiag_build_info{version="0.1.0"} 1.0', 'kvdiag_kv_usage_ratio{engine="0"} 0.25'] == lines


def test_a_new_snapshot_is_a_new_page(serving: Shell) -> None:
    """The rendered text is cached until a new snapshot arrives."""
    serving.ask("GET /metrics")
    serving.shown = STARTING
    assert page(STARTING).encode() == serving.ask("GET /metrics").body


def test_diagnosis_and_ledger_are_documents(serving: Shell) -> None:
    """The diagnosis is that of `kvdiag run --output json`; the ledger adds up to what is used."""
    diagnosis = json.loads(serving.ask("GET /api/v1/diagnosis").body)
    audit = json.loads(serving.ask("GET /api/v1/ledger").body)
    assert (2, "fault") == (diagnosis["schema_version"], diagnosis["worst"])
    assert audit["devices"][0]["used_bytes"] == sum(line["bytes"] for line in audit["ledger"])


def test_the_snapshot_leaves_the_models_config_out(serving: Shell) -> None:
    """`kvdiag top` shows model and URL, and has no use for the text of config.json."""
    known = serving.shown
    serving.shown = replace(known, facts=replace(known.facts, model_config='{"hidden_size": 4096}'))
    answer = serving.ask("GET /api/v1/snapshot")
    facts = json.loads(answer.body)["snapshot"]["facts"]
    assert (200, known.facts.url) == (answer.status, facts["url"])
    assert b"hidden_size" not in answer.body


def test_the_first_page_is_for_a_person(serving: Shell) -> None:
    """A document that a browser lets load nothing, and that is made once however often it is asked for."""
    first = serving.ask("GET /")
    # A moment has passed, and something else is known
    serving.shown = STARTING
    second = serving.ask("GET /")
    assert (200, "text/html; charset=utf-8") == (first.status, first.headers["content-type"])
    assert first.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert b"leak.kv_blocks" in first.body
    assert first.body == second.body


@pytest.mark.parametrize("path", ["/", "/api/v1/history"])
def test_what_takes_long_is_made_rarely(path: str) -> None:
    """Pages of a server with 500 engines take seconds: a client that reloads them must leave time for all others."""
    now_seconds, made = 1_000.0, 0

    def slow() -> tuple[Sample, ...]:
        nonlocal now_seconds, made
        now_seconds, made = now_seconds + 3.0, made + 1
        return ()

    pages = Pages(newest=lambda: replace(STARTING), history=slow, now_seconds=lambda: now_seconds)
    for _ in range(100):
        assert pages.answer(Request(method="GET", path=path)).status == HTTPStatus.OK
        now_seconds += 1.0
    assert 4 >= made


def test_before_anything_is_known_it_says_so() -> None:
    """Healthy means that the daemon lives; ready that something was read; there is no diagnosis of nothing."""
    known = {"/-/healthy": 200, "/-/ready": 503, "/api/v1/diagnosis": 503, "/metrics": 200, "/": 200, "/nothing": 404}
    with shell(STARTING) as serving:
        assert known == {path: serving.ask(f"GET {path}").status for path in known}


def test_head_has_no_body(serving: Shell) -> None:
    """HEAD answers as GET does, without what it would carry."""
    answer = serving.ask("HEAD /-/ready")
    assert (200, b"", "17") == (answer.status, answer.body, answer.headers["content-length"])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(serving: Shell, method: str) -> None:
    """Only GET is served."""
    answer = serving.ask(f"{method} /metrics")
    assert (405, "GET, HEAD") == (answer.status, answer.headers["allow"])


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00 tls \xff\r\n\r\n",
        b"GET /metrics?" + b"name[]=x&" * 1000 + b" HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /-/ready HTTP/1.x\r\n\r\n",
        b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n",
        b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nContent-Length : 4\r\n\r\n",
        b"GET /-/ready HTTP/1.1\r\nHost: localhost\r\nX: y\nContent-Length: 4\r\n\r\n",
    ],
    ids=[
        *("nothing", "a word", "HTTP/0.9", "no path", "no URL", "TLS", "1,000 names", "200 KB"),
        *("HTTP/1.x", "no header", "a space before the colon", "a line feed in a header"),
    ],
)
def test_garbage_is_refused(serving: Shell, sent: bytes) -> None:
    """What is no request, or too large for one, gets 400, 431 or a closed connection, and the next is served."""
    try:
        status = asyncio.run(serving.exchange(sent)).status
    except ConnectionError:
        status = 0  # closed while more was being sent
    assert status in (0, 400, 431)
    assert 200 == serving.ask("GET /-/ready").status


def test_runbooks_are_served(serving: Shell) -> None:
    """Each runbook is at its id, with and without `.md`, and so is their index; no other file is."""
    for name, file in runbooks().items():
        assert {file.read_bytes()} == {serving.ask(f"GET /runbooks/{name}{end}").body for end in ("", ".md")}
    assert runbooks()["README"].read_bytes() == serving.ask("GET /runbooks").body
    absent = ("leak.nothing", "../alerting-rules.yaml", "%2e%2e/README", "leak.host.md.md", "/etc/passwd")
    assert {404} == {serving.ask(f"GET /runbooks/{name}").status for name in absent}
