"""spike.activation and spike.graph_capture by what a timeline shows: torch's refusals, deaths, devices under load."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules import spike_activation, spike_graph_capture
from kvdiag.model import Allocator, Device, Engine, Facts, FailedAllocation, Finding, Gap, Process, Sample, Timeline
from tests.builders.answers import ANY_TEXT, rows
from tests.builders.runs import run
from tests.builders.values import GIB, GPU_LOST, MIB, NO_ANSWER, allocator, device, engine, process, split
from tests.builders.worlds import TRAINING

ONE_GPU = Facts(server_pids=(100,))
JOB = process(7, 1_536 * MIB, "job")
IDLE, BUSY = engine(), engine(running=4, usage=0.5)
Reading = tuple[Engine | Gap | None, tuple[Device, ...] | None]


def activation(timeline: Timeline, of: Facts = ONE_GPU) -> Finding:
    """The rule's one finding on a timeline."""
    (found,) = spike_activation.judge(timeline, of, DEFAULT_LIMITS)
    return found


def capture(timeline: Timeline, of: Facts = ONE_GPU) -> Finding:
    """The rule's one finding on a timeline."""
    (found,) = spike_graph_capture.judge(timeline, of, DEFAULT_LIMITS)
    return found


def readings(*told: Reading) -> Timeline:
    """Pages, or why there is none, and devices, fifteen seconds apart."""
    return Timeline(
        samples=tuple(
            Sample(
                at_seconds=15.0 * number,
                engines=(page,) if isinstance(page, Engine) else None,
                gaps=(page,) if isinstance(page, Gap) else (),
                devices=devices,
            )
            for number, (page, devices) in enumerate(told)
        )
    )


def gpu(free_mib: int, *others: Process) -> tuple[Device, ...]:
    """A GPU of 24 GiB with so much free, of which the server holds what the others and the driver do not."""
    used = 24 * GIB - free_mib * MIB
    own = process(100, used - 464 * MIB - sum(one.used_bytes or 0 for one in others))
    return (device(used_bytes=used, processes=(own, *others)),)


def under_load(*free_mib: int) -> Timeline:
    """A GPU's free MiB at idle, while requests run, at idle, and so on."""
    return readings(*((BUSY if number % 2 else IDLE, gpu(free)) for number, free in enumerate(free_mib)))


@pytest.mark.parametrize(
    ("timeline", "status"),
    [
        pytest.param(under_load(1_656, 900, 1_656, 120, 1_656), "suspect", id="next to nothing free"),
        pytest.param(under_load(1_656, 900, 1_656), "ok", id="room enough"),
        pytest.param(under_load(120, 110, 120), "ok", id="full at idle as well"),
        pytest.param(under_load(1_656, 120, 130), "unknown", id="not released"),
        pytest.param(under_load(1_656, 120), "unknown", id="not observed idle after"),
        pytest.param(readings(*[(BUSY, gpu(1_000))] * 3), "ok", id="never idle, with room"),
        pytest.param(readings(*[(BUSY, gpu(100))] * 3), "unknown", id="never idle, without room"),
        pytest.param(readings((IDLE, gpu(1_656)), (BUSY, gpu(120, JOB)), (IDLE, gpu(1_656))), "ok", id="another job"),
        pytest.param(readings((BUSY, None)), "unknown", id="no device"),
        pytest.param(readings((BUSY, (device(), device(1)))), "unknown", id="two GPUs of unknown owner"),
        pytest.param(readings((GPU_LOST, None)), "unknown", id="GPU lost"),
        pytest.param(run(), "ok", id="a healthy run"),
    ],
)
def test_a_device_under_load_gets_its_status(timeline: Timeline, status: str) -> None:
    """A transient of 1.5 GiB leaves 120 MiB: a larger one does not fit. What is not released may be a leak as well."""
    assert status == activation(timeline).status


def test_why_no_device_is_judged_is_said() -> None:
    """No load, no reading, a gap's own reason, or no sample."""
    busy, lost = (BUSY, None), (GPU_LOST, None)
    told = [activation(readings(*each)).summary for each in ([(IDLE, None)], [busy], [busy, lost], [])]
    assert all(why in one for why, one in zip(["no request", "no GPU", GPU_LOST.reason, "no GPU"], told, strict=True))


FULL = split(live_bytes=8 * GIB, releasable_bytes=0, largest_free_block_bytes=0, fits=False)
PIECES = split(live_bytes=4 * GIB, releasable_bytes=0, stranded_bytes=4 * GIB, largest_free_block_bytes=64 * MIB)
FAILED = FailedAllocation(age_seconds=20.0, asked_bytes=3 * GIB, free_bytes=512 * MIB, split=FULL)
REFUSED = allocator(ooms_total=1, failure=FAILED, title="VLLM::Worker_TP0")
ENOUGH = replace(FAILED, free_bytes=4 * GIB, split=None)


