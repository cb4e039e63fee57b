from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.baseline_foreign_memory import judge
from kvdiag.model import Facts, Finding, Process, Sample, Timeline
from tests.builders.answers import ANY_TEXT, evidence, rows
from tests.builders.runs import run
from tests.builders.values import GIB, GPU_LOST, MIB, NO_NVML, device, engine, process, seen
from tests.builders.worlds import TRAINING, World, facts

SERVER = Facts(server_pids=(100, 101))


def verdict(world: World) -> Finding:
    """The rule's one finding on a run."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def at_idle(*devices: object, of: Facts = SERVER) -> Finding:
    """The rule's one finding on one reading of some devices."""
    (found,) = judge(seen(engine(), devices=devices), of, DEFAULT_LIMITS)  # type: ignore[arg-type]
    return found


def over_minutes(*readings: tuple[Process, ...], of: Facts = SERVER) -> Finding:
    """The rule's one finding on one process list each minute, of a GPU that holds what they and the driver hold."""
    samples = [
        Sample(
            at_seconds=60.0 * minute,
            devices=(device(used_bytes=464 * MIB + sum(one.used_bytes or 0 for one in listed), processes=listed),),
        )
        for minute, listed in enumerate(readings)
    ]
    (found,) = judge(Timeline(samples=tuple(samples)), of, DEFAULT_LIMITS)
    return found


def test_another_programs_memory_is_a_fault() -> None:
    """Six GiB of somebody else on the server's GPU are named with their process, and priced."""
    world = World(foreign={0: (TRAINING,)}, device_bytes=48 * GIB)
    actual = verdict(world)
    assert ("baseline.foreign_memory", "fault") == (actual.id, actual.status)
    assert [
        ("gpu", 0, "index", "nvml"),
        ("foreign_bytes", 6 * GIB, "bytes", "nvml"),
        ("process 4242", 6 * GIB, "bytes", "nvml: train.py"),
        ("unattributed", 0, "bytes", "computed"),
    ] == rows(actual)


def test_a_server_alone_on_its_gpu_is_ok() -> None:
    """Driver and server explain every byte."""
    actual = verdict(World())
    assert "ok" == actual.status


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (World(nvml=NO_NVML), NO_NVML.reason),
        (World(nvml=GPU_LOST), GPU_LOST.reason),
        (World(processes_told=False), ANY_TEXT),
        (
            World(foreign={0: (process(7, None),)}),
            ANY_TEXT,
        ),
        (
            World(server_seen=False, foreign={0: (TRAINING,)}, device_bytes=48 * GIB),
            ANY_TEXT,
        ),
    ],
    ids=["no NVML", "GPU lost", "no process list", "process of unknown size", "server not among them"],
)
def test_what_the_driver_does_not_tell_is_unknown(world: World, reason: str) -> None:
    """Without processes, their sizes, or knowing the server's, nobody is accused and nobody cleared."""
    actual = verdict(world)
    assert "unknown" == actual.status


@pytest.mark.parametrize(
    ("size", "status"),
    [(100 * MIB, "ok"), (255 * MIB, "ok"), (256 * MIB, "suspect"), (490 * MIB, "suspect"), (492 * MIB, "fault")],
)
def test_what_others_hold_is_weighed_against_the_device(size: int, status: str) -> None:
    """A desktop's display server is of no note, a CUDA context is suspect, 2 % of the device is a fault."""
    # Another process of that size on a GPU of 24 GiB
    own = process(100, 10 * GIB)
    actual = at_idle(device(used_bytes=10 * GIB + 464 * MIB + size, processes=(own, process(7, size))))
    assert status == actual.status


def test_bytes_of_no_process_are_suspect() -> None:
    """Two GiB that neither the driver nor a listed process holds are a zombie's, or of another container."""
    actual = verdict(World(zombie_bytes=2 * GIB))
    assert "suspect" == actual.status


def test_a_lone_process_of_unknown_owner_is_taken_for_the_server() -> None:
    """A container sees host pids: one process alone on the GPU is the server's for want of anybody else."""
    actual = at_idle(device(used_bytes=10 * GIB + 464 * MIB, processes=(process(99_999, 10 * GIB),)))
    # It is cleared, and the assumption is told
    assert "ok" == actual.status


