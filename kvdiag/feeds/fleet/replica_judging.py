"""Judges one replica by its file, here, in a worker process or on another machine: the same file, the same verdict."""

import contextlib
import gc
import tempfile
from itertools import count
from pathlib import Path

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.fleet import ReplicaSummary, summarise
from kvdiag.diagnosis.limits import Limits
from kvdiag.feeds.fleet.fleet_round import ReplicaVerdict, kept_verdict
from kvdiag.feeds.fleet.replica_samples import ReplicaSamples
from kvdiag.feeds.fleet.state_folder import ReplicaFiles
from kvdiag.feeds.history.prometheus_feed import Window
from kvdiag.feeds.history.replica_timeline import timeline_of
from kvdiag.feeds.history.series_join import Replica, image_of
from kvdiag.model import Facts, Gap, Timeline
from kvdiag.sources.prometheus_answers import SOURCE

COLLECTED_TOGETHER = 64
"""Replicas that are judged between two garbage collections. They leave nothing that only these free, as a rule."""

_judged = count(1)


def judge_replica(files: ReplicaFiles, replica: Replica, window: Window, limits: Limits) -> ReplicaVerdict:
    """A replica's verdict by the samples of its file within the window; the file then has these and the verdict.

    One that cannot be kept, as on a full disk, holds all the same. An internal error makes its replica unknown.
    """
    # Samples have no cycles, and there are many of them. Older objects are not looked at.
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _judge(files, replica, window, limits)
    except Exception as error:  # noqa: BLE001 - an unforeseen error must not cost the other replicas their verdicts
        reason = f"internal error in kvdiag ({type(error).__name__}: {error}); please report it"
        return not_judged(replica, window, limits, reason)
    finally:
        if next(_judged) % COLLECTED_TOGETHER == 0:
            gc.collect(1)
        if enabled:
            gc.enable()


def judge_content(content: bytes, replica: Replica, window: Window, limits: Limits) -> tuple[ReplicaVerdict, bytes]:
    """The verdict and the new content of a replica's file, where the file itself is on another machine.

    Raises:
        OSError: this machine has no room for a file.
    """
    with tempfile.TemporaryDirectory(prefix="kvdiag-replica-") as folder:
        files = ReplicaFiles(Path(folder))
        files.take(replica.key, content)
        verdict = judge_replica(files, replica, window, limits)
        return verdict, files.content(replica.key)


def _judge(files: ReplicaFiles, replica: Replica, window: Window, limits: Limits) -> ReplicaVerdict:
    samples = files.load(replica.key) or ReplicaSamples(until_seconds=window.start_seconds)
    samples.drop_before(window.start_seconds)
    whole, history = samples.history(replica, window.end_seconds)
    samples.keep_only(whole.series)
    timeline, facts = timeline_of(whole, history, window.end_seconds)
    verdict = ReplicaVerdict(
        key=replica.key,
        subject=replica.subject,
        diagnosis=diagnose(timeline, facts, limits),
        summary=_summary(replica, timeline, facts, limits),
        as_of_seconds=window.end_seconds,
        newest_seconds=samples.newest_seconds(replica),
        node=node_of(replica),
    )
    with contextlib.suppress(OSError):
        files.judged(replica.key, samples, window.start_seconds, kept_verdict(verdict))
    timeline.forget()
    return verdict


def not_judged(replica: Replica, window: Window, limits: Limits, reason: str) -> ReplicaVerdict:
    """An unknown verdict with this reason."""
    facts = Facts(gaps=(*replica.gaps, Gap(SOURCE, "failed", f"not judged: {reason}")))
    return ReplicaVerdict(
        key=replica.key,
        subject=replica.subject,
        diagnosis=diagnose(Timeline(samples=()), facts, limits),
        summary=None,
        as_of_seconds=window.end_seconds,
        newest_seconds=0.0,
        node=node_of(replica),
        is_judged=False,
    )


def _summary(replica: Replica, timeline: Timeline, facts: Facts, limits: Limits) -> ReplicaSummary | None:
    if facts.engine_name is None:
        # A GPU that no server is known of is no replica of any version.
        return None
    version = facts.engine_version or image_of(replica)
    return summarise(timeline, facts, limits, replica=replica.key, version=version)


def node_of(replica: Replica) -> str | None:
    """The host that a replica runs on, as Kubernetes or its GPUs' exporter names it."""
    for name in ("node", "kubernetes_node", "nodename", "Hostname", "hostname"):
        named = [labels[name] for labels in replica.labels if labels.get(name)]
        if named:
            return max(named, key=named.count)
    return None