@pytest.mark.parametrize(
    ("first", "last", "status"),
    [
        pytest.param(allocator(), REFUSED, "fault", id="more than there was"),
        pytest.param(allocator(), replace(REFUSED, failure=None), "suspect", id="size not reported"),
        pytest.param(allocator(), replace(REFUSED, failure=ENOUGH), "suspect", id="enough was free"),
        pytest.param(allocator(), replace(REFUSED, failure=replace(FAILED, split=PIECES)), "ok", id="room in pieces"),
        pytest.param(
            allocator(),
            replace(REFUSED, allocated_bytes=9 * GIB, reserved_bytes=9 * GIB),
            "ok",
            id="growth took the room",
        ),
        pytest.param(REFUSED, REFUSED, "unknown", id="before the first sample"),
    ],
)
def test_what_torch_refused_gets_its_status(first: Allocator, last: Allocator, status: str) -> None:
    """Holes and leaks end in the same refusal: they have verdicts of their own."""
    samples = tuple(Sample(at_seconds=15.0 * number, allocators=(one,)) for number, one in enumerate((first, last)))
    assert status == activation(Timeline(samples=samples)).status


EXIT: Sequence[Reading] = [(NO_ANSWER, gpu(120)), *[(NO_ANSWER, (device(used_bytes=464 * MIB, processes=()),))] * 3]
OTHER, FREED = device(1, used_bytes=20 * GIB, processes=(TRAINING,)), device(1, used_bytes=464 * MIB, processes=())


@pytest.mark.parametrize(
    ("timeline", "spike", "graphs"),
    [
        pytest.param(
            readings((IDLE, gpu(900)), (BUSY, gpu(700)), *EXIT, (IDLE, gpu(900))), "unknown", "ok", id="exit under load"
        ),
        pytest.param(
            readings((NO_ANSWER, gpu(20_000)), (NO_ANSWER, gpu(700)), *EXIT), "unknown", "unknown", id="failed start"
        ),
        pytest.param(
            readings((BUSY, gpu(900)), (NO_ANSWER, gpu(900)), (BUSY, gpu(900))), "ok", "ok", id="one failed sample"
        ),
        pytest.param(
            readings((BUSY, gpu(900)), (NO_ANSWER, gpu(900)), (NO_ANSWER, gpu(1_500)), (BUSY, gpu(1_500))),
            "ok",
            "ok",
            id="an emptied cache",
        ),
        pytest.param(
            readings((BUSY, (*gpu(900), OTHER)), (NO_ANSWER, (*gpu(900), OTHER)), (NO_ANSWER, (*gpu(900), FREED))),
            "ok",
            "ok",
            id="another tenant's exit",
        ),
        pytest.param(readings((None, gpu(900))), "unknown", "unknown", id="no engine sample"),
    ],
)
def test_exits_get_their_status(timeline: Timeline, spike: str, graphs: str) -> None:
    """As long as the server's memory stays in use it lives; the cause of an exit is in its log."""
    assert (spike, graphs) == (activation(timeline).status, capture(timeline).status)


def dies(times: int, *, serves: bool = True) -> Timeline:
    """A server that ends so often with 120 MiB and more left, under load or while it starts, a minute each."""
    samples: list[Sample] = []
    for number in range(times):
        for second, free in enumerate((20 * GIB, 700 * MIB, (120 + 10 * number) * MIB, 23 * GIB)):
            answers = serves and second in (0, 1)
            samples.append(
                Sample(
                    at_seconds=60.0 * number + second,
                    engines=(BUSY,) if answers else None,
                    gaps=() if answers else (NO_ANSWER,),
                    devices=(device(2, used_bytes=24 * GIB - free, processes=(process(100, 20 * GIB - free // 2),)),),
                )
            )
    return Timeline(samples=tuple(samples))


@pytest.mark.parametrize(("times", "least"), [(1, 120), (3, 140), (11, 220)])
def test_deaths_while_serving_are_counted(times: int, least: int) -> None:
    """Its last words are not seen: how often it ended and what was free before are, of the newest."""
    (actual,) = spike_activation.judge(dies(times), ONE_GPU, DEFAULT_LIMITS)
    assert "unknown" == actual.status
    assert ("once" if times == 1 else f"{times} times") in actual.summary
    assert [
        ("exits_while_serving", times, "times", "engine"),
        ("gpu", 2, "index", "nvml"),
        ("min_free_before_exit", least * MIB, "bytes", "nvml"),
    ] == rows(actual)


def test_deaths_at_start_are_of_another_verdict() -> None:
    """A server that never answered says nothing of activations, and all of its starts are counted."""
    timeline = dies(3, serves=False)
    (spike,) = spike_activation.judge(timeline, ONE_GPU, DEFAULT_LIMITS)
    (capture,) = spike_graph_capture.judge(timeline, ONE_GPU, DEFAULT_LIMITS)

    # 23 GiB free after 140 MiB are 23,412 MiB that came free
    assert "unknown" == spike.status
    assert ("spike.graph_capture", "unknown") == (capture.id, capture.status)
    assert [
        ("failed_starts", 3, "starts", "engine"),
        ("gpu", 2, "index", "nvml"),
        ("min_free_before_exit", 140 * MIB, "bytes", "nvml"),
        ("freed_by_exit", 23_412 * MIB, "bytes", "nvml"),
    ] == rows(capture)


def test_an_engine_that_answers_has_its_graphs() -> None:
    """Deaths while serving are no failed starts, and no page at all has its reason."""
    (serving,) = spike_graph_capture.judge(dies(1), ONE_GPU, DEFAULT_LIMITS)
    assert Finding(id="spike.graph_capture", status="ok", summary=ANY_TEXT) == serving
    (silent,) = spike_graph_capture.judge(
        Timeline(samples=(Sample(at_seconds=1.0, gaps=(NO_ANSWER,)),)), ONE_GPU, DEFAULT_LIMITS
    )
    assert "unknown" == silent.status
