"""spike.activation and spike.graph_capture by what a timeline shows: torch's refusals, deaths, devices under load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules import spike_activation, spike_graph_capture
from kvdiag.model import Allocator, Device, Engine, Facts, FailedAllocation, Finding, Gap, Process, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence
from tests.builders.runs import run
from tests.builders.values import GIB, GPU_LOST, MIB, NO_ANSWER, allocator, device, engine, process, split
from tests.builders.worlds import TRAINING, World, facts

ONE_GPU = Facts(server_pids=(100,))
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


class TestDevices:
    """A device under load, where no agent tells."""

    def test_next_to_nothing_free_while_requests_run_is_suspect(self) -> None:
        """A transient of 1.5 GiB leaves 120 MiB: a larger one does not fit."""
        actual = activation(under_load(1_656, 900, 1_656, 120, 1_656))
        assert "suspect" == actual.status
        assert {"free_before_load": 1_656 * MIB, "taken_by_other_processes": 0}.items() <= evidence(actual).items()

    @pytest.mark.parametrize(
        ("free", "status"),
        [
            ((1_656, 900, 1_656), "ok"),
            ((120, 110, 120), "ok"),
            ((1_656, 120, 130), "unknown"),
            ((1_656, 120), "unknown"),
        ],
        ids=["room enough", "full at idle as well", "does not come back", "idle not seen after"],
    )
    def test_less_than_a_spike(self, free: tuple[int, ...], status: str) -> None:
        """Room at the fullest moment is no spike; what does not come back may be a leak as well."""
        assert status == activation(under_load(*free)).status

    def test_a_server_that_was_never_idle(self) -> None:
        """Room at the fullest moment is enough to tell; the lack of it needs an idle reading to compare with."""
        assert ["ok", "unknown"] == [activation(readings(*[(BUSY, gpu(free))] * 3)).status for free in (1_000, 100)]

    def test_what_a_neighbour_took_is_no_spike(self) -> None:
        """A job that comes and goes beside the server takes the headroom; the server's own bytes stay as they were."""
        job = process(7, 1_536 * MIB, "job")
        timeline = readings((IDLE, gpu(1_656)), (BUSY, gpu(120, job)), (IDLE, gpu(1_656)))
        actual = activation(timeline)
        assert "ok" == actual.status

    @pytest.mark.parametrize(
        ("timeline", "reason"),
        [
            (readings((BUSY, None)), ANY_TEXT),
            (readings((BUSY, (device(), device(1)))), ANY_TEXT),
            (readings((GPU_LOST, None)), GPU_LOST.reason),
        ],
        ids=["no device", "two GPUs, whose is not known", "GPU lost"],
    )
    def test_unknown_without_a_device_of_its_own(self, timeline: Timeline, reason: str) -> None:
        """What cannot be seen is named."""

    def test_a_healthy_run_is_silent(self) -> None:
        """Four steps on a GPU with room say nothing of a spike, nor of graphs."""
        assert ["ok", "ok"] == [rule(run(), facts(World())).status for rule in (activation, capture)]


FULL = split(live_bytes=8 * GIB, releasable_bytes=0, largest_free_block_bytes=0, fits=False)
FAILED = FailedAllocation(age_seconds=20.0, asked_bytes=3 * GIB, free_bytes=512 * MIB, split=FULL)
REFUSED = allocator(ooms_total=1, failure=FAILED, title="VLLM::Worker_TP0")


def by_torch(*told: Allocator) -> Finding:
    """The rule's one finding on what one process told."""
    samples = tuple(Sample(at_seconds=15.0 * number, allocators=(one,)) for number, one in enumerate(told))
    return activation(Timeline(samples=samples))


class TestTorch:
    """What torch had to refuse."""

    def test_a_step_that_asked_for_more_than_there_was_is_a_fault(self) -> None:
        """Torch counts one allocation more that it gave up on, and its black box has the figures."""
        actual = by_torch(allocator(), REFUSED)
        assert "fault" == actual.status
        assert {"failed_allocations": 1, "requested": 3 * GIB}.items() <= evidence(actual).items()

    @pytest.mark.parametrize(
        ("refused", "status"),
        [
            (replace(REFUSED, failure=None), "suspect"),
            (replace(REFUSED, failure=replace(FAILED, free_bytes=4 * GIB, split=None)), "suspect"),
            (
                replace(
                    REFUSED,
                    failure=replace(FAILED, split=split(live_bytes=4 * GIB, releasable_bytes=0, stranded_bytes=4 * GIB,
                                                        largest_free_block_bytes=64 * MIB)),
                ),
                "ok",
            ),
            (replace(REFUSED, allocated_bytes=9 * GIB, reserved_bytes=9 * GIB), "ok"),
        ],
        ids=["size not told", "enough was free", "room in pieces", "growth took the room"],
    )  # fmt: skip
    def test_what_is_less_than_sure(self, refused: Allocator, status: str) -> None:
        """Holes and leaks end in the same refusal: their own verdicts have them."""
        assert status == by_torch(allocator(), refused).status

    def test_a_refusal_before_the_first_reading_is_none(self) -> None:
        """What torch had given up on before anybody looked is not counted."""
        assert "unknown" == by_torch(REFUSED, REFUSED).status


DEAD: Sequence[Reading] = [(NO_ANSWER, gpu(120)), *[(NO_ANSWER, (device(used_bytes=464 * MIB, processes=()),))] * 3]


class TestDeaths:
    """A server that ended, without a word."""

    def test_a_death_under_load_is_unknown_with_what_would_decide(self) -> None:
        """It served, it stopped to answer, its memory came free: of what it died its log tells."""
        actual = activation(readings((IDLE, gpu(900)), (BUSY, gpu(700)), *DEAD, (IDLE, gpu(900))))
        assert "unknown" == actual.status

    def test_a_start_that_ended_is_unknown_with_what_would_decide(self) -> None:
        """Its page never answered, and its memory came free with 120 MiB left before."""
        actual = capture(readings((NO_ANSWER, gpu(20_000)), (NO_ANSWER, gpu(700)), *DEAD))
        assert "unknown" == actual.status
        assert 1 == evidence(actual)["failed_starts"]

    @pytest.mark.parametrize(
        "timeline",
        [
            readings((BUSY, gpu(900)), (NO_ANSWER, gpu(900)), (BUSY, gpu(900))),
            readings((BUSY, gpu(900)), (NO_ANSWER, gpu(900)), (NO_ANSWER, gpu(1_500)), (BUSY, gpu(1_500))),
        ],
        ids=["a page that failed once", "a cache that was emptied"],
    )
    def test_a_page_that_fails_is_no_death(self, timeline: Timeline) -> None:
        """As long as the server's memory stays where it is, it lives."""
        assert ["ok", "ok"] == [activation(timeline).status, capture(timeline).status]

    def test_no_start_was_seen_without_an_engine(self) -> None:
        """A GPU alone says nothing of graphs."""

    def test_somebody_elses_memory_that_comes_free_is_no_death(self) -> None:
        """On a host of two GPUs the job on the other one ends while the server's page fails."""
        job = device(1, used_bytes=20 * GIB, processes=(TRAINING,))
        gone = device(1, used_bytes=464 * MIB, processes=())
        told: list[Reading] = [(BUSY, (*gpu(900), job)), (NO_ANSWER, (*gpu(900), job)), (NO_ANSWER, (*gpu(900), gone))]
        assert "ok" == activation(readings(*told)).status
