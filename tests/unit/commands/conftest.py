"""Runs of the simulated scenarios: 25 s each, nearly all of it waiting, so they are made side by side, once each."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.cli import Result, kvdiag

HERE = Path(__file__).parent

OPTIONS: Mapping[str, tuple[str, ...]] = {"salt-ignored": ("--isolation",)}
"""Further options of a scenario's run, for what the four steps do not show."""

AT_ONCE = 5
"""Runs side by side: each takes an eighth of a core."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run of a scenario, the trace that it recorded, and its report."""

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
    """Group the tests that share the runs."""
    for item in items:
        if HERE in item.path.parents and _scenario_of(item) is not None:
            item.add_marker(pytest.mark.xdist_group("scenarios"))


def _scenario_of(item: pytest.Item) -> str | None:
    if isinstance(item, pytest.Function) and "run" in item.fixturenames:
        return str(item.callspec.params["story"])
    return None


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """The runs that the chosen tests need, by scenario, each begun as soon as there is a place for it."""
    folder = tmp_path_factory.mktemp("scenarios")

    def made(story: str) -> Run:
        trace, report = folder / f"{story}.jsonl", folder / f"{story}.html"
        written = ("--record", str(trace), "--report", str(report), *OPTIONS.get(story, ()))
        return Run(kvdiag("run", "--simulate", story, *written, "--output", "json"), trace, report)

    wanted = dict.fromkeys(story for item in request.session.items if (story := _scenario_of(item)) is not None)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {story: pool.submit(made, story) for story in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def run(story: str, runs: dict[str, Future[Run]]) -> Run:
    """The run of the test's scenario."""
    return runs[story].result()
