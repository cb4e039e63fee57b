from dataclasses import replace

import pytest

from kvdiag.diagnosis.postmortem import Case
from kvdiag.diagnosis.postmortem.case import agree, asked_for, evidence
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.model import Engine, Sample, Timeline
from kvdiag.oom.account import Account, Work
from kvdiag.oom.message import Shortage
from tests.builders.values import allocator, engine
from tests.unit.diagnosis.postmortem.cases import GIB, MIB, account, finding, split

BARE = Account(origin="the black box", exact=True, shortage=Shortage(kind="torch", message=""))
FULL = Account(
    origin="a log",
    shortage=Shortage(
        kind="torch",
        message="",
        device=3,
        asked_bytes=1 * GIB,
        free_bytes=2 * GIB,
        total_bytes=80 * GIB,
        allowed_bytes=70 * GIB,
        allocated_bytes=60 * GIB,
        unallocated_bytes=5 * GIB,
        private_bytes=4 * GIB,
        process_bytes=66 * GIB,
        others=((7, 6 * GIB),),
        limit_bytes=90 * GIB,
        usage_bytes=89 * GIB,
        needed_bytes=9 * GIB,
        available_bytes=8 * GIB,
        asked_tokens=131_072,
        fitting_tokens=65_536,
    ),
    at_seconds=50.0,
    process="Worker_TP3",
    rank=3,
    phase="prefill",
    phase_source="traceback",
    work=Work(scheduled_tokens=8192, requests=5, largest_request="r-1", largest_tokens=8000),
    running=5,
    waiting=2,
    kv_usage_ratio=0.75,
    max_num_seqs=256,
    graphs_captured=(19, 35),
    later=4,
    allocator=allocator(),
    split=split(pending_bytes=MIB, stranded_bytes=2 * MIB, releasable_bytes=3 * MIB, largest_free_block_bytes=4 * MIB),
)


def test_account_is_filled_in_whole_by_one_that_agrees() -> None:
    """The account that agrees supplies what the exact one leaves open, and changes none of its figures."""
    failure = Case(accounts=(FULL, replace(BARE, later=1))).failure

    # The figures of a refusal stand in the engine's message alone
    expected = replace(
        FULL,
        origin="the black box",
        exact=True,
        at_seconds=None,
        shortage=replace(
            FULL.shortage, needed_bytes=None, available_bytes=None, asked_tokens=None, fitting_tokens=None
        ),
    )
    assert expected == failure


def test_what_an_account_tells_itself_stays() -> None:
    """A zero is a figure."""
    own = replace(FULL, exact=True, rank=0, running=0, waiting=0, later=9)
    own = replace(own, shortage=replace(own.shortage, free_bytes=0, others=((8, GIB),)))

    assert own == Case(accounts=(FULL, own)).failure


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"asked_bytes": 1_000_000}, {"asked_bytes": 990_000}, True),  # a hundredth
        ({"asked_bytes": 1_000_000}, {"asked_bytes": 989_999}, False),
        ({"asked_bytes": GIB}, {"asked_bytes": GIB - 10 * MIB}, True),  # two decimals of GiB
        ({"asked_bytes": GIB}, {"asked_bytes": None}, True),
        ({"asked_bytes": None}, {"asked_bytes": GIB}, True),
        ({"total_bytes": 80 * GIB}, {"total_bytes": 79 * GIB}, False),
        ({"total_bytes": 100 * GIB}, {"total_bytes": 99 * GIB}, True),
        ({"device": 0}, {"device": 0}, True),
        ({"device": 0}, {"device": 1}, False),
        ({"device": 0}, {"device": None}, True),
        ({"kind": "host"}, {"kind": "host"}, True),
        ({"kind": "host"}, {"kind": "torch"}, False),
        ({"kind": "torch"}, {"kind": "driver"}, True),
        ({"kind": "budget"}, {"kind": "torch"}, False),
        ({"kind": "blocks"}, {"kind": "torch"}, False),
        ({"kind": "context"}, {"kind": "torch"}, False),
        ({"kind": "profiling"}, {"kind": "torch"}, False),
        ({"kind": "budget"}, {"kind": "blocks"}, True),
    ],
)
def test_accounts_agree_as_far_as_they_are_printed(
    one: dict[str, object], other: dict[str, object], expected: bool
) -> None:
    """Figures differ by their rounding; another device, another kind of memory, and a refusal are other failures."""
    first, second = (replace(account(), shortage=replace(account().shortage, **each)) for each in (one, other))  # type: ignore[arg-type]

    assert (expected, expected) == (agree(first, second), agree(second, first))


