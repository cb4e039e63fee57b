"""The agent in a process of its own, beside a stand-in for torch: what it publishes, and what it never does."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvdiag.agent
from tests.agent.subject import environment, installed, published, run
from tests.e2e.sessions import kill_session

LIMIT_SECONDS = 30.0
OLDEST_PYTHON = (3, 9)

BUSY = """
import json, os, sys, time, torch
from torch.world import ACTIVE, FREE, MIB, WORLD
torch.cuda.init()
WORLD.segment((512 * MIB, ACTIVE), stream=7)
WORLD.segment((60 * MIB, FREE), (4 * MIB, ACTIVE), stream=7)
WORLD.segment((20 * MIB, FREE), stream=7)
WORLD.segment((30 * MIB, FREE), stream=7, pool=(0, 1))
"""
"""A server that holds 626 MiB of its GPU."""

ONCE = """
from kvdiag_agent.thread import Agent
agent = Agent(os.environ["KVDIAG_AGENT_DIR"])
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent as it is installed."""
    return installed(tmp_path_factory.mktemp("agent"))


def names_in(folder: Path) -> list[str]:
    """The names of what is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def wait_for(reached: Callable[[], bool]) -> None:
    """Poll until `reached`."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not reached within {LIMIT_SECONDS} s")
        time.sleep(0.01)


@contextmanager
def started(program: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A program, running; killed at the end, its children with it."""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            kill_session(process.pid)


def test_everything_of_a_process_is_published(agent: Path, tmp_path: Path) -> None:
    """One file has torch's statistics, the split of its reserved bytes, and who the process is."""
    # WHEN
    pid = run(
        BUSY + ONCE + "agent.publish(); print(os.getpid())", environment(agent, tmp_path, env={"LOCAL_RANK": "3"})
    )

    # THEN
    (told,) = published(tmp_path)
    (device,) = told["devices"]
    split = device["fragmentation"]
    mib = 2**20
    assert (1, 1, {"local": 3}) == (told["kvdiag_agent"], told["sequence"], told["ranks"])
    assert pid == told["process"]["pid"] == told["process"]["namespace_pids"][-1]
    assert os.getuid() == told["process"]["user_id"]
    assert told["process"]["resident_bytes"] >= told["process"]["anonymous_bytes"] > mib
    assert (True, "native", "2.13.0+standin") == tuple(
        told["torch"][name] for name in ("cuda_initialised", "backend", "version")
    )
    assert told["torch"]["settings"]["expandable_segments"] is False
    assert "01234567-89ab-cdef-0123-456789abcdef" == device["uuid"]
    assert 516 * mib == device["statistics"]["allocated_bytes"]["current"]
    assert {"count": 1, "reserved_bytes": 30 * mib} == device["statistics"]["private_pools"]
    assert (20 * mib, 60 * mib, 30 * mib) == (
        split["releasable_bytes"],
        split["stranded_bytes"],
        split["private_bytes"],
    )
    assert {"driver": "DriverError: no libnvidia-ml.so.1 here"} == told["errors"]


def test_cuda_is_never_touched(agent: Path, tmp_path: Path) -> None:
    """Before the server has initialised CUDA nothing that would do it is called, and never anything that waits."""
    # GIVEN
    early = "import json, os, torch; from torch.world import WORLD\n" + ONCE + "agent.publish(); agent.publish()\n"
    later = "torch.cuda.init(); WORLD.allocate(2**20); agent.publish(); agent.publish()\n"
    report = "import kvdiag_agent.report; kvdiag_agent.report.memory_report()\n"
    tell = "print(json.dumps([WORLD.touches, len(WORLD.observers), WORLD.snapshots]))"

    # WHEN
    before = run(early + report + tell, environment(agent, tmp_path))
    after = run(early + later + report + tell, environment(agent, tmp_path))

    # THEN
    assert [[], 0, 0] == before
    assert [[], 1, 2] == after


def test_torch_is_never_imported(agent: Path, tmp_path: Path) -> None:
    """A process without torch publishes nothing, and has none afterwards."""
    # WHEN
    actual = run(
        "import json, os, sys\n" + ONCE + "agent.publish(); print(json.dumps('torch' in sys.modules))",
        environment(agent, tmp_path),
    )

    # THEN
    assert (False, []) == (actual, published(tmp_path))


def test_without_its_variable_it_does_nothing(agent: Path) -> None:
    """A server that merely has the agent on its path starts no thread and imports nothing of it but the way in."""
    # GIVEN
    program = "import json, sys, threading, kvdiag_agent; kvdiag_agent.register()\n"
    tell = "print(json.dumps([threading.active_count(), [name for name in sys.modules if 'kvdiag' in name]]))"

    # WHEN
    actual = run(program + tell, environment(agent, None))

    # THEN
    assert [1, ["kvdiag_agent"]] == actual


