"""The answers of a fleet's daemon, from its newest state; what takes long is made by another thread, once for a state.

As of a server's daemon (`endpoints`), nothing here reads a Prometheus or judges. Pages and documents of a thousand
replicas take seconds to make: those are made one at a time and kept until there is another state, the newest few.
"""

import asyncio
import gzip
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from time import time
from typing import Protocol
from urllib.parse import unquote

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

import kvdiag
from kvdiag.alert_files import runbooks
from kvdiag.formatting import plural
from kvdiag.model import Timeline
from kvdiag.outputs.documents import fleet_document
from kvdiag.outputs.fleet_results import NAMES
from kvdiag.outputs.fleet_status import FleetReplica, FleetStatus
from kvdiag.outputs.html import fleet_page, report_page
from kvdiag.outputs.html.report_page import Making
from kvdiag.outputs.metrics.fleet_metrics import FleetCollector
from kvdiag.server.answers import Answer, problem
from kvdiag.server.endpoints import STATUS_HEADERS
from kvdiag.server.request import OPENMETRICS, OPENMETRICS_VERSION, Request

KEPT_ANSWERS = 16
KEPT_BYTES = 16 * 2**20
"""Of answers that are kept, all together; a larger one is made again."""

MAX_CHOICES = 8
"""Replicas of an ambiguous name that its answer lists."""

HTML = "text/html; charset=utf-8"


class FleetHistories(Protocol):
    """Reads the history of one replica as of its verdict."""

    def __call__(self, key: str) -> Timeline | None:
        """The timeline; `None` if it cannot be read."""


@dataclass(slots=True)
class FleetPages:
    """Answers requests from `newest`, which returns the same object until there is another state."""

    newest: Callable[[], FleetStatus]
    history: FleetHistories
    now_seconds: Callable[[], float] = time
    refused_total: int = 0
    """Connections that were closed without an answer because all places were taken."""
    push_failures_total: int | None = None
    """Pushes of the metrics that failed; `None` if they are not pushed."""
    _kept: OrderedDict[tuple[str, ...], tuple[FleetStatus, Answer]] = field(init=False, default_factory=OrderedDict)
    _one: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def answer(self, request: Request) -> Answer | Awaitable[Answer]:
        """The answer to a request: 404 for a path that there is not, 405 for a method that changes something."""
        if request.method not in ("GET", "HEAD"):
            return problem(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are supported", ("Allow", "GET, HEAD"))
        path, packed = request.path, request.packed
        if path == "/-/healthy":
            return Answer(body=b"kvdiag is healthy.\n")
        if path == "/-/ready":
            if self.newest().round_seconds is not None:
                return Answer(body=b"kvdiag is ready.\n")
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "the first round is not over")
        if path == "/metrics":
            header = f"{OPENMETRICS}; version={OPENMETRICS_VERSION}" if request.openmetrics else ""
            return self._made((path, header), lambda status: self._metrics(status, header), packed=packed)
        if path == "/api/v1/fleet":
            if (status := self.newest()).result is None:
                return problem(
                    HTTPStatus.SERVICE_UNAVAILABLE, status.problem or f"{status.sentence}; retry in a minute"
                )
            return self._made((path,), _document, packed=packed)
        if path == "/":
            view = fleet_page.view_of(request.query)
            return self._made((view.address,), lambda status: self._page(status, view), packed=packed)
        if path == "/replica" or path.startswith("/replica/"):
            status = self.newest()
            if path == "/replica":
                found = status.labelled(*(request.query.get(name, ("",))[0] for name in NAMES))
            else:
                found = status.named(unquote(path.removeprefix("/replica/")))
            if len(found) != 1:
                return problem(HTTPStatus.NOT_FOUND, _not_one(found))
            (one,) = found
            return self._made(("/replica", one.judged.key), lambda _: self._replica(one), packed=packed)
        if path == "/runbooks" or path.startswith("/runbooks/"):
            runbook = runbooks().get(path[len("/runbooks/") :].removesuffix(".md") or "README")
            if runbook is not None:
                return Answer(body=runbook.read_bytes())
        return problem(HTTPStatus.NOT_FOUND, "no such page; / lists all pages")

    async def _made(self, key: tuple[str, ...], make: Callable[[FleetStatus], Answer], *, packed: bool) -> Answer:
        """An answer that another thread makes once for each state, however many ask."""
        key = (*key, str(packed))
        async with self._one:
            status = self.newest()
            kept = self._kept.get(key)
            if kept is not None and kept[0] is status:
                return kept[1]
            answer = await asyncio.to_thread(lambda: _packed(make(status)) if packed else make(status))
            self._kept[key] = status, answer
            self._kept.move_to_end(key)
            for old in [old for old, (of, _) in self._kept.items() if of is not status]:
                del self._kept[old]
            while len(self._kept) > KEPT_ANSWERS or sum(len(one.body) for _, one in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
            return answer

    @property
    def has_figures(self) -> bool:
        """Whether the first round is over, or has failed, which the metrics say."""
        status = self.newest()
        return status.round_seconds is not None or status.problem is not None

    async def families(self) -> list[Metric]:
        """The families of /metrics as of now."""
        return await asyncio.to_thread(self._collector(self.newest()).collect)

    def _collector(self, status: FleetStatus) -> FleetCollector:
        return FleetCollector(status, self.refused_total, self.push_failures_total)

    def _metrics(self, status: FleetStatus, header: str) -> Answer:
        encoder, content_type = choose_encoder(header)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector(status))
        return Answer(body=encoder(registry), content_type=content_type)

    def _page(self, status: FleetStatus, view: fleet_page.View) -> Answer:
        body = fleet_page.page(status, view, self.now_seconds()).encode()
        return Answer(body=body, content_type=HTML, headers=STATUS_HEADERS)

    def _replica(self, one: FleetReplica) -> Answer:
        timeline = self.history(one.judged.key) or Timeline(samples=())
        making = Making(
            version=kvdiag.__version__,
            command="kvdiag serve --prometheus",
            made_seconds=one.as_of_seconds,
            subject=one.judged.name,
            index="/",
        )
        body = report_page.render(one.judged.diagnosis, timeline, making).encode()
        return Answer(body=body, content_type=HTML, headers=STATUS_HEADERS)


def _not_one(found: Sequence[FleetReplica]) -> str:
    if not found:
        return "no such replica, or it has no verdict yet; / lists all of them"
    addresses = ", ".join(one.query for one in found[:MAX_CHOICES])
    more = f" and {len(found) - MAX_CHOICES:,} more, which / lists" if len(found) > MAX_CHOICES else ""
    return (
        f"the name is ambiguous: {plural(len(found), 'replica')} have it; add the cluster, as in "
        f"/replica/CLUSTER/NAMESPACE/POD, or open one of {addresses}{more}"
    )


def _document(status: FleetStatus) -> Answer:
    document = None if status.result is None else fleet_document.document(status.result)
    body = json.dumps(document, separators=(",", ":")).encode() + b"\n"
    return Answer(body=body, content_type="application/json")


def _packed(answer: Answer) -> Answer:
    headers = (*answer.headers, ("Content-Encoding", "gzip"))
    body = gzip.compress(answer.body, compresslevel=1)
    return Answer(body=body, status=answer.status, content_type=answer.content_type, headers=headers)
