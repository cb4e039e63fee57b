from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.postmortem import Case
from kvdiag.diagnosis.postmortem.transients import judge_activation
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.model import Diagnosis, Facts, Finding
from kvdiag.oom.account import Work
from tests.builders.answers import ANY_TEXT
from tests.builders.values import allocator
from tests.unit.diagnosis.postmortem.cases import GIB, MIB, account, finding

ACTIVATION, CAPTURE, HOLES = "spike.activation", "spike.graph_capture", "fragmentation.allocator"
OTHERS: dict[str, Any] = {"process_bytes": 60 * GIB, "allocated_bytes": 50 * GIB}
"""Listed processes of others that hold 19.75 GiB."""


class TestCapture:
    """spike.graph_capture."""

    @pytest.mark.parametrize(
        ("kind", "phase", "status"),
        [
            ("torch", "graph_capture", "fault"),
            ("workspace", "graph_capture", "fault"),
            ("capture", "graph_capture", "unknown"),
            ("host", "graph_capture", "ok"),
            ("torch", "prefill", "ok"),
            ("torch", None, "unknown"),
        ],
    )
    def test_memory_that_ran_out_in_a_capture_is_its_spike(self, kind: str, phase: str | None, status: str) -> None:
        """Neither a capture that another error broke, nor memory that ran out at another time."""
        assert status == finding(CAPTURE, account(kind, phase=phase)).status

    def test_room_that_the_engine_had_kept_is_told(self) -> None:
        """Its own estimate, where the log has it, and the settings that make the graphs smaller."""
        rank = RankReport(name="", graphs_estimate=PrintedSize(nominal_bytes=768 * MIB))
        one = account(phase="graph_capture", max_num_seqs=512)

        finding(CAPTURE, one, report=EngineReport(ranks=(rank,)))
        untold = finding(CAPTURE, one, report=EngineReport(ranks=(replace(rank, graphs_estimate=None),)))

        assert "had kept" not in untold.summary

    def test_without_bytes_nothing_is_said_to_be_the_least(self) -> None:
        """A masked failure has no shortage that could be a lower bound."""
        actual = finding(CAPTURE, account(phase="graph_capture", asked_bytes=None))
        assert "at least" not in (actual.remedy or "at least")


