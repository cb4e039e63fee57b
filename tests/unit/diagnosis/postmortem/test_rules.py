"""Each rule of a post-mortem: when it fires, is silent or unknown, and which setting its remedy changes to what."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.postmortem import RULES, UNKNOWN_WITHOUT_FAILURE, Case, postmortem
from kvdiag.diagnosis.postmortem.transients import judge_activation
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.model import Diagnosis, Facts, Finding
from kvdiag.oom.account import Work
from tests.builders.answers import ANY_TEXT
from tests.builders.runs import run
from tests.builders.values import allocator
from tests.builders.worlds import World
from tests.builders.worlds import facts as facts_of
from tests.unit.diagnosis.postmortem.cases import GIB, MIB, account, case_of, finding, split

ACTIVATION, CAPTURE, HOLES = "spike.activation", "spike.graph_capture", "fragmentation.allocator"
FOREIGN, MISCONFIGURED, CONTEXT = "baseline.foreign_memory", "baseline.misconfigured", "capacity.long_context"
TORCH, HOST = "leak.device_torch", "leak.host"

OTHERS: dict[str, Any] = {"process_bytes": 60 * GIB, "allocated_bytes": 58 * GIB}
"""Listed processes of others that use 19.75 GiB."""

ENOUGH_UNUSED: dict[str, Any] = {"unallocated_bytes": 2 * GIB, "allocated_bytes": 75 * GIB}

FRACTION, MODEL_LEN = "--gpu-memory-utilization", "--max-model-len"
BATCHED, SEQUENCES = "--max-num-batched-tokens", "--max-num-seqs"


def report_of(fraction: float | None = 0.95, **sizes_gib: int | None) -> EngineReport:
    """A log of the start in which one rank prints its sizes."""
    sizes = {name: None if size is None else PrintedSize(nominal_bytes=size * GIB) for name, size in sizes_gib.items()}
    rank = RankReport(name="Worker_TP0", **sizes)  # type: ignore[arg-type]
    return EngineReport(
        settings=EngineSettings(memory_fraction_ratio=fraction, max_num_batched_tokens=8192), ranks=(rank,)
    )


REPORT = report_of(weights=10, pool=60, activation=4, total=80)


def changes(one: Finding) -> dict[str, float]:
    """The new value of every setting that a remedy changes from one value to another."""
    found = re.findall(r"(--[a-z-]+)[^;>]*?: (?:[\d.]+|now) -> ([\d.]*\d)", one.remedy or "")
    return {flag: float(value) for flag, value in found}


def status_of_text(text: str, verdict: str) -> tuple[str, Finding]:
    """Worst status of a text's diagnosis, and its finding of one verdict."""
    diagnosis = postmortem(case_of(text))
    return diagnosis.worst, next(one for one in diagnosis.findings if one.id == verdict)


def test_without_a_failure_nothing_is_concluded() -> None:
    """Every rule on a failure is unknown, and so is the whole."""
    actual = postmortem(Case())

    assert "unknown" == actual.worst
    assert [(verdict, "unknown") for verdict in UNKNOWN_WITHOUT_FAILURE] == [
        (one.id, one.status) for one in actual.findings
    ]


@pytest.mark.parametrize(
    ("kind", "phase", "figures", "status"),
    [
        *(("torch", phase, {}, "fault") for phase in ("prefill", "decode", "logprobs", "encoder", "sampler")),
        *(("torch", phase, {}, "fault") for phase in ("profile", "warmup", "request", "wake")),
        *(("torch", phase, {}, "ok") for phase in ("load", "kv_pool", "startup", "graph_capture", "kv_growth")),
        ("driver", "prefill", {}, "fault"),
        ("library", "prefill", {}, "ok"),
        ("context", "prefill", {}, "ok"),
        # Holes and other processes' memory are causes of their own.
        ("torch", "prefill", ENOUGH_UNUSED, "ok"),
        ("torch", "prefill", OTHERS, "ok"),
        # Either a size or a time is needed; what cudaMallocAsync keeps may be as large.
        ("masked", None, {"asked_bytes": None}, "unknown"),
        ("masked", "prefill", {"asked_bytes": None}, "fault"),
        ("warmup", "warmup", {"asked_bytes": None}, "fault"),
        ("workspace", "prefill", {"asked_bytes": None}, "fault"),
        ("torch", None, {}, "fault"),
        ("async", None, {}, "unknown"),
        ("async", "prefill", {}, "fault"),
        # As much free as was requested: the message is made after the failure.
        ("torch", "prefill", {"free_bytes": GIB - 1, "unallocated_bytes": 0}, "fault"),
        ("torch", "prefill", {"free_bytes": GIB, "unallocated_bytes": 0}, "suspect"),
        ("torch", "prefill", {"free_bytes": None, "unallocated_bytes": 0}, "fault"),
        # A full device beside a tiny share of holes.
        ("torch", "prefill", {"asked_bytes": 300 * MIB, "unallocated_bytes": 700 * MIB}, "fault"),
    ],
)
def test_activation(kind: str, phase: str | None, figures: dict[str, Any], status: str) -> None:
    """A step that asked for more than was left, where nothing else explains it."""
    actual = finding(ACTIVATION, account(kind, phase=phase, **figures))

    assert status == actual.status
    assert (status in ("fault", "suspect")) == (actual.remedy not in (None, KNOWLEDGE[ACTIVATION].remedy))


