"""The page of a fleet's daemon, and the pages of its replicas."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import urlencode

from kvdiag.formatting import format_time
from kvdiag.outputs.html.fleet_page import View, view_of
from kvdiag.outputs.metrics.fleet_metrics import fleet_figures
from kvdiag.server.answers import Answer
from kvdiag.server.fleet_pages import FleetPages
from kvdiag.server.request import parse_request
from tests.unit.outputs.html_page import Page
from tests.unit.outputs.report_pages import LONG_NAMES, MAKING, fleet_page_of, fleet_status

REPLICA = "/replica/" + "/".join(value for _, value in LONG_NAMES)


def links(page: Page) -> list[str]:
    """Where the page leads."""
    return [attrs["href"] or "" for tag, attrs in page.seen if tag == "a"]


def served(path: str) -> Page:
    """A page of a fleet's daemon."""
    status = fleet_status()
    answer = FleetPages(newest=lambda: status, history=lambda _: None).answer(
        parse_request(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    )

    async def made() -> Answer:
        assert isinstance(answer, Awaitable)
        found: Answer = await answer
        return found

    return Page(asyncio.run(made()).body.decode())


def test_a_page_that_is_kept_until_the_next_round_has_no_ages() -> None:
    """It has the moment of the last round, which stays true."""
    text = served("/").text
    assert f"Last round {format_time(MAKING.made_seconds)}" in text
    assert " ago" not in text


def test_a_replica_is_named_on_its_page_which_leads_back_and_to_runbooks() -> None:
    """The fleet's page links to it; its title and heading name the pod and not only the model."""
    assert REPLICA in links(served("/"))
    page = served(REPLICA)
    assert 2 == page.text.count(f"{REPLICA.removeprefix('/replica/')}, ") + page.text.count(
        f"{REPLICA.removeprefix('/replica/')} - "
    )
    assert {"/", "/runbooks/leak.kv_blocks.md"} <= set(links(page))


def test_an_alert_links_to_the_page_of_its_replica_by_labels() -> None:
    """A cluster that Prometheus adds to what it scrapes does not hide the only replica of that name."""
    labels = urlencode(LONG_NAMES)
    assert served(REPLICA).text == served(f"/replica?{labels}").text
    assert served(REPLICA).text == served(f"/replica?cluster=eu&{labels}").text
    pages = FleetPages(newest=fleet_status, history=lambda _: None)
    request = parse_request(f"GET /replica?{labels}0 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    missing = pages.answer(request)
    assert isinstance(missing, Answer)
    assert HTTPStatus.NOT_FOUND == missing.status


def test_links_filter_and_sort() -> None:
    """By verdict, version and node, each as an address that the page understands."""
    healthy = fleet_page_of(View(status="ok"))
    assert REPLICA not in healthy
    assert REPLICA in fleet_page_of(View(status="fault", sort="node"))
    shown = {"status": ["fault"], "sort": ["node"], "start": ["-1"], "unknown": ["x"]}
    assert View(status="fault", sort="node") == view_of(shown)
    assert "/?status=fault&sort=node" == view_of(shown).address


def test_a_finding_that_may_be_another_has_both_in_the_metrics() -> None:
    """The alerts say so."""
    status = fleet_status()
    one = status.replicas[0]
    leak = replace(one.problems[0], id="leak.device_torch", or_id="leak.device_non_torch")
    judged = replace(one.judged, diagnosis=replace(one.judged.diagnosis, findings=(leak,)))
    figures = fleet_figures(replace(status, replicas=(replace(one, judged=judged),)))
    ((labels, value),) = figures["replica_finding_or_info"]
    assert ((*one.labels, "leak.device_torch", "leak.device_non_torch"), 1.0) == (labels, value)
