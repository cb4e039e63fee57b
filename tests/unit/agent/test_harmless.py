"""Failures of the agent never affect the server."""

import ast
import signal
from collections import Counter
from pathlib import Path

import pytest

import kvdiag.agent
from tests.unit.agent.subject import BUSY, ONCE, environment, names_in, outcome, published, run

OLDEST_PYTHON = (3, 9)
NO_SYSTEM_CALLS = ("fspath", "getpid", "sysconf")
"""Of the functions of `os` that a publication calls."""


def test_cuda_is_never_touched(agent: Path, tmp_path: Path) -> None:
    """Before the server has initialised CUDA nothing that would do it is called, and never anything that waits."""
    early = "import json, os, torch; from torch.world import WORLD\n" + ONCE + "agent.publish(); agent.publish()\n"
    later = "torch.cuda.init(); WORLD.allocate(2**20); agent.publish(); agent.publish()\n"
    report = "import kvdiag_agent.report; kvdiag_agent.report.memory_report()\n"
    tell = "print(json.dumps([WORLD.touches, len(WORLD.observers), WORLD.snapshots]))"

    before = run(early + report + tell, environment(agent, tmp_path))
    after = run(early + later + report + tell, environment(agent, tmp_path))

    assert [[], 0, 0] == before
    assert [[], 1, 2] == after


def test_links_are_not_followed(agent: Path, tmp_path: Path) -> None:
    """Links laid where the agent's files are going to be leave what they point to as it is."""
    (tmp_path / "victim").write_text("mine")
    lay = (
        "from kvdiag_agent.process import identity\n"
        "who = identity(); name = f\"agent-{who['pid']}-{who['start_ticks']}.json\"\n"
        "for each in (name, f'.{name}.new'): os.symlink('victim', os.path.join(os.environ['KVDIAG_AGENT_DIR'], each))\n"
    )

    run(BUSY + lay + ONCE + "agent.publish()", environment(agent, tmp_path))

    assert "mine" == (tmp_path / "victim").read_text()
    assert [False, False] == [path.is_symlink() for path in sorted(tmp_path.iterdir())]


