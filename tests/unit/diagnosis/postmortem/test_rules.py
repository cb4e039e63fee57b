from __future__ import annotations

import pytest

from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.postmortem import Case, postmortem
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.model import Finding
from tests.builders.runs import run
from tests.builders.worlds import World
from tests.builders.worlds import facts as facts_of
from tests.unit.diagnosis.postmortem.cases import GIB, MIB, account, case_of, finding, split

REPORT = EngineReport(
    settings=EngineSettings(version="0.32.0", memory_fraction_ratio=0.95, max_num_batched_tokens=8192),
    ranks=(
        RankReport(
            name="Worker_TP0",
            weights=PrintedSize(nominal_bytes=10 * GIB),
            pool=PrintedSize(nominal_bytes=60 * GIB),
            activation=PrintedSize(nominal_bytes=4 * GIB),
            total=PrintedSize(nominal_bytes=80 * GIB),
        ),
    ),
    tokens=600_000,
)


@pytest.mark.parametrize("verdict", ["spike.activation", "spike.graph_capture", "fragmentation.allocator"])
def test_without_a_failure_nothing_is_told(verdict: str) -> None:
    """A rule that has nothing to look at says so, and the whole is unknown."""
    actual = postmortem(Case())

    assert "unknown" == actual.worst
    assert {"unknown"} == {one.status for one in actual.findings if one.id == verdict}


class TestActivation:
    """spike.activation."""

    ID = "spike.activation"

    @pytest.mark.parametrize("phase", ["prefill", "decode", "logprobs", "encoder", "sampler", "profile", "warmup"])
    def test_fires_where_a_step_did_not_fit(self, phase: str) -> None:
        """A step that asked for more than all that was left is the cause, and has a remedy."""
        actual = finding(self.ID, account(phase=phase))

        assert "fault" == actual.status
        assert actual.remedy

    def test_settings_are_reckoned_in_bytes(self) -> None:
        """The fraction is lowered by shortage over total, what that costs is told, and the batch is scaled."""
        assert finding(self.ID, account(phase="prefill"), report=REPORT).remedy

    def test_pool_that_was_set_by_hand_is_lowered_by_hand(self) -> None:
        """With --kv-cache-memory-bytes the fraction decides nothing."""
        report = EngineReport(settings=EngineSettings(pool_bytes=60 * GIB))

        actual = finding(self.ID, account(phase="decode"), report=report)

        assert actual.remedy is not None

    def test_profile_run_is_not_helped_by_a_smaller_fraction(self) -> None:
        """Before there is a pool, only a smaller step asks for less."""
        actual = finding(self.ID, account(phase="profile"), report=REPORT)

        assert actual.remedy is not None
        assert "--gpu-memory-utilization" not in actual.remedy

    @pytest.mark.parametrize("phase", ["load", "kv_pool", "startup", "graph_capture"])
    def test_silent_where_it_was_no_step(self, phase: str) -> None:
        """What is taken once at start is no spike of a step."""
        assert "ok" == finding(self.ID, account(phase=phase)).status

    def test_silent_where_holes_or_others_explain_it(self) -> None:
        """Room in pieces, and memory of other processes, are causes of their own."""
        holes = account(phase="prefill", unallocated_bytes=2 * GIB, allocated_bytes=75 * GIB)
        others = account(phase="prefill", process_bytes=60 * GIB, allocated_bytes=58 * GIB)

        assert ["ok", "ok"] == [finding(self.ID, holes).status, finding(self.ID, others).status]

    def test_unknown_where_neither_size_nor_time_is_told(self) -> None:
        """A masked out-of-memory has no figures; what would tell is named."""
        actual = postmortem(case_of('RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "x.cpp":995'))

        assert "unknown" == actual.worst
        assert any(one.id == self.ID and "black box" in one.summary for one in actual.findings)

    def test_only_suspect_where_enough_was_free(self) -> None:
        """The message is made after the failure; what it shows free may not have been."""
        late = account(phase="prefill", free_bytes=2 * GIB, unallocated_bytes=0, allocated_bytes=75 * GIB)

        actual = finding(self.ID, late)
        assert "suspect" == actual.status
        assert "another limit" in actual.summary
        assert "unknown" == finding("fragmentation.allocator", late).status


