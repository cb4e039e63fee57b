"""Each rule of a post-mortem: when it fires, is silent or unknown, and which setting its remedy changes to what."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.postmortem import RULES, UNKNOWN_WITHOUT_FAILURE, Case, postmortem
from kvdiag.diagnosis.postmortem.transients import judge_activation
from kvdiag.kv.calibration.engine_report import EngineReport, PrintedSize, RankReport
from kvdiag.model import Finding
from kvdiag.oom.account import Work
from tests.builders.answers import ANY_TEXT
from tests.builders.runs import run
from tests.builders.values import allocator
from tests.builders.worlds import World
from tests.builders.worlds import facts as facts_of
from tests.unit.diagnosis.postmortem.cases import (
    BATCHED,
    FLAGS,
    FRACTION,
    GIB,
    MIB,
    SEQUENCES,
    account,
    case_of,
    changes,
    finding,
    report_of,
    split,
)
from tests.unit.diagnosis.postmortem.rendered import of_finding

ACTIVATION, CAPTURE, HOLES = "spike.activation", "spike.graph_capture", "fragmentation.allocator"
FOREIGN, MISCONFIGURED, CONTEXT = "baseline.foreign_memory", "baseline.misconfigured", "capacity.long_context"
HOST = "leak.host"

OTHERS: dict[str, Any] = {"process_bytes": 60 * GIB, "allocated_bytes": 58 * GIB}
"""Listed processes of others that use 19.75 GiB."""

ENOUGH_UNUSED: dict[str, Any] = {"unallocated_bytes": 2 * GIB, "allocated_bytes": 75 * GIB}

BUDGET: dict[str, Any] = {"needed_bytes": 72 * GIB, "fraction_ratio": 0.9}
REPORT = report_of(weights=10, pool=60, activation=4, total=80)


def test_without_a_failure_nothing_is_concluded() -> None:
    """Every rule on a failure is unknown, and so is the whole."""
    actual = postmortem(Case())

    assert "unknown" == actual.worst
    assert [(verdict, "unknown") for verdict in UNKNOWN_WITHOUT_FAILURE] == [
        (one.id, one.status) for one in actual.findings
    ]


STATUSES: dict[str, list[tuple[str, str | None, dict[str, Any], str]]] = {
    # A step that asked for more than was left, where nothing else explains it.
    ACTIVATION: [
        *(("torch", phase, {}, "fault") for phase in ("prefill", "decode", "logprobs", "encoder", "sampler")),
        *(("torch", phase, {}, "fault") for phase in ("profile", "warmup", "request", "wake")),
        *(("torch", phase, {}, "ok") for phase in ("load", "kv_pool", "startup", "graph_capture", "kv_growth")),
        ("driver", "prefill", {}, "fault"),
        *((kind, "prefill", {}, "ok") for kind in ("library", "context")),
        # Holes and other processes' memory are causes of their own.
        *(("torch", "prefill", figures, "ok") for figures in (ENOUGH_UNUSED, OTHERS)),
        # Either a size or a time is needed; what cudaMallocAsync keeps may be as large.
        ("masked", None, {"asked_bytes": None}, "unknown"),
        *((kind, "prefill", {"asked_bytes": None}, "fault") for kind in ("masked", "workspace")),
        ("warmup", "warmup", {"asked_bytes": None}, "fault"),
        ("torch", None, {}, "fault"),
        ("async", None, {}, "unknown"),
        ("async", "prefill", {}, "fault"),
        # As much free as was requested: the message is made after the failure.
        *(("torch", "prefill", {"free_bytes": free, "unallocated_bytes": 0}, "fault") for free in (GIB - 1, None)),
        ("torch", "prefill", {"free_bytes": GIB, "unallocated_bytes": 0}, "suspect"),
        ("torch", "prefill", {"asked_bytes": 81 * GIB}, "fault"),  # more than any budget
        # A full device with a tiny share of holes.
        ("torch", "prefill", {"asked_bytes": 300 * MIB, "unallocated_bytes": 700 * MIB}, "fault"),
    ],
    # Memory ran out in a capture: neither a capture that another error broke, nor another time.
    CAPTURE: [
        *((kind, "graph_capture", {}, "fault") for kind in ("torch", "driver", "library", "masked", "workspace")),
        ("capture", "graph_capture", {}, "unknown"),
        ("host", "graph_capture", {}, "ok"),
        ("torch", "prefill", {}, "ok"),
        ("torch", None, {}, "unknown"),
        ("torch", "graph_capture", OTHERS, "suspect"),
    ],
    # Enough was free and not in one block; a library does not look between torch's blocks.
    HOLES: [
        ("torch", None, {}, "ok"),
        ("torch", None, {"unallocated_bytes": GIB, "allocated_bytes": 76 * GIB}, "fault"),
        ("torch", None, ENOUGH_UNUSED, "fault"),
        ("torch", None, {"asked_bytes": 300 * MIB, "unallocated_bytes": 700 * MIB}, "unknown"),
        ("torch", None, {"asked_bytes": 2 * MIB, "free_bytes": MIB, "unallocated_bytes": 3 * GIB}, "unknown"),
        ("torch", None, {"asked_bytes": 300 * MIB, "unallocated_bytes": GIB, "total_bytes": 100 * GIB}, "fault"),
        ("torch", None, {"unallocated_bytes": 900 * MIB}, "unknown"),
        ("torch", None, {"free_bytes": 2 * GIB, "unallocated_bytes": 0}, "unknown"),
        *((kind, None, ENOUGH_UNUSED, "ok") for kind in ("library", "workspace", "context")),
        ("driver", None, ENOUGH_UNUSED, "unknown"),
        # cudaMallocAsync keeps what is used and not torch's: half of the device is too much.
        ("async", None, {"free_bytes": 0, "allocated_bytes": 40 * GIB}, "unknown"),
        ("async", None, {"free_bytes": 0, "allocated_bytes": 40 * GIB - 1}, "suspect"),
        ("async", None, {"free_bytes": 1, "allocated_bytes": 40 * GIB - 1}, "unknown"),
        ("async", None, {"free_bytes": None, "allocated_bytes": GIB}, "unknown"),
        ("async", None, {"total_bytes": None, "allocated_bytes": GIB}, "unknown"),
        ("async", None, {"allocated_bytes": None}, "unknown"),
        # Only bytes between live blocks are holes: graph pools and what waits for a stream are not.
        ("torch", None, {"split": split(private_bytes=3 * GIB), "unallocated_bytes": 3 * GIB}, "ok"),
        ("torch", None, {"split": split(pending_bytes=3 * GIB), "unallocated_bytes": 3 * GIB}, "unknown"),
    ],
    # Listed processes are a fault, unexplained bytes a suspect; a full device without a list is unknown.
    FOREIGN: [
        ("torch", None, {"process_bytes": 79 * GIB}, "ok"),  # 768 MiB of others are less than a fiftieth of the device
        *((kind, None, {"process_bytes": None}, "unknown") for kind in ("torch", "masked")),
        *((kind, None, {"process_bytes": None}, "ok") for kind in ("blocks", "context")),
        ("torch", None, OTHERS, "fault"),
        *(("profiling", None, {"before_bytes": size}, "fault") for size in (256 * MIB, 256 * MIB - 1, None)),
        ("torch", None, {"process_bytes": None, "allocated_bytes": 50 * GIB}, "suspect"),
    ],
    # One-time allocations before the first request, a limit below the device, too small a headroom.
    MISCONFIGURED: [
        *((kind, "prefill", {}, "fault") for kind in ("limit", "absurd", "library")),
        ("limit", "prefill", {"allowed_bytes": 40 * GIB}, "fault"),
        ("library", "prefill", {"asked_bytes": None}, "fault"),
        ("library", "graph_capture", {}, "ok"),
        *(("torch", phase, {}, "fault") for phase in ("load", "kv_pool", "startup")),
        ("torch", "load", {"asked_bytes": None}, "fault"),
        ("torch", "startup", OTHERS, "ok"),
        ("torch", "startup", {"process_bytes": None, "allocated_bytes": 50 * GIB}, "fault"),  # a guess acquits nothing
        ("torch", "prefill", {}, "ok"),
        ("torch", None, {}, "unknown"),
        ("context", None, {}, "ok"),
        ("host", "load", {}, "ok"),
        ("blocks", None, {}, "fault"),
        *(("budget", None, {**BUDGET, "free_bytes": gib * GIB}, "fault") for gib in (8, 60, 72)),
    ],
    # A refusal, with any of its figures missing, and a cache that grows in torch where no pool was taken.
    CONTEXT: [
        *((kind, "kv_growth", {}, "fault") for kind in ("torch", "driver", "masked")),
        ("library", "kv_growth", {}, "ok"),
        ("torch", "prefill", {}, "ok"),
        ("context", None, {"needed_bytes": 16 * GIB, "fitting_tokens": 98_304}, "fault"),
        ("context", None, {"available_bytes": 12 * GIB, "asked_tokens": 131_072}, "fault"),
        ("context", None, {"needed_bytes": 16 * GIB, "available_bytes": 12 * GIB, "total_bytes": None}, "fault"),
        ("context", None, {"needed_bytes": 12 * GIB, "available_bytes": 12 * GIB}, "fault"),
        *(("context", None, {"asked_tokens": 8, "fitting_tokens": fits}, "fault") for fits in (3, 4)),
    ],
    # A limit is raised by a quarter, in steps of 1, 4 or 16 GiB.
    HOST: [
        *(
            ("host", None, {"message": "oom", "limit_bytes": mib * MIB}, "fault")
            for mib in (15_360, 17_300, 131_071, 131_072)
        ),
        *(("host", None, {"message": "oom", "usage_bytes": gib * GIB}, "fault") for gib in (79, 81)),
        ("host", None, {"message": "MemoryError", "asked_bytes": None, "process_bytes": None}, "fault"),
        ("host", None, {"killed": "vllm"}, "unknown"),
    ],
}
"""Of each verdict, what it says of a kind of failure in a phase with these figures."""


@pytest.mark.parametrize(
    ("verdict", "kind", "phase", "figures", "status"),
    [(verdict, *row) for verdict, rows in STATUSES.items() for row in rows],
)
def test_status(verdict: str, kind: str, phase: str | None, figures: dict[str, Any], status: str) -> None:
    """Each rule fires, is silent or unknown by kind, phase and figures; a cause of its own acquits the others."""
    actual = finding(verdict, account(kind, phase=phase, **figures))

    assert status == actual.status
    if verdict == ACTIVATION:
        assert (status in ("fault", "suspect")) == (actual.remedy not in (None, KNOWLEDGE[verdict].remedy))


def test_what_each_rule_says(golden: Callable[[str, str], None]) -> None:
    """Alone and with a log of the start: status, summary and remedy."""
    report = report_of(0.8, weights=10, pool=50, activation=4, total=80)
    lines = (
        "\n".join(of_finding(finding(verdict, account(kind, phase=phase, max_num_seqs=512, **figures), report=start)))
        for verdict, rows in STATUSES.items()
        for kind, phase, figures, _ in rows
        for start in (EngineReport(), report)
    )
    golden("diagnosis/postmortem_rules.txt", "\n".join([*dict.fromkeys(lines), ""]))


@pytest.mark.parametrize(("free_bytes", "limited"), [(GIB + 2 * MIB - 1, False), (GIB + 2 * MIB, True)])
def test_another_limit_is_suspected_where_a_segment_more_was_free(free_bytes: int, limited: bool) -> None:
    """The device was not full: no setting of the pool helps."""
    actual = finding(ACTIVATION, account(phase="prefill", free_bytes=free_bytes, unallocated_bytes=0))
    assert limited == ("ulimit" in (actual.remedy or ""))


@pytest.mark.parametrize(
    ("phase", "parts", "missing"),
    [
        pytest.param("prefill", {}, None, id="known"),
        pytest.param(None, {}, "--log", id="no log"),
        pytest.param(None, {"has_log": True}, "engine's start", id="the end of a log"),
        pytest.param(None, {"has_log": True, "report": EngineReport(tokens=1)}, "black box", id="log from its start"),
    ],
)
def test_log_that_would_show_the_phase_is_named(phase: str | None, parts: dict[str, Any], missing: str | None) -> None:
    """A log from the start shows whether it was a request; one that was given is not asked for again."""
    summary = finding(ACTIVATION, account(phase=phase), **parts).summary

    _, found, rest = summary.partition("while serving is unknown")
    assert (missing is not None) == bool(found)
    assert (missing or "") in rest


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
    whole = replace(postmortem(Case()), findings=(found,))
    actual = judge_activation(Case(accounts=(account(phase="prefill"),), before=whole), DEFAULT_LIMITS)

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
        ({"phase": "prefill", "work": Work(scheduled_tokens=6144, requests=3)}, {FRACTION: 0.93, BATCHED: 1536}),
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


@pytest.mark.parametrize("phase", ["prefill", "logprobs", "encoder", "decode", "profile", "graph_capture", "kv_pool"])
def test_remedies_have_the_flags_of_the_engine_alone(phase: str) -> None:
    """Of an engine without flags no remedy has one, and of one with others every remedy has those."""
    case: dict[str, Any] = {"phase": phase, "max_num_seqs": 512}
    for flags in ({}, {name: f"--of-{name}" for name in FLAGS}):
        found = postmortem(Case(accounts=(account(**case),), report=REPORT, flags=flags)).findings
        named = re.findall(r"--[a-z-]+", " ".join(one.remedy or "" for one in found if one.status == "fault"))
        assert bool(flags) == bool(named)
        assert all(flag.startswith("--of-") for flag in named)


def test_batch_that_failed_stands_in_for_the_largest() -> None:
    """Where the log does not print how many tokens a batch may have."""
    one = account(phase="prefill", work=Work(scheduled_tokens=6144, requests=3))
    assert {BATCHED: 1536} == changes(finding(ACTIVATION, one))


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
    assert "minimum" not in (unsized.remedy or "minimum")


def test_broken_capture_and_masked_failure_are_unknown() -> None:
    """A capture that an error broke may have any cause; a masked failure has neither figures nor time."""
    capture = postmortem(case_of("CUDA error: operation not permitted when stream is capturing"))
    masked = postmortem(case_of('RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "x.cpp":995'))

    assert ("unknown", "unknown") == (capture.worst, masked.worst)
    assert any(one.id == ACTIVATION and "black box" in one.summary for one in masked.findings)


@pytest.mark.parametrize(("on", "advised"), [(None, True), (False, True), (True, False)])
def test_expandable_segments_are_advised_where_they_are_off(on: bool | None, advised: bool) -> None:
    """Where the black box says that they are on, that setting is no remedy."""
    black_box = None if on is None else allocator(expandable_segments=on)
    actual = finding(HOLES, account(**ENOUGH_UNUSED, allocator=black_box))
    assert advised == ("expandable_segments:True" in (actual.remedy or ""))


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


def test_every_verdict_is_known_and_advice_of_torch_is_never_one() -> None:
    """Every finding has an entry in `KNOWLEDGE`, and torch's hint about fragmentation changes nothing."""
    hint = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB."

    without, with_hint = (postmortem(case_of(one)) for one in (text, text + hint))

    assert {one.id for one in without.findings} <= set(KNOWLEDGE)
    assert len(RULES) == len({rule.__name__ + rule.__module__ for rule in RULES})
    assert [(one.id, one.status) for one in without.findings] == [(one.id, one.status) for one in with_hint.findings]


