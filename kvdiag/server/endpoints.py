"""The daemon's answers: each path's page from the newest snapshot, rendered once however often it is requested.

Nothing here samples, diagnoses or waits, so that no client can delay the daemon. The method is checked first (nothing
can be changed over HTTP; a profile can be asked for where that is allowed), then the path; an answer that does not
exist yet is 503 with its reason. Metrics, diagnosis, ledger, snapshot and history are kept until the snapshot is
another object; the status page, which shows ages, is kept for `STATUS_SECONDS`. What took long to make is kept for
longer, so that a server with hundreds of engines and a client that asks again and again do not hold the event loop.
Admission advice is computed for each request, from the newest snapshot and the room promised since. Health needs only
this code to run, readiness a first sample. Passwords and the limits on connections are decided before a request gets
here.
"""

import gzip
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from time import time
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

import kvdiag
from kvdiag.admission import Wish, advise
from kvdiag.alert_files import runbooks
from kvdiag.ledger import ledger
from kvdiag.model import MAX_COUNT, Facts, Sample, Snapshot
from kvdiag.model.codec import to_plain
from kvdiag.outputs.current_verdict import as_of_now
from kvdiag.outputs.documents import diagnosis_document
from kvdiag.outputs.metrics.exporter import registry
from kvdiag.outputs.terminal.sparkline_history import history_samples
from kvdiag.server.answers import NOT_KEPT, Answer, json_answer, problem
from kvdiag.server.profile_desk import PATH, ProfileDesk
from kvdiag.server.request import OPENMETRICS, OPENMETRICS_VERSION, Request
from kvdiag.sources.daemon_client import DaemonReading

STATUS_SECONDS = 2.0
"""How long the rendered status page is reused."""

KEPT_RATIO = 10.0
"""How much longer than it took to make an answer is reused, also if there is a newer snapshot."""

STATUS_HEADERS = (
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    ("Cache-Control", "no-store"),
)
"""The page has no script, loads nothing, and cannot be framed."""

ADMISSION_VERSION = 1
"""Of the document of an advice."""

ON_ITS_WAY_SECONDS = 1.0
"""From the advice until the request shows in the engine's metrics."""

MAX_PROMISES = 10_000
"""Open promises; more requests for advice within that time are answered with `wait`."""


class Admissions:
    """Admissions since the engines were last read, so that the same room is not promised twice."""

    def __init__(self) -> None:
        """Start without promises."""
        self._promised: deque[tuple[float, int]] = deque()

    def answer(self, query: Mapping[str, Sequence[str]], now: Snapshot, now_seconds: float) -> dict[str, Any]:
        """The advice for the request of a query, as a document.

        Raises:
            ValueError: the query does not give the sizes of the request.
        """
        wish = Wish(prompt_tokens=_tokens(query, "prompt_tokens"), max_tokens=_tokens(query, "max_tokens"))
        read_seconds = now.engines_seconds
        while self._promised and read_seconds is not None and self._promised[0][0] < read_seconds - ON_ITS_WAY_SECONDS:
            self._promised.popleft()
        reported = advise(
            wish,
            engines=now.newest.engines if now.state == "serving" else None,
            age_seconds=0.0 if read_seconds is None else max(now_seconds - read_seconds, 0.0),
            facts=now.facts,
            lengths=now.lengths,
            promised=[blocks for _, blocks in self._promised],
        )
        if reported.decision == "admit" and len(self._promised) >= MAX_PROMISES:
            reason = "too many requests admitted since the last sample"
            return {"schema_version": ADMISSION_VERSION, "decision": "wait", "reason": reason}
        if reported.decision == "admit":
            self._promised.append((now_seconds, reported.request_blocks or 0))
        finished = None if now.lengths is None else now.lengths.finished
        return {"schema_version": ADMISSION_VERSION, **asdict(reported), "lengths_of": finished}


def _tokens(query: Mapping[str, Sequence[str]], name: str) -> int:
    values = query.get(name, ())
    if len(values) != 1 or not values[0].isascii() or not values[0].isdecimal() or len(values[0]) > len(str(MAX_COUNT)):
        raise ValueError(f"give {name} once, as a whole number of tokens")
    return int(values[0])