class TestGraphCapture:
    """spike.graph_capture."""

    ID = "spike.graph_capture"

    @pytest.mark.parametrize("kind", ["torch", "driver", "library", "masked"])
    def test_fires_where_graphs_were_captured(self, kind: str) -> None:
        """Whoever says that memory ran out: it was in the capture."""
        assert "fault" == finding(self.ID, account(kind, phase="graph_capture")).status

    def test_silent_elsewhere(self) -> None:
        """A prefill is no capture."""
        assert "ok" == finding(self.ID, account(phase="prefill")).status

    def test_unknown_where_no_figure_speaks_of_memory(self) -> None:
        """A capture that an error broke may have any cause."""
        actual = postmortem(case_of("CUDA error: operation not permitted when stream is capturing"))

        assert "unknown" == actual.worst

    def test_suspect_where_others_hold_enough(self) -> None:
        """Then the graphs would have fitted on a device of their own."""
        actual = finding(self.ID, account(phase="graph_capture", process_bytes=60 * GIB, allocated_bytes=58 * GIB))

        assert "suspect" == actual.status


class TestFragmentation:
    """fragmentation.allocator after a death."""

    ID = "fragmentation.allocator"

    def test_fires_where_unallocated_bytes_alone_were_enough(self) -> None:
        """What torch could not give back lay between live blocks."""
        assert "fault" == finding(self.ID, account(unallocated_bytes=GIB, allocated_bytes=76 * GIB)).status

    def test_only_suspect_where_the_device_was_full_all_the_same(self) -> None:
        """Under a hundredth of the device in holes: the next request would not have found room either."""
        full = account(phase="prefill", asked_bytes=300 * MIB, unallocated_bytes=700 * MIB, allocated_bytes=76 * GIB)

        actual = finding(self.ID, full)

        assert "suspect" == actual.status
        assert "fault" == finding("spike.activation", full).status

    def test_unknown_where_a_small_block_was_wanted(self) -> None:
        """A segment of 2 MiB is asked for small blocks alone, which holes between large ones do not serve."""
        small = account(asked_bytes=2 * MIB, free_bytes=MIB, unallocated_bytes=3 * GIB, allocated_bytes=74 * GIB)

        actual = finding(self.ID, small)

        assert "unknown" == actual.status
        assert "small block" in actual.summary

    def test_silent_where_all_together_was_not_enough(self) -> None:
        """Then it is exhaustion, whatever torch advises."""
        assert "ok" == finding(self.ID, account()).status

    def test_unknown_where_only_both_together_were_enough(self) -> None:
        """Free and unallocated bytes do not join; the measurement that decides is named."""
        actual = finding(self.ID, account(unallocated_bytes=900 * MIB, allocated_bytes=76 * GIB))

        assert "unknown" == actual.status

    @pytest.mark.parametrize(
        ("blocks", "status"),
        [
            ({"stranded_bytes": 900 * MIB, "largest_free_block_bytes": 64 * MIB}, "fault"),
            ({"stranded_bytes": 100 * MIB, "largest_free_block_bytes": 64 * MIB}, "ok"),
            ({"private_bytes": 3 * GIB}, "ok"),
            ({"pending_bytes": 3 * GIB}, "unknown"),
            ({"stranded_bytes": 3 * GIB, "largest_free_block_bytes": 3 * GIB}, "unknown"),
        ],
    )
    def test_blocks_decide_where_a_black_box_has_them(self, blocks: dict[str, int], status: str) -> None:
        """Only bytes between live blocks are holes: graph pools and what waits for a stream are not."""
        assert status == finding(self.ID, account(split=split(**blocks), unallocated_bytes=3 * GIB)).status


def status_of(text: str, verdict: str) -> tuple[str, Finding]:
    """Worst status of a text's diagnosis, and its finding of one verdict."""
    diagnosis = postmortem(case_of(text))
    return diagnosis.worst, next(one for one in diagnosis.findings if one.id == verdict)


def test_refused_context_says_what_fits() -> None:
    """The length that fits, and the bytes that are missing, are in the remedy."""
    worst, actual = status_of(
        "To serve at least one request with the model's max seq len (131072), (16.00 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (12.00 GiB). Based on the available memory, the estimated "
        "maximum model length is 98304. Try increasing",
        "capacity.long_context",
    )

    assert ("fault", "fault") == (worst, actual.status)
    assert actual.remedy is not None


def test_refused_budget_says_which_fraction_fits() -> None:
    """A start that finds the device partly taken gets the fraction that is free."""
    _, actual = status_of(
        "Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 19.84 GiB).",
        "baseline.misconfigured",
    )

    assert "fault" == actual.status