def test_sources_are_named_by_whether_they_agree() -> None:
    """The agreement names the judged account and every source that agrees with it."""
    box, log, other = BARE, FULL, account(origin="another log", device=1)

    assert "a log" == Case(accounts=(log,)).agreement
    agreeing = Case(accounts=(log, replace(log, origin="standard input"), box)).agreement
    assert ["the black box", "a log, standard input agree"] == agreeing.split("; ")
    assert "a log" == Case(accounts=(log, other)).agreement


@pytest.mark.parametrize(
    "other",
    [
        account("budget", origin="b", device=1),
        account("host", origin="b", device=None),
        account("torch", origin="b", device=1, asked_bytes=None),
        account("torch", origin="b", device=None, asked_bytes=3 * GIB),
    ],
    ids=["refusal", "host", "no size", "no device"],
)
def test_contradiction_says_what_the_other_tells(other: Account) -> None:
    """By what ran out, how much was asked for, and where."""
    (gap,) = Case(accounts=(account(origin="a"), other)).contradictions
    assert ("postmortem", "failed") == (gap.source, gap.kind)


def test_what_contradicts_a_filled_account_is_not_said_to_agree() -> None:
    """An account without a size agrees with any; once one has supplied it, a third of another size contradicts."""
    # A box without a size, and two logs that differ in it
    one = account(origin="one log", device=None, asked_bytes=GIB)
    other = account(origin="another log", device=None, asked_bytes=3 * GIB)

    case = Case(accounts=(BARE, one, other))

    assert GIB == case.failure.shortage.asked_bytes
    assert ["the black box", "one log agrees"] == case.agreement.split("; ")
    (_,) = case.contradictions


def test_evidence_has_every_figure_with_its_unit_and_source() -> None:
    """The numbers that a finding on the failure stands on."""
    actual = [(one.name, one.value, one.unit, one.source) for one in evidence(Case(accounts=(FULL,)))]

    assert actual == [
        ("sources", "a log", "", "kvdiag"),
        ("phase", "prefill", "", "traceback"),
        ("process", "Worker_TP3", "holder", "a log"),
        ("rank", 3, "", "a log"),
        ("device", 3, "", "a log"),
        ("requested", 1 * GIB, "bytes", "a log"),
        ("free_on_device", 2 * GIB, "bytes", "a log"),
        ("device_total", 80 * GIB, "bytes", "a log"),
        ("allowed", 70 * GIB, "bytes", "a log"),
        ("allocated_by_torch", 60 * GIB, "bytes", "a log"),
        ("reserved_by_torch", 65 * GIB, "bytes", "a log"),
        ("reserved_but_unallocated", 5 * GIB, "bytes", "a log"),
        ("private_pools", 4 * GIB, "bytes", "a log"),
        ("this_process", 66 * GIB, "bytes", "a log"),
        ("other_processes", 12 * GIB, "bytes", "a log"),  # 80 - 2 - 66
        ("memory_in_use", 89 * GIB, "bytes", "a log"),
        ("memory_limit", 90 * GIB, "bytes", "a log"),
        ("needed", 9 * GIB, "bytes", "a log"),
        ("available", 8 * GIB, "bytes", "a log"),
        ("needed_tokens", 131_072, "tokens", "a log"),
        ("max_fitting_model_len", 65_536, "tokens", "a log"),
        ("stranded", 2 * MIB, "bytes", "a log"),
        ("releasable", 3 * MIB, "bytes", "a log"),
        ("pending", 1 * MIB, "bytes", "a log"),
        ("largest_free_block", 4 * MIB, "bytes", "a log"),
        ("scheduled_tokens", 8192, "tokens", "a log"),
        ("scheduled_requests", 5, "requests", "a log"),
        ("largest_request", "r-1", "", "a log"),
        ("running", 5, "requests", "a log"),
        ("waiting", 2, "requests", "a log"),
        ("kv_usage", 0.75, "ratio", "a log"),
        ("graphs_captured", 19, "graphs", "a log"),
        ("graphs", 35, "graphs", "a log"),
        ("later_failures", 4, "times", "a log"),
    ]


def test_evidence_leaves_out_what_nobody_tells() -> None:
    """No empty name, and no count of failures that did not come."""
    assert ["sources"] == [one.name for one in evidence(Case(accounts=(BARE,)))]