DAMAGE = {
    # Moved first: a file published while the folder is emptied would keep it from being removed.
    "folder gone": "import os, shutil; os.rename(folder, folder + '-gone'); shutil.rmtree(folder + '-gone', True)",
    # The agent recreates the folder as soon as it is removed, unless the file takes its place first.
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
    """With a dependency of the agent removed, it prints nothing, the server continues and its thread stays alive."""
    program = (
        BUSY + "folder = os.environ['KVDIAG_AGENT_DIR']\n"
        "import threading\nfrom kvdiag_agent import thread\n"
        "agent = thread.Agent(folder, 0.01); agent.start()\n"
        "while agent._sequence < 2: time.sleep(0.01)\n"
        f"{damage}\n"
        "end = time.monotonic() + 0.3\n"
        "while time.monotonic() < end: sum(range(1000))\n"
        "print(json.dumps([each.name for each in threading.enumerate()]))"
    )

    assert ["MainThread", "kvdiag-agent"] == run(program, environment(agent, tmp_path / "published"))


def test_what_fails_is_told_and_the_rest_is_there(agent: Path, tmp_path: Path) -> None:
    """A part that torch fails to report is named with its error; the other parts are complete, and it recovers."""
    program = (
        BUSY + ONCE + "agent.publish(); kept = torch.cuda.memory_stats_as_nested_dict\n"
        "del torch.cuda.memory_stats_as_nested_dict; agent.publish()\n"
        "name, = os.listdir(os.environ['KVDIAG_AGENT_DIR'])\n"
        "told = json.load(open(os.path.join(os.environ['KVDIAG_AGENT_DIR'], name)))\n"
        "torch.cuda.memory_stats_as_nested_dict = kept; agent.publish(); print(json.dumps(told))"
    )

    without = run(program, environment(agent, tmp_path))

    (healed,) = published(tmp_path)
    assert "AttributeError" in without["errors"]["torch"]
    assert without["process"]["resident_bytes"] > 0
    assert "torch" not in healed["errors"]


def test_what_fails_of_one_device_is_told_beside_another(agent: Path, tmp_path: Path) -> None:
    """One device that can be read does not hide why the one before it cannot, and is read all the same."""
    # A process with two GPUs, the first of which does not report its identity
    program = (
        BUSY + "WORLD.devices = 2; WORLD.segment((4 * MIB, ACTIVE), device=1)\n"
        "told = torch.cuda.get_device_properties\n"
        "torch.cuda.get_device_properties = lambda index: told(index) if index else told.no_such\n"
        + ONCE
        + "agent.publish(); print('0')"
    )

    run(program, environment(agent, tmp_path))

    (told,) = published(tmp_path)
    assert "AttributeError" in told["errors"]["uuid"]
    assert [None, "11111111-2222-3333-4444-555555555555"] == [device["uuid"] for device in told["devices"]]


def test_what_comes_back_is_told_no_longer(agent: Path, tmp_path: Path) -> None:
    """An error is in the publication for as long as it is so, that of the black box too."""
    program = (
        BUSY + "kept = torch.cuda.is_initialized; del torch.cuda.is_initialized\n" + ONCE + "agent.publish()\n"
        "name, = os.listdir(os.environ['KVDIAG_AGENT_DIR'])\n"
        "told = json.load(open(os.path.join(os.environ['KVDIAG_AGENT_DIR'], name)))\n"
        "torch.cuda.is_initialized = kept; agent.publish(); print(json.dumps(sorted(told['errors'])))"
    )

    without = run(program, environment(agent, tmp_path))

    (healed,) = published(tmp_path)
    assert ["black_box", "initialised", "torch"] == without
    assert {"black_box", "initialised", "torch"}.isdisjoint(healed["errors"])


def test_full_disk_leaves_the_last_whole_file(agent: Path, tmp_path: Path) -> None:
    """Where nothing more can be written, what was published stays readable, and nothing unfinished stays behind."""
    # A limit on the size of files, beyond which a write fails as on a full disk
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

    actual = run(program, environment(agent, tmp_path))

    (told,) = published(tmp_path)
    assert ("OSError", 1, 1) == (actual, told["sequence"], len(names_in(tmp_path)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("WORLD.segments *= 9000", "too many to inspect"),
        ("torch.cuda.memory_snapshot = lambda mempool_id=None: 0; WORLD.history = True", "a memory history"),
    ],
    ids=["many blocks", "history"],
)
def test_no_snapshot_is_taken_that_would_hold_the_server_up(
    agent: Path, tmp_path: Path, change: str, reason: str
) -> None:
    """With too many blocks, or with an allocation history included, the split is omitted and the reason reported."""
    snapshots = run(BUSY + change + ONCE + "agent.publish(); print(WORLD.snapshots)", environment(agent, tmp_path))
    (told,) = published(tmp_path)
    assert 0 == snapshots
    assert reason in told["errors"]["fragmentation"]
    assert "fragmentation" not in told["devices"][0]


def test_publication_is_few_calls_and_none_that_waits(agent: Path, tmp_path: Path) -> None:
    """One file of bounded size by a dozen calls of the system: nothing is flushed to a disk, locked or listed."""
    program = (
        BUSY
        + "for _ in range(300): WORLD.segment((60 * MIB, FREE), (4 * MIB, ACTIVE))\n"
        + ONCE
        + (
            "agent.publish(); called = []\n"
            "def counted(name, function): return lambda *a, **k: (called.append(name), function(*a, **k))[1]\n"
            "for name, function in list(vars(os).items()):\n"
            "    if type(function) is type(len): setattr(os, name, counted(name, function))\n"
            "agent.publish(); print(json.dumps(called))"
        )
    )

    called = run(program, environment(agent, tmp_path))

    (file,) = tmp_path.iterdir()
    calls = Counter(name for name in called if name not in NO_SYSTEM_CALLS)
    assert {"open": 3, "close": 3, "stat": 2, "read": 1, "fchmod": 1, "write": 1, "rename": 1} == calls
    assert file.stat().st_size < 8192


def test_agent_that_does_not_start_says_so_once(agent: Path, tmp_path: Path) -> None:
    """A server whose Python lacks a module that the agent needs continues, with one line in its log."""
    program = BUSY + "sys.modules['kvdiag_agent.thread'] = None; import kvdiag_agent; kvdiag_agent.register(); print(1)"
    out, said = outcome(program, environment(agent, tmp_path))
    (line,) = said.splitlines()
    assert "1\n" == out
    assert line.startswith("kvdiag agent in process ")
    assert " does not start: ModuleNotFoundError: " in line


def test_agent_that_cannot_publish_says_so_once(agent: Path) -> None:
    """A folder that cannot be written gives one line in the server's log, however often the agent tries."""
    program = BUSY + (
        "from kvdiag_agent import thread; agent = thread.Agent(os.environ['KVDIAG_AGENT_DIR'], 0.01); agent.start()\n"
        "while agent._sequence < 5: time.sleep(0.01)"
    )

    _, said = outcome(program, environment(agent, Path("/sys/kvdiag-agent")))

    (line,) = said.splitlines()
    assert " cannot publish in /sys/" in line
    assert "Error: [Errno " in line


def test_signals_are_left_to_the_server(agent: Path, tmp_path: Path) -> None:
    """A server that waits for a signal in a thread of its own, all others blocking it, gets it."""
    program = BUSY + (
        "import signal, threading; from kvdiag_agent import thread\n"
        "agent = thread.Agent(os.environ['KVDIAG_AGENT_DIR'], 0.01); agent.start()\n"
        "while agent._sequence < 1: time.sleep(0.01)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.kill(os.getpid(), signal.SIGTERM)\n"
        "while agent._sequence < 5: time.sleep(0.01)\n"
        "print(int(signal.sigwait({signal.SIGTERM})))"
    )
    assert signal.SIGTERM == run(program, environment(agent, tmp_path))


def test_folder_is_found_from_wherever_the_server_goes(agent: Path, tmp_path: Path) -> None:
    """A path that was given relative to where the server began stays the same one."""
    (tmp_path / "begin").mkdir()
    program = (
        f"import os; os.chdir({str(tmp_path / 'begin')!r}); os.environ['KVDIAG_AGENT_DIR'] = 'told'\n"
        + BUSY
        + "import kvdiag_agent; kvdiag_agent.register(); os.chdir('/')\n"
        "from kvdiag_agent.thread import _agents; _agents[0].publish()"
    )

    run(program + "; os._exit(0)", environment(agent, None))

    assert 1 == len(published(tmp_path / "begin" / "told"))


def test_any_python_that_serves_models_can_read_it() -> None:
    """Nothing in it is written in a syntax that Python 3.9 does not know."""
    paths = sorted(Path(kvdiag.agent.__file__).parent.glob("*.py"))
    parsed = [ast.parse(path.read_text(), feature_version=OLDEST_PYTHON) for path in paths]
    assert "thread.py" in {path.name for path in paths}
    assert all(module.body for module in parsed)