def test_somebody_elses_gpu_is_not_looked_at() -> None:
    """On a host of two GPUs only the one with the server's process is judged."""
    # A training job on GPU 1 and the server on GPU 0
    actual = verdict(World(foreign={1: (TRAINING,)}))
    assert "ok" == actual.status


def test_the_worst_of_the_servers_gpus_is_told() -> None:
    """Tensor parallel: a co-tenant on the second GPU is found although the first is clean."""
    actual = verdict(World(gpus=2, foreign={1: (process(7, 3 * GIB),)}))
    assert ("fault", 1) == (actual.status, evidence(actual)["gpu"])


def test_several_processes_of_the_server_are_all_its_own() -> None:
    """Engine core and workers of one server on one GPU are not foreign to one another."""
    actual = at_idle(device(used_bytes=12 * GIB + 464 * MIB, processes=(process(100, 10 * GIB), process(101, 2 * GIB))))
    assert "ok" == actual.status


def test_a_mig_slice_is_judged_by_its_own_processes() -> None:
    """With MIG the parent lists nothing and the neighbour's slice is not the server's."""
    parent = device(used_bytes=None)
    own = device(uuid="MIG-a", mig_parent_uuid="GPU-0", used_bytes=5 * GIB, processes=(process(100, 5 * GIB),))
    others = device(
        uuid="MIG-b", mig_parent_uuid="GPU-0", processes=(process(7, 5 * GIB), process(8, 5 * GIB)), used_bytes=11 * GIB
    )
    assert "ok" == at_idle(parent, own, others).status


def test_unseen_bytes_are_not_cleared_where_the_reservation_is_not_told() -> None:
    """NVML's first memory call does not tell the driver's share: many GiB of no process are then not called nothing."""
    # 8 GiB that are the driver's or a zombie's
    actual = at_idle(
        device(used_bytes=18 * GIB, driver_reserved_bytes=None, processes=(process(100, 10 * GIB),)),
    )
    assert "ok" != actual.status


OWN, ORPHAN = process(100, 10 * GIB, "VLLM::EngineCore"), process(7, 6 * GIB, "python3")


def test_readings_before_the_servers_processes_are_there_decide_nothing() -> None:
    """An orphan alone on the GPU is not taken for the server that then starts beside it."""
    actual = over_minutes((ORPHAN,), (ORPHAN, OWN), (ORPHAN, OWN))
    assert "fault" == actual.status


def test_a_neighbour_that_let_go_is_told() -> None:
    """What was there while the server sized its pool has cost it, although it is gone by now."""
    actual = over_minutes((ORPHAN, OWN), (ORPHAN, OWN), (OWN,), (OWN,))
    assert "suspect" == actual.status
    assert {"foreign_bytes": 6 * GIB, "foreign_bytes_now": 0, "ended_seconds_ago": 120.0} == {
        name: value for name, value in evidence(actual).items() if name != "gpu"
    }


def test_a_process_that_one_list_shows_is_no_neighbour() -> None:
    """The worker of a server before, seen once beside the new one, is on its way out."""
    lists = [[(ORPHAN, OWN), (OWN,), (OWN,)], [(OWN,), (OWN,), (ORPHAN, OWN)]]
    assert ["ok", "ok"] == [over_minutes(*one).status for one in lists]


def test_a_lone_process_is_nobodys_where_no_server_answers() -> None:
    """Before the server is up, one process on its GPU may be anybody's: it is not called healthy."""
    actual = over_minutes((ORPHAN,), (ORPHAN,))
    assert "unknown" == actual.status


@pytest.mark.parametrize(
    ("used", "reserved", "status"),
    [(352 * MIB, 0, "suspect"), (464 * MIB, 464 * MIB, "ok"), (352 * MIB, None, "unknown")],
    ids=["held by nobody", "the driver's", "driver's share not told"],
)
def test_memory_that_nobody_holds_where_there_is_no_server(used: int, reserved: int | None, status: str) -> None:
    """Without a server nothing of it can be hidden: what is held belongs to a zombie, or to somebody out of sight."""
    empty = device(used_bytes=used, driver_reserved_bytes=reserved, processes=())
    (actual,) = judge(seen(devices=(empty,)), Facts(), DEFAULT_LIMITS)
    assert status == actual.status


def test_an_empty_list_beside_a_server_that_answers_is_unknown() -> None:
    """In a container the driver lists nobody, the server neither: what is held is most likely its own."""
    assert "unknown" == at_idle(device(used_bytes=20 * GIB, processes=()), of=Facts()).status