@dataclass(slots=True)
class Pages:
    """Answers the daemon's HTTP requests from its newest snapshot: it reads nothing and waits for nothing.

    `newest` returns the snapshot as of now, the same object until something changes: what was rendered of it is kept.
    """

    newest: Callable[[], Snapshot]
    history: Callable[[], tuple[Sample, ...]] = tuple
    """The samples of the last hours, in ascending time."""
    now_seconds: Callable[[], float] = time
    profiles: ProfileDesk | None = None
    """Where profiles are asked for, if that is allowed."""
    refused_total: int = 0
    """Connections that were closed without an answer because all places were taken."""
    push_failures_total: int | None = None
    """Pushes of the metrics that failed; `None` if they are not pushed."""
    _admissions: Admissions = field(init=False, default_factory=Admissions)
    _registry: CollectorRegistry = field(init=False)
    _rendered: dict[tuple[str, bool], tuple[Snapshot, float, float, Answer]] = field(init=False, default_factory=dict)
    """Of each page its snapshot, when it was made, for how many seconds it is reused at least, and the answer."""

    def __post_init__(self) -> None:
        """Make the registry once."""
        self._registry = registry(self._shown)

    def answer(self, request: Request) -> Answer:
        """The answer to a request: 404 for a path that there is not, 405 for a method that changes something."""
        if request.path == PATH and self.profiles is not None:
            return self.profiles.answer(request)
        if request.method not in ("GET", "HEAD"):
            return problem(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are supported", ("Allow", "GET, HEAD"))
        if request.path == "/metrics":
            return self._metrics(request)
        if request.path == "/api/v1/diagnosis":
            diagnosis = as_of_now(self.newest())
            if diagnosis is None:
                return problem(HTTPStatus.SERVICE_UNAVAILABLE, "no diagnosis yet; retry in a few seconds")
            return self._once((request.path, False), lambda: json_answer(diagnosis_document.document(diagnosis)))
        documents = {"snapshot": self._snapshot, "history": self._history_samples, "ledger": self._ledger}
        if (made := documents.get(request.path.removeprefix("/api/v1/"))) is not None:
            return self._once((request.path, False), made)
        if request.path == "/api/v1/admission":
            try:
                return json_answer(self._admissions.answer(request.query, self.newest(), self.now_seconds()), NOT_KEPT)
            except ValueError as error:
                return problem(HTTPStatus.BAD_REQUEST, str(error))
        if request.path == "/-/healthy":
            return Answer(body=b"kvdiag is healthy.\n")
        if request.path == "/-/ready":
            if self.has_figures:
                return Answer(body=b"kvdiag is ready.\n")
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "nothing has been read yet")
        if request.path == "/runbooks" or request.path.startswith("/runbooks/"):
            runbook = runbooks().get(request.path[len("/runbooks/") :].removesuffix(".md") or "README")
            if runbook is not None:
                return Answer(body=runbook.read_bytes())
        if request.path == "/":
            return self._once((request.path, False), self._status_page, STATUS_SECONDS)
        return problem(HTTPStatus.NOT_FOUND, "no such page; / lists all pages")

    def _shown(self) -> Snapshot:
        return replace(self.newest(), refused_total=self.refused_total, push_failures_total=self.push_failures_total)

    @property
    def has_figures(self) -> bool:
        """Whether anything has been read yet."""
        return bool(self.newest().newest.at_seconds)

    async def families(self) -> list[Metric]:
        """The families of /metrics as of now."""
        return list(self._registry.collect())

    def _status_page(self) -> Answer:
        from kvdiag.outputs.html import status_page  # noqa: PLC0415 - a daemon that is only scraped needs no HTML

        body = status_page.page(self.newest(), self.history(), self.now_seconds()).encode()
        return Answer(body=body, content_type="text/html; charset=utf-8", headers=STATUS_HEADERS)

    def _ledger(self) -> Answer:
        now = self.newest()
        return json_answer(
            diagnosis_document.audit_document(now.facts, now.newest, ledger(now.newest, now.facts), now.newest.gaps)
        )

    def _history_samples(self) -> Answer:
        return json_answer([to_plain(one) for one in history_samples(self.history(), self.now_seconds())])

    def _snapshot(self) -> Answer:
        """All that `kvdiag top` shows: the facts once, without the model's config.json and the lengths of requests."""
        now = self._shown()
        diagnosis = None if now.diagnosis is None else replace(now.diagnosis, facts=Facts())
        reading = DaemonReading(
            version=kvdiag.__version__,
            snapshot=replace(now, facts=replace(now.facts, model_config=None), diagnosis=diagnosis, lengths=None),
            lines=ledger(now.newest, now.facts),
        )
        return json_answer(to_plain(reading))

    def _metrics(self, request: Request) -> Answer:
        # Never the client's own header: prometheus_client raises on what it does not know, or echoes it.
        encoder, content_type = choose_encoder(
            f"{OPENMETRICS}; version={OPENMETRICS_VERSION}" if request.openmetrics else ""
        )
        if request.names:
            return _page(encoder(registry(self._shown, request.names)), content_type, packed=False)
        return self._once(
            (content_type, request.packed),
            lambda: _page(encoder(self._registry), content_type, packed=request.packed),
        )

    def _once(self, key: tuple[str, bool], made: Callable[[], Answer], seconds: float = 0.0) -> Answer:
        """An answer that is made once for each snapshot, or once in so many seconds, however many ask."""
        now, now_seconds = self.newest(), self.now_seconds()
        if (kept := self._rendered.get(key)) is not None:
            of, at_seconds, kept_seconds, answer = kept
            if (of is now and not seconds) or 0.0 <= now_seconds - at_seconds < kept_seconds:
                return answer
        answer = made()
        kept_seconds = max(seconds, KEPT_RATIO * (self.now_seconds() - now_seconds))
        self._rendered[key] = now, now_seconds, kept_seconds, answer
        return answer


def _page(text: bytes, content_type: str, *, packed: bool) -> Answer:
    if not packed:
        return Answer(body=text, content_type=content_type)
    body = gzip.compress(text, compresslevel=1)
    return Answer(body=body, content_type=content_type, headers=(("Content-Encoding", "gzip"),))
