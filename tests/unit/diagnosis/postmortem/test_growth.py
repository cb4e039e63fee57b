"""leak.device_torch and leak.host of a post-mortem: growth since the start, by what the start printed."""

from pathlib import Path
from typing import Any

import pytest

from kvdiag.diagnosis.postmortem import Case, postmortem
from kvdiag.oom.log import read_failures
from tests.unit.diagnosis.postmortem.cases import GIB, account, case_of, finding, report_of, status_of_text

LOGS = Path(__file__).parents[3] / "fixtures" / "failures"

TORCH, HOST = "leak.device_torch", "leak.host"


@pytest.mark.parametrize(
    ("total_gib", "least_bytes"),
    [(80, 2 * 10**9), (200, 4_294_967_296)],  # a fiftieth of 200 GiB
)
@pytest.mark.parametrize(("beyond_bytes", "status"), [(0, "ok"), (1, "suspect")])
def test_suspect_from_two_gigabytes_and_a_fiftieth(
    total_gib: int, least_bytes: int, beyond_bytes: int, status: str
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
    over_bytes: int, total_bytes: int | None, status: str
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
def test_only_judged_where_it_served(kind: str, phase: str | None, expected: list[str]) -> None:
    """Nothing can have grown before the first request; without the start's figures it is unknown."""
    found = postmortem(Case(accounts=(account(kind, phase=phase),))).findings
    assert expected == [one.status for one in found if one.id == TORCH]


@pytest.mark.parametrize("missing", ["weights", "pool", "allocated"])
def test_unknown_where_a_part_of_the_sum_is_missing(missing: str) -> None:
    """Of the start's figures weights and pool, and what torch had allocated."""
    sizes: dict[str, int | None] = {"weights": 10, "pool": 50, "activation": 4}
    report = report_of(**{name: None if name == missing else size for name, size in sizes.items()})
    figures: dict[str, Any] = {"allocated_bytes": None} if missing == "allocated" else {}

    assert "unknown" == finding(TORCH, account(phase="decode", **figures), report=report).status


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Out of memory: Killed process 4 (x) total-vm:1kB", "fault"),
        ("Out of memory: Killed process 4 (x) total-vm:1kB, anon-rss:6291456kB", "fault"),
        ("Reason: OOMKilled\nExit Code: 137", "fault"),
        ("exitCode: 137\nreason: OOMKilled", "fault"),
        ("vllm.service: Failed with result 'oom-kill'.", "fault"),
        ("low 0\nmax 12\noom 1\noom_kill 1", "fault"),
        ("numpy: Unable to allocate 8.00 GiB for an array", "fault"),
        ("command terminated with exit code 137", "unknown"),
        ("exit code 137 of pod zoom-0", "unknown"),
        ("    Last State:     Terminated\n      Reason:       Error\n      Exit Code:    137", "unknown"),
        ("./serve.sh: line 3:\nKilled", "unknown"),
    ],
)
def test_a_kill_for_lack_of_memory_is_a_fault(text: str, status: str) -> None:
    """A kill that the kernel, Kubernetes, systemd or the cgroup reports is a fault; signal 9 alone is unknown."""
    worst, actual = status_of_text(text, HOST)

    assert (status, status) == (worst, actual.status)
    assert HOST not in {one.id for one in postmortem(Case(accounts=(account(),))).findings}


def test_a_cgroup_that_killed_nothing_is_no_failure() -> None:
    """The counter of kills stands there at 0 too."""
    assert read_failures("low 0\nhigh 0\nmax 12\noom 0\noom_kill 0\noom_group_kill 0") is None


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "host-cgroup-kill.log",
            {
                "process": "VLLM::EngineCor (pid 91823)",
                "this_process": 58213400 * 1024,
                "memory_in_use": 60 * GIB,
                "memory_limit": 60 * GIB,
            },
        ),
        ("host-kubectl-describe.log", {"process": "vllm", "memory_limit": 64 * GIB}),
    ],
)
def test_a_kill_names_process_and_limit(log: str, expected: dict[str, Any]) -> None:
    """The kernel's figures of the cgroup stand above its list of tasks; of two containers the one that was killed."""
    found = finding(HOST, case_of((LOGS / log).read_text()).accounts[0])
    figures = {one.name: one.value for one in found.evidence}
    assert expected == {name: figures.get(name) for name in expected}


@pytest.mark.parametrize(
    ("limit_gib", "raised"), [(4, "5.00 GiB"), (10, "12.0 GiB"), (60, "72.0 GiB"), (64, "80.0 GiB"), (500, "608 GiB")]
)
def test_a_limit_is_raised_to_what_one_would_set(limit_gib: int, raised: str) -> None:
    """A fifth of headroom, in steps of 1, 4 and 16 GiB."""
    remedy = finding(HOST, account("host", message="OOMKilled", limit_bytes=limit_gib * GIB, process_bytes=None)).remedy
    assert remedy is not None
    assert f"-> {raised};" in remedy
