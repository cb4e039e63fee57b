"""The fleet's daemon reads a real Prometheus round by round; its verdicts are those of `kvdiag diagnose`."""

import asyncio
import errno
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvdiag.commands.daemons.fleet_daemon import status_of
from kvdiag.commands.diagnose import judge
from kvdiag.commands.options.prometheus_options import PrometheusAccess, PrometheusOptions
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.feeds.fleet import fleet_feed
from kvdiag.feeds.fleet.fleet_feed import FleetFeed
from kvdiag.feeds.fleet.fleet_round import FleetRound
from kvdiag.feeds.fleet.replica_samples import restored
from kvdiag.feeds.fleet.state_folder import StateFolder
from kvdiag.feeds.fleet.workers import InProcess, Processes
from kvdiag.feeds.history.prometheus_feed import Survey, Window, survey
from kvdiag.model import Diagnosis
from tests.fixtures.hostile import Answer, Hostile, Peer, refused_port, reply, reply_json
from tests.integration.prometheus.histories import END_SECONDS
from tests.unit.outputs.test_fleet import SOURCE

WINDOW_SECONDS = 3.0 * 3600.0
STEP_SECONDS = 300.0
LEAK = 'namespace="leak"'
"""Two replicas, of which the second one leaks."""


def access_to(url: str) -> PrometheusAccess:
    """How to reach a Prometheus without credentials."""
    return PrometheusOptions(prometheus=url).access()


def diagnosed(url: str, end_seconds: float, match: str = "") -> dict[str, Diagnosis]:
    """What `kvdiag diagnose --prometheus` says of every replica at a moment."""
    access = access_to(url)
    window = Window(start_seconds=end_seconds - WINDOW_SECONDS, end_seconds=end_seconds)

    async def listed() -> Survey:
        async with access.source() as source:
            return await survey(source, match, window)

    judged, _, _ = judge(access, window, DEFAULT_LIMITS, asyncio.run(listed()).replicas)
    return {one.key: one.diagnosis for one in judged}


@pytest.fixture
def two(history: str, tmp_path: Path) -> Iterator[Callable[..., FleetFeed]]:
    """Makes feeds of one folder, as a daemon and its successors do; closed at the end."""
    made: list[StateFolder] = []

    def make(match: str = LEAK, *, url: str = history, cpu_seconds: float = 1e9, workers: int = 1) -> FleetFeed:
        for one in made:
            one.close()
        made.append(StateFolder(tmp_path / "state", {"match": match}))
        return FleetFeed(
            access_to(url).source,
            match,
            WINDOW_SECONDS,
            made[-1],
            every_seconds=STEP_SECONDS,
            cpu_seconds=cpu_seconds,
            workers=workers,
        )

    yield make
    for one in made:
        one.close()


def worst(state: FleetRound) -> dict[str, str]:
    """The verdict of each replica by its key."""
    return {one.key.rpartition("/")[2]: one.present.worst for one in state.verdicts}


def test_rounds_give_the_verdicts_of_diagnose_at_the_same_moments(history: str, two: Callable[..., FleetFeed]) -> None:
    """Every world: the first read of the window, and then rounds that read only what is new."""
    feed = two("")
    counts = []
    for moment in (END_SECONDS - count * STEP_SECONDS for count in (12, 11, 6, 1, 0)):
        state = asyncio.run(feed.round(moment))
        counts.append(state.samples)
        assert diagnosed(history, moment) == {one.key: one.present for one in state.verdicts}
    assert counts[1] < counts[0] / 5


class Killed(Processes):
    """Two worker processes; the first pieces of work, so many, kill theirs."""

    def __init__(self, kills: int) -> None:
        """Count them."""
        super().__init__(2)
        self._kills = kills
        self.restarts = 0

    def submit(self, work: Callable[..., Any], /, *arguments: object) -> Future[Any]:
        """Do the work, or kill."""
        self._kills -= 1
        if self._kills < 0:
            return super().submit(work, *arguments)
        future = super().submit(kill_self)
        wait([future])
        return future

    def restart(self) -> None:
        """Count it."""
        self.restarts += 1
        super().restart()


