"""The page of a fleet's daemon, and the pages of its replicas."""

import asyncio
import json
import re
from collections.abc import Awaitable
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import quote, urlencode

import pytest

from kvdiag.feeds.history.series_join import join
from kvdiag.formatting import format_time
from kvdiag.outputs.fleet_results import NAMES
from kvdiag.outputs.fleet_status import FleetStatus
from kvdiag.outputs.html.fleet_page import View, page, version_name, view_of
from kvdiag.outputs.metrics.fleet_metrics import FleetCollector, fleet_figures
from kvdiag.server.answers import Answer
from kvdiag.server.fleet_pages import FleetPages
from kvdiag.server.request import parse_request
from tests.unit.outputs.html_page import Page
from tests.unit.outputs.report_pages import LONG_NAMES, MAKING, fleet_page_of, fleet_status

REPLICA = "/replica/" + "/".join(value for _, value in LONG_NAMES)


def links(page: Page) -> list[str]:
    """Where the page leads."""
    return [attrs["href"] or "" for tag, attrs in page.seen if tag == "a"]


def served(path: str, status: FleetStatus | None = None) -> Page:
    """A page of a fleet's daemon."""
    return served_by(pages_of(status or fleet_status()), path)


def pages_of(status: FleetStatus) -> FleetPages:
    """The pages of one state."""
    return FleetPages(newest=lambda: status, history=lambda _: None)


def served_by(pages: FleetPages, path: str) -> Page:
    """One of them."""
    answer = asked(pages, path)

    async def made() -> Answer:
        assert isinstance(answer, Awaitable)
        found: Answer = await answer
        return found

    return Page(asyncio.run(made()).body.decode())


def asked(pages: FleetPages, path: str) -> Answer | Awaitable[Answer]:
    """The answer; a page has to be waited for."""
    return pages.answer(parse_request(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))


def renamed(*subjects: dict[str, str]) -> FleetStatus:
    """A state whose replicas have these labels, as the series join names them; the first is the worst."""
    status, named = fleet_status(), [tuple(sorted(labels.items())) for labels in subjects]
    keys = {one.subject: one.key for one in join((("__name__", "vllm:num_requests_running"), *one) for one in named)[0]}
    replicas = [
        replace(one, judged=replace(one.judged, key=keys[subject], subject=subject))
        for one, subject in zip(status.replicas, named, strict=False)
    ]
    return replace(status, replicas=tuple(replicas))


def own(number: int, **labels: str) -> dict[str, str]:
    """The labels of a server at an address of its own."""
    return {"instance": f"10.0.0.{number}:8000", "job": "vllm", **labels}


def test_the_top_of_the_page_leads_to_what_stands_below_the_replicas() -> None:
    """A reader of 200 rows finds the versions and the nodes."""
    page = served("/")
    assert {"#version", "#node"} == {link for link in links(page) if link.startswith("#")}
    assert {"version", "node"} <= {attrs.get("id") for _, attrs in page.seen}


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
    missing = asked(pages_of(fleet_status()), f"/replica?{labels}0")
    assert isinstance(missing, Answer)
    assert HTTPStatus.NOT_FOUND == missing.status


@pytest.mark.parametrize(
    "pod", ["vllm-0/", "/", "a/b", "a?b=c", "a#b", "100%", "%2F", "a b&c", "\u00e9+\u4e2d", "a [b", "a [b=c]"]
)
@pytest.mark.parametrize("namespace", [None, "prod", "a/b/"])
def test_each_replica_can_be_opened_whatever_its_name(namespace: str | None, pod: str) -> None:
    """A link of the fleet's page leads to the replica's own, which is titled with its name."""
    labels = {"pod": pod} | ({"namespace": namespace} if namespace else {})
    status = renamed(own(0, **labels))
    address = f"/replica/{'/'.join(quote(value, safe='') for value in (namespace, pod) if value)}"
    assert address in links(served("/", status))
    assert "/".join(filter(None, (namespace, pod))) in served(address, status).text
    assert [(namespace or "", pod)] == [one.labels[1:3] for one in status.replicas]
    assert ["/".join(filter(None, (namespace, pod)))] == [one.judged.name for one in status.replicas]


@pytest.mark.parametrize(("namespace", "pod"), [("prod", "."), ("prod", ".."), ("..", "a"), (".", ".")])
def test_a_name_that_a_browser_takes_for_a_folder_is_no_part_of_a_path(namespace: str, pod: str) -> None:
    """The link has it in its query."""
    status = renamed(own(0, namespace=namespace, pod=pod), own(1, namespace="prod", pod="vllm-1"))
    address = f"/replica?{urlencode({'cluster': '', 'namespace': namespace, 'pod': pod})}"
    assert address in links(served("/", status))
    assert f"{namespace}/{pod}" in served(address, status).text


