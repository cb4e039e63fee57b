"""spike.activation and spike.graph_capture where the server exits, and why nothing is judged."""

from collections.abc import Sequence

import pytest

from kvdiag.diagnosis.rules import spike_activation, spike_graph_capture
from kvdiag.model import Device, Engine, Facts, Finding, Gap, Sample, Timeline
from tests.builders.answers import ANY_TEXT, only, rows
from tests.builders.values import GIB, GPU_LOST, MIB, NO_ANSWER, device, engine, process
from tests.builders.worlds import TRAINING

ONE_GPU = Facts(server_pids=(100,))
IDLE, BUSY = engine(), engine(running=4, usage=0.5)
Reading = tuple[Engine | Gap | None, tuple[Device, ...] | None]


def activation(timeline: Timeline, of: Facts = ONE_GPU) -> Finding:
    """The rule's one finding on a timeline."""
    return only(spike_activation.judge, timeline, of)


def capture(timeline: Timeline, of: Facts = ONE_GPU) -> Finding:
    """The rule's one finding on a timeline."""
    return only(spike_graph_capture.judge, timeline, of)


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


def gpu(free_mib: int) -> tuple[Device, ...]:
    """A GPU of 24 GiB with so much free, of which the server holds what the driver does not."""
    used = 24 * GIB - free_mib * MIB
    return (device(used_bytes=used, processes=(process(100, used - 464 * MIB),)),)


def test_why_no_device_is_judged_is_said() -> None:
    """The reason is a missing load, missing device memory, the gap's own reason, or a missing GPU."""
    busy, lost = (BUSY, None), (GPU_LOST, None)
    seen: Sequence[list[Reading]] = ([(IDLE, gpu(1_000))], [busy], [busy, lost], [])
    told = [activation(readings(*each)).summary for each in seen]
    whys = ["no request", "no device memory", GPU_LOST.reason, "no GPU"]
    assert all(why in one for why, one in zip(whys, told, strict=True))


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
    """The evidence has the number of exits, and the least free memory before the newest one."""
    actual = activation(dies(times))
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
    spike, graphs = activation(timeline), capture(timeline)

    # 23 GiB free after 140 MiB are 23,412 MiB that came free
    assert "unknown" == spike.status
    assert ("spike.graph_capture", "unknown") == (graphs.id, graphs.status)
    assert [
        ("failed_starts", 3, "starts", "engine"),
        ("gpu", 2, "index", "nvml"),
        ("min_free_before_exit", 140 * MIB, "bytes", "nvml"),
        ("freed_by_exit", 23_412 * MIB, "bytes", "nvml"),
    ] == rows(graphs)


def test_an_engine_that_answers_has_its_graphs() -> None:
    """Deaths while serving are no failed starts, and no page at all has its reason."""
    assert Finding(id="spike.graph_capture", status="ok", summary=ANY_TEXT) == capture(dies(1))
    assert "unknown" == capture(readings((NO_ANSWER, None))).status
