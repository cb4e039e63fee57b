"""The scoring, the alerts to compare with, and the random servers: whether they measure what they claim."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from kvdiag.model import Sample, Status
from tests.quality.bench.diagnosis_score import recall
from tests.quality.corpus.drawn import COMPONENTS, ONSET_HOURS, Component, Drawn, Leak
from tests.quality.corpus.incidents import INCIDENTS
from tests.quality.corpus.recording import scraped, standard_series
from tests.quality.corpus.score import Answer, Expected, family, score
from tests.quality.corpus.tape import seeded
from tests.quality.corpus.today import DETECTORS, DEVICE, FULL, HOLES, HOST, Seen, least_squares, mann_kendall

HOUR = 3600.0
GB = 1e9


def said(worst: Status, **called: Status) -> Answer:
    """An answer; `__` stands for the dot of a verdict."""
    named = {name.replace("__", "."): status for name, status in called.items()}
    return Answer(worst=worst, called=named, said=dict.fromkeys(named, ""))


LEAK = Expected(accept=("leak.device_torch",), also=("capacity.concurrency",), unseen=("series",))
BENIGN = Expected(accept=("healthy",))
OPEN = Expected(accept=("undetermined",))


@pytest.mark.parametrize(
    ("expected", "answer", "mark", "wrong"),
    [
        (LEAK, said("fault", leak__device_torch="fault"), "right", ()),
        (LEAK, said("suspect", leak__device_torch="suspect", capacity__concurrency="suspect"), "right", ()),
        (LEAK, said("fault", leak__device_non_torch="fault"), "half", ()),
        (LEAK, said("fault", leak__host="fault"), "missed", ("leak.host",)),
        (LEAK, said("suspect", capacity__concurrency="suspect"), "missed", ()),
        (LEAK, said("unknown"), "honest", ()),
        (LEAK, said("ok"), "missed", ()),
        (BENIGN, said("unknown"), "right", ()),
        (BENIGN, said("suspect", leak__host="suspect"), "missed", ("leak.host",)),
        (OPEN, said("unknown"), "right", ()),
        (OPEN, said("ok"), "missed", ()),
        (OPEN, said("fault", leak__kv_blocks="fault"), "missed", ("leak.kv_blocks",)),
    ],
)
def test_answer_is_marked(expected: Expected, answer: Answer, mark: str, wrong: tuple[str, ...]) -> None:
    """The right verdict counts, one of its family for a half, unknown where the evidence is not there for none."""
    actual = score("name", "series", expected, answer)
    assert (mark, wrong) == (actual.mark, actual.wrong)


def test_unknown_is_a_miss_where_the_evidence_is_there() -> None:
    """`unknown` is right only in a variant without the evidence; elsewhere it is a miss."""
    assert "missed" == score("name", "recorded", LEAK, said("unknown")).mark


def test_suspects_count_as_faults_on_a_line_of_their_own_alone() -> None:
    """A suspect does not count in the recall of faults; `open_counts` adds those whose evidence is ambiguous."""
    # A suspect in a variant that leaves it open, and one in a variant that does not.
    known = replace(LEAK, open=("series",))
    suspect = said("suspect", leak__device_torch="suspect")
    rows = [score("name", "series", known, suspect), score("name", "recorded", known, suspect)]
    assert (1.0, 0.0, 0.5) == (recall(rows), recall(rows, "fault"), recall(rows, "fault", open_counts=True))


def test_leaks_of_hosts_and_devices_are_no_family() -> None:
    """A leak that is looked for in the wrong place is not half found."""
    assert 4 == len({family(one) for one in ("leak.host", "leak.kv_blocks", "leak.device_torch", "imbalance.rank")})
    assert family("leak.device_torch") == family("leak.device_non_torch")


def series(*, device_per_hour: float = 0.0, host_per_hour: float = 0.0, gap: float = 0.0, full: float = 0.5) -> Seen:
    """Eight hours of a device of 80 GB and a host of 200 GB, a sample a minute, with a little noise."""
    random = Random(1)  # noqa: S311 - it guards nothing
    times = [60.0 * minute for minute in range(8 * 60)]
    return Seen(
        device=tuple((at, 80 * GB * full + device_per_hour * at / HOUR + random.gauss(0.0, 1e6)) for at in times),
        host=tuple((at, 20 * GB + host_per_hour * at / HOUR + random.gauss(0.0, 1e6)) for at in times),
        gap_bytes=tuple((at, gap) for at in times),
        device_total_bytes=80 * GB,
        host_limit_bytes=200 * GB,
    )


@pytest.mark.parametrize(
    ("alert", "seen", "expected"),
    [
        ("predict_linear(6h), 24 h", series(device_per_hour=3 * GB), {DEVICE}),
        ("predict_linear(6h), 24 h", series(device_per_hour=0.5 * GB), set()),
        ("predict_linear(1h), 4 h", series(host_per_hour=60 * GB), {HOST}),
        ("predict_linear(1h), 4 h", series(device_per_hour=3 * GB), set()),
        ("deriv(1h) > 50 MB/h", series(host_per_hour=0.1 * GB), {HOST}),
        ("deriv(1h) > 50 MB/h", series(), set()),
        ("Mann-Kendall, raw, 6 h", series(device_per_hour=0.1 * GB, host_per_hour=0.1 * GB), {DEVICE, HOST}),
        ("Mann-Kendall, raw, 6 h", series(), set()),
        ("alert at NVML > 90 %", series(full=0.92), {FULL}),
        ("alert at NVML > 90 %", series(full=0.88), set()),
        ("reserved - allocated > 2 GB", series(gap=2.5 * GB), {HOLES}),
        ("reserved - allocated > 2 GB", series(gap=1.5 * GB), set()),
    ],
)
def test_alert_of_today_does_what_it_does(alert: str, seen: Seen, expected: set[str]) -> None:
    """Each fires on what it is meant for, and not below."""
    assert expected == DETECTORS[alert](seen)


def test_mann_kendall_is_what_its_definition_gives() -> None:
    """The sorted count gives the sign of the sum over all pairs."""
    random = Random(2)  # noqa: S311 - it guards nothing
    for slope in (-0.4, 0.0, 0.4):
        sizes = [float(round(slope * place + random.gauss(0.0, 3.0))) for place in range(60)]
        whole = sum((later > earlier) - (later < earlier) for earlier, later in combinations(sizes, 2))
        points = [(120.0 * place, size) for place, size in enumerate(sizes)]
        assert (whole > 400) == mann_kendall(points, 0.0)
    assert 2.0 == pytest.approx(least_squares([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]))


@pytest.mark.parametrize("component", COMPONENTS)
def test_drawn_leak_has_the_rate_it_says(component: Component) -> None:
    """What a leaking server holds at its end beyond the same server without the leak is the rate times the hours."""
    leak = Leak(component=component, mb_per_hour=1_000.0, shape="by load", onset_hours=ONSET_HOURS)
    leaking = Drawn(model="pool", seed=1, view="recorded", hours=12.0, leak=leak, tick_seconds=300.0)
    first, last = (leaking.play()[0].samples[place] for place in (0, -1))
    before, after = _figures(first), _figures(last)
    grown = {name: after[name] - before[name] for name in before if component in name.split()}
    assert 8.0 * GB == pytest.approx(max(grown.values()), rel=0.1)
    assert [] == [
        name for name in before if component not in name.split() and abs(after[name] - before[name]) > 0.5 * GB
    ]


def _figures(sample: Sample) -> dict[str, float]:
    """Bytes by the components that move them."""
    (device,), (torch,), (page,) = sample.devices or (), sample.allocators or (), sample.engines or ()
    assert device.memory is not None
    held = round((page.kv_usage_ratio or 0.0) * 20_480) - 94 * (page.requests_running or 0)
    return {
        "host": float(sum(one.anonymous_bytes or 0 for one in sample.host or ())),
        "torch": float(torch.allocated_bytes),
        "torch reserved": float(torch.reserved_bytes),
        "torch reserved device": float(device.memory.used_bytes),
        "kv": held * 2.0 * 2**20,
    }


def test_standard_series_show_no_more_than_they_have() -> None:
    """No processes, no torch, one container on the host, nothing of the server's files."""
    timeline, facts = standard_series(*INCIDENTS["frag-skyrl-1768"].recording().play())
    assert {None} == {sample.allocators for sample in timeline.samples}
    assert {None} == {device.processes for sample in timeline.samples for device in sample.devices or ()}
    assert {0, 1} == {len(sample.host or ()) for sample in timeline.samples}
    assert [] == [one for one in timeline.samples if (one.engines, one.devices, one.host).count(None) != 2]
    assert (None, None, None) == (facts.server_pids, facts.weights_bytes, facts.max_model_len_tokens)


def test_incident_is_always_the_same_and_its_draws_are_not() -> None:
    """Noise is drawn by name."""
    incident = INCIDENTS["host-n-gt-1"]
    timeline, _ = incident.recording().play()
    assert timeline == incident.recording().play()[0]
    assert timeline != incident.recording(1).play()[0]
    assert scraped(timeline, seeded("a"), tick_seconds=60.0) == scraped(timeline, seeded("a"), tick_seconds=60.0)
