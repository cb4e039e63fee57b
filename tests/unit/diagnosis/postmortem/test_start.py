"""What is taken, refused or missing before the first request: baseline.*, capacity.long_context, leak.*."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.postmortem import Case
from kvdiag.diagnosis.postmortem.prior_growth import judge_host, judge_torch
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from tests.unit.diagnosis.postmortem.cases import GIB, account, finding

FOREIGN, MISCONFIGURED, CONTEXT = "baseline.foreign_memory", "baseline.misconfigured", "capacity.long_context"


def report_of(fraction: float | None = 0.95, **sizes_gib: int | None) -> EngineReport:
    """A log of the start in which one rank tells its sizes."""
    told = {name: None if size is None else PrintedSize(nominal_bytes=size * GIB) for name, size in sizes_gib.items()}
    rank = RankReport(name="Worker_TP0", **told)  # type: ignore[arg-type]
    return EngineReport(settings=EngineSettings(memory_fraction_ratio=fraction), ranks=(rank,))


class TestForeign:
    """baseline.foreign_memory."""

    @pytest.mark.parametrize(
        ("before_gib", "free_gib", "size"),
        [(10, 13, "3.00 GiB"), (10, 10, "memory"), (13, 10, "memory"), (None, 13, "memory"), (10, None, "memory")],
    )
    def test_memory_that_came_free_was_anothers(self, before_gib: int | None, free_gib: int | None, size: str) -> None:
        """The engine stops where free memory grows while it measures; by how much is told where both figures are."""
        before, free = (None if size is None else size * GIB for size in (before_gib, free_gib))

        actual = finding(FOREIGN, account("profiling", before_bytes=before, free_bytes=free, process_bytes=None))

        assert "fault" == actual.status

    @pytest.mark.parametrize(
        ("kind", "process_bytes", "status"),
        [
            ("torch", 79 * GIB, "ok"),  # 768 MiB of others are less than a fiftieth of the device
            ("torch", None, "unknown"),
            ("masked", None, "unknown"),
            ("blocks", None, "ok"),
            ("context", None, "ok"),
        ],
    )
    def test_healthy_only_where_the_others_are_known(self, kind: str, process_bytes: int | None, status: str) -> None:
        """A full device whose processes nobody lists may be full of others'; a refusal was no full device."""
        actual = finding(FOREIGN, account(kind, process_bytes=process_bytes, allocated_bytes=77 * GIB))
        assert status == actual.status

    @pytest.mark.parametrize(
        ("process_bytes", "status"),
        [(60 * GIB, "fault"), (None, "suspect")],
    )
    def test_listed_processes_are_a_fault_and_a_guess_is_a_suspect(
        self, process_bytes: int | None, status: str
    ) -> None:
        """Who holds it is known by the list alone."""
        actual = finding(FOREIGN, account(process_bytes=process_bytes, allocated_bytes=50 * GIB))
        assert status == actual.status