def test_it_is_renewed_each_second_by_one_thread(agent: Path, tmp_path: Path) -> None:
    """Registered twice, it publishes once a second; an orderly end takes the file away."""
    # GIVEN
    program = BUSY + "import kvdiag_agent as agent; agent.register(); agent.register(); input()"
    with started(program, environment(agent, tmp_path)) as process:
        # WHEN
        wait_for(lambda: any(one["sequence"] >= 3 for one in published(tmp_path)))
        (told,) = published(tmp_path)
        threads = names_in(Path(f"/proc/{process.pid}/task"))
        process.communicate("\n", timeout=LIMIT_SECONDS)

    # THEN
    assert 1.0 == told["period_seconds"]
    assert 2 == len(threads)
    assert [] == published(tmp_path)


def test_killed_process_leaves_its_last_word(agent: Path, tmp_path: Path) -> None:
    """A file that stays, and stays as it is, is what is left of a process that died."""
    # GIVEN
    program = BUSY + "import kvdiag_agent; kvdiag_agent.register(); input()"
    with started(program, environment(agent, tmp_path)) as process:
        wait_for(lambda: published(tmp_path) != [])

        # WHEN
        process.kill()
        process.wait()

    # THEN
    (told,) = published(tmp_path)
    assert process.pid == told["process"]["pid"]
    assert [f"agent-{process.pid}-{told['process']['start_ticks']}.json"] == names_in(tmp_path)


def test_forked_processes_publish_too(agent: Path, tmp_path: Path) -> None:
    """The child of a fork has no threads: it gets an agent of its own, and the parent keeps its."""
    # GIVEN
    program = BUSY + (
        "import kvdiag_agent; kvdiag_agent.register()\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60); os._exit(0)\n"
        "print(child, flush=True); input(); os.kill(child, 9)"
    )
    with started(program, environment(agent, tmp_path)) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())

        # WHEN
        wait_for(lambda: len(published(tmp_path)) == 2 and all(one["sequence"] >= 2 for one in published(tmp_path)))
        told = {one["process"]["pid"]: one for one in published(tmp_path)}
        process.communicate("\n", timeout=LIMIT_SECONDS)

    # THEN
    assert {process.pid, child} == set(told)
    assert told[child]["process"]["start_ticks"] >= told[process.pid]["process"]["start_ticks"]


def test_reader_never_sees_half_a_file(agent: Path, tmp_path: Path) -> None:
    """Whoever reads while the agent writes as fast as it can gets a whole publication each time, and none backwards."""
    # GIVEN
    program = BUSY + ONCE + "end = time.monotonic() + 1.5\nwhile time.monotonic() < end: agent.publish()"
    seen: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.extend(one["sequence"] for one in published(tmp_path))

    reader = threading.Thread(target=read)
    reader.start()

    # WHEN
    try:
        run(program, environment(agent, tmp_path))
    finally:
        over.set()
        reader.join()

    # THEN
    assert len(set(seen)) > 10
    assert sorted(seen) == seen


@pytest.mark.parametrize("umask", ["0o077", "0o000"])
def test_file_is_for_the_owner_and_its_group(agent: Path, tmp_path: Path, umask: str) -> None:
    """Whatever the server's umask, the file has mode 0640, and a folder that had to be made is the owner's alone."""
    # WHEN
    run(BUSY + f"os.umask({umask})\n" + ONCE + "agent.publish()", environment(agent, tmp_path / "made"))

    # THEN
    (file,) = (tmp_path / "made").iterdir()
    assert (0o640, 0o700) == (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE((tmp_path / "made").stat().st_mode))


def test_links_are_not_followed(agent: Path, tmp_path: Path) -> None:
    """Links laid where the agent's files are going to be leave what they point to as it is."""
    # GIVEN
    (tmp_path / "victim").write_text("mine")
    lay = (
        "from kvdiag_agent.process import identity\n"
        "who = identity(); name = f\"agent-{who['pid']}-{who['start_ticks']}.json\"\n"
        "for each in (name, f'.{name}.new'): os.symlink('victim', os.path.join(os.environ['KVDIAG_AGENT_DIR'], each))\n"
    )

    # WHEN
    run(BUSY + lay + ONCE + "agent.publish()", environment(agent, tmp_path))

    # THEN
    assert "mine" == (tmp_path / "victim").read_text()
    assert [False, False] == [path.is_symlink() for path in sorted(tmp_path.iterdir())]