@pytest.mark.parametrize(("free_bytes", "limited"), [(GIB + 2 * MIB - 1, False), (GIB + 2 * MIB, True)])
def test_another_limit_is_suspected_where_a_segment_more_was_free(free_bytes: int, limited: bool) -> None:
    """The device was not full: no setting of the pool helps."""
    actual = finding(ACTIVATION, account(phase="prefill", free_bytes=free_bytes, unallocated_bytes=0))
    assert limited == ("ulimit" in (actual.remedy or ""))


@pytest.mark.parametrize(
    ("phase", "parts", "missing"),
    [
        pytest.param("prefill", {}, None, id="known"),
        pytest.param(None, {}, "; add the engine's log (--log)", id="no log"),
        pytest.param(None, {"has_log": True}, "; add the log from the engine's start", id="the end of a log"),
        pytest.param(None, {"has_log": True, "report": EngineReport()}, "", id="a log from its start"),
    ],
)
def test_log_that_would_show_the_phase_is_named(phase: str | None, parts: dict[str, Any], missing: str | None) -> None:
    """A log from the start shows whether it was a request; one that was given is not asked for again."""
    summary = finding(ACTIVATION, account(phase=phase), **parts).summary

    _, found, rest = summary.partition("while serving is unknown")
    assert missing == (rest if found else None)


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
def test_what_took_the_room_before_a_step_is_the_cause(verdict: str, before: str, status: str) -> None:
    """A leak or a second copy that the trace shows; not one that it does not show, nor the host's."""
    found = Finding(id=verdict, status=before, summary=ANY_TEXT)  # type: ignore[arg-type]
    diagnosis = Diagnosis(
        worst="fault",
        facts=Facts(),
        start_seconds=0.0,
        end_seconds=1.0,
        samples=1,
        steps=(),
        findings=(found,),
        ledger=(),
        gaps=(),
    )
    actual = judge_activation(Case(accounts=(account(phase="prefill"),), before=diagnosis), DEFAULT_LIMITS)

    assert (ACTIVATION, status) == (actual.id, actual.status)


@pytest.mark.parametrize(
    ("world", "verdict", "status"),
    [
        (World(device_growth_bytes=64 * MIB), "leak.device_torch", "suspect"),
        (World(overhead_bytes=7 * GIB, device_bytes=32 * GIB), "baseline.duplicate_model", "ok"),
    ],
    ids=["every request leaves 64 MiB", "weights twice"],
)
def test_trace_of_the_time_before_is_judged_with_the_failure(world: World, verdict: str, status: str) -> None:
    """The last allocation is a consequence of what the trace shows."""
    case = Case(accounts=(account(phase="prefill"),), timeline=run(world), facts=facts_of(world))
    found = {one.id: one.status for one in postmortem(case).findings}
    assert ("fault", status) == (found[verdict], found[ACTIVATION])


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        # 768 MiB were missing of 80 GiB: a hundredth and 300 MB of headroom are two.
        ({"phase": "prefill"}, {FRACTION: 0.93, BATCHED: 2048}),
        ({"phase": "prefill", "work": Work(scheduled_tokens=6144, requests=3)}, {FRACTION: 0.93, BATCHED: 2048}),
        ({"phase": "logprobs"}, {FRACTION: 0.93, BATCHED: 2048}),
        ({"phase": "encoder"}, {FRACTION: 0.93}),
        ({"phase": "decode"}, {FRACTION: 0.93, SEQUENCES: 128}),
        ({"phase": "sampler"}, {FRACTION: 0.93, SEQUENCES: 128}),
        ({"phase": "warmup", "max_num_seqs": None}, {FRACTION: 0.93}),
        ({"phase": "warmup", "max_num_seqs": None, "requests": 1024}, {FRACTION: 0.93, SEQUENCES: 256}),
        # Before there is a pool, only a smaller step asks for less.
        ({"phase": "profile"}, {BATCHED: 2048, SEQUENCES: 128}),
        ({"kind": "workspace", "phase": "prefill"}, {}),
    ],
)
def test_remedy_of_a_step_lowers_what_it_scales_with(figures: dict[str, Any], expected: dict[str, float]) -> None:
    """A quarter of what was requested was free: the settings that size the step shrink to a quarter."""
    actual = finding(ACTIVATION, account(**{"max_num_seqs": 512, **figures}), report=REPORT)
    assert expected == changes(actual)