def test_pool_below_zero_is_made_up_for() -> None:
    """Where the log prints how much was missing for the pool, the fraction is raised by that."""
    actual = finding("baseline.misconfigured", account("blocks"), report=REPORT, failed_pool_bytes=800 * MIB)

    assert actual.remedy is not None


def test_limit_below_the_device_is_named() -> None:
    """A process that is allowed less than the device has was stopped by its limit, not by the device."""
    worst, actual = status_of(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.00 GiB of which 10.00 GiB is "
        "free. 11.00 GiB allowed; Of the allocated memory 10.90 GiB is allocated by PyTorch, and 1.00 MiB is reserved "
        "by PyTorch but unallocated.",
        "baseline.misconfigured",
    )

    assert ("fault", "fault") == (worst, actual.status)


def test_weights_that_do_not_fit_are_not_the_fractions_fault() -> None:
    """While weights are loaded there is no pool that could be smaller."""
    actual = finding("baseline.misconfigured", account(phase="load"), report=REPORT)

    assert "fault" == actual.status
    assert actual.remedy is not None
    assert "--gpu-memory-utilization" not in actual.remedy


def test_more_than_at_start_is_suspect() -> None:
    """What torch held beyond weights, pool and peak of its start either grew, or is of this step."""
    # 74 GiB by the start's figures
    grown, same = account(phase="prefill"), account(phase="prefill", allocated_bytes=73 * GIB)

    assert "suspect" == finding("leak.device_torch", grown, report=REPORT).status
    assert "ok" == finding("leak.device_torch", same, report=REPORT).status
    assert "unknown" == finding("leak.device_torch", grown).status


def test_host_kill_is_no_leak_by_itself() -> None:
    """The kernel's word says how much was held, not whether it had grown."""
    worst, actual = status_of("Out of memory: Killed process 4 (x) total-vm:1kB, anon-rss:6291456kB", "leak.host")

    assert ("unknown", "unknown") == (worst, actual.status)
    assert "6.00 GiB" in actual.summary


def test_leak_of_the_trace_comes_before_the_spike_that_ended_it() -> None:
    """Where the trace shows growth, the last allocation is a consequence."""
    # A trace in which every request leaves 64 MiB
    world = World(device_growth_bytes=64 * MIB)

    actual = finding("spike.activation", account(phase="prefill"), timeline=run(world), facts=facts_of(world))

    assert "suspect" == actual.status
    assert "leak.device" in actual.summary


def test_second_copy_of_the_trace_is_no_spike() -> None:
    """A step that finds no room beside two copies of the weights would have had it beside one."""
    # A server that held its weights twice, and then ran out in a prefill
    world = World(overhead_bytes=7 * GIB, device_bytes=32 * GIB)

    case = Case(accounts=(account(phase="prefill"),), timeline=run(world), facts=facts_of(world))
    found = {one.id: one.status for one in postmortem(case).findings}

    assert ("fault", "ok") == (found["baseline.duplicate_model"], found["spike.activation"])


def test_sources_that_agree_fill_in_what_one_cannot_tell() -> None:
    """The exact figures are the black box's, the phase is the log's, and both are named."""
    box = account(origin="the black box", exact=True, asked_bytes=GIB + 4096)
    log = account(origin="a log", phase="encoder", phase_told_by="traceback", free_bytes=None)

    actual = finding("spike.activation", log, box)

    evidence = {one.name: one.value for one in actual.evidence}
    assert (GIB + 4096, "encoder", "the black box; a log agrees") == (
        evidence["requested"],
        evidence["phase"],
        evidence["sources"],
    )


def test_sources_that_contradict_are_said_to() -> None:
    """Two failures are not mixed: one is judged, and the other is named."""
    actual = postmortem(
        Case(
            accounts=(
                account(origin="the black box", exact=True),
                account(origin="a log", asked_bytes=3 * GIB, device=1),
            )
        )
    )

    assert 1 == len(actual.gaps)


def test_every_verdict_is_known_and_advice_of_torch_is_never_one() -> None:
    """Whatever is said has an entry, and torch's hint about fragmentation moves nothing."""
    hint = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB."

    without, with_hint = (postmortem(case_of(one)) for one in (text, text + hint))

    assert {one.id for one in without.findings} <= set(KNOWLEDGE)
    assert [(one.id, one.status) for one in without.findings] == [(one.id, one.status) for one in with_hint.findings]
