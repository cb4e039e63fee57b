"""Keeps a fleet's verdicts up to date from a Prometheus, in rounds: a round costs what is new, not what there is.

A round, in this order: the survey lists the replicas of the window, as it does for `kvdiag diagnose`; of each replica
only what is new is read and added to its file; then replicas are judged again, as many as the round's processor time
allows: those never judged, those whose memory has changed most since their verdict, those whose verdict is the oldest.
Judging takes 30 times as long as reading, which is why not all of a large fleet are judged in every round; each verdict
says as of when it is, and is the one that `kvdiag diagnose --prometheus` gives for that moment.

A replica is read over the whole window where it is new, has a series that was not known, or has no file; otherwise from
its newest sample on, however late that is, and now and then again from further back. An interval that could not be read
makes its replicas unknown and is read again, at most hourly after the first times. If the survey fails, or lists
nothing, nothing is known of the present: verdicts stay, and none of them is ok.

A replica has ended when an hour that was read has no sample of it. What could not be read may have some, and one that
never had a sample may yet get one: these have ended only if the Prometheus no longer lists their series in the last
hour.
"""

import asyncio
import contextlib
import gc
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from operator import attrgetter, itemgetter
from time import monotonic, thread_time

from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.clock_check import MAX_CLOCK_SECONDS, wrong_clock
from kvdiag.feeds.fleet.first_verdicts import FirstVerdicts
from kvdiag.feeds.fleet.fleet_round import FleetRound, ReplicaVerdict, kept_verdict, restored_verdict
from kvdiag.feeds.fleet.kept_replica import ENDED_SECONDS, KeptReplica, figures_of
from kvdiag.feeds.fleet.replica_judging import judge_replica
from kvdiag.feeds.fleet.replica_samples import ReplicaSamples, read_until
from kvdiag.feeds.fleet.state_folder import StateFolder
from kvdiag.feeds.fleet.workers import Executor, executor
from kvdiag.feeds.history.prometheus_feed import Survey, Window, read_samples, survey
from kvdiag.feeds.history.replica_timeline import timeline_of
from kvdiag.feeds.history.series_join import Replica
from kvdiag.model import Gap, Timeline
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_answers import SOURCE
from kvdiag.sources.prometheus_api import PrometheusSource

TOGETHER = 200
"""Replicas that one query for new samples names."""

FEW = 64
"""Queries for those that could not be read, into which they are divided."""

ROUND_CPU_SECONDS = 4.0
"""Processor time of a round, after which no further replica is judged that has a verdict."""

CHANGED_RATIO = 0.01
"""Change of a replica's memory since its verdict from which it is judged before others."""

OLDEST_SHARE = 0.25
"""Of the time for judging, kept for the oldest verdicts."""

RETRY_SECONDS = 3600.0
"""Longest time until an interval that could not be read is tried again."""

FOR_WORKERS = 8
"""Replicas that each worker process must have to judge: it takes a second to start."""

NO_REPLICA = (
    "no metrics of an engine, DCGM, nvidia_gpu_exporter or kvdiag that match in this time: check --match, --window and "
    "what is scraped"
)


