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
        # GIVEN
        before, free = (None if size is None else size * GIB for size in (before_gib, free_gib))

        # WHEN
        actual = finding(FOREIGN, account("profiling", before_bytes=before, free_bytes=free, process_bytes=None))

        # THEN
        assert "fault" == actual.status
        assert actual.summary.startswith(f"{size} of the device came free")

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
        ("process_bytes", "status", "who"),
        [(60 * GIB, "fault", "other processes hold"), (None, "suspect", "what neither torch nor a CUDA context")],
    )
    def test_listed_processes_are_a_fault_and_a_guess_is_a_suspect(
        self, process_bytes: int | None, status: str, who: str
    ) -> None:
        """Who holds it is known by the list alone."""
        actual = finding(FOREIGN, account(process_bytes=process_bytes, allocated_bytes=50 * GIB))
        assert status == actual.status
        assert who in actual.summary


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
        ("figures", "summary", "remedy"),
        [
            ({"kind": "limit", "allowed_bytes": None}, "refused by a limit that is set below", "Raise or remove"),
            ({"kind": "limit", "allowed_bytes": 40 * GIB}, "refused by a limit of 40.00 GiB that", "Raise or remove"),
            ({"kind": "absurd"}, "more than any device has", "Look at the shapes"),
            ({"kind": "library"}, "a library outside of torch", "0.0094 or more (805306368 bytes, 768 MiB,"),
            (
                {"kind": "library", "asked_bytes": None},  # a headroom of 300 MB
                "a library outside of torch",
                "0.0035 or more (300000000 bytes, 286 MiB,",
            ),
            ({"phase": "load"}, "the weights do not fit this device", "; or find 805306368 bytes (768 MiB) and what"),
            ({"phase": "load", "asked_bytes": None}, "the weights do not fit this device", "; or quantize them."),
            ({"phase": "kv_pool"}, "taken once at start leaves too little", "0.0094 or more (805306368 bytes"),
        ],
    )
    def test_remedy_is_that_of_what_failed(self, figures: dict[str, object], summary: str, remedy: str) -> None:
        """Each with the bytes that were short, where they are told."""
        # WHEN
        actual = finding(MISCONFIGURED, account(**figures))  # type: ignore[arg-type]

        # THEN
        assert summary in actual.summary
        assert remedy in (actual.remedy or "")

    @pytest.mark.parametrize(
        ("changes", "summary", "remedy"),
        [
            (
                {},
                "72.00 GiB claimed on GPU 0 (0.9 of 80.00 GiB), 60.00 GiB free at start",
                "Lower --gpu-memory-utilization by 12884901888 bytes or more: 0.9 -> 0.75.",
            ),
            (
                {"device": None, "fraction_ratio": None},
                "72.00 GiB claimed (0 of 80.00 GiB), 60.00 GiB free at start",
                "Lower --gpu-memory-utilization by 12884901888 bytes or more to 0.75.",
            ),
            (
                {"needed_bytes": None},
                "less of the device is free at start than the memory fraction claims",
                "Lower --gpu-memory-utilization: 0.9 -> 0.75.",
            ),
            (
                {"free_bytes": None},
                "less of the device is free at start than the memory fraction claims",
                "Lower --gpu-memory-utilization below free / total.",
            ),
            (
                {"total_bytes": None},
                "less of the device is free at start than the memory fraction claims",
                "Lower --gpu-memory-utilization below free / total.",
            ),
        ],
    )
    def test_refused_budget_is_told_by_its_figures(self, changes: dict[str, object], summary: str, remedy: str) -> None:
        """The claim, the device and what is free; the fraction that fits is 60 of 80 GiB."""
        # WHEN
        told = {"free_bytes": 60 * GIB, "needed_bytes": 72 * GIB, "fraction_ratio": 0.9, **changes}
        actual = finding(MISCONFIGURED, account("budget", **told))

        # THEN
        assert (summary, remedy) == (actual.summary, actual.remedy)

    @pytest.mark.parametrize(
        ("sizes_gib", "took", "remedy"),
        [
            # 77 of the 76 GiB that 0.95 of 80 GiB are: one is missing, 0.0125 of the device.
            ({"weights": 70, "activation": 4, "non_torch": 3}, "take 77.00 GiB", "by 0.0125 (1073741824 bytes,"),
            ({"consumed": 73, "activation": 4, "non_torch": 3}, "take 77.00 GiB", "by 0.0125 (1073741824 bytes,"),
            ({"weights": 78, "activation": None}, "take 78.00 GiB", "Lower --max-num-batched-tokens"),  # beyond 0.97
            ({"weights": 76}, "take 76.00 GiB", "Raise --gpu-memory-utilization, if other"),
            ({"weights": 60}, "take 60.00 GiB", "Raise --gpu-memory-utilization, if other"),
        ],
    )
    def test_pool_that_is_empty_is_made_up_for(self, sizes_gib: dict[str, int | None], took: str, remedy: str) -> None:
        """By what weights, activations and the rest take beyond the memory fraction, where that is told."""
        # WHEN
        actual = finding(MISCONFIGURED, account("blocks"), report=report_of(**sizes_gib))

        # THEN
        expected = f"nothing is left for the KV pool: weights, activations and the rest {took} of the 76.00 GiB it was "
        assert expected + "given" == actual.summary
        assert remedy in (actual.remedy or "")

    @pytest.mark.parametrize(
        ("figures", "report", "summary"),
        [
            ({}, None, "nothing is left for the KV pool"),
            ({}, report_of(), "nothing is left for the KV pool of the 76.00 GiB it was given"),
            (
                {"total_bytes": None},
                report_of(weights=70),
                "nothing is left for the KV pool: weights, activations and the rest take 70.00 GiB",
            ),
            (
                {},
                report_of(None, weights=70),
                "nothing is left for the KV pool: weights, activations and the rest take 70.00 GiB",
            ),
        ],
        ids=["no log", "no sizes", "no total", "no fraction"],
    )
    def test_empty_pool_without_its_figures_is_still_told(
        self, figures: dict[str, object], report: EngineReport | None, summary: str
    ) -> None:
        """What the log leaves out is left out."""
        actual = finding(MISCONFIGURED, account("blocks", **figures), report=report)
        assert ("fault", summary) == (actual.status, actual.summary)
        assert (actual.remedy or "").startswith("Raise --gpu-memory-utilization, if other processes leave")