def kill_self() -> None:
    """Kill the process that this is done in."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_worker_left_is_judged_by_new_ones(
    history: str, two: Callable[..., FleetFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdicts are the same, and no process is left."""
    pool = Killed(1)
    monkeypatch.setattr(fleet_feed, "executor", lambda *_: pool)
    state = asyncio.run(two("").round(END_SECONDS))
    assert diagnosed(history, END_SECONDS) == {one.key: one.present for one in state.verdicts}
    assert (state.replicas, 1) == (state.judged, pool.restarts)
    assert not workers()


def test_what_kills_its_workers_twice_is_unknown(
    two: Callable[..., FleetFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason and in every round: it is not judged in this process, which would be killed next."""
    monkeypatch.setattr(fleet_feed, "executor", lambda *_: Killed(1000))
    feed = two()
    for moment in (END_SECONDS - STEP_SECONDS, END_SECONDS):
        state = asyncio.run(feed.round(moment))
        shown = status_of(state, SOURCE, WINDOW_SECONDS, DEFAULT_LIMITS).replicas
        assert [("unknown", True)] * 2 == [
            (one.judged.diagnosis.worst, any("not judged: " in gap.reason for gap in one.judged.diagnosis.gaps))
            for one in shown
        ]


def test_two_kills_leave_the_other_replicas_judged(
    history: str, two: Callable[..., FleetFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be begun after the second one is judged by new workers, too."""
    monkeypatch.setattr(fleet_feed, "executor", lambda *_: Killed(2))
    state = asyncio.run(two("").round(END_SECONDS))
    assert diagnosed(history, END_SECONDS) == {one.key: one.present for one in state.verdicts}


class FullDisk(InProcess):
    """Another machine, which has no room for the files that it works on."""

    has_files = False

    def submit(self, work: Callable[..., Any], /, *arguments: object) -> Future[Any]:
        """Fail."""
        future: Future[Any] = Future()
        future.set_exception(OSError(errno.ENOSPC, "No space left on device"))
        return future


def test_work_that_fails_elsewhere_is_done_here(
    history: str, two: Callable[..., FleetFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with a full disk does not cost the fleet its verdicts."""
    monkeypatch.setattr(fleet_feed, "executor", lambda *_: FullDisk())
    state = asyncio.run(two().round(END_SECONDS))
    assert diagnosed(history, END_SECONDS, LEAK) == {one.key: one.present for one in state.verdicts}


def workers() -> list[psutil.Process]:
    """The worker processes that this one has."""
    return [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]


def test_a_replica_whose_memory_changed_is_judged_before_others(two: Callable[..., FleetFeed], tmp_path: Path) -> None:
    """The second of two grows from one round to the next; the order is that in which their files are replaced."""
    feed = two()
    asyncio.run(feed.round(END_SECONDS - 2.0 * 3600.0))
    asyncio.run(feed.round(END_SECONDS))
    written = {file.stat().st_mtime_ns: file for file in (tmp_path / "state").glob("*.replica")}
    order = [restored(written[moment].read_bytes())[1]["key"] for moment in sorted(written)]
    assert ["vllm-1", "vllm-0"] == [key.rpartition("/")[2] for key in order]


def test_a_successor_has_the_verdicts_and_reads_what_is_new(history: str, two: Callable[..., FleetFeed]) -> None:
    """A daemon that was killed between two rounds: nothing is read again but the overlap, and nothing is missing."""
    first = asyncio.run(two().round(END_SECONDS - STEP_SECONDS))
    successor = two()
    assert worst(first) == worst(successor.state)
    state = asyncio.run(successor.round(END_SECONDS))
    assert state.samples < first.samples / 5
    assert diagnosed(history, END_SECONDS, LEAK) == {one.key: one.present for one in state.verdicts}


def test_what_a_clock_that_was_ahead_left_is_judged_again(history: str, two: Callable[..., FleetFeed]) -> None:
    """In the daemon that runs and in its successor: no verdict is of the future."""
    earlier = END_SECONDS - 3600.0
    feed = two()
    asyncio.run(feed.round(END_SECONDS))
    for _ in range(2):
        # The one that runs, and then one that has its files.
        state = asyncio.run(feed.round(earlier))
        assert diagnosed(history, earlier, LEAK) == {one.key: one.present for one in state.verdicts}
        assert {earlier} == {one.as_of_seconds for one in state.verdicts}
        asyncio.run(feed.round(END_SECONDS))
        feed = two()


@pytest.mark.parametrize("cut", [1, 200, 10_000_000])
def test_a_file_that_was_cut_off_is_read_again_from_there(
    history: str, two: Callable[..., FleetFeed], tmp_path: Path, cut: int
) -> None:
    """Of a block, of more than one, or of all of it: the verdicts are the same in the end."""
    feed = two(cpu_seconds=0.0)
    for count in (3, 2, 1):
        asyncio.run(feed.round(END_SECONDS - count * STEP_SECONDS))
    for file in (tmp_path / "state").glob("*.replica"):
        os.truncate(file, max(file.stat().st_size - cut, 0))
    state = asyncio.run(two().round(END_SECONDS))
    assert diagnosed(history, END_SECONDS, LEAK) == {one.key: one.present for one in state.verdicts}


def test_another_selector_begins_from_nothing(two: Callable[..., FleetFeed]) -> None:
    """The folder's verdicts are of other replicas then."""
    asyncio.run(two().round(END_SECONDS))
    assert () == two('namespace="healthy"').state.verdicts


def test_a_round_without_time_judges_the_oldest(two: Callable[..., FleetFeed]) -> None:
    """Each round judges at least one replica, the one whose verdict is the oldest; each says as of when it is."""
    feed = two(cpu_seconds=0.0)
    moments = [END_SECONDS - count * STEP_SECONDS for count in (2, 1, 0)]
    states = [asyncio.run(feed.round(moment)) for moment in moments]
    assert [2, 1, 1] == [one.judged for one in states]
    assert sorted(moments[1:]) == sorted(one.as_of_seconds for one in states[-1].verdicts)


def test_a_prometheus_that_is_down_leaves_nothing_ok(history: str, two: Callable[..., FleetFeed]) -> None:
    """The verdicts stay, without an ok among them; the round after that reads what was missed."""
    asyncio.run(two().round(END_SECONDS - 2 * STEP_SECONDS))
    with refused_port() as port:
        down = asyncio.run(two(url=f"http://127.0.0.1:{port}").round(END_SECONDS - STEP_SECONDS))
    assert {"vllm-0": "unknown", "vllm-1": "fault"} == worst(down)
    assert down.problem is not None
    assert "cannot connect" in down.problem
    again = asyncio.run(two().round(END_SECONDS))
    assert {"vllm-0": "ok", "vllm-1": "fault"} == worst(again)
    assert diagnosed(history, END_SECONDS, LEAK) == {one.key: one.present for one in again.verdicts}


def test_what_cannot_be_read_is_unknown_until_it_can(history: str, two: Callable[..., FleetFeed]) -> None:
    """The list of series is answered, and queries for samples fail: the replicas are unknown with the reason."""
    asyncio.run(two().round(END_SECONDS - 2 * STEP_SECONDS))
    broken = reply_json({"status": "error", "error": "block is corrupted"}, status=500)
    with Hostile({"/api/v1/series": passed_on(history), "/api/v1/query": broken}) as server:
        lost = asyncio.run(two(url=server.url).round(END_SECONDS - STEP_SECONDS))
    assert {"vllm-0": "unknown", "vllm-1": "fault"} == worst(lost)
    assert ["block is corrupted"] * 2 == [one.unread for one in lost.verdicts]
    again = asyncio.run(two().round(END_SECONDS))
    assert diagnosed(history, END_SECONDS, LEAK) == {one.key: one.present for one in again.verdicts}


def passed_on(url: str) -> Answer:
    """The answers of a real Prometheus to a list of series."""

    def answer(peer: Peer) -> None:
        asked = urllib.request.Request(f"{url}/api/v1/series", data=peer.request_body, method="POST")
        with urllib.request.urlopen(asked) as response:
            reply(response.read().decode(), content_type="application/json")(peer)

    return answer


def test_a_selector_that_matches_nothing_is_a_failed_round(two: Callable[..., FleetFeed]) -> None:
    """It says so, counts as failed, and is no fleet without problems."""
    state = asyncio.run(two('namespace="of-nobody"').round(END_SECONDS))
    assert (0, 1, True) == (state.replicas, state.failed_total, "--match" in (state.problem or ""))
