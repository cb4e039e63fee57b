"""`kvdiag serve --prometheus`: the daemon of a fleet, with nothing deployed next to the servers.

In this order: the options are checked and the state's folder is opened, so that a wrong one ends the start at once; the
port is opened, with the verdicts that the folder has; then a round every few minutes, in a thread of its own, so that
no round delays an answer. A Prometheus that does not answer costs its round, never the daemon: the page and the metrics
say so, and no replica is ok then.
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import structlog

from kvdiag.commands.daemons.web_daemon import WebDaemon
from kvdiag.commands.options.fleet_options import PrometheusFields
from kvdiag.commands.options.prometheus_options import PrometheusOptions
from kvdiag.commands.options.serve_options import ServeOptions
from kvdiag.diagnosis.fleet import compare
from kvdiag.diagnosis.fleet.replica import Version
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.fleet_feed import FleetFeed
from kvdiag.feeds.fleet.fleet_round import FleetRound, ReplicaVerdict
from kvdiag.feeds.fleet.kept_replica import ENDED_SECONDS
from kvdiag.feeds.fleet.state_folder import StateFolder
from kvdiag.feeds.history.columns import JOIN_SECONDS
from kvdiag.model import Timeline
from kvdiag.outputs.fleet_results import Judged, Source
from kvdiag.outputs.fleet_status import FleetReplica, FleetStatus, worst_first
from kvdiag.server.fleet_pages import FleetPages

_log = structlog.get_logger()

EVERY_SECONDS = 300.0
"""Between the starts of two rounds, unless --every says otherwise."""

MIN_PAUSE_SECONDS = 5.0
"""Between two rounds that take longer than their interval."""

STOP_SECONDS = 10.0
"""For the round in progress to end with the daemon."""


class FleetDaemon(WebDaemon):
    """One feed of a fleet and its HTTP server."""

    def __init__(self, options: ServeOptions, reread: Callable[[], ServeOptions]) -> None:
        """Open the folder, without asking Prometheus yet. `reread` returns the options as of now.

        Raises:
            KvdiagError: an option, a directory, a file or a certificate cannot be used.
        """
        super().__init__(options, reread)
        given = {one.name: getattr(options.history, one.name) for one in fields(PrometheusFields)}
        known = PrometheusOptions(**given, ca_file=options.access.ca_file, insecure=options.access.insecure)
        access, match, span = known.access(), known.matchers(), known.span(time.time())
        self._source = Source(
            url=access.url.rstrip("/"),
            match=match,
            start_seconds=span.start_seconds,
            end_seconds=span.end_seconds,
            join_seconds=JOIN_SECONDS,
        )
        # Without --record-dir the state is as large, and goes with the daemon.
        self._own = None if options.record_dir is not None else _own_folder()
        self._in_round = threading.Lock()
        self._folder = StateFolder(
            options.record_dir or Path(self._own.name if self._own else ""),
            {"url": self._source.url, "match": match, "window": known.window},
            discarded=self._discarded,
        )
        if (others := self._folder.others) is not None:
            reason = f"keeps {_about(others)}, discarded once {self._source.url} has answered"
            _log.warning("record-dir", path=str(options.record_dir), reason=reason)
        self._window_seconds = span.end_seconds - span.start_seconds
        self._every_seconds = options.tick_seconds or options.every or EVERY_SECONDS
        self._status: FleetStatus
        self._feed = FleetFeed(
            # A file with a token is read again for each round: Kubernetes renews it every hour.
            lambda: known.access().source(),
            match,
            self._window_seconds,
            self._folder,
            every_seconds=self._every_seconds,
            limits=options.limits,
            workers=known.workers,
            ray=known.ray,
            publish=self._publish,
        )
        self._serve(FleetPages(newest=lambda: self._status, history=self._history))

    def _publish(self, state: FleetRound) -> None:
        # By the round's own thread: comparing a thousand replicas takes longer than an answer may.
        status = status_of(state, self._source, self._window_seconds, self._options.limits)
        self._status = replace(status, every_seconds=self._every_seconds)

    def _discarded(self, replicas: int) -> None:
        reason = f"of {_about(self._folder.others or {})}; this daemon watches another fleet, or over another window"
        _log.warning("record-dir", path=str(self._options.record_dir), discarded=replicas, reason=reason)

    def _history(self, key: str) -> Timeline | None:
        found = self._feed.timeline(key)
        return None if found is None else found[0]

    async def _work(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.to_thread(self._round)
            pause_seconds = min(MIN_PAUSE_SECONDS, self._every_seconds)
            await asyncio.sleep(max(self._every_seconds - (time.monotonic() - began), pause_seconds))

    def _round(self) -> None:
        with self._in_round, suppress(asyncio.CancelledError):
            self._run_round()

    def _run_round(self) -> None:
        began, now_seconds = time.monotonic(), round(time.time(), 3)
        try:
            state = asyncio.run(self._feed.round(now_seconds, is_now=True))
        except KvdiagError as error:
            _log.error("round", reason=str(error))
            self._feed.fail(now_seconds, str(error))
            return
        except Exception as error:  # noqa: BLE001  an unforeseen error must not end the daemon
            reason = f"internal error in kvdiag ({type(error).__name__}: {error}); please report it"
            _log.error("round", reason=reason)
            _log.debug("mistake", exc_info=True)
            self._feed.fail(now_seconds, reason)
            return
        if (problem := self._feed.ray_problem) is not None:
            _log.warning("ray", reason=problem, judged_by="processes of this machine")
        took_seconds = time.monotonic() - began
        counts = {"replicas": state.replicas, "judged": state.judged, "samples": state.samples}
        _log.info("round", reason=state.problem, seconds=round(took_seconds, 1), **counts)

    async def _release(self) -> None:
        # What it writes to must stay until it has ended.
        await asyncio.to_thread(self._feed.stop)
        await asyncio.to_thread(self._in_round.acquire, timeout=STOP_SECONDS)
        self._folder.close()
        if self._own is not None:
            self._own.cleanup()

    def _change(self) -> None:
        try:
            self._reread()
            self._take_web_config()
        except KvdiagError as error:
            _log.error("configuration", reason=f"{error}; the previous configuration stays in effect")
            return
        _log.info("configuration", state="reloaded; other options than --web-config need a restart")


def _about(kept: Mapping[str, object]) -> str:
    """What a folder keeps, in words."""
    url, match, window = (kept.get(name) for name in ("url", "match", "window"))
    return f"{window} of {url} {{{match}}}" if url else "the state of an unknown fleet"


def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the state that ends with the daemon.

    Raises:
        KvdiagError: nothing can be written anywhere, as in a container with a read-only root.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="kvdiag-fleet-", ignore_cleanup_errors=True)
    except OSError as error:
        raise KvdiagError(f"cannot make a temporary folder ({error.strerror}): give a --record-dir") from error


def status_of(state: FleetRound, source: Source, window_seconds: float, limits: Limits) -> FleetStatus:
    """A feed's state as the outputs show it: replicas that ended an hour ago count for their versions alone."""
    newest = max((one.newest_seconds for one in state.verdicts), default=0.0)
    end_seconds = state.end_seconds or newest
    replicas = [_shown(one) for one in state.verdicts if one.silent_seconds <= ENDED_SECONDS]
    return FleetStatus(
        source=Source(
            url=source.url,
            match=source.match,
            start_seconds=max(end_seconds - window_seconds, 0.0),
            end_seconds=end_seconds,
            join_seconds=source.join_seconds,
        ),
        replicas=worst_first(replicas),
        fleet=compare([one.summary for one in state.verdicts if one.summary is not None], limits) if replicas else None,
        gaps=state.gaps,
        listed=state.replicas - len(state.verdicts) + len(replicas),
        judged=state.judged,
        samples=state.samples,
        round_seconds=state.end_seconds or None,
        took_seconds=state.took_seconds,
        cpu_seconds=state.cpu_seconds,
        rounds_failed_total=state.failed_total,
        problem=state.problem,
    )


def _shown(one: ReplicaVerdict) -> FleetReplica:
    facts = one.diagnosis.facts
    known = Version(engine=facts.engine_name, version=facts.engine_version, model=facts.model)
    return FleetReplica(
        judged=Judged(key=one.key, subject=one.subject, diagnosis=one.present),
        as_of_seconds=one.as_of_seconds,
        version=known if one.summary is None else one.summary.version,
        node=one.node,
        unread=one.unread,
    )
