"""The agents' files as a reader meets them: whole ones, ones of another shape, and ones whose figures cannot be."""

from pathlib import Path

import pytest

from kvdiag.model import Gap
from kvdiag.sources.agents import allocator_files as agents
from kvdiag.sources.agents.allocator_files import TorchAllocatorSource
from tests.builders.answers import containing
from tests.unit.sources.agents.publications import MIB, NAME, READ, SELF, changed, read, write


def test_publication_is_read_whole(tmp_path: Path) -> None:
    """Every figure of a publication is read, with the bytes that NVML reports for its process."""
    write(tmp_path)
    assert ((READ,), []) == read(tmp_path)


def test_cuda_malloc_async_has_no_split(tmp_path: Path) -> None:
    """Without segments and blocks the totals are there and their split is not."""
    told = changed("torch.backend", "cudaMallocAsync")
    del told["devices"][0]["fragmentation"]
    write(tmp_path, told)
    (actual,), _ = read(tmp_path)  # type: ignore[misc]
    assert ("cudaMallocAsync", None) == (actual.backend, actual.split)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("kvdiag_agent", 2, "format 2"),
        ("kvdiag_agent", "1", "kvdiag_agent is 1"),
        ("kvdiag_agent", ..., "kvdiag_agent is None"),
        ("process", [], "process is not an object"),
        ("process.pid", 1, "from process 1"),
        ("process.pid", True, "Publication.pid must be int"),
        pytest.param("process.start_ticks", 5, f"from process {SELF['pid']}", id="another start"),
        ("period_seconds", 1e9, "period_seconds is 1000000000.0"),
        ("devices", {}, "devices is not a list"),
    ],
)
def test_file_that_is_no_publication_is_a_gap(tmp_path: Path, path: str, value: object, reason: str) -> None:
    """A file of another version or shape, or that speaks for another process, is named with what is wrong."""
    write(tmp_path, changed(path, value))
    assert (None, [containing(f"failed: {NAME}: ", reason)]) == read(tmp_path)


DEVICE_TROUBLE: list[tuple[str, object, str]] = [
    ("devices.0.uuid", None, "torch before 2.4"),
    ("devices.0.statistics", {}, "Allocator.allocated_bytes must be int"),
    (
        "devices.0.statistics.allocated_bytes.current",
        2000 * MIB,
        f"Allocator: allocated_bytes is {2000 * MIB}, not within 0..{620 * MIB}",
    ),
    ("devices.0.statistics.reserved_bytes.current", -1, "Allocator: reserved_bytes is -1"),
    ("devices.0.statistics.reserved_bytes.current", 2**60, "Allocator: reserved_bytes is 1152921504606846976"),
    ("devices.0.statistics.num_ooms", 1.5, "Allocator.ooms_total must be int"),
    ("devices.0.driver.free_bytes", 2**49, "Memory: free_bytes is"),
    ("devices.0.driver.processes", [[1]], "process list"),
    ("devices.0.driver.processes", [[SELF["pid"], "x"]], "Allocator.process_bytes must be int"),
    ("devices.0.fragmentation.stranded_bytes", 0, "ReservedSplit: parts of"),
    ("devices.0.fragmentation.unusable_ratio", 7, "ReservedSplit: unusable_ratio is 7.0"),
    ("devices.0.fragmentation", "none", "fragmentation is not an object"),
    ("devices.0", 7, "device is not an object"),
]


@pytest.mark.parametrize(("path", "value", "reason"), DEVICE_TROUBLE)
def test_impossible_figures_of_a_device_are_a_gap(tmp_path: Path, path: str, value: object, reason: str) -> None:
    """A device with impossible figures is a gap; its process is still listed."""
    write(tmp_path, changed(path, value))
    found, gaps = read(tmp_path)
    assert () == found
    assert containing(f"failed: VLLM::Worker_TP1 {SELF['pid']}: ", reason) == gaps[0]


def test_what_the_agent_could_not_read_is_told(tmp_path: Path) -> None:
    """The agent's own errors are gaps, made fit to be shown, and its figures are read all the same."""
    write(tmp_path, changed("errors", {"driver": "DriverError: \x1b[2Jno\nlibrary", "x" * 500: "y" * 500}))
    found, gaps = read(tmp_path)
    assert (READ,) == found
    assert f"failed: VLLM::Worker_TP1 {SELF['pid']}: driver: DriverError:  [2Jno library" == gaps[0]
    assert len(gaps[1]) < 220


def test_gap_names_its_source(tmp_path: Path) -> None:
    """Each gap of this source carries the source's name."""
    _, gaps, _ = TorchAllocatorSource(tmp_path).read()
    assert [agents.SOURCE] == [gap.source for gap in gaps]
    assert all(isinstance(gap, Gap) for gap in gaps)