@pytest.mark.parametrize(
    ("captured", "sizes", "figures", "needed", "lowered"),
    [
        # 42 graphs took 79.7 - 10 - 63 - 2 - 0.5 GiB, 0.1 GiB each; 25 more and 1 GiB less what was free are missing.
        pytest.param(
            (42, 67),
            {"weights": 10, "pool": 63, "non_torch": 2},
            {"process_bytes": round(79.7 * GIB), "unallocated_bytes": GIB // 2},
            "2.50 GiB",
            0.05,
            id="by what the process holds",
        ),
        pytest.param((42, 67), {"graphs_estimate": 67}, {}, "25.0 GiB", 0.33, id="by estimate"),
        pytest.param((0, 67), {"graphs_estimate": 67}, {}, None, 0.02, id="none yet"),
        pytest.param((67, 67), {"graphs_estimate": 67}, {}, None, 0.02, id="all"),
        pytest.param(None, {"graphs_estimate": 67}, {}, None, 0.02, id="no progress"),
    ],
)
def test_further_graphs_are_extrapolated(
    captured: tuple[int, int] | None, sizes: dict[str, int], figures: dict[str, Any], needed: str | None, lowered: float
) -> None:
    """The fraction is lowered for the graphs that were still to come, not for the one that failed alone."""
    one = account(phase="graph_capture", graphs_captured=captured, **figures)
    found = finding(CAPTURE, one, report=report_of(**sizes))
    assert (needed is not None) == ("the rest need" in found.summary)
    assert (needed or "") in found.summary
    assert f"by {lowered:.2f} " in str(found.remedy)


def test_graphs_whose_memory_is_not_known_are_not_extrapolated() -> None:
    """Neither what the process holds nor an estimate: how far the capture came is all that there is to say."""
    found = finding(CAPTURE, account(phase="graph_capture", graphs_captured=(42, 67)), report=report_of())
    assert "42 of 67 graphs were captured" in found.summary