def test_phase_without_a_witness_is_the_sources_own() -> None:
    """A phase from an account without a phase source has the account's origin as source."""
    (_, phase, *_) = evidence(Case(accounts=(replace(FULL, phase_source=None),)))
    assert ("phase", "a log") == (phase.name, phase.source)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (
            account(phase="decode", process="Worker_TP1"),
            ("1.00 GiB", "GPU 0", "Worker_TP1", "decode", "256 MiB", "128 MiB"),
        ),
        (account(device=None, unallocated_bytes=None), ("1.00 GiB", "256 MiB")),
        (account(free_bytes=None), ("1.00 GiB", "GPU 0", "128 MiB")),
        (BARE, ("out of memory",)),
        (
            replace(BARE, shortage=Shortage(kind="masked", message="")),
            ("NVML", "MIG"),
        ),
    ],
)
def test_failure_is_told_in_words(one: Account, expected: tuple[str, ...]) -> None:
    """What was asked for, where, by whom and when, and what was there."""
    actual = asked_for(Case(accounts=(one,)))
    assert all(part in actual for part in expected)


def trace(busy_from_end: int, waiting: int = 0) -> Timeline:
    """Forty samples of which one, counted from the end, has a running request."""
    pages: list[Engine] = [engine(running=0) for _ in range(40)]
    pages[-busy_from_end] = replace(engine(running=1), requests_waiting=waiting)
    return Timeline(samples=tuple(Sample(at_seconds=float(at), engines=(page,)) for at, page in enumerate(pages)))


def test_trace_tells_that_it_served_where_the_failure_does_not() -> None:
    """Requests in the last thirty samples set the phase; a phase that the failure reports comes first."""
    late, early, told, none = (
        Case(accounts=(one,), timeline=timeline).failure
        for one, timeline in (
            (account(), trace(30)),
            (account(), trace(31)),
            (account(phase="load", phase_source="progress"), trace(1)),
            (account(), None),
        )
    )

    phases = [(one.phase, one.phase_source) for one in (late, early, told, none)]
    assert [("request", "the trace"), (None, None), ("load", "progress"), (None, None)] == phases


def test_rank_is_the_one_that_failed_else_the_one_with_least() -> None:
    """By its name in the log; where none has it, the smallest pool decides what every rank gets."""
    ranks = tuple(
        RankReport(name=f"Worker_TP{number}", pool=None if size is None else PrintedSize(nominal_bytes=size * GIB))
        for number, size in enumerate((None, 60, 50))
    )
    report = EngineReport(ranks=ranks)

    named, unnamed = (
        Case(accounts=(account(process=process),), report=report).rank for process in ("Worker_TP0", "APIServer")
    )

    assert (ranks[0], ranks[2]) == (named, unnamed)
    assert ranks[0] == Case(report=EngineReport(ranks=ranks[:1])).rank
    assert Case().rank is None


def test_total_is_the_messages_else_the_logs() -> None:
    """The log's, of the device with least, where the message has none."""
    report = EngineReport(ranks=(RankReport(name="", total=PrintedSize(nominal_bytes=79 * GIB)),))

    assert 80 * GIB == Case(accounts=(account(),), report=report).total_bytes
    assert 79 * GIB == Case(accounts=(account(total_bytes=None),), report=report).total_bytes
    assert 79 * GIB == Case(report=report).total_bytes
    assert Case(accounts=(account(total_bytes=None),)).total_bytes is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (EngineSettings(memory_fraction_ratio=0.8), 0.8),
        (EngineSettings(version="0.19.1"), 0.9),
        (EngineSettings(version="0.20.0"), 0.92),
        (EngineSettings(), None),
        (EngineSettings(version="0.20.0", pool_bytes=GIB), None),
    ],
)
def test_fraction_in_force_is_the_printed_one_or_the_versions(settings: EngineSettings, expected: float | None) -> None:
    """A version that is not known has no default, and a pool in bytes has no fraction."""
    assert expected == Case(report=EngineReport(settings=settings)).fraction_ratio
    assert Case().fraction_ratio is None


def test_an_unverified_black_box_alone_is_no_fault() -> None:
    """A log makes the fault that it makes without the box, and does not give way to a box that contradicts it."""
    box = account(origin="the unverified black box", exact=True, unverified=True)
    log = account(origin="a log")
    sure, doubted, both = (finding("spike.activation", *given) for given in ((log,), (box,), (box, log)))
    assert ("fault", "suspect", "fault") == (sure.status, doubted.status, both.status)
    assert "unverified" in doubted.summary
    other = replace(box, shortage=replace(box.shortage, asked_bytes=2 * GIB))
    assert sure == finding("spike.activation", other, log)
