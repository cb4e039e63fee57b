"""A publication is believed from whom it claims to be: the user of the process, in a folder that others do not own."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.sources.agents.agent_folder import FUTURE_SECONDS
from kvdiag.sources.agents.allocator_files import TorchAllocatorSource
from kvdiag.sources.agents.black_boxes import read_file, read_folder
from tests.builders.answers import containing
from tests.unit.sources.agents.publications import NAME, PUBLICATION, READ, SELF, changed, read, write
from tests.unit.sources.agents.test_newest_boxes import OWN, box
from tests.unit.sources.host_programs import LONG_SECONDS

STRANGER = 54_321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where agents publish; a stranger may look into what it is in."""
    path = tmp_path / "published"
    path.mkdir(mode=0o750)
    return path


@pytest.fixture
def strangers() -> Iterator[dict[str, int]]:
    """A process of another user, as it says who it is."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=STRANGER) as process:
        start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        yield {**PUBLICATION["process"], "pid": process.pid, "start_ticks": start}
        process.communicate(timeout=LONG_SECONDS)


def publish(folder: Path, who: dict[str, int], *, owner: int) -> Path:
    """A file that speaks of this process."""
    path = write(folder, changed("process", who), f"agent-{who['pid']}-{who['start_ticks']}.json")
    os.chown(path, owner, owner)
    return path


@as_root
@pytest.mark.parametrize(
    ("folder_owner", "mode", "group"),
    [
        pytest.param(STRANGER, 0o755, STRANGER, id="in its own folder"),
        pytest.param(0, 0o770, STRANGER, id="in a folder of its group"),
        pytest.param(0, 0o1777, 0, id="in everybody's folder"),
    ],
)
def test_a_strangers_word_on_our_process_is_refused(folder: Path, folder_owner: int, mode: int, group: int) -> None:
    """A file about this process, owned by another user, is refused."""
    os.chown(publish(folder, PUBLICATION["process"], owner=STRANGER), STRANGER, STRANGER)
    os.chown(folder, folder_owner, group)
    folder.chmod(mode)
    found, gaps = read(folder)
    assert found is None
    assert any(f"user {STRANGER}" in gap for gap in gaps)


@as_root
def test_a_stranger_is_believed_on_its_own_process(folder: Path, strangers: dict[str, int]) -> None:
    """Its file, in its folder."""
    publish(folder, strangers, owner=STRANGER)
    os.chown(folder, STRANGER, STRANGER)
    found, gaps = read(folder)
    assert ([(strangers["pid"], True, None)], []) == (
        [(each.pid, each.pid_seen, each.unverified) for each in found or ()],
        gaps,
    )


@as_root
def test_our_file_in_a_strangers_folder_is_not_vouched_for(folder: Path) -> None:
    """It could have been kept, moved or put back there."""
    write(folder)
    os.chown(folder, STRANGER, STRANGER)
    # As another reader than root, whose folder every folder could be
    found, _ = read(folder)
    assert ((replace(READ, unverified=True),)) == found


def test_a_file_that_its_group_may_write_is_unverified(folder: Path) -> None:
    """Anybody in the group could have written it."""
    write(folder).chmod(0o660)
    found, _ = read(folder)
    assert (replace(READ, unverified=True),) == found


def test_a_process_that_is_not_seen_is_unverified(folder: Path) -> None:
    """A claim to be in another PID namespace proves nothing."""
    write(folder, changed("process.pid_namespace", 1))
    found, _ = read(folder)
    assert (replace(READ, pid_seen=False, unverified=True),) == found


def test_a_file_of_the_future_is_refused(folder: Path) -> None:
    """A file with a timestamp in the future is refused: it would look new forever."""
    os.utime(write(folder), (time.time() + FUTURE_SECONDS + 60,) * 2)
    found, gaps = read(folder)
    assert found is None
    assert "in the future" in gaps[0]


def test_a_second_name_of_another_file_is_refused(folder: Path, tmp_path: Path) -> None:
    """What is laid there as a hard link is not the agent's."""
    (folder / NAME).hardlink_to(write(tmp_path))
    found, gaps = read(folder)
    assert found is None
    assert "hard link" in gaps[0]


