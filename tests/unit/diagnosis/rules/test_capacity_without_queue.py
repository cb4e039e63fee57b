"""capacity.concurrency where requests beyond the pool fail instead of waiting."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.rules.capacity_concurrency import judge
from kvdiag.diagnosis.rules.leak_kv_blocks import judge as lost_cells
from kvdiag.model import Capabilities, Engine, Facts, Load, Mark, Outcome, Sample, Timeline, Workload
from tests.builders.answers import only
from tests.builders.values import holding, pool, seen

NO_USAGE = Engine(engine="0", requests_running=2, requests_waiting=0)
NO_WAIT = Facts(pools=(pool(usable_blocks=100),), capabilities=Capabilities(unit="cell", returns=False, waits=False))
REFUSED = Outcome(
    completed=0, failed=4, prompt_tokens=0, generated_tokens=0, errors=("Context size has been exceeded.",)
)


def loaded(outcome: Outcome, *, requests: int = 4, blocks: int = 50, running: int = 4, own: int = 0) -> Timeline:
    """One load of a run against an engine in which no request waits, with its outcome."""
    load, now = Load(requests=own), (holding(blocks, of=NO_WAIT.pools[0], running=running, waiting=0),)
    samples = [Sample(at_seconds=1.0 + at, engines=now, load=load) for at in range(3)]
    workload = Workload(requests=requests, prompt_tokens=16, max_tokens=8)
    marks = (
        Mark(at_seconds=0.0, step="concurrent", cycle=0, phase="begin", workload=workload),
        Mark(at_seconds=0.5, step="concurrent", cycle=0, phase="offer"),
        Mark(at_seconds=4.0, step="concurrent", cycle=0, phase="release", outcome=outcome),
        Mark(at_seconds=5.0, step="concurrent", cycle=0, phase="end"),
    )
    return Timeline(samples=tuple(samples), marks=marks)


DONE = Outcome(completed=4, failed=0, prompt_tokens=64, generated_tokens=32)


@pytest.mark.parametrize(
    ("timeline", "expected"),
    [
        pytest.param(loaded(REFUSED), "fault", id="all that ran failed for lack of cells"),
        pytest.param(loaded(REFUSED, requests=1, running=1), "unknown", id="one alone is not for concurrency"),
        pytest.param(loaded(REFUSED, requests=1), "fault", id="one beside those of others"),
        pytest.param(loaded(DONE, blocks=95), "suspect", id="nearly full"),
        pytest.param(loaded(DONE, blocks=100, own=4), "ok", id="full of kvdiag's own requests"),
        pytest.param(loaded(DONE, blocks=94), "ok", id="room left"),
        pytest.param(loaded(DONE, running=1), "unknown", id="never two at once"),
        pytest.param(seen(NO_USAGE, NO_USAGE), "unknown", id="no usage"),
        pytest.param(seen(), "unknown", id="nothing observed"),
    ],
)
def test_requests_that_fail_instead_of_waiting(timeline: Timeline, expected: str) -> None:
    """An engine without a queue for its pool shows a lack of room by errors, else by a pool that is nearly full."""
    assert expected == only(judge, timeline, NO_WAIT).status


@pytest.mark.parametrize(
    ("blocks", "slots_share", "expected"), [(83, True, "unknown"), (50, True, "ok"), (83, False, "ok")]
)
def test_failures_of_others_are_not_visible(blocks: int, slots_share: bool, expected: str) -> None:
    """A sample a second before the pool ran out shows 83 %: no error of another client's requests is reported."""
    each = replace(NO_WAIT.pools[0], max_requests=4, max_concurrency=1.0 if slots_share else 4.0)
    now = holding(blocks, of=each, running=4, waiting=0)
    finding = only(judge, seen(now, now, now), replace(NO_WAIT, pools=(each,)))
    assert (expected, None) == (finding.status, next((one.value for one in finding.evidence), None))


def test_slots_with_a_pool_each_cannot_run_out_of_it() -> None:
    """Split slots: each request ends at its own context."""
    split = replace(NO_WAIT, pools=(replace(NO_WAIT.pools[0], max_requests=4, max_concurrency=4.0),))
    assert "ok" == only(judge, loaded(DONE, blocks=100), split).status
    shared = replace(NO_WAIT, pools=(replace(NO_WAIT.pools[0], max_requests=4, max_concurrency=1.0),))
    assert "suspect" == only(judge, loaded(DONE, blocks=100), shared).status


@pytest.mark.parametrize(("running", "expected"), [(0, "unknown"), (1, "ok")])
def test_a_lone_slot_serves_one_request_at_a_time(running: int, expected: str) -> None:
    """No two run at once, however long kvdiag looks; one that ran found room."""
    lone = replace(NO_WAIT, pools=(replace(NO_WAIT.pools[0], max_requests=1, max_concurrency=1.0),))
    assert expected == only(judge, loaded(DONE, running=running), lone).status


@pytest.mark.parametrize(("running", "expected"), [(1, "fault"), (4, "unknown")])
def test_a_request_refused_beside_others_proves_no_lost_cells(running: int, expected: str) -> None:
    """Alone, 24 tokens must find room in a pool of 1,600; other requests may use all of it."""
    assert expected == only(lost_cells, loaded(REFUSED, requests=1, running=running), NO_WAIT).status


def test_a_load_that_met_a_request_given_up_on_proves_nothing() -> None:
    """A request without an answer in time still runs when the next load is sent: together they exceed the pool."""
    late = Outcome(completed=0, failed=1, prompt_tokens=0, generated_tokens=0, errors=("no answer in time",))
    load = loaded(REFUSED)
    after = Timeline(
        samples=tuple(replace(one, at_seconds=one.at_seconds + 10.0) for one in load.samples),
        marks=tuple(replace(one, at_seconds=one.at_seconds + 10.0) for one in load.marks),
    )
    busy = Sample(at_seconds=10.2, engines=(holding(90, of=NO_WAIT.pools[0], running=1, waiting=0),))
    workload = Workload(requests=1, prompt_tokens=80, max_tokens=8)
    given_up = (
        Mark(at_seconds=1.0, step="long_context", cycle=0, phase="begin", workload=workload),
        Mark(at_seconds=2.0, step="long_context", cycle=0, phase="offer"),
        Mark(at_seconds=6.0, step="long_context", cycle=0, phase="release", outcome=late),
        Mark(at_seconds=9.0, step="long_context", cycle=0, phase="end"),
    )
    met = replace(after, samples=(busy, *after.samples), marks=(*given_up, *after.marks))
    assert ("unknown", "unknown") == (only(lost_cells, met, NO_WAIT).status, only(judge, met, NO_WAIT).status)
    idle = replace(busy, engines=(holding(0, of=NO_WAIT.pools[0], running=0, waiting=0),))
    ended = replace(met, samples=(idle, *after.samples))
    assert "fault" == only(judge, ended, NO_WAIT).status
