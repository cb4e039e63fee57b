"""An isolation probe as kvdiag observes it, from what a server's prefix cache keeps apart. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from kvdiag.feeds.active.isolation_probe import plan_isolation
from kvdiag.model import Engine, Facts, Mark, Outcome, Phase, ProbeKind, Sample, Timeline, Workload
from tests.builders.values import START_SECONDS, engine, pool
from tests.builders.worlds import World, facts

REQUESTS = plan_isolation(Facts()).requests
"""The probe of a server of which nothing is known: thirty requests of 2,048 tokens."""

SALTLESS: tuple[ProbeKind, ...] = ("same_salt", "other_salt", "other_unsalted")
BY_DESIGN: tuple[ProbeKind, ...] = ("same_salt", "other_unsalted")
APART: tuple[ProbeKind, ...] = ("same_salt",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a server does with the probe, by the kinds of its requests that it answers from its cache."""

    hits: Collection[ProbeKind] = BY_DESIGN
    fast: Collection[ProbeKind] | None = None
    """Those whose first token comes soon; `None`: those that are hits."""
    half_fast: Collection[ProbeKind] = ()
    """Those of which every other one does, as where half of them come to another replica."""
    counts: bool = True
    """Whether it counts prefix queries and hits, as vLLM's V1 engine does."""
    shows: bool = True
    """Whether it has a page of metrics at all, as a gateway may not."""
    caching: bool | None = True
    other_key: bool = False
    hit_seconds: float = 0.01
    miss_seconds: float = 0.04
    other_prompts: Collection[int] = ()
    """Requests during which another client's prompt is counted, too."""
    other_running: Collection[int] = ()
    """Requests during which another client's request is running."""
    failing: Collection[int] = ()
    uncounted: Collection[int] = ()
    """Requests that the page shows too late."""
    restarts_before: int | None = None
    late_page: Collection[int] = ()
    """Requests before which a page arrives that was rendered before the request before."""


def facts_of(server: Server) -> Facts:
    """What is known of it."""
    return replace(facts(World()), pools=(replace(pool(), prefix_caching=server.caching),))


def probe(server: Server | None = None, requests: tuple[Workload, ...] | None = None) -> Timeline:
    """The timeline."""
    server = server or Server()
    return _Probe(server).whole(requests or plan_isolation(Facts(), other_key=server.other_key).requests)


class _Probe:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._samples: list[Sample] = []
        self._marks: list[Mark] = []
        self._now = 0
        self._prompts = self._queries = self._hits = 1000
        self._previous: Engine | None = None

    def whole(self, requests: tuple[Workload, ...]) -> Timeline:
        for place, workload in enumerate(requests):
            self._request(place, workload)
        return Timeline(samples=tuple(self._samples), marks=tuple(self._marks))

    def _request(self, place: int, workload: Workload) -> None:
        server, kind = self._server, workload.probe.kind if workload.probe else "first"
        if place == server.restarts_before:
            self._mark(place, "begin", workload=workload)
            self._read()
            self._prompts = self._queries = self._hits = 0
        else:
            self._mark(place, "begin", workload=workload)
            self._read()
        if place in server.late_page and self._previous is not None and server.shows:
            self._add(self._previous)
        self._mark(place, "offer")
        self._previous = self._page()
        failed = place in server.failing
        if not failed and place not in server.uncounted:
            self._count(workload.prompt_tokens, hit=kind in server.hits)
        if place in server.other_prompts:
            self._count(100, hit=True)
        self._read(running=2 if place in server.other_running else 1)
        fast = kind in (server.hits if server.fast is None else server.fast)
        fast = fast or (kind in server.half_fast and place // 5 % 2 == 1)
        # Some spread of its own, so that no two times are equal.
        seconds = (server.hit_seconds if fast else server.miss_seconds) * (1.0 + place / 1000.0)
        outcome = Outcome(
            completed=int(not failed),
            failed=int(failed),
            prompt_tokens=0 if failed else workload.prompt_tokens,
            generated_tokens=int(not failed),
            errors=("HTTP 401: who are you?",) if failed else (),
            first_token_seconds=None if failed else seconds,
        )
        self._mark(place, "release", outcome=outcome)
        self._read()
        self._mark(place, "end")
        if place in server.uncounted:
            self._count(workload.prompt_tokens, hit=kind in server.hits)

    def _count(self, tokens: int, *, hit: bool) -> None:
        self._prompts += tokens
        # With caching off vLLM looks nothing up, and its counters stand still.
        self._queries += tokens if self._server.caching is not False else 0
        self._hits += (tokens - 1) // 16 * 16 if hit else 0

    def _page(self, running: int = 0) -> Engine:
        counts = self._server.counts
        return replace(
            engine(running=running, prompt_tokens=self._prompts),
            prefix_queries_total=self._queries if counts else None,
            prefix_hits_total=self._hits if counts else None,
        )

    def _read(self, running: int = 0) -> None:
        if self._server.shows:
            self._add(self._page(running))

    def _add(self, page: Engine) -> None:
        self._samples.append(Sample(at_seconds=self._time(), engines=(page,)))

    def _mark(
        self, place: int, phase: Phase, *, workload: Workload | None = None, outcome: Outcome | None = None
    ) -> None:
        self._marks.append(
            Mark(
                at_seconds=self._time(), step="isolation", cycle=place, phase=phase, workload=workload, outcome=outcome
            )
        )

    def _time(self) -> float:
        self._now += 1
        return START_SECONDS + self._now / 100