class TestMisconfigured:
    """baseline.misconfigured."""

    @pytest.mark.parametrize(
        ("kind", "phase", "status"),
        [
            ("limit", "prefill", "fault"),
            ("absurd", "prefill", "fault"),
            ("library", "prefill", "fault"),
            ("library", "graph_capture", "ok"),
            ("torch", "load", "fault"),
            ("torch", "kv_pool", "fault"),
            ("torch", "startup", "fault"),
            ("torch", "prefill", "ok"),
            ("torch", None, "unknown"),
            ("context", None, "ok"),
            ("host", "load", "ok"),
            ("blocks", None, "fault"),
        ],
    )
    def test_what_is_taken_once_at_start_is_the_settings_fault(self, kind: str, phase: str | None, status: str) -> None:
        """Before the first request, or against a limit, or beside too small a headroom."""
        assert status == finding(MISCONFIGURED, account(kind, phase=phase)).status

    @pytest.mark.parametrize(("process_bytes", "status"), [(60 * GIB, "ok"), (None, "fault")])
    def test_silent_where_others_are_known_to_hold_the_room(self, process_bytes: int | None, status: str) -> None:
        """A guess of others' memory acquits no setting."""
        others = account(phase="startup", process_bytes=process_bytes, allocated_bytes=50 * GIB)
        assert status == finding(MISCONFIGURED, others).status

    @pytest.mark.parametrize(
        "figures",
        [
            {"kind": "limit", "allowed_bytes": None},
            {"kind": "limit", "allowed_bytes": 40 * GIB},
            {"kind": "absurd"},
            {"kind": "library"},
            {"kind": "library", "asked_bytes": None},
            {"phase": "load"},
            {"phase": "load", "asked_bytes": None},
            {"phase": "kv_pool"},
        ],
    )
    def test_remedy_is_that_of_what_failed(self, figures: dict[str, object]) -> None:
        """Each with the bytes that were short, where they are told."""
        finding(MISCONFIGURED, account(**figures))  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"device": None, "fraction_ratio": None},
            {"needed_bytes": None},
            {"free_bytes": None},
            {"total_bytes": None},
        ],
    )
    def test_refused_budget_is_told_by_its_figures(self, changes: dict[str, object]) -> None:
        """The claim, the device and what is free; the fraction that fits is 60 of 80 GiB."""
        told = {"free_bytes": 60 * GIB, "needed_bytes": 72 * GIB, "fraction_ratio": 0.9, **changes}
        finding(MISCONFIGURED, account("budget", **told))

    @pytest.mark.parametrize(
        ("sizes_gib", "took"),
        [
            # 77 of the 76 GiB that 0.95 of 80 GiB are: one is missing, 0.0125 of the device.
            ({"weights": 70, "activation": 4, "non_torch": 3}, "use 77.0 GiB"),
            ({"consumed": 73, "activation": 4, "non_torch": 3}, "use 77.0 GiB"),
            ({"weights": 78, "activation": None}, "use 78.0 GiB"),  # beyond 0.97
            ({"weights": 76}, "use 76.0 GiB"),
            ({"weights": 60}, "use 60.0 GiB"),
        ],
    )
    def test_pool_that_is_empty_is_made_up_for(self, sizes_gib: dict[str, int | None], took: str) -> None:
        """By what weights, activations and the rest take beyond the memory fraction, where that is told."""
        actual = finding(MISCONFIGURED, account("blocks"), report=report_of(**sizes_gib))

        assert took in actual.summary

    @pytest.mark.parametrize(
        ("figures", "report"),
        [
            ({}, None),
            ({}, report_of()),
            ({"total_bytes": None}, report_of(weights=70)),
            ({}, report_of(None, weights=70)),
        ],
        ids=["no log", "no sizes", "no total", "no fraction"],
    )
    def test_empty_pool_without_its_figures_is_still_told(
        self, figures: dict[str, object], report: EngineReport | None
    ) -> None:
        """What the log leaves out is left out."""
        actual = finding(MISCONFIGURED, account("blocks", **figures), report=report)
        assert "fault" == actual.status


class TestContext:
    """capacity.long_context."""

    @pytest.mark.parametrize(
        ("kind", "status"), [("torch", "fault"), ("driver", "fault"), ("masked", "fault"), ("library", "ok")]
    )
    def test_cache_that_grows_in_torch_is_too_long_a_context(self, kind: str, status: str) -> None:
        """Where no pool was taken, the requests in flight are what grew."""
        actual = finding(CONTEXT, account(kind, phase="kv_growth"))

        assert status == actual.status

    def test_context_that_was_not_refused_is_no_finding(self) -> None:
        """A prefill that found no room says nothing of the pool."""
        assert "ok" == finding(CONTEXT, account(phase="prefill")).status

    @pytest.mark.parametrize(
        "figures",
        [
            {"needed_bytes": 16 * GIB, "available_bytes": None, "fitting_tokens": 98_304},
            {"available_bytes": 12 * GIB, "asked_tokens": 131_072},
            {"needed_bytes": 16 * GIB, "available_bytes": 12 * GIB, "total_bytes": None},
            {"needed_bytes": 12 * GIB, "available_bytes": 12 * GIB},
        ],
        ids=["no pool", "no need", "no device", "no difference"],
    )
    def test_refusal_is_told_by_what_it_tells(self, figures: dict[str, object]) -> None:
        """Each figure that the message has, and none that it has not."""
        actual = finding(CONTEXT, account("context", **figures))
        assert "fault" == actual.status


