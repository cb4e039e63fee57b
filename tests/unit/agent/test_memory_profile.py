"""Profiles that the agent makes in its own process, asked for as `kvdiag agent profile` does."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdiag.diagnosis.growth.profile_conclusion import conclude
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.profiling import Profiled, profile_processes
from kvdiag.model import ProfileKind
from kvdiag.sources.agents.agent_profiles import MAX_TRACING_BYTES, ProfileFolder
from tests.unit.agent.subject import environment, run
from tests.unit.agent.test_publishing import started, wait_for

SECONDS = 2.0
MIB = 2**20

SERVER = """
import ctypes, os, sys, time, torch, kvdiag_agent
kvdiag_agent.register()
kept = []
native = ctypes.CDLL(None)
native.malloc.restype = ctypes.c_void_p
def handle():
    [bytes(1000) for _ in range(50)]
    work()
    time.sleep(0.002)
"""
"""A server's process whose requests allocate and free; `work` is what a test adds to each."""

KEEPS = SERVER + "def work(): kept.append(bytearray(64 * 1024))\nwhile True: handle()\n"
KEEPS_NATIVE = SERVER + (
    "def work():\n    block = native.malloc(64 * 1024)\n    ctypes.memset(block, 1, 64 * 1024)\nwhile True: handle()\n"
)
KEEPS_NOTHING = SERVER + "def work(): pass\nwhile True: handle()\n"
KEEPS_SMALL = SERVER + "def work(): kept.extend(object() for _ in range(2000))\nwhile True: handle()\n"
KEEPS_ON_DEVICE = SERVER + (
    "from torch.world import ACTIVE, MIB, WORLD\n"
    "torch.cuda.init()\nWORLD.segment((512 * MIB, ACTIVE))\n"
    "def work():\n    len(WORLD.segments) < 5000 and WORLD.segment((MIB, ACTIVE))\nwhile True: handle()\n"
)


@contextmanager
def serving(program: str, agent: Path, published: Path, **env: str) -> Iterator[ProfileFolder]:
    """A server's process that publishes, and the folder to ask in."""
    published.mkdir(mode=0o700, exist_ok=True)
    with started(program, environment(agent, published, env=env)):
        folder = ProfileFolder(published)
        try:
            wait_for(lambda: bool(folder.processes()))
            yield folder
        finally:
            folder.close()


def profiled(folder: ProfileFolder, kind: ProfileKind = "host", seconds: float = SECONDS) -> Profiled:
    """The profile of the one process that publishes."""
    (one,) = asyncio.run(profile_processes(folder, folder.processes(), kind, seconds))
    return one


def test_line_that_keeps_memory_is_named(agent: Path, tmp_path: Path) -> None:
    """With its file and line first, and all of the bytes that the process gained; what comes and goes is not."""
    with serving(KEEPS, agent, tmp_path) as folder:
        profile = profiled(folder).profile
    assert profile is not None
    conclusion, largest = conclude(profile), profile.stacks[0]
    keeping = next(place for place, line in enumerate(KEEPS.splitlines(), start=1) if "kept.append" in line)
    assert ("named", "<string>", keeping) == (conclusion.answer, largest.frames[0].file, largest.frames[0].line)
    assert conclusion.process_growth_bytes is not None
    assert largest.bytes >= 0.9 * conclusion.process_growth_bytes > 5 * MIB


def test_memory_below_python_is_called_native(agent: Path, tmp_path: Path) -> None:
    """The process grows, and no line of Python holds what it gained."""
    with serving(KEEPS_NATIVE, agent, tmp_path) as folder:
        profile = profiled(folder).profile
    assert profile is not None
    conclusion = conclude(profile)
    assert ("native", True) == (conclusion.answer, (conclusion.process_growth_bytes or 0) > 5 * MIB)


def test_process_that_keeps_nothing_is_flat(agent: Path, tmp_path: Path) -> None:
    """Buffers of requests that ended are no growth."""
    with serving(KEEPS_NOTHING, agent, tmp_path) as folder:
        profile = profiled(folder).profile
    assert profile is not None
    assert "flat" == conclude(profile).answer


def test_blocks_on_the_device_are_named(agent: Path, tmp_path: Path) -> None:
    """By torch's memory history, with the function; blocks from before it have no stack and are not counted."""
    with serving(KEEPS_ON_DEVICE, agent, tmp_path) as folder:
        profile = profiled(folder, "device").profile
    assert profile is not None
    conclusion = conclude(profile)
    assert ("named", "work") == (conclusion.answer, profile.stacks[0].frames[0].function)
    assert profile.last.allocated_bytes is not None
    assert 0 < profile.last.traced_bytes <= profile.last.allocated_bytes - 512 * MIB