def test_batch_that_failed_stands_in_for_the_largest() -> None:
    """Where the log does not print how many tokens a batch may have."""
    one = account(phase="prefill", work=Work(scheduled_tokens=6144, requests=3))
    assert {BATCHED: 1536} == changes(finding(ACTIVATION, one))


@pytest.mark.parametrize(
    ("kind", "phase", "figures", "status"),
    [
        *((kind, "graph_capture", {}, "fault") for kind in ("torch", "driver", "library", "masked", "workspace")),
        ("capture", "graph_capture", {}, "unknown"),
        ("host", "graph_capture", {}, "ok"),
        ("torch", "prefill", {}, "ok"),
        ("torch", None, {}, "unknown"),
        ("torch", "graph_capture", OTHERS, "suspect"),
    ],
)
def test_graph_capture(kind: str, phase: str | None, figures: dict[str, Any], status: str) -> None:
    """Memory ran out in a capture: neither a capture that another error broke, nor another time."""
    assert status == finding(CAPTURE, account(kind, phase=phase, **figures)).status


def test_capture_names_the_estimate_and_the_sequences() -> None:
    """The engine's own estimate where the log has it; without sizes there is no lower bound."""
    rank = RankReport(name="", graphs_estimate=PrintedSize(nominal_bytes=768 * MIB))
    one = account(phase="graph_capture", max_num_seqs=512)

    with_estimate, without = (
        finding(CAPTURE, one, report=EngineReport(ranks=(each,)))
        for each in (rank, replace(rank, graphs_estimate=None))
    )
    unsized = finding(CAPTURE, account(phase="graph_capture", asked_bytes=None))

    assert (True, False) == ("768 MiB" in with_estimate.summary, "768 MiB" in without.summary)
    assert {SEQUENCES: 128} == changes(with_estimate)
    assert "at least" not in (unsized.remedy or "at least")


def test_broken_capture_and_masked_failure_are_unknown() -> None:
    """A capture that an error broke may have any cause; a masked failure has neither figures nor time."""
    capture = postmortem(case_of("CUDA error: operation not permitted when stream is capturing"))
    masked = postmortem(case_of('RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "x.cpp":995'))

    assert ("unknown", "unknown") == (capture.worst, masked.worst)
    assert any(one.id == ACTIVATION and "black box" in one.summary for one in masked.findings)


@pytest.mark.parametrize(
    ("kind", "figures", "status"),
    [
        ("torch", {}, "ok"),
        ("torch", {"unallocated_bytes": GIB, "allocated_bytes": 76 * GIB}, "fault"),
        ("torch", ENOUGH_UNUSED, "fault"),
        ("torch", {"asked_bytes": 300 * MIB, "unallocated_bytes": 700 * MIB}, "suspect"),
        ("torch", {"asked_bytes": 2 * MIB, "free_bytes": MIB, "unallocated_bytes": 3 * GIB}, "unknown"),
        ("torch", {"unallocated_bytes": 900 * MIB}, "unknown"),
        ("torch", {"free_bytes": 2 * GIB, "unallocated_bytes": 0}, "unknown"),
        ("library", ENOUGH_UNUSED, "ok"),
        ("workspace", ENOUGH_UNUSED, "ok"),
        ("context", ENOUGH_UNUSED, "ok"),
        ("driver", ENOUGH_UNUSED, "unknown"),
        # cudaMallocAsync keeps what is used and not torch's: half of the device is too much.
        ("async", {"free_bytes": 0, "allocated_bytes": 40 * GIB}, "unknown"),
        ("async", {"free_bytes": 0, "allocated_bytes": 40 * GIB - 1}, "suspect"),
        ("async", {"free_bytes": 1, "allocated_bytes": 40 * GIB - 1}, "unknown"),
        ("async", {"free_bytes": None, "allocated_bytes": GIB}, "unknown"),
        ("async", {"total_bytes": None, "allocated_bytes": GIB}, "unknown"),
        ("async", {"allocated_bytes": None}, "unknown"),
        # Only bytes between live blocks are holes: graph pools and what waits for a stream are not.
        ("torch", {"split": split(private_bytes=3 * GIB), "unallocated_bytes": 3 * GIB}, "ok"),
        ("torch", {"split": split(pending_bytes=3 * GIB), "unallocated_bytes": 3 * GIB}, "unknown"),
    ],
)
def test_fragmentation(kind: str, figures: dict[str, Any], status: str) -> None:
    """Enough was free and not in one block; a library does not look between torch's blocks."""
    assert status == finding(HOLES, account(kind, **figures)).status


