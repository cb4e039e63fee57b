"""The stories' runs: half a minute each, mostly of waiting, so that the tests of one share its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.cli import Result, kvdiag

HERE = Path(__file__).parent

OPTIONS: Mapping[str, tuple[str, ...]] = {"salt-ignored": ("--isolation",)}
"""What a story is run with besides: what the four steps do not show."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run of a story, the trace that it recorded, and its report."""

    result: Result
    trace: Path
    report: Path

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document that it printed."""
        return self.result.document


@pytest.fixture(autouse=True)
def no_profiles_of_this_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of these tests know nothing of what was once measured here."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "no-profiles"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests of one story, which share its run."""
    for item in items:
        if HERE in item.path.parents and isinstance(item, pytest.Function) and "run" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(f"story-{item.callspec.params['story']}"))


@pytest.fixture(scope="session")
def story_runs() -> dict[str, Run]:
    """The runs that were made so far, by their story."""
    return {}


@pytest.fixture
def run(story: str, story_runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of the test's story, made once."""
    if story not in story_runs:
        trace = tmp_path_factory.mktemp("stories") / f"{story}.jsonl"
        report = trace.with_suffix(".html")
        files = ("--record", str(trace), "--report", str(report), *OPTIONS.get(story, ()))
        story_runs[story] = Run(kvdiag("run", "--simulate", story, *files, "--output", "json"), trace, report)
    return story_runs[story]
