"""Judges replicas that have no verdict yet while others are still read: in worker processes, or on a Ray cluster.

What a killed worker left is judged by new workers, once, as in `kvdiag diagnose`. What kills them again is unknown
until workers have judged it in a later round, and never judged in this process, which would be killed next. What fails
otherwise, as on a machine with a full disk, is judged here. Once `stop` was called nothing is judged any more.
"""

from asyncio import CancelledError
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import BrokenExecutor, Future

from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.fleet_round import ReplicaVerdict
from kvdiag.feeds.fleet.replica_judging import judge_content, judge_replica, not_judged
from kvdiag.feeds.fleet.state_folder import StateFolder
from kvdiag.feeds.fleet.workers import Executor
from kvdiag.feeds.history.prometheus_feed import Window
from kvdiag.feeds.history.series_join import Replica


class FirstVerdicts:
    """The replicas that a pool judges in one round."""

    def __init__(self, pool: Executor, folder: StateFolder, window: Window, limits: Limits) -> None:
        """None yet."""
        self._pool, self._folder, self._window, self._limits = pool, folder, window, limits
        self._judging: list[tuple[Replica, Future[ReplicaVerdict]]] = []
        self._restarted = False
        self._submitted: Counter[str] = Counter()
        self._stopped = False

    def stop(self) -> None:
        """End all work, from any thread: `begin` and `wait` raise CancelledError."""
        self._stopped = True
        self._pool.kill()

    def begin(self, replica: Replica) -> None:
        """Judge a replica by its file, or queue it."""
        self._check()
        try:
            try:
                future = self._submit(replica)
            except BrokenExecutor:
                if self._restarted:
                    raise
                self._restarted = True
                self._pool.restart()
                future = self._submit(replica)
        except (BrokenExecutor, KvdiagError) as error:
            future = Future()
            future.set_exception(BrokenExecutor(str(error)))
        self._judging.append((replica, future))

    def wait(self) -> Iterator[ReplicaVerdict]:
        """The verdict of each."""
        left = yield from self._finished()
        self._restarted = False
        for replica in left:
            self.begin(replica)
        for replica in (yield from self._finished()):
            yield self._unknown(replica)

    def _finished(self) -> Generator[ReplicaVerdict, None, list[Replica]]:
        """The verdicts of those that were begun; returns those whose workers were killed."""
        left = []
        begun, self._judging = self._judging, []
        for replica, future in begun:
            self._check()
            try:
                verdict = future.result()
            except BrokenExecutor:
                left.append(replica)
                continue
            except Exception:  # noqa: BLE001 - another machine's disk, memory or packages may be the cause
                verdict = judge_replica(self._folder, replica, self._window, self._limits)
            yield verdict
        return left

    def _check(self) -> None:
        if self._stopped:
            raise CancelledError

    def _submit(self, replica: Replica) -> Future[ReplicaVerdict]:
        about = replica, self._window, self._limits
        if self._pool.has_files:
            future = self._pool.submit(judge_replica, self._folder.shared, *about)
        else:
            content = self._folder.content(replica.key)
            future = self._taken(replica, self._pool.submit(judge_content, content, *about))
        self._submitted[replica.key] += 1
        return future

    def _taken(self, replica: Replica, judging: Future[tuple[ReplicaVerdict, bytes]]) -> Future[ReplicaVerdict]:
        """The verdict of another machine, once the file that it made is here."""
        taken: Future[ReplicaVerdict] = Future()

        def take(done: Future[tuple[ReplicaVerdict, bytes]]) -> None:
            try:
                verdict, content = done.result()
                self._folder.take(replica.key, content)
                taken.set_result(verdict)
            except Exception as error:  # noqa: BLE001 - raised where the verdict is asked for
                taken.set_exception(error)

        judging.add_done_callback(take)
        return taken

    def _unknown(self, replica: Replica) -> ReplicaVerdict:
        reason = self._pool.lost if self._submitted[replica.key] > 1 else "workers were lost while others were judged"
        return not_judged(replica, self._window, self._limits, reason)
