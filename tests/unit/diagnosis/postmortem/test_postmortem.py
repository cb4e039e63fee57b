from dataclasses import replace

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.postmortem import Case, postmortem
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings
from kvdiag.model import Facts, Gap, Mark, Outcome, Sample, Timeline
from kvdiag.outputs.presentation import sentence
from tests.builders.runs import run
from tests.builders.values import NO_NVML, OOM, device, engine
from tests.builders.worlds import World
from tests.builders.worlds import facts as facts_of
from tests.unit.diagnosis.postmortem.cases import GIB, account, finding

SERVED = "HTTP 500: internal error"


def trace(*errors: str, begin_seconds: float = 1500.0, busy: bool = False) -> Timeline:
    """Samples from 1,000 s to 2,000 s, and one step whose requests failed with these errors."""
    outcome = Outcome(completed=0, failed=len(errors), prompt_tokens=0, generated_tokens=0, errors=errors)
    marks = (
        Mark(at_seconds=begin_seconds, step="long_context", cycle=0, phase="begin"),
        Mark(at_seconds=begin_seconds, step="long_context", cycle=0, phase="release", outcome=outcome),
        Mark(at_seconds=begin_seconds, step="other", cycle=0, phase="begin"),
    )
    samples = tuple(
        Sample(at_seconds=1000.0 + 20.0 * place, engines=(engine(running=int(busy)),)) for place in range(51)
    )
    return Timeline(samples=samples, marks=marks)


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (trace(SERVED, OOM, OOM.replace("3.00", "4.00")), True),
        (trace(OOM.replace("CUDA out of memory", "CUDA Out Of Memory")), True),
        (trace(OOM, begin_seconds=1400.0), True),
        (trace(OOM, begin_seconds=1399.9), False),
        (trace(SERVED), False),
        (trace(), False),
        (replace(trace(OOM), samples=()), False),
    ],
    ids=[
        "first message",
        "in capitals",
        "ten minutes before its end",
        "earlier",
        "other errors",
        "none",
        "no readings",
    ],
)
def test_request_of_our_own_that_ran_out_is_an_account(seen: Timeline, told: bool) -> None:
    """Torch's message in an answer of the trace's last ten minutes is an account of the failure itself."""
    actual = postmortem(Case(timeline=seen, facts=facts_of(World())))

    spike = next(one for one in actual.findings if one.id == "spike.activation")
    shown = {one.name: (one.value, one.source) for one in spike.evidence}
    expected = {
        "sources": ("the trace", "kvdiag"),
        "phase": ("request", "the trace"),
        "requested": (3 * GIB, "the trace"),
    }
    assert told == (("requested", 3 * GIB, "the trace") in [(name, *pair) for name, pair in shown.items()])
    assert not told or expected == {name: shown[name] for name in expected}
    assert not told or spike.status == "fault"


def test_failure_without_a_trace_has_the_time_that_is_told() -> None:
    """The earliest of its accounts' times stands for both ends; of none it is 0."""
    timed, untimed = (
        postmortem(Case(accounts=accounts))
        for accounts in ((account(at_seconds=70.0), account(at_seconds=60.0), account()), (account(),))
    )

    assert (60.0, 60.0, 0) == (timed.start_seconds, timed.end_seconds, timed.samples)
    assert (0.0, 0.0, 0) == (untimed.start_seconds, untimed.end_seconds, untimed.samples)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [(trace(), (1000.0, 2000.0, 51)), (Timeline(samples=()), (60.0, 60.0, 0))],
    ids=["with readings", "without any"],
)
def test_trace_tells_the_time_where_it_has_readings(seen: Timeline, expected: tuple[float, float, int]) -> None:
    """A trace without any has no beginning."""
    actual = postmortem(Case(accounts=(account(at_seconds=60.0),), timeline=seen))
    assert expected == (actual.start_seconds, actual.end_seconds, actual.samples)