class TestContext:
    """capacity.long_context."""

    @pytest.mark.parametrize(
        ("kind", "status"), [("torch", "fault"), ("driver", "fault"), ("masked", "fault"), ("library", "ok")]
    )
    def test_cache_that_grows_in_torch_is_too_long_a_context(self, kind: str, status: str) -> None:
        """Where no pool was taken, the requests in flight are what grew."""
        # WHEN
        actual = finding(CONTEXT, account(kind, phase="kv_growth"))

        # THEN
        assert status == actual.status
        assert ("the cache of the requests in flight needs more than there is" in actual.summary) == (status == "fault")

    def test_context_that_was_not_refused_is_no_finding(self) -> None:
        """A prefill that found no room says nothing of the pool."""
        assert "ok" == finding(CONTEXT, account(phase="prefill")).status

    @pytest.mark.parametrize(
        ("figures", "summary", "remedy"),
        [
            (
                {"needed_bytes": 16 * GIB, "available_bytes": None, "fitting_tokens": 98_304},
                "the longest request needs 16.00 GiB of KV cache, and the pool holds 98,304 tokens",
                "Lower --max-model-len: now -> 98304; or --kv-cache-dtype fp8 holds twice the tokens.",
            ),
            (
                {"available_bytes": 12 * GIB, "asked_tokens": 131_072},
                "a request of 131,072 tokens does not fit: the pool has 12.00 GiB and holds less",
                "Lower --max-model-len; or --kv-cache-dtype fp8 holds twice the tokens.",
            ),
            (
                {"needed_bytes": 16 * GIB, "available_bytes": 12 * GIB, "total_bytes": None},
                "the longest request needs 16.00 GiB of KV cache, and the pool has 12.00 GiB and holds less",
                (
                    "Lower --max-model-len; or raise --gpu-memory-utilization by 4.00 GiB / the device's total, if "
                    "that much is free; or --kv-cache-dtype fp8 holds twice the tokens; or split the model further: "
                    "4294967296 bytes (4.00 GiB) are missing."
                ),
            ),
            (
                {"needed_bytes": 12 * GIB, "available_bytes": 12 * GIB},  # equal as printed
                "the longest request needs 12.00 GiB of KV cache, and the pool has 12.00 GiB and holds less",
                "Lower --max-model-len; or --kv-cache-dtype fp8 holds twice the tokens.",
            ),
        ],
        ids=["no pool", "no need", "no device", "no difference"],
    )
    def test_refusal_is_told_by_what_it_tells(self, figures: dict[str, object], summary: str, remedy: str) -> None:
        """Each figure that the message has, and none that it has not."""
        actual = finding(CONTEXT, account("context", **figures))
        assert ("fault", summary, remedy) == (actual.status, actual.summary, actual.remedy)


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
        # GIVEN 10 + 50 + 4 + 1 GiB by the log
        report = report_of(weights=10, pool=50, activation=4, graphs_actual=1)
        held = 65 * GIB + least_bytes + beyond_bytes

        # WHEN
        actual = finding(
            "leak.device_torch",
            account(phase="decode", allocated_bytes=held, total_bytes=total_gib * GIB),
            report=report,
        )

        # THEN
        assert status == actual.status

    @pytest.mark.parametrize(
        ("over_bytes", "total_bytes", "status"),
        [(0, 100 * GIB, "ok"), (1, 100 * GIB, "suspect"), (0, None, "suspect")],
    )
    def test_peak_that_is_not_told_is_a_share_of_the_device(
        self, over_bytes: int, total_bytes: int | None, status: str
    ) -> None:
        """8 % of 100 GiB; of a device of unknown size none."""
        # GIVEN
        peak = round(0.08 * 100 * GIB)
        held = 60 * GIB + peak + round(0.02 * 100 * GIB) + over_bytes

        # WHEN
        one = account(phase="decode", allocated_bytes=held, total_bytes=total_bytes)
        actual = finding("leak.device_torch", one, report=report_of(weights=10, pool=50))

        # THEN
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
        # GIVEN
        sizes: dict[str, int | None] = {"weights": 10, "pool": 50, "activation": 4}
        report = report_of(**{name: None if name == missing else size for name, size in sizes.items()})
        one = account(phase="decode")
        if missing == "allocated":
            one = replace(one, shortage=replace(one.shortage, allocated_bytes=None))

        # THEN
        assert "unknown" == finding("leak.device_torch", one, report=report).status

    def test_host_memory_that_ran_out_is_told_with_its_size(self) -> None:
        """Where the kernel says how much the process held; of a device's failure nothing is said."""
        # WHEN
        sized, bare = (finding("leak.host", account("host", process_bytes=size)) for size in (6 * GIB, None))

        # THEN
        assert "the process, which held 6.00 GiB, ended for want" in sized.summary
        assert "the process ended for want" in bare.summary
        assert ("unknown", "unknown") == (sized.status, bare.status)
        assert () == judge_host(Case(accounts=(account(),)), DEFAULT_LIMITS) == judge_host(Case(), DEFAULT_LIMITS)
