"""Which replicas are judged before others: those that changed since their verdict."""

import math
from array import array

import pytest

from kvdiag.feeds.fleet.fleet_round import ReplicaVerdict
from kvdiag.feeds.fleet.kept_replica import KeptReplica, figures_of
from kvdiag.feeds.fleet.replica_samples import ReplicaSamples
from kvdiag.feeds.history.series_join import Replica
from kvdiag.sources.prometheus_answers import Points
from tests.unit.outputs.test_fleet import REPLICAS

JUDGED_SECONDS = 10_000.0


def kept(newest_seconds: float, until_seconds: float) -> KeptReplica:
    """A replica that was judged, and has been read until a later moment."""
    one = REPLICAS[0]
    verdict = ReplicaVerdict(
        key=one.key,
        subject=one.subject,
        diagnosis=one.diagnosis,
        summary=None,
        as_of_seconds=JUDGED_SECONDS,
        newest_seconds=newest_seconds,
    )
    replica = Replica(key=one.key, subject=one.subject, series=())
    return KeptReplica(replica=replica, until_seconds=until_seconds, newest_seconds=newest_seconds, verdict=verdict)


@pytest.mark.parametrize(
    ("newest_seconds", "until_seconds", "change"),
    [
        pytest.param(JUDGED_SECONDS - 20.0, JUDGED_SECONDS + 290.0, math.inf, id="silent since"),
        pytest.param(JUDGED_SECONDS - 400.0, JUDGED_SECONDS + 300.0, 0.0, id="silent before"),
        pytest.param(JUDGED_SECONDS + 290.0, JUDGED_SECONDS + 300.0, 0.0, id="not silent"),
    ],
)
def test_silence_since_the_verdict_is_a_change(newest_seconds: float, until_seconds: float, change: float) -> None:
    """A server that is down does not wait for its turn; one that was silent then has the verdict of it."""
    assert change == kept(newest_seconds, until_seconds).change


def test_a_server_that_no_longer_answers_has_changed() -> None:
    """Its memory figures stay as they were."""
    one = kept(JUDGED_SECONDS + 290.0, JUDGED_SECONDS + 300.0)
    one.judged_figures, one.figures = (figures_of(up(value)) for value in (1.0, 0.0))
    assert 1.0 == one.change


def test_a_series_that_appeared_is_read_over_the_whole_window_once() -> None:
    """Also where it appeared before the replica had its first turn of being read again."""
    one = kept(JUDGED_SECONDS + 290.0, JUDGED_SECONDS + 300.0)
    one.newest = {"up": one.newest_seconds}
    one.read_whole()
    assert one.start_seconds(JUDGED_SECONDS + 600.0) > 0.0
    one.read_whole()
    starts = [one.start_seconds(JUDGED_SECONDS + seconds) for seconds in (900.0, 1200.0)]
    assert [True, False] == [start == -math.inf for start in starts]


def up(value: float) -> ReplicaSamples:
    """Whether the last scrape of a server worked."""
    points = Points(times=array("d", [JUDGED_SECONDS]), values=array("d", [value]))
    return ReplicaSamples(until_seconds=JUDGED_SECONDS, series={(("__name__", "up"),): points})