@pytest.mark.parametrize("pod", ["vllm-0/", "a&b=c;d", "new\nline", "v" * 253])
def test_the_labels_of_a_series_lead_to_its_replica(pod: str) -> None:
    """As in an alert: /metrics shortens a long name, and has no control characters."""
    status = renamed(own(0, namespace="prod", pod=pod), own(1, namespace="prod", pod="vllm-1"))
    families = {family.name: family for family in FleetCollector(status, 0).collect()}
    labels = families["kvdiag_replica_status"].samples[0].labels
    address = f"/replica?{urlencode({name: labels[name] for name in NAMES})}"
    assert served(f"/replica/prod/{quote(pod, safe='')}", status).text == served(address, status).text


CLUSTERS = [own(number, cluster=cluster, namespace="prod", pod="a") for number, cluster in enumerate(("east", "west"))]


def test_a_name_that_two_clusters_have_is_ambiguous_until_the_cluster_is_added() -> None:
    """The answer lists an address for each of them, and each is that of one replica."""
    status = renamed(*CLUSTERS)
    pages = pages_of(status)
    for path in ("/replica/prod/a", "/replica?namespace=prod&pod=a", "/replica?cluster=eu&namespace=prod&pod=a"):
        answer = asked(pages, path)
        assert isinstance(answer, Answer)
        assert HTTPStatus.NOT_FOUND == answer.status
        error = json.loads(answer.body)["error"]
        assert "ambiguous" in error
        for cluster in ("east", "west"):
            address = f"/replica?cluster={cluster}&namespace=prod&pod=a"
            assert address in error
            assert f"{cluster}/prod/a" in served_by(pages, address).text
    assert {"/replica/east/prod/a", "/replica/west/prod/a"} <= set(links(served("/", status)))
    assert {"east", "west"} == {one.labels[0] for one in status.replicas}
    assert "east/prod/a" in served("/replica/prod/a", renamed(CLUSTERS[0])).text


@pytest.mark.parametrize("subjects", [CLUSTERS, [{**own(0), "cluster": "east"}, {**own(0), "cluster": "west"}, own(1)]])
def test_two_replicas_of_one_name_never_get_the_page_of_each_other(subjects: list[dict[str, str]]) -> None:
    """Pages are kept until the next round: each by its own replica, in whichever order they are requested."""
    status = renamed(*subjects)
    pages = pages_of(status)
    addresses = [f"/replica?{urlencode(dict(zip(NAMES, one.labels, strict=False)))}" for one in status.replicas[:2]]
    expected = [served(address, status).text for address in addresses]
    assert expected[0] != expected[1]
    for _ in range(2):
        assert expected == [served_by(pages, address).text for address in addresses]


def test_links_filter_and_sort() -> None:
    """By verdict, version and node, each as an address that the page understands."""
    healthy = fleet_page_of(View(status="ok"))
    assert REPLICA not in healthy
    assert REPLICA in fleet_page_of(View(status="fault", sort="node"))
    shown = {"status": ["fault"], "sort": ["node"], "start": ["-1"], "unknown": ["x"]}
    assert View(status="fault", sort="node") == view_of(shown)
    assert "/?status=fault&sort=node" == view_of(shown).address


@pytest.mark.parametrize("model", ["tiny", "m" * 300])
def test_a_link_shows_as_many_replicas_as_it_says(model: str) -> None:
    """Of each verdict, also where the page shows one version, however long its name."""
    status = renamed(*(own(number, namespace="prod", pod=f"vllm-{number}") for number in range(3)))
    first, *others = status.replicas
    status = replace(status, replicas=(replace(first, version=replace(first.version, model=model)), *others))
    versions = {version_name(one) for one in status.replicas}
    assert len(versions) > 1
    for version in ("", *versions):
        links_of = re.findall(r'<a href="(/[?][^"]*)">([0-9]+) [a-z]+</a>', page(status, View(version=version), 0.0))
        assert links_of
        for address, count in links_of:
            shown = served(address.replace("&amp;", "&"), status)
            assert int(count) == sum(to.startswith("/replica/") for to in links(shown))


def test_a_finding_that_may_be_another_has_both_in_the_metrics() -> None:
    """The alerts say so."""
    status = fleet_status()
    one = status.replicas[0]
    leak = replace(one.problems[0], id="leak.device_torch", or_id="leak.device_non_torch")
    judged = replace(one.judged, diagnosis=replace(one.judged.diagnosis, findings=(leak,)))
    figures = fleet_figures(replace(status, replicas=(replace(one, judged=judged),)))
    ((labels, value),) = figures["replica_finding_or_info"]
    assert ((*one.labels, "leak.device_torch", "leak.device_non_torch"), 1.0) == (labels, value)