@pytest.mark.parametrize(("on", "advised"), [(None, True), (False, True), (True, False)])
def test_expandable_segments_are_advised_where_they_are_off(on: bool | None, advised: bool) -> None:
    """Where the black box says that they are on, that setting is no remedy."""
    black_box = None if on is None else allocator(expandable_segments=on)
    actual = finding(HOLES, account(**ENOUGH_UNUSED, allocator=black_box))
    assert advised == ("expandable_segments:True" in (actual.remedy or ""))


@pytest.mark.parametrize(
    ("kind", "figures", "status"),
    [
        ("torch", {"process_bytes": 79 * GIB}, "ok"),  # 768 MiB of others are less than a fiftieth of the device
        ("torch", {"process_bytes": None}, "unknown"),
        ("masked", {"process_bytes": None}, "unknown"),
        ("blocks", {"process_bytes": None}, "ok"),
        ("context", {"process_bytes": None}, "ok"),
        ("torch", OTHERS, "fault"),
        ("torch", {"process_bytes": None, "allocated_bytes": 50 * GIB}, "suspect"),
    ],
)
def test_foreign_memory(kind: str, figures: dict[str, Any], status: str) -> None:
    """Listed processes are a fault, unexplained bytes a suspect; a full device that nobody lists is unknown."""
    assert status == finding(FOREIGN, account(kind, **figures)).status


@pytest.mark.parametrize(
    ("before_gib", "free_gib", "size"), [(10, 13, "3.00 GiB"), (10, 10, None), (13, 10, None), (None, 13, None)]
)
def test_memory_released_while_the_engine_measures_was_anothers(
    before_gib: int | None, free_gib: int | None, size: str | None
) -> None:
    """By how much is shown where both figures are reported."""
    before, free = (None if size is None else size * GIB for size in (before_gib, free_gib))

    actual = finding(FOREIGN, account("profiling", before_bytes=before, free_bytes=free, process_bytes=None))

    assert "fault" == actual.status
    assert (size is not None) == ("GiB" in actual.summary)
    assert size is None or size in actual.summary


@pytest.mark.parametrize(
    ("kind", "phase", "figures", "status"),
    [
        ("limit", "prefill", {}, "fault"),
        ("limit", "prefill", {"allowed_bytes": 40 * GIB}, "fault"),
        ("absurd", "prefill", {}, "fault"),
        ("library", "prefill", {}, "fault"),
        ("library", "prefill", {"asked_bytes": None}, "fault"),
        ("library", "graph_capture", {}, "ok"),
        ("torch", "load", {}, "fault"),
        ("torch", "load", {"asked_bytes": None}, "fault"),
        ("torch", "kv_pool", {}, "fault"),
        ("torch", "startup", {}, "fault"),
        ("torch", "startup", OTHERS, "ok"),
        ("torch", "startup", {"process_bytes": None, "allocated_bytes": 50 * GIB}, "fault"),  # a guess acquits nothing
        ("torch", "prefill", {}, "ok"),
        ("torch", None, {}, "unknown"),
        ("context", None, {}, "ok"),
        ("host", "load", {}, "ok"),
        ("blocks", None, {}, "fault"),
    ],
)
def test_misconfigured(kind: str, phase: str | None, figures: dict[str, Any], status: str) -> None:
    """One-time allocations before the first request, a limit below the device, too small a headroom."""
    assert status == finding(MISCONFIGURED, account(kind, phase=phase, **figures)).status


