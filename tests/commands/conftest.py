"""The stories' runs, which mostly wait: begun with the first test of the session, and asked for by its last ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvdiag.sim import STORIES
from tests.e2e.cli import RUN_LIMIT_SECONDS, Result, kvdiag

AT_ONCE = 2
"""Story runs side by side: a third one on two cores would show in the others' readings."""

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run of a story, and the trace that it recorded."""

    result: Result
    trace: Path

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document that it printed."""
        return self.result.document


@pytest.fixture(autouse=True)
def no_profiles_of_this_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of these tests know nothing of what was once measured here."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "no-profiles"))


STORY_RUNS = pytest.StashKey["StoryRuns"]()


class StoryRuns:
    """One run of each story that a test asks for, some side by side, beside the tests."""

    def __init__(self, stories: Iterable[str]) -> None:
        """Begin."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvdiag-stories-")
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._runs = {story: self._pool.submit(self._run, story) for story in stories}

    def _run(self, story: str) -> Run:
        trace = Path(self._folder.name) / f"{story}.jsonl"
        return Run(kvdiag("run", "--simulate", story, "--record", str(trace), "--output", "json"), trace)

    def result(self, story: str) -> Run:
        """One run, awaited; raises what it raised."""
        return self._runs[story].result(RUN_LIMIT_SECONDS * len(STORIES))

    def close(self) -> None:
        """Begin no other, and wait for those that run."""
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the stories last; all else stays in its random order."""
    items.sort(key=lambda item: HERE in item.path.parents and _is_of_a_story(item))


def _is_of_a_story(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "run" in item.fixturenames


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the runs that some test of this session asks for."""
    asking = [
        item
        for item in session.items
        if isinstance(item, pytest.Function) and HERE in item.path.parents and _is_of_a_story(item)
    ]
    if asking and not session.config.option.collectonly:
        stories = dict.fromkeys(str(item.callspec.params["story"]) for item in asking)
        session.config.stash[STORY_RUNS] = StoryRuns(stories)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End with the session."""
    if STORY_RUNS in config.stash:
        config.stash[STORY_RUNS].close()


@pytest.fixture
def run(request: pytest.FixtureRequest, story: str) -> Run:
    """The run of the test's story, awaited."""
    return request.config.stash[STORY_RUNS].result(story)