DAMAGE = {
    "folder gone": "import shutil; shutil.rmtree(folder)",
    # The agent makes the folder anew as soon as it is gone: until the file is there first.
    "folder a file": "import pathlib, shutil, contextlib\n"
    "while not os.path.isfile(folder):\n"
    "  shutil.rmtree(folder, True)\n"
    "  with contextlib.suppress(OSError): pathlib.Path(folder).touch(exist_ok=False)",
    "file a folder": "agent.busy.acquire(); name, = os.listdir(folder); os.chdir(folder)\n"
    "os.unlink(name); os.mkdir(name); agent.busy.release()",
    "no statistics": "del torch.cuda.memory_stats_as_nested_dict",
    "no is_initialized": "del torch.cuda.is_initialized",
    "no snapshot": "del torch._C._cuda_memorySnapshot, torch.cuda.memory_snapshot",
    "no torch.cuda": "del sys.modules['torch.cuda'], torch.cuda",
    "no torch": "del sys.modules['torch']",
    "statistics of another shape": "torch.cuda.memory_stats_as_nested_dict = lambda device: {'active': 3}",
    "statistics that end": "torch.cuda.memory_stats_as_nested_dict = lambda device: sys.exit(3)",
    "segments of another shape": "WORLD.segments[0]['blocks'] = None",
    "figures that are none": "torch.cuda.get_allocator_backend = lambda: 1 / 0",
    "not JSON": "torch.cuda.memory_stats_as_nested_dict = lambda device: {'active': {'all': {'current': object()}}}",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_nothing_that_breaks_is_felt_by_the_server(agent: Path, tmp_path: Path, damage: str) -> None:
    """Whatever is taken from under the agent, nothing is said, the server goes on, and the thread is still there."""
    # GIVEN
    program = (
        BUSY + "folder = os.environ['KVDIAG_AGENT_DIR']\n"
        "import threading\nfrom kvdiag_agent import thread\n"
        "agent = thread.Agent(folder, 0.01); agent.start()\n"
        "while not (os.path.isdir(folder) and os.listdir(folder)): time.sleep(0.01)\n"
        f"{damage}\n"
        "end = time.monotonic() + 0.3\n"
        "while time.monotonic() < end: sum(range(1000))\n"
        "print(json.dumps([each.name for each in threading.enumerate()]))"
    )

    # WHEN
    actual = run(program, environment(agent, tmp_path / "published"))

    # THEN
    assert ["MainThread", "kvdiag-agent"] == actual


def test_what_fails_is_told_and_the_rest_is_there(agent: Path, tmp_path: Path) -> None:
    """A part that torch does not tell is named with its error; the other parts are as ever, and it comes back."""
    # GIVEN
    program = (
        BUSY + ONCE + "agent.publish(); kept = torch.cuda.memory_stats_as_nested_dict\n"
        "del torch.cuda.memory_stats_as_nested_dict; agent.publish()\n"
        "name, = os.listdir(os.environ['KVDIAG_AGENT_DIR'])\n"
        "told = json.load(open(os.path.join(os.environ['KVDIAG_AGENT_DIR'], name)))\n"
        "torch.cuda.memory_stats_as_nested_dict = kept; agent.publish(); print(json.dumps(told))"
    )

    # WHEN
    without = run(program, environment(agent, tmp_path))

    # THEN
    (healed,) = published(tmp_path)
    assert "AttributeError" in without["errors"]["torch"]
    assert without["process"]["resident_bytes"] > 0
    assert "torch" not in healed["errors"]


def test_full_disk_leaves_the_last_whole_file(agent: Path, tmp_path: Path) -> None:
    """Where nothing more can be written, what was published stays readable, and nothing unfinished stays behind."""
    # GIVEN a limit on the size of files, beyond which a write fails as on a full disk
    program = (
        BUSY
        + ONCE
        + (
            "import resource, signal; agent.publish(); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
            "try: agent.publish()\n"
            "except OSError as error: print(json.dumps(type(error).__name__))"
        )
    )

    # WHEN
    actual = run(program, environment(agent, tmp_path))

    # THEN
    (told,) = published(tmp_path)
    assert ("OSError", 1, 1) == (actual, told["sequence"], len(names_in(tmp_path)))


def test_summary_is_made_when_it_is_asked_for(agent: Path, tmp_path: Path) -> None:
    """The blocks are looked at once a minute; sooner where that was asked for, though not twice at once."""
    # GIVEN
    program = (
        BUSY
        + ONCE
        + (
            "from kvdiag_agent import document; counts = []\n"
            "document.ASKED_PAUSE_SECONDS, document.SUMMARY_PAUSE_RATIO = 0.3, 0.0\n"
            "def look(): agent.publish(); counts.append(WORLD.snapshots)\n"
            "request = os.path.join(os.environ['KVDIAG_AGENT_DIR'], 'summary-request')\n"
            "look(); look()\n"
            "time.sleep(0.4); look(); open(request, 'w').close(); look(); look()\n"
            "open(request, 'w').close(); look(); time.sleep(0.4); look(); look()\n"
            "print(json.dumps(counts))"
        )
    )

    # WHEN
    actual = run(program, environment(agent, tmp_path))

    # THEN
    assert [1, 1, 1, 2, 2, 2, 3, 3] == actual


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("WORLD.segments *= 9000", "blocks are too many to look at beside the server"),
        (
            "torch.cuda.memory_snapshot = lambda mempool_id=None: 0; WORLD.history = True",
            "a memory history is recorded, which this torch would hand over with the blocks",
        ),
    ],
    ids=["many blocks", "history"],
)
def test_no_snapshot_is_taken_that_would_hold_the_server_up(
    agent: Path, tmp_path: Path, change: str, reason: str
) -> None:
    """With too many blocks, or a history that would come along, the split is left out, and why is said."""
    # WHEN
    snapshots = run(BUSY + change + ONCE + "agent.publish(); print(WORLD.snapshots)", environment(agent, tmp_path))

    # THEN
    (told,) = published(tmp_path)
    assert 0 == snapshots
    assert reason in told["errors"]["fragmentation"]
    assert "fragmentation" not in told["devices"][0]