def test_weights_that_do_not_fit_are_not_helped_by_the_fraction() -> None:
    """While weights are loaded there is no pool that could be smaller."""
    actual = finding(MISCONFIGURED, account(phase="load"), report=REPORT)
    assert (True, False) == ("--tensor-parallel-size" in (actual.remedy or ""), FRACTION in (actual.remedy or ""))


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, {FRACTION: 0.75}),  # 60 of 80 GiB
        ({"device": None, "fraction_ratio": None}, {}),
        ({"needed_bytes": None}, {FRACTION: 0.75}),
        ({"free_bytes": None}, {}),
        ({"total_bytes": None}, {}),
    ],
)
def test_refused_budget_gets_the_fraction_that_is_free(figures: dict[str, Any], expected: dict[str, float]) -> None:
    """Where the message has both figures."""
    budget = {"free_bytes": 60 * GIB, "needed_bytes": 72 * GIB, "fraction_ratio": 0.9, **figures}
    for verdict in (MISCONFIGURED, FOREIGN)[
        : 1 if None in (budget["free_bytes"], figures.get("total_bytes", 0)) else 2
    ]:
        actual = finding(verdict, account("budget", **budget))
        assert ("fault", expected) == (actual.status, changes(actual))


@pytest.mark.parametrize(
    ("parts", "used", "expected"),
    [
        # 77 of the 76 GiB that 0.95 of 80 GiB are: one is missing, 0.0125 of the device.
        ({"report": report_of(weights=70, activation=4, non_torch=3)}, "77.0 GiB", {FRACTION: 0.97}),
        ({"report": report_of(consumed=73, activation=4, non_torch=3)}, "77.0 GiB", {FRACTION: 0.97}),
        ({"report": report_of(weights=78, activation=None)}, "78.0 GiB", {}),  # beyond 0.97
        ({"report": report_of(weights=76)}, "76.0 GiB", {}),
        ({"report": REPORT, "failed_pool_bytes": 800 * MIB}, "14.0 GiB", {FRACTION: 0.96}),
        ({"report": report_of(None, weights=70)}, "70.0 GiB", {}),
        ({"report": report_of()}, "no memory", {}),
        ({}, "no memory", {}),
    ],
)
def test_empty_pool_is_made_up_for(parts: dict[str, Any], used: str, expected: dict[str, float]) -> None:
    """By what weights, activations and the rest use beyond the memory fraction, or by what the log prints."""
    actual = finding(MISCONFIGURED, account("blocks"), **parts)

    assert ("fault", expected) == (actual.status, changes(actual))
    assert used in actual.summary


REFUSED_CONTEXT = (
    "To serve at least one request with the model's max seq len (131072), (16.00 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (12.00 GiB). Based on the available memory, the estimated maximum model "
    "length is 98304. Try increasing"
)
REFUSED_BUDGET = (
    "Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 19.84 GiB)."
)
LIMITED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.00 GiB of which 10.00 GiB is "
    "free. 11.00 GiB allowed; Of the allocated memory 10.90 GiB is allocated by PyTorch, and 1.00 MiB is reserved by "
    "PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "verdict", "expected"),
    [
        (REFUSED_CONTEXT, CONTEXT, {MODEL_LEN: 98304}),
        (REFUSED_BUDGET, MISCONFIGURED, {FRACTION: 0.89}),
        (REFUSED_BUDGET, FOREIGN, {FRACTION: 0.89}),
        (LIMITED, MISCONFIGURED, {}),
    ],
    ids=["context", "budget", "foreign", "a limit below the device"],
)
def test_refusal_names_the_setting_that_fits(text: str, verdict: str, expected: dict[str, float]) -> None:
    """From the message alone."""
    worst, actual = status_of_text(text, verdict)
    assert ("fault", "fault", expected) == (worst, actual.status, changes(actual))