def write_box(folder: Path, told: dict[str, Any], *, owner: int | None = None, name: str = f"oom-{OWN}-0.json") -> None:
    """A black box next to this process's publication."""
    write(folder)
    path = write(folder, json.dumps(told), name)
    if owner is not None:
        os.chown(path, owner, owner)


def failure(folder: Path) -> tuple[object, list[str]]:
    """What the process last failed to allocate, and what was refused."""
    found, gaps, _ = TorchAllocatorSource(folder).read()
    assert found is not None
    return found[0].failure, [gap.reason for gap in gaps]


@as_root
def test_a_strangers_black_box_is_refused(folder: Path) -> None:
    """It would have our process have failed."""
    write_box(folder, box(), owner=STRANGER)
    found, (gap,) = failure(folder)
    assert found is None
    assert f"user {STRANGER}" in gap


def test_a_black_box_that_its_group_may_write_is_refused(folder: Path) -> None:
    """Anybody in the group could have our process have failed."""
    write_box(folder, box())
    (folder / f"oom-{OWN}-0.json").chmod(0o660)
    found, (gap,) = failure(folder)
    assert found is None
    assert "group" in gap


@as_root
def test_a_black_box_speaks_of_the_process_in_its_name(folder: Path, strangers: dict[str, int]) -> None:
    """A stranger whose own process is believed cannot say that another's has failed."""
    name = f"oom-{strangers['pid']}-{strangers['start_ticks']}-0.json"
    publish(folder, strangers, owner=STRANGER)
    write_box(folder, box(), owner=STRANGER, name=name)
    found, gaps, _ = TorchAllocatorSource(folder).read()
    assert {SELF["pid"]: None, strangers["pid"]: None} == {each.pid: each.failure for each in found or ()}
    assert [containing(f"{name}: ", f"from process {SELF['pid']}")] == [gap.reason for gap in gaps]


def test_a_black_box_of_the_future_is_refused(folder: Path) -> None:
    """A black box dated in the future is refused: its failure would look recent forever."""
    write_box(folder, box(ago_seconds=-3600.0))
    found, (gap,) = failure(folder)
    assert found is None
    assert "in the future" in gap


@as_root
@pytest.mark.parametrize(
    ("owner", "namespace", "ago_seconds", "refusal"),
    [
        pytest.param(0, 1, 60.0, "", id="its user's"),
        pytest.param(STRANGER, 1, 60.0, "unverified", id="of a process that is not seen"),
        pytest.param(STRANGER, None, 60.0, f"user {STRANGER}", id="of our process"),
        pytest.param(0, 1, -3600.0, "in the future", id="of the future"),
    ],
)
def test_a_post_mortem_believes_its_user_and_whom_it_can_check(
    folder: Path, owner: int, namespace: int | None, ago_seconds: float, refusal: str
) -> None:
    """A black box that was copied here is the user's own; another user's is refused, or marked in the evidence."""
    found = box(ago_seconds=ago_seconds)
    who = found["document"]["process"]
    found["document"]["process"] = {**who, "pid_namespace": namespace or who["pid_namespace"]}
    path = write(folder, json.dumps(found), f"oom-{OWN}-0.json")
    os.chown(path, owner, owner)
    os.chown(folder, owner, owner)
    boxes, gaps = read_folder(folder)
    try:
        problem, named = "", [read_file(path, path.read_bytes())]
    except KvdiagError as error:
        problem, named = str(error), []

    doubted = refusal == "unverified"
    expected = [] if refusal and not doubted else [(doubted, doubted)]
    for read_so in (boxes, named):
        assert expected == [(one.unverified, "unverified" in one.origin) for one in read_so]
    assert [not expected] * 2 == [bool(gaps), bool(problem)]
    assert expected or (refusal in gaps[0].reason and refusal in problem)