class TestActivation:
    """spike.activation."""

    @pytest.mark.parametrize("phase", ["profile", "warmup", "prefill", "decode", "request", "sampler", "wake"])
    @pytest.mark.parametrize(("kind", "status"), [("torch", "fault"), ("driver", "fault"), ("library", "ok")])
    def test_any_step_may_ask_for_too_much(self, kind: str, phase: str, status: str) -> None:
        """From the profile run to the waking; a library's own memory is none of a step's."""
        assert status == finding(ACTIVATION, account(kind, phase=phase)).status

    @pytest.mark.parametrize(
        "phase",
        [
            "load",
            "kv_pool",
            "startup",
            "graph_capture",
            "kv_growth",
        ],
    )
    def test_what_is_no_step_is_named(self, phase: str) -> None:
        """When it was instead."""
        actual = finding(ACTIVATION, account(phase=phase))
        assert "ok" == actual.status

    @pytest.mark.parametrize(
        ("kind", "phase", "asked_bytes", "status"),
        [
            ("masked", None, None, "unknown"),
            ("masked", "prefill", None, "fault"),
            ("warmup", "warmup", None, "fault"),
            ("workspace", "prefill", None, "fault"),
            ("torch", None, GIB, "fault"),
            ("async", None, GIB, "unknown"),
            ("async", "prefill", GIB, "fault"),
            ("context", "prefill", GIB, "ok"),
        ],
    )
    def test_either_a_size_or_a_time_has_to_be_told(
        self, kind: str, phase: str | None, asked_bytes: int | None, status: str
    ) -> None:
        """What asks for so much at an unknown time is a spike; what cudaMallocAsync keeps may be as well."""
        assert status == finding(ACTIVATION, account(kind, phase=phase, asked_bytes=asked_bytes)).status

    @pytest.mark.parametrize(
        ("phase", "parts", "told"),
        [
            pytest.param("prefill", {}, None, id="told"),
            pytest.param(None, {}, "; add the engine's log (--log)", id="no log"),
            pytest.param(None, {"has_log": True}, "; add the log from the engine's start", id="a log's end"),
            pytest.param(None, {"has_log": True, "report": EngineReport()}, "", id="a log from its start"),
        ],
    )
    def test_time_that_is_not_told_is_asked_for(
        self, phase: str | None, parts: dict[str, Any], told: str | None
    ) -> None:
        """A log from the start would tell whether it was a request or the start; one that is given is not asked for."""
        summary = finding(ACTIVATION, account(phase=phase), **parts).summary

        _, found, missing = summary.partition("while serving is unknown")
        assert told == (missing if found else None)

    @pytest.mark.parametrize(
        ("free_bytes", "status", "another_limit"),
        [
            (GIB - 1, "fault", False),
            (GIB, "suspect", False),
            (GIB + 2 * MIB - 1, "suspect", False),
            (GIB + 2 * MIB, "suspect", True),
            (None, "fault", False),
        ],
    )
    def test_as_much_free_as_was_asked_for_is_only_suspect(
        self, free_bytes: int | None, status: str, another_limit: bool
    ) -> None:
        """A segment of 2 MiB more than that, and the device was not full: another limit stood against it."""
        actual = finding(ACTIVATION, account(phase="prefill", free_bytes=free_bytes, unallocated_bytes=0))

        assert status == actual.status
        assert another_limit == ("another limit" in actual.summary)

    def test_silent_where_others_hold_the_room(self) -> None:
        """Without them there was room for the step."""
        actual = finding(ACTIVATION, account(phase="prefill", **OTHERS))
        assert "ok" == actual.status

    @pytest.mark.parametrize(
        ("verdict", "before", "status"),
        [
            ("leak.device_torch", "fault", "suspect"),
            ("leak.device_non_torch", "suspect", "suspect"),
            ("leak.device_torch", "ok", "fault"),
            ("leak.device_torch", "unknown", "fault"),
            ("leak.host", "fault", "fault"),
            ("baseline.duplicate_model", "fault", "ok"),
            ("baseline.duplicate_model", "suspect", "ok"),
            ("baseline.duplicate_model", "ok", "fault"),
            ("baseline.duplicate_model", "unknown", "fault"),
        ],
    )
    def test_what_took_the_room_before_it_is_the_cause(self, verdict: str, before: str, status: str) -> None:
        """A leak or a second copy that the trace shows; not one that it does not show, nor the host's."""
        found = Finding(id=verdict, status=before, summary=ANY_TEXT)  # type: ignore[arg-type]
        case = Case(accounts=(account(phase="prefill"),), before=BEFORE)
        case = replace(case, before=replace(BEFORE, findings=(found,)))

        (actual,) = judge_activation(case, DEFAULT_LIMITS)

        assert status == actual.status

    @pytest.mark.parametrize(
        "figures",
        [
            {"phase": "sampler"},
            {"phase": "warmup", "max_num_seqs": None},
            {"phase": "warmup", "max_num_seqs": None, "requests": 1024},
            {"phase": "decode"},
            {"phase": "logprobs"},
            {"phase": "encoder"},
            {"phase": "prefill"},
            {"phase": "profile"},
            {"kind": "workspace", "phase": "prefill"},
        ],
    )
    def test_setting_is_that_of_the_step(self, figures: dict[str, object]) -> None:
        """What the failed allocation grows with, scaled by the quarter of it that was free."""
        report = EngineReport(settings=EngineSettings(max_num_batched_tokens=8192))

        one = account(**{"max_num_seqs": 512, **figures})  # type: ignore[arg-type]
        finding(ACTIVATION, one, report=report)

    def test_step_that_failed_stands_in_for_the_largest(self) -> None:
        """Where the log does not say how many tokens a batch may have, the batch that failed had so many."""
        step = Work(scheduled_tokens=6144, requests=3)

        finding(ACTIVATION, account(phase="prefill", work=step))
        finding(
            ACTIVATION,
            account(phase="prefill", work=step),
            report=EngineReport(settings=EngineSettings(max_num_batched_tokens=8192)),
        )
        finding(ACTIVATION, account(phase="profile"))


BEFORE = Diagnosis(
    worst="fault",
    facts=Facts(),
    start_seconds=0.0,
    end_seconds=1.0,
    samples=1,
    steps=(),
    findings=(),
    ledger=(),
    gaps=(),
)


class TestHoles:
    """fragmentation.allocator."""

    @pytest.mark.parametrize(
        ("kind", "status"),
        [("torch", "fault"), ("library", "ok"), ("workspace", "ok"), ("context", "ok"), ("driver", "unknown")],
    )
    def test_only_torchs_allocations_find_holes(self, kind: str, status: str) -> None:
        """A library does not look for room between torch's blocks; of the driver's failure nothing is known."""
        assert status == finding(HOLES, account(kind, unallocated_bytes=2 * GIB)).status

    @pytest.mark.parametrize(("on", "advised"), [(None, True), (False, True), (True, False)])
    def test_segments_that_expand_are_advised_where_they_are_not_on(self, on: bool | None, advised: bool) -> None:
        """Where the black box says that they are, that setting is no remedy."""
        one = account(unallocated_bytes=2 * GIB, allocator=None if on is None else allocator(expandable_segments=on))

        actual = finding(HOLES, one)

        assert advised == ("expandable_segments:True" in (actual.remedy or ""))

    @pytest.mark.parametrize(
        ("figures", "status"),
        [
            ({"free_bytes": 0, "allocated_bytes": 40 * GIB}, "unknown"),  # just half is taken by others than torch
            ({"free_bytes": 0, "allocated_bytes": 40 * GIB - 1}, "suspect"),
            ({"free_bytes": 1, "allocated_bytes": 40 * GIB - 1}, "unknown"),
            ({"free_bytes": None, "allocated_bytes": GIB}, "unknown"),
            ({"total_bytes": None, "allocated_bytes": GIB}, "unknown"),
            ({"allocated_bytes": None}, "unknown"),
        ],
    )
    def test_driver_pool_that_keeps_more_than_half_is_suspect(self, figures: dict[str, object], status: str) -> None:
        """What cudaMallocAsync keeps is what is taken and not torch's; without all three figures it is not known."""
        actual = finding(HOLES, account("async", **figures))

        assert status == actual.status
