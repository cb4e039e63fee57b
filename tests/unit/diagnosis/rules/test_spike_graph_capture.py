"""spike.graph_capture and spike.activation where a server ends: how often, and what was free before."""

from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules import spike_activation, spike_graph_capture
from kvdiag.model import Facts, Finding, Sample, Timeline
from tests.builders.answers import ANY_TEXT, rows
from tests.builders.values import GIB, MIB, NO_ANSWER, device, engine, process

SERVER = Facts(server_pids=(100,))
BUSY = engine(running=4, usage=0.5)


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


@pytest.mark.parametrize(("times", "told", "least"), [(1, "once", 120), (3, "3 times", 140), (11, "11 times", 220)])
def test_deaths_while_serving_are_counted(times: int, told: str, least: int) -> None:
    """Its last words are not seen: how often it ended and what was free before are, of the newest."""
    (actual,) = spike_activation.judge(dies(times), SERVER, DEFAULT_LIMITS)
    assert "unknown" == actual.status
    assert [
        ("exits_while_serving", times, "times", "engine"),
        ("gpu", 2, "index", "nvml"),
        ("min_free_before_exit", least * MIB, "bytes", "nvml"),
    ] == rows(actual)


def test_deaths_at_start_are_of_another_verdict() -> None:
    """A server that never answered says nothing of activations, and all of its starts are counted."""
    timeline = dies(3, serves=False)
    (spike,) = spike_activation.judge(timeline, SERVER, DEFAULT_LIMITS)
    (capture,) = spike_graph_capture.judge(timeline, SERVER, DEFAULT_LIMITS)

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
    (serving,) = spike_graph_capture.judge(dies(1), SERVER, DEFAULT_LIMITS)
    assert Finding(id="spike.graph_capture", status="ok", summary=ANY_TEXT) == serving
    (silent,) = spike_graph_capture.judge(
        Timeline(samples=(Sample(at_seconds=1.0, gaps=(NO_ANSWER,)),)), SERVER, DEFAULT_LIMITS
    )
    assert "unknown" == silent.status