class FleetFeed:
    """A fleet's verdicts, brought up to date by `round`."""

    def __init__(
        self,
        source: Callable[[], AbstractAsyncContextManager[PrometheusSource]],
        match: str,
        window_seconds: float,
        folder: StateFolder,
        *,
        every_seconds: float = 300.0,
        limits: Limits = DEFAULT_LIMITS,
        cpu_seconds: float = ROUND_CPU_SECONDS,
        workers: int | None = 1,
        ray: str | None = None,
        publish: Callable[[FleetRound], None] = lambda _: None,
    ) -> None:
        """Begin with the verdicts that the folder has; `publish` gets each new state.

        Replicas without a verdict are judged by `workers` processes, `None` for one a core, or by a Ray cluster;
        others by this one.
        """
        self._source, self._match, self._window_seconds = source, match, window_seconds
        self._folder, self._every_seconds = folder, every_seconds
        self._limits, self._cpu_seconds = limits, cpu_seconds
        self._began_seconds = monotonic()
        self._workers, self._ray = workers, ray
        self._first: FirstVerdicts | None = None
        self._task: asyncio.Task[object] | None = None
        self._kept: dict[str, KeptReplica] = {}
        for key, about, samples in folder.kept():
            if (verdict := restored_verdict(key, about)) is not None:
                one = KeptReplica(replica=Replica(key=key, subject=verdict.subject, series=()), verdict=verdict)
                one.restore(samples, replace(one.replica, series=tuple(samples.known())))
                self._kept[key] = one
        self.state = FleetRound(verdicts=self._verdicts(), replicas=len(self._kept))
        """The newest state: another object after each round, and now and then within the first."""
        self.ray_problem: str | None = None
        """Why the Ray cluster could not be used in the last round."""
        self._show = publish
        publish(self.state)

    async def round(self, now_seconds: float, *, is_now: bool = False) -> FleetRound:
        """Read what is new until `now_seconds`, judge, and return the state.

        `is_now` says that this is the present by this machine's clock, with which that of Prometheus has to agree.

        Raises:
            KvdiagError: a certificate cannot be used.
            CancelledError: `stop` was called.
        """
        began, self._began_seconds = thread_time(), monotonic()
        self._task = asyncio.current_task()
        window = Window(start_seconds=now_seconds - self._window_seconds, end_seconds=now_seconds)
        # As for one diagnosis: samples have no cycles, and there are many of them.
        gc.disable()
        try:
            async with self._source() as source:
                try:
                    if is_now and (problem := await wrong_clock(source, now_seconds)) is not None:
                        return self._publish(began, window, problem=problem)
                    found = await survey(source, self._match, window)
                except Unreadable as error:
                    return self._publish(began, window, problem=str(error))
                if not found.replicas:
                    return self._publish(began, window, gaps=found.gaps, problem=NO_REPLICA)
                self._forget_after(now_seconds)
                self._take(found)
                new = [one for one in self._kept.values() if one.is_new]
                # One task would be done in this process.
                least = 2 if any(one.verdict is not None for one in new) else 0
                with self._pool(max(len(new) // FOR_WORKERS, least)) as pool:
                    self._first = first = FirstVerdicts(pool, self._folder, window, self._limits)
                    samples = await self._read(source, window, first)
                    await self._find_ended(source, window)
                    judged = self._judge(first, began, window)
        finally:
            self._first = self._task = None
            gc.enable()
        gaps = (*found.gaps, *self._silence())
        return self._publish(began, window, gaps=gaps, judged=judged, samples=samples)

    def stop(self) -> None:
        """End the round in progress, from any thread; what it has read is kept."""
        if (task := self._task) is not None:
            # It may have just ended.
            with contextlib.suppress(RuntimeError):
                task.get_loop().call_soon_threadsafe(task.cancel)
        if (first := self._first) is not None:
            first.stop()

    def fail(self, now_seconds: float, problem: str) -> None:
        """Publish that a round failed, so that no verdict before it is taken for one of the present."""
        window = Window(start_seconds=now_seconds - self._window_seconds, end_seconds=now_seconds)
        self._publish(thread_time(), window, problem=problem)

    def _pool(self, tasks: int) -> Executor:
        """What judges the new replicas; processes of this machine while the Ray cluster cannot be used."""
        self.ray_problem = None
        try:
            return executor(self._workers, max(tasks, 1), self._ray if tasks else None)
        except KvdiagError as error:
            self.ray_problem = str(error)
            return executor(self._workers, max(tasks, 1))

    def timeline(self, key: str) -> tuple[Timeline, ReplicaVerdict] | None:
        """A replica's history as of its verdict, from its file; `None` if there is none."""
        one = self._kept.get(key)
        samples = self._folder.load(key)
        if one is None or one.verdict is None or samples is None:
            return None
        verdict = one.verdict
        samples.drop_before(verdict.as_of_seconds - self._window_seconds)
        samples.drop_after(verdict.as_of_seconds)
        listed = one.replica.series or tuple(samples.known())
        whole, history = samples.history(replace(one.replica, series=listed), verdict.as_of_seconds)
        return timeline_of(whole, history, verdict.as_of_seconds)[0], verdict

    def _forget_after(self, now_seconds: float) -> None:
        """Begin again with replicas read or judged for a later moment: a clock was ahead then, or is set back now."""
        until_seconds = now_seconds + MAX_CLOCK_SECONDS
        for key, one in list(self._kept.items()):
            if max(one.until_seconds, one.as_of_seconds) > until_seconds:
                self._forget(key)

    def _forget(self, key: str) -> None:
        del self._kept[key]
        self._folder.remove(key)

    def _take(self, found: Survey) -> None:
        """Take over what the survey listed; what it no longer lists is forgotten if the list is complete."""
        listed = {one.key: one for one in found.replicas}
        missing = next((gap.reason for gap in found.gaps if gap.source == SOURCE), None)
        for key, replica in listed.items():
            if key in self._kept:
                self._kept[key].replica = replica
            else:
                self._kept[key] = KeptReplica(replica=replica)
        for key in self._kept.keys() - listed.keys():
            if missing is None:
                self._forget(key)
            elif not (one := self._kept[key]).replica.series:
                one.unread = f"not listed, and {missing}"

    async def _read(self, source: PrometheusSource, window: Window, first: FirstVerdicts) -> int:
        """Read what is new of every replica, those that begin at the same moment together; the new are judged."""
        starts: dict[tuple[bool, float], list[KeptReplica]] = defaultdict(list)
        for one in self._kept.values():
            if one.replica.series:
                start_seconds = self._start(one, window)
                starts[one.unread is None, start_seconds].append(one)
        count = 0
        # What is new first: a replica that is read whole takes as long as hundreds of others. What could not be read
        # comes last, and few at a time: a query that has no answer again costs few replicas theirs, and then none.
        for (could_be, start_seconds), some in sorted(starts.items(), key=itemgetter(0), reverse=True):
            by_key = {one.replica.key: one for one in some}
            part = Window(start_seconds=start_seconds, end_seconds=window.end_seconds)
            whole_window = start_seconds == window.start_seconds
            at_once = TOGETHER if could_be else math.ceil(len(some) / FEW)
            reading = read_samples(source, [one.replica for one in some], part, at_once=at_once)
            async for replica, whole, history in reading:
                one = by_key[replica.key]
                samples = read_until(replica, whole, history, window.end_seconds)
                count += sum(len(points) for points in samples.series.values())
                self._add(one, samples, part, whole_window=whole_window)
                if one.is_new:
                    first.begin(one.replica)
        return count

    def _start(self, one: KeptReplica, window: Window) -> float:
        """Where a replica's read begins; the whole window if something of it was never read."""
        if one.known is None and (samples := self._folder.load(one.replica.key)) is not None:
            one.known = samples.known()
            one.restore(samples, one.replica)
        if one.known is None or not one.known.issuperset(one.replica.series):
            return window.start_seconds
        return max(one.start_seconds(window.end_seconds), window.start_seconds)

    def _add(self, one: KeptReplica, samples: ReplicaSamples, window: Window, *, whole_window: bool) -> None:
        try:
            self._keep(one, samples, window, whole_window=whole_window)
        except OSError as error:
            # The next round continues from what the file has.
            one.known = None
            one.unread = f"cannot keep its samples in --record-dir: {error.strerror or error}"

    def _keep(self, one: KeptReplica, samples: ReplicaSamples, window: Window, *, whole_window: bool) -> None:
        """Add what was read to the replica's file.

        Raises:
            OSError: it cannot be written.
        """
        key = one.replica.key
        failed = [lost for lost in samples.lost if lost.start_seconds >= window.start_seconds]
        if failed:
            one.unread = failed[0].reason
            one.hole_seconds = min([lost.start_seconds for lost in failed] + [one.hole_seconds or math.inf])
            one.lost_seconds = max(lost.end_seconds for lost in failed)
            one.wait_seconds = min(max(2.0 * one.wait_seconds, self._every_seconds), RETRY_SECONDS)
            one.retry_seconds = window.end_seconds + one.wait_seconds - 1.0
        elif one.hole_seconds is None or whole_window or window.start_seconds <= one.hole_seconds:
            one.hole_seconds, one.lost_seconds, one.wait_seconds, one.unread = None, 0.0, 0.0, None
        if whole_window and failed and one.known is not None:
            # What was read before is more than what is left of it now.
            whole_window = False
        if whole_window or one.known is None:
            about = {} if one.verdict is None or one.is_new else kept_verdict(one.verdict)
            self._folder.replace(key, samples, window.start_seconds, about)
            one.known = {*one.replica.series, *samples.known()}
            one.newest_seconds, one.newest = samples.newest_seconds(one.replica), samples.newest()
        else:
            self._folder.extend(key, samples, window.start_seconds)
            if not one.known.issuperset(samples.known()):
                one.read_whole()
            # What another replica has for a while, a GPU that changed hands, is unknown when it returns.
            one.known = one.known.intersection(one.replica.series) | samples.known()
            one.newest_seconds = max(one.newest_seconds, samples.newest_seconds(one.replica))
            one.newest |= samples.newest()
        one.until_seconds = samples.until_seconds
        one.wait_for_samples()
        one.figures |= figures_of(samples)

    async def _find_ended(self, source: PrometheusSource, window: Window) -> None:
        """Ask whether those that could not be read for an hour, or never had a sample, are still listed.

        Without an answer they are.
        """
        recent = replace(window, start_seconds=window.end_seconds - ENDED_SECONDS)
        silent = [
            one
            for one in self._kept.values()
            if one.newest_seconds < recent.start_seconds and one.silent_seconds <= ENDED_SECONDS
        ]
        if not silent:
            return
        try:
            found = await survey(source, self._match, recent)
        except Unreadable:
            return
        listed = {series_id for replica in found.replicas for series_id in replica.own}
        sources = {gap.source for gap in found.gaps}
        for one in silent:
            if SOURCE not in sources and listed.isdisjoint(one.replica.own):
                one.lost_seconds = 0.0

    def _silence(self) -> tuple[Gap, ...]:
        """That all replicas have ended, which is also what samples that arrive hours late look like."""
        if any(one.silent_seconds <= ENDED_SECONDS for one in self._kept.values()):
            return ()
        reason = "no replica has a sample of the last hour: are all servers stopped, or do samples arrive late?"
        return (Gap(SOURCE, "failed", reason),)

    def _judge(self, first: FirstVerdicts, began: float, window: Window) -> int:
        """Judge as many replicas as there is time for, and return their number."""
        listed = [one for one in self._kept.values() if one.replica.series]
        rest = sorted((one for one in listed if not one.is_new), key=attrgetter("as_of_seconds"))
        changed = sorted(
            (one for one in rest if one.change >= CHANGED_RATIO), key=lambda one: (-one.change, one.as_of_seconds)
        )
        count = self._judge_new(first, began, window)
        spent = thread_time() - began
        for_changed = spent + (self._cpu_seconds - spent) * (1.0 - OLDEST_SHARE)
        # The oldest is judged in any case, so that none waits forever.
        for some, until, least in ((changed, for_changed, 0), (rest, self._cpu_seconds, 1)):
            left = [one for one in some if one.as_of_seconds < window.end_seconds]
            for number, one in enumerate(left):
                if thread_time() - began > until and number >= least:
                    break
                self._take_verdict(one, judge_replica(self._folder, one.replica, window, self._limits))
                count += 1
        return count

    def _judge_new(self, first: FirstVerdicts, began: float, window: Window) -> int:
        """Wait for the replicas that had no verdict, most of which other processes have judged meanwhile."""
        count = 0
        for count, verdict in enumerate(first.wait(), start=1):
            self._take_verdict(self._kept[verdict.key], verdict)
            if count % TOGETHER == 0:
                self._publish(began, window, over=False)
        return count

    def _take_verdict(self, one: KeptReplica, verdict: ReplicaVerdict) -> None:
        one.verdict = verdict
        one.judged_figures = dict(one.figures)

    def _verdicts(self, problem: str | None = None) -> tuple[ReplicaVerdict, ...]:
        return tuple(
            replace(
                one.verdict,
                unread=problem or one.unread,
                newest_seconds=one.newest_seconds,
                silent_seconds=one.silent_seconds,
            )
            for one in self._kept.values()
            if one.verdict is not None
        )

    def _publish(
        self,
        began: float,
        window: Window,
        *,
        gaps: tuple[Gap, ...] = (),
        judged: int = 0,
        samples: int = 0,
        problem: str | None = None,
        over: bool = True,
    ) -> FleetRound:
        self.state = FleetRound(
            verdicts=self._verdicts(problem),
            gaps=gaps,
            replicas=len(self._kept),
            judged=judged,
            samples=samples,
            end_seconds=window.end_seconds if over else self.state.end_seconds,
            took_seconds=monotonic() - self._began_seconds,
            cpu_seconds=thread_time() - began,
            failed_total=self.state.failed_total + (problem is not None),
            problem=problem,
        )
        self._show(self.state)
        return self.state