def test_older_torch_is_asked_in_its_own_way(agent: Path, tmp_path: Path) -> None:
    """Before torch 2.11 a snapshot takes no word about traces, and earlier ones no pool either."""
    # GIVEN
    change = "torch.cuda.memory_snapshot = lambda {0}: 0\n"
    tell = ONCE + "agent.publish(); print(WORLD.snapshots)"

    # WHEN
    actual = [
        run(BUSY + change.format(parameters) + tell, environment(agent, tmp_path / str(number)))
        for number, parameters in enumerate(("mempool_id=None", ""))
    ]

    # THEN
    segments = [published(tmp_path / name)[0]["devices"][0]["fragmentation"]["segments"] for name in ("0", "1")]
    assert ([1, 1], [4, 4]) == (actual, segments)


def test_files_of_agents_long_gone_are_removed(agent: Path, tmp_path: Path) -> None:
    """A new agent clears away what is an hour old, and keeps what is younger or not the agents'."""
    # GIVEN
    ages = {
        "agent-1-1.json": 4000,
        ".agent-2-2.json.new": 4000,
        "agent-3-3.json": 60,
        "oom-1-1-0.json": 4000,
        "notes": 10**7,
    }
    for name, age_seconds in ages.items():
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (time.time() - age_seconds,) * 2)

    # WHEN
    run(BUSY + ONCE + "agent.publish()", environment(agent, tmp_path))

    # THEN
    left = {name for name in names_in(tmp_path) if name in ages}
    assert {"agent-3-3.json", "oom-1-1-0.json", "notes"} == left


def test_command_line_is_not_shown(agent: Path, tmp_path: Path) -> None:
    """Of a process only its short name is told: keys stand on command lines."""
    # WHEN
    run(BUSY + ONCE + "agent.publish()  # --api-key=secret", environment(agent, tmp_path))

    # THEN
    (file,) = tmp_path.iterdir()
    assert "secret" not in file.read_text()
    assert json.loads(file.read_text())["process"]["title"].startswith("python")


def test_other_servers_get_it_from_sitecustomize(agent: Path, tmp_path: Path) -> None:
    """With its folder on the path every Python process publishes, and the sitecustomize it hides runs as before."""
    # GIVEN
    (tmp_path / "distribution").mkdir()
    (tmp_path / "distribution" / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'\n")
    told = environment(agent, tmp_path / "published")
    told["PYTHONPATH"] = os.pathsep.join(
        (str(agent / "sitecustomize"), told["PYTHONPATH"], str(tmp_path / "distribution"))
    )

    # WHEN
    actual = run("import json, os, threading; print(json.dumps([os.environ['SEEN'], threading.active_count()]))", told)

    # THEN
    assert ["yes", 2] == actual


def test_any_python_that_serves_models_can_read_it() -> None:
    """Nothing in it is written in a syntax that Python 3.9 does not know."""
    for path in Path(kvdiag.agent.__file__).parent.glob("*.py"):
        # WHEN / THEN
        ast.parse(path.read_text(), feature_version=OLDEST_PYTHON)
