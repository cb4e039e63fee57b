"""How the agent gets hold of vLLM's scheduler: by its import, or late, and in no other process."""

from pathlib import Path

import pytest

from tests.unit.agent.subject import environment, run

SCHEDULER = """
class Scheduler:
    def __init__(self, size):
        self.size = size
"""
ASYNC = """
from vllm.v1.core.sched.scheduler import Scheduler
class AsyncScheduler(Scheduler):
    def __init__(self, size):
        super().__init__(size + 1)
"""
MADE = """
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
made = AsyncScheduler(size=5)
"""
WATCH = """
from kvdiag_agent.schedulers import VLLM
VLLM.watch()
"""
SHOW = """
import json, sys
from kvdiag_agent.schedulers import VLLM
found = VLLM.newest()
finders = [type(one).__name__ for one in sys.meta_path if type(one).__module__.startswith("kvdiag")]
print(json.dumps([None if found is None else found.size, found is globals().get("made"), len(finders)]))
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A package with the scheduler's class, and one derived from it, where vLLM has them."""
    folder = tmp_path / "server" / "vllm" / "v1" / "core" / "sched"
    folder.mkdir(parents=True)
    for part in (folder, *list(folder.parents)[:3]):
        (part / "__init__.py").touch()
    (folder / "scheduler.py").write_text(SCHEDULER)
    (folder / "async_scheduler.py").write_text(ASYNC)
    return tmp_path / "server"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (WATCH + MADE + SHOW, [6, True, 1]),
        (MADE.replace("made =", "first =") + WATCH + MADE + SHOW, [6, True, 0]),
        (WATCH + WATCH + SHOW, [None, True, 1]),
        (WATCH + MADE + "del made" + SHOW, [None, True, 1]),
        (WATCH + MADE + "VLLM.forget()" + SHOW, [None, False, 1]),
    ],
    ids=["before its import", "after its import", "never imported", "given up", "forked"],
)
def test_scheduler_is_found(agent: Path, vllm: Path, program: str, expected: list[object]) -> None:
    """The newest one, of a derived class too, by a weak reference; one finder waits for it, and stays."""
    env = environment(agent, None)
    assert expected == run(program, {**env, "PYTHONPATH": f"{vllm}:{env['PYTHONPATH']}"})


def test_finder_after_it_is_asked(agent: Path, vllm: Path) -> None:
    """Another tool's finder finds a module that Python's own does not, as if the agent were not there."""
    program = WATCH + (
        "import importlib.abc, importlib.util, json, sys\n"
        "class Own(importlib.abc.MetaPathFinder, importlib.abc.Loader):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'vllm.v1.core.sched.scheduler': return importlib.util.spec_from_loader(name, self)\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, module): module.Scheduler = type('Scheduler', (), {})\n"
        "sys.meta_path.insert(1, Own())\n"
        "from vllm.v1.core.sched.scheduler import Scheduler\n"
        "print(json.dumps(Scheduler.__name__))"
    )
    (vllm / "vllm" / "v1" / "core" / "sched" / "scheduler.py").unlink()
    env = environment(agent, None)
    assert "Scheduler" == run(program, {**env, "PYTHONPATH": f"{vllm}:{env['PYTHONPATH']}"})


def test_constructor_that_fails_is_unchanged(agent: Path, vllm: Path) -> None:
    """Its own error reaches the caller."""
    program = (
        WATCH
        + """
import json
from vllm.v1.core.sched.scheduler import Scheduler
try:
    Scheduler()
except TypeError as error:
    print(json.dumps([type(error).__name__, "size" in str(error), Scheduler.__init__.__name__]))
"""
    )
    env = environment(agent, None)
    assert ["TypeError", True, "__init__"] == run(program, {**env, "PYTHONPATH": f"{vllm}:{env['PYTHONPATH']}"})
