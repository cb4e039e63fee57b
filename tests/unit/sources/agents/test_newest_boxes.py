"""Black boxes next to agents' publications: each living process's last failed allocation."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvdiag.model import FailedAllocation
from kvdiag.sources.agents.allocator_files import TorchAllocatorSource
from tests.builders.answers import containing
from tests.unit.sources.agents.publications import PUBLICATION, SELF

MIB = 2**20
OWN = f"{SELF['pid']}-{SELF['start_ticks']}"


def box(*, asked_bytes: int = 512 * MIB, ago_seconds: float = 60.0) -> dict[str, Any]:
    """A black box of this process."""
    return {
        "kvdiag_black_box": 1,
        "number": 0,
        "device": 0,
        "asked_bytes": asked_bytes,
        "allowed_bytes": 80_000 * MIB,
        "free_bytes": 200 * MIB,
        "document": {**PUBLICATION, "wall_seconds": time.time() - ago_seconds},
    }


def write(folder: Path, name: str, told: object) -> None:
    """A file written as the agent does: a draft in the same folder, then a rename."""
    draft = folder / f".{name}.new"
    draft.write_text(json.dumps(told))
    draft.chmod(0o640)
    draft.replace(folder / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which this process publishes."""
    write(tmp_path, f"agent-{OWN}.json", PUBLICATION)
    return tmp_path


def failure(source: TorchAllocatorSource) -> FailedAllocation | None:
    """What the one process last failed to allocate."""
    found, _, _ = source.read()
    assert found is not None
    return found[0].failure


def test_newest_box_of_a_living_process_is_told_with_its_age(folder: Path) -> None:
    """What was asked for, what was free and the blocks of that moment, from the newest of its boxes."""
    write(folder, f"oom-{OWN}-0.json", box(asked_bytes=512 * MIB, ago_seconds=60.0))
    write(folder, f"oom-{OWN}-1.json", box(asked_bytes=900 * MIB, ago_seconds=600.0))

    actual = failure(TorchAllocatorSource(folder))

    assert actual is not None
    assert (512 * MIB, 200 * MIB) == (actual.asked_bytes, actual.free_bytes)
    assert 60.0 <= actual.age_seconds < 90.0
    assert actual.split is not None
    assert 250 * MIB == actual.split.stranded_bytes


def test_box_that_takes_anothers_place_is_read(folder: Path) -> None:
    """A process keeps its last few: the same name comes again with another failure."""
    source = TorchAllocatorSource(folder)
    write(folder, f"oom-{OWN}-0.json", box())
    first = failure(source)
    write(folder, f"oom-{OWN}-0.json", box(asked_bytes=700 * MIB, ago_seconds=1.0))
    os.utime(folder / f"oom-{OWN}-0.json", ns=(1, time.time_ns() + 10**9))
    second = failure(source)
    assert [512 * MIB, 700 * MIB] == [one.asked_bytes for one in (first, second) if one is not None]


def test_boxes_of_other_processes_are_left_alone(folder: Path) -> None:
    """A box of an exited process, or of an earlier process with the same id, is left to the post-mortem."""
    write(folder, f"oom-{SELF['pid']}-{SELF['start_ticks'] + 1}-0.json", box())
    write(folder, f"oom-{SELF['pid'] + 1}-{SELF['start_ticks']}-0.json", "not looked at")
    found, gaps, _ = TorchAllocatorSource(folder).read()
    assert found is not None
    assert (None, ()) == (found[0].failure, gaps)


@pytest.mark.parametrize(
    ("told", "reason"), [("text", "not a JSON object"), ({**box(), "asked_bytes": -1}, "asked_bytes is -1")]
)
def test_damaged_box_is_a_gap_and_the_process_is_read(folder: Path, told: object, reason: str) -> None:
    """It costs itself alone."""
    write(folder, f"oom-{OWN}-0.json", told)
    found, gaps, _ = TorchAllocatorSource(folder).read()
    assert found is not None
    assert (None, [containing(f"oom-{OWN}-0.json: ", reason)]) == (found[0].failure, [gap.reason for gap in gaps])


def test_box_without_sizes_that_can_be_is_no_failure(folder: Path) -> None:
    """More than any device has was asked for: a bug of the caller, and no word on holes."""
    write(folder, f"oom-{OWN}-0.json", box(asked_bytes=2**62))
    assert failure(TorchAllocatorSource(folder)) is None
