"""The scenarios' plays, which mostly wait: begun with the first test of the session, and asked for by its last ones."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.scenarios import SCENARIOS
from tests.gpu.stand_in import begin, library
from tests.nvml_stand_in.stand_in import compiler
from tests.support import require

LIMIT_SECONDS = 300.0
AT_ONCE = 2
"""Programs side by side: they wait for the agent's seconds most of the time."""

NICE = 5
"""They have minutes, and the tests beside them have not."""

ALL = tuple(each.name for each in SCENARIOS)
"""For a test that awaits every one."""

PLAYS = pytest.StashKey["Plays"]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What one program left."""

    code: int
    table: str
    figures: Mapping[str, Any]
    out: Path


class Plays:
    """Each scenario by a program of its own on a stand-in GPU of its own, beside the tests."""

    def __init__(self, names: Iterable[str]) -> None:
        """Begin."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvdiag-gpu-")
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._over = False
        self._libraries = self._pool.submit(library, Path(self._folder.name) / "libraries")
        self._plays = {name: self._pool.submit(self._play, name) for name in names}

    def _play(self, name: str) -> Played:
        out = Path(self._folder.name) / name
        libraries = self._libraries.result()
        with self._lock:
            if self._over:
                raise RuntimeError("the session is over")
            process = begin(libraries, out, "--brief", name)
            self._processes.append(process)
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        try:
            table, said = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            process.kill()
            process.wait()
        figures = out / "figures.json"
        assert figures.exists(), f"exit code {process.returncode}: {said}"
        return Played(code=process.returncode, table=table, figures=json.loads(figures.read_text()), out=out)

    def result(self, name: str) -> Played:
        """One play, awaited; raises what it raised."""
        return self._plays[name].result()

    def close(self) -> None:
        """Begin no other, and end those that run."""
        with self._lock:
            self._over = True
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()


def pytest_configure(config: pytest.Config) -> None:
    """Make this folder's own marker known."""
    config.addinivalue_line("markers", "scenarios(name, ...): awaits the background plays of these scenarios")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what awaits a play last; all else stays in its random order."""
    items.sort(key=lambda item: item.get_closest_marker("scenarios") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the plays that some test of this session awaits, in the order in which they are awaited."""
    wanted = dict.fromkeys(
        name for item in session.items for mark in item.iter_markers("scenarios") for name in mark.args
    )
    if wanted and compiler() is not None and not session.config.option.collectonly:
        session.config.stash[PLAYS] = Plays(wanted)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End with the session."""
    if PLAYS in config.stash:
        config.stash[PLAYS].close()


@pytest.fixture
def played(request: pytest.FixtureRequest) -> Mapping[str, Played]:
    """The plays that the test's mark names, awaited."""
    require(compiler() is not None, "a C compiler (cc)")
    mark = request.node.get_closest_marker("scenarios")
    return {name: request.config.stash[PLAYS].result(name) for name in mark.args}