def test_device_is_not_profiled_without_one(agent: Path, tmp_path: Path) -> None:
    """A process that has not initialised CUDA is not made to, and says why it was not profiled."""
    with serving(KEEPS_NOTHING, agent, tmp_path) as folder:
        assert profiled(folder, "device").profile is None


def test_many_small_objects_end_the_tracing(agent: Path, tmp_path: Path) -> None:
    """The traces stay within their limit, and what grew until then is named."""
    with serving(KEEPS_SMALL, agent, tmp_path) as folder:
        profile = profiled(folder, seconds=60.0).profile
    assert profile is not None
    # The limit is looked at five times a second.
    assert (True, True) == (profile.tracing_full, profile.last.tracing_bytes < 8 * MAX_TRACING_BYTES)
    assert "named" == conclude(profile).answer


def test_second_profile_is_refused(agent: Path, tmp_path: Path) -> None:
    """While one is in progress; after it, another one is made."""
    with serving(KEEPS, agent, tmp_path) as folder:
        (process,) = folder.processes()
        first = folder.ask(process, "host", 30.0)
        with pytest.raises(KvdiagError):
            folder.ask(process, "host", 1.0)
        folder.withdraw(first)
        wait_for(lambda: profiled(folder, seconds=0.5).profile is not None)


def test_profiler_of_the_servers_own_is_left_alone(agent: Path, tmp_path: Path) -> None:
    """A server that traces its allocations itself continues to."""
    with serving(KEEPS, agent, tmp_path, PYTHONTRACEMALLOC="1") as folder:
        assert profiled(folder).profile is None


def test_process_that_exits_has_no_profile(agent: Path, tmp_path: Path) -> None:
    """The reason is given at once, not after the time that the profile would have taken."""
    dies = KEEPS.replace("while True: handle()", "end = time.monotonic() + 2.5\nwhile time.monotonic() < end: handle()")
    with serving(dies, agent, tmp_path) as folder:
        found = profiled(folder, seconds=300.0)
    assert (None, True) == (found.profile, found.problem is not None)


def test_child_of_a_traced_process_is_not_traced(agent: Path, tmp_path: Path) -> None:
    """A fork copies the parent's tracing, and the thread that would end it is not copied."""
    program = SERVER + (
        "import tracemalloc\n"
        "def work(): pass\n"
        "while not tracemalloc.is_tracing(): handle()\n"
        "child = os.fork()\n"
        f"file = os.path.join({str(tmp_path)!r}, 'parent' if child else 'child')\n"
        "open(file, 'w').write(str(tracemalloc.is_tracing()))\n"
        "os._exit(0) if not child else None\n"
        "while True: handle()\n"
    )
    with serving(program, agent, tmp_path / "published") as folder:
        assert profiled(folder).profile is not None
    assert ("False", "True") == tuple((tmp_path / name).read_text() for name in ("child", "parent"))


REFUSED = (
    {"kvdiag_profile_request": 2},
    {"seconds": 1e9},
    {"seconds": "60"},
    {"seconds": True},
    {"max_tracing_bytes": 2**40},
    {"kind": "both"},
    {"id": "../../etc"},
    {"id": 7},
)


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_impossible_request_is_ignored(agent: Path, change: dict[str, object]) -> None:
    """What is in the folder may be anybody's who may write there: nothing is traced for more than its limits."""
    asked = {"kvdiag_profile_request": 1, "id": "a1", "kind": "host", "seconds": 1.0, "max_tracing_bytes": 1000}
    program = (
        "import json\nfrom kvdiag_agent.memory_profile import request\n"
        "def refused(text):\n    try: request(text)\n    except ValueError: return True\n    return False\n"
        f"texts = {json.dumps(asked | change).encode()!r}, {json.dumps(asked).encode()!r}\n"
        "print(json.dumps([refused(text) for text in texts]))"
    )
    assert [True, False] == run(program, environment(agent, None))


def test_request_by_a_link_is_not_followed(agent: Path, tmp_path: Path) -> None:
    """A link in the folder makes the agent read no other file."""
    with serving(KEEPS, agent, tmp_path / "published") as folder:
        (process,) = folder.processes()
        elsewhere = tmp_path / "request.json"
        elsewhere.write_text("{}")
        (tmp_path / "published" / f"profile-request-{process.pid}-{process.start_ticks}.json").symlink_to(elsewhere)
        with pytest.raises(KvdiagError):
            folder.ask(process, "host", 1.0)
        sequence = process.sequence
        wait_for(lambda: folder.processes()[0].sequence >= sequence + 2)
        assert not list((tmp_path / "published").glob(f"profile-{process.pid}-*"))
