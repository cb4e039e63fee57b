"""The stories' runs, which mostly wait: begun with the first test of this folder, and asked for by its last ones."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put this folder's tests together, those of the stories last; all else stays in its random order."""
    ours = [item for item in items if HERE in item.path.parents]
    ours.sort(key=_is_of_a_story)
    others = [item for item in items if HERE not in item.path.parents]
    items[:] = [*others, *ours]


def _is_of_a_story(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "run" in item.fixturenames


@pytest.fixture(scope="package", autouse=True)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """One run of each story that a test asks for."""
    folder = tmp_path_factory.mktemp("stories")
    asking = [item for item in request.session.items if isinstance(item, pytest.Function) and _is_of_a_story(item)]
    stories = dict.fromkeys(str(item.callspec.params["story"]) for item in asking)

    def run(story: str) -> Run:
        trace = folder / f"{story}.jsonl"
        return Run(kvdiag("run", "--simulate", story, "--record", str(trace), "--output", "json"), trace)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            yield {story: pool.submit(run, story) for story in stories}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def run(runs: dict[str, Future[Run]], story: str) -> Run:
    """The run of the test's story, waited for."""
    return runs[story].result(RUN_LIMIT_SECONDS * len(STORIES))