@pytest.mark.parametrize(
    ("kind", "phase", "figures", "status"),
    [
        ("torch", "kv_growth", {}, "fault"),
        ("driver", "kv_growth", {}, "fault"),
        ("masked", "kv_growth", {}, "fault"),
        ("library", "kv_growth", {}, "ok"),
        ("torch", "prefill", {}, "ok"),
        ("context", None, {"needed_bytes": 16 * GIB, "fitting_tokens": 98_304}, "fault"),
        ("context", None, {"available_bytes": 12 * GIB, "asked_tokens": 131_072}, "fault"),
        ("context", None, {"needed_bytes": 16 * GIB, "available_bytes": 12 * GIB, "total_bytes": None}, "fault"),
        ("context", None, {"needed_bytes": 12 * GIB, "available_bytes": 12 * GIB}, "fault"),
    ],
)
def test_long_context(kind: str, phase: str | None, figures: dict[str, Any], status: str) -> None:
    """A refusal, with any of its figures missing, and a cache that grows in torch where no pool was taken."""
    assert status == finding(CONTEXT, account(kind, phase=phase, **figures)).status


class TestGrowth:
    """leak.device_torch and leak.host."""

    @pytest.mark.parametrize(
        ("total_gib", "least_bytes"),
        [(80, 2 * 10**9), (200, 4_294_967_296)],  # a fiftieth of 200 GiB
    )
    @pytest.mark.parametrize(("beyond_bytes", "status"), [(0, "ok"), (1, "suspect")])
    def test_suspect_from_two_gigabytes_and_a_fiftieth(
        self, total_gib: int, least_bytes: int, beyond_bytes: int, status: str
    ) -> None:
        """Beyond weights, pool, peak activation and graphs of the start."""
        report = report_of(weights=10, pool=50, activation=4, graphs_actual=1)
        allocated = 65 * GIB + least_bytes + beyond_bytes

        one = account(phase="decode", allocated_bytes=allocated, total_bytes=total_gib * GIB)

        assert status == finding(TORCH, one, report=report).status

    @pytest.mark.parametrize(
        ("over_bytes", "total_bytes", "status"), [(0, 100 * GIB, "ok"), (1, 100 * GIB, "suspect"), (1, None, "suspect")]
    )
    def test_usual_peak_stands_in_for_one_that_is_not_printed(
        self, over_bytes: int, total_bytes: int | None, status: str
    ) -> None:
        """8 % of 100 GiB; of a device of unknown size none."""
        allocated = 60 * GIB + round(0.08 * 100 * GIB) + round(0.02 * 100 * GIB) + over_bytes

        one = account(phase="decode", allocated_bytes=allocated, total_bytes=total_bytes)

        assert status == finding(TORCH, one, report=report_of(weights=10, pool=50)).status

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
    def test_only_judged_where_it_served(self, kind: str, phase: str | None, expected: list[str]) -> None:
        """Nothing can have grown before the first request; without the start's figures it is unknown."""
        found = postmortem(Case(accounts=(account(kind, phase=phase),))).findings
        assert expected == [one.status for one in found if one.id == TORCH]

    @pytest.mark.parametrize("missing", ["weights", "pool", "allocated"])
    def test_unknown_where_a_part_of_the_sum_is_missing(self, missing: str) -> None:
        """Of the start's figures weights and pool, and what torch had allocated."""
        sizes: dict[str, int | None] = {"weights": 10, "pool": 50, "activation": 4}
        report = report_of(**{name: None if name == missing else size for name, size in sizes.items()})
        figures: dict[str, Any] = {"allocated_bytes": None} if missing == "allocated" else {}

        assert "unknown" == finding(TORCH, account(phase="decode", **figures), report=report).status

    @pytest.mark.parametrize(("anonymous", "size"), [(", anon-rss:6291456kB", "6.00 GiB"), ("", "")])
    def test_host_kill_is_unknown(self, anonymous: str, size: str) -> None:
        """The kernel reports how much was in use, not whether it grew; a device's failure is no host's."""
        worst, actual = status_of_text(f"Out of memory: Killed process 4 (x) total-vm:1kB{anonymous}", HOST)

        assert ("unknown", "unknown") == (worst, actual.status)
        assert size in actual.summary
        assert HOST not in {one.id for one in postmortem(Case(accounts=(account(),))).findings}


def test_every_verdict_is_known_and_advice_of_torch_is_never_one() -> None:
    """Whatever is concluded has an entry, and torch's hint about fragmentation changes nothing."""
    hint = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB."

    without, with_hint = (postmortem(case_of(one)) for one in (text, text + hint))

    assert {one.id for one in without.findings} <= set(KNOWLEDGE)
    assert len(RULES) == len({rule.__name__ + rule.__module__ for rule in RULES})
    assert [(one.id, one.status) for one in without.findings] == [(one.id, one.status) for one in with_hint.findings]