HEALTHY, LEAKING = World(), World(device_growth_bytes=64 * 2**20)


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (HEALTHY, ("ok", "unknown")),
        (LEAKING, ("fault", "fault")),
    ],
    ids=["healthy trace", "trace with a leak"],
)
def test_death_without_a_cause_is_unknown_and_never_healthy(world: World, expected: tuple[str, str]) -> None:
    """What is given is of a server that died: a trace that shows nothing wrong is no good news."""
    seen, known = run(world), facts_of(world)

    actual = postmortem(Case(timeline=seen, facts=known))

    assert expected == (diagnose(seen, known).worst, actual.worst)


def test_time_before_fills_in_what_the_failure_cannot_tell() -> None:
    """Findings of the trace stand where the failure has none or an unknown one; each verdict occurs once."""
    # A trace with neither a leak nor a spike, and a failure with neither figures nor time
    seen, known = run(HEALTHY), facts_of(HEALTHY)
    before = {one.id: one for one in diagnose(seen, known).findings}
    masked = account("masked", asked_bytes=None, free_bytes=None, process_bytes=None, allocated_bytes=None)

    actual = postmortem(Case(accounts=(masked,), timeline=seen, facts=known))
    found = {one.id: one for one in actual.findings}

    assert len(found) == len(actual.findings)
    assert {"unknown"} == {
        finding(one, masked).status for one in ("fragmentation.allocator", "baseline.foreign_memory")
    }
    assert before["baseline.foreign_memory"] == found["baseline.foreign_memory"]
    assert before["leak.kv_blocks"] == found["leak.kv_blocks"]
    assert before["spike.activation"].status == "ok"  # which is no evidence that the crash was not a spike
    assert found["spike.activation"].status != "ok"
    assert set(before) <= set(found)


def test_gaps_of_all_that_was_read_are_told_once() -> None:
    """The files' own, what contradicts, and the trace's."""
    damaged = Gap(source="black_box", kind="failed", reason="damaged")
    seen = replace(trace(), samples=(*trace().samples[:-1], replace(trace().samples[-1], gaps=(NO_NVML, damaged))))
    accounts = (account(origin="a"), account(origin="b", device=1))

    actual = postmortem(Case(accounts=accounts, timeline=seen, gaps=(damaged, damaged)))

    reasons = [gap.reason for gap in actual.gaps]
    assert reasons[0] == "damaged"
    assert reasons[1].startswith("b contradicts a")
    assert NO_NVML.reason in reasons[2:]
    assert len(set(reasons)) == len(reasons)


def test_facts_are_the_traces_else_the_logs() -> None:
    """What the engine printed of itself at start, where no trace has its facts."""
    settings = EngineSettings(
        version="0.32.0", model="m", max_model_len_tokens=4096, tensor_parallel=2, pipeline_parallel=3
    )
    report = EngineReport(settings=settings)

    logged, traced, neither = (
        postmortem(case).facts
        for case in (
            Case(report=report, engine_name="vllm"),
            Case(report=report, facts=Facts(engine_name="sglang")),
            Case(),
        )
    )

    assert logged == Facts(
        engine_name="vllm",
        engine_version="0.32.0",
        model="m",
        max_model_len_tokens=4096,
        tensor_parallel=2,
        pipeline_parallel=3,
    )
    assert (Facts(engine_name="sglang"), Facts()) == (traced, neither)


def test_a_start_without_its_log_says_what_is_missing_and_what_is_known() -> None:
    """The reason is the headline: the log is missing; known are that it never answered, and what was free at least."""
    starting = Gap("engine", "absent", "starting: cannot connect")
    samples = tuple(
        Sample(at_seconds=float(second), devices=(device(used_bytes=second * GIB),), gaps=(starting,))
        for second in (1, 23)
    )
    crashed = Timeline(samples=(*samples, replace(samples[0], at_seconds=24.0)))
    said = sentence(postmortem(Case(timeline=crashed)))
    assert all(words in said for words in ("log", "never answered in 23 s", "1.00 GiB"))
    assert 1 == said.count("GiB")


def test_a_crash_has_no_confidence() -> None:
    """How often findings were right was counted on servers that run."""
    found = finding("spike.activation", account())
    assert found.confidence is None