class TestLeaks:
    """leak.device_torch and leak.host."""

    @pytest.mark.parametrize(
        ("total_gib", "least_bytes"),
        [(80, 2 * 10**9), (200, 4_294_967_296)],  # a fiftieth of 200 GiB
    )
    @pytest.mark.parametrize(("beyond_bytes", "status"), [(0, "ok"), (1, "suspect")])
    def test_suspect_from_two_gigabytes_and_a_fiftieth(
        self, total_gib: int, least_bytes: int, beyond_bytes: int, status: str
    ) -> None:
        """Weights, pool, peak and graphs of the start are planned; what is beyond grew, or is of this step."""
        # 10 + 50 + 4 + 1 GiB by the log
        report = report_of(weights=10, pool=50, activation=4, graphs_actual=1)
        held = 65 * GIB + least_bytes + beyond_bytes

        actual = finding(
            "leak.device_torch",
            account(phase="decode", allocated_bytes=held, total_bytes=total_gib * GIB),
            report=report,
        )

        assert status == actual.status

    @pytest.mark.parametrize(
        ("over_bytes", "total_bytes", "status"),
        [(0, 100 * GIB, "ok"), (1, 100 * GIB, "suspect"), (0, None, "suspect")],
    )
    def test_peak_that_is_not_told_is_a_share_of_the_device(
        self, over_bytes: int, total_bytes: int | None, status: str
    ) -> None:
        """8 % of 100 GiB; of a device of unknown size none."""
        peak = round(0.08 * 100 * GIB)
        held = 60 * GIB + peak + round(0.02 * 100 * GIB) + over_bytes

        one = account(phase="decode", allocated_bytes=held, total_bytes=total_bytes)
        actual = finding("leak.device_torch", one, report=report_of(weights=10, pool=50))

        assert status == actual.status

    @pytest.mark.parametrize(
        ("kind", "phase", "expected"),
        [
            ("torch", None, ["unknown"]),
            ("torch", "prefill", ["unknown"]),
            ("torch", "load", []),
            ("budget", None, []),
            ("host", "prefill", []),
        ],
    )
    def test_growth_is_only_asked_for_where_it_served(self, kind: str, phase: str | None, expected: list[str]) -> None:
        """Nothing can have grown before the first request; one moment without the start's figures shows none."""
        case = Case(accounts=(account(kind, phase=phase),))
        assert expected == [one.status for one in judge_torch(case, DEFAULT_LIMITS)]
        assert () == judge_torch(Case(), DEFAULT_LIMITS)

    @pytest.mark.parametrize("missing", ["weights", "pool", "allocated"])
    def test_unknown_where_a_part_of_the_sum_is_missing(self, missing: str) -> None:
        """Of the start's figures weights and pool, and what torch held."""
        sizes: dict[str, int | None] = {"weights": 10, "pool": 50, "activation": 4}
        report = report_of(**{name: None if name == missing else size for name, size in sizes.items()})
        one = account(phase="decode")
        if missing == "allocated":
            one = replace(one, shortage=replace(one.shortage, allocated_bytes=None))

        assert "unknown" == finding("leak.device_torch", one, report=report).status

    def test_host_memory_that_ran_out_is_told_with_its_size(self) -> None:
        """Where the kernel says how much the process held; of a device's failure nothing is said."""
        sized, bare = (finding("leak.host", account("host", process_bytes=size)) for size in (6 * GIB, None))

        assert ("unknown", "unknown") == (sized.status, bare.status)
        assert () == judge_host(Case(accounts=(account(),)), DEFAULT_LIMITS) == judge_host(Case(), DEFAULT_LIMITS)
